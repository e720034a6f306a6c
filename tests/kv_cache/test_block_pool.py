"""The pool: all or nothing, every reference counted, every misuse loud."""

import pytest

from minivllm.kv_cache.block_pool import BlockPool, CacheEvent


def ids(blocks):
    return [block.block_id for block in blocks]


def test_blocks_are_handed_out_in_order_and_all_of_them():
    pool = BlockPool(5)
    assert ids(pool.allocate(2)) == [0, 1] and ids(pool.allocate(3)) == [2, 3, 4]
    assert pool.num_free == 0 and pool.num_used == 5
    pool.check()


def test_an_allocation_that_does_not_fit_takes_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert ids(pool.allocate(2)) == [2, 3]


def test_the_tail_of_a_sequence_is_handed_out_again_first():
    pool = BlockPool(6)
    first, rest = pool.allocate(3), pool.allocate(3)
    pool.free(first)
    assert ids(pool.allocate(3)) == [2, 1, 0]
    pool.free(rest)
    assert ids(pool.free_queue) == [5, 4, 3]


def test_a_shared_block_is_free_when_the_last_holder_lets_go():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert block.ref_cnt == 1 and pool.num_free == 1
    pool.free([block])
    assert block.ref_cnt == 0 and pool.num_free == 2
    pool.check()


def test_a_block_can_leave_from_the_middle_of_the_queue():
    pool = BlockPool(5)
    for block_id in (2, 0, 4):
        pool.free_queue.remove(pool.blocks[block_id])
    assert ids(pool.free_queue) == [1, 3] and pool.num_free == 2


def test_misuse_is_loud():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match=r"double free: KVCacheBlock\(block_id=0"):
        pool.free([block])
    with pytest.raises(AssertionError, match=r"use after free: KVCacheBlock\(block_id=0"):
        pool.share([block])
    pool.allocate(2)
    with pytest.raises(AssertionError, match="not in the free queue"):
        pool.free_queue.remove(block)
    with pytest.raises(AssertionError, match="queue is empty"):
        pool.free_queue.popleft()


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks):
    with pytest.raises(ValueError, match=f"at least 1 block, got {num_blocks}"):
        BlockPool(num_blocks)


def test_a_new_block_can_not_be_found_by_content():
    assert all(block.block_hash is None for block in BlockPool(3).blocks)


def test_nothing_taken_is_nothing_changed():
    pool = BlockPool(3)
    assert pool.allocate(0) == []
    pool.free([])
    assert ids(pool.free_queue) == [0, 1, 2]


# --- blocks that can be found


def published(pool, *keys):
    """As many blocks as keys, allocated, filled and made findable as one text."""
    blocks = pool.allocate(len(keys))
    parents = [None, *keys]
    for block, key, parent in zip(blocks, keys, parents, strict=False):
        pool.publish(block, key, parent)
    pool.check()
    return blocks


def found(pool, *keys):
    return [None if (block := pool.find(key)) is None else block.block_id for key in keys]


def test_a_full_block_is_found_by_its_key_in_use_and_free():
    pool = BlockPool(4)
    assert found(pool, "a") == [None] and pool.num_cached == 0
    blocks = published(pool, "a", "b")
    assert found(pool, "a", "b", "c") == [0, 1, None] and pool.num_cached == 2
    assert [(block.block_hash, block.parent_hash) for block in blocks] == [("a", None), ("b", "a")]
    pool.free(blocks)
    assert found(pool, "a", "b") == [0, 1] and pool.num_free == 4 and pool.num_cached == 2
    pool.check()


def test_a_block_that_is_handed_out_again_is_not_found_any_more():
    pool = BlockPool(2)
    pool.free(published(pool, "a", "b"))
    [block] = pool.allocate(1)
    assert (block.block_id, block.block_hash, block.parent_hash) == (1, None, None)
    assert found(pool, "a", "b") == [0, None] and list(pool._findable) == ["a"]
    pool.check()
    pool.allocate(1)
    assert found(pool, "a") == [None] and pool._findable == {} and pool.num_cached == 0
    pool.check()


def test_the_map_never_has_more_entries_than_there_are_blocks():
    pool = BlockPool(3)
    for number in range(50):
        pool.free(published(pool, f"{number}a", f"{number}b"))
        assert pool.num_cached <= 3 and len(pool._findable) <= 3
    assert pool.num_cached == 3


def test_a_found_block_leaves_the_free_queue():
    pool = BlockPool(4)
    blocks = published(pool, "a", "b", "c")
    pool.free(blocks)
    assert ids(pool.free_queue) == [3, 2, 1, 0]
    pool.touch([blocks[0], blocks[1]])
    assert ids(pool.free_queue) == [3, 2] and [block.ref_cnt for block in blocks] == [1, 1, 0]
    pool.touch([blocks[0]])
    assert blocks[0].ref_cnt == 2 and pool.num_free == 2
    assert ids(pool.allocate(2)) == [3, 2] and found(pool, "a", "b", "c") == [0, 1, None]
    pool.check()


