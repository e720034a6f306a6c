"""Paged memory: blocks on demand, from anywhere, shared by reference count, copied when written.

The idea of PagedAttention (Kwon et al., SOSP 2023): a request's tokens lie in blocks that need not be
neighbours, and its block table says where. Only the last block of a request can be partly empty, so a
request wastes less than one block.

With prefix caching, full blocks can be found by what they hold, also after their request has ended: a request
whose tokens begin like those of an earlier one takes over its blocks and computes only the rest.
"""

from collections.abc import Sequence
from typing import cast

from minivllm.kv_cache.block_hash import BlockHasher, BlockKey, HashedRequest
from minivllm.kv_cache.block_pool import BlockPool, CacheEvent, KVCacheBlock
from minivllm.kv_cache.manager import KVCacheManager, KVRequest
from minivllm.kv_cache.records import Fragmentation


class PagedKVCache(KVCacheManager):
    """Hands out any free block, one at a time, when a request needs it."""

    def __init__(self, num_blocks: int, block_size: int, hash_algorithm: str | None = None) -> None:
        """Makes an empty cache.

        Args:
            num_blocks: its size.
            block_size: tokens per block.
            hash_algorithm: how blocks get their keys ("sha256" or "builtin"); None caches no prefixes.

        Raises:
            ValueError: fewer than one block, blocks of less than one token, or an unknown algorithm.
        """
        self.pool = BlockPool(num_blocks)  # which knows the cache_events
        super().__init__(num_blocks, block_size)
        self.caches_prefixes = hash_algorithm is not None
        self._hasher = BlockHasher(block_size, hash_algorithm or "sha256")
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._requests: dict[str, KVRequest] = {}
        # How many tokens a request may come to without a new block and without a copy.
        self._room: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) <= self.num_blocks

    def allocate_slots(
        self, request: KVRequest, num_new_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> bool:
        num_tokens = request.num_computed_tokens + num_new_tokens
        has_room = num_new_tokens > 0 and num_tokens <= self._room.get(request.request_id, 0)
        if has_room and self.events is None and not computed_blocks:
            return True
        table = self._tables.get(request.request_id, [])
        self.check_call(request, num_new_tokens, bool(table))
        if computed_blocks:
            assert not table, f"{request.request_id} holds blocks, and looks for others"
            num_tokens += len(computed_blocks) * self.block_size
        num_new_blocks = max(0, self.num_blocks_for(num_tokens) - len(table) - len(computed_blocks))
        shared = self._shared_partial_block(request, table)
        num_taken = num_new_blocks + (shared is not None)
        if num_taken + sum(block.ref_cnt == 0 for block in computed_blocks) > self.pool.num_free:
            return False
        # First those that were found: the first free block may be one of them.
        self.pool.touch(computed_blocks)
        taken = self.pool.allocate(num_taken)
        assert taken is not None, f"{num_taken} blocks were free"
        if shared is not None:
            # Copy on write: the copy is recorded and the table repointed before the reference is dropped.
            own, index = taken.pop(), request.num_computed_tokens // self.block_size
            self.copies.record(shared.block_id, own.block_id)
            table[index] = own
            self.pool.free([shared])
            self._note_change(request.request_id, index)
            self.emit("copy", request, num_tokens)
        if taken or computed_blocks:
            self._note_change(request.request_id, len(table))
            table += [*computed_blocks, *taken]
        self._tables[request.request_id], self._requests[request.request_id] = table, request
        self._room[request.request_id] = len(table) * self.block_size
        self.emit("allocate" if taken or computed_blocks else "grow", request, num_tokens)
        return True

    def get_computed_blocks(self, request: KVRequest) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        for key in self._usable_keys(request):
            block = self.pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def next_key(self, request: KVRequest, computed_blocks: Sequence[KVCacheBlock]) -> BlockKey | None:
        keys = self._usable_keys(request)
        return keys[len(computed_blocks)] if len(computed_blocks) < len(keys) else None

    def keys_in_progress(self, request: KVRequest, num_new_tokens: int) -> list[BlockKey]:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
        return self._keys(request)[start // self.block_size : self.num_blocks_for(end)]

    def commit(self, request: KVRequest, num_before: int) -> None:
        start, end = num_before // self.block_size, request.num_computed_tokens // self.block_size
        if start == end or not self.caches_prefixes:
            return
        keys, table = self._keys(request), self._tables[request.request_id]
        for index in range(start, end):
            self.pool.publish(table[index], keys[index], keys[index - 1] if index else None, request.request_id)

    def forget(self, request: KVRequest) -> None:
        self.pool.forget(self._tables.get(request.request_id, []))

    def reset(self) -> bool:
        return self.pool.reset()

    def findable(self) -> list[CacheEvent]:
        return self.pool.findable()

    @property
    def num_cached_blocks(self) -> int:
        return self.pool.num_cached

    @property
    def cache_events(self) -> list[CacheEvent] | None:
        """Where what becomes findable and what is evicted is recorded; None records nothing."""
        return self.pool.events

    @cache_events.setter
    def cache_events(self, events: list[CacheEvent] | None) -> None:
        self.pool.events = events

    def _keys(self, request: KVRequest) -> list[BlockKey]:
        return self._hasher.keys(cast(HashedRequest, request))

    def _usable_keys(self, request: KVRequest) -> list[BlockKey]:
        """The keys of the blocks that a request may take over: those of full blocks before its last token."""
        if not self.caches_prefixes or cast(HashedRequest, request).skip_reading_prefix_cache:
            return []
        return self._keys(request)[: (request.num_tokens - 1) // self.block_size]

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
        num_used, num_wanted = self._count_slots()
        return Fragmentation(
            used=num_used,
            to_come=num_wanted - num_used,
            internal=self.pool.num_used * size - num_wanted,
            external=0,
            free=self.pool.num_free * size,
        )

    def _count_slots(self) -> tuple[int, int]:
        """Slots with a token, and slots that will ever have one.

        Counted per request; then what is shared has been counted once too often for each further holder. A shared
        block is full, but for the last of a request that has just been forked: then blocks are counted one by one.
        """
        num_used = num_wanted = num_named = 0
        for request_id, table in self._tables.items():
            request, slots = self._requests[request_id], len(table) * self.block_size
            here = min(slots, request.num_computed_tokens)
            if self._shared_partial_block(request, table):
                return self._count_block_by_block()
            num_used += here
            num_wanted += min(slots, max(here, request.max_num_tokens - 1))
            num_named += len(table)
        too_many = (num_named - self.pool.num_used) * self.block_size
        return num_used - too_many, num_wanted - too_many

    def _count_block_by_block(self) -> tuple[int, int]:
        """The same with each block counted by the holder that has come furthest in it."""
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
        """Asserts the invariants: every reference is a block table's, every table covers its tokens, and what can be
        found in it is found by these tokens."""
        self.pool.check()
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            assert len(set(map(id, table))) == len(table), f"{request_id} names a block twice"
            covered = len(table) * self.block_size
            assert covered >= self._requests[request_id].num_computed_tokens, f"{request_id} has too few blocks"
            for block in table:
                references[block.block_id] += 1
            if self.caches_prefixes:
                self._check_keys(self._requests[request_id], table)
        counts = [block.ref_cnt for block in self.pool.blocks]
        assert references == counts, f"block tables name {references}, the pool counts {counts}"

    def _check_keys(self, request: KVRequest, table: Sequence[KVCacheBlock]) -> None:
        keys, num_full = self._keys(request), request.num_computed_tokens // self.block_size
        for index, block in enumerate(table):
            if block.block_hash is not None:
                assert index < num_full, f"{request.request_id}: {block} can be found before it is computed"
                assert block.block_hash == keys[index], f"{request.request_id}: {block} has another text's key"

    def _shared_partial_block(self, request: KVRequest, table: list[KVCacheBlock]) -> KVCacheBlock | None:
        """The block in which the next token will be written, if it holds tokens and somebody else's too."""
        index, offset = divmod(request.num_computed_tokens, self.block_size)
        if offset and table[index].ref_cnt > 1:
            return table[index]
        return None
