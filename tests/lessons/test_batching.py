"""Workloads come when they say, take what their price says, and leave the engine free."""

from statistics import fmean, pstdev

import pytest

from minivllm.engine import ModelLimits
from minivllm.kv_cache import ContiguousKVCache, PagedKVCache
from minivllm.lessons.batching import Arrival, model_free_engine, serve, spread_lengths
from minivllm.sampling_params import SamplingParams
from tests.fakes import run_to_end


def priced_engine(**fields):
    """A pass takes half a second, and a quarter more per token."""
    return model_free_engine(**({"step_s": 0.5, "token_s": 0.25, "max_num_seqs": 2} | fields))


def steps(served):
    """Start, end and tokens of every step."""
    return [(step["start_s"], step["end_s"], step["scheduled"]) for step in served.trace.steps]


def arrivals(served):
    """Request to the step that it came in with, and its time of arrival."""
    return {
        added["request_id"]: (step["step"], added["arrival_s"])
        for step in served.trace.steps
        for added in step.get("added", ())
    }


# --- arrivals


def test_requests_and_outputs_are_named_in_the_order_of_the_workload():
    lengths = [2, 3, 1]
    workload = [Arrival([7] * (index + 1), n, at_step=2 - index) for index, n in enumerate(lengths)]
    served = serve(priced_engine(), workload)
    assert [output.request_id for output in served.outputs] == ["R0", "R1", "R2"]
    assert [output.prompt_token_ids for output in served.outputs] == [[7], [7, 7], [7, 7, 7]]
    assert [len(token_ids) for token_ids in served.token_ids] == lengths
    assert list(served.trace.state(-1).requests) == ["R2", "R1", "R0"]  # in order of arrival


def test_requests_that_come_together_come_in_the_order_of_the_workload():
    for when in ({}, {"at_step": 3}, {"at_s": 2.0}):
        served = serve(priced_engine(max_num_seqs=4), [Arrival([1], 2, **when) for _ in range(4)])
        assert list(served.trace.state(0).scheduled) == ["R0", "R1", "R2", "R3"]


def test_a_request_with_a_step_comes_before_that_step():
    served = serve(priced_engine(), [Arrival([1] * 3, 2), Arrival([1], 3), Arrival([1, 1], 1, at_step=1)])
    assert arrivals(served) == {"R0": (0, 0.0), "R1": (0, 0.0), "R2": (1, 1.5)}
    assert steps(served) == [
        (0.0, 1.5, {"R0": 3, "R1": 1}),
        (1.5, 2.5, {"R0": 1, "R1": 1}),
        (2.5, 3.75, {"R1": 1, "R2": 2}),
    ]


def test_steps_without_anybody_count_and_leave_no_trace():
    served = serve(priced_engine(), [Arrival([1], 1, at_step=3)])
    assert steps(served) == [(1.5, 2.25, {"R0": 1})]


def test_a_request_with_a_time_comes_at_that_time_and_an_idle_engine_waits_for_it():
    engine = priced_engine()
    workload = [Arrival([1] * 3, 2), Arrival([1], 1, at_s=0.75), Arrival([1, 1], 1, at_s=10.0)]
    for start in (0.0, 11.0):  # times count from the start of each run
        served = serve(engine, workload)
        assert served.trace.header["start_s"] == start
        assert arrivals(served) == {"R0": (0, 0.0), "R1": (1, 0.75), "R2": (2, 10.0)}
        assert steps(served) == [
            (0.0, 1.25, {"R0": 3}),
            (1.25, 2.25, {"R0": 1, "R1": 1}),
            (10.0, 11.0, {"R2": 2}),
        ]


@pytest.mark.parametrize("when", [{"at_step": -1}, {"at_step": 1.5}, {"at_s": -0.5}, {"at_step": 2, "at_s": 1.0}])
def test_an_arrival_that_makes_no_sense_is_refused(when):
    with pytest.raises(ValueError, match="at_step"):
        Arrival([1], 1, **when)


def test_end_of_sequence_tokens_are_ignored():
    engine = priced_engine()
    engine.limits = ModelLimits(100, 100, frozenset([0]))  # every token of the priced runner
    assert serve(engine, [Arrival([1], 3)]).token_ids == [[0, 0, 0]]


# --- the engine before and after


def test_a_busy_engine_is_refused_and_left_alone():
    engine = priced_engine()
    engine.add_request("mine", [1], SamplingParams(temperature=0, max_tokens=2))
    with pytest.raises(ValueError, match="the engine has requests that have not ended: step it until they have"):
        serve(engine, [Arrival([1], 1)])
    assert list(run_to_end(engine)) == ["mine"]


def test_an_engine_is_free_and_not_recorded_after_a_pass_that_breaks_off(monkeypatch):
    engine = priced_engine()
    execute, calls = engine.runner.execute, []

    def breaks_off_once(plan):
        calls.append(plan)
        if len(calls) == 2:
            raise RuntimeError("the pass broke off")
        return execute(plan)

    monkeypatch.setattr(engine.runner, "execute", breaks_off_once)
    with pytest.raises(RuntimeError, match="the pass broke off"):
        serve(engine, [Arrival([1] * 3, 5), Arrival([1], 5), Arrival([1], 5, at_step=9)])
    assert not engine.has_unfinished_requests() and engine._recorder is None
    assert engine.scheduler.manager.num_free_blocks == engine.scheduler.manager.num_blocks
    assert serve(engine, [Arrival([1], 2)]).token_ids == [[0, 0]]


def test_a_request_that_can_never_run_is_refused_and_the_engine_is_free():
    engine = priced_engine(num_kv_blocks=2, block_size=4)
    with pytest.raises(ValueError):
        serve(engine, [Arrival([1], 2), Arrival([1] * 20, 2)])
    assert not engine.has_unfinished_requests() and engine._recorder is None
    assert serve(engine, [Arrival([1], 2)]).token_ids == [[0, 0]]


