"""Random lives of requests through the whole engine, in the order that hypothesis finds most inconvenient."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.scheduler.machine import World, compare, stem
from tests.scheduler.soak import live, soak

MAX_MODEL_LEN = 32
MEMORIES = {
    "paged": {"kv_cache": "paged"},
    "paged, builtin hash": {"kv_cache": "paged", "prefix_caching_hash_algo": "builtin"},
    "paged, no prefixes": {"kv_cache": "paged", "enable_prefix_caching": False},
    "max": {"kv_cache": "contiguous", "reservation": "max"},
    "pow2": {"kv_cache": "contiguous", "reservation": "pow2"},
    "exact": {"kv_cache": "contiguous", "reservation": "exact"},
}
CHUNKING = st.one_of(
    st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([1, 2, 5, 16, 64]),
            "long_prefill_token_threshold": st.sampled_from([0, 1, 3, 8]),
        }
    ),
    st.just({"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN}),
)


class Machine(RuleBasedStateMachine):
    memory = "paged"

    @initialize(
        num_slots=st.sampled_from([16, 32, 48, 96]),
        block_size=st.sampled_from([1, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        batching=st.sampled_from(["continuous", "static"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        keep=st.booleans(),
        chunking=CHUNKING,
        record=st.booleans(),
    )
    def build(self, num_slots, block_size, max_num_seqs, batching, policy, keep, chunking, record):
        self.world = World(
            num_blocks=num_slots // block_size,
            max_model_len=MAX_MODEL_LEN,
            keep_finished_rows=keep,
            record=record,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            scheduling_policy=policy,
            batching=batching,
            **chunking,
            **MEMORIES[self.memory],
        )

    @rule(
        length=st.integers(1, MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        cumulative=st.booleans(),
        again=st.booleans(),
        begin=st.one_of(
            st.tuples(st.just("stem"), st.integers(0, 1), st.integers(0, MAX_MODEL_LEN)),
            st.tuples(st.just("earlier"), st.integers(0, 15), st.just(MAX_MODEL_LEN)),
        ),
        salt=st.sampled_from([None, None, "a"]),
        skip=st.sampled_from([False, False, False, True]),
        count=st.sampled_from([1, 1, 2]),
    )
    def add(self, length, max_tokens, n, priority, cumulative, again, begin, salt, skip, count):
        kind, number, shared = begin
        texts = self.world.texts
        text = texts[number % len(texts)] if kind == "earlier" and texts else stem(number, shared)
        prompt = {"begin": text, "salt": salt, "skip": skip}
        for _ in range(count):
            name = self.world.free_names()[0] if again and self.world.free_names() else None
            if len(self.world.unfinished) < 8:
                self.world.add(length, max_tokens, n, priority, cumulative=cumulative, name=name, **prompt)

    @rule()
    def reset_prefix_cache(self):
        self.world.reset_prefix_cache()

    @precondition(lambda self: self.world.unfinished)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data, in_flight):
        name = data.draw(st.sampled_from([*self.world.unfinished, "nobody"]))
        if in_flight:
            self.world.abort_in_flight(name)
            self.step()
        else:
            self.world.abort(name)

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def fail(self, data):
        self.world.fail(data.draw(st.sampled_from(self.world.scheduler.running)).request_id)
        self.step()

    @rule(moment=st.sampled_from(["before", "after"]))
    def break_off(self, moment):
        self.world.runner.break_off = moment
        self.world.step()

    @rule()
    def step(self):
        num_broken = self.world.num_broken
        self.world.step()
        if self.world.trace is not None and self.world.num_broken == num_broken:
            compare(self.world.trace, self.world.engine)

    @rule(count=st.integers(2, 12))
    def steps(self, count):
        for _ in range(count):
            self.step()

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


@pytest.mark.parametrize("memory", MEMORIES)
def test_any_order_of_events(memory):
    machine = type("M", (Machine,), {"memory": memory})
    options = settings(max_examples=100 if memory in ("paged", "pow2") else 60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize("seed", range(16))
def test_two_hundred_random_steps_and_every_state_of_the_trace(seed):
    live(seed, 200, with_trace=True)


def test_twenty_thousand_random_steps(capsys):
    assert soak(20_000, first_seed=100)
    assert capsys.readouterr().out.startswith("ok: 20,")


def test_a_world_that_goes_wrong_is_reported_with_its_seed(monkeypatch):
    def broken(seed, num_steps, with_trace):
        assert seed < 3, "the fourth world is broken"
        return num_steps

    monkeypatch.setattr("tests.scheduler.soak.live", broken)
    lines = []
    assert not soak(10_000, echo=lines.append)
    assert lines == ["FAILED: world 3, after 750 good steps; again: python -m tests.scheduler.soak 1 3"]
