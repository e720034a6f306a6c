"""The flight recorder: what is rebuilt from a trace is what the engine was, after every step."""

import json
import random
from dataclasses import asdict

import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.trace import Trace
from tests.fakes import make_engine, run_to_end, sample_trace
from tests.scheduler.machine import World, compare, random_act

CONTIGUOUS = [{"kv_cache": "contiguous", "reservation": kind} for kind in ("max", "pow2", "exact")]
MEMORIES = [{}, *CONTIGUOUS]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def ids(fields):
    return fields.get("reservation", "paged")


@pytest.fixture(scope="module")
def trace():
    return sample_trace()


def recorded(engine, max_steps=1000):
    """Runs to the end, comparing after every step; returns the states."""
    trace = engine._recorder.trace
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return [trace.state(k) for k in range(len(trace))]
        engine.step()
        compare(trace, engine)
    raise AssertionError("not done")


# --- files


def test_what_is_saved_is_loaded(trace, tmp_path):
    path = tmp_path / "trace.jsonl"
    trace.save(path)
    loaded = Trace.load(path)
    assert loaded.header == trace.header and loaded.steps == trace.steps and len(loaded) == len(trace)
    assert [loaded.state(k) for k in range(len(loaded))] == [trace.state(k) for k in range(len(trace))]
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(trace) and json.loads(lines[0])["schema"] == "minivllm.trace"


