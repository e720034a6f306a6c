"""Attention through the block table on a CPU: blocks are read where they lie, by loops that Numba compiles.

It is the Triton kernel once more, with a core in place of a multiprocessor. A unit of work is a few query tokens that
see the same keys, with all their heads; it goes over the keys tile by tile with a running softmax. A tile's keys and
values are widened to float once and serve all rows of the unit, a row being a token and a head. Where several requests
begin with the same blocks, their tokens make units over these blocks first, and each goes on from there over its own.

The reference is `minivllm.model.attention.paged_attention`, which copies the keys and values together first.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import prange, types
from torch import Tensor

from minivllm.cpu.compiled import inlined, loop, num_threads, one_at_a_time, overload, parallel, start
from minivllm.cpu.llvm import LANES, PAIRS
from minivllm.cpu.vectors import (
    add_product,
    as_numpy,
    exp,
    fill,
    highest,
    keep,
    load,
    load_first,
    load_pair,
    load_pairs,
    prefetch,
    put,
    repeat,
    store,
    store_first,
    store_pair,
    take,
    total,
    transpose,
)
from minivllm.cpu.work import TILE_QUERIES, Work, divide
from minivllm.model.attention import AttentionMetadata, KVCache

TILE_KEYS = 32  # keys of a tile: a multiple of LANES
PAIR = 2 * LANES
ROWS = 4  # rows that are multiplied together, so that a loaded vector is used four times


class Places(NamedTuple):
    """Where the keys and values of a pass lie, and how far each token sees.

    Attributes:
        slots: `[num_tokens]`, where each new token's go; -1 for a padded one.
        table: `[num_reqs, max_blocks]`, the block tables.
        block_size: slots of a block.
        limits: `[num_tokens]`, the position before which a token's sight ends.
    """

    slots: np.ndarray
    table: np.ndarray
    block_size: int
    limits: np.ndarray


class State(NamedTuple):
    """Where the shared units leave what their rows have seen.

    Attributes:
        sums: of values, `[num_tokens, num_heads, head_dim]`.
        peaks: the highest scores, `[num_tokens, num_heads]`.
        totals: of the weights, likewise.
        factors: empty, and of the type in which queries and keys are multiplied: pairs of bfloat16, as they lie, where
            the processor does that, else like the sums.
    """

    sums: np.ndarray
    peaks: np.ndarray
    totals: np.ndarray
    factors: np.ndarray


class NumbaAttention:
    """The `attend` of one pass over a paged cache, in place of `minivllm.model.attention.PagedAttention`."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, windows: tuple[int | None, ...]) -> None:
        num_layers, _, _, self.num_kv_heads, head_dim = cache.keys.shape
        shape = (num_layers, -1, self.num_kv_heads, head_dim)
        self.keys, self.values = as_numpy(cache.keys).reshape(shape), as_numpy(cache.values).reshape(shape)
        self.starts, self.lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy()
        counts, slots = self.starts[1:] - self.starts[:-1], metadata.slot_mapping.numpy()
        first = np.repeat(self.lens - counts - self.starts[:-1], counts)  # position of a token less its index
        # Contiguous whatever the width of the buffer behind it: the kernel is compiled for each layout.
        table = np.ascontiguousarray(metadata.block_table.numpy())
        self.places = Places(slots, table, cache.keys.shape[2], first + np.arange(len(slots)) + 1)
        self.windows = windows
        self._work: dict[bool, tuple[Work, State]] = {}

    def _planned(self, sharing: bool, heads: np.ndarray) -> tuple[Work, State]:
        """The units of a layer, and memory for what the shared ones leave. A window keeps tokens from seeing what they
        share with others."""
        if sharing not in self._work:
            where = (self.starts, self.lens, self.places.table, self.places.block_size)
            work = divide(*where, self.num_kv_heads, num_threads(), sharing)
            num_tokens, num_heads, head_dim = heads.shape
            shape = (num_tokens if len(work.shared) else 0, num_heads - 2 * self.num_kv_heads)
            wide = np.float64 if heads.dtype == np.float64 else np.float32
            factors = np.empty(0, np.int32 if PAIRS and heads.dtype == np.uint16 else wide)
            state = State(np.empty((*shape, head_dim), wide), np.empty(shape, wide), np.empty(shape, wide), factors)
            self._work[sharing] = work, state
        return self._work[sharing]

    def plan(self, heads: np.ndarray) -> tuple[Any, ...]:
        """What `minivllm.cpu.decoder.all_layers` needs of a pass, for heads like these."""
        windows = np.array([window or 0 for window in self.windows])
        plans = (*self._planned(True, heads), *self._planned(not windows.any(), heads))
        return self.keys, self.values, self.places, plans, windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores the new keys and values of a layer, then attends; all shapes `[num_tokens, heads, head_dim]`."""
        out, heads = torch.zeros(q.shape, dtype=q.dtype), as_numpy(torch.cat((q, k, v), dim=1))
        window = self.windows[layer] or 0
        where = (self.keys[layer], self.values[layer], self.places, *self._planned(not window, heads), window)
        with one_at_a_time:
            attention_kernel(as_numpy(out), heads, *where)
        return out

    @classmethod
    def warm_up(cls, cache: KVCache, num_heads: int) -> None:
        """Compiles the kernel, or loads what was compiled before, and runs it on a padded token."""
        num_kv_heads, head_dim = cache.keys.shape[3:]
        counts, attend = (num_heads, num_kv_heads, num_kv_heads), cls(cache, padding(), (None,))
        heads = torch.zeros(1, sum(counts), head_dim, dtype=cache.keys.dtype).split(counts, dim=1)
        start(lambda: attend(0, *heads))


def padding() -> AttentionMetadata:
    """A pass of a padded token, which reads and stores nothing."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return AttentionMetadata(torch.arange(2), nothing, nothing[:, None], nothing - 1)


