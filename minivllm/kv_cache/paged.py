"""Paged memory: blocks on demand, from anywhere, shared by reference count, copied when written.

The idea of PagedAttention (Kwon et al., SOSP 2023): a request's tokens lie in blocks that need not be
neighbours, and its block table says where. Only the last block of a request can be partly empty, so a
request wastes less than one block.
"""

from minivllm.kv_cache.block_pool import BlockPool, KVCacheBlock
from minivllm.kv_cache.manager import Fragmentation, KVCacheManager, KVRequest


class PagedKVCache(KVCacheManager):
    """Hands out any free block, one at a time, when a request needs it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Makes an empty cache.

        Raises:
            ValueError: fewer than one block, or blocks of less than one token.
        """
        super().__init__(num_blocks, block_size)
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._requests: dict[str, KVRequest] = {}
        # How many tokens a request may come to without a new block and without a copy.
        self._room: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) <= self.num_blocks

    def allocate_slots(self, request: KVRequest, num_new_tokens: int) -> bool:
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_new_tokens > 0 and num_tokens <= self._room.get(request.request_id, 0) and self.events is None:
            return True
        table = self._tables.get(request.request_id, [])
        self.check_call(request, num_new_tokens, bool(table))
        num_new_blocks = max(0, self.num_blocks_for(num_tokens) - len(table))
        shared = self._shared_partial_block(request, table)
        taken = self.pool.allocate(num_new_blocks + (shared is not None))
        if taken is None:
            return False
        if shared is not None:
            # Copy on write: the copy is recorded and the table repointed before the reference is dropped.
            own, index = taken.pop(), request.num_computed_tokens // self.block_size
            self.copies.record(shared.block_id, own.block_id)
            table[index] = own
            self.pool.free([shared])
            self._note_change(request.request_id, index)
            self.emit("copy", request, num_tokens)
        if taken:
            self._note_change(request.request_id, len(table))
            table.extend(taken)
        self._tables[request.request_id], self._requests[request.request_id] = table, request
        self._room[request.request_id] = len(table) * self.block_size
        self.emit("allocate" if taken else "grow", request, num_tokens)
        return True

    def fork(self, parent: KVRequest, child: KVRequest) -> bool:
        """Shares all blocks that hold computed tokens; costs nothing until one of the two writes.

        Raises:
            AssertionError: the child has memory already, or has computed more than its parent.
        """
        assert child.request_id not in self._tables, f"{child.request_id} has blocks already"
        assert child.num_computed_tokens <= parent.num_computed_tokens, "a child can't have computed more"
        table = self._tables[parent.request_id][: self.num_blocks_for(child.num_computed_tokens)]
        self.pool.share(table)
        self._tables[child.request_id], self._requests[child.request_id] = list(table), child
        self._room.pop(parent.request_id, None)
        self._note_change(child.request_id, 0)
        self.emit("fork", child, child.num_computed_tokens)
        return True

    def free(self, request: KVRequest) -> None:
        table = self._tables.pop(request.request_id, [])
        for per_request in (self._requests, self._room, self._changed):
            per_request.pop(request.request_id, None)
        self.pool.free(table)
        self.copies.drop(block.block_id for block in table if block.ref_cnt == 0)
        if table:
            self.emit("free", request, 0)

    def _block_ids(self, request_id: str, start: int) -> list[int]:
        return [block.block_id for block in self._tables.get(request_id, [])[start:]]

    def _num_blocks_of(self, request_id: str) -> int:
        return len(self._tables.get(request_id, []))

    def fragmentation(self, waiting: KVRequest | None = None) -> Fragmentation:
        """Any free block fits anywhere, so nothing is lost between blocks: external is always 0."""
        size = self.block_size
        if sum(map(len, self._tables.values())) == self.pool.num_used:
            num_used, num_wanted = self._count_unshared()
        else:
            num_used, num_wanted = self._count_by_block()
        return Fragmentation(
            used=num_used,
            to_come=num_wanted - num_used,
            internal=self.pool.num_used * size - num_wanted,
            external=0,
            free=self.pool.num_free * size,
        )

    def _count_unshared(self) -> tuple[int, int]:
        """Slots with a token, and slots that will ever have one, where no block has two holders."""
        num_used = num_wanted = 0
        for request_id, table in self._tables.items():
            request, slots = self._requests[request_id], len(table) * self.block_size
            here = min(slots, request.num_computed_tokens)
            num_used += here
            num_wanted += min(slots, max(here, request.max_num_tokens - 1))
        return num_used, num_wanted

    def _count_by_block(self) -> tuple[int, int]:
        """The same where blocks are shared: each counts once, by the holder that has come furthest in it."""
        size = self.block_size
        used, wanted = dict[int, int](), dict[int, int]()
        for request_id, table in self._tables.items():
            request = self._requests[request_id]
            for index, block in enumerate(table):
                here = min(size, max(0, request.num_computed_tokens - index * size))
                ever = min(size, max(0, request.max_num_tokens - 1 - index * size))
                used[block.block_id] = max(used.get(block.block_id, 0), here)
                wanted[block.block_id] = max(wanted.get(block.block_id, 0), ever, here)
        return sum(used.values()), sum(wanted.values())

    def check(self) -> None:
        """Asserts the invariants: every reference is a block table's, and every table covers its tokens."""
        self.pool.check()
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            assert len(set(map(id, table))) == len(table), f"{request_id} names a block twice"
            covered = len(table) * self.block_size
            assert covered >= self._requests[request_id].num_computed_tokens, f"{request_id} has too few blocks"
            for block in table:
                references[block.block_id] += 1
        counts = [block.ref_cnt for block in self.pool.blocks]
        assert references == counts, f"block tables name {references}, the pool counts {counts}"

    def _shared_partial_block(self, request: KVRequest, table: list[KVCacheBlock]) -> KVCacheBlock | None:
        """The block in which the next token will be written, if it holds tokens and somebody else's too."""
        index, offset = divmod(request.num_computed_tokens, self.block_size)
        if offset and table[index].ref_cnt > 1:
            return table[index]
        return None
