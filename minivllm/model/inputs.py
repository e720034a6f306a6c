"""The tensors of a pass, made on the host from the rows to compute, and brought to the device in few transfers.

Each tensor has a buffer that stays where it is from pass to pass. On a card, a pass writes into pinned memory and
copies from there without waiting; since the addresses stay the same, a recorded CUDA graph of a decode pass can be
replayed on them, with padded rows up to the batch that was recorded. On a CPU both sides are one memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.model.attention import AttentionMetadata


class PassRow(NamedTuple):
    """The tokens of one request that a pass computes.

    Attributes:
        token_ids: all its tokens.
        start: position of the first to compute.
        end: position behind the last.
        block_ids: its block table, which covers `end` tokens.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    block_ids: Sequence[int]


class CpuGpuBuffer:
    """An int64 tensor on the host and its twin on the device.

    Attributes:
        np: the host's side, as numpy sees it; on a card pinned memory.
        gpu: the device's side; on a CPU the same memory.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_card = device.type == "cuda"
        self.cpu = torch.zeros(shape, dtype=torch.int64, pin_memory=on_card)
        self.np = self.cpu.numpy()
        self.gpu = torch.zeros(shape, dtype=torch.int64, device=device) if on_card else self.cpu

    def copy_to_gpu(self, count: int) -> Tensor:
        """Sends the first `count` entries on their way, and returns them as they will be on the device."""
        if self.gpu is not self.cpu:
            self.gpu[:count].copy_(self.cpu[:count], non_blocking=True)
        return self.gpu[:count]


class PassInputs:
    """Turns rows into the tensors of a pass. What it returned last is overwritten by the next pass."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size, self.device = block_size, device
        self._buffers: dict[str, CpuGpuBuffer] = {}
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # the copies of the last pass

    def reserve(self, num_tokens: int, num_reqs: int, max_blocks: int) -> None:
        """Makes the buffers large enough for such a pass. Those that are stay where they are; others move.

        Args:
            num_tokens: tokens of the pass, padding included.
            num_reqs: rows, padding included.
            max_blocks: entries of the longest block table.
        """
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("input_ids", "positions", "slot_mapping"), (num_tokens,))
        shapes |= {"query_start_loc": (num_reqs + 1,), "seq_lens": (num_reqs,), "block_table": (num_reqs, max_blocks)}
        for name, shape in shapes.items():
            there = self._buffers.get(name)
            have = there.np.shape if there else (0,) * len(shape)
            if any(now < need for now, need in zip(have, shape, strict=True)):
                grown = (now if now >= need else max(need, 2 * now) for now, need in zip(have, shape, strict=True))
                self._buffers[name] = CpuGpuBuffer(tuple(grown), self.device)

    def pack(self, rows: Sequence[PassRow], num_padded: int = 0) -> tuple[AttentionMetadata, Tensor, Tensor]:
        """The rows of a pass behind each other.

        Args:
            rows: at least one.
            num_padded: rows to add that belong to nobody: one token each, of length 0 and with slot -1, so that
                nothing is read or stored for them.

        Returns:
            The metadata, and the ids and positions of the tokens, `[num_tokens]`; padding comes last, with 0 for both.

        Raises:
            AssertionError: a block table, or the tokens, end before their row does.
        """
        starts = np.array([row.start for row in rows])
        ends = np.array([row.end for row in rows])
        num_blocks = np.array([len(row.block_ids) for row in rows])
        short = np.flatnonzero(num_blocks * self.block_size < ends)
        assert not len(short), f"{ends[short[0]]} tokens in {num_blocks[short[0]]} blocks of {self.block_size}"
        unknown = [row.end for row in rows if len(row.token_ids) < row.end]
        assert not unknown, f"{unknown[0]} tokens are to be computed and fewer are known"
        num_reqs, num_tokens, longest = len(rows), int((ends - starts).sum()), int(num_blocks.max())
        self.reserve(num_tokens + num_padded, num_reqs + num_padded, longest)
        if self._sent is not None:
            self._sent.synchronize()  # of a pass that was given up, they may still be under way
        host = {name: buffer.np for name, buffer in self._buffers.items()}
        _fill(host, rows, starts, ends, self.block_size, longest)
        _pad(host, num_tokens, num_reqs, num_padded)
        sizes = dict.fromkeys(("input_ids", "positions", "slot_mapping"), num_tokens + num_padded)
        sizes |= dict.fromkeys(("seq_lens", "block_table"), num_reqs + num_padded)
        sizes["query_start_loc"] = num_reqs + num_padded + 1
        sent = {name: self._buffers[name].copy_to_gpu(count) for name, count in sizes.items()}
        if self._sent is not None:
            self._sent.record()
        input_ids, positions = sent.pop("input_ids"), sent.pop("positions")
        sent["block_table"] = sent["block_table"][:, :longest]
        longest_query, longest_text = int((ends - starts).max()), int(ends.max())
        metadata = AttentionMetadata(**sent, max_query_len=longest_query, max_seq_len=longest_text)
        return metadata, input_ids, positions


def _fill(
    host: dict[str, np.ndarray],
    rows: Sequence[PassRow],
    starts: np.ndarray,
    ends: np.ndarray,
    block_size: int,
    longest: int,
) -> None:
    """Writes the rows into the host's side of the buffers; block tables up to the longest one, with 0 behind theirs."""
    num_reqs, counts = len(rows), ends - starts
    query_start_loc, table = host["query_start_loc"], host["block_table"]
    query_start_loc[0] = 0
    np.cumsum(counts, out=query_start_loc[1 : num_reqs + 1])
    host["seq_lens"][:num_reqs] = ends
    for index, row in enumerate(rows):
        first, last = query_start_loc[index : index + 2]
        host["input_ids"][first:last] = row.token_ids[row.start : row.end]
        table[index, : len(row.block_ids)] = row.block_ids
        table[index, len(row.block_ids) : longest] = 0
    num_tokens = int(query_start_loc[num_reqs])
    owner = np.repeat(np.arange(num_reqs), counts)
    positions = np.arange(num_tokens) + (starts - query_start_loc[:num_reqs])[owner]
    host["positions"][:num_tokens] = positions
    host["slot_mapping"][:num_tokens] = table[owner, positions // block_size] * block_size + positions % block_size


def _pad(host: dict[str, np.ndarray], num_tokens: int, num_reqs: int, num_padded: int) -> None:
    """Adds rows of one token behind what was filled in."""
    tokens, reqs = slice(num_tokens, num_tokens + num_padded), slice(num_reqs, num_reqs + num_padded)
    host["query_start_loc"][num_reqs + 1 : num_reqs + num_padded + 1] = num_tokens + 1 + np.arange(num_padded)
    for name, where in {"input_ids": tokens, "positions": tokens, "seq_lens": reqs, "block_table": reqs}.items():
        host[name][where] = 0
    host["slot_mapping"][tokens] = -1


def pack_rows(
    rows: Sequence[PassRow], block_size: int, device: torch.device
) -> tuple[AttentionMetadata, Tensor, Tensor]:
    """The tensors of a single pass, in memory of their own; see `PassInputs.pack`."""
    return PassInputs(block_size, device).pack(rows)