def test_the_least_recently_used_goes_first_and_of_a_text_its_tail():
    pool = BlockPool(6)
    first, second = published(pool, "a", "b", "c"), published(pool, "x", "y", "z")
    pool.free(second)
    pool.free(first)
    assert ids(pool.free_queue) == [5, 4, 3, 2, 1, 0]
    pool.touch(second)
    pool.free(second)  # used again: the other text is older now
    assert ids(pool.free_queue) == [2, 1, 0, 5, 4, 3]
    pool.allocate(4)
    assert found(pool, *"abcxyz") == [None, None, None, 3, 4, None]


def test_a_block_without_a_key_is_handed_out_before_all_that_can_be_found():
    """The order that vLLM's own test of its prefix cache expects."""
    pool = BlockPool(10)
    first = pool.allocate(3)
    for block, key in zip(first, "abc", strict=True):
        pool.publish(block, key, None)
    second = pool.allocate(3)
    pool.publish(second[0], "d", None)
    pool.free(first)
    assert ids(pool.free_queue) == [6, 7, 8, 9, 2, 1, 0]
    pool.free(second)
    assert ids(pool.free_queue) == [4, 5, 6, 7, 8, 9, 2, 1, 0, 3]


def test_without_anything_to_find_the_queue_is_first_in_first_out():
    pool = BlockPool(4)
    pool.free(pool.allocate(2))
    assert ids(pool.free_queue) == [2, 3, 1, 0]


def test_the_free_queue_takes_blocks_at_the_front():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block in (a, b):
        pool.free_queue.appendleft(block)
    pool.free_queue.append(c)
    assert ids(pool.free_queue) == [1, 0, 2] and pool.num_free == 3
    pool.free_queue.remove(a)
    assert ids(pool.free_queue) == [1, 2] and pool.free_queue.popleft() is b and pool.free_queue.popleft() is c
    assert pool.num_free == 0 and ids(pool.free_queue) == []


# --- blocks of one key


def test_two_blocks_in_use_may_have_one_key_and_one_stays_when_the_other_goes():
    pool = BlockPool(4)
    [first], [second] = published(pool, "a"), published(pool, "a")
    assert found(pool, "a") == [0] and pool.num_cached == 2
    pool.free([first])
    assert found(pool, "a") == [1] and pool.num_cached == 1 and first.block_hash is None
    pool.check()
    pool.free([second])
    assert found(pool, "a") == [1] and second.block_hash == "a"
    assert ids(pool.free_queue) == [0, 2, 3, 1]  # the useless one first, the useful one last
    pool.check()


def test_forgetting_one_of_two_keeps_the_other():
    pool = BlockPool(2)
    [first], [second] = published(pool, "a"), published(pool, "a")
    pool.forget([first])
    assert found(pool, "a") == [1] and first.ref_cnt == 1
    pool.check()
    pool.forget([second])
    assert found(pool, "a") == [None] and pool._findable == {}


def test_of_a_key_at_most_one_free_block_is_kept():
    pool = BlockPool(5)
    holders = [published(pool, "a", "b") for _ in range(2)]
    for blocks in holders:
        pool.free(blocks)
        pool.check()
    assert pool.num_cached == 2 and found(pool, "a", "b") == [2, 3]
    assert ids(pool.free_queue) == [0, 1, 4, 3, 2]


def test_a_free_block_is_of_no_use_once_a_block_in_use_has_its_key():
    pool = BlockPool(4)
    pool.free(published(pool, "x", "a"))
    assert ids(pool.free_queue) == [2, 3, 1, 0]
    blocks = published(pool, "a")  # computed again, as the last block of a full hit is
    assert blocks[0].block_id == 2 and found(pool, "a", "x") == [2, 0] and pool.num_cached == 2
    assert ids(pool.free_queue) == [1, 3, 0] and pool.blocks[1].block_hash is None
    pool.check()


def test_a_shared_block_stays_where_it_is_found_while_anybody_holds_it():
    pool = BlockPool(2)
    blocks = published(pool, "a")
    pool.share(blocks)
    pool.free(blocks)
    assert found(pool, "a") == [0] and blocks[0].ref_cnt == 1 and ids(pool.free_queue) == [1]


# --- forget, reset, events


def test_what_is_forgotten_is_not_found_and_its_holder_keeps_it():
    pool = BlockPool(4)
    blocks = published(pool, "a", "b", "c")
    pool.forget([*blocks[1:], pool.blocks[3]])
    assert found(pool, *"abc") == [0, None, None] and [block.ref_cnt for block in blocks] == [1, 1, 1]
    pool.check()
    pool.free(blocks)
    assert ids(pool.free_queue) == [1, 2, 3, 0]


