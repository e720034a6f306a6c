"""Random lives of requests, on all memory managers, with the invariants checked after every operation.

Beside the manager runs a model of what each slot holds: every computed token writes its mark (the text up to it) into
its slot, every copy moves marks, and at any time each request must find its own marks through its block table. Where
prefixes are cached, many texts begin alike, and the `PrefixOracle` tells what must be found.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm.kv_cache import ContiguousKVCache, PagedKVCache
from tests.scheduler.machine import PrefixOracle, stem

MAKERS = {
    "paged": lambda: PagedKVCache(24, 4),
    "paged, one token per block": lambda: PagedKVCache(60, 1),
    "paged, prefixes": lambda: PagedKVCache(24, 4, "sha256"),
    "paged, prefixes, tight": lambda: PagedKVCache(11, 4, "sha256"),
    "paged, prefixes, builtin hash": lambda: PagedKVCache(48, 4, "builtin"),
    "paged, prefixes, one token per block": lambda: PagedKVCache(120, 1, "sha256"),
    "max": lambda: ContiguousKVCache(40, 4, 40, "max"),
    "pow2": lambda: ContiguousKVCache(24, 4, 40, "pow2"),
    "exact": lambda: ContiguousKVCache(24, 4, 40, "exact"),
}


@dataclass
class Life:
    """A request: its tokens so far, those that it will come to, and how many are computed."""

    request_id: str
    token_ids: list
    text: list
    num_computed_tokens: int = 0
    block_keys: list = field(default_factory=list)
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self):
        return len(self.token_ids)

    @property
    def max_num_tokens(self):
        return len(self.text)

    def marks(self):
        """What the slots of its computed tokens hold."""
        marks = []
        for token in self.text[: self.num_computed_tokens]:
            marks.append(hash((marks[-1] if marks else None, token)))
        return marks


class Memory:
    """A manager, and what its slots hold."""

    def __init__(self, kind):
        self.manager = MAKERS[kind]()
        self.slots = [None] * (self.manager.num_blocks * self.manager.block_size)
        self.oracle = PrefixOracle(self.manager, self.slots)
        self.lives, self.count, self.num_hits = [], 0, 0

    def new(self, prompt, output, shared=0, number=0, salt=None, skip=False):
        """A request; where prefixes are cached, its text begins with `shared` tokens of a stem."""
        length = min(40, prompt + output)
        text = (stem(number, shared) if self.manager.caches_prefixes else [])[:length]
        text += self.own_tokens(length - len(text))
        self.count += 1
        life = Life(f"r{self.count}", text[:prompt], text, cache_salt=salt, skip_reading_prefix_cache=skip)
        self.lives.append(life)
        return life

    def own_tokens(self, count):
        """Tokens that nobody else has."""
        self.count += count
        return [2000 + self.count - place for place in range(count)]

    def step(self, wanted):
        """Schedules tokens for some requests, gives some up in the same step, then 'runs the pass'."""
        scheduled = []
        for life, count, give_up in wanted:
            free, table = self.manager.num_free_blocks, self.manager.get_block_ids(life)
            found = [] if table else self.lookup(life)
            before = life.num_computed_tokens + len(found) * self.manager.block_size
            count = min(count, life.max_num_tokens - 1 - before)
            if count < 1:
                continue
            used = [block.ref_cnt for block in found]
            if self.manager.allocate_slots(life, count, found):
                table = self.manager.get_block_ids(life)
                assert len(table) * self.manager.block_size >= before + count
                assert table[: len(found)] == [block.block_id for block in found] or not found
                life.num_computed_tokens = before
                self.num_hits += len(found)
                scheduled.append((life, count))
            else:
                assert self.manager.num_free_blocks == free and self.manager.get_block_ids(life) == table
                assert [block.ref_cnt for block in found] == used
            if give_up:
                self.end(life)
                scheduled = [item for item in scheduled if item[0] is not life]
        self.check()
        for source, target in self.manager.take_copies():
            size = self.manager.block_size
            self.slots[target * size : target * size + size] = self.slots[source * size : source * size + size]
        for life, count in scheduled:
            before = life.num_computed_tokens
            life.num_computed_tokens += count
            life.token_ids += life.text[life.num_tokens : life.num_computed_tokens + 1]
            for position, mark in enumerate(life.marks()[before:], start=before):
                self.slots[self.slot(life, position)] = mark
        assert {event.block_id for event in self.manager.findable()} <= self.oracle.texts.keys(), "published too early"
        for life, count in scheduled:
            before, table = life.num_computed_tokens - count, self.manager.get_block_ids(life)
            self.manager.commit(life, before)
            self.oracle.computed(life.cache_salt, life.marks(), table, before, life.num_computed_tokens)
        self.check_content()

    def lookup(self, life):
        """What a request finds, which is what is there."""
        found = self.manager.get_computed_blocks(life)
        whole = Life("", [], life.text, life.num_tokens).marks()
        hits = self.oracle.num_hits(life.cache_salt, whole, life.num_tokens, life.skip_reading_prefix_cache)
        size = self.manager.block_size
        texts = [(life.cache_salt, whole[(index + 1) * size - 1]) for index in range(hits)]
        assert [self.oracle.texts[block.block_id] for block in found] == texts
        if self.manager.caches_prefixes:
            needed, in_use = self.manager.num_blocks_for(life.num_tokens), sum(block.ref_cnt > 0 for block in found)
            assert self.manager.num_missing_blocks(life, found) == needed - in_use
        return found

    def fork(self, parent, output):
        computed = parent.num_computed_tokens
        self.count += 1
        limit = min(40, computed + 1 + output)
        tokens = parent.text[:computed]
        keys = parent.block_keys[: computed // self.manager.block_size]
        text = tokens + self.own_tokens(limit - computed)
        child = Life(f"r{self.count}", list(tokens), text, computed, list(keys), parent.cache_salt)
        if computed and self.manager.fork(parent, child):
            self.lives.append(child)

    def fail(self, life):
        """What a request has stored is not to be trusted, and it ends."""
        self.oracle.forget(self.manager.get_block_ids(life))
        self.manager.forget(life)
        self.end(life)

    def reset(self):
        """Empties the prefix cache, if nobody holds a block."""
        before = self.manager.findable()
        if self.manager.reset():
            assert self.manager.num_free_blocks == self.manager.num_blocks and not self.manager.findable()
            self.oracle.drop(list(self.oracle.texts))
        else:
            assert self.manager.usage > 0 and self.manager.findable() == before

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
        report = self.manager.fragmentation(Life("next", [0] * 17, [0] * 18))
        assert report.total == len(self.slots) and min(vars(report).values()) >= 0
        if isinstance(self.manager, PagedKVCache):
            assert report.external == 0
        assert 0 <= self.manager.usage <= 1

    def check_content(self):
        self.check()
        for life in self.lives:
            found = [self.slots[self.slot(life, i)] for i in range(life.num_computed_tokens)]
            assert found == life.marks(), f"{life.request_id} finds {found}, it wrote {life.marks()}"
        self.oracle.check({block for life in self.lives for block in self.manager.get_block_ids(life)})


@pytest.mark.parametrize("kind", MAKERS)
def test_ten_thousand_operations(kind):
    rng, memory = random.Random(kind), Memory(kind)
    operations = 0
    while operations < 10_000:
        action = rng.random()
        if action < 0.15 and len(memory.lives) < 12:
            shared, salt = rng.choice([0, 8, rng.randint(1, 40)]), rng.choice([None, None, "a"])
            memory.new(rng.randint(1, 20), rng.randint(1, 25), shared, rng.randint(0, 2), salt, rng.random() < 0.1)
        elif action < 0.25 and memory.lives:
            memory.fork(rng.choice(memory.lives), rng.randint(1, 20))
            # The pass that fills a contiguous child comes next; until then nobody may touch its source.
            memory.step([])
        elif action < 0.35 and memory.lives:
            memory.end(rng.choice(memory.lives))
        elif action < 0.36 and memory.lives:
            memory.fail(rng.choice(memory.lives))
        elif action < 0.37:
            memory.reset()
        else:
            chosen = rng.sample(memory.lives, rng.randint(0, len(memory.lives)))
            memory.step([(life, rng.choice([1, 1, 1, 5, 17]), rng.random() < 0.05) for life in chosen])
            operations += len(chosen)
            for life in [life for life in memory.lives if life.num_computed_tokens == life.max_num_tokens - 1]:
                memory.end(life)
        operations += 1
    for life in list(memory.lives):
        memory.end(life)
    assert memory.manager.num_free_blocks == memory.manager.num_blocks
    memory.check_content()
    assert (memory.num_hits > 50) == memory.manager.caches_prefixes


class Machine(RuleBasedStateMachine):
    """The same operations in the order that hypothesis finds most inconvenient."""

    kind = "paged"

    def __init__(self):
        super().__init__()
        self.memory = Memory(self.kind)

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 25),
        shared=st.integers(0, 24),
        number=st.integers(0, 1),
        salt=st.sampled_from([None, None, "a"]),
        skip=st.booleans(),
    )
    def add(self, prompt, output, shared, number, salt, skip):
        if len(self.memory.lives) < 8:
            self.memory.new(prompt, output, shared, number, salt, skip and shared > 12)

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

    @precondition(lambda self: self.memory.lives)
    @rule(data=st.data())
    def fail(self, data):
        self.memory.fail(data.draw(st.sampled_from(self.memory.lives)))

    @rule()
    def reset(self):
        self.memory.reset()

    @invariant()
    def holds(self):
        self.memory.check()


@pytest.mark.parametrize("kind", MAKERS)
def test_any_order_of_operations(kind):
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("M", (Machine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
