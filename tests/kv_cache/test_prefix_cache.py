"""Paged memory that finds blocks by what they hold: what may be found, when, and what it costs to take it over."""

import random
from dataclasses import dataclass, field

import pytest

from minivllm.kv_cache import ContiguousKVCache, Fragmentation, PagedKVCache, block_hash
from minivllm.kv_cache.block_hash import ROOT_KEY, hash_block
from minivllm.scheduler import Decision
from tests.scheduler.machine import Loop, names, output_of

B = 16


@dataclass
class Text:
    """A request that only memory sees."""

    request_id: str
    token_ids: list
    num_computed_tokens: int = 0
    max_num_tokens: int = 10**6
    block_keys: list = field(default_factory=list)
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self):
        return len(self.token_ids)


def cache_of(num_blocks, block_size=B, algorithm="sha256"):
    return PagedKVCache(num_blocks, block_size, algorithm)


def tokens(count, first=0):
    return list(range(first, first + count))


def ids(blocks):
    return [block.block_id for block in blocks]


def start(cache, request, count=None):
    """Admits a request and computes its tokens, or only the next `count`; returns the blocks that it found."""
    found = cache.get_computed_blocks(request)
    num_cached = len(found) * cache.block_size
    count = request.num_tokens - num_cached if count is None else count
    assert cache.allocate_slots(request, count, found)
    request.num_computed_tokens = num_cached
    compute(cache, request, count)
    return ids(found)


def compute(cache, request, count):
    before = request.num_computed_tokens
    request.num_computed_tokens += count
    cache.commit(request, before)
    cache.check()


def go_on(cache, request, count):
    assert cache.allocate_slots(request, count)
    compute(cache, request, count)


def found(cache, token_ids, **fields):
    """The blocks that a new request of these tokens would find."""
    return ids(cache.get_computed_blocks(Text("asks", token_ids, **fields)))


def free_order(cache):
    return ids(cache.pool.free_queue)


def state(cache):
    """Everything that a refusal must leave as it was."""
    tables = {name: ids(table) for name, table in cache._tables.items()}
    blocks = [(block.ref_cnt, block.block_hash) for block in cache.pool.blocks]
    return tables, blocks, free_order(cache), cache.pool.findable(), dict(cache._changed), dict(cache._room)


# --- what is found


@pytest.mark.parametrize(
    ("length", "num_found"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (47, 2), (48, 2), (49, 3), (64, 3), (100, 3)]
)
def test_at_least_one_token_is_left_to_compute(length, num_found):
    cache = cache_of(8)
    start(cache, Text("A", tokens(50)))
    assert found(cache, tokens(length)) == [0, 1, 2][:num_found]


def test_of_a_full_hit_the_last_block_is_computed_into_a_block_of_its_own():
    cache = cache_of(8)
    a = Text("A", tokens(32))
    start(cache, a)
    b = Text("B", tokens(32))
    assert start(cache, b) == [0] and cache.get_block_ids(b) == [0, 2] and b.num_computed_tokens == 32
    assert cache.get_block_ids(a) == [0, 1] and cache.num_cached_blocks == 3
    cache.free(a)
    cache.free(b)
    assert cache.num_cached_blocks == 2 and len(found(cache, tokens(33))) == 2