@parallel
def attention_kernel(out, heads, keys, values, places, work, state, window):
    """Stores the new keys and values, then fills `out` for all units.

    out: `[num_tokens, num_heads, head_dim]`; heads: queries, keys and values behind each other; keys, values:
    `[num_slots, num_kv_heads, head_dim]`; window: keys that a token may see, 0 for all.
    """
    num_heads, num_kv_heads = out.shape[1], keys.shape[1]
    _store(heads, num_heads, keys, places.slots)
    _store(heads, num_heads + num_kv_heads, values, places.slots)
    for saves in (True, False):
        units, bounds = (work.shared, work.shared_bounds) if saves else (work.units, work.bounds)
        if len(units):
            for thread in prange(len(bounds) - 1):
                part, scratch = (bounds[thread], bounds[thread + 1]), _scratch(out, keys, places, state)
                _attend(out, heads, keys, values, places, work.order, units, part, state, saves, window, scratch)


@inlined
def _store(heads, first, memory, slots):
    """Writes each token's heads into its slot."""
    for token in range(len(slots)):
        if slots[token] >= 0:
            for head in range(memory.shape[1]):
                for d in range(memory.shape[2]):
                    memory[slots[token], head, d] = heads[token, first + head, d]


@numba.njit(cache=True)
def _scratch(out, keys, places, state):
    """Memory for one thread. Rows of a KV head lie behind each other: row of a unit + `most` * head."""
    num_kv_heads, dim = keys.shape[1:]
    ratio, wide = out.shape[1] // num_kv_heads, state.sums.dtype
    most, padded = -(-TILE_QUERIES * ratio // ROWS) * ROWS, -(-dim // PAIR) * PAIR
    results = np.empty((num_kv_heads * most, padded), wide)
    peaks, totals = np.empty(num_kv_heads * most, wide), np.empty(num_kv_heads * most, wide)
    tile_v, weights = np.empty((TILE_KEYS, padded), wide), np.empty((most, TILE_KEYS), wide)
    kind, columns = state.factors.dtype, num_factors(state.factors, padded)
    queries = np.empty((num_kv_heads * most, columns), kind)
    rows_k, tile_k = np.empty((TILE_KEYS, columns), kind), np.empty((columns, TILE_KEYS), kind)
    ends, slot_of = np.empty(most, np.int64), np.empty(places.table.shape[1] * places.block_size, np.int64)
    return queries, results, peaks, totals, rows_k, tile_v, tile_k, weights, ends, slot_of


@loop
def _attend(out, heads, keys, values, places, order, units, part, state, saves, window, scratch):
    """One thread's units."""
    queries, results, peaks, totals, rows_k, tile_v, tile_k, weights, ends, slot_of = scratch
    ratio, most = out.shape[1] // keys.shape[1], weights.shape[0]
    limits, scale = places.limits, 1.0 / np.sqrt(heads.shape[2])
    for unit in range(part[0], part[1]):
        begin, end, request = units[unit, 0], units[unit, 1], units[unit, 2]
        first_key, end_key, first_head, end_head = units[unit, 3], units[unit, 4], units[unit, 5], units[unit, 6]
        rows, least = (end - begin) * ratio, limits[order[begin]]
        for head in range(first_head, end_head):
            for row in range(rows):
                token, query_head = order[begin + row // ratio], head * ratio + row % ratio
                ends[row] = min(limits[token], end_key)
                _begin(heads, token, query_head, head * most + row, queries)
                _resume(state, first_key > 0, token, query_head, head * most + row, results, peaks, totals)
        if window > 0:
            first_key = max(first_key, least - window)
        _find(places, request, first_key, end_key, slot_of)
        for first in range(first_key, end_key, TILE_KEYS):
            behind = max(first + 1 - least, 0) * ratio // ROWS * ROWS  # rows that see nothing of the tile
            for head in range(first_head, end_head):
                _load_rows(keys, slot_of, first, end_key, head, rows_k)
                if rows > ROWS:
                    _load_rows(values, slot_of, first, end_key, head, tile_v)
                for j in range(0, TILE_KEYS, LANES):
                    for d in range(0, rows_k.shape[1], LANES):
                        transpose(rows_k, (j, d), tile_k, (d, j))
                for row in range(behind, rows, ROWS):
                    _score(queries, head * most + row, tile_k, weights, row, scale)
                    for i in range(row, min(row + ROWS, rows)):
                        begin_lane = max(ends[i] - window - first, 0) if window > 0 else 0
                        _weigh(weights, i, begin_lane, ends[i] - first, head * most + i, results, peaks, totals)
                    if rows > ROWS:
                        _add(weights, row, tile_v, results, head * most + row)
                    else:  # used once only, as for a decode: not worth a copy
                        _add_in_place(weights, values, slot_of, first, end_key, head, results, head * most)
        for head in range(first_head, end_head):
            for row in range(rows):
                token, query_head = order[begin + row // ratio], head * ratio + row % ratio
                if saves:
                    _save(state, token, query_head, head * most + row, results, peaks, totals)
                else:
                    _finish(out, token, query_head, head * most + row, results, totals)


@inlined
def _begin(heads, token, query_head, row, queries):
    """A row's query."""
    dim = heads.shape[2]
    for d in range(0, dim, PAIR):
        put_factors(queries, row, heads, (token, query_head, d), dim - d)


@inlined
def _resume(state, resumes, token, query_head, row, results, peaks, totals):
    """What a row has seen so far: nothing, or what its shared unit saw."""
    for d in range(results.shape[1]):
        results[row, d] = 0.0
    peaks[row], totals[row] = -np.inf, 0.0
    if resumes:
        for d in range(state.sums.shape[2]):
            results[row, d] = state.sums[token, query_head, d]
        peaks[row], totals[row] = state.peaks[token, query_head], state.totals[token, query_head]


@inlined
def _find(places, request, first, end, slot_of):
    """The slots of a request's tokens, by position."""
    block_size = places.block_size
    for index in range(first // block_size, -(-end // block_size)):
        for offset in range(block_size):
            slot_of[index * block_size + offset] = places.table[request, index] * block_size + offset


@inlined
def _load_rows(memory, slot_of, first, end, head, tile):
    """A head's keys or values at positions `first` and following, as factors; 0 from `end` on. Those of the next tile
    are asked for already."""
    dim = memory.shape[2]
    for j in range(min(TILE_KEYS, end - first)):
        slot, later = slot_of[first + j], slot_of[min(first + j + TILE_KEYS, end - 1)]
        for d in range(0, dim, PAIR):
            prefetch(memory, (later, head, d))
            put_factors(tile, j, memory, (slot, head, d), dim - d)
    for j in range(end - first, TILE_KEYS):
        for d in range(0, tile.shape[1], LANES):
            store(tile, (j, d), fill(0, load(tile, (j, d))))


def num_factors(target: Any, padded: int) -> Any:
    """Columns that rows of so many numbers take among factors."""


@overload(num_factors, inline="always")
def _num_factors(target, padded):
    if target.dtype == types.int32:
        return lambda target, padded: padded // 2
    return lambda target, padded: padded


def put_factors(target: Any, row: int, source: Any, index: Any, left: int) -> None:
    """Writes the 32 numbers of `source` from an index on, of which `left` are there, to their place in a row of
    factors: as floats, or the pairs as they lie."""


@overload(put_factors, inline="always")
def _put_factors(target, row, source, index, left):
    if target.dtype == types.int32:
        return _put_pairs
    return _put_floats


def _put_pairs(target, row, source, index, left):
    store(target, (row, index[2] // 2), load_pairs(source, index, min(left // 2, LANES)))


def _put_floats(target, row, source, index, left):
    first, second = _take_pair(source, index, left)
    store(target, (row, index[2]), first)
    store(target, (row, index[2] + LANES), second)


@inlined
def _take_pair(array, index, left):
    """As `load_pair`, where only `left` numbers remain; 0 behind them."""
    if left >= PAIR:
        return load_pair(array, index)
    row, head, d = index
    return take(array, index, left), load_first(array, (row, head, d + LANES), left - LANES)


@inlined
def _product(a, row, b, column, count, sums):
    """`a[row : row + 4, :count] @ b[:count, column : column + LANES]`, added to four vectors."""
    for i in range(count):
        sums = _add_row(a, row, i, load(b, (i, column)), sums)
    return sums


@inlined
def _add_row(a, row, i, x, sums):
    """A column of `a` times a vector, added to four vectors."""
    first, second, third, fourth = sums
    first, second = add_product(repeat(a, (row, i)), x, first), add_product(repeat(a, (row + 1, i)), x, second)
    third, fourth = add_product(repeat(a, (row + 2, i)), x, third), add_product(repeat(a, (row + 3, i)), x, fourth)
    return first, second, third, fourth


@inlined
def _take_four(source, row, column):
    """Four vectors below each other."""
    first, second = load(source, (row, column)), load(source, (row + 1, column))
    return first, second, load(source, (row + 2, column)), load(source, (row + 3, column))


@inlined
def _put(target, row, column, four):
    """Writes four vectors below each other."""
    store(target, (row, column), four[0])
    store(target, (row + 1, column), four[1])
    store(target, (row + 2, column), four[2])
    store(target, (row + 3, column), four[3])


@inlined
def _score(queries, from_row, tile_k, weights, row, scale):
    """The scores of four rows with all keys of a tile."""
    nothing = fill(0.0, load(weights, (row, 0)))
    for j in range(0, TILE_KEYS, LANES):
        four = (nothing, nothing, nothing, nothing)
        first, second, third, fourth = _product(queries, from_row, tile_k, j, tile_k.shape[0], four)
        _put(weights, row, j, (first * scale, second * scale, third * scale, fourth * scale))


@inlined
def _weigh(weights, row, begin, end, to_row, results, peaks, totals):
    """The online softmax: a row's scores become weights, and what it has so far shrinks if a higher score came."""
    peak, seen = peaks[to_row], weights.dtype.type(0.0)
    for j in range(0, TILE_KEYS, LANES):
        scores = load(weights, (row, j))
        if begin > j or end < j + LANES:
            scores = keep(scores, begin - j, end - j)
            store(weights, (row, j), scores)
        peak = max(peak, highest(scores))
    if peak > peaks[to_row]:
        shrinks = exp(fill(peaks[to_row] - peak, load(weights, (row, 0))))
        peaks[to_row] = peak
        totals[to_row] *= highest(shrinks)
        for d in range(0, results.shape[1], LANES):
            store(results, (to_row, d), load(results, (to_row, d)) * shrinks)
    base = max(peak, np.finfo(weights.dtype).min)
    for j in range(0, TILE_KEYS, LANES):
        weight = exp(load(weights, (row, j)) - base)
        store(weights, (row, j), weight)
        seen += total(weight)
    totals[to_row] += seen


@inlined
def _add(weights, row, tile_v, results, to_row):
    """Adds the values of a tile, by their weights, to what four rows have so far."""
    for d in range(0, results.shape[1], LANES):
        _put(results, to_row, d, _product(weights, row, tile_v, d, TILE_KEYS, _take_four(results, to_row, d)))


@inlined
def _add_in_place(weights, values, slot_of, first, end, head, results, to_row):
    """As `_add`, for the first four rows and with the values read where they lie."""
    dim = values.shape[2]
    for d in range(0, dim, PAIR):
        upper, lower = _take_four(results, to_row, d), _take_four(results, to_row, d + LANES)
        for j in range(min(TILE_KEYS, end - first)):
            prefetch(values, (slot_of[min(first + j + TILE_KEYS, end - 1)], head, d))
            x, y = _take_pair(values, (slot_of[first + j], head, d), dim - d)
            upper, lower = _add_row(weights, 0, j, x, upper), _add_row(weights, 0, j, y, lower)
        _put(results, to_row, d, upper)
        _put(results, to_row, d + LANES, lower)


@inlined
def _save(state, token, query_head, row, results, peaks, totals):
    """Leaves what a row has seen to the unit that goes on with it."""
    for d in range(state.sums.shape[2]):
        state.sums[token, query_head, d] = results[row, d]
    state.peaks[token, query_head], state.totals[token, query_head] = peaks[row], totals[row]


@inlined
def _finish(out, token, query_head, row, results, totals):
    """A row's output: its sum by its total."""
    dim, scale = out.shape[2], results.dtype.type(1.0) / totals[row]
    for d in range(0, dim, PAIR):
        first, second = load(results, (row, d)) * scale, load(results, (row, d + LANES)) * scale
        if d + PAIR <= dim:
            store_pair(out, (token, query_head, d), (first, second))
        else:
            put(out, (token, query_head, d), first, dim - d)
            store_first(out, (token, query_head, d + LANES), second, dim - d - LANES)
