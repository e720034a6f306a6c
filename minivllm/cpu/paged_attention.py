"""Attention through the block table on a CPU: blocks are read where they lie, by loops that Numba compiles.

It is the Triton kernel once more, with a core in place of a multiprocessor: a unit of work is a few query tokens of one
request; it goes over the request's blocks with a running softmax. The reference is
`minivllm.model.attention.paged_attention`, which copies the keys and values together first.

A block's numbers are widened to float32 once, in scratch memory that stays in the core's cache, and serve all rows of
the unit, a row being a query token and a head. (Loops are written out: a view of an array costs more than the work on
it, and a loop whose length the compiler knows is unrolled before it could become vector instructions.)
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from minivllm.cpu.numbers import FASTMATH, as_numpy, exp, num_threads, one_at_a_time, widen
from minivllm.model.attention import AttentionMetadata, KVCache

TILE_QUERIES = 16  # query tokens of a unit
UNROLLED = 4  # keys whose values are added in one go


class NumbaAttention:
    """The `attend` of one pass over a paged cache, in place of `minivllm.model.attention.PagedAttention`."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, windows: tuple[int | None, ...]) -> None:
        self.keys, self.values, self.windows = as_numpy(cache.keys), as_numpy(cache.values), windows
        self.starts, self.lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy()
        # Contiguous whatever the width of the buffer behind it: the kernel is compiled for each layout.
        self.table, self.slots = np.ascontiguousarray(metadata.block_table.numpy()), metadata.slot_mapping.numpy()
        self.units, self.bounds = divide(self.starts, self.lens)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores the new keys and values of a layer, then attends; all shapes `[num_tokens, heads, head_dim]`."""
        out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        cache = (self.keys[layer], self.values[layer])
        where = (self.slots, self.table, self.starts, self.lens, self.units, self.bounds, self.windows[layer] or 0)
        with one_at_a_time:
            attention_kernel(out.numpy(), as_numpy(q), as_numpy(k), as_numpy(v), *cache, *where)
        return out.to(q.dtype)

    @classmethod
    def warm_up(cls, cache: KVCache, num_heads: int) -> None:
        """Compiles the kernel, or loads what was compiled before, and runs it on padded tokens: on one, whose heads are
        contiguous in the fused projection, and on two, whose are not."""
        num_kv_heads, head_dim = cache.keys.shape[3:]
        counts = (num_heads, num_kv_heads, num_kv_heads)
        for num_tokens in (1, 2):
            nothing = torch.zeros(num_tokens, dtype=torch.int64)
            metadata = AttentionMetadata(torch.arange(num_tokens + 1), nothing, nothing[:, None], nothing - 1)
            attend = cls(cache, metadata, (None,))
            attend(0, *torch.zeros(num_tokens, sum(counts), head_dim, dtype=cache.keys.dtype).split(counts, dim=1))


def divide(starts: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The work of a pass, dealt to the threads.

    Args:
        starts: `[num_reqs + 1]`, where each request's tokens begin.
        lens: `[num_reqs]`, tokens of each in the cache, the new ones included; 0 for a padded row.

    Returns:
        Units, `[num_units, 3]`: request, first query token in it, and query tokens; and `[num_threads + 1]`, where
        each thread's units begin: all have about the same number of scores to compute.
    """
    counts = np.where(lens > 0, starts[1:] - starts[:-1], 0)
    tiles = -(-counts // TILE_QUERIES)
    request = np.repeat(np.arange(len(lens)), tiles)
    first = TILE_QUERIES * (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    count = np.minimum(counts[request] - first, TILE_QUERIES)
    done = np.cumsum((lens[request] - counts[request] + first + count) * count)
    total, parts = done[-1] if len(done) else 0, num_threads()
    inner = np.searchsorted(done, np.arange(1, parts) * total / parts)
    return np.stack([request, first, count], axis=1), np.array([0, *inner, len(done)])


@njit(parallel=True, cache=True, nogil=True)
def attention_kernel(out, q, k, v, keys, values, slots, table, starts, lens, units, bounds, window):  # type: ignore[no-untyped-def]
    """Stores k and v, then fills `out` for all units.

    out, q: `[num_tokens, num_heads, head_dim]`; k, v: `[num_tokens, num_kv_heads, head_dim]`; keys, values:
    `[num_blocks, block_size, num_kv_heads, head_dim]`; window: keys that a token may see, 0 for all.
    """
    _store(k, keys, slots)
    _store(v, values, slots)
    for thread in prange(len(bounds) - 1):
        _attend(out, q, keys, values, table, starts, lens, units, bounds[thread], bounds[thread + 1], window)


@njit(inline="always")
def _store(new, memory, slots):  # type: ignore[no-untyped-def]
    """Writes each token's heads into its slot."""
    block_size = memory.shape[1]
    for token in range(len(slots)):
        if slots[token] >= 0:
            block, offset = slots[token] // block_size, slots[token] % block_size
            for head in range(memory.shape[2]):
                for d in range(memory.shape[3]):
                    memory[block, offset, head, d] = new[token, head, d]


@njit(fastmath=FASTMATH, cache=True)
def _attend(out, q, keys, values, table, starts, lens, units, first_unit, end_unit, window):  # type: ignore[no-untyped-def]
    """One thread's units."""
    _, block_size, num_kv_heads, dim = keys.shape
    num_heads, wide = q.shape[1], out.dtype
    padded = -(-block_size // UNROLLED) * UNROLLED
    queries, result = np.empty((2, TILE_QUERIES * num_heads, dim), wide)
    highest, total = np.empty((2, TILE_QUERIES * num_heads), wide)
    tile_k, tile_v = np.empty((2, num_kv_heads, padded, dim), wide)
    weights, shrinks = np.empty((num_heads, padded), wide), np.empty(num_heads, wide)
    for unit in range(first_unit, end_unit):
        request, first_query, num_queries = units[unit, 0], units[unit, 1], units[unit, 2]
        token = starts[request] + first_query
        position = lens[request] - (starts[request + 1] - starts[request]) + first_query  # of the first query
        last = position + num_queries
        _take_in(q, token, num_queries, queries, highest, total, result)
        first_block = max(position - window + 1, 0) // block_size if window > 0 else 0
        for index in range(first_block, (last + block_size - 1) // block_size):
            first_key = index * block_size
            _load_tile(keys, table[request, index], last - first_key, tile_k)
            _load_tile(values, table[request, index], last - first_key, tile_v)
            for i in range(num_queries):
                begin = max(position + i - window + 1 - first_key, 0) if window > 0 else 0
                end = min(position + i + 1 - first_key, block_size)
                if begin < end:
                    _score(queries, i, tile_k, begin, end, weights)
                    _weigh(i, weights, highest, total, shrinks)
                    _add(i, weights, shrinks, tile_v, result)
        for row in range(num_queries * num_heads):
            for d in range(dim):
                out[token + row // num_heads, row % num_heads, d] = result[row, d] / total[row]


@njit(fastmath=FASTMATH, inline="always")
def _take_in(q, token, num_queries, queries, highest, total, result):  # type: ignore[no-untyped-def]
    """Begins the rows of a unit: scaled queries, and nothing seen yet."""
    _, num_heads, dim = q.shape
    scale = queries.dtype.type(1.0 / np.sqrt(dim))
    for row in range(num_queries * num_heads):
        highest[row], total[row] = -np.inf, 0.0
        for d in range(dim):
            queries[row, d] = widen(q[token + row // num_heads, row % num_heads, d]) * scale
            result[row, d] = 0.0


@njit(fastmath=FASTMATH, inline="always")
def _load_tile(memory, block, stored, tile):  # type: ignore[no-untyped-def]
    """Widens the heads of a block into `[num_kv_heads, padded, dim]`; 0 where nothing is stored."""
    num_kv_heads, padded, dim = tile.shape
    stored = min(memory.shape[1], stored)
    for j in range(stored):
        for head in range(num_kv_heads):
            for d in range(dim):
                tile[head, j, d] = widen(memory[block, j, head, d])
    for j in range(stored, padded):
        for head in range(num_kv_heads):
            for d in range(dim):
                tile[head, j, d] = 0.0


@njit(fastmath=FASTMATH, inline="always")
def _score(queries, i, tile_k, begin, end, weights):  # type: ignore[no-untyped-def]
    """The scores of a token's heads, `[num_heads, padded]`; minus infinity where a key is not to be seen."""
    num_heads, padded = weights.shape
    ratio, dim = num_heads // tile_k.shape[0], tile_k.shape[2]
    for head in range(num_heads):
        row, kv_head = i * num_heads + head, head // ratio
        for j in range(begin, end):
            score = weights.dtype.type(0.0)
            for d in range(dim):
                score += queries[row, d] * tile_k[kv_head, j, d]
            weights[head, j] = score
        for j in range(begin):
            weights[head, j] = -np.inf
        for j in range(end, padded):
            weights[head, j] = -np.inf


@njit(fastmath=FASTMATH, inline="always")
def _weigh(i, weights, highest, total, shrinks):  # type: ignore[no-untyped-def]
    """The online softmax: scores become weights, and each head's factor for what it has so far goes to `shrinks`."""
    num_heads, padded = weights.shape
    for head in range(num_heads):
        peak = highest[i * num_heads + head]
        for j in range(padded):
            peak = max(peak, weights[head, j])
        shrinks[head] = peak
    for head in range(num_heads):
        row, peak = i * num_heads + head, shrinks[head]
        shrinks[head], highest[row] = exp(highest[row] - peak), peak
    for head in range(num_heads):
        row = i * num_heads + head
        peak, seen = highest[row], weights.dtype.type(0.0)
        for j in range(padded):
            weight = exp(weights[head, j] - peak)
            weights[head, j] = weight
            seen += weight
        total[row] = total[row] * shrinks[head] + seen


@njit(fastmath=FASTMATH, inline="always")
def _add(i, weights, shrinks, tile_v, result):  # type: ignore[no-untyped-def]
    """Adds the values of a tile by their weights to what each head has so far."""
    num_heads, padded = weights.shape
    ratio, dim = num_heads // tile_v.shape[0], tile_v.shape[2]
    for head in range(num_heads):
        row, kv_head, kept = i * num_heads + head, head // ratio, shrinks[head]
        for j in range(0, padded, UNROLLED):
            a, b, c, e = weights[head, j], weights[head, j + 1], weights[head, j + 2], weights[head, j + 3]
            for d in range(dim):
                result[row, d] = kept * result[row, d] + (
                    a * tile_v[kv_head, j, d]
                    + b * tile_v[kv_head, j + 1, d]
                    + c * tile_v[kv_head, j + 2, d]
                    + e * tile_v[kv_head, j + 3, d]
                )
            kept = weights.dtype.type(1.0)
