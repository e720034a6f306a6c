"""Chrome's trace events say what the trace says, and the format is kept."""

import json
from itertools import accumulate, pairwise

import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.trace import summarize
from minivllm.trace.perfetto import ENGINE, REQUESTS, STEPS, trace_events
from tests.fakes import make_engine, run_to_end, sample_trace
from tests.viz.shared import PROMPTS, shared_trace

CASES = {"continuous": {}, "static": {"batching": "static"}, "one by one": {"batching": "static", "max_num_seqs": 1}}


@pytest.fixture(params=CASES.values(), ids=CASES)
def trace(request):
    return sample_trace(**request.param)


def tracks(events):
    """Track to its slices, in the order in which they stand."""
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def test_events_are_plain_json_with_whole_times_in_order(trace):
    events = trace_events(trace)
    assert json.loads(json.dumps(events)) == events
    assert all(type(event["pid"]) is int and type(event["tid"]) is int for event in events)
    metadata = [event["ph"] == "M" for event in events]
    assert metadata == sorted(metadata, reverse=True)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert all(type(time) is int for time in times) and times == sorted(times) and times[0] >= 0
    assert all(type(event["dur"]) is int and event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_slices_of_a_track_do_not_overlap(trace):
    for slices in tracks(trace_events(trace)).values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(slices))


def test_every_request_has_a_named_track(trace):
    events = trace_events(trace)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(ENGINE, STEPS): "steps"} | {(REQUESTS, i + 1): f"R{i}" for i in range(7)}
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        ENGINE: "engine",
        REQUESTS: "requests",
    }
    assert set(tracks(events)) == set(names)


def test_slices_of_the_requests_add_up_to_the_tokens(trace):
    events, summary = trace_events(trace), summarize(trace)
    rows = [e for e in events if e["ph"] == "X" and e["pid"] == REQUESTS and "tokens" in e["args"]]
    assert sum(e["args"]["output_tokens"] for e in rows) == summary.num_output_tokens == 127
    assert sum(e["args"]["tokens"] for e in rows) == summary.num_computed_tokens
    decoded = [e["args"]["output_tokens"] for e in rows if e["name"] == "decode"]
    assert set(decoded) == {1}
    # Every output token but those that a prefill ends with (7 first ones, and one after each preemption).
    assert len(decoded) == summary.num_output_tokens - 7 - summary.num_preemptions
    assert sum(e["name"] == "rerun" for e in rows) == summary.num_useless_tokens


def test_every_step_has_its_slice_and_five_counters(trace):
    events = trace_events(trace)
    steps = tracks(events)[ENGINE, STEPS]
    assert [event["name"] for event in steps] == [f"step {k}" for k in range(len(trace))]
    for event, step in zip(steps, trace.steps, strict=True):
        assert (event["ts"], event["ts"] + event["dur"]) == (round(step["start_s"] * 1e6), round(step["end_s"] * 1e6))
        assert event["args"]["tokens"] == sum(step["scheduled"].values())
        assert event["args"]["token_budget"] == 32
        assert event["args"]["decisions"] == step.get("decisions", [])
    counters = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"]["value"])
    assert counters["tokens in step"] == [sum(step["scheduled"].values()) for step in trace.steps]
    assert counters["waiting"] == [len(step.get("waiting", [])) for step in trace.steps]
    assert counters["KV cache usage (%)"] == [round(100 * step["pass_usage"], 2) for step in trace.steps]
    hits = list(accumulate(sum(step.get("cached", {}).values()) for step in trace.steps))
    assert counters["prefix cache hits (tokens so far)"] == hits
    assert counters["running"] == [len(s["scheduled"]) - len(s.get("rerun", ())) for s in trace.steps]
    assert len(counters) == 5


def test_who_waited_before_a_step_began_has_one_slice_for_it():
    engine = make_engine(max_num_seqs=1)
    trace = engine.start_recording()
    for name in "AB":
        engine.add_request(name, [1, 2], SamplingParams(temperature=0, max_tokens=2), arrival_time=-0.5)
    run_to_end(engine)
    queued = [e for e in trace_events(trace) if e["name"] == "queued"]
    assert [(e["tid"], e["args"]) for e in queued] == [(1, {}), (2, {"steps": [0, 1]})]


def test_a_preempted_request_reads_as_its_story():
    events = trace_events(sample_trace(enable_prefix_caching=False))
    story = [(e["name"], e["args"]["steps"]) for e in tracks(events)[REQUESTS, 6] if e["name"] != "decode"]
    assert story == [
        ("queued", [3, 43]),
        ("prefill", [44, 44]),
        ("preempted", [47, 48]),
        ("prefill", [49, 49]),
        ("preempted", [51, 55]),
        ("prefill", [56, 56]),
    ]
    marks = [(e["name"], e["ts"]) for e in events if e["ph"] == "i" and e["tid"] == 6]
    assert marks == [("first token", 472800), ("ended: length", 793500)]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_the_first_prefill_of_a_request_tells_what_it_found(batching):
    trace = shared_trace(batching=batching, max_num_batched_tokens=32)
    events = trace_events(trace)
    prefills = [(e["tid"], e["args"]) for e in events if e["name"] == "prefill"]
    # A computes 40 tokens in two steps; B finds 32 of them, and its second answer has no prefill; C finds none.
    assert [(tid, args["tokens"], args.get("num_cached_tokens")) for tid, args in prefills] == [
        (1, 32, 0),
        (1, 8, None),
        (2, 10, 32),
        (4, 17, 0),
    ]
    steps = tracks(events)[ENGINE, STEPS]
    assert [e["args"]["cached_tokens"] for e in steps if e["args"]["cached_tokens"]] == [32]
    assert sum(e["args"]["evicted_blocks"] for e in steps) == 1


def test_what_a_member_of_a_static_batch_found_is_told_when_its_turn_comes():
    engine = make_engine(block_size=8, batching="static", max_num_batched_tokens=16)
    trace = engine.start_recording()
    for names in ("A", "XB"):
        for name in names:
            prompt = PROMPTS.get(name, list(range(90, 106)))
            engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=1))
        run_to_end(engine)
    admitted = trace.steps[3]
    assert admitted["cached"] == {"B": 32} and list(admitted["scheduled"]) == ["X"]
    found = [e["args"] for e in trace_events(trace) if e["name"] == "prefill" and e["tid"] == 3]
    assert [(args["steps"], args["tokens"], args["num_cached_tokens"]) for args in found] == [([4, 4], 10, 32)]
    assert summarize(trace).num_cached_tokens == 32


def test_what_came_before_the_trace_begins_with_it():
    engine = make_engine(max_num_seqs=1)
    for name in ("A", "B"):
        engine.add_request(name, [1, 2], SamplingParams(temperature=0, max_tokens=3))
    engine.step()
    trace = engine.start_recording()
    run_to_end(engine)
    queued = tracks(trace_events(trace))[REQUESTS, 2][0]
    assert (queued["name"], queued["ts"]) == ("queued", 0)


def test_the_file_is_what_perfetto_opens(tmp_path):
    trace = sample_trace()
    trace.to_perfetto(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == {"traceEvents": trace_events(trace)}