def test_the_header_says_what_the_engine_was():
    engine = make_engine(num_blocks=12, block_size=8, max_num_seqs=4, max_num_batched_tokens=32)
    header = engine.start_recording().header
    assert header == {
        "schema": "minivllm.trace",
        "version": 2,
        "config": asdict(engine.config),
        "num_blocks": 12,
        "block_size": 8,
        "token_budget": 32,
        "max_running": 4,
        "start_s": 0.0,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"schema":"minivllm.trace","version":2}\n{"step":0,', "line 2 is no JSON"),
        ("step 0\n", "line 1 is no JSON"),
        ('{"schema":"minivllm.trace","version":2}\n[1]\n', "line 2 is no JSON object"),
        ('{"schema":"minivllm.trace","version":1}\n', "'minivllm.trace' version 1, .* version 2 is what can be read"),
        ('{"schema":"other","version":2}\n', "'other' version 2"),
        ("{}\n", "None version None"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(text, message, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Trace.load(path)


def test_a_file_that_breaks_off_is_refused_with_file_and_line(trace, tmp_path):
    path = tmp_path / "trace.jsonl"
    trace.save(path)
    text = path.read_text()
    path.write_text(text[:-10])
    with pytest.raises(ValueError, match=rf"trace.jsonl, line {len(trace) + 1} is no JSON"):
        Trace.load(path)


# --- states


def test_a_state_that_is_not_there_is_refused_and_negative_ones_count_from_the_end(trace):
    for k in (len(trace), -len(trace) - 1):
        with pytest.raises(ValueError, match=f"no step {k}: the trace has {len(trace)}"):
            trace.state(k)
    assert trace.state(-1) == trace.state(len(trace) - 1) and trace.state(-len(trace)) == trace.state(0)
    with pytest.raises(ValueError, match="no step 0"):
        Trace(trace.header).state(0)


def test_random_access_gives_what_going_forward_gives(trace):
    forward = [Trace(trace.header, trace.steps).state(k) for k in range(len(trace))]
    order = list(range(len(trace))) * 2
    random.Random(0).shuffle(order)
    assert all(trace.state(k) == forward[k] for k in order)


def test_mutating_a_state_changes_nothing(trace):
    before, saved = trace.state(9), json.dumps(trace.steps)
    state = trace.state(9)
    state.requests.clear()
    for values in (state.waiting, state.running, state.rerun, state.decisions, state.copies):
        values.append("x")
    state.scheduled["x"] = state.sampled["x"] = state.finished["x"] = 1
    for request in trace.state(9).requests.values():
        request.block_ids.append(-1)
        request.num_tokens = 0
    assert trace.state(9) == before and trace.state(10) is not trace.state(10) and json.dumps(trace.steps) == saved
    assert [trace.state(k) for k in (9, 10)] == [Trace(trace.header, trace.steps).state(k) for k in (9, 10)]


def test_the_states_of_one_request_from_its_arrival_to_its_end():
    engine = make_engine(block_size=4, max_num_batched_tokens=8)
    trace = engine.start_recording()
    engine.add_request("A", list(range(1, 11)), SamplingParams(temperature=0, max_tokens=2), arrival_time=-1.0)
    states = recorded(engine)
    seen = [
        (s.requests["A"].status, s.scheduled, s.sampled, s.requests["A"].num_computed_tokens, s.requests["A"].block_ids)
        for s in states
    ]
    assert seen == [
        ("running", {"A": 8}, {}, 8, [0, 1]),
        ("running", {"A": 2}, {"A": 1}, 10, [0, 1, 2]),
        ("length", {"A": 1}, {"A": 1}, 11, []),
    ]
    request, last = states[-1].requests["A"], states[-1]
    assert (request.arrival_s, request.ended, request.ended_in_step, request.num_output_tokens) == (-1.0, True, 2, 2)
    assert (request.num_prompt_tokens, request.max_num_tokens, request.num_scheduled_tokens) == (10, 12, 1)
    assert last.finished == {"A": "length"} and last.running == last.waiting == [] and last.usage == 0.0
    assert states[0].decisions == [
        {"kind": "admit", "request_id": "A", "cause": "", "other": None, "needed": 8, "available": 0}
    ]
    assert [(s.step, s.start_s, s.end_s) for s in states] == [(0, 0.0, 0.0108), (1, 0.0108, 0.021), (2, 0.021, 0.0311)]
    assert states[0].holders == {0: ["A"], 1: ["A"]} and states[0].num_scheduled_tokens == 8
    assert states[0].fragmentation.used == 8 and states[0].fragmentation.total == 256
    assert trace.state(0).usage == pytest.approx(2 / 64)
    assert [step.get("released") for step in trace.steps] == [None, None, ["A"]]
    assert not any("removed" in step for step in trace.steps)


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_state_is_that_of_the_engine_whatever_happens(fields, batching, policy):
    """Preemptions, branches, aborts (in flight too), failing rows, passes that break off, names that come again."""
    rng = random.Random(f"{fields}{batching}{policy}")
    for keep in (True, False):
        world = World(
            num_blocks=10,
            block_size=4,
            max_model_len=36,
            max_num_seqs=5,
            max_num_batched_tokens=16,
            keep_finished_rows=keep,
            record=True,
            batching=batching,
            scheduling_policy=policy,
            **fields,
        )
        for _ in range(150):
            random_act(world, rng, trouble=0.04)
            num_broken = world.num_broken
            world.step()
            if world.num_broken == num_broken:
                compare(world.trace, world.engine)
        world.drain()
        kinds = {decision["kind"] for step in world.trace.steps for decision in step.get("decisions", ())}
        assert {"admit", "wait"} <= kinds
        last = world.trace.state(-1)
        assert all(request.ended and not request.block_ids for request in last.requests.values())


def test_moves_of_contiguous_memory_are_seen():
    engine = make_engine(num_blocks=4, max_model_len=16, block_size=4, kv_cache="contiguous", reservation="pow2")
    engine.start_recording()
    for name in "AB":
        engine.add_request(name, [1, 2, 3, 4], GREEDY)
    states = recorded(engine)
    assert states[0].requests["A"].block_ids == [0] and states[1].requests["A"].block_ids == [2, 3]
    assert states[1].copies == [[0, 2], [1, 0]] and states[1].requests["B"].block_ids == [0, 1]


def test_a_branch_that_loses_its_memory_before_its_first_step_is_preempted_in_the_trace_too():
    engine = make_engine(num_blocks=2, max_model_len=8, block_size=4)
    trace = engine.start_recording()
    engine.add_request("P", [1, 2, 3, 4, 5, 6], SamplingParams(n=2, max_tokens=2))
    states = recorded(engine)
    assert states[0].running == ["P", "P/1"] and states[0].holders == {0: ["P", "P/1"], 1: ["P", "P/1"]}
    branch = states[1].requests["P/1"]
    assert (branch.status, branch.block_ids, branch.num_computed_tokens, branch.num_preemptions) == (
        "preempted",
        [],
        0,
        1,
    )
    assert branch.parent_id == "P" and trace.steps[1]["removed"] == ["P/1"]


def test_an_abort_before_a_branch_was_ever_run_takes_its_blocks():
    engine = make_engine(block_size=4)
    trace = engine.start_recording()
    engine.add_request("P", [1, 2, 3, 4, 5, 6], SamplingParams(n=2, max_tokens=5))
    engine.step()
    engine.abort_request("P")
    states = recorded(engine)
    assert [request.status for request in states[-1].requests.values()] == ["abort", "abort"]
    assert trace.steps[1]["removed"] == ["P", "P/1"] and "released" not in trace.steps[1]
    assert states[-1].holders == {} and [r.num_preemptions for r in states[-1].requests.values()] == [0, 0]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_recording_can_begin_in_the_middle(batching):
    engine = make_engine(num_blocks=12, block_size=4, max_num_seqs=3, max_model_len=32, batching=batching)
    for name, length, max_tokens in (("A", 8, 2), ("B", 8, 20), ("C", 12, 9), ("D", 3, 4)):
        engine.add_request(name, list(range(1, length + 1)), SamplingParams(temperature=0, max_tokens=max_tokens))
    for _ in range(4):
        engine.step()
    trace = engine.start_recording()
    engine.add_request("E", [1], GREEDY)
    with pytest.raises(ValueError, match="recording already"):
        engine.start_recording()
    states = recorded(engine)
    assert states[0].step == 0 and states[0].requests["B"].arrival_s < 0 == states[0].start_s
    assert trace.header["start_s"] + states[-1].end_s == pytest.approx(engine.clock.now())
    if batching == "static":
        assert states[0].requests["A"].status == "length" and states[0].requests["A"].ended_in_step == -1
        assert states[0].rerun == ["A"]
    else:
        assert "A" not in states[0].requests
    engine.stop_recording()
    length = len(trace)
    engine.add_request("F", [1], GREEDY)
    run_to_end(engine)
    engine.stop_recording()
    assert len(trace) == length and engine.start_recording() is not trace


def two_in_a_pool_of_four(num_steps):
    """An engine that has made some steps: A and B hold all four blocks after the first; B is preempted in the third
    and comes back in the seventh."""
    engine = make_engine(num_blocks=4, block_size=4, max_model_len=16, enable_prefix_caching=False)
    for name in "AB":
        engine.add_request(name, [1] * 7, GREEDY)
    for _ in range(num_steps):
        engine.step()
    return engine


def test_who_is_preempted_in_the_first_recorded_step_is_seen_to_lose_its_memory():
    engine = two_in_a_pool_of_four(2)
    trace = engine.start_recording()
    states = recorded(engine)
    first, second = trace.steps[0], states[0].requests["B"]
    assert (first["removed"], first["preempted"], first.get("released")) == (["B"], ["B"], None)
    assert (second.status, second.block_ids, second.num_computed_tokens, second.num_preemptions) == (
        "preempted",
        [],
        0,
        1,
    )
    assert states[0].requests["A"].block_ids == [0, 1, 3] and states[0].holders == {0: ["A"], 1: ["A"], 3: ["A"]}
    assert states[-1].requests["B"].num_preemptions == 1


def test_who_ends_in_the_first_recorded_step_is_seen_to_release_its_memory():
    engine = two_in_a_pool_of_four(5)
    trace = engine.start_recording()
    states = recorded(engine)
    first, request = trace.steps[0], states[0].requests["A"]
    assert (first["finished"], first["released"], first.get("removed")) == ({"A": "length"}, ["A"], None)
    assert (request.status, request.ended_in_step, request.num_output_tokens, request.block_ids) == ("length", 0, 6, [])
    assert states[0].running == [] and states[0].waiting == ["B"] and states[0].usage == 0


@pytest.mark.parametrize("before", [True, False])
def test_who_is_aborted_before_the_first_recorded_step_is_seen_to_go(before):
    """Whether the abort was asked for before the recording began, or after."""
    engine = two_in_a_pool_of_four(1)
    if before:
        engine.abort_request("B")
    trace = engine.start_recording()
    if not before:
        engine.abort_request("B")
    states = recorded(engine)
    first, request = trace.steps[0], states[0].requests["B"]
    assert (first["finished"], first["removed"], first.get("released")) == ({"B": "abort"}, ["B"], None)
    assert (request.status, request.ended_in_step, request.block_ids, request.num_preemptions) == ("abort", 0, [], 0)
    assert states[0].running == ["A"]


def test_preemptions_before_the_recording_are_counted_and_not_told_again():
    engine = two_in_a_pool_of_four(3)
    trace = engine.start_recording()
    states = recorded(engine)
    assert [state.requests["B"].num_preemptions for state in states] == [1] * len(states)
    assert states[0].requests["B"].status == "preempted" and states[-1].requests["B"].status == "length"
    assert not any("preempted" in step or "removed" in step for step in trace.steps)


def test_preemptions_before_and_after_the_recording_began_add_up():
    fields = {"scheduling_policy": "priority", "enable_prefix_caching": False}
    engine = make_engine(num_blocks=6, block_size=4, max_model_len=24, **fields)
    for name in "AB":
        engine.add_request(name, [1] * 3, SamplingParams(temperature=0, max_tokens=20), priority=1)
    while not any(request.num_preemptions for request in engine.scheduler.waiting):
        engine.step()
    trace = engine.start_recording()
    while engine.scheduler.requests["B"].status.value != "running":
        engine.step()
        compare(trace, engine)
    engine.add_request("C", [1] * 4, SamplingParams(temperature=0, max_tokens=15), priority=0)
    states = recorded(engine)
    assert [name for step in trace.steps for name in step.get("preempted", ())] == ["B"]
    assert (states[0].requests["B"].num_preemptions, states[-1].requests["B"].num_preemptions) == (1, 2)


def test_a_name_that_comes_again_is_a_new_request_at_its_own_place():
    engine = make_engine(block_size=4)
    engine.start_recording()
    engine.add_request("A", [1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=2))
    engine.add_request("B", [1, 2], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    engine.step()
    engine.add_request("A", [7], SamplingParams(temperature=0, max_tokens=3))
    states = recorded(engine)
    again = states[2].requests["A"]
    assert (again.num_prompt_tokens, again.status, again.num_tokens, again.ended_in_step) == (1, "running", 2, None)
    assert list(states[1].requests) == ["A", "B"] and list(states[2].requests) == ["B", "A"]
    assert states[-1].requests["A"].ended_in_step == 4 and states[1].requests["A"].ended_in_step == 1


def test_a_pass_that_broke_off_shows_as_a_preemption_in_the_next_step():
    world = World(num_blocks=12, block_size=4, record=True)
    world.add(6, 5)
    world.step()
    world.runner.break_off = "after"
    world.step()
    world.step()
    compare(world.trace, world.engine)
    state = world.trace.state(-1)
    assert (len(world.trace), state.step) == (2, 1)
    assert world.trace.steps[1]["removed"] == world.trace.steps[1]["preempted"] == ["R0"]
    assert state.requests["R0"].num_preemptions == 1
    assert (state.scheduled, state.cached) == ({"R0": 3}, {"R0": 4})  # its first block is still there


def test_what_is_recorded_is_plain_json(trace):
    assert json.loads(json.dumps(trace.steps, allow_nan=False)) == trace.steps
    assert all("rerun" not in step and step["usage"] >= 0 for step in trace.steps)


def test_an_engine_without_requests_leaves_no_trace_of_its_steps():
    engine = make_engine()
    trace = engine.start_recording()
    engine.step()
    engine.add_request("A", [1, 2], SamplingParams(temperature=0, max_tokens=1))
    for _ in range(3):
        engine.step()
    assert [step["step"] for step in trace.steps] == [0] and len(trace) == 1
    assert repr(trace) == "<Trace: 1 steps, 1 requests, 0.02 s>"


def test_a_second_trace_of_an_engine_counts_from_0_again():
    engine = make_engine()
    for name in "AB":
        trace = engine.start_recording()
        engine.add_request(name, [1, 2], SamplingParams(temperature=0, max_tokens=3))
        run_to_end(engine)
        engine.stop_recording()
        assert [step["step"] for step in trace.steps] == [0, 1, 2]
        assert trace.state(2).requests[name].ended_in_step == 2
    with pytest.raises(ValueError, match="there is no step 3: the trace has 3, numbered from 0"):
        trace.state(3)


def test_memory_of_a_pass_counts_who_ended_with_it():
    engine = make_engine(num_blocks=10, block_size=4)
    trace = engine.start_recording()
    engine.add_request("A", [1] * 8, SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    assert trace.state(0).usage == 0 and trace.state(0).pass_usage == pytest.approx(0.2)
