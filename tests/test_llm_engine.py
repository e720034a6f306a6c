"""LLMEngine on the fake runner: requests in, the right tokens out, whatever happens in between."""

import random
import threading

import pytest

from minivllm.clock import VirtualClock
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine, ModelLimits
from minivllm.kv_cache import ContiguousKVCache, PagedKVCache
from minivllm.sampler import derive_seed
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ContinuousScheduler, StaticScheduler
from tests.fakes import EOS, VOCAB, FakeRunner, expected_output, make_engine, next_token, run_to_end
from tests.scheduler.machine import ForgivingRows, World, random_act

MEMORIES = [{}, *({"kv_cache": "contiguous", "reservation": kind} for kind in ("max", "pow2", "exact"))]
BATCHINGS = ["continuous", "static"]


def ids(fields):
    return fields.get("reservation", "paged")


def greedy(max_tokens=16, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def prompt_of(number, length):
    return [1 + (number * 53 + place * 7) % (VOCAB - 1) for place in range(length)]


def tokens_of(output):
    [answer] = output.outputs
    return answer.token_ids


def assert_empty(engine):
    """Nothing is left behind, here or with the runner."""
    assert engine.step() == [] and not engine.has_unfinished_requests()
    manager, scheduler = engine.scheduler.manager, engine.scheduler
    manager.check()
    assert manager.num_free_blocks == manager.num_blocks and engine.runner.rows == {}
    assert scheduler.running == [] and len(scheduler.waiting) == 0 and scheduler.requests == {}


# --- memory that is just enough, and memory that can never be


@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("fields", [{}, {"kv_cache": "contiguous", "reservation": "exact"}], ids=ids)
def test_a_pool_of_exactly_the_blocks_that_are_needed_is_enough(max_num_seqs, fields):
    """KV-01: the last sampled token needs no slot, so ceil((P + G - 1) / B) blocks."""
    for prompt_len in (15, 16, 17, 31, 32, 33):
        for max_tokens in (1, 2, 16, 17, 18):
            num_blocks = -(-(prompt_len + max_tokens - 1) // 16)
            engine = make_engine(num_blocks, max_num_seqs=max_num_seqs, **fields)
            prompt = prompt_of(prompt_len, prompt_len)
            engine.add_request("A", prompt, greedy(max_tokens))
            output = run_to_end(engine)["A"]
            assert tokens_of(output) == expected_output(prompt, max_tokens), (prompt_len, max_tokens)
            assert output.outputs[0].finish_reason == "length" and output.metrics.num_preemptions == 0
            assert engine.runner.num_computed == prompt_len + max_tokens - 1
            assert_empty(engine)


@pytest.mark.parametrize(("prompt_len", "max_tokens", "num_blocks"), [(16, 1, 1), (16, 2, 2), (16, 17, 2), (16, 18, 3)])
def test_one_block_less_is_refused(prompt_len, max_tokens, num_blocks):
    make_engine(num_blocks).add_request("A", prompt_of(0, prompt_len), greedy(max_tokens))
    if num_blocks > 1:
        with pytest.raises(ValueError, match=f"which need {prompt_len + max_tokens - 1} slots"):
            make_engine(num_blocks - 1).add_request("A", prompt_of(0, prompt_len), greedy(max_tokens))


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
@pytest.mark.parametrize("batching", BATCHINGS)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers_and_the_next_is_served(fields, batching):
    """KV-02: a pool of 64 slots."""
    engine = make_engine(4, batching=batching, **fields)
    with pytest.raises(ValueError, match=r"the prompt has 100 tokens and the KV cache holds 64 \(4 blocks of 16\)"):
        engine.add_request("A", prompt_of(0, 100), greedy(1))
    with pytest.raises(ValueError, match=r"prompt has 60 tokens and max_tokens is 50, which need 109 slots.* holds 64"):
        engine.add_request("A", prompt_of(0, 60), greedy(50))
    with pytest.raises(ValueError, match="n is 300 and at most 256"):
        engine.add_request("A", prompt_of(0, 6), SamplingParams(n=300))
    assert not engine.has_unfinished_requests()
    engine.add_request("A", prompt_of(1, 10), greedy(5))
    assert tokens_of(run_to_end(engine)["A"]) == expected_output(prompt_of(1, 10), 5)
    assert_empty(engine)


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
def test_without_max_tokens_a_text_goes_on_to_the_end_of_memory_or_of_the_model(fields):
    engine = make_engine(4, **fields)
    engine.add_request("A", prompt_of(0, 60), greedy(None))
    assert len(tokens_of(run_to_end(engine)["A"])) == 5
    engine = make_engine(64, max_model_len=80, **fields)
    engine.add_request("A", prompt_of(0, 60), greedy(None))
    engine.add_request("B", prompt_of(0, 70), greedy(50))
    outputs = run_to_end(engine)
    assert [len(tokens_of(outputs[name])) for name in "AB"] == [20, 10]
    assert_empty(engine)


# --- outputs, metrics, order


def test_cumulative_outputs_hold_all_tokens_so_far_and_final_ones_come_once():
    engine = make_engine()
    engine.add_request("A", prompt_of(0, 3), greedy(3))
    engine.add_request("B", prompt_of(1, 3), greedy(3), output_kind="final_only")
    seen = [[(o.request_id, len(tokens_of(o)), o.finished) for o in engine.step()] for _ in range(3)]
    assert seen == [[("A", 1, False)], [("A", 2, False)], [("A", 3, True), ("B", 3, True)]]
    assert_empty(engine)


def test_all_answers_are_there_once_the_first_token_is_and_in_order():
    engine = make_engine()
    engine.add_request("P", prompt_of(0, 5), SamplingParams(n=3, seed=7, max_tokens=4))
    first = engine.step()[0]
    assert [(answer.index, len(answer.token_ids), answer.finish_reason) for answer in first.outputs] == [
        (0, 1, None),
        (1, 1, None),
        (2, 1, None),
    ]
    output = run_to_end(engine)["P"]
    assert [answer.token_ids for answer in output.outputs] == [
        expected_output(prompt_of(0, 5), 4, 7 + i) for i in range(3)
    ]
    assert engine.runner.num_computed == 5 + 3 * 3
    assert_empty(engine)


def test_times_are_those_of_the_clock():
    engine = make_engine(max_num_batched_tokens=8)
    engine.clock.advance(5.0)
    engine.add_request("A", prompt_of(0, 12), greedy(2))
    engine.clock.advance(1.0)
    engine.add_request("B", prompt_of(1, 4), greedy(2), arrival_time=2.5)
    outputs = run_to_end(engine)
    a, b = outputs["A"].metrics, outputs["B"].metrics
    step = [0.01 + 0.0001 * count for count in (8, 8, 2)]
    assert (a.arrival_time, a.first_scheduled_time) == (5.0, 6.0) and (b.arrival_time, b.num_preemptions) == (2.5, 0)
    assert b.first_scheduled_time == pytest.approx(6.0 + step[0], abs=1e-12)
    assert a.first_token_time == b.first_token_time == pytest.approx(6.0 + step[0] + step[1], abs=1e-12)
    assert a.finished_time == b.finished_time == pytest.approx(6.0 + sum(step), abs=1e-12) == engine.clock.now()


def test_times_of_several_answers_are_the_first_and_the_last():
    engine = make_engine()
    stop = next_token([*prompt_of(0, 5), next_token(prompt_of(0, 5), 1)], 1)
    engine.limits = ModelLimits(VOCAB, 256, frozenset([stop]))
    engine.add_request("P", prompt_of(0, 5), SamplingParams(n=2, seed=0, max_tokens=4))
    first = engine.step()[0]
    assert first.metrics.first_token_time == engine.clock.now() and first.metrics.finished_time is None
    output = run_to_end(engine)["P"]
    assert [len(answer.token_ids) for answer in output.outputs] == [4, 2]
    assert [answer.finish_reason for answer in output.outputs] == ["length", "stop"]
    assert output.metrics.finished_time == engine.clock.now()
    assert output.metrics.first_token_time == first.metrics.first_token_time


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_sequence_ends_a_text_unless_it_is_ignored(ignore_eos):
    engine = make_engine()
    prompt = prompt_of(0, 5)
    text = expected_output(prompt, 6)
    engine.limits = ModelLimits(VOCAB, 256, frozenset([EOS, text[2]]))
    engine.add_request("A", prompt, greedy(6, ignore_eos=ignore_eos))
    [answer] = run_to_end(engine)["A"].outputs
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (
        (text, "length", None) if ignore_eos else (text[:3], "stop", None)
    )


def test_end_of_sequence_beats_length():
    engine = make_engine()
    prompt = prompt_of(0, 5)
    engine.limits = ModelLimits(VOCAB, 256, frozenset([expected_output(prompt, 3)[2]]))
    engine.add_request("A", prompt, greedy(3))
    assert run_to_end(engine)["A"].outputs[0].finish_reason == "stop"


def test_requests_without_a_seed_draw_each_from_its_own_stream_and_those_with_one_from_theirs():
    engine = make_engine(seed=5)
    for name, seed in (("A", None), ("B", 11), ("C", None)):
        engine.add_request(name, prompt_of(0, 4), SamplingParams(max_tokens=3, seed=seed))
    engine.add_request("D", prompt_of(0, 4), greedy(3))
    outputs = run_to_end(engine)
    seeds = {"A": derive_seed(5, 0), "B": 11, "C": derive_seed(5, 1), "D": 0}
    for name, seed in seeds.items():
        assert tokens_of(outputs[name]) == expected_output(prompt_of(0, 4), 3, seed), name


# --- preemption


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preemption_does_not_show_in_the_output(policy):
    """SCH-03: four requests of 40 + 40 tokens in 12 blocks and in 1000."""
    results = []
    for num_blocks in (12, 1000):
        engine = make_engine(num_blocks, scheduling_policy=policy)
        deltas = {f"R{i}": [] for i in range(4)}
        for i, name in enumerate(deltas):
            params = greedy(40) if i % 2 else SamplingParams(seed=i, max_tokens=40)
            engine.add_request(name, prompt_of(i, 40), params, priority=-i if policy == "priority" else None)
        finals = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert len(tokens_of(output)) == len(deltas[output.request_id]) + 1
                deltas[output.request_id].append(tokens_of(output)[-1])
                if output.finished:
                    finals[output.request_id] = output
        preemptions = {name: output.metrics.num_preemptions for name, output in finals.items()}
        assert (sum(preemptions.values()) > 0) == (num_blocks == 12)
        favourite = "R0" if policy == "fcfs" else "R3"
        assert preemptions[favourite] == 0
        assert all(tokens_of(finals[name]) == tokens for name, tokens in deltas.items())
        assert all(output.outputs[0].finish_reason == "length" for output in finals.values())
        assert_empty(engine)
        results.append({name: tokens_of(output) for name, output in finals.items()})
    assert results[0] == results[1]
    for i in range(4):
        assert results[0][f"R{i}"] == expected_output(prompt_of(i, 40), 40, 0 if i % 2 else i)


def test_priority_is_refused_where_nobody_looks_at_it():
    engine = make_engine()
    with pytest.raises(ValueError, match="the request has priority 3 and scheduling_policy is 'fcfs'"):
        engine.add_request("A", prompt_of(0, 4), priority=3)
    with pytest.raises(ValueError, match="priority 3"):
        engine.add_request("A", {"prompt_token_ids": [1, 2], "priority": 3})
    engine.add_request("A", prompt_of(0, 4), greedy(1), priority=0)
    assert not engine.scheduler.requests and len(run_to_end(engine)) == 1


def test_priority_decides_who_goes_first_and_the_argument_beats_the_prompt():
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    engine.add_request("A", {"prompt_token_ids": prompt_of(0, 4), "priority": 1}, greedy(1))
    engine.add_request("B", prompt_of(0, 4), greedy(1), priority=0)
    engine.add_request("C", {"prompt_token_ids": prompt_of(0, 4), "priority": 7}, greedy(1), priority=-1)
    assert [output.request_id for _ in range(3) for output in engine.step()] == ["C", "B", "A"]


# --- abort


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_thousand_random_operations_and_a_drain(fields, batching, policy):
    """KV-03: add, step and abort, at every moment; the world checks every output and what is left behind."""
    rng = random.Random(f"{fields}{batching}{policy}")
    world = World(
        num_blocks=12,
        block_size=4,
        max_model_len=40,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        batching=batching,
        scheduling_policy=policy,
        **fields,
    )
    for _ in range(500):
        random_act(world, rng, trouble=0.1)
        world.step()
    world.drain()
    reasons = {expected.aborted for expected in world.ended.values()}
    assert reasons == {True, False} and world.num_broken


def in_flight(engine, action):
    """Lets something happen in the middle of the next pass."""
    original = engine.runner.execute

    def execute(plan):
        engine.runner.execute = original
        action()
        return original(plan)

    engine.runner.execute = execute


def state_waiting(engine):  # there is not memory for both
    engine.add_request("X", prompt_of(9, 20), greedy(4))
    engine.step()
    engine.add_request("A", prompt_of(0, 20), greedy())
    return 0


def state_never_seen(engine):
    engine.add_request("A", prompt_of(0, 20), greedy())
    return 0


def state_between_chunks(engine):
    engine.add_request("A", prompt_of(0, 20), greedy())
    engine.step()
    return 0


def state_decoding(engine):
    engine.add_request("A", prompt_of(0, 5), greedy())
    for _ in range(3):
        engine.step()
    return 3


def state_preempted(engine):
    engine.add_request("X", prompt_of(9, 7), greedy())
    engine.add_request("A", prompt_of(0, 1), greedy(20))
    engine.add_request("Y", prompt_of(0, 13), greedy(1))
    for _ in range(30):
        engine.step()
        [a] = [request for name, request in engine.scheduler.requests.items() if name == "A"]
        if a.num_preemptions and a in list(engine.scheduler.waiting):
            return len(a.output_token_ids)
    raise AssertionError("never preempted")


@pytest.mark.parametrize(
    "reach", [state_waiting, state_never_seen, state_between_chunks, state_decoding, state_preempted]
)
@pytest.mark.parametrize("moment", ["between steps", "in flight"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_abort_ends_a_request_once_and_no_token_comes_after_it(reach, moment, times):
    """KV-03, state by state."""
    engine = make_engine(6, max_model_len=24, block_size=4, max_num_seqs=3, max_num_batched_tokens=16)
    num_tokens = reach(engine)

    def abort():
        for _ in range(times):
            engine.abort_request("A")
        engine.abort_request(["nobody", "A"])

    if moment == "in flight":
        in_flight(engine, abort)
    else:
        abort()
    found = [output for output in engine.step() if output.request_id == "A"]
    assert len(found) == 1 and found[0].finished and found[0].outputs[0].finish_reason == "abort"
    assert tokens_of(found[0]) == expected_output(prompt_of(0, {0: 20, 3: 5}.get(num_tokens, 1)), num_tokens)
    assert found[0].metrics.finished_time is not None
    engine.abort_request("A")
    assert "A" not in run_to_end(engine)
    assert_empty(engine)


def test_an_abort_in_the_step_in_which_the_last_token_would_come():
    engine = make_engine()
    engine.add_request("A", prompt_of(0, 4), greedy(2))
    engine.step()
    in_flight(engine, lambda: engine.abort_request("A"))
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "abort" and len(tokens_of(output)) == 1
    engine.add_request("B", prompt_of(0, 4), greedy(1))
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "length"
    engine.abort_request("B")
    assert engine.step() == []
    assert_empty(engine)


def test_an_abort_ends_all_answers_and_keeps_those_that_had_ended():
    engine = make_engine()
    prompt = prompt_of(0, 5)
    engine.limits = ModelLimits(VOCAB, 256, frozenset([next_token(prompt, 2)]))
    engine.add_request("P", prompt, SamplingParams(n=3, seed=0, max_tokens=9))
    engine.step()
    engine.step()
    engine.abort_request("P")
    [output] = engine.step()
    assert [(len(a.token_ids), a.finish_reason) for a in output.outputs] == [(2, "abort"), (2, "abort"), (1, "stop")]
    assert_empty(engine)


def test_an_abort_in_flight_of_what_would_branch_off_leaves_one_answer_without_tokens():
    engine = make_engine()
    engine.add_request("P", prompt_of(0, 5), SamplingParams(n=3))
    in_flight(engine, lambda: engine.abort_request("P"))
    [output] = engine.step()
    assert output.finished and [(a.token_ids, a.finish_reason) for a in output.outputs] == [([], "abort")]
    assert_empty(engine)


def test_a_token_that_is_booked_while_an_abort_comes_in_is_not_put_out():
    engine = make_engine()
    engine.add_request("A", prompt_of(0, 4), greedy(9))
    engine.step()
    update = engine.scheduler.update

    def abort_and_update(*args):
        engine.scheduler.update = update
        engine.abort_request("A")
        return update(*args)

    engine.scheduler.update = abort_and_update
    assert engine.step() == []
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert_empty(engine)


def test_the_name_of_a_branch_is_no_name_to_abort():
    engine = make_engine()
    engine.add_request("P", prompt_of(0, 5), SamplingParams(n=2, max_tokens=3, seed=0))
    engine.step()
    engine.abort_request("P/1")
    assert [a.finish_reason for a in run_to_end(engine)["P"].outputs] == ["length", "length"]


# --- names


def test_a_name_is_refused_while_it_is_in_use_and_free_after_the_end():
    engine = make_engine()
    engine.add_request("A", prompt_of(0, 4), greedy(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="there is a request 'A' that has not ended"):
            engine.add_request("A", prompt_of(1, 4), greedy(2))
        outputs = engine.step()
    assert outputs[0].finished
    engine.add_request("A", prompt_of(1, 4), greedy(3))
    assert tokens_of(run_to_end(engine)["A"]) == expected_output(prompt_of(1, 4), 3)
    assert_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_names_of_all_answers_are_taken_before_they_branch_off_too(steps):
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request("R0", prompt_of(0, 6), SamplingParams(n=2, seed=0, max_tokens=3))
    for _ in range(steps):
        engine.step()
    with pytest.raises(ValueError, match="'R0/1' that has not ended"):
        engine.add_request("R0/1", prompt_of(1, 4), greedy(2))
    engine.add_request("R0/2", prompt_of(1, 4), greedy(2))
    outputs = run_to_end(engine)
    assert [answer.token_ids for answer in outputs["R0"].outputs] == [
        expected_output(prompt_of(0, 6), 3, seed) for seed in (0, 1)
    ]
    engine.add_request("R0/1", prompt_of(1, 4), greedy(2))
    with pytest.raises(ValueError, match="'R0/1' that has not ended"):
        engine.add_request("R0", prompt_of(1, 4), SamplingParams(n=2))
    assert len(run_to_end(engine)) == 1
    assert_empty(engine)


def test_in_a_static_batch_a_name_is_taken_for_as_long_as_the_row_is():
    engine = make_engine(batching="static")
    engine.add_request("A", prompt_of(0, 4), greedy(1))
    engine.add_request("B", prompt_of(1, 4), greedy(3))
    assert [output.finished for output in engine.step()] == [True, False]
    with pytest.raises(ValueError, match="'A' that has not ended, or not given its row up"):
        engine.add_request("A", prompt_of(2, 4), greedy(1))
    run_to_end(engine)
    engine.add_request("A", prompt_of(2, 4), greedy(2))
    assert tokens_of(run_to_end(engine)["A"]) == expected_output(prompt_of(2, 4), 2)
    assert_empty(engine)


def test_what_is_refused_leaves_no_trace():
    engine = make_engine()
    for prompt, params, message in (
        ([], None, "empty"),
        ([VOCAB], None, "out of the vocabulary"),
        (prompt_of(0, 256), None, "max_model_len is 256"),
        ("text", None, "no tokenizer"),
        (prompt_of(0, 4), {"n": 1}, "must be SamplingParams, got dict"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request("A", prompt, params)
    assert not engine.has_unfinished_requests()
    engine.add_request("A", prompt_of(0, 4), greedy(1))
    assert len(run_to_end(engine)) == 1


# --- trouble


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("when", [0, 3])
def test_a_row_that_fails_ends_with_error_and_the_others_are_unharmed(fields, batching, when):
    """SCH-08: one of eight."""
    engine = make_engine(64, max_model_len=64, batching=batching, **fields)
    for i in range(8):
        engine.add_request(f"R{i}", prompt_of(i, 5 + i), greedy(9))
    for _ in range(when):
        engine.step()
    engine.runner.fail["R3"] = "R3 broke"
    outputs = run_to_end(engine)
    [answer] = outputs.pop("R3").outputs
    assert (answer.finish_reason, answer.stop_reason) == ("error", "R3 broke")
    assert answer.token_ids == expected_output(prompt_of(3, 8), 9)[:when]
    for name, output in outputs.items():
        i = int(name[1:])
        assert tokens_of(output) == expected_output(prompt_of(i, 5 + i), 9)
        assert output.outputs[0].finish_reason == "length"
    assert len(outputs) == 7
    assert_empty(engine)


def test_an_answer_that_fails_leaves_the_others_of_its_request_alone():
    engine = make_engine()
    engine.add_request("P", prompt_of(0, 5), SamplingParams(n=3, seed=0, max_tokens=4))
    engine.step()
    engine.runner.fail["P/1"] = "broke"
    output = run_to_end(engine)["P"]
    assert [(a.finish_reason, len(a.token_ids)) for a in output.outputs] == [("length", 4), ("error", 1), ("length", 4)]
    assert_empty(engine)


class Interrupted(FakeRunner):
    """Raises at a chosen point of the next pass: before it, among its rows, or behind it."""

    def __init__(self, manager):
        super().__init__(manager)
        self.rows = ForgivingRows()
        self.error, self.after_rows = None, 0

    def slot(self, row, position):
        if self.error is not None:
            self.after_rows -= 1
            if self.after_rows == 0:
                self.give_up()
        return super().slot(row, position)

    def execute(self, plan):
        if self.error is not None and self.after_rows == 0:
            self.give_up()
        result = super().execute(plan)
        if self.error is not None:
            self.give_up()
        return result

    def give_up(self):
        error, self.error = self.error, None
        raise error


@pytest.mark.parametrize("fields", MEMORIES, ids=ids)
@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_pass_that_breaks_off_leaves_the_engine_usable(fields, batching, error):
    """Also while copies for branches are pending, and with an abort that came in meanwhile."""
    for step in range(9):
        for after_rows in (0, 7, 10**9):
            engine = make_engine(16, max_model_len=32, block_size=4, batching=batching, **fields)
            runner = engine.runner = Interrupted(engine.scheduler.manager)
            engine.add_request("P", prompt_of(0, 6), SamplingParams(n=3, seed=0, max_tokens=6))
            engine.add_request("A", prompt_of(1, 9), greedy(8))
            engine.add_request("B", prompt_of(2, 5), greedy(2))
            engine.add_request("X", prompt_of(3, 5), greedy(9))
            outputs = {}
            for _ in range(step):
                outputs |= {output.request_id: output for output in engine.step() if output.finished}
            engine.abort_request("X")
            runner.error, runner.after_rows = error, after_rows
            with pytest.raises(type(error)):
                engine.step()
            engine.scheduler.manager.check()
            engine.add_request("C", prompt_of(4, 3), greedy(3))
            outputs |= run_to_end(engine)
            assert sorted(outputs) == ["A", "B", "C", "P", "X"]
            for i, (name, length, max_tokens) in enumerate((("A", 9, 8), ("B", 5, 2))):
                assert tokens_of(outputs[name]) == expected_output(prompt_of(i + 1, length), max_tokens)
            assert tokens_of(outputs["C"]) == expected_output(prompt_of(4, 3), 3)
            texts = [answer.token_ids for answer in outputs["P"].outputs]
            assert texts == [expected_output(prompt_of(0, 6), 6, seed) for seed in range(3)]
            assert outputs["X"].outputs[0].finish_reason in ("abort", "length")
            assert_empty(engine)


def test_outputs_held_back_come_with_the_next_step_that_succeeds():
    engine = make_engine()
    runner = engine.runner = Interrupted(engine.scheduler.manager)
    engine.add_request("A", prompt_of(0, 4), greedy(2))
    first = engine.step()
    engine.hold_back(first)
    engine.hold_back(first)
    assert engine.has_unfinished_requests()
    runner.error = RuntimeError("broke")
    with pytest.raises(RuntimeError):
        engine.step()
    [output] = engine.step()  # one output per request: what is newer stands for what was held back
    assert output.request_id == "A" and len(tokens_of(output)) == 2
    engine.hold_back(first)
    assert engine.step() == first and not engine.has_unfinished_requests()


def test_the_clock_does_not_move_for_a_pass_that_broke_off():
    engine = make_engine()
    runner = engine.runner = Interrupted(engine.scheduler.manager)
    engine.add_request("A", prompt_of(0, 4), greedy(1))
    runner.error = RuntimeError("broke")
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.clock.now() == 0.0
    [output] = engine.step()
    assert output.metrics.num_preemptions == 1 and output.metrics.first_scheduled_time == 0.0


# --- threads


def test_threads_add_and_abort_while_another_steps():
    engine = make_engine(64, max_model_len=64, max_num_seqs=16)
    num_threads, per_thread = 6, 40
    errors, aborted = [], set()

    def client(number):
        rng = random.Random(number)
        try:
            for i in range(per_thread):
                name = f"T{number}-{i}"
                engine.add_request(name, prompt_of(number * 100 + i, rng.randint(1, 20)), greedy(rng.randint(1, 9)))
                if rng.random() < 0.3:
                    aborted.add(name)
                    engine.abort_request(name)
                    engine.abort_request([name, "nobody"])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    outputs = {}
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id not in outputs, "an output after the end"
            if output.finished:
                outputs[output.request_id] = output
        engine.scheduler.manager.check()
    for thread in threads:
        thread.join()
    assert errors == [] and len(outputs) == num_threads * per_thread
    for name, output in outputs.items():
        tokens, reason = tokens_of(output), output.outputs[0].finish_reason
        assert reason == "length" or name in aborted
        assert tokens == expected_output(output.prompt_token_ids, len(tokens))
    assert_empty(engine)


def test_threads_that_want_the_same_name_get_it_once():
    for _ in range(20):
        engine = make_engine()
        refused, barrier = [], threading.Barrier(4)

        def add(engine=engine, refused=refused, barrier=barrier):
            barrier.wait()
            try:
                engine.add_request("A", prompt_of(0, 4), SamplingParams(n=4, seed=0, max_tokens=2))
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3 and len(run_to_end(engine)) == 1


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_with_chunks_off_who_grew_beyond_the_budget_can_still_start_again(batching):
    """A config without max_model_len can't be checked against the budget; a preemption must not end in a hang."""
    config = EngineConfig(max_num_batched_tokens=12, enable_chunked_prefill=False, batching=batching)
    manager = PagedKVCache(12, 4)
    scheduler = {"continuous": ContinuousScheduler, "static": StaticScheduler}[batching](config, manager)
    engine = LLMEngine(config, scheduler, FakeRunner(manager), ModelLimits(VOCAB, 200), clock=VirtualClock())
    prompts = {"A": [5] * 10, "B": [6] * 2}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    outputs = run_to_end(engine, max_steps=200)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    for name, prompt in prompts.items():
        assert outputs[name].outputs[0].token_ids == expected_output(prompt, 30)


def test_an_abort_of_what_is_no_name_and_no_list_is_refused():
    engine = make_engine()
    with pytest.raises(ValueError, match="request_id must be a name or a list of names, got 5"):
        engine.abort_request(5)
    for name in (5, "", None):
        with pytest.raises(ValueError, match="request_id must be a non-empty string"):
            engine.add_request(name, [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"priority": True}, "priority must be an integer, got True"),
        ({"priority": 2**63}, "priority must be at least .* and at most 9223372036854775807, got 9223372036854775808"),
        ({"arrival_time": "x"}, "arrival_time must be a finite number, got 'x'"),
        ({"arrival_time": float("nan")}, "arrival_time must be a finite number, got nan"),
        ({"output_kind": "final"}, "output_kind must be one of cumulative, delta, final_only, got 'final'"),
        ({"output_kind": None}, "output_kind must be one of"),
    ],
)
def test_what_comes_with_a_request_is_checked_at_the_door(arguments, message):
    engine = make_engine(scheduling_policy="priority")
    engine.add_request("b", prompt_of(0, 6), greedy(6))
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt_of(1, 6), greedy(6), **arguments)
    assert list(run_to_end(engine)) == ["b"]


def test_the_metrics_of_many_answers_are_those_of_the_first_token_and_of_all_preemptions():
    engine = make_engine(num_blocks=7, block_size=4, max_num_seqs=4)
    engine.add_request("A", prompt_of(0, 6), SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12))
    output = run_to_end(engine)["A"]
    lost = engine.scheduler.step  # steps were needed for those that started again
    assert output.metrics.num_preemptions > 0 and lost > 12
    assert output.metrics.first_token_time == pytest.approx(0.0106)
    assert [len(answer.token_ids) for answer in output.outputs] == [12] * 3


def test_max_tokens_none_means_what_memory_can_reserve():
    """Runs double: 16 blocks are the longest that fit into 20, although there are 80 slots."""
    config = EngineConfig(kv_cache="contiguous", reservation="pow2", block_size=4)
    manager = ContiguousKVCache(20, 4, 256, "pow2")
    scheduler = ContinuousScheduler(config, manager)
    engine = LLMEngine(config, scheduler, FakeRunner(manager), ModelLimits(VOCAB, 256), clock=VirtualClock())
    engine.add_request("A", [5] * 3, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(run_to_end(engine)["A"].outputs[0].token_ids) == 16 * 4 + 1 - 3
    with pytest.raises(ValueError, match="the prompt has 65 tokens and the KV cache holds 80"):
        engine.add_request("B", [5] * 65, SamplingParams(temperature=0, max_tokens=None))
