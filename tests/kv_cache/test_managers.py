"""The two memory managers: what each hands out, shares, copies, takes back, and wastes."""

from dataclasses import dataclass

import pytest

from minivllm.kv_cache import ContiguousKVCache, Fragmentation, MemoryEvent, PagedKVCache

B = 16


@dataclass
class Fake:
    """A request that only memory sees."""

    request_id: str
    num_tokens: int = 0
    num_computed_tokens: int = 0
    max_num_tokens: int = 10**6


def contiguous(num_blocks, reservation="exact", max_model_len=256, block_size=B):
    return ContiguousKVCache(num_blocks, block_size, max_model_len, reservation)


def grow(cache, request, num_tokens):
    """Allocates and then computes `num_tokens`."""
    if not cache.allocate_slots(request, num_tokens):
        return False
    request.num_computed_tokens += num_tokens
    return True


# --- Paged ------------------------------------------------------------------------------------------------


def test_a_request_gets_a_block_when_its_tokens_reach_it():
    cache, a = PagedKVCache(8, B), Fake("a")
    sizes = []
    for _ in range(34):
        assert grow(cache, a, 1)
        sizes.append(len(cache.get_block_ids(a)))
    assert sizes == [1] * 16 + [2] * 16 + [3] * 2
    cache.check()


@pytest.mark.parametrize(
    ("prompt", "output", "blocks"),
    [(16, 1, 1), (16, 2, 2), (16, 17, 2), (16, 18, 3), (15, 2, 1), (15, 1, 1), (17, 1, 2), (32, 1, 2), (33, 16, 3)],
)
def test_exactly_as_many_blocks_as_are_read_again_are_enough(prompt, output, blocks):
    cache, a = PagedKVCache(blocks, B), Fake("a")
    assert grow(cache, a, prompt)
    for _ in range(output - 1):
        assert grow(cache, a, 1)
    assert len(cache.get_block_ids(a)) == blocks and cache.num_free_blocks == 0
    cache.free(a)
    assert cache.num_free_blocks == blocks


def test_what_can_never_fit_is_told_apart_from_what_must_wait():
    cache, a = PagedKVCache(4, B), Fake("a")
    assert cache.can_ever_fit(64) and not cache.can_ever_fit(65)
    assert grow(cache, a, 64)
    assert not cache.allocate_slots(a, 1)
    assert cache.can_ever_fit(10) and not cache.allocate_slots(Fake("b"), 10)
    assert cache.num_free_blocks == 0 and len(cache.get_block_ids(a)) == 4
    cache.check()


def test_a_refused_request_has_nothing():
    cache, b = PagedKVCache(2, B), Fake("b")
    assert not cache.allocate_slots(b, 33)
    assert cache.get_block_ids(b) == [] and cache.num_free_blocks == 2
    cache.free(b)
    cache.check()


def test_freeing_twice_or_the_unknown_does_nothing():
    cache, a = PagedKVCache(4, B), Fake("a")
    grow(cache, a, 20)
    for _ in range(2):
        cache.free(a)
        assert cache.num_free_blocks == 4
    cache.free(Fake("never seen"))
    cache.check()


def test_a_fork_shares_everything_and_costs_nothing():
    cache, a = PagedKVCache(4, B), Fake("a")
    grow(cache, a, 40)
    children = [Fake(f"c{i}", num_computed_tokens=40) for i in range(3)]
    for child in children:
        assert cache.fork(a, child)
        assert cache.get_block_ids(child) == cache.get_block_ids(a)
    assert cache.num_free_blocks == 1
    assert [cache.pool.blocks[i].ref_cnt for i in cache.get_block_ids(a)] == [4, 4, 4]
    cache.check()


