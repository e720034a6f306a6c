"""The blocks: who holds how many references to which, and which are free.

Knows nothing of requests and nothing of tensors: a block is a number. Every operation is all or nothing. A
full pool is a condition (`None`); a double free or a use after free is a bug and raises at once, with the
block in the message.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block of the cache. While it is free it is a link of the free queue.

    Attributes:
        block_id: its place in the pool, 0 to num_blocks - 1.
        ref_cnt: how many block tables name it; 0 means free.
        block_hash: the key under which its content can be found again; None while it has none.
        prev_free: the block before it in the free queue.
        next_free: the block behind it in the free queue.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
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
        tail = self._tail
        last = tail.prev_free
        block.prev_free, block.next_free = last, tail
        last.next_free = tail.prev_free = block  # type: ignore[union-attr]
        self.num_free += 1

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

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From front to back."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """All blocks of a cache, with reference counts and the free queue."""

    def __init__(self, num_blocks: int) -> None:
        """Makes a pool in which every block is free, in the order of their ids.

        Raises:
            ValueError: fewer than one block.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeKVCacheBlockQueue(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.free_queue.num_free

    @property
    def num_used(self) -> int:
        """Blocks that at least one block table names."""
        return len(self.blocks) - self.num_free

    def allocate(self, count: int) -> list[KVCacheBlock] | None:
        """Takes `count` blocks from the front of the free queue, each with one reference.

        Returns:
            The blocks; None, and nothing taken, if fewer are free.
        """
        if count > self.free_queue.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self.free_queue.popleft()
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

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drops a reference to each block; those without any go to the back of the free queue.

        From the last block to the first, so that the tail of a sequence is handed out again before its
        beginning, which other requests are likelier to share.

        Raises:
            AssertionError: a block is free already.
        """
        for block in reversed(blocks):
            assert block.ref_cnt > 0, f"double free: {block} is given back, but nobody holds it"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_queue.append(block)

    def check(self) -> None:
        """Asserts that the free queue holds exactly the blocks without references, each once."""
        free = [block.block_id for block in self.free_queue]
        assert len(free) == len(set(free)) == self.num_free, f"the free queue is broken: {free}"
        without = {block.block_id for block in self.blocks if block.ref_cnt == 0}
        assert set(free) == without, f"free queue {sorted(free)} and blocks without references {sorted(without)} differ"
        assert all(block.ref_cnt >= 0 for block in self.blocks), "a reference count is negative"
