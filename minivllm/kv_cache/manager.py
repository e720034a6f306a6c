"""The seam of memory: what the engine asks of whoever hands out slots.

Two managers stand behind it, `PagedKVCache` and `ContiguousKVCache`. Both answer with block tables, so that
the model runs on either without knowing which. Nothing here knows tensors; a request is whatever has the
name and the numbers of `KVRequest`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from minivllm.kv_cache.block_hash import BlockKey
from minivllm.kv_cache.block_pool import CacheEvent, KVCacheBlock
from minivllm.kv_cache.records import Fragmentation, MemoryEvent, PrefixCacheStats, TableChange


class KVRequest(Protocol):
    """What memory must know of a request.

    Attributes:
        request_id: its name.
        num_tokens: its tokens so far, prompt and answer.
        num_computed_tokens: those of them whose keys and values are in the cache.
        max_num_tokens: most tokens it can come to, prompt and answer. The last of them needs no slot.

    A memory that caches prefixes looks also at what a `HashedRequest` has.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...


class KVCacheManager(ABC):
    """Hands out slots, in blocks of `block_size`.

    A manager that caches prefixes (`caches_prefixes`) finds blocks that earlier requests have filled; to all others
    the methods from `get_computed_blocks` to `reset` are without effect.

    Attributes:
        caches_prefixes: whether blocks can be found by their content.
        prefix_cache_stats: what lookups came to.
        copies: block copies that the runner has still to make.
        events: where events are recorded; None (the default) records nothing.
        cache_events: the same for what becomes findable and what is evicted.
        step: number of the current step, for the events; whoever drives the manager counts it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.caches_prefixes, self.prefix_cache_stats = False, PrefixCacheStats()
        self.copies = PendingCopies()
        self.events: list[MemoryEvent] | None = None
        self.cache_events: list[CacheEvent] | None = None
        self.step = 0
        self._changed: dict[str, int] = {}

    @abstractmethod
    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request that needs `num_tokens` slots fits into the pool when nobody else is there."""

    @abstractmethod
    def allocate_slots(
        self, request: KVRequest, num_new_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> bool:
        """Gives a request the slots for its next tokens, all or nothing.

        Args:
            request: whose.
            num_new_tokens: tokens to compute.
            computed_blocks: what `get_computed_blocks` has just found for it; its table begins with them, and
                whoever calls counts their tokens as computed. They are taken before any other block is.

        Returns:
            True: its block table covers num_computed_tokens + num_new_tokens, and the blocks that will be
            written are its own. False: there is too little room, and nothing has changed.

        Raises:
            AssertionError: no new token, or a request that has computed tokens and holds no memory.
        """

    def get_computed_blocks(self, request: KVRequest) -> list[KVCacheBlock]:
        """The blocks of a request without memory that are in the cache: its longest prefix of full blocks.

        At least one token is left to compute, because an answer begins with a token's logits: of a request that is
        there to its last block, the last block is computed again, as in vLLM, into a block of its own. Nothing is
        taken: what was found may be gone later, so whoever does not use it at once looks again.
        """
        return []

    def next_key(self, request: KVRequest, computed_blocks: Sequence[KVCacheBlock]) -> BlockKey | None:
        """The key of the first block that was not found and that another request could compute for this one."""
        return None

    def keys_in_progress(self, request: KVRequest, num_new_tokens: int) -> list[BlockKey]:
        """The keys of those blocks, as far as all their tokens are known, that a request's next tokens lie in."""
        return []

    def commit(self, request: KVRequest, num_before: int) -> None:  # noqa: B027
        """Makes findable what a pass has filled: a request had `num_before` computed tokens before it."""

    def forget(self, request: KVRequest) -> None:  # noqa: B027
        """Nobody shall find what a request holds: its keys and values are not to be trusted."""

    def reset(self) -> bool:
        """Empties the prefix cache.

        Returns:
            False, and nothing has changed, if a block is in use.
        """
        return self.num_free_blocks == self.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content, in use or free."""
        return 0

    def findable(self) -> list[CacheEvent]:
        """All that can be found, as if it were published now."""
        return []

    @abstractmethod
    def fork(self, parent: KVRequest, child: KVRequest) -> bool:
        """Gives a new request everything the parent has computed.

        Returns:
            True, or False, and nothing has changed, if there is too little room.
        """

    @abstractmethod
    def free(self, request: KVRequest) -> None:
        """Takes back all slots of a request; without effect if it has none."""

    def get_block_ids(self, request: KVRequest) -> list[int]:
        """The block table: block `i` holds the tokens from i * block_size on. Empty if it has no slots."""
        return self._block_ids(request.request_id, 0)

    @abstractmethod
    def _block_ids(self, request_id: str, start: int) -> list[int]:
        """The block table from entry `start` on."""

    @abstractmethod
    def _num_blocks_of(self, request_id: str) -> int:
        """Length of the block table."""

    @abstractmethod
    def fragmentation(self, waiting: KVRequest | None = None) -> Fragmentation:
        """What every slot is used for.

        Args:
            waiting: the next request that waits for memory; None if nobody waits.
        """

    @abstractmethod
    def check(self) -> None:
        """Asserts the invariants."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def check_call(self, request: KVRequest, num_new_tokens: int, has_memory: bool) -> None:
        """Asserts that slots are asked for tokens that are there to come, by a request whose past is here."""
        assert num_new_tokens > 0, f"{request.request_id} asks for slots for {num_new_tokens} tokens"
        computed = request.num_computed_tokens
        assert has_memory or not computed, f"{request.request_id} has computed {computed} tokens and holds no memory"

    def take_copies(self) -> list[tuple[int, int]]:
        """Hands over the block copies (source, target) that must be made before the next pass, in order."""
        return self.copies.take()

    def take_changes(self) -> dict[str, TableChange]:
        """Hands over what has changed in block tables since the last call, for those who keep a copy of them."""
        taken, self._changed = self._changed, {}
        return {name: TableChange(start, self._block_ids(name, start)) for name, start in taken.items()}

    def num_missing_blocks(self, request: KVRequest, computed_blocks: Sequence[KVCacheBlock] = ()) -> int:
        """Free blocks that a request has still to get for the tokens that it has so far.

        A computed block that nobody holds is a free one too; one in use costs nothing.
        """
        needed = self.num_blocks_for(request.num_tokens) - self._num_blocks_of(request.request_id)
        return max(0, needed - sum(block.ref_cnt > 0 for block in computed_blocks))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def _note_change(self, request_id: str, start: int) -> None:
        """Remembers that a block table differs from entry `start` on from what was last handed over."""
        self._changed[request_id] = min(start, self._changed.get(request_id, start))

    def emit(self, kind: str, request: KVRequest, num_tokens: int) -> None:
        """Records an event, if anybody listens."""
        if self.events is not None:
            table = tuple(self.get_block_ids(request))
            self.events.append(MemoryEvent(self.step, kind, request.request_id, table, num_tokens))


class PendingCopies:
    """Block copies that the runner has still to make, one after the other in the order of their recording."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, int]] = []

    def record(self, source: int, target: int) -> None:
        """Asks for block `target` to become a copy of block `source`."""
        self._copies.append((source, target))

    def drop(self, targets: Iterable[int]) -> None:
        """Forgets the copies into blocks that were given back.

        One that another copy reads from stays: whoever gets the block next writes it after all copies.
        """
        given_back, read = set(targets), set[int]()
        kept = []
        for source, target in reversed(self._copies):
            if target not in given_back or target in read:
                kept.append((source, target))
                read.add(source)
        self._copies = kept[::-1]

    def take(self) -> list[tuple[int, int]]:
        """Hands the list over and empties it."""
        taken, self._copies = self._copies, []
        return taken