def test_the_first_to_write_into_a_shared_partial_block_gets_a_copy_and_the_last_keeps_it():
    cache, a, b = PagedKVCache(8, B), Fake("a"), Fake("b", num_computed_tokens=20)
    grow(cache, a, 20)
    cache.fork(a, b)
    full, partial = cache.get_block_ids(a)
    assert grow(cache, b, 1)
    own = cache.get_block_ids(b)[1]
    assert cache.take_copies() == [(partial, own)] and own not in (full, partial)
    assert cache.get_block_ids(b)[0] == full
    assert grow(cache, a, 1)
    assert cache.get_block_ids(a) == [full, partial] and cache.take_copies() == []
    cache.check()


def test_a_shared_full_block_is_never_copied():
    cache, a, b = PagedKVCache(8, B), Fake("a"), Fake("b", num_computed_tokens=32)
    grow(cache, a, 32)
    cache.fork(a, b)
    assert grow(cache, a, 5) and grow(cache, b, 5)
    assert cache.take_copies() == []
    assert cache.get_block_ids(a)[:2] == cache.get_block_ids(b)[:2]
    assert cache.get_block_ids(a)[2] != cache.get_block_ids(b)[2]


def test_the_copy_counts_as_a_needed_block_and_a_refusal_changes_nothing():
    cache, a, b = PagedKVCache(2, B), Fake("a"), Fake("b", num_computed_tokens=20)
    grow(cache, a, 20)
    cache.fork(a, b)
    before = cache.get_block_ids(b)
    assert not cache.allocate_slots(b, 1)
    assert cache.get_block_ids(b) == before and cache.take_copies() == []
    cache.free(a)
    assert cache.allocate_slots(b, 1) and cache.take_copies() == []
    cache.check()


def test_a_child_may_take_less_than_its_parent_has():
    cache, a, b = PagedKVCache(8, B), Fake("a"), Fake("b", num_computed_tokens=18)
    grow(cache, a, 60)
    cache.fork(a, b)
    assert cache.get_block_ids(b) == cache.get_block_ids(a)[:2]
    assert grow(cache, b, 1)  # writes slot 18 of a block that the parent filled
    assert len(cache.take_copies()) == 1


def test_the_copies_of_a_request_that_is_given_up_are_dropped():
    cache, a, b = PagedKVCache(8, B), Fake("a"), Fake("b", num_computed_tokens=20)
    grow(cache, a, 20)
    cache.fork(a, b)
    assert cache.allocate_slots(b, 1)
    cache.free(b)
    assert cache.take_copies() == []


def test_a_pending_copy_stays_while_anybody_needs_it():
    cache, a, b = PagedKVCache(8, B), Fake("a"), Fake("b", num_computed_tokens=20)
    grow(cache, a, 20)
    cache.fork(a, b)
    assert cache.allocate_slots(b, 1)
    c = Fake("c", num_computed_tokens=20)
    cache.fork(b, c)  # shares the block that is still to be filled
    partial, own = cache.get_block_ids(a)[1], cache.get_block_ids(b)[1]
    assert cache.allocate_slots(c, 1)
    further = cache.get_block_ids(c)[1]
    cache.free(b)
    assert cache.take_copies() == [(partial, own), (own, further)]


def test_giving_up_drops_only_copies_into_blocks_that_nobody_holds_any_more():
    cache, a, b = PagedKVCache(8, B), Fake("a"), Fake("b", num_computed_tokens=20)
    grow(cache, a, 20)
    cache.fork(a, b)
    assert cache.allocate_slots(b, 1)
    partial, own = cache.get_block_ids(a)[1], cache.get_block_ids(b)[1]
    c = Fake("c", num_computed_tokens=20)
    cache.fork(b, c)
    cache.free(b)
    assert cache.get_block_ids(c)[1] == own
    assert cache.take_copies() == [(partial, own)]


def test_slots_are_asked_for_tokens_to_come_by_somebody_whose_past_is_here():
    for cache in (PagedKVCache(4, B), contiguous(4)):
        for count in (0, -1):
            with pytest.raises(AssertionError, match=f"a asks for slots for {count} tokens"):
                cache.allocate_slots(Fake("a"), count)
        with pytest.raises(AssertionError, match="a has computed 5 tokens and holds no memory"):
            cache.allocate_slots(Fake("a", num_computed_tokens=5), 1)
        assert cache.num_free_blocks == 4


