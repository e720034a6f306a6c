"""The numbers of a trace are those that can be counted by hand, and add up to its steps."""

from itertools import pairwise

import numpy as np
import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.trace import memory_events, request_times, summarize, token_gaps
from minivllm.viz.memory import replay
from tests import fakes
from tests.fakes import make_engine, sample_trace

CASES = {
    "continuous": {},
    "static": {"batching": "static"},
    "one by one": {"batching": "static", "max_num_seqs": 1},
    "pow2": {"kv_cache": "contiguous", "reservation": "pow2", "num_blocks": 16},
    "whole prompts": {"num_blocks": 14, "max_num_batched_tokens": 256, "enable_chunked_prefill": False},
}


def phases(request):
    """Phase, first and last step of every span; neighbours of a kind as one."""
    found = []
    for span in request.spans:
        if found and found[-1][0] == span.phase:
            found[-1] = (span.phase, found[-1][1], span.last_step)
        else:
            found.append((span.phase, span.first_step, span.last_step))
    return found


def by_name(trace):
    return {request.request_id: request for request in request_times(trace)}


def branching(num_blocks=20, **params):
    """A has three answers; B is aborted after six steps."""
    engine = make_engine(num_blocks=num_blocks, block_size=4, enable_prefix_caching=False)
    trace = engine.start_recording()
    sampled = {"temperature": 1.0, "seed": 1}
    engine.add_request("A", list(range(1, 11)), SamplingParams(n=3, **sampled, **({"max_tokens": 4} | params)))
    engine.add_request("B", list(range(1, 11)), SamplingParams(max_tokens=40, **sampled))
    for _ in range(6):
        engine.step()
    engine.abort_request("B")
    while engine.has_unfinished_requests():
        engine.step()
    return trace


def test_a_small_static_batch_comes_to_what_is_counted_by_hand():
    # R0 puts out 4 tokens (steps 0-3) and R1 10 (steps 0-9), R0's row is rerun in steps 4-9; R2 has 10 and 11.
    trace = sample_trace([(5, 4, 0), (9, 10, 0), (3, 2, 1)], batching="static", max_num_seqs=2)
    summary = summarize(trace)
    assert (summary.num_steps, summary.num_requests) == (12, 3)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (17, 16)
    assert summary.num_useless_tokens == 6 and summary.num_recomputed_tokens == 0
    assert summary.num_computed_tokens == 17 + (16 - 3) + 6
    assert summary.num_preemptions == 0
    assert summary.output_tokens_per_step == 16 / 12
    assert summary.mean_running == pytest.approx((4 * 2 + 6 + 2) / 12)
    assert summary.mean_waiting == pytest.approx(9 / 12)
    assert summary.peak_usage == pytest.approx(4 / 12, abs=1e-6)
    # A step takes 10 ms and 0.1 ms per token.
    assert summary.duration_s == pytest.approx(12 * 0.01 + 36 * 0.0001)
    assert summary.output_tokens_per_s == pytest.approx(16 / 0.1236)
    r0, r1, r2 = summary.requests
    assert phases(r0) == [("prefill", 0, 0), ("decode", 1, 3), ("rerun", 4, 9)]
    assert phases(r1) == [("prefill", 0, 0), ("decode", 1, 9)]
    assert phases(r2) == [("queued", 1, 9), ("prefill", 10, 10), ("decode", 11, 11)]
    assert (r0.end_step, r0.e2e_steps, r0.finish_reason, r0.num_output_tokens) == (3, 4, "length", 4)


def test_times_are_those_of_the_steps():
    trace = sample_trace([(5, 4, 0), (9, 10, 0), (3, 2, 1)], batching="static", max_num_seqs=2)
    r0, _, r2 = request_times(trace)
    assert (r0.arrival_s, r0.first_scheduled_s, r0.queue_s) == (0.0, 0.0, 0.0)
    assert r0.ttft_s == r0.first_token_s == 0.0114
    assert r0.e2e_s == r0.end_s == 0.042
    assert r0.tpot_s == pytest.approx((r0.e2e_s - r0.ttft_s) / 3) == pytest.approx(0.0102)
    assert (r2.arrival_step, r2.arrival_s, r2.first_scheduled_step, r2.first_token_step) == (1, 0.0114, 10, 10)
    assert r2.queue_s == pytest.approx(0.1032 - 0.0114)
    assert r2.ttft_s == pytest.approx(0.1135 - 0.0114)
    assert (r2.ttft_steps, r2.tpot_steps, r2.e2e_steps) == (10, 1.0, 11)


