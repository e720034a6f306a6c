"""The pool: all or nothing, every reference counted, every misuse loud."""

import pytest

from minivllm.kv_cache.block_pool import BlockPool


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