def test_only_block_tails_are_waste():
    cache, a = PagedKVCache(4, B), Fake("a", max_num_tokens=24)
    grow(cache, a, 20)
    # 23 slots will ever be used, for the 24th token is not read again.
    assert cache.fragmentation() == Fragmentation(used=20, to_come=3, internal=9, external=0, free=32)
    assert cache.fragmentation(Fake("next", 1000, max_num_tokens=1001)).external == 0


@pytest.mark.parametrize(("num_tokens", "empty"), [(1, 15), (15, 1), (16, 0), (17, 15), (32, 0)])
def test_the_last_block_of_16_tokens_is_full_and_that_of_17_holds_one(num_tokens, empty):
    for cache in (PagedKVCache(4, B), contiguous(4)):
        a = Fake("a", max_num_tokens=num_tokens + 1)
        grow(cache, a, num_tokens)
        report = cache.fragmentation()
        assert (report.used, report.to_come + report.internal) == (num_tokens, empty)


def test_shared_slots_count_once():
    cache, a, b = PagedKVCache(4, B), Fake("a", max_num_tokens=21), Fake("b", num_computed_tokens=20, max_num_tokens=33)
    grow(cache, a, 20)
    cache.fork(a, b)
    report = cache.fragmentation()
    assert report == Fragmentation(used=20, to_come=12, internal=0, external=0, free=32) and report.total == 64


# --- Contiguous -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reservation", "blocks"), [("max", 16), ("pow2", 4), ("exact", 3)])
def test_a_run_is_as_long_as_the_policy_says(reservation, blocks):
    cache = contiguous(32, reservation)
    a = Fake("a", num_tokens=40, max_num_tokens=48)
    assert grow(cache, a, 40)
    assert cache.get_block_ids(a) == list(range(blocks))
    cache.check()


def test_exact_reserves_what_is_read_again_and_no_block_more():
    cache, a = contiguous(3), Fake("a", num_tokens=16, max_num_tokens=33)
    assert grow(cache, a, 16)
    assert cache.get_block_ids(a) == [0, 1]  # 16 + 17 - 1 slots


def test_runs_are_neighbours_and_holes_are_filled_first_fit():
    cache = contiguous(10)
    a, b, c = (Fake(name, max_num_tokens=49) for name in "abc")
    for request in (a, b, c):
        assert grow(cache, request, 1)
    cache.free(b)
    small, large = Fake("small", max_num_tokens=17), Fake("large", max_num_tokens=65)
    assert grow(cache, small, 1) and cache.get_block_ids(small) == [3]
    assert not cache.allocate_slots(large, 1)  # three blocks are free, but no four neighbours
    assert cache.num_free_blocks == 3
    cache.check()


def test_free_blocks_in_holes_too_short_for_the_next_request_are_external_waste():
    cache = contiguous(8)
    requests = [Fake(str(i), max_num_tokens=33) for i in range(4)]
    for request in requests:
        grow(cache, request, 32)
    cache.free(requests[0])
    cache.free(requests[2])
    assert cache.fragmentation(Fake("next", 33, max_num_tokens=34)) == Fragmentation(64, 0, 0, 64, 0)
    assert cache.fragmentation(Fake("next", 32, max_num_tokens=33)) == Fragmentation(64, 0, 0, 0, 64)
    assert cache.fragmentation() == Fragmentation(64, 0, 0, 0, 64)
    cache.free(requests[1])  # the three holes become one
    assert cache.fragmentation(Fake("next", 96, max_num_tokens=97)) == Fragmentation(32, 0, 0, 0, 96)


