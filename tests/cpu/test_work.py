"""The attention of a pass is cut into units that are complete and evenly dealt."""

import numpy as np
import pytest

pytest.importorskip("numba")

from minivllm.cpu.work import FEWEST_SHARERS, TILE_QUERIES, common_prefixes, divide


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_work_is_dealt_evenly_and_completely(threads):
    starts = np.array([0, 1, 1, 41, 42, 43])
    lens = np.array([500, 90, 40, 0, 300])  # the second has no tokens, the fourth is padding
    work = divide(starts, lens, np.zeros((5, 32), np.int64), 16, 1, threads)
    expected = [[0, 1, 0, 0, 500], [1, 17, 2, 0, 16], [17, 33, 2, 0, 32], [33, 41, 2, 0, 40], [42, 43, 4, 0, 300]]
    assert work.units.tolist() == [[*unit, 0, 1] for unit in expected] and TILE_QUERIES == 16
    assert work.order.tolist() == list(range(43)) and not len(work.shared)
    assert work.bounds[0] == 0 and work.bounds[-1] == len(work.units) and len(work.bounds) == threads + 1
    assert (np.diff(work.bounds) >= 0).all()
    if threads == 2:
        assert work.bounds.tolist() == [0, 1, 5]  # 500 * 5, and 16 * 20 + 32 * 20 + 40 * 12 + 300 * 5
    nothing = divide(np.array([0, 1]), np.array([0]), np.zeros((1, 1), np.int64), 16, 1, threads)
    assert nothing.bounds.tolist() == [0] * (threads + 1)


def test_few_units_are_cut_by_heads():
    work = divide(np.array([0, 1]), np.array([100]), np.zeros((1, 7), np.int64), 16, 3, 2)
    assert work.units.tolist() == [[0, 1, 0, 0, 100, head, head + 1] for head in range(3)]
    many = divide(np.arange(10), np.full(9, 100), np.arange(63).reshape(9, 7), 16, 3, 2)
    assert many.units[:, 5:].tolist() == [[0, 3]] * 9


def test_what_decodes_begin_with_is_one_unit_for_all():
    """Their common blocks, as far as they are full for all; not those of a prefill, nor of too few."""
    table = np.array([[7, 3, 9, 1], [7, 3, 9, 2], [5, 0, 0, 0], [7, 3, 9, 4], [7, 3, 6, 0], [7, 3, 9, 8]])
    starts, lens = np.array([0, 1, 2, 3, 4, 5, 15]), np.array([30, 25, 9, 31, 24, 28])
    work = divide(starts, lens, table, 8, 1, 2)
    assert FEWEST_SHARERS == 4 and TILE_QUERIES == 16
    assert work.order[15:].tolist() == [0, 1, 3, 4]
    assert work.shared.tolist() == [[15, 17, 0, 0, 16, 0, 1], [17, 19, 0, 0, 16, 0, 1]]
    assert [unit[3] for unit in work.units.tolist()] == [16, 16, 0, 16, 16, 0]
    assert not len(divide(starts, lens, table, 8, 1, 2, sharing=False).shared)
    exact = np.array([16, 25, 9, 31, 24, 28])  # the first's last token is the last of the second block: its own
    assert divide(starts, exact, table, 8, 1, 2).shared[0].tolist() == [15, 17, 0, 0, 8, 0, 1]
    apart = table.copy()
    apart[[0, 1, 3, 4], 0] = [1, 1, 1, 2]
    assert not len(divide(starts, lens, apart, 8, 1, 2).shared)


def test_who_shares_more_is_not_held_back_by_who_shares_less():
    """All begin with block 0, as chats do; eight go on with the same document, and one of them ends in the middle."""
    counts, lens = np.ones(12, np.int64), np.full(12, 80)
    table = np.concatenate([np.zeros((12, 1), np.int64), np.arange(1, 109).reshape(12, 9)], axis=1)
    table[:8, 1:7] = table[0, 1:7]
    assert shared_of(counts, lens, table) == [(list(range(8)), 56)]
    lens[3] = 22  # its newest token is in the third block
    assert shared_of(counts, lens, table) == [([0, 1, 2, 4, 5, 6, 7], 56)]
    table[8:, 1:3] = 200, 201
    assert shared_of(counts, lens, table) == [([0, 1, 2, 4, 5, 6, 7], 56), ([8, 9, 10, 11], 24)]
    table[:8, 1:7] = np.arange(300, 348).reshape(8, 6)
    assert shared_of(counts, lens, table) == [(list(range(12)), 8)]  # 11 blocks saved; the last four alone save 9
    assert shared_of(np.full(12, 2), lens, table) == []


def shared_of(counts, lens, table):
    return [(sharers.tolist(), length) for sharers, length in common_prefixes(counts, lens, table, 8)]


def test_the_groups_save_as_much_as_any_other_choice():
    """Against a search through all ways to cut the tree."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        count = int(generator.integers(4, 14))
        lens, depth = generator.integers(1, 40, count), 8
        branches = generator.integers(0, 2, (count, depth)).cumsum(axis=1)
        paths = {tuple(row[: k + 1]) for row in branches.tolist() for k in range(depth)}
        names = {path: number for number, path in enumerate(sorted(paths))}
        table = np.array([[names[tuple(row[: k + 1])] for k in range(depth)] for row in branches.tolist()])
        found = common_prefixes(np.ones(count, np.int64), lens, table, 5)
        for sharers, length in found:
            assert len(sharers) >= FEWEST_SHARERS and (lens[sharers] > length).all() and length % 5 == 0
            assert (table[sharers, : length // 5] == table[sharers[0], : length // 5]).all()
        members = [request for sharers, _ in found for request in sharers]
        assert len(members) == len(set(members))
        assert sum((len(sharers) - 1) * length // 5 for sharers, length in found) == best(
            list(range(count)), table, (lens - 1) // 5, 0
        )


def best(requests, table, own, length):
    """The most blocks that need not be read, of requests that agree in the first `length`."""
    if len(requests) < FEWEST_SHARERS:
        return 0
    rest = {}
    for request in requests:
        if own[request] > length:
            rest.setdefault(table[request, length], []).append(request)
    return max((len(requests) - 1) * length, sum(best(part, table, own, length + 1) for part in rest.values()))
