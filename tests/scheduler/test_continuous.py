"""Continuous batching: who gets how many tokens in which step, and what happens when memory runs out."""

import pickle

import pytest

from minivllm import EngineConfig
from minivllm.kv_cache import ContiguousKVCache, PagedKVCache
from minivllm.request import RequestStatus
from minivllm.scheduler import ContinuousScheduler, Decision
from minivllm.scheduler.invariants import check_plan
from tests.fakes import next_token
from tests.scheduler.machine import Loop, names, output_of

CONTIGUOUS = [{"kv_cache": "contiguous", "reservation": kind} for kind in ("max", "pow2", "exact")]
MEMORIES = [{}, *CONTIGUOUS]


def ids(fields):
    return fields.get("reservation", "paged")


def decisions(plan, kind):
    return [decision for decision in plan.decisions if decision.kind == kind]


# --- budget, rows, chunks


def test_running_requests_come_first_then_waiting_ones_and_a_long_prompt_takes_what_is_left():
    loop = Loop(max_num_batched_tokens=10)
    loop.add("A", 4)
    loop.add("B", 20)
    loop.add("C", 3)
    assert loop.counts(4) == [{"A": 4, "B": 6}, {"A": 1, "B": 9}, {"A": 1, "B": 5, "C": 3}, {"A": 1, "B": 1, "C": 1}]
    assert [plan.num_tokens for plan in loop.plans] == [10, 10, 9, 3]
    assert list(loop.plans[2].num_scheduled_tokens) == names(loop.scheduler.running) == ["A", "B", "C"]