def test_reserving_the_maximum_wastes_what_the_request_never_comes_to():
    cache, a = contiguous(16, "max"), Fake("a", num_tokens=20, max_num_tokens=31)
    grow(cache, a, 20)
    assert cache.fragmentation() == Fragmentation(used=20, to_come=10, internal=226, external=0, free=0)


def test_powers_of_two_grow_in_place_where_the_neighbours_are_free():
    cache, a = contiguous(16, "pow2"), Fake("a")
    sizes = []
    for _ in range(130):
        assert grow(cache, a, 1)
        sizes.append(len(cache.get_block_ids(a)))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16] and sizes[16] == 2 and sizes[32] == 4
    assert cache.take_copies() == []


def test_powers_of_two_move_where_they_are_not():
    cache, a, b = contiguous(16, "pow2"), Fake("a"), Fake("b")
    grow(cache, a, 32)
    grow(cache, b, 1)
    assert grow(cache, a, 1)
    assert cache.get_block_ids(a) == [3, 4, 5, 6]
    assert sorted(cache.take_copies()) == [(0, 3), (1, 4)]
    assert cache.free_runs.runs[0].length == 2
    cache.check()


def test_a_move_onto_its_own_place_copies_in_a_safe_order():
    cache, a, b = contiguous(6, "pow2"), Fake("a"), Fake("b")
    grow(cache, b, 16)
    grow(cache, a, 32)
    assert cache.get_block_ids(a) == [1, 2]
    cache.free(b)
    assert grow(cache, a, 1)
    assert cache.get_block_ids(a) == [0, 1, 2, 3]
    assert cache.take_copies() == [(1, 0), (2, 1)]
    cache.check()


def test_a_move_that_does_not_fit_changes_nothing():
    cache, a, b = contiguous(4, "pow2"), Fake("a"), Fake("b")
    grow(cache, a, 32)
    grow(cache, b, 1)
    assert not cache.allocate_slots(a, 1)
    assert cache.get_block_ids(a) == [0, 1] and cache.get_block_ids(b) == [2]
    assert cache.take_copies() == []
    cache.check()


def test_contiguous_memory_forks_by_copying():
    cache, a = contiguous(16), Fake("a", max_num_tokens=60)
    grow(cache, a, 20)
    b = Fake("b", num_computed_tokens=20, max_num_tokens=60)
    assert cache.fork(a, b)
    assert cache.get_block_ids(b) == [4, 5, 6, 7]
    assert cache.take_copies() == [(0, 4), (1, 5)]
    assert not cache.fork(a, Fake("c", num_computed_tokens=20, max_num_tokens=250))
    cache.check()


def test_the_copies_of_a_contiguous_request_that_is_given_up_are_dropped():
    cache, a = contiguous(16), Fake("a", max_num_tokens=60)
    grow(cache, a, 20)
    b = Fake("b", num_computed_tokens=20, max_num_tokens=60)
    cache.fork(a, b)
    cache.free(b)
    assert cache.take_copies() == []


def test_powers_of_two_end_at_the_models_length():
    cache, a = contiguous(16, "pow2", max_model_len=100), Fake("a")
    grow(cache, a, 70)
    assert len(cache.get_block_ids(a)) == 7


