"""Static batching: a batch is formed, its prompts are computed, and it runs until its slowest member ends."""

import pytest

from minivllm.request import RequestStatus
from minivllm.scheduler import Decision
from tests.fakes import next_token
from tests.scheduler.machine import Loop, names, output_of

CONTIGUOUS = [{"kv_cache": "contiguous", "reservation": kind} for kind in ("max", "pow2", "exact")]
MEMORIES = [{}, *CONTIGUOUS]


def ids(fields):
    return fields.get("reservation", "paged")


def static(**fields):
    return Loop(batching="static", **fields)


def test_a_batch_takes_as_many_as_there_are_rows_and_nobody_is_admitted_while_it_runs():
    loop = static(max_num_seqs=2)
    for name, max_tokens in (("A", 2), ("B", 4), ("C", 2)):
        loop.add(name, 5, max_tokens=max_tokens)
    plan = loop.step()
    assert plan.decisions == [
        Decision("admit", "A", needed=5),
        Decision("admit", "B", needed=5),
        Decision("wait", "C", "max_num_seqs", None, 1, 0),
    ]
    for _ in range(3):
        assert loop.step().decisions == [Decision("wait", "C", "batch")]
        assert len(loop.plans[-1].num_scheduled_tokens) == 2
    assert loop.step().decisions == [Decision("admit", "C", needed=5)]
    assert [dict(plan.num_scheduled_tokens) for plan in loop.plans] == [
        {"A": 5, "B": 5},
        *[{"A": 1, "B": 1}] * 3,
        {"C": 5},
    ]


def test_an_ended_member_keeps_row_slots_and_compute_until_the_last_ends():
    loop = static(block_size=4)
    a, b = loop.add("A", 6, max_tokens=2), loop.add("B", 6, max_tokens=4)
    loop.step(2)
    assert a.status is RequestStatus.FINISHED_LENGTH_CAPPED and a.finished_time == 2.0
    held = loop.manager.get_block_ids(a)
    for _ in range(2):
        assert len(held) == 2 and loop.manager.get_block_ids(a) == held
        plan = loop.step()
        assert dict(plan.num_scheduled_tokens) == {"A": 1, "B": 1} and plan.rerun == ["A"] and plan.removed == []
        assert a not in loop.touched
    assert loop.scheduler.running == [] and loop.manager.num_free_blocks == 64 and len(output_of(b)) == 4
    assert loop.step().removed == ["A", "B"] and loop.runner.rows == {}
    assert loop.runner.num_computed == 12 + 2 * 3


def test_without_finished_rows_an_ended_member_keeps_its_slots_and_costs_nothing():
    loop = static(block_size=4, keep_finished_rows=False)
    a, b = loop.add("A", 6, max_tokens=2), loop.add("B", 6, max_tokens=4)
    assert loop.counts(4) == [{"A": 6, "B": 6}, {"A": 1, "B": 1}, {"B": 1}, {"B": 1}]
    assert all(plan.rerun == [] for plan in loop.plans)
    assert loop.runner.num_computed == 12 + 1 + 3 and len(output_of(a)) == 2 and len(output_of(b)) == 4
    assert loop.manager.num_free_blocks == 64


def test_the_slots_are_given_back_by_the_step_in_which_the_last_ends_and_not_before():
    loop = static(block_size=4)
    for name, max_tokens in (("A", 5), ("B", 1), ("C", 3)):
        loop.add(name, 4, max_tokens=max_tokens)
    free = []
    for _ in range(5):
        loop.step()
        free.append(loop.manager.num_free_blocks)
    assert free == [61, 59, 59, 59, 64]


@pytest.mark.parametrize("keep", [True, False])
def test_a_batch_whose_last_member_is_aborted_is_given_back_at_once(keep):
    loop = static(keep_finished_rows=keep)
    loop.add("A", 4, max_tokens=2)
    loop.add("B", 4, max_tokens=9)
    loop.step(3)
    assert names(loop.scheduler.running) == ["A", "B"]
    loop.scheduler.abort("B", 0.0)
    assert loop.scheduler.running == [] and loop.manager.num_free_blocks == 64
    loop.add("C", 4)
    plan = loop.step()
    assert plan.removed == ["A", "B"] and dict(plan.num_scheduled_tokens) == {"C": 4}


def test_an_aborted_member_keeps_its_row_like_any_other_that_ended():
    loop = static()
    a, b = loop.add("A", 4, max_tokens=9), loop.add("B", 4, max_tokens=3)
    loop.step()
    loop.scheduler.abort("A", 0.0)
    assert names(loop.scheduler.running) == ["A", "B"] and a.status is RequestStatus.FINISHED_ABORTED
    assert loop.step().rerun == ["A"]
    loop.end()
    assert len(output_of(a)) == 1 and len(output_of(b)) == 3


