"""Random lives of requests, on all memory managers, with the invariants checked after every operation.

Beside the manager runs a model of what each slot holds: every computed token writes its name into its slot,
every copy moves names, and at any time each request must find its own names through its block table.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm.kv_cache import ContiguousKVCache, PagedKVCache

MAKERS = {
    "paged": lambda: PagedKVCache(24, 4),
    "paged, one token per block": lambda: PagedKVCache(60, 1),
    "max": lambda: ContiguousKVCache(40, 4, 40, "max"),
    "pow2": lambda: ContiguousKVCache(24, 4, 40, "pow2"),
    "exact": lambda: ContiguousKVCache(24, 4, 40, "exact"),
}


@dataclass
class Life:
    """A request and the names of the tokens that it has computed."""

    request_id: str
    num_tokens: int
    max_num_tokens: int
    num_computed_tokens: int
    names: list


class Memory:
    """A manager, and what its slots hold."""

    def __init__(self, kind):
        self.manager = MAKERS[kind]()
        self.slots = [None] * (self.manager.num_blocks * self.manager.block_size)
        self.lives, self.count = [], 0

    def new(self, prompt, output):
        self.count += 1
        self.lives.append(Life(f"r{self.count}", prompt, min(40, prompt + output), 0, []))
        return self.lives[-1]

    def step(self, wanted):
        """Schedules tokens for some requests, gives some up in the same step, then 'runs the pass'."""
        scheduled = []
        for life, count, give_up in wanted:
            count = min(count, life.max_num_tokens - 1 - life.num_computed_tokens)
            free, table = self.manager.num_free_blocks, self.manager.get_block_ids(life)
            if count < 1:
                continue
            if self.manager.allocate_slots(life, count):
                covered = len(self.manager.get_block_ids(life)) * self.manager.block_size
                assert covered >= life.num_computed_tokens + count
                scheduled.append((life, count))
            else:
                assert self.manager.num_free_blocks == free and self.manager.get_block_ids(life) == table
            if give_up:
                self.end(life)
                scheduled = [item for item in scheduled if item[0] is not life]
        self.check()
        for source, target in self.manager.take_copies():
            size = self.manager.block_size
            self.slots[target * size : target * size + size] = self.slots[source * size : source * size + size]
        for life, count in scheduled:
            for _ in range(count):
                self.count += 1
                self.slots[self.slot(life, life.num_computed_tokens)] = self.count
                life.names.append(self.count)
                life.num_computed_tokens += 1
        self.check_content()

    def fork(self, parent, output):
        computed = parent.num_computed_tokens
        self.count += 1
        limit = min(40, computed + 1 + output)
        child = Life(f"r{self.count}", computed, limit, computed, list(parent.names))
        if computed and self.manager.fork(parent, child):
            self.lives.append(child)

    def end(self, life):
        self.manager.free(life)
        self.manager.free(life)
        assert self.manager.get_block_ids(life) == []
        if life in self.lives:
            self.lives.remove(life)

    def slot(self, life, position):
        block, offset = divmod(position, self.manager.block_size)
        return self.manager.get_block_ids(life)[block] * self.manager.block_size + offset

    def check(self):
        self.manager.check()
        report = self.manager.fragmentation(Life("next", 17, 18, 0, []))
        assert report.total == len(self.slots) and min(vars(report).values()) >= 0
        if isinstance(self.manager, PagedKVCache):
            assert report.external == 0
        assert 0 <= self.manager.usage <= 1

    def check_content(self):
        self.check()
        for life in self.lives:
            found = [self.slots[self.slot(life, i)] for i in range(life.num_computed_tokens)]
            assert found == life.names, f"{life.request_id} finds {found}, it wrote {life.names}"


@pytest.mark.parametrize("kind", MAKERS)
def test_ten_thousand_operations(kind):
    rng, memory = random.Random(kind), Memory(kind)
    operations = 0
    while operations < 10_000:
        action = rng.random()
        if action < 0.15 and len(memory.lives) < 12:
            memory.new(rng.randint(1, 20), rng.randint(1, 25))
        elif action < 0.25 and memory.lives:
            memory.fork(rng.choice(memory.lives), rng.randint(1, 20))
            # The pass that fills a contiguous child comes next; until then nobody may touch its source.
            memory.step([])
        elif action < 0.35 and memory.lives:
            memory.end(rng.choice(memory.lives))
        else:
            chosen = rng.sample(memory.lives, rng.randint(0, len(memory.lives)))
            memory.step([(life, rng.choice([1, 1, 1, 5, 17]), rng.random() < 0.05) for life in chosen])
            operations += len(chosen)
        operations += 1
    for life in list(memory.lives):
        memory.end(life)
    assert memory.manager.num_free_blocks == memory.manager.num_blocks
    memory.check()


class Machine(RuleBasedStateMachine):
    """The same operations in the order that hypothesis finds most inconvenient."""

    kind = "paged"

    def __init__(self):
        super().__init__()
        self.memory = Memory(self.kind)

    @rule(prompt=st.integers(1, 20), output=st.integers(1, 25))
    def add(self, prompt, output):
        if len(self.memory.lives) < 8:
            self.memory.new(prompt, output)

    @precondition(lambda self: self.memory.lives)
    @rule(data=st.data())
    def step(self, data):
        wanted = data.draw(
            st.lists(
                st.tuples(st.sampled_from(self.memory.lives), st.sampled_from([1, 2, 17]), st.booleans()),
                max_size=4,
                unique_by=lambda item: item[0].request_id,
            )
        )
        self.memory.step(wanted)

    @precondition(lambda self: self.memory.lives)
    @rule(data=st.data(), output=st.integers(1, 9))
    def fork(self, data, output):
        self.memory.fork(data.draw(st.sampled_from(self.memory.lives)), output)

    @precondition(lambda self: self.memory.lives)
    @rule(data=st.data())
    def end(self, data):
        self.memory.end(data.draw(st.sampled_from(self.memory.lives)))

    @invariant()
    def holds(self):
        self.memory.check()


@pytest.mark.parametrize("kind", MAKERS)
def test_any_order_of_operations(kind):
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("M", (Machine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