def test_only_the_longest_prefix_of_full_blocks_is_found():
    cache = cache_of(20)
    start(cache, Text("A", tokens(70)))
    for place in range(0, 70, 5):
        changed = tokens(70)
        changed[place] = 999
        assert found(cache, changed) == [0, 1, 2, 3][: place // B]
    assert found(cache, tokens(64, first=16)) == []


def test_a_prefix_ends_where_a_block_is_gone():
    cache = cache_of(8)
    a = Text("A", tokens(65))
    start(cache, a)
    cache.free(a)
    cache.pool.forget([cache.pool.blocks[1]])
    assert found(cache, tokens(65)) == [0]


def test_looking_takes_nothing():
    cache = cache_of(8)
    a = Text("A", tokens(40))
    start(cache, a)
    cache.free(a)
    before = state(cache)
    assert found(cache, tokens(40)) == [0, 1] and state(cache) == before


def test_a_salt_keeps_texts_apart():
    cache = cache_of(20)
    start(cache, Text("A", tokens(40), cache_salt="a"))
    start(cache, Text("N", tokens(40)))
    assert found(cache, tokens(40), cache_salt="a") == [0, 1] and found(cache, tokens(40)) == [3, 4]
    assert found(cache, tokens(40), cache_salt="b") == []


def test_who_does_not_want_to_read_finds_nothing_and_is_found():
    cache = cache_of(20)
    start(cache, Text("A", tokens(40)))
    s = Text("S", tokens(60), skip_reading_prefix_cache=True)
    assert start(cache, s) == [] and cache.get_block_ids(s) == [3, 4, 5, 6]
    assert found(cache, tokens(60)) == [0, 1, 5]
    assert cache.next_key(Text("T", tokens(60), skip_reading_prefix_cache=True), []) is None


@pytest.mark.parametrize("cache", [PagedKVCache(8, B), ContiguousKVCache(8, B, 128, "max")], ids=["paged", "max"])
def test_memory_without_a_prefix_cache_finds_nothing(cache):
    a, asks = Text("A", tokens(40)), Text("asks", tokens(40))
    assert not cache.caches_prefixes
    assert cache.allocate_slots(a, 40)
    compute(cache, a, 40)
    assert cache.get_computed_blocks(asks) == [] and cache.next_key(asks, []) is None
    assert cache.num_cached_blocks == 0 and cache.findable() == [] and not cache.reset()
    cache.forget(a)
    cache.free(a)
    assert cache.reset() and asks.block_keys == []
    cache.check()


# --- when it can be found


def test_a_block_can_be_found_once_its_last_token_is_computed():
    cache, a = cache_of(8), Text("A", tokens(48))
    assert cache.allocate_slots(a, 20)
    assert found(cache, tokens(48)) == [] and cache.num_cached_blocks == 0
    a.num_computed_tokens = 20
    cache.commit(a, 0)
    assert found(cache, tokens(49)) == [0]
    for computed, num_found in ((11, 1), (1, 2), (15, 2), (1, 3)):
        go_on(cache, a, computed)
        assert found(cache, tokens(49)) == [0, 1, 2][:num_found]
    events = cache.findable()
    first = hash_block(ROOT_KEY, tokens(16))
    second = hash_block(first, tokens(16, 16))
    assert [(event.block_id, event.key, event.parent) for event in events] == [
        (0, first, None),
        (1, second, first),
        (2, hash_block(second, tokens(16, 32)), second),
    ]


def test_generated_tokens_fill_blocks_that_are_found_too():
    cache, a = cache_of(8), Text("A", tokens(30))
    start(cache, a)
    for token in (30, 31, 32):
        a.token_ids.append(token)
        go_on(cache, a, 1)
    assert a.num_computed_tokens == 33 and found(cache, tokens(40)) == [0, 1]


def test_blocks_of_branches_are_found_by_the_texts_that_they_hold():
    cache, a = cache_of(8, block_size=4), Text("A", tokens(6))
    start(cache, a)
    b = Text("B", tokens(6), num_computed_tokens=6, block_keys=list(a.block_keys))
    assert cache.fork(a, b)
    for request, first in ((a, 6), (b, 100)):
        request.token_ids += tokens(3, first)
        for _ in range(2):
            go_on(cache, request, 1)
    assert cache.get_block_ids(a) == [0, 2] and cache.get_block_ids(b) == [0, 1]
    assert found(cache, [*tokens(8), 0]) == [0, 2] and found(cache, [*tokens(6), 100, 101, 0]) == [0, 1]


def test_what_is_freed_stays_findable_until_it_is_handed_out_again_tail_first():
    cache, a = cache_of(4), Text("A", tokens(49))
    start(cache, a)
    cache.free(a)
    assert found(cache, tokens(49)) == [0, 1, 2] and free_order(cache) == [3, 2, 1, 0]
    n = Text("N", tokens(32, first=500))
    assert start(cache, n) == [] and cache.get_block_ids(n) == [3, 2]
    assert found(cache, tokens(49)) == [0, 1]


def test_a_block_whose_key_was_forgotten_is_published_by_whoever_computes_it_again():
    cache, a = cache_of(8), Text("A", tokens(40))
    start(cache, a)
    cache.forget(a)
    assert found(cache, tokens(40)) == [] and cache.get_block_ids(a) == [0, 1, 2] and cache.num_cached_blocks == 0
    go_on(cache, Text("X", tokens(20, 700)), 20)
    start(cache, Text("B", tokens(40)))
    assert found(cache, tokens(40)) == [5, 6]
    cache.forget(Text("unknown", []))


def test_forgetting_hides_what_others_share_too():
    """What a request read may be what made it fail."""
    cache, a, b = cache_of(8), Text("A", tokens(40)), Text("B", tokens(70))
    start(cache, a)
    assert start(cache, b) == [0, 1]
    cache.forget(b)
    assert found(cache, tokens(70)) == [] and cache.num_cached_blocks == 0
    cache.free(b)
    cache.check()
    assert cache.get_block_ids(a) == [0, 1, 2]


def test_reset_empties_the_cache_unless_a_block_is_in_use():
    cache, a = cache_of(4), Text("A", tokens(40))
    start(cache, a)
    before = state(cache)
    assert cache.reset() is False and state(cache) == before
    cache.free(a)
    assert cache.num_cached_blocks == 2
    assert cache.reset() is True
    assert cache.num_cached_blocks == 0 and found(cache, tokens(40)) == [] and free_order(cache) == [0, 1, 2, 3]
    cache.check()


# --- taking over


def test_found_blocks_are_taken_before_any_other_is_handed_out():
    """The first free block may be one of those that were found."""
    cache, a, n = cache_of(4), Text("A", tokens(48)), Text("N", tokens(16, 500))
    start(cache, a)
    start(cache, n)
    cache.free(a)
    cache.free(n)
    assert free_order(cache) == [2, 1, 0, 3]
    b = Text("B", tokens(64))
    assert start(cache, b) == [0, 1, 2] and cache.get_block_ids(b) == [0, 1, 2, 3]
    assert cache.num_free_blocks == 0 and found(cache, tokens(65)) == [0, 1, 2, 3]
    assert found(cache, tokens(17, 500)) == []


def test_shared_blocks_count_their_holders():
    cache = cache_of(8)
    requests = [Text(name, [*tokens(32), 1000 + number]) for number, name in enumerate("ABC")]
    for request in requests:
        start(cache, request)
    assert [cache.get_block_ids(request) for request in requests] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert [block.ref_cnt for block in cache.pool.blocks] == [3, 3, 1, 1, 1, 0, 0, 0]
    for request in requests:
        cache.free(request)
        cache.check()
    assert cache.num_free_blocks == 8 and found(cache, tokens(33)) == [0, 1]


def test_the_runner_is_told_the_whole_table_of_who_took_blocks_over():
    cache = cache_of(8)
    start(cache, Text("A", tokens(32)))
    cache.take_changes()
    cache.events = []
    start(cache, Text("B", tokens(40)), count=3)
    assert cache.take_changes() == {"B": (0, [0, 1, 2])}
    [event] = cache.events
    assert (event.kind, event.block_ids, event.num_tokens) == ("allocate", (0, 1, 2), 35)


def test_who_takes_over_exactly_to_a_block_boundary_gets_a_block_for_the_next_token():
    cache = cache_of(8)
    start(cache, Text("A", tokens(33)))
    b = Text("B", tokens(33))
    assert start(cache, b, count=1) == [0, 1] and cache.get_block_ids(b) == [0, 1, 3]


@pytest.mark.parametrize("num_idle", [0, 1, 2, 3])
def test_missing_blocks_are_the_new_ones_and_the_found_ones_that_nobody_holds(num_idle):
    cache, a = cache_of(10), Text("A", tokens(48))
    start(cache, a)
    holder = Text("H", tokens((3 - num_idle) * B + 1))
    start(cache, holder)
    cache.free(a)
    b = Text("B", tokens(5 * B))
    blocks = cache.get_computed_blocks(b)
    assert ids(blocks) == [0, 1, 2] and [block.ref_cnt for block in blocks] == [1] * (3 - num_idle) + [0] * num_idle
    assert cache.num_missing_blocks(b, blocks) == 2 + num_idle
    free = cache.num_free_blocks
    assert cache.allocate_slots(b, 2 * B, blocks) and free - cache.num_free_blocks == 2 + num_idle


def test_a_request_with_memory_does_not_look_for_blocks():
    cache, a = cache_of(8), Text("A", tokens(40))
    start(cache, a)
    b = Text("B", tokens(40))
    start(cache, b, count=3)
    with pytest.raises(AssertionError, match="B holds blocks, and looks for others"):
        cache.allocate_slots(b, 20, cache.get_computed_blocks(Text("C", tokens(40))))


# --- KV-07


def test_kv07_a_refusal_leaves_everything_as_it_was():
    """R holds 1 of 5 blocks; 4 are free, 3 of which B finds; B needs 2 more."""
    cache = cache_of(5)
    r, a, b = Text("R", [999]), Text("A", tokens(48)), Text("B", tokens(80))
    start(cache, r)
    start(cache, a)
    cache.free(a)
    before, blocks = state(cache), cache.get_computed_blocks(b)
    assert ids(blocks) == [1, 2, 3] and cache.num_missing_blocks(b, blocks) == 5 > cache.num_free_blocks
    assert cache.allocate_slots(b, 32, blocks) is False
    assert state(cache) == before
    assert cache.num_free_blocks == 4 and free_order(cache) == [4, 3, 2, 1]
    assert [cache.pool.blocks[block].ref_cnt for block in (1, 2, 3)] == [0, 0, 0]
    cache.free(r)
    assert cache.num_free_blocks == 5
    assert start(cache, b) == [1, 2, 3] and b.num_computed_tokens == 80
    assert cache.get_block_ids(b) == [1, 2, 3, 0, 4] and cache.num_free_blocks == 0


def test_kv07_a_request_waits_until_its_hits_and_its_new_blocks_fit():
    """The same through the scheduler. Names that end alike have prompts that begin alike."""
    loop = Loop(num_blocks=5, block_size=16)
    r = loop.add("R", 1, max_tokens=6)
    a = loop.add("A", 48, max_tokens=1)
    loop.step()
    assert (a.status.value, loop.manager.num_free_blocks, free_order(loop.manager)) == ("length", 4, [4, 3, 2, 1])
    b = loop.add("BA", 80, max_tokens=1)
    for _ in range(4):
        plan = loop.step()
        assert plan.decisions == [Decision("wait", "BA", "memory", None, 5, 4)]
        assert loop.manager.num_free_blocks == 4 and free_order(loop.manager) == [4, 3, 2, 1]
        assert [loop.manager.pool.blocks[block].ref_cnt for block in (1, 2, 3)] == [0, 0, 0]
        assert (b.num_computed_tokens, b.num_cached_tokens) == (0, 0)
    loop.step()
    assert r.status.value == "length" and loop.manager.num_free_blocks == 5
    plan = loop.step()
    assert plan.decisions == [Decision("admit", "BA", needed=32, available=48)]
    [new] = plan.new_requests
    assert (new.num_computed_tokens, new.block_ids) == (48, [1, 2, 3, 0, 4])
    assert dict(plan.num_scheduled_tokens) == {"BA": 32} and b.num_cached_tokens == 48
    loop.end()
    assert len(output_of(b)) == 1 and names([b]) == ["BA"]


# --- KV-05


@pytest.mark.parametrize("algorithm", ["sha256", "builtin"])
def test_kv05_a_text_whose_block_was_reused_is_not_found(algorithm):
    cache = cache_of(2, algorithm=algorithm)

    def run(request_id, first):
        request = Text(request_id, tokens(17, first))
        blocks = start(cache, request)
        consistent(cache)
        cache.free(request)
        consistent(cache)
        return blocks

    assert run("X", 0) == []
    assert found(cache, tokens(17)) == [0]
    assert run("Y", 100) == [] and run("Z", 200) == []
    assert found(cache, tokens(17)) == [] and run("X2", 0) == []
    assert run("X3", 0) == [cache.get_computed_blocks(Text("asks", tokens(17)))[0].block_id]


def consistent(cache):
    cache.check()
    entries = cache.pool._findable
    assert all(block.block_hash == key for key, blocks in entries.items() for block in blocks)
    assert len(entries) <= cache.num_blocks and cache.num_cached_blocks <= cache.num_blocks


# --- KV-10


@pytest.mark.parametrize("algorithm", ["sha256", "builtin"])
@pytest.mark.parametrize("constant", [False, True])
def test_kv10_only_the_same_text_is_found(monkeypatch, algorithm, constant):
    if constant:
        monkeypatch.setattr(block_hash, "weak_hash", lambda value: 7)
    cache = cache_of(20, block_size=2, algorithm=algorithm)
    start(cache, Text("A", [1, 23, 5, 5, 7]))
    start(cache, Text("B", [2, 24, 6, 6, 7]))
    assert found(cache, [1, 23, 5, 5, 0]) == [0, 1] and found(cache, [2, 24, 6, 6, 0]) == [3, 4]
    assert found(cache, [12, 3, 5, 5, 0]) == []
    assert found(cache, [1, 23, 6, 6, 0]) == [0] and found(cache, [2, 24, 5, 5, 0]) == [3]
    assert found(cache, [5, 5, 0]) == [] and found(cache, [1, 23, 0], cache_salt="s") == []
    assert len(cache.pool._findable) == 4


def test_kv10_the_weak_hash_must_be_asked_for():
    cache, a = cache_of(4), Text("A", tokens(17))
    start(cache, a)
    assert [type(key) for key in a.block_keys] == [bytes] and len(a.block_keys[0]) == 32
    with pytest.raises(ValueError, match="must be one of sha256, builtin, got 'hash'"):
        cache_of(4, algorithm="hash")


# --- what is being computed


def test_the_next_key_is_that_of_the_first_block_that_was_not_found():
    cache = cache_of(8)
    start(cache, Text("A", tokens(20)))
    b = Text("B", tokens(49))
    blocks = cache.get_computed_blocks(b)
    assert ids(blocks) == [0] and cache.next_key(b, blocks) == b.block_keys[1]
    assert cache.next_key(b, []) == b.block_keys[0]
    assert cache.next_key(b, blocks * 3) is None  # all that it could take over is there
    full = Text("F", tokens(48))
    assert cache.next_key(full, blocks * 2) is None and len(full.block_keys) == 3


@pytest.mark.parametrize(
    ("computed", "count", "expected"),
    [(0, 1, [0]), (0, 16, [0]), (0, 17, [0, 1]), (15, 1, [0]), (16, 1, [1]), (20, 20, [1, 2]), (32, 16, [2])],
)
def test_keys_in_progress_are_those_of_the_blocks_that_the_tokens_lie_in(computed, count, expected):
    cache, a = cache_of(8), Text("A", tokens(48), num_computed_tokens=computed)
    keys = cache._keys(a)
    assert cache.keys_in_progress(a, count) == [keys[index] for index in expected]


def test_a_block_whose_tokens_are_not_all_known_has_no_key_in_progress():
    cache, a = cache_of(8), Text("A", tokens(40), num_computed_tokens=32)
    assert cache.keys_in_progress(a, 8) == []


# --- what slots are used for


def brute_force(cache):
    """Slots with a token, and slots that will have one, each looked at by itself."""
    used, wanted = set(), set()
    for name, table in cache._tables.items():
        request = cache._requests[name]
        for position in range(len(table) * cache.block_size):
            index, offset = divmod(position, cache.block_size)
            slot = (table[index].block_id, offset)
            if position < request.num_computed_tokens:
                used.add(slot)
            if position < max(request.num_computed_tokens, request.max_num_tokens - 1):
                wanted.add(slot)
    size = cache.block_size
    held = cache.pool.num_used * size
    return Fragmentation(len(used), len(wanted) - len(used), held - len(wanted), 0, cache.num_free_blocks * size)


@pytest.mark.parametrize("seed", range(8))
def test_every_slot_counts_once_whoever_shares_it(seed):
    rng, cache, live, shared = random.Random(seed), cache_of(40, block_size=4), {}, 0
    for number in range(200):
        act = rng.random()
        if act < 0.35 and len(live) < 6:
            text = tokens(rng.choice([4, 8, 12, 16])) + tokens(rng.randint(1, 9), 100 * rng.randint(1, 3))
            request = Text(f"R{number}", text, max_num_tokens=len(text) + rng.randint(1, 8))
            blocks = cache.get_computed_blocks(request)
            count = rng.randint(1, request.num_tokens - 4 * len(blocks))
            if cache.allocate_slots(request, count, blocks):
                request.num_computed_tokens = 4 * len(blocks)
                compute(cache, request, count)
                live[request.request_id] = request
                shared += bool(blocks)
        elif act < 0.75 and live:
            request = rng.choice(list(live.values()))
            missing = request.num_tokens - request.num_computed_tokens
            if not missing and request.num_tokens < request.max_num_tokens:
                request.token_ids.append(1000 + number)
                missing = 1
            if missing and cache.allocate_slots(request, count := rng.randint(1, missing)):
                compute(cache, request, count)
        elif act < 0.87 and live:
            parent = rng.choice(list(live.values()))
            computed = parent.num_computed_tokens
            child = Text(
                f"R{number}", parent.token_ids[:computed], computed, computed + 5, parent.block_keys[: computed // 4]
            )
            cache.fork(parent, child)
            live[child.request_id] = child
        elif live:
            cache.free(live.pop(rng.choice(list(live))))
        assert cache.fragmentation() == brute_force(cache)
        cache.check()
    assert shared >= 5


def test_right_after_a_fork_the_shared_partial_block_counts_once():
    cache, a = cache_of(20, block_size=4), Text("A", tokens(10), max_num_tokens=20)
    start(cache, a)
    b = Text("B", tokens(14), max_num_tokens=16)
    start(cache, b)
    assert cache.fragmentation() == brute_force(cache) == Fragmentation(16, 3, 1, 0, 60)
    child = Text("A/1", tokens(10), 10, 20, list(a.block_keys))
    cache.fork(a, child)
    assert cache.fragmentation() == brute_force(cache)
    a.token_ids.append(7)
    go_on(cache, a, 1)
    assert cache.fragmentation() == brute_force(cache)


def test_what_is_shared_is_counted_without_a_look_at_each_block(monkeypatch):
    cache = cache_of(1010, block_size=2)
    requests = [Text(name, [*tokens(2000), number], max_num_tokens=2004) for number, name in enumerate("ABCD")]
    for request in requests:
        start(cache, request)
    assert [block.ref_cnt for block in cache.pool.blocks[:1000]] == [4] * 1000
    monkeypatch.setattr(cache, "_count_block_by_block", refuse)
    monkeypatch.setattr(type(cache.pool.blocks[0]), "__getattribute__", refuse_many(cache), raising=False)
    assert cache.fragmentation() == Fragmentation(used=2004, to_come=4, internal=0, external=0, free=12)


def refuse(*arguments):
    raise AssertionError("blocks are counted one by one")


def refuse_many(cache, limit=20):
    """Lets a few looks at blocks through, and not one per block."""
    looks = []

    def look(block, name):
        looks.append(name)
        assert len(looks) < limit, "every block is looked at"
        return object.__getattribute__(block, name)

    return look