def test_a_member_that_is_aborted_before_anything_of_it_was_computed_leaves():
    loop = static(max_num_batched_tokens=4)
    loop.add("A", 4, max_tokens=3)
    b = loop.add("B", 4)
    assert loop.counts(1) == [{"A": 4}]
    loop.scheduler.abort("B", 0.0)
    assert names(loop.scheduler.running) == ["A"] and loop.manager.get_block_ids(b) == []
    assert loop.step().removed == ["B"]


def test_prompts_come_first_within_the_budget_and_decoding_begins_when_all_are_computed():
    loop = static(max_num_batched_tokens=10)
    for name, length in (("A", 8), ("B", 12), ("C", 3)):
        loop.add(name, length)
    assert loop.counts(4) == [
        {"A": 8, "B": 2},
        {"B": 10},
        {"C": 3},
        {"A": 1, "B": 1, "C": 1},
    ]


def test_with_chunks_off_a_prompt_waits_for_a_step_that_can_take_it():
    loop = static(max_model_len=16, max_num_batched_tokens=16, enable_chunked_prefill=False)
    for name, length in (("A", 10), ("B", 10), ("C", 2)):
        loop.add(name, length)
    assert loop.counts(3) == [{"A": 10}, {"B": 10, "C": 2}, {"A": 1, "B": 1, "C": 1}]


def test_the_threshold_limits_each_prompt():
    loop = static(long_prefill_token_threshold=4)
    loop.add("A", 9)
    loop.add("B", 3)
    assert loop.counts(4) == [{"A": 4, "B": 3}, {"A": 4}, {"A": 1}, {"A": 1, "B": 1}]


def test_the_last_token_of_a_prompt_is_still_the_prompt_and_yields_all_answers():
    loop = static(long_prefill_token_threshold=4)
    p = loop.add("P", 5, n=3, max_tokens=3)
    loop.add("B", 3)
    assert loop.counts(2) == [{"P": 4, "B": 3}, {"P": 1}] and loop.plans[-1].num_samples == {"P": 3}
    assert names(loop.scheduler.running) == ["P", "P/1", "P/2", "B"]
    assert [request.token_ids[5] for request in loop.scheduler.running[:3]] == [
        next_token(p.prompt_token_ids, seed) for seed in range(3)
    ]


def test_with_one_row_there_is_no_batching():
    loop = static(max_num_seqs=1)
    for name, max_tokens in (("A", 2), ("B", 3)):
        loop.add(name, 4, max_tokens=max_tokens)
    assert loop.counts(5) == [{"A": 4}, {"A": 1}, {"B": 4}, {"B": 1}, {"B": 1}]
    assert all(plan.rerun == [] for plan in loop.plans)


def test_the_order_of_a_batch_is_that_of_the_policy():
    loop = static(max_num_seqs=2, scheduling_policy="priority")
    for name, priority in (("A", 2), ("B", 0), ("C", 1)):
        loop.add(name, 4, max_tokens=1, priority=priority)
    assert [list(counts) for counts in loop.counts(2)] == [["B", "C"], ["A"]]


def test_several_answers_count_as_several_rows():
    loop = static(max_num_seqs=4)
    loop.add("A", 4, n=2, max_tokens=2)
    loop.add("B", 4, n=3, max_tokens=2)
    plan = loop.step()
    assert plan.decisions[-1] == Decision("wait", "B", "max_num_seqs", None, 3, 2)
    assert loop.counts(2) == [{"A": 1, "A/1": 1}, {"B": 4}]


def test_a_batch_is_formed_from_those_whose_prompts_memory_holds_together():
    loop = static(num_blocks=4, block_size=4)
    for name, length in (("A", 8), ("B", 9), ("C", 1)):
        loop.add(name, length, max_tokens=2)
    plan = loop.step()
    assert dict(plan.num_scheduled_tokens) == {"A": 8}
    assert plan.decisions[-1] == Decision("wait", "B", "memory", None, 3, 2)
    loop.end()


def test_a_whole_prompt_has_its_slots_from_the_beginning():
    loop = static(block_size=4, max_num_batched_tokens=4)
    a, b = loop.add("A", 16), loop.add("B", 16)
    loop.step()
    assert [len(loop.manager.get_block_ids(request)) for request in (a, b)] == [4, 4]
    assert loop.plans[0].new_requests[1].block_ids == loop.manager.get_block_ids(b)


def test_when_memory_runs_out_an_ended_member_gives_its_slots_first():
    loop = static(num_blocks=4, block_size=4, max_model_len=16)
    b, a = loop.add("B", 7, max_tokens=8), loop.add("A", 7, max_tokens=2)
    loop.step(2)
    assert a.finished_time == 2.0 and loop.manager.num_free_blocks == 0
    plan = loop.step()
    assert plan.decisions == [Decision("preempt", "A", "no_free_block", "B", 1, 0)]
    assert dict(plan.num_scheduled_tokens) == {"B": 1} and plan.rerun == [] and plan.removed == ["A"]
    assert a.num_preemptions == 0 and a.status is RequestStatus.FINISHED_LENGTH_CAPPED
    loop.end()
    assert len(output_of(b)) == 8