@pytest.mark.parametrize("reservation", ["max", "pow2", "exact"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_can_ever_fit_means_that_it_grows_to_that_size_alone(reservation, block_size):
    for num_blocks in (1, 2, 5, 8):
        for limit in range(1, 40):
            cache = ContiguousKVCache(num_blocks, block_size, 40, reservation)
            a = Fake("a", max_num_tokens=limit + 1)
            grown = all(grow(cache, a, 1) for _ in range(limit))
            assert grown == cache.can_ever_fit(limit), (num_blocks, limit)


def test_a_fork_reserves_what_the_child_may_come_to():
    cache, a = contiguous(16), Fake("a", max_num_tokens=60)
    grow(cache, a, 20)
    b = Fake("b", num_computed_tokens=20, max_num_tokens=33)
    cache.fork(a, b)
    assert len(cache.get_block_ids(b)) == 2


@pytest.mark.parametrize(
    ("reservation", "fits", "too_long"), [("max", 128, 129), ("pow2", 128, 129), ("exact", 128, 129)]
)
def test_contiguous_memory_knows_what_can_never_fit(reservation, fits, too_long):
    cache = contiguous(8, reservation, max_model_len=128)
    assert cache.can_ever_fit(fits) and not cache.can_ever_fit(too_long)
    assert contiguous(6, reservation, max_model_len=128).can_ever_fit(65) == (reservation == "exact")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0, 8, "max"), "block_size must be at least 1, got 0"),
        ((0, 16, 8, "max"), "at least 1, got 0 and 8"),
        ((4, 16, 8, "best"), "reservation must be one of max, pow2, exact, got 'best'"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ContiguousKVCache(*arguments)


def test_a_double_free_of_a_run_is_loud():
    cache, a = contiguous(4), Fake("a", max_num_tokens=20)
    grow(cache, a, 1)
    run = cache._runs["a"]
    cache.free(a)
    with pytest.raises(AssertionError, match="double free"):
        cache.free_runs.put(run)


# --- Both -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: PagedKVCache(8, 4), lambda: contiguous(8, block_size=4)])
def test_events_tell_what_happened_if_anybody_listens(make):
    cache, a = make(), Fake("a", max_num_tokens=7)
    grow(cache, a, 1)
    assert cache.events is None
    cache.free(a)
    cache.events, a.num_computed_tokens = [], 0
    grow(cache, a, 6)
    table, cache.step = tuple(cache.get_block_ids(a)), 7
    cache.free(a)
    assert cache.events == [MemoryEvent(0, "allocate", "a", table, 6), MemoryEvent(7, "free", "a", (), 0)]


def test_paged_events_tell_growth_forks_and_copies_apart():
    cache, a, b = PagedKVCache(8, 4), Fake("a"), Fake("b", num_computed_tokens=5)
    cache.events = []
    grow(cache, a, 5)
    cache.fork(a, b)
    grow(cache, b, 1)
    grow(cache, b, 3)
    grow(cache, a, 1)
    assert [(e.kind, e.request_id, e.block_ids, e.num_tokens) for e in cache.events] == [
        ("allocate", "a", (0, 1), 5),
        ("fork", "b", (0, 1), 5),
        ("copy", "b", (0, 2), 6),
        ("grow", "b", (0, 2), 6),
        ("allocate", "b", (0, 2, 3), 9),
        ("grow", "a", (0, 1), 6),
    ]


def test_contiguous_events_tell_growth_moves_and_forks_apart():
    cache, a, b = contiguous(16, "pow2", block_size=4), Fake("a"), Fake("b")
    cache.events = []
    grow(cache, a, 4)
    grow(cache, a, 1)
    grow(cache, a, 1)
    grow(cache, b, 1)
    grow(cache, a, 3)
    cache.fork(b, Fake("c", num_computed_tokens=1))
    assert [(e.kind, e.request_id, e.block_ids, e.num_tokens) for e in cache.events] == [
        ("allocate", "a", (0,), 4),
        ("allocate", "a", (0, 1), 5),
        ("grow", "a", (0, 1), 6),
        ("allocate", "b", (2,), 1),
        ("move", "a", (3, 4, 5, 6), 9),
        ("fork", "c", (0,), 1),
    ]


@pytest.mark.parametrize("make", [lambda: PagedKVCache(8, 4), lambda: contiguous(8, block_size=4)])
def test_usage_is_the_share_of_blocks_held(make):
    cache = make()
    assert cache.usage == 0
    grow(cache, Fake("a", max_num_tokens=9), 8)
    assert cache.usage == 0.25


def test_used_of_reserved_is_one_where_nothing_is_reserved():
    assert Fragmentation(0, 0, 0, 0, 10).used_of_reserved == 1
    assert Fragmentation(3, 1, 2, 0, 10).used_of_reserved == 0.5