def test_reset_forgets_everything_and_puts_the_blocks_in_order():
    pool = BlockPool(4)
    blocks = published(pool, "a", "b", "c")
    pool.free(blocks[1:])
    before = ids(pool.free_queue)
    assert pool.reset() is False
    assert found(pool, *"abc") == [0, 1, 2] and ids(pool.free_queue) == before
    pool.free(blocks[:1])
    assert pool.reset() is True
    assert found(pool, *"abc") == [None] * 3 and ids(pool.free_queue) == [0, 1, 2, 3] and pool.num_cached == 0
    assert all(block.block_hash is block.parent_hash is None for block in pool.blocks)
    pool.check()


def test_events_tell_what_becomes_findable_and_what_ceases_to_be():
    pool = BlockPool(3)
    pool.free(published(pool, "before"))
    pool.events = []
    blocks = pool.allocate(2)
    pool.publish(blocks[0], "a", None, "R1")
    pool.publish(blocks[1], "b", "a", "R1")
    pool.free(blocks)
    pool.allocate(1)
    pool.touch(blocks[:1])
    pool.forget(blocks)
    assert pool.events == [
        CacheEvent("publish", 1, "a", None, "R1"),
        CacheEvent("publish", 2, "b", "a", "R1"),
        CacheEvent("evict", 0, "before"),
        CacheEvent("evict", 1, "a"),
        CacheEvent("evict", 2, "b"),
    ]


def test_events_replayed_come_to_what_can_be_found():
    pool = BlockPool(8)
    pool.events = []
    for number in range(30):
        keys = [f"{number // 3 % 4}", f"{number // 3 % 4}/{number % 2}"]
        pool.free(published(pool, *keys))
        held = published(pool, f"{number % 7}")
        if number % 5 == 0:
            pool.forget(held)
        pool.free(held)
        if number == 20:
            assert pool.reset()
    replayed = {}
    for event in pool.events:
        if event.kind == "publish":
            assert event.block_id not in replayed
            replayed[event.block_id] = event.key
        else:
            assert replayed.pop(event.block_id) == event.key
    assert replayed == {event.block_id: event.key for event in pool.findable()}


def test_what_can_be_found_is_listed_as_if_it_were_published_now():
    pool = BlockPool(5)
    pool.free(published(pool, "a", "b"))
    published(pool, "x")
    assert pool.findable() == [
        CacheEvent("publish", 0, "a", None),
        CacheEvent("publish", 1, "b", "a"),
        CacheEvent("publish", 2, "x", None),
    ]
    assert pool.events is None


def test_misuse_of_keys_is_loud():
    pool = BlockPool(2)
    [block] = published(pool, "a")
    with pytest.raises(AssertionError, match=r"KVCacheBlock\(block_id=0.*is published twice"):
        pool.publish(block, "b", None)
    with pytest.raises(AssertionError, match=r"KVCacheBlock\(block_id=1.*is published, and nobody holds it"):
        pool.publish(pool.blocks[1], "b", None)
    with pytest.raises(AssertionError, match=r"use after free: KVCacheBlock\(block_id=1.*has no key"):
        pool.touch([pool.blocks[1]])
    pool.free([block])
    with pytest.raises(AssertionError, match=r"use after free: KVCacheBlock\(block_id=0"):
        pool.share([block])  # who found it has to touch it
    with pytest.raises(AssertionError, match="double free"):
        pool.free([block])
    assert found(pool, "a") == [0] and ids(pool.free_queue) == [1, 0]
    pool.check()


def broken_map(break_it):
    pool = BlockPool(4)
    pool.free(published(pool, "a", "b"))
    published(pool, "c")
    break_it(pool)
    return pool


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: setattr(pool.blocks[0], "block_hash", "z"), "are found under 'a'"),
        (lambda pool: setattr(pool.blocks[3], "block_hash", "z"), "are not those found"),
        (lambda pool: pool._findable.pop("b"), "are not those found"),
        (lambda pool: pool._findable["a"].clear(), "a key has no block"),
        (lambda pool: pool._findable["a"].append(pool.blocks[0]), "a block is found twice"),
        (lambda pool: keyed(pool, 3, "a"), "a free one is kept in vain"),
        (lambda pool: pool.free_queue.popleft(), "free queue .* differ"),
        (lambda pool: setattr(pool.free_queue, "num_free", 7), "the free queue is broken"),
    ],
)
def test_the_check_sees_a_broken_map(break_it, message):
    with pytest.raises(AssertionError, match=message):
        broken_map(break_it).check()


def keyed(pool, block_id, key):
    pool.blocks[block_id].block_hash = key
    pool._findable[key].append(pool.blocks[block_id])
