"""The blocks: who holds how many references to which, which are free, and which can be found by what they hold.

Knows nothing of requests and nothing of tensors: a block is a number. Every operation is all or nothing. A
full pool is a condition (`None`); a double free or a use after free is a bug and raises at once, with the
block in the message.

A block with a key stays findable while it is free, until it is handed out again: free memory is the cache, and
the free queue is its LRU order. Requests that computed the same text at the same time hold blocks of one key, since
tables never change; once they are free one of them is kept, and the others are handed out before anything useful.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from minivllm.kv_cache.block_hash import BlockKey


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block of the cache. While it is free it is a link of the free queue.

    Attributes:
        block_id: its place in the pool, 0 to num_blocks - 1.
        ref_cnt: how many block tables name it; 0 means free.
        block_hash: the key under which it can be found; None for one that is not full, or not computed.
        parent_hash: the key of the block before it; None for a first block. Only where block_hash is set.
        prev_free: the block before it in the free queue.
        next_free: the block behind it in the free queue.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockKey | None = None
    parent_hash: BlockKey | None = None
    prev_free: "KVCacheBlock | None" = field(default=None, repr=False)
    next_free: "KVCacheBlock | None" = field(default=None, repr=False)


class FreeKVCacheBlockQueue:
    """The free blocks in the order in which they will be handed out.

    A doubly linked list that runs through the blocks themselves, as in vLLM: taking from the front,
    returning to the back and removing from the middle are all O(1) and allocate nothing. The head and the
    tail are no real blocks, so that no operation has a special case at the ends.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-2)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """Puts a block at the back."""
        self._insert(self._tail.prev_free, block, self._tail)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Puts a block at the front."""
        self._insert(self._head, block, self._head.next_free)

    def popleft(self) -> KVCacheBlock:
        """Takes the block at the front; the caller has checked that there is one."""
        head = self._head
        block = head.next_free
        assert block is not None and block.next_free is not None, "the free queue is empty"
        head.next_free = block.next_free
        block.next_free.prev_free = head
        block.prev_free = block.next_free = None
        self.num_free -= 1
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out from wherever it stands."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not in the free queue"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free -= 1

    def _insert(self, before: KVCacheBlock | None, block: KVCacheBlock, after: KVCacheBlock | None) -> None:
        """Puts a block between two neighbours."""
        assert before is not None and after is not None, "the free queue is broken"
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.num_free += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From front to back."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


class CacheEvent(NamedTuple):
    """A block became findable, or is so no more; for the recorder.

    Attributes:
        kind: "publish" or "evict".
        block_id: which block.
        key: under which it is, or was, found.
        parent: for "publish", the key of the block before it; None for a first block.
        request_id: for "publish", whose tokens filled it; empty if that was before the recording.
    """

    kind: Literal["publish", "evict"]
    block_id: int
    key: BlockKey
    parent: BlockKey | None = None
    request_id: str = ""


class BlockPool:
    """All blocks of a cache, with reference counts, the free queue and the map of keys.

    Attributes:
        blocks: all of them, by number.
        free_queue: those without a reference.
        events: where events are recorded; None (the default) records nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        """Makes a pool in which every block is free, in the order of their ids.

        Raises:
            ValueError: fewer than one block.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeKVCacheBlockQueue(self.blocks)
        self.events: list[CacheEvent] | None = None
        # Of each key either one block that is free, or any number that are in use.
        self._findable: dict[BlockKey, list[KVCacheBlock]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.free_queue.num_free

    @property
    def num_used(self) -> int:
        """Blocks that at least one block table names."""
        return len(self.blocks) - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that can be found."""
        return sum(map(len, self._findable.values()))

    def allocate(self, count: int) -> list[KVCacheBlock] | None:
        """Takes `count` blocks from the front of the free queue, each with one reference; their content is lost.

        Returns:
            The blocks; None, and nothing taken, if fewer are free.
        """
        if count > self.free_queue.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self.free_queue.popleft()
            if block.block_hash is not None:
                self._evict(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a reference to blocks that somebody holds.

        Raises:
            AssertionError: a block is free: it may be another request's by now.
        """
        for block in blocks:
            assert block.ref_cnt > 0, f"use after free: {block} is shared, but nobody holds it"
            block.ref_cnt += 1

    def find(self, key: BlockKey) -> KVCacheBlock | None:
        """A block of this key; None if there is none."""
        blocks = self._findable.get(key)
        return blocks[0] if blocks else None

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a reference to blocks that were found; those that are free leave the free queue.

        Raises:
            AssertionError: a block is free and has no key: its content may be anything.
        """
        for block in blocks:
            if block.ref_cnt == 0:
                assert block.block_hash is not None, f"use after free: {block} has no key, and nobody holds it"
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def publish(self, block: KVCacheBlock, key: BlockKey, parent: BlockKey | None, request_id: str = "") -> None:
        """Makes a full block findable; a free one of the same key is then of no use.

        Raises:
            AssertionError: nobody holds it, or it has a key.
        """
        assert block.ref_cnt > 0, f"{block} is published, and nobody holds it"
        assert block.block_hash is None, f"{block} is published twice"
        for other in list(self._findable.get(key, ())):
            if other.ref_cnt == 0:
                self._evict(other)
                self.free_queue.remove(other)
                self.free_queue.appendleft(other)
        self._findable.setdefault(key, []).append(block)
        block.block_hash, block.parent_hash = key, parent
        if self.events is not None:
            self.events.append(CacheEvent("publish", block.block_id, key, parent, request_id))

    def findable(self) -> list[CacheEvent]:
        """All that can be found, as if it were published now."""
        found = [block for blocks in self._findable.values() for block in blocks]
        return [CacheEvent("publish", block.block_id, block.block_hash, block.parent_hash) for block in found]

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Makes sure that blocks are not found any more; whoever holds them keeps them."""
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drops a reference to each block; those without any go to the back of the free queue.

        From the last block to the first, so that the tail of a sequence is handed out again before its
        beginning, which other requests are likelier to share. Where blocks are cached, one that nobody will look
        for (it has no key, or another of its key is in use) goes to the front.

        Raises:
            AssertionError: a block is free already.
        """
        for block in reversed(blocks):
            assert block.ref_cnt > 0, f"double free: {block} is given back, but nobody holds it"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._put_back(block)

    def reset(self) -> bool:
        """Forgets all keys, and puts the free queue in the order of the blocks' ids.

        Returns:
            False, and nothing has changed, if a block is in use.
        """
        if self.num_used:
            return False
        self.forget(self.blocks)
        self.free_queue = FreeKVCacheBlockQueue(self.blocks)
        return True

    def check(self) -> None:
        """Asserts that the free queue holds exactly the blocks without references, each once, and the map exactly
        those with a key, under it."""
        free = [block.block_id for block in self.free_queue]
        assert len(free) == len(set(free)) == self.num_free, f"the free queue is broken: {free}"
        without = {block.block_id for block in self.blocks if block.ref_cnt == 0}
        assert set(free) == without, f"free queue {sorted(free)} and blocks without references {sorted(without)} differ"
        assert all(block.ref_cnt >= 0 for block in self.blocks), "a reference count is negative"
        found = [block for blocks in self._findable.values() for block in blocks]
        assert all(self._findable.values()), "a key has no block"
        assert len(found) == len(set(map(id, found))), "a block is found twice"
        for key, blocks in self._findable.items():
            assert all(block.block_hash == key for block in blocks), f"{blocks} are found under {key!r}"
            assert len(blocks) == 1 or all(block.ref_cnt for block in blocks), f"{blocks}: a free one is kept in vain"
        keyed = {block.block_id for block in self.blocks if block.block_hash is not None}
        assert {block.block_id for block in found} == keyed, f"blocks with keys {sorted(keyed)} are not those found"

    def _put_back(self, block: KVCacheBlock) -> None:
        """Queues a block that nobody holds any more."""
        if block.block_hash is not None and len(self._findable[block.block_hash]) > 1:
            self._evict(block)
        if block.block_hash is None and self._findable:
            self.free_queue.appendleft(block)
        else:
            self.free_queue.append(block)

    def _evict(self, block: KVCacheBlock) -> None:
        """Takes a block's key away; others of that key stay."""
        key = block.block_hash
        assert key is not None
        blocks = self._findable[key]
        blocks.remove(block)
        if not blocks:
            del self._findable[key]
        block.block_hash = block.parent_hash = None
        if self.events is not None:
            self.events.append(CacheEvent("evict", block.block_id, key))
