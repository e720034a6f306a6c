"""How many blocks the KV cache has, and why.

Knows the memory of the device and nothing of requests. The choice is a value that can be read and printed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minivllm.config import GIB, EngineConfig


@dataclass(frozen=True)
class KVCacheSize:
    """The size of a KV cache.

    Attributes:
        num_blocks: blocks in it.
        block_size: tokens per block.
        bytes_per_block: memory that a block takes, over all layers.
        reason: where the number comes from, in words.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    reason: str

    @property
    def num_slots(self) -> int:
        """Tokens that it holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.num_blocks * self.bytes_per_block

    def __str__(self) -> str:
        size = f"{self.num_bytes / GIB:.2f} GiB" if self.num_bytes >= GIB else f"{self.num_bytes / 2**20:.1f} MiB"
        return f"{self.num_blocks} blocks of {self.block_size} tokens ({self.num_slots} tokens, {size}): {self.reason}"


def choose_cache_size(
    config: EngineConfig, bytes_per_token: int, device: torch.device, profile: Callable[[], None]
) -> KVCacheSize:
    """Decides how many blocks there are.

    The number given, or what fits into the memory given; else 1 GiB on a CPU. On a GPU the engine may use
    gpu_memory_utilization of the card in all: what is left of that beside other users of the card and beside the
    largest pass that can come (which is run once to see) is the cache.

    Args:
        config: the options.
        bytes_per_token: memory of one token's keys and values, over all layers.
        device: where the cache will be.
        profile: runs the largest pass that can come; only called on a GPU without a given size.

    Raises:
        ValueError: the memory does not hold a single block, or more is asked for than the device has.
    """
    size, per_block = config.block_size, bytes_per_token * config.block_size
    asked = (config.num_kv_blocks or 0) * per_block or config.kv_cache_memory_bytes or 0
    if asked > (total := total_memory(device)):
        raise ValueError(
            f"the KV cache would take {asked} bytes and the {device.type} has {total}: lower num_kv_blocks (a block "
            f"takes {per_block} bytes) or kv_cache_memory_bytes"
        )
    if config.num_kv_blocks is not None:
        return KVCacheSize(config.num_kv_blocks, size, per_block, "as num_kv_blocks says")
    if config.kv_cache_memory_bytes is not None:
        available, reason = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cpu":
        available, reason = GIB, "kv_cache_memory_bytes is not set, which means 1 GiB on a CPU"
    else:
        available, reason = _left_on_gpu(config.gpu_memory_utilization, device, profile)
    if available < per_block:
        raise ValueError(
            f"a block of {size} tokens takes {per_block} bytes of keys and values and there are {max(0, available)} "
            f"({reason}): raise kv_cache_memory_bytes or gpu_memory_utilization, or take a smaller block_size"
        )
    return KVCacheSize(available // per_block, size, per_block, reason)


def total_memory(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_on_gpu(utilization: float, device: torch.device, profile: Callable[[], None]) -> tuple[int, str]:
    """Bytes that are left for the cache, and how that comes about."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    reason = (
        f"gpu_memory_utilization {utilization:g} of {total / GIB:.1f} GiB, less {peak / GIB:.1f} GiB "
        f"for the model and the largest pass and {others / GIB:.1f} GiB that others use"
    )
    return int(total * utilization) - peak - others, reason