# --- the priced runner


def test_a_pass_takes_its_price_and_a_prompt_in_pieces_gives_its_token_with_the_last():
    served = serve(priced_engine(max_num_batched_tokens=4), [Arrival([1] * 10, 2)])
    assert steps(served) == [
        (0.0, 1.5, {"R0": 4}),
        (1.5, 3.0, {"R0": 4}),
        (3.0, 4.0, {"R0": 2}),
        (4.0, 4.75, {"R0": 1}),
    ]
    assert [step.get("tokens") for step in served.trace.steps] == [None, None, {"R0": 11}, {"R0": 12}]


def test_the_price_of_a_pass_is_the_one_that_was_stated():
    [step] = serve(model_free_engine(step_s=2.0, token_s=0.0), [Arrival([1] * 9, 1)]).trace.steps
    assert (step["start_s"], step["end_s"]) == (0.0, 2.0)
    [step] = serve(model_free_engine(step_s=0.0, token_s=0.125), [Arrival([1] * 9, 1)]).trace.steps
    assert (step["start_s"], step["end_s"]) == (0.0, 1.125)
    [step] = serve(model_free_engine(), [Arrival([1] * 10, 1)]).trace.steps
    assert step["end_s"] == 0.07  # 50 ms and 2 ms per token


def test_rows_of_no_use_cost_as_much_as_others_and_give_no_token(monkeypatch):
    engine, sampled = priced_engine(batching="static"), []
    execute = engine.runner.execute

    def watched(plan):
        result = execute(plan)
        sampled.append(result.sampled)
        return result

    monkeypatch.setattr(engine.runner, "execute", watched)
    served = serve(engine, [Arrival([1], 1), Arrival([1], 3)])
    assert sampled[:3] == [{"R0": [0], "R1": [0]}, {"R1": [0]}, {"R1": [0]}]
    assert [end - start for start, end, _ in steps(served)] == [1.0, 1.0, 1.0]
    assert served.token_ids == [[0], [0, 0, 0]]


def test_a_request_that_loses_its_memory_still_puts_out_all_its_tokens():
    served = serve(priced_engine(num_kv_blocks=4, block_size=4), [Arrival([1] * 7, 6), Arrival([1] * 7, 6)])
    assert [name for step in served.trace.steps for name in step.get("preempted", ())] == ["R1"]
    assert served.token_ids == [[0] * 6, [0] * 6]


def test_branches_are_priced_too():
    engine = priced_engine(max_num_seqs=3)
    engine.add_request("A", [1] * 4, SamplingParams(n=3, seed=1, max_tokens=2, ignore_eos=True))
    output = run_to_end(engine)["A"]
    assert [answer.token_ids for answer in output.outputs] == [[0, 0]] * 3
    assert engine.clock.now() == (0.5 + 4 * 0.25) + (0.5 + 3 * 0.25)


# --- the engine without a model


def test_ended_rows_of_a_static_batch_are_computed_only_if_they_are_kept():
    workload = [Arrival([1], 1), Arrival([1], 3)]
    kept = serve(priced_engine(batching="static", keep_finished_rows=True), workload).trace
    gone = serve(priced_engine(batching="static", keep_finished_rows=False), workload).trace
    assert [step.get("rerun") for step in kept.steps] == [None, ["R0"], ["R0"]]
    assert [step.get("rerun") for step in gone.steps] == [None, None, None]
    assert [step["scheduled"] for step in gone.steps] == [{"R0": 1, "R1": 1}, {"R1": 1}, {"R1": 1}]


def test_its_memory_is_the_one_of_its_config():
    paged = model_free_engine(num_kv_blocks=5, block_size=4)
    slabs = model_free_engine(num_kv_blocks=6, block_size=4, kv_cache="contiguous", max_model_len=12)
    assert type(paged.scheduler.manager) is PagedKVCache and paged.scheduler.manager.num_blocks == 5
    assert type(slabs.scheduler.manager) is ContiguousKVCache and slabs.scheduler.manager.num_blocks == 6
    served = serve(slabs, [Arrival([1], 2) for _ in range(3)])
    assert served.trace.steps[0]["scheduled"] == {"R0": 1, "R1": 1}  # a slab is 3 blocks


# --- lengths


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_the_mean_of_the_lengths_is_the_one_asked_for(cv):
    for mean in (40, 100.0):
        lengths = spread_lengths(1000, mean, cv)
        assert len(lengths) == 1000 and fmean(lengths) == pytest.approx(mean, rel=0.01)


def test_lengths_without_spread_are_equal():
    assert spread_lengths(5, 64, 0.0) == [64] * 5


def test_a_larger_cv_spreads_the_lengths_more():
    spreads = [pstdev(spread_lengths(2000, 1000, cv)) / 1000 for cv in (0.0, 0.25, 0.5, 1.0, 2.0)]
    assert spreads == sorted(spreads) and spreads[0] == 0
    assert spreads[1:4] == pytest.approx([0.25, 0.5, 1.0], rel=0.15)


def test_every_length_is_at_least_one():
    lengths = spread_lengths(500, 2, 3.0)
    assert min(lengths) == 1 and all(isinstance(length, int) for length in lengths)


def test_the_same_seed_draws_the_same_lengths():
    assert spread_lengths(5, 100, 0.5) == spread_lengths(5, 100, 0.5, seed=0)
    assert spread_lengths(5, 100, 0.5, seed=1) == spread_lengths(5, 100, 0.5, seed=1) != spread_lengths(5, 100, 0.5)