def test_a_first_token_comes_with_the_last_chunk_and_then_one_in_every_step():
    loop = Loop(max_num_batched_tokens=8)
    request = loop.add("A", 20, max_tokens=3)
    seen = []
    for _ in range(5):
        loop.step()
        seen.append((request.num_computed_tokens, len(output_of(request)), request.status.value))
    assert seen == [(8, 0, "running"), (16, 0, "running"), (20, 1, "running"), (21, 2, "running"), (22, 3, "length")]


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 49, 50, 10_000])
@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_a_prompt_is_cut_into_chunks_of_the_limit_and_none_is_empty(chunk, limit):
    """SCH-02: steps to the first token == ceil(prompt / chunk)."""
    loop = Loop(**{limit: chunk})
    request = loop.add("A", 50, max_tokens=20)
    steps = -(-50 // chunk)
    sizes = [counts["A"] for counts in loop.counts(steps)]
    assert sizes == [min(chunk, 50 - start) for start in range(0, 50, chunk)] and len(output_of(request)) == 1
    loop.end()
    assert len(output_of(request)) == 20 and request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert loop.runner.num_computed == 50 + 19


def test_the_threshold_limits_each_prompt_and_leaves_the_budget_to_others():
    loop = Loop(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    loop.add("A", 30)
    loop.add("B", 10)
    loop.add("C", 10)
    assert loop.counts(3) == [{"A": 8, "B": 8, "C": 4}, {"A": 8, "B": 2, "C": 6}, {"A": 8, "B": 1, "C": 1}]


def test_a_chunk_leaves_a_token_for_everybody_behind_it():
    loop = Loop(max_num_batched_tokens=4, long_prefill_token_threshold=3)
    loop.add("A", 20)
    loop.add("P", 1, n=3)
    assert loop.counts(3) == [
        {"A": 3, "P": 1},
        {"A": 1, "P": 1, "P/1": 1, "P/2": 1},
        {"A": 1, "P": 1, "P/1": 1, "P/2": 1},
    ]


def test_no_more_than_max_num_seqs_run_and_a_row_is_free_again_in_the_step_after_an_end():
    loop = Loop(max_num_seqs=2)
    loop.add("A", 4, max_tokens=2)
    loop.add("B", 4)
    loop.add("C", 4)
    plan = loop.step()
    assert dict(plan.num_scheduled_tokens) == {"A": 4, "B": 4}
    assert plan.decisions[-1] == Decision("wait", "C", "max_num_seqs", None, 1, 0)
    assert loop.counts(2) == [{"A": 1, "B": 1}, {"B": 1, "C": 4}]


def test_never_more_run_than_the_budget_has_tokens():
    loop = Loop(max_num_seqs=8, max_num_batched_tokens=3)
    for name in "ABCDE":
        loop.add(name, 1)
    assert loop.scheduler.max_running == 3
    assert loop.counts(2) == [{"A": 1, "B": 1, "C": 1}] * 2


def test_whoever_finds_no_budget_waits_and_the_decision_says_how_much_is_left():
    loop = Loop(max_num_batched_tokens=8)
    loop.add("A", 8)
    loop.add("B", 3)
    assert loop.step().decisions == [
        Decision("admit", "A", needed=8),
        Decision("wait", "B", "token_budget", None, 1, 0),
    ]
    assert loop.step().decisions == [Decision("admit", "B", needed=3)]


def test_with_chunks_off_nobody_skips_past_a_long_head():
    loop = Loop(max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False)
    loop.add("A", 40)
    loop.add("B", 40)
    loop.add("C", 10)
    plan = loop.step()
    assert dict(plan.num_scheduled_tokens) == {"A": 40}
    assert plan.decisions[-1] == Decision("wait", "B", "token_budget", None, 40, 24)
    assert loop.counts(1) == [{"A": 1, "B": 40, "C": 10}]


def test_with_chunks_off_a_budget_below_the_longest_text_is_refused_with_both_numbers():
    """SCH-01: at the constructor."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 64, max_model_len is 256 .* raise"):
        EngineConfig(max_num_batched_tokens=64, max_model_len=256, enable_chunked_prefill=False)
    EngineConfig(max_num_batched_tokens=256, max_model_len=256, enable_chunked_prefill=False)


def test_with_chunks_off_a_prompt_above_the_budget_is_refused_and_the_next_is_served():
    """SCH-01: at the door, where the length of the model was not known before."""
    config = EngineConfig(max_num_batched_tokens=64, enable_chunked_prefill=False)
    loop = Loop(scheduler=ContinuousScheduler(config, PagedKVCache(64, 16)))
    with pytest.raises(ValueError, match=r"the prompt has 65 tokens, max_num_batched_tokens is 64"):
        loop.add("A", 65)
    assert not loop.scheduler.has_unfinished_requests and len(loop.scheduler.waiting) == 0
    loop.add("B", 64)
    assert loop.counts(1) == [{"B": 64}]


def test_with_chunks_on_one_token_above_the_budget_takes_two_steps():
    loop = Loop(max_num_batched_tokens=64)
    request = loop.add("A", 65)
    assert loop.counts(2) == [{"A": 64}, {"A": 1}] and len(output_of(request)) == 1


@pytest.mark.parametrize(("threshold", "wait"), [(0, 17), (128, 1)])
def test_a_long_prompt_stalls_no_decoding_and_with_a_threshold_not_the_next_prompt_either(threshold, wait):
    """SCH-07: budget 256, D decodes, L has 4096 tokens, S 16; S waits for the whole of L unless L is limited."""
    loop = Loop(
        num_blocks=400,
        max_model_len=5000,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=threshold,
    )
    d = loop.add("D", 8, max_tokens=100)
    loop.step()
    loop.add("L", 4096)
    loop.step()
    s = loop.add("S", 16)
    steps = 0
    while not output_of(s):
        before = len(output_of(d))
        plan = loop.step()
        steps += 1
        assert plan.num_scheduled_tokens["D"] == 1 and len(output_of(d)) == before + 1
        assert next(iter(plan.num_scheduled_tokens)) == "D"
    assert (steps, s.first_scheduled_time) == (wait - (threshold == 0), loop.now - 1)
    if threshold:
        assert dict(loop.plans[2].num_scheduled_tokens) == {"D": 1, "L": 128, "S": 16}
    else:
        assert [plan.num_scheduled_tokens["L"] for plan in loop.plans[1:]] == [255] * 16 + [16]
        assert dict(loop.plans[-1].num_scheduled_tokens) == {"D": 1, "L": 16, "S": 16}


# --- order


def test_first_come_first_served():
    loop = Loop(max_num_seqs=1)
    for name, arrival in zip("CAB", (3.0, 1.0, 2.0), strict=True):
        loop.add(name, 4, max_tokens=1, arrival_time=arrival)
    assert loop.counts(3) == [{"C": 4}, {"A": 4}, {"B": 4}]


def test_by_priority_and_among_equals_by_arrival():
    loop = Loop(max_num_seqs=1, scheduling_policy="priority")
    for name, priority, arrival in (("A", 1, 1.0), ("B", 0, 5.0), ("C", 1, 0.5), ("D", -1, 9.0), ("E", 0, 5.0)):
        loop.add(name, 4, max_tokens=1, priority=priority, arrival_time=arrival)
    assert [next(iter(counts)) for counts in loop.counts(5)] == ["D", "B", "E", "C", "A"]


def test_a_more_urgent_request_does_not_take_a_row_from_one_that_runs():
    loop = Loop(max_num_seqs=1, scheduling_policy="priority")
    loop.add("A", 4, max_tokens=3, priority=5)
    loop.step()
    loop.add("B", 4, priority=0)
    assert loop.counts(3) == [{"A": 1}, {"A": 1}, {"B": 4}]


def test_a_head_that_lacks_memory_stops_all_behind_it():
    loop = Loop(num_blocks=4, block_size=4)
    loop.add("A", 8, max_tokens=3)
    loop.add("B", 12)
    loop.add("C", 1)
    plan = loop.step()
    assert dict(plan.num_scheduled_tokens) == {"A": 8}
    assert plan.decisions[-1] == Decision("wait", "B", "memory", None, 3, 2)


# --- preemption


def crowded(**fields):
    """Two requests that fill four blocks of four tokens, one step before the first needs a fifth."""
    loop = Loop(num_blocks=4, block_size=4, max_model_len=16, **fields)
    requests = loop.add("A", 7, max_tokens=8, priority=1), loop.add("B", 7, max_tokens=8)
    loop.step(2)
    assert [len(output_of(request)) for request in requests] == [2, 2] and loop.manager.num_free_blocks == 0
    return loop, *requests


def test_the_last_one_loses_its_memory_and_keeps_its_output():
    loop, a, b = crowded()
    before = output_of(b)
    plan = loop.step()
    assert dict(plan.num_scheduled_tokens) == {"A": 1} and plan.removed == ["B"]
    assert decisions(plan, "preempt") == [Decision("preempt", "B", "no_free_block", "A", 1, 0)]
    assert output_of(b) == before and b.status is RequestStatus.PREEMPTED
    assert (b.num_computed_tokens, b.num_preemptions, a.num_preemptions) == (0, 1, 0)
    assert loop.manager.get_block_ids(b) == [] and names(loop.scheduler.waiting) == ["B"]


def test_under_the_priority_policy_the_least_urgent_loses_its_memory_and_among_equals_the_latest():
    loop, *_ = crowded(scheduling_policy="priority")
    assert names(loop.scheduler.running) == ["B", "A"]
    plan = loop.step()
    assert decisions(plan, "preempt") == [Decision("preempt", "A", "no_free_block", "B", 1, 0)]
    loop = Loop(num_blocks=6, block_size=4, max_model_len=16, scheduling_policy="priority")
    requests = [
        loop.add(name, 7, max_tokens=8, arrival_time=time) for name, time in (("A", 1.0), ("B", 3.0), ("C", 2.0))
    ]
    plan = loop.step(3)
    assert names(loop.scheduler.running) == ["A", "C"] and [r.num_preemptions for r in requests] == [0, 1, 0]
    assert decisions(plan, "preempt") == [Decision("preempt", "B", "no_free_block", "A", 1, 0)]


def test_nobody_is_admitted_in_a_step_that_preempted_though_there_is_room():
    loop, *_ = crowded()
    loop.add("C", 1)
    plan = loop.step()
    assert loop.manager.num_free_blocks == 1
    assert plan.decisions[-1] == Decision("wait", "B", "preempted") and names(loop.scheduler.running) == ["A"]
    assert names(loop.scheduler.waiting) == ["B", "C"]


def test_a_preempted_request_waits_before_all_others_computes_everything_again_and_goes_on():
    loop, a, b = crowded()
    loop.add("C", 4, max_tokens=1)
    loop.step()
    while a.status is RequestStatus.RUNNING:
        assert names(loop.scheduler.waiting) == ["B", "C"]
        plan = loop.step()
    assert plan.decisions[-1] == Decision("wait", "B", "memory", None, 3, 0)
    plan = loop.step()
    assert plan.decisions == [Decision("resume", "B", needed=9), Decision("admit", "C", needed=4)]
    assert dict(plan.num_scheduled_tokens) == {"B": 9, "C": 4}
    [new, _] = plan.new_requests
    assert new.token_ids == b.token_ids[:-1] and new.num_computed_tokens == 0 and new.num_prompt_tokens == 7
    assert (b.num_computed_tokens, len(output_of(b))) == (9, 3)
    assert b.first_scheduled_time == 0.0 and b.first_token_time == 1.0
    loop.end()
    assert len(output_of(a)) == len(output_of(b)) == 8 and (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_several_victims_keep_their_order_at_the_front_of_the_queue():
    loop = Loop(num_blocks=6, block_size=2, max_model_len=13)
    for name in "ABC":
        loop.add(name, 3, max_tokens=9)
    loop.step(2)
    loop.add("D", 1)
    loop.step()
    assert (names(loop.scheduler.running), names(loop.scheduler.waiting)) == (["A", "B"], ["C", "D"])
    plan = loop.step(2)
    assert (names(loop.scheduler.running), names(loop.scheduler.waiting)) == (["A"], ["B", "C", "D"])
    assert plan.decisions[-1] == Decision("wait", "B", "preempted")


def test_one_who_is_last_gives_up_its_own_memory():
    loop = Loop(num_blocks=4, block_size=4, max_model_len=16)
    loop.add("A", 4, max_tokens=8)
    loop.add("B", 7, max_tokens=8)
    plan = loop.step(3)
    assert decisions(plan, "preempt") == [Decision("preempt", "B", "no_free_block", "B", 1, 0)]
    assert dict(plan.num_scheduled_tokens) == {"A": 1} and plan.removed == ["B"]


def test_one_who_needs_the_very_last_block_waits_for_it_and_does_not_end():
    loop = Loop(num_blocks=3, block_size=1, max_model_len=4, scheduling_policy="priority")
    b = loop.add("B", 1, max_tokens=3, priority=5)
    loop.step()
    a = loop.add("A", 1, max_tokens=2, priority=0)
    plan = loop.step(2)
    assert decisions(plan, "preempt") == [Decision("preempt", "B", "no_free_block", "B", 1, 0)]
    loop.end()
    assert len(output_of(b)) == 3 and len(output_of(a)) == 2 and b.num_preemptions == 1


def test_a_victim_that_was_scheduled_already_returns_its_tokens_to_the_budget():
    loop = Loop(
        num_blocks=24,
        block_size=4,
        scheduling_policy="priority",
        max_num_batched_tokens=10,
        long_prefill_token_threshold=8,
    )
    loop.add("L", 60, priority=5)
    loop.step()
    loop.add("H", 1, priority=0)
    loop.add("M", 20, priority=1)
    assert loop.counts(4) == [{"L": 8, "H": 1, "M": 1}] * 4
    loop.fill(leave=2)
    plan = loop.step()
    assert decisions(plan, "preempt") == [Decision("preempt", "L", "no_free_block", "H", 1, 0)]
    assert dict(plan.num_scheduled_tokens) == {"H": 1, "M": 8}


def test_a_victim_that_would_have_branched_off_in_this_step_does_so_when_it_is_back():
    loop = Loop(block_size=4, scheduling_policy="priority", long_prefill_token_threshold=4)
    p = loop.add("P", 10, n=2, priority=5, max_tokens=3)
    loop.step()
    loop.add("H", 4, priority=0, max_tokens=4)
    loop.step()
    nowhere = loop.fill(leave=1)
    plan = loop.step()
    assert decisions(plan, "preempt") == [Decision("preempt", "P", "no_free_block", "H", 1, 0)]
    assert dict(plan.num_scheduled_tokens) == {"H": 1} and plan.num_samples == {}
    loop.manager.free(nowhere)
    plan = loop.step()  # its two full blocks are still there
    assert decisions(plan, "resume") == [Decision("resume", "P", needed=2, available=8)]
    assert plan.num_samples == {"P": 2} and plan.num_scheduled_tokens["P"] == 2
    branch = loop.scheduler.requests["P/1"]
    loop.end()
    assert len(output_of(p)) == len(output_of(branch)) == 3


def test_two_long_prompts_that_fit_only_one_after_the_other_are_never_both_admitted():
    loop = Loop(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    a, b = loop.add("A", 20, max_tokens=2), loop.add("B", 20, max_tokens=2)
    assert loop.step().decisions[-1] == Decision("wait", "B", "token_budget", None, 1, 0)
    loop = Loop(num_blocks=8, block_size=4, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    a, b = loop.add("A", 20, max_tokens=2), loop.add("B", 20, max_tokens=2)
    assert loop.step().decisions[-1] == Decision("wait", "B", "memory", None, 5, 3)
    assert loop.step().decisions[-1] == Decision("wait", "B", "memory", None, 5, 3)
    while a.status is RequestStatus.RUNNING:
        assert names(loop.scheduler.running) == ["A"]
        loop.step()
    loop.end()
    assert (a.num_preemptions, b.num_preemptions) == (0, 0) and loop.runner.num_computed == 2 * 21


def test_what_was_admitted_in_this_step_is_promised_its_whole_prompt_too():
    loop = Loop(num_blocks=10, block_size=4, max_num_batched_tokens=24, long_prefill_token_threshold=8)
    loop.add("A", 20)
    loop.add("B", 20)
    plan = loop.step()
    loop.add("C", 1)
    assert dict(plan.num_scheduled_tokens) == {"A": 8, "B": 8}
    assert loop.step().decisions == [Decision("wait", "C", "memory", None, 1, 0)]


# --- what can never run


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
def test_a_prompt_that_no_pool_of_this_size_holds_is_refused_with_the_numbers_and_the_next_is_served(fields):
    """KV-02 (a): 100 tokens against 64 slots."""
    loop = Loop(num_blocks=4, **fields)
    with pytest.raises(ValueError, match=r"the prompt has 100 tokens and the KV cache holds 64 \(4 blocks of 16\)"):
        loop.add("A", 100)
    b = loop.add("B", 10, max_tokens=5)
    loop.end()
    assert len(output_of(b)) == 5


@pytest.mark.parametrize("fields", [{}, *CONTIGUOUS[:2]], ids=ids)
def test_growing_beyond_the_pool_ends_with_length(fields):
    """KV-02 (b): a prompt that fills the pool and wants 50 more tokens gets the one that needs no slot."""
    loop = Loop(num_blocks=4, **fields)
    a = loop.add("A", 64, max_tokens=50)
    b = loop.add("B", 10, max_tokens=5)
    loop.step()
    plan = loop.step()
    assert plan.decisions[0] == Decision("outgrow", "A", "no_free_block", None, 1, 0)
    assert (len(output_of(a)), a.status, a.finished_time) == (1, RequestStatus.FINISHED_LENGTH_CAPPED, 1.0)
    assert a in loop.touched and dict(plan.num_scheduled_tokens) == {"B": 10}
    loop.end()
    assert len(output_of(b)) == 5 and (a.num_preemptions, b.num_preemptions) == (0, 0)


def test_exact_reservation_refuses_at_once_what_could_outgrow_the_pool():
    loop = Loop(num_blocks=4, kv_cache="contiguous", reservation="exact")
    with pytest.raises(ValueError, match=r"A may come to 114 tokens, for which 8 blocks .* has 4"):
        loop.add("A", 64, max_tokens=50)
    loop.add("B", 64, max_tokens=1)


@pytest.mark.parametrize("reservation", ["max", "pow2"])
def test_a_branch_that_no_pool_holds_ends_with_length_and_the_token_it_has(reservation):
    """KV-02 (b) for n > 1: the pool holds the prompt once, so the branch waits, and is too long by then."""
    loop = Loop(num_blocks=4, kv_cache="contiguous", reservation=reservation)
    a = loop.add("A", 64, max_tokens=50, n=2)
    loop.step()
    [branch] = loop.scheduler.waiting
    loop.end(10)
    for request in (a, branch):
        assert (len(output_of(request)), request.status.value) == (1, "length")
    assert branch.request_id == "A/1" and branch.seed == a.seed + 1
    assert loop.reported == ["A", "A/1"]


def test_more_answers_than_rows_are_refused_with_both_numbers():
    loop = Loop(max_num_seqs=4)
    with pytest.raises(ValueError, match=r"n is 5 and at most 4 requests run together"):
        loop.add("A", 4, n=5)
    loop.add("A", 4, n=4)


def test_a_name_that_is_in_use_is_refused_and_is_free_again_after_the_end():
    loop = Loop()
    loop.add("A", 4, max_tokens=1)
    with pytest.raises(ValueError, match="'A' that has not ended"):
        loop.add("A", 5)
    loop.step()
    again = loop.add("A", 5, max_tokens=2)
    plan = loop.step()
    assert plan.removed == ["A"] and [new.request_id for new in plan.new_requests] == ["A"]
    loop.end()
    assert len(output_of(again)) == 2


# --- many answers


def test_the_prompt_of_several_answers_is_computed_once_and_they_stand_behind_their_parent():
    loop = Loop(block_size=4)
    loop.add("A", 6, max_tokens=4)
    p = loop.add("P", 6, max_tokens=4, n=3)
    loop.add("Z", 6, max_tokens=4)
    plan = loop.step()
    assert dict(plan.num_scheduled_tokens) == {"A": 6, "P": 6, "Z": 6} and plan.num_samples == {"P": 3}
    assert names(loop.scheduler.running) == ["A", "P", "P/1", "P/2", "Z"]
    assert names(loop.touched) == ["A", "P/1", "P/2", "P", "Z"] and p.num_samples == 1
    branches = loop.scheduler.running[1:4]
    assert [request.seed for request in branches] == [0, 1, 2]
    assert [request.token_ids[6:] for request in branches] == [
        [next_token(p.prompt_token_ids, seed)] for seed in range(3)
    ]
    tables = [loop.manager.get_block_ids(request) for request in branches]
    assert tables[0] == tables[1] == tables[2]
    plan = loop.step()
    assert [new.request_id for new in plan.new_requests] == ["P/1", "P/2"] and plan.num_samples == {}
    assert [(new.index, new.parent_id, new.num_computed_tokens) for new in plan.new_requests] == [
        (1, "P", 6),
        (2, "P", 6),
    ]
    loop.end()
    assert [len(output_of(request)) for request in branches] == [4, 4, 4]
    assert loop.runner.num_computed == 3 * 6 + 5 * 3


def test_all_but_one_answer_copy_the_last_block_of_the_prompt_before_they_write_to_it():
    loop = Loop(block_size=4)
    loop.add("P", 6, n=3)
    loop.step()
    shared = loop.manager.get_block_ids(loop.scheduler.running[0])
    plan = loop.step()
    tables = [loop.manager.get_block_ids(request) for request in loop.scheduler.running]
    assert [table[0] for table in tables] == [shared[0]] * 3 and len({table[1] for table in tables}) == 3
    assert sorted(plan.copies) == sorted((shared[1], table[1]) for table in tables if table[1] != shared[1])
    assert len(plan.copies) == 2


def test_a_prompt_that_ends_with_its_block_is_shared_without_a_copy():
    loop = Loop(block_size=4)
    loop.add("P", 8, n=3)
    loop.step(2)
    assert loop.plans[1].copies == []
    assert len({tuple(loop.manager.get_block_ids(request)[:2]) for request in loop.scheduler.running}) == 1


def test_a_copy_for_an_answer_that_loses_its_memory_in_the_same_step_is_not_made():
    loop = Loop(block_size=4, scheduling_policy="priority", long_prefill_token_threshold=4)
    loop.add("P", 6, n=3, priority=5)
    loop.step()
    for name in "HI":
        loop.add(name, 4, priority=0)
    loop.step()
    shared = loop.manager.get_block_ids(loop.scheduler.running[0])[1]
    loop.fill(leave=2)
    plan = loop.step()
    assert [decision.request_id for decision in decisions(plan, "preempt")] == ["P/2", "P/1"]
    assert dict(plan.num_scheduled_tokens) == {"P": 1, "H": 1, "I": 1}
    assert plan.copies == [(shared, loop.manager.get_block_ids(loop.scheduler.running[0])[1])]


@pytest.mark.parametrize("fields", CONTIGUOUS, ids=ids)
def test_a_copy_for_an_answer_that_is_aborted_before_the_next_step_is_not_made(fields):
    loop = Loop(block_size=4, max_model_len=32, **fields)
    loop.add("P", 6, n=3)
    loop.step()
    loop.scheduler.abort("P/1", 0.0)
    source, target = (loop.manager.get_block_ids(request)[0] for request in loop.scheduler.running)
    assert loop.step().copies == [(source, target), (source + 1, target + 1)]


def test_an_answer_that_lacks_a_block_for_its_copy_takes_it_from_the_last():
    loop = Loop(num_blocks=2, block_size=4)
    p = loop.add("P", 6, max_tokens=2, n=2)
    loop.step()
    plan = loop.step()
    assert decisions(plan, "preempt") == [Decision("preempt", "P/1", "no_free_block", "P", 1, 0)]
    assert plan.copies == [] and plan.new_requests == [] and plan.removed == []
    [branch] = loop.scheduler.waiting
    loop.end()
    assert len(output_of(p)) == len(output_of(branch)) == 2


@pytest.mark.parametrize("fields", CONTIGUOUS, ids=ids)
def test_a_branch_whose_fork_found_no_room_waits_at_the_front_and_computes_for_itself(fields):
    loop = Loop(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=8, **fields)
    p = loop.add("P", 12, max_tokens=4, n=3)
    loop.add("Z", 12, max_tokens=4)
    loop.add("Y", 1)
    loop.step()
    assert names(loop.scheduler.running) == ["P", "Z"] and names(loop.scheduler.waiting) == ["P/1", "P/2", "Y"]
    branches = list(loop.scheduler.waiting)[:2]
    assert [(r.num_computed_tokens, len(output_of(r)), r.num_preemptions) for r in branches] == [(0, 1, 0)] * 2
    assert loop.step().decisions == [Decision("wait", "P/1", "memory", None, 4, 0)]
    loop.step(2)
    assert loop.step().decisions[:2] == [Decision("admit", "P/1", needed=13), Decision("admit", "P/2", needed=13)]
    loop.end()
    assert all(len(output_of(request)) == 4 for request in (p, *branches))
    assert loop.runner.num_computed == 4 * (12 + 3) + 1 + 15


def test_branches_that_wait_keep_their_order_before_all_others():
    loop = Loop(num_blocks=4, block_size=4, max_model_len=16, kv_cache="contiguous", reservation="max")
    loop.add("P", 12, max_tokens=4, n=3)
    loop.add("Z", 12)
    plan = loop.step()
    assert names(loop.scheduler.waiting) == ["P/1", "P/2", "Z"]
    assert plan.decisions[-1] == Decision("wait", "Z", "memory", None, 4, 0)
    loop.step(4)
    assert names(loop.scheduler.running) == ["P/1"]
    assert loop.plans[-1].decisions[0] == Decision("admit", "P/1", needed=13)
    assert loop.plans[-1].num_scheduled_tokens == {"P/1": 13}


def test_several_answers_count_as_several_rows_at_admission():
    loop = Loop(max_num_seqs=4)
    loop.add("A", 4, n=2)
    loop.add("B", 4, n=3)
    loop.add("C", 4)
    plan = loop.step()
    assert dict(plan.num_scheduled_tokens) == {"A": 4}
    assert plan.decisions[-1] == Decision("wait", "B", "max_num_seqs", None, 3, 2)
    loop.scheduler.abort("A/1", 0.0)
    assert loop.step(1).num_scheduled_tokens == {"A": 1, "B": 4}


def test_an_answer_of_one_token_ends_as_it_branches_off():
    loop = Loop()
    p = loop.add("P", 6, max_tokens=1, n=3)
    loop.step()
    assert names(loop.touched) == ["P/1", "P/2", "P"] and loop.scheduler.running == []
    assert [request.status.value for request in loop.touched] == ["length"] * 3
    plan = loop.step()
    assert plan.removed == ["P"] and loop.runner.rows == {} and p.finished_time == 1.0
    assert loop.manager.num_free_blocks == 64


# --- ends


def test_end_of_sequence_beats_length():
    probe = Loop().add("A", 4)
    token = next_token(probe.prompt_token_ids)
    for max_tokens in (1, 5):
        loop = Loop()
        a = loop.add("A", 4, max_tokens=max_tokens, stop=[token])
        loop.step()
        assert (a.status, a.output_token_ids) == (RequestStatus.FINISHED_STOPPED, [token])


def test_the_last_token_needs_no_slot():
    loop = Loop(num_blocks=1, block_size=4)
    a = loop.add("A", 3, max_tokens=2)
    loop.step(2)
    assert a.status is RequestStatus.FINISHED_LENGTH_CAPPED and a.num_preemptions == 0 and len(output_of(a)) == 2


def aborted(loop, request):
    """Aborts a request and looks whether it is gone."""
    assert loop.scheduler.abort(request.request_id, 7.0) is request
    assert (request.status, request.finished_time) == (RequestStatus.FINISHED_ABORTED, 7.0)
    assert loop.manager.get_block_ids(request) == [] and request.request_id not in loop.scheduler.requests
    assert request not in loop.scheduler.running and request not in list(loop.scheduler.waiting)
    assert loop.scheduler.abort(request.request_id, 8.0) is None and request.finished_time == 7.0
    loop.manager.check()


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_abort_in_every_state(fields, policy):
    """KV-03: waiting, between two chunks, decoding, preempted; twice; and unknown."""
    loop = Loop(
        num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=8, scheduling_policy=policy, **fields
    )
    assert loop.scheduler.abort("nobody", 0.0) is None
    a = loop.add("A", 20, max_tokens=4)
    aborted(loop, a)
    assert loop.step().num_scheduled_tokens == {} and loop.plans[-1].removed == []
    a = loop.add("A", 20, max_tokens=4)
    loop.step()
    aborted(loop, a)
    assert loop.step().removed == ["A"] and loop.runner.rows == {}
    a = loop.add("A", 7)
    loop.step(2)
    assert len(output_of(a)) == 2
    aborted(loop, a)
    assert loop.step().removed == ["A"]
    loop.end()
    loop, *_ = crowded(scheduling_policy=policy)
    loop.step()
    victim = next(iter(loop.scheduler.waiting))
    assert victim.status is RequestStatus.PREEMPTED
    aborted(loop, victim)
    loop.end()
    assert victim.num_preemptions == 1 and len(output_of(victim)) == 2


def test_abort_while_its_last_chunk_is_in_flight_books_nothing():
    loop = Loop()
    a, b = loop.add("A", 4), loop.add("B", 4)
    plan = loop.scheduler.schedule(0.0)
    result = loop.runner.execute(plan)
    assert result.sampled.keys() == {"A", "B"}
    aborted(loop, a)
    assert loop.scheduler.update(plan, result, 1.0) == [b]
    assert a.output_token_ids == [] and a.num_computed_tokens == 0 and len(output_of(b)) == 1
    assert loop.step().removed == ["A"] and set(loop.runner.rows) == {"B"}


def test_abort_of_one_answer_leaves_the_others_and_their_memory():
    loop = Loop(block_size=4)
    p = loop.add("P", 6, max_tokens=5, n=3)
    loop.step()
    first, second = loop.scheduler.running[1:]
    aborted(loop, first)
    assert loop.step().removed == [] and [new.request_id for new in loop.plans[-1].new_requests] == ["P/2"]
    aborted(loop, p)
    loop.end()
    assert len(output_of(second)) == 5


def test_a_failed_row_ends_with_error_nothing_of_it_counts_and_the_others_go_on():
    loop = Loop()
    a, b = loop.add("A", 4, max_tokens=3), loop.add("B", 4, max_tokens=3)
    loop.step()
    loop.runner.fail["A"] = "A broke"
    loop.step()
    assert names(loop.touched) == ["A", "B"]
    assert (a.status, a.stop_reason, a.num_computed_tokens) == (RequestStatus.FINISHED_ERROR, "A broke", 4)
    assert a.finished_time == 2.0 and len(output_of(a)) == 1
    loop.end()
    assert len(output_of(b)) == 3 and b.status is RequestStatus.FINISHED_LENGTH_CAPPED


# --- plans


def test_a_plan_is_plain_data_that_a_pickle_carries_and_describes_each_request_once():
    loop = Loop(num_blocks=10, block_size=4, max_model_len=32, max_num_batched_tokens=16)
    for name, length, n in (("A", 9, 1), ("P", 10, 2), ("B", 20, 1)):
        loop.add(name, length, max_tokens=10, n=n)
    loop.end()
    described = []
    for plan in loop.plans:
        assert pickle.loads(pickle.dumps(plan)) == plan
        for name in plan.removed:
            described.remove(name)
        described += [new.request_id for new in plan.new_requests]
        assert len(described) == len(set(described)) and set(plan.num_scheduled_tokens) <= set(described)
        assert set(plan.table_changes) <= set(described)
        assert not set(plan.table_changes) & {new.request_id for new in plan.new_requests}
    assert described == [] and any(plan.copies for plan in loop.plans)
    assert [plan.step for plan in loop.plans] == list(range(len(loop.plans)))
    assert any(decisions(plan, "preempt") for plan in loop.plans)


def test_a_table_change_holds_only_what_is_new():
    loop = Loop(block_size=4)
    a = loop.add("A", 7)
    loop.step(2)
    assert loop.plans[1].table_changes == {}
    plan = loop.step()
    assert plan.table_changes == {"A": (2, loop.manager.get_block_ids(a)[2:])}


def test_a_second_plan_before_the_first_is_booked_is_a_bug():
    loop = Loop()
    loop.add("A", 4)
    loop.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="update"):
        loop.scheduler.schedule(0.0)


def test_a_cancelled_plan_starts_everybody_again_in_order_and_tells_the_runner_once_more_whom_to_forget():
    loop = Loop(block_size=4)
    a, p = loop.add("A", 6, max_tokens=4), loop.add("P", 6, max_tokens=4, n=2)
    gone = loop.add("G", 6, max_tokens=1)
    loop.step()
    again = loop.add("G", 6, max_tokens=2)
    plan = loop.scheduler.schedule(1.0)
    assert plan.removed == ["G"] and plan.copies
    loop.scheduler.cancel(plan)
    assert names(loop.scheduler.waiting) == ["A", "P", "P/1", "G"] and loop.scheduler.running == []
    assert loop.manager.num_free_blocks == 64 and loop.manager.take_copies() == []
    assert [r.num_preemptions for r in loop.scheduler.waiting] == [1, 1, 1, 1] and again.num_computed_tokens == 0
    plan = loop.step()
    assert sorted(plan.removed) == ["A", "G", "P", "P/1"] and plan.copies == [] and plan.step == 1
    assert [new.request_id for new in plan.new_requests] == ["A", "P", "P/1", "G"]
    loop.end()
    assert len(output_of(a)) == len(output_of(p)) == 4
    assert len(output_of(gone)) == 1 and len(output_of(again)) == 2


def test_check_plan_notices_what_is_wrong():
    loop = Loop(block_size=4, max_num_batched_tokens=8)
    loop.add("A", 6)
    plan = loop.scheduler.schedule(0.0)
    check_plan(loop.scheduler, plan)
    for count in (0, 7, 9):
        plan.num_scheduled_tokens["A"] = count
        with pytest.raises(AssertionError):
            check_plan(loop.scheduler, plan)
    plan.num_scheduled_tokens = {"B": 6}
    with pytest.raises(AssertionError, match="rows differ"):
        check_plan(loop.scheduler, plan)


@pytest.mark.parametrize("fields", CONTIGUOUS, ids=ids)
def test_contiguous_memory_runs_the_same_requests_to_the_same_end(fields):
    loop = Loop(num_blocks=12, block_size=4, max_model_len=24, max_num_batched_tokens=8, **fields)
    requests = [loop.add(name, length, max_tokens=9) for name, length in zip("ABCD", (3, 14, 1, 8), strict=True)]
    loop.end()
    assert [len(output_of(request)) for request in requests] == [9] * 4
    assert (
        all(change.start == 0 for plan in loop.plans for change in plan.table_changes.values()) or ids(fields) == "pow2"
    )


def test_pow2_moves_to_a_hole_that_is_long_enough_and_preempts_nobody():
    manager = ContiguousKVCache(4, 4, 16, "pow2")
    loop = Loop(scheduler=ContinuousScheduler(EngineConfig(block_size=4), manager))
    a, b = loop.add("A", 4, max_tokens=6), loop.add("B", 4, max_tokens=6)
    assert loop.counts(1) == [{"A": 4, "B": 4}]
    plan = loop.step()
    assert plan.copies == [(0, 2), (1, 0)] and plan.decisions == []
    assert plan.table_changes == {"A": (0, [2, 3]), "B": (0, [0, 1])}
    loop.end()
    assert len(output_of(a)) == len(output_of(b)) == 6
