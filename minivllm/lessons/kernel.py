"""What the lesson on kernels needs beside the kernels: what a program reads, a run wherever there is none, and costs.

A kernel is compiled or interpreted, and Triton decides which when it is imported. So the interpreter has a process of
its own, `python -m minivllm.lessons.kernel`, and tensors go there and back through files.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from minivllm.kernels.launch import Launch, choose_launch
from minivllm.model.attention import AttentionMetadata
from minivllm.model.attention import paged_attention as reference
from minivllm.model.inputs import PassRow, pack_rows

HAS_TRITON = find_spec("triton") is not None
ROOT = Path(__file__).resolve().parents[2]
SHARED_LIMIT = 101_376  # bytes, of a card of the sm_89 family: tiles that fit there fit on the larger ones too


@dataclass(frozen=True)
class KernelCall:
    """What the paged attention kernel is called with.

    Attributes:
        q: `[num_tokens, num_heads, head_dim]`.
        keys: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        values: like `keys`.
        metadata: of the pass.
        launch: sizes of the tiles.
        window: keys that a token may see; None for all.
        num_splits: parts of every request's keys.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata
    launch: Launch
    window: int | None = None
    num_splits: int = 1

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.keys.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Query tiles (as many as there can be), KV heads, splits."""
        return len(self.q) // self.launch.block_q + len(self.metadata.seq_lens), self.keys.shape[2], self.num_splits

    def to(self, device: torch.device) -> "KernelCall":
        """The same call on another device."""
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        moved = replace(self.metadata, **{name: getattr(self.metadata, name).to(device) for name in names})
        tensors = {name: getattr(self, name).to(device) for name in ("q", "keys", "values")}
        return replace(self, metadata=moved, **tensors)


def make_call(q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, num_splits: int = 1) -> KernelCall:
    """A call with the tiles that the package would choose on a small card."""
    launch = choose_launch(q.shape[2], q.shape[1] // keys.shape[2], q.itemsize, SHARED_LIMIT, metadata.max_query_len)
    return KernelCall(q.contiguous(), keys, values, metadata, launch, num_splits=num_splits)


def random_call(
    rows: Sequence[tuple[int, int]],
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    seed: int = 0,
) -> KernelCall:
    """Random keys and values in scattered blocks of a pool that is full of NaN elsewhere, in float32.

    Args:
        rows: of each request (its query tokens, all its tokens); the queries are the last of its tokens.
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        head_dim: numbers per head.
        block_size: slots per block; three blocks of the pool stay free.
        seed: of the numbers and of the places.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for _, length in rows]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    keys, values = torch.full((2, len(order), block_size, num_kv_heads, head_dim), torch.nan)
    packed = []
    for (num_queries, length), count in zip(rows, counts, strict=True):
        table, order = order[:count], order[count:]
        packed.append(PassRow([0] * length, length - num_queries, length, table))
        slots = [table[p // block_size] * block_size + p % block_size for p in range(length)]
        for memory in (keys, values):
            memory.flatten(0, 1)[slots] = torch.randn(length, num_kv_heads, head_dim, generator=generator)
    metadata, ids, _ = pack_rows(packed, block_size, torch.device("cpu"))
    return make_call(torch.randn(len(ids), num_heads, head_dim, generator=generator), keys, values, metadata)


@dataclass(frozen=True)
class ProgramReads:
    """What one program of the attention kernel works on.

    Attributes:
        request: whose keys it reads.
        rows: of each row of its query tile (token of the pass, query head); None for a spare row.
        row_positions: of each row, where its token stands in its text; None for a spare row.
        key_tiles: positions of the keys in each tile, in the order in which the tiles are read.
        slot_tiles: the slots where they lie.
    """

    request: int
    rows: tuple[tuple[int, int] | None, ...]
    row_positions: tuple[int | None, ...]
    key_tiles: tuple[tuple[int, ...], ...]
    slot_tiles: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> set[int]:
        """All slots that it reads, of its KV head."""
        return {slot for tile in self.slot_tiles for slot in tile}


def program_reads(call: KernelCall, tile: int, kv_head: int, split: int = 0) -> ProgramReads | None:
    """What the program at a place of the grid reads, by the kernel's own arithmetic; None if it has nothing to do.

    Args:
        call: what the kernel is called with.
        tile: place in the grid: the query tile.
        kv_head: the KV head.
        split: the split of the keys.
    """
    block_q, tile_n, ratio, rows = call.launch.block_q, call.launch.tile_n, call.ratio, range(call.launch.block_m)
    starts, seq_lens = call.metadata.query_start_loc.tolist(), call.metadata.seq_lens.tolist()
    request = max(i for i in range(len(seq_lens)) if starts[i] // block_q + i <= tile)
    start, seq_len = starts[request], seq_lens[request]
    first_query = (tile - start // block_q - request) * block_q
    num_queries = min(starts[request + 1] - start, seq_len)
    if first_query >= num_queries:
        return None

    queries, heads = [first_query + row // ratio for row in rows], [kv_head * ratio + row % ratio for row in rows]
    used = [row < block_q * ratio and queries[row] < num_queries for row in rows]
    context = seq_len - num_queries
    last = context + min(first_query + block_q, num_queries)
    first = max(context + first_query - call.window + 1, 0) // tile_n if call.window else 0
    per_split = -(-(-(-last // tile_n) - first) // call.num_splits)
    begin = first + split * per_split
    ends = range(begin, min(begin + per_split, -(-last // tile_n)))
    key_tiles = [tuple(range(n * tile_n, min((n + 1) * tile_n, last))) for n in ends]
    table, size = call.metadata.block_table[request].tolist(), call.keys.shape[1]
    return ProgramReads(
        request,
        tuple((start + queries[row], heads[row]) if used[row] else None for row in rows),
        tuple(context + queries[row] if used[row] else None for row in rows),
        tuple(key_tiles),
        tuple(tuple(table[p // size] * size + p % size for p in keys) for keys in key_tiles),
    )


def run_kernel(*calls: KernelCall) -> list[tuple[Tensor, Tensor]]:
    """Runs the real kernel: on the GPU if there is one, else in Triton's interpreter. Without Triton, the reference.

    Returns:
        Of each call the output, like `q`, and the log-sum-exp, `[num_tokens, num_heads]`; both on the CPU.

    Raises:
        RuntimeError: the interpreter failed; the message has what it said.
    """
    if not HAS_TRITON:
        return [reference(call.q, call.keys, call.values, call.metadata, call.window) for call in calls]
    if torch.cuda.is_available():
        return [(out.cpu(), lse.cpu()) for out, lse in (_launch(call.to(torch.device("cuda"))) for call in calls)]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("calls.pt", "results.pt")]
        torch.save(calls, files[0])
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        command = [sys.executable, "-m", "minivllm.lessons.kernel", *files]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"Triton's interpreter ended with {done.returncode}:\n{done.stderr[-2000:].strip()}")
        return torch.load(files[1])


def where_it_runs() -> str:
    """One sentence: where `run_kernel` runs the kernel on this machine."""
    if not HAS_TRITON:
        return "There is no Triton here (it exists for Linux only): you see the torch reference instead of the kernel."
    if torch.cuda.is_available():
        return f"The kernel is compiled and runs on the GPU, {torch.cuda.get_device_name()}."
    return "There is no GPU here: Triton's interpreter runs the kernel, line by line, in a process of its own."


def _launch(call: KernelCall) -> tuple[Tensor, Tensor]:
    from minivllm.kernels.paged_attention import paged_attention

    m = call.metadata
    where = (m.query_start_loc, m.seq_lens, m.block_table)
    return paged_attention(call.q, call.keys, call.values, *where, call.launch, call.window, call.num_splits)


@dataclass(frozen=True)
class AttentionCost:
    """The least work of attention in one layer.

    Attributes:
        flops: multiplications and additions of the two products, for the keys that may be seen.
        kv_bytes: keys and values, each read once.
        query_bytes: queries read and outputs written.
    """

    flops: int
    kv_bytes: int
    query_bytes: int

    @property
    def intensity(self) -> float:
        """Flops per byte moved."""
        return self.flops / (self.kv_bytes + self.query_bytes)

    @property
    def gather_bytes(self) -> int:
        """Bytes that move where keys and values are first copied: read, written, and read again."""
        return 3 * self.kv_bytes + self.query_bytes


def attention_cost(
    rows: Sequence[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> AttentionCost:
    """Cost of attention for requests with (query tokens, all tokens), numbers of `itemsize` bytes."""
    seen = sum(n * (length - n) + n * (n + 1) // 2 for n, length in rows)
    return AttentionCost(
        flops=4 * num_heads * head_dim * seen,
        kv_bytes=2 * sum(length for _, length in rows) * num_kv_heads * head_dim * itemsize,
        query_bytes=2 * sum(n for n, _ in rows) * num_heads * head_dim * itemsize,
    )


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: bandwidth, dense bfloat16 rate, multiprocessors, and the data sheet's address."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    num_processors: int
    source: str


def cards() -> list[Card]:
    """The cards of data/cards.json."""
    return [Card(**card) for card in json.loads((ROOT / "data" / "cards.json").read_text())]


def measure_decode(device: torch.device, batch: int = 256, context: int = 8192) -> tuple[float, float, float]:
    """Measures a decode pass of the kernel (9 query and 3 KV heads of 64, bfloat16) beside a copy on the same device.

    Returns:
        Flops per byte of the pass, bytes per second of the kernel, bytes per second of the copy (read and written).
    """
    from minivllm.lessons.machine import best_seconds  # brings transformers, which the interpreter need not wait for

    per_request = -(-context // 16)
    blocks = torch.randperm(batch * per_request).view(batch, per_request).tolist()
    metadata, _, _ = pack_rows([PassRow([0] * context, context - 1, context, table) for table in blocks], 16, device)
    keys, values, q = (
        torch.randn(*shape, dtype=torch.bfloat16, device=device)
        for shape in ((batch * per_request, 16, 3, 64),) * 2 + ((batch, 9, 64),)
    )
    call = make_call(q, keys, values, metadata)
    cost, target, times = attention_cost([(1, context)] * batch, 9, 3, 64, 2), torch.empty_like(keys), 10
    kernel_s = best_seconds(lambda: [_launch(call) for _ in range(times)], device, repeats=5) / times
    copy_s = best_seconds(lambda: [target.copy_(keys) for _ in range(times)], device, repeats=5) / times
    return cost.intensity, (cost.kv_bytes + cost.query_bytes) / kernel_s, 2 * keys.nbytes / copy_s


if __name__ == "__main__":
    torch.save([_launch(call) for call in torch.load(sys.argv[1], weights_only=False)], sys.argv[2])