def test_a_preempted_request_computes_its_tokens_again():
    trace = sample_trace()
    summary, r5 = summarize(trace), by_name(trace)["R5"]
    assert summary.num_preemptions == r5.num_preemptions == 2
    assert phases(r5) == [
        ("queued", 3, 43),
        ("prefill", 44, 44),
        ("decode", 45, 46),
        ("preempted", 47, 48),
        ("prefill", 49, 49),
        ("decode", 50, 50),
        ("preempted", 51, 55),
        ("prefill", 56, 56),
        ("decode", 57, 75),
    ]
    # 12 prompt tokens and 2 outputs were in the cache when it was first thrown out, then 12 and 4; then it found its
    # first block of 8 again.
    assert [span.num_recomputed_tokens for span in r5.spans if span.phase == "prefill"] == [0, 14, 8]
    assert [span.num_tokens for span in r5.spans if span.phase == "prefill"] == [12, 15, 9]
    assert summary.num_recomputed_tokens == 22 and (summary.num_cached_tokens, r5.num_cached_tokens) == (0, 0)
    assert [step["cached"] for step in trace.steps if "cached" in step] == [{"R5": 8}]


def test_without_a_prefix_cache_a_preempted_request_computes_all_its_tokens_again():
    trace = sample_trace(enable_prefix_caching=False)
    summary, r5 = summarize(trace), by_name(trace)["R5"]
    assert [span.num_recomputed_tokens for span in r5.spans if span.phase == "prefill"] == [0, 14, 16]
    assert [span.num_tokens for span in r5.spans if span.phase == "prefill"] == [12, 15, 17]
    assert (summary.num_recomputed_tokens, summary.num_preemptions) == (30, 2)


def test_one_token_has_no_time_per_output_token():
    [request] = request_times(sample_trace([(5, 1, 0)]))
    assert request.tpot_s is None and request.tpot_steps is None
    assert request.ttft_s == request.e2e_s == 0.0105 and request.ttft_steps == 1


def test_a_trace_without_steps_comes_to_zeros():
    summary = summarize(make_engine().start_recording())
    assert (summary.num_steps, summary.duration_s, summary.output_tokens_per_s) == (0, 0.0, 0.0)
    assert (summary.output_tokens_per_step, summary.mean_usage, summary.requests) == (0.0, 0.0, ())


def test_answers_that_branch_off_begin_with_their_parent():
    trace = branching()
    summary, requests = summarize(trace), by_name(trace)
    assert summary.num_requests == 4 and summary.num_prompt_tokens == 20
    assert phases(requests["A"]) == [("prefill", 0, 0), ("decode", 1, 3)]
    for name in ("A/1", "A/2"):
        assert phases(requests[name]) == [("decode", 1, 3)]
        assert requests[name].token_steps == (0, 1, 2, 3)
        assert (requests[name].parent_id, requests[name].first_scheduled_step, requests[name].ttft_steps) == ("A", 0, 1)


def test_an_answer_of_one_token_has_no_span_of_its_own():
    requests = by_name(branching(max_tokens=1))
    assert requests["A/2"].spans == () and requests["A/2"].token_steps == (0,)
    assert requests["A/2"].end_step == 0


def test_an_aborted_request_ends_and_was_not_preempted():
    request = by_name(branching())["B"]
    assert request.finish_reason == "abort" and request.end_step == 6
    assert phases(request) == [("prefill", 0, 0), ("decode", 1, 5), ("idle", 6, 6)]
    assert request.num_preemptions == 0
    assert request.tpot_s == pytest.approx((request.last_token_s - request.first_token_s) / 5) and request.e2e_s > 0


def test_a_request_aborted_in_the_queue_has_neither_start_nor_token():
    engine = make_engine(max_num_seqs=1)
    trace = engine.start_recording()
    for name in ("A", "B"):
        engine.add_request(name, [1, 2], SamplingParams(temperature=0, max_tokens=5))
    engine.step()
    engine.step()
    engine.abort_request("B")
    fakes.run_to_end(engine)
    request = by_name(trace)["B"]
    assert phases(request) == [("queued", 0, 2)] and request.end_step == 2
    assert request.first_scheduled_s is request.first_token_s is request.ttft_s is request.tpot_s is None
    assert request.queue_s is None and request.ttft_steps is None and request.first_token_step is None
    assert summarize(trace).num_output_tokens == 5