def test_an_ended_member_before_the_one_that_needs_its_slots_is_taken_out_of_the_step():
    loop = static(num_blocks=4, block_size=4, max_model_len=16)
    a, b = loop.add("A", 7, max_tokens=2), loop.add("B", 7, max_tokens=8)
    loop.step(2)
    plan = loop.step()
    assert plan.decisions == [Decision("preempt", "A", "no_free_block", "B", 1, 0)]
    assert dict(plan.num_scheduled_tokens) == {"B": 1} and plan.rerun == []
    loop.end()
    assert len(output_of(b)) == 8 and b.num_preemptions == 0 and len(output_of(a)) == 2


def test_a_preempted_member_is_the_first_of_the_next_batch():
    loop = static(num_blocks=4, block_size=4, max_model_len=16)
    a, b = loop.add("A", 7, max_tokens=8), loop.add("B", 7, max_tokens=8)
    loop.add("C", 1, max_tokens=1)
    plan = loop.step(3)
    assert plan.decisions[-1] == Decision("preempt", "B", "no_free_block", "A", 1, 0)
    assert plan.decisions[0] == Decision("wait", "C", "batch")
    while a.status is RequestStatus.RUNNING:
        assert names(loop.scheduler.running) == ["A"]
        loop.step()
    plan = loop.step()
    assert plan.decisions == [Decision("resume", "B", needed=9), Decision("admit", "C", needed=1)]
    loop.end()
    assert len(output_of(a)) == len(output_of(b)) == 8 and (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_growing_beyond_the_pool_ends_with_length():
    loop = static(num_blocks=4)
    a, b = loop.add("A", 64, max_tokens=50), loop.add("B", 10, max_tokens=3)
    loop.step()
    plan = loop.step()
    assert plan.decisions[-1] == Decision("outgrow", "A", "no_free_block", None, 1, 0)
    assert names(loop.touched) == ["A"] and a.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert loop.manager.num_free_blocks == 4 and plan.num_scheduled_tokens == {}
    loop.end()
    assert len(output_of(a)) == 1 and len(output_of(b)) == 3


@pytest.mark.parametrize("reservation", ["max", "pow2"])
def test_a_branch_that_no_pool_holds_ends_when_the_next_batch_is_formed(reservation):
    loop = static(num_blocks=4, kv_cache="contiguous", reservation=reservation)
    loop.add("P", 64, max_tokens=50, n=2)
    loop.step()
    [branch] = loop.scheduler.waiting
    loop.end(10)
    assert (branch.status.value, len(output_of(branch))) == ("length", 1)
    assert loop.reported == ["P", "P/1"]
    assert Decision("outgrow", "P/1", "no_free_block", None, 5, 4) in [d for plan in loop.plans for d in plan.decisions]


def test_a_row_that_fails_in_its_prompt_leaves_and_one_that_fails_later_keeps_its_row():
    loop = static()
    a, b, c = (loop.add(name, 4, max_tokens=4) for name in "ABC")
    loop.runner.fail["A"] = "broke"
    loop.step()
    assert (a.status.value, a.stop_reason) == ("error", "broke") and names(loop.scheduler.running) == ["B", "C"]
    loop.runner.fail["B"] = "broke"
    loop.step()
    assert b.status.value == "error" and b.num_computed_tokens == 4 and names(loop.scheduler.running) == ["B", "C"]
    assert loop.step().rerun == ["B"]
    loop.end()
    assert len(output_of(c)) == 4


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
@pytest.mark.parametrize("keep", [True, False])
def test_all_memories_come_to_the_same_outputs(fields, keep):
    loop = static(num_blocks=12, block_size=4, max_model_len=24, keep_finished_rows=keep, max_num_seqs=3, **fields)
    requests = [loop.add(name, length, max_tokens=9) for name, length in zip("ABCD", (3, 14, 1, 8), strict=True)]
    p = loop.add("P", 5, max_tokens=6, n=3)
    loop.end()
    assert [len(output_of(request)) for request in (*requests, p)] == [9, 9, 9, 9, 6]


def test_a_cancelled_plan_ends_the_batch_and_whoever_had_not_ended_starts_again():
    loop = static(block_size=4)
    a, b = loop.add("A", 6, max_tokens=1), loop.add("B", 6, max_tokens=4)
    loop.step()
    plan = loop.scheduler.schedule(1.0)
    assert plan.rerun == ["A"]
    loop.scheduler.cancel(plan)
    assert (
        loop.scheduler.running == [] and names(loop.scheduler.waiting) == ["B"] and loop.manager.num_free_blocks == 64
    )
    assert (a.num_preemptions, a.status.value) == (0, "length")
    plan = loop.step()
    assert plan.removed == ["B", "A"] and dict(plan.num_scheduled_tokens) == {"B": 3}  # its first block is still there
    assert b.num_cached_tokens == 0 and loop.manager.prefix_cache_stats.resumed_hits == 4
    loop.end()
    assert len(output_of(b)) == 4
