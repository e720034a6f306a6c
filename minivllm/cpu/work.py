"""How the attention of a pass is cut into units of work and dealt to the threads, once for all layers."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

TILE_QUERIES = 16  # query tokens of a unit, at most
FEWEST_SHARERS = 4  # decodes that begin with the same blocks, for which reading these once is worth a pass of its own
LOADING = 4  # what it costs to read a key and its value, in query tokens that attend to it


class Work(NamedTuple):
    """Units of work. Each has a row of 7 numbers: where its tokens begin and end in `order`, the request whose blocks
    are read, the keys it begins with and ends before, and the KV heads it begins with and ends before.

    Attributes:
        order: tokens of the units; those of a unit of `shared` belong to several requests.
        shared: units over the blocks that several requests begin with. They are done before all others, which then
            go on where these stopped; `[num_shared, 7]`.
        shared_bounds: where each thread's units begin in `shared`, and the end; `[num_threads + 1]`.
        units: all other units, `[num_units, 7]`.
        bounds: of `units`.
    """

    order: np.ndarray
    shared: np.ndarray
    shared_bounds: np.ndarray
    units: np.ndarray
    bounds: np.ndarray


def divide(
    starts: np.ndarray,
    lens: np.ndarray,
    table: np.ndarray,
    block_size: int,
    num_kv_heads: int,
    num_threads: int,
    sharing: bool = True,
) -> Work:
    """The work of a pass.

    Args:
        starts: `[num_reqs + 1]`, where each request's tokens begin.
        lens: `[num_reqs]`, tokens of each in the cache, the new ones included; 0 for a padded row.
        table: `[num_reqs, max_blocks]`, the block tables.
        block_size: tokens of a block.
        num_kv_heads: KV heads of a layer.
        num_threads: threads to deal it to.
        sharing: whether what several requests begin with is read once for all of them.
    """
    counts = np.where(lens > 0, starts[1:] - starts[:-1], 0)
    order, shared, skipped = [np.arange(starts[-1])], [], np.zeros(len(lens), np.int64)
    for sharers, length in common_prefixes(counts, lens, table, block_size) if sharing else ():
        at, skipped[sharers] = sum(map(len, order)), length
        order.append(starts[sharers])
        cuts = np.linspace(0, len(sharers), max(num_threads, -(-len(sharers) // TILE_QUERIES)) + 1).astype(np.int64)
        shared += [(at + i, at + j, sharers[0], 0, length) for i, j in pairwise(cuts)]
    tiles = -(-counts // TILE_QUERIES)
    request = np.repeat(np.arange(len(lens)), tiles)
    first = TILE_QUERIES * (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    after = np.minimum(first + TILE_QUERIES, counts[request])
    begin, ends = starts[request], (lens - counts)[request] + after
    units = np.stack([begin + first, begin + after, request, skipped[request], ends], axis=1)
    some = np.array(shared, dtype=np.int64).reshape(-1, 5)
    return Work(np.concatenate(order), *deal(some, num_kv_heads, num_threads), *deal(units, num_kv_heads, num_threads))


def common_prefixes(
    counts: np.ndarray, lens: np.ndarray, table: np.ndarray, block_size: int
) -> list[tuple[np.ndarray, int]]:
    """Decodes that begin with the same blocks: pairs (their request indices, how many tokens they share)."""
    own = (lens - 1) // block_size  # the block of the newest token, which nobody shares
    groups = _sharers(np.flatnonzero((counts == 1) & (own > 0)), own, table, 0)
    return [(sharers, length * block_size) for sharers, length in groups]


def _sharers(requests: np.ndarray, own: np.ndarray, table: np.ndarray, length: int) -> list[tuple[np.ndarray, int]]:
    """Of requests whose first `length` blocks are the same, groups that share blocks, with how many: the whole, or
    smaller groups of those that share more, whichever saves more reading."""
    if len(requests) < FEWEST_SHARERS:
        return []
    shortest = own[requests].min()
    differ = np.flatnonzero((table[requests, length:shortest] != table[requests[0], length:shortest]).any(axis=0))
    length = int(length + differ[0] if len(differ) else shortest)
    going_on = requests[own[requests] > length]
    _, group, sizes = np.unique(table[going_on, length], return_inverse=True, return_counts=True)
    parts = []
    for index in np.flatnonzero(sizes >= FEWEST_SHARERS):
        parts += _sharers(going_on[group == index], own, table, length)
    saved = sum((len(sharers) - 1) * blocks for sharers, blocks in parts)
    return parts if saved > (len(requests) - 1) * length else [(requests, length)] if length else []


def deal(units: np.ndarray, num_kv_heads: int, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Adds the KV heads, one by one where there are few units, and cuts where the threads' work is about equal."""
    pieces = num_kv_heads if len(units) < 4 * num_threads else 1
    heads = np.linspace(0, num_kv_heads, pieces + 1).astype(np.int64)
    pairs = np.tile(np.stack([heads[:-1], heads[1:]], axis=1), (len(units), 1))
    units = np.concatenate([np.repeat(units, pieces, axis=0), pairs], axis=1)
    begin, end, _, first_key, last_key, first_head, last_head = units.T
    done = np.cumsum((last_key - first_key) * (end - begin + LOADING) * (last_head - first_head))
    total = done[-1] if len(done) else 0
    inner = np.searchsorted(done, np.arange(1, num_threads) * total / num_threads)
    return units, np.array([0, *inner, len(units)])
