"""The Triton back end of attention: what the kernels are launched with, pass by pass."""

import os
from functools import lru_cache

import torch
from torch import Tensor

from minivllm.kernels.launch import MOST_SPLITS, SM_89, choose_launch, choose_splits
from minivllm.kernels.paged_attention import paged_attention
from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm.model.architecture import ModelConfig
from minivllm.model.attention import AttentionMetadata, KVCache

INTERPRETED = (SM_89, 1)  # what stands for a card's limits where there is none


class TritonAttention:
    """The `attend` of one pass over a paged cache, in place of `minivllm.model.attention.PagedAttention`."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, windows: tuple[int | None, ...]) -> None:
        self.cache, self.metadata, self.windows = cache, metadata, windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores the new keys and values of a layer, then attends; all shapes `[num_tokens, heads, head_dim]`."""
        keys, values, m = self.cache.keys[layer], self.cache.values[layer], self.metadata
        reshape_and_cache(k, v, keys, values, m.slot_mapping)
        return attend(q.contiguous(), keys, values, m, self.windows[layer])[0]

    @classmethod
    def warm_up(cls, cache: KVCache, num_heads: int) -> None:
        """Compiles every variant that a pass can need, and launches it on one padded row, so that what a card refuses
        it refuses before the first request."""
        keys, values, device = cache.keys[0], cache.values[0], cache.keys.device
        num_kv_heads, head_dim = keys.shape[2:]
        limit, _ = card_limits(device)
        row = torch.zeros(2, dtype=torch.int64, device=device)
        counts = (num_heads, num_kv_heads, num_kv_heads)
        q, k, v = torch.zeros(1, sum(counts), head_dim, dtype=keys.dtype, device=device).split(counts, dim=1)
        reshape_and_cache(k.contiguous(), v, keys, values, row[:1] - 1)  # v as it comes out of the fused projection
        q = q.contiguous()
        launches = {choose_launch(head_dim, num_heads // num_kv_heads, q.itemsize, limit, 2**size) for size in range(8)}
        for launch in launches:
            paged_attention(q, keys, values, row, row[:1], row[:1, None], launch)
        for size in range(MOST_SPLITS.bit_length()):  # of the merging kernel, and of launches with splits
            for launch in launches if size == 1 else list(launches)[:1]:
                paged_attention(q, keys, values, row, row[:1], row[:1, None], launch, num_splits=2**size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with the tiles and the splits that suit a pass; see `paged_attention`."""
    m, (num_tokens, num_heads, head_dim), num_kv_heads = metadata, q.shape, keys.shape[2]
    shared_limit, num_processors = card_limits(q.device)
    launch = choose_launch(head_dim, num_heads // num_kv_heads, q.itemsize, shared_limit, m.max_query_len)
    num_tiles = len(m.seq_lens)  # at least one of each request; how many more there are, only the card knows
    if m.max_query_len > launch.block_q:
        num_tiles += num_tokens // launch.block_q
    num_splits = choose_splits(num_tiles * num_kv_heads, m.max_seq_len, num_processors)
    return paged_attention(q, keys, values, m.query_start_loc, m.seq_lens, m.block_table, launch, window, num_splits)


@lru_cache
def card_limits(device: torch.device) -> tuple[int, int]:
    """Shared memory that a program may use, in bytes, and the number of multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED
    card = torch.cuda.get_device_properties(device)
    shared = getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block)
    return shared, card.multi_processor_count


def check_backend(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError where the kernels can't run."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"the Triton kernels compute in float16, bfloat16 or float32, and the dtype is {dtype}")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attention_backend is 'triton' and the device is {device.type}: the kernels need a CUDA card; leave "
            "attention_backend 'auto' (with TRITON_INTERPRET=1 in the environment they are interpreted, very slowly)"
        )
    shared_limit, _ = card_limits(device)
    choose_launch(config.head_dim, config.num_heads // config.num_kv_heads, dtype.itemsize, shared_limit)
