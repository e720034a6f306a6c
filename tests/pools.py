"""Rows of a pass whose blocks lie scattered over a pool."""

from collections.abc import Sequence

import torch

from minivllm.model.inputs import PassRow

SPARE = 3  # blocks of the pool that nobody has


def scattered(
    rows: Sequence[tuple[int, int]], block_size: int, num_shared: int = 0
) -> tuple[list[PassRow], list[list[int]], int]:
    """For rows (query tokens, all tokens): what goes into a pass, the slots of each one's tokens, and the size of the
    pool in blocks. The first `num_shared` blocks of all rows are the same. Drawn from torch's own generator."""
    needed = [-(-length // block_size) for _, length in rows]
    num_blocks = sum(needed) + SPARE
    free, packed, slots = torch.randperm(num_blocks).tolist(), [], []
    for (num_queries, length), count in zip(rows, needed, strict=True):
        table, free = free[:count], free[count:]
        table[:num_shared] = packed[0].block_ids[:num_shared] if packed else table[:num_shared]
        packed.append(PassRow([0] * length, length - num_queries, length, table))
        slots.append([table[p // block_size] * block_size + p % block_size for p in range(length)])
    return packed, slots, num_blocks
