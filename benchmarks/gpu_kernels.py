"""Measures the Triton kernels on keys and values of real models' shapes, each checked against plain torch first.

Knows nothing of tables or of the command line. With sizes that are small enough it runs on a CPU too, in Triton's
interpreter. Keys and values are there several times, as a model has them in each layer: none is still in the L2 cache
when its turn comes.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_timing import Bench, Measured, WrongResult
from minivllm.kernels.backend import attend
from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm.model.attention import AttentionMetadata
from minivllm.model.attention import paged_attention as reference

BLOCK_SIZE = 16
MIN_CALLS, MAX_LAYERS = 8, 256  # in a run
CHECKED = 64  # tokens at each end of a prompt
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-4}
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class HeadShape(NamedTuple):
    """The attention heads of a model."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


def kv_bytes(heads: HeadShape, num_tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of some tokens in one layer."""
    return 2 * num_tokens * heads.num_kv_heads * heads.head_dim * itemsize


def decode_bytes(heads: HeadShape, context: int, batch: int, itemsize: int) -> int:
    """Bytes that must move when each of `batch` requests attends with one token: keys and values, queries, output."""
    return kv_bytes(heads, context * batch, itemsize) + 2 * batch * heads.num_heads * heads.head_dim * itemsize


def write_bytes(heads: HeadShape, num_tokens: int, itemsize: int) -> int:
    """Bytes that must move when keys and values go into their slots: read once, written once, and the slot numbers."""
    return 2 * kv_bytes(heads, num_tokens, itemsize) + 8 * num_tokens


def causal_flops(heads: HeadShape, num_tokens: int) -> int:
    """Operations of causal attention: two products, each of a multiplication and an addition per query and key seen."""
    return 4 * heads.num_heads * heads.head_dim * (num_tokens * (num_tokens + 1) // 2)


def layers_beyond(cache_bytes: int, layer_bytes: int) -> int:
    """Layers that together are four times as large as a cache."""
    return max(1, min(MAX_LAYERS, -(-4 * cache_bytes // layer_bytes)))


def measure_copy(bench: Bench, num_bytes: int) -> Measured:
    """The copy of a large tensor, read and write counted; the best of all samples."""
    num_bytes = min(num_bytes, bench.free_bytes() // 4)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device).fill_(1)
    target = torch.empty_like(source)
    sample = bench.timer(lambda: target.copy_(source))
    return Measured("", f"{num_bytes:,} bytes", 2 * num_bytes, min(sample() for _ in range(3 * bench.rounds)))


def slots_of(blocks: Tensor, num_tokens: int) -> Tensor:
    """The slots of a text of `num_tokens` in its blocks, `[num_tokens]`."""
    return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=blocks.device)).flatten()[:num_tokens]


class Case:
    """Requests of one length that attend with their last tokens, over blocks scattered in a pool, in several layers.

    Values lie in [-1, 1], and so does every output. Queries are long, so that few keys of each head count: the outputs
    do not fade to zero in a long text, where the tolerance would hide anything, and a missing part of the keys shows.
    """

    def __init__(
        self, bench: Bench, heads: HeadShape, context: int, batch: int = 1, num_queries: int = 1, num_layers: int = 1
    ) -> None:
        device, dtype = bench.device, bench.dtype
        self.heads, self.context, self.batch, self.num_queries = heads, context, batch, num_queries
        self.num_layers = num_layers
        blocks_each = -(-context // BLOCK_SIZE)
        shape = (num_layers, batch * blocks_each, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        torch.manual_seed(0)
        self.keys = torch.empty(shape, dtype=dtype, device=device).normal_()
        self.values = torch.empty(shape, dtype=dtype, device=device).uniform_(-1, 1)
        q_shape = (batch * num_queries, heads.num_heads, heads.head_dim)
        self.q = torch.empty(q_shape, dtype=dtype, device=device).normal_(std=4)
        self.block_table = torch.randperm(shape[1], device=device).view(batch, blocks_each)
        self.whole = self.metadata(range(batch), [context] * batch, num_queries)

    def attend(self, layer: int) -> Tensor:
        """Our kernel, launched as the engine launches it."""
        return attend(self.q, self.keys[layer], self.values[layer], self.whole)[0]

    @property
    def num_calls(self) -> int:
        """Calls in a run of `attend_in_turn`."""
        return max(MIN_CALLS, self.num_layers)

    def attend_in_turn(self) -> None:
        """One layer after the other."""
        for call in range(self.num_calls):
            self.attend(call % self.num_layers)

    def metadata(self, rows: Sequence[int], ends: Sequence[int], count: int) -> AttentionMetadata:
        """Of a pass in which each of some rows attends with the `count` tokens before its end."""
        device = self.q.device
        return AttentionMetadata(
            query_start_loc=torch.arange(len(rows) + 1, device=device) * count,
            seq_lens=torch.tensor(ends, device=device),
            block_table=self.block_table[list(rows)],
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
            max_query_len=count,
            max_seq_len=self.context,
        )

    def check(self) -> None:
        """Compares a few tokens with the reference: the first queries of the first request, the last of the last.

        Raises:
            WrongResult: they differ by more than rounding does.
        """
        count = min(self.num_queries, CHECKED)
        ends = (self.context - self.num_queries + count, self.context)
        firsts = (0, len(self.q) - count)
        tokens = torch.cat([torch.arange(first, first + count, device=self.q.device) for first in firsts])
        metadata = self.metadata((0, self.batch - 1), ends, count)
        expected = reference(self.q[tokens], self.keys[0], self.values[0], metadata)[0]
        off = (self.attend(0)[tokens].float() - expected.float()).abs().max().item()
        if not off <= TOLERANCE[self.q.dtype]:
            raise WrongResult(
                f"the attention kernel is wrong on this device: heads of {self.heads.model}, {self.batch} request(s) "
                f"of {self.context} tokens, {self.num_queries} of them new, {self.q.dtype}: it is off by {off:.3g} "
                f"from the reference, and {TOLERANCE[self.q.dtype]:g} is allowed"
            )


def measure_decode(
    bench: Bench, heads: HeadShape, context: int, batch: int, against_torch: bool = False
) -> Measured | None:
    """Attention of `batch` requests with one new token each; None where it does not fit."""
    layer_bytes = kv_bytes(heads, context * batch, bench.dtype.itemsize)
    num_layers = layers_beyond(bench.cache_bytes, layer_bytes)
    # The reference gathers keys and values, makes them float32, and brings them into the order of the product.
    checked = 4 * kv_bytes(heads, context * (batch if against_torch else 2), 4)
    if not bench.fits(num_layers * layer_bytes + checked):
        return None
    case = Case(bench, heads, context, batch, num_layers=num_layers)
    case.check()
    samples = [bench.timer(case.attend_in_turn)]
    if against_torch:
        samples.append(bench.wall(lambda: reference(case.q, case.keys[0], case.values[0], case.whole)))
    seconds, *rival = bench.medians(samples)
    work = decode_bytes(heads, context, batch, bench.dtype.itemsize)
    size = f"{context:,} × {batch}"
    return Measured(heads.model, size, work, seconds / case.num_calls, rival[0] if rival else None, "gather")


def measure_prefill(bench: Bench, heads: HeadShape, num_tokens: int) -> Measured | None:
    """Attention of one prompt, against torch's own over contiguous keys, in turns; None where it does not fit."""
    layer_bytes = kv_bytes(heads, num_tokens, bench.dtype.itemsize)
    score_bytes = 4 * heads.num_heads * num_tokens * min(num_tokens, CHECKED)
    if not bench.fits(20 * layer_bytes + 8 * score_bytes):
        return None
    case = Case(bench, heads, num_tokens, num_queries=num_tokens)
    case.check()
    slots = slots_of(case.block_table[0], num_tokens)
    k, v = (x[0].flatten(0, 1)[slots] for x in (case.keys, case.values))
    q, k, v = (x.transpose(0, 1).contiguous()[None] for x in (case.q, k, v))
    rival, fused = "fused", has_fused(q, k, v)
    if not fused:  # in float32, and on cards before sm_80, torch's fused kernels want as many KV heads as query heads
        k, v = (x.repeat_interleave(heads.num_heads // heads.num_kv_heads, 1) for x in (k, v))
        fused = has_fused(q, k, v)
        rival = "fused, KV heads repeated before" if fused else "unfused"

    def by_torch() -> None:
        for _ in range(case.num_calls):
            causal(q, k, v, fused)

    times = bench.medians([bench.timer(case.attend_in_turn), bench.timer(by_torch)])
    ours, theirs = (seconds / case.num_calls for seconds in times)
    return Measured(heads.model, f"{num_tokens:,}", causal_flops(heads, num_tokens), ours, theirs, rival)


def causal(q: Tensor, k: Tensor, v: Tensor, fused: bool) -> Tensor:
    """torch's causal attention, `[1, heads, num_tokens, head_dim]`; fused: by none but the kernels that store no
    scores, in torch's order of preference."""
    with sdpa_kernel(FUSED) if fused else nullcontext():
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def has_fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch has such a kernel for this device, type and shape."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says of each kernel why it can't
            causal(q, k, v, fused=True)
    except RuntimeError:  # "No available kernel"
        return False
    return True


def measure_write(bench: Bench, heads: HeadShape, num_tokens: int) -> Measured | None:
    """The KV write of a pass, keys by themselves and values as a part of the fused projection, as the model has them;
    None where it does not fit."""
    layer_bytes = kv_bytes(heads, num_tokens, bench.dtype.itemsize)
    num_layers = layers_beyond(bench.cache_bytes, 2 * layer_bytes)
    groups = heads.num_heads // heads.num_kv_heads + 2  # in the fused projection, in KV heads
    if not bench.fits(num_layers * layer_bytes * (2 + groups)):
        return None
    device, dtype, kv_heads = bench.device, bench.dtype, heads.num_kv_heads
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    pool = (num_layers, num_blocks, BLOCK_SIZE, kv_heads, heads.head_dim)
    torch.manual_seed(0)
    keys, values = (torch.zeros(pool, dtype=dtype, device=device) for _ in range(2))
    projected = torch.empty((num_layers, num_tokens, groups * kv_heads, heads.head_dim), dtype=dtype, device=device)
    v = projected.normal_()[:, :, -kv_heads:]
    k = torch.empty_like(v, memory_format=torch.contiguous_format).normal_()
    slots = slots_of(torch.randperm(num_blocks, device=device), num_tokens)
    num_calls = max(MIN_CALLS, num_layers)

    def run() -> None:
        for call in range(num_calls):
            layer = call % num_layers
            reshape_and_cache(k[layer], v[layer], keys[layer], values[layer], slots)

    run()
    for name, new, stored in (("keys", k, keys), ("values", v, values)):
        if not torch.equal(stored.flatten(1, 2)[:, slots], new):
            raise WrongResult(f"the KV write is wrong on this device: {num_tokens} {name} of {heads.model}, {dtype}")
    [seconds] = bench.medians([bench.timer(run)])
    work = write_bytes(heads, num_tokens, dtype.itemsize)
    return Measured(heads.model, f"{num_tokens:,}", work, seconds / num_calls)