def test_a_failed_request_ends_in_the_step_that_failed():
    engine = make_engine()
    trace = engine.start_recording()
    engine.add_request("A", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
    engine.step()
    engine.runner.fail["A"] = "broken"
    fakes.run_to_end(engine)
    request = by_name(trace)["A"]
    assert (request.finish_reason, request.end_step, request.num_output_tokens) == ("error", 1, 1)


def test_a_recording_that_begins_in_the_middle_does_not_invent_a_first_token():
    engine = make_engine()
    engine.add_request("A", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
    engine.step()
    trace = engine.start_recording()
    fakes.run_to_end(engine)
    [request] = request_times(trace)
    assert request.ttft_s is None and request.first_token_step is None and request.tpot_s is None
    assert request.num_output_tokens == 4 and phases(request) == [("decode", 0, 3)]


def test_a_name_that_is_used_again_counts_twice():
    engine = make_engine()
    trace = engine.start_recording()
    for length in (2, 3):
        engine.add_request("A", [1] * length, SamplingParams(temperature=0, max_tokens=2))
        fakes.run_to_end(engine)
    first, second = request_times(trace)
    assert [first.num_prompt_tokens, second.num_prompt_tokens] == [2, 3]
    assert [first.token_steps, second.token_steps] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_spans_follow_each_other_and_add_up_to_the_steps(fields):
    trace = sample_trace(**fields)
    requests = request_times(trace)
    for request in requests:
        assert request.spans[0].first_step == request.arrival_step
        assert all(a.last_step + 1 == b.first_step and a.end_s <= b.start_s for a, b in pairwise(request.spans))
        assert all(span.start_s <= span.end_s for span in request.spans)
        assert sum(span.num_output_tokens for span in request.spans) == request.num_output_tokens
    for step in trace.steps:
        computed = {
            request.request_id: span.num_tokens
            for request in requests
            for span in request.spans
            if span.num_tokens and span.first_step == step["step"]
        }
        assert computed == step.get("scheduled", {})


def test_a_gap_counts_what_everybody_computed_since_the_token_before():
    trace = sample_trace([(4, 5, 0), (20, 2, 2)], num_blocks=64)
    gaps = token_gaps(trace, "R0")
    # In step 2 the reader waits for the other's 20 prompt tokens, in step 3 for the other's decode.
    assert [(gap.step, gap.num_tokens) for gap in gaps] == [(1, 1), (2, 21), (3, 2), (4, 1)]
    assert [gap.seconds for gap in gaps] == pytest.approx([0.0101, 0.0121, 0.0102, 0.0101])


def test_a_gap_reaches_across_a_preemption():
    gaps = {gap.step: gap.num_tokens for gap in token_gaps(sample_trace(), "R5")}
    trace = sample_trace()
    assert gaps[49] == sum(sum(step["scheduled"].values()) for step in trace.steps[47:50])
    assert 47 not in gaps and 48 not in gaps


def test_gaps_of_a_stranger_are_refused():
    with pytest.raises(ValueError, match="no request 'R99'"):
        token_gaps(sample_trace(), "R99")


@pytest.mark.parametrize("case", ["continuous", "one by one", "pow2", "whole prompts"])
def test_memory_events_replay_as_the_managers_own(case, monkeypatch):
    engines = []

    def listening(**fields):
        engines.append(make_engine(**fields))
        engines[0].scheduler.manager.events = []
        return engines[0]

    monkeypatch.setattr(fakes, "make_engine", listening)
    trace = sample_trace(**CASES[case])
    manager = engines[0].scheduler.manager
    own = replay(manager.events, manager.num_blocks, manager.block_size)
    ours = replay(memory_events(trace), manager.num_blocks, manager.block_size)
    assert np.array_equal(own[0], ours[0]) and np.array_equal(own[1], ours[1])


def test_memory_events_of_answers_share_the_prompts_blocks_and_copy_the_last():
    events = [event for event in memory_events(branching()) if event.step < 2]
    assert [(e.step, e.kind, e.request_id, e.block_ids, e.num_tokens) for e in events] == [
        (0, "allocate", "A", (0, 1, 2), 10),
        (0, "allocate", "B", (3, 4, 5), 10),
        (0, "fork", "A/1", (0, 1, 2), 10),
        (0, "fork", "A/2", (0, 1, 2), 10),
        (1, "copy", "A", (0, 1, 6), 11),
        (1, "grow", "B", (3, 4, 5), 11),
        (1, "copy", "A/1", (0, 1, 7), 11),
        (1, "grow", "A/2", (0, 1, 2), 11),
    ]


def test_ended_members_of_a_static_batch_hold_their_blocks_to_its_end():
    events = memory_events(sample_trace([(5, 4, 0), (9, 10, 0)], batching="static", max_num_seqs=2))
    assert [(e.step, e.request_id) for e in events if e.kind == "free"] == [(9, "R0"), (9, "R1")]
    owner, _ = replay(events, 12, 8)
    assert owner[0].tolist() == [0] * 10
