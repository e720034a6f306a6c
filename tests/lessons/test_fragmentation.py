"""The fragmentation study: every request ends, the parts add up, and the figures come out of the managers."""

import math

import pytest

from minivllm.kv_cache import ContiguousKVCache, PagedKVCache
from minivllm.lessons.fragmentation import PARTS, run_mix
from minivllm.lessons.workload import real_lengths

MIX = [(min(prompt, 8190), min(answer, 8192 - prompt)) for prompt, answer in real_lengths(100)]


def managers(num_blocks=2048):
    contiguous = {
        name: ContiguousKVCache(num_blocks, 16, 8192, name)  # type: ignore[arg-type]
        for name in ("max", "pow2", "exact")
    }
    return {**contiguous, "paged": PagedKVCache(num_blocks, 16)}


@pytest.fixture(scope="module")
def reports():
    return {name: run_mix(MIX, manager) for name, manager in managers().items()}


@pytest.mark.parametrize("name", ["max", "pow2", "exact", "paged"])
def test_every_request_ends_and_all_memory_comes_back(name):
    manager = managers()[name]
    manager.events = []
    report = run_mix(MIX, manager)
    assert manager.num_free_blocks == manager.num_blocks
    manager.check()
    frees = [event.request_id for event in manager.events if event.kind == "free"]
    assert len(frees) == len(MIX) + report.num_preemptions
    assert {event.request_id for event in manager.events} == {f"R{i}" for i in range(len(MIX))}


def test_paging_fills_at_least_96_percent_of_what_it_allocates(reports):
    assert reports["paged"].used_of_reserved >= 0.96
    assert reports["paged"].share("external") == 0


def test_the_policies_stand_in_the_published_order(reports):
    used = [reports[name].share("used") for name in ("max", "pow2", "exact", "paged")]
    assert used == sorted(used) and used[-1] > 0.9 and used[0] < 0.4
    running = [reports[name].mean_running for name in ("max", "pow2", "exact", "paged")]
    assert running == sorted(running)


def test_only_neighbours_leave_holes(reports):
    assert reports["exact"].share("external") > 0.05 and reports["exact"].share("internal") < 0.01
    assert reports["max"].share("internal") > 0.5


def test_the_shares_of_the_parts_add_up(reports):
    for report in reports.values():
        assert sum(report.share(part) for part in PARTS) == pytest.approx(1)


def test_steps_of_a_mix_by_hand():
    # Two blocks of 4: the first takes 3 slots at once and ends after 3 tokens; the second fits only after it.
    report = run_mix([(3, 3), (5, 2)], ContiguousKVCache(3, 4, 8, "exact"), sample_every=1)
    assert report.num_steps == 3 + 2 and report.running == [1, 1, 1] and report.num_preemptions == 0
    assert [sample.used for sample in report.samples] == [3, 4, 5]


def test_who_came_last_gives_way_and_starts_again():
    report = run_mix([(4, 6), (4, 6)], PagedKVCache(3, 4), sample_every=1)
    assert report.num_preemptions == 1


def test_a_restart_costs_what_had_been_computed():
    report = run_mix([(4, 6), (4, 6)], PagedKVCache(3, 4), sample_every=1)
    assert report.num_recomputed_tokens == 4


def test_averages_over_nothing_are_no_numbers():
    report = run_mix([(10, 5)], PagedKVCache(8, 16))
    assert math.isnan(report.share("used")) and math.isnan(report.mean_running)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([(17, 0)], "an answer's length must be at least 1, got 0"), ([(0, 3)], "a prompt's length must be at least 1")],
)
def test_bad_lengths_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        run_mix(lengths, PagedKVCache(1, 16))


def test_a_pool_in_use_is_refused():
    manager = PagedKVCache(8, 16)
    run_mix([(3, 3)], manager)
    manager.pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks are in use"):
        run_mix([(3, 3)], manager)


def test_what_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="R1 comes to 14 tokens, the pool has 12 slots"):
        run_mix([(3, 3), (10, 4)], PagedKVCache(3, 4))
