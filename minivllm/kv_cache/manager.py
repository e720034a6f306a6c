"""The seam of memory: what the engine asks of whoever hands out slots.

Two managers stand behind it, `PagedKVCache` and `ContiguousKVCache`. Both answer with block tables, so that
the model runs on either without knowing which. Nothing here knows tensors; a request is whatever has the
name and the numbers of `KVRequest`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol


class KVRequest(Protocol):
    """What memory must know of a request.

    Attributes:
        request_id: its name.
        num_tokens: its tokens so far, prompt and answer.
        num_computed_tokens: those of them whose keys and values are in the cache.
        max_num_tokens: most tokens it can come to, prompt and answer. The last of them needs no slot.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Fragmentation:
    """What every slot of the pool is used for; the five parts add up to all slots.

    Attributes:
        used: hold the keys and values of a token (shared ones count once).
        to_come: reserved for tokens that a request may still come to.
        internal: reserved, and never to be used, whatever the requests do.
        external: free, but in runs too short for the next waiting request.
        free: free otherwise.
    """

    used: int
    to_come: int
    internal: int
    external: int
    free: int

    @property
    def total(self) -> int:
        """All slots of the pool."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def used_of_reserved(self) -> float:
        """Slots with a token over slots that are reserved, 0 to 1; 1 where nothing is reserved."""
        reserved = self.used + self.to_come + self.internal
        return self.used / reserved if reserved else 1.0


@dataclass(frozen=True)
class MemoryEvent:
    """Something that happened to a request's memory, for the recorder and the figures.

    Attributes:
        step: the step in which it happened, as the manager was told it.
        kind: "allocate" (more blocks), "grow" (room enough in its blocks), "fork", "copy", "move" or "free".
        request_id: whose memory.
        block_ids: its block table after it.
        num_tokens: tokens it will hold once its scheduled tokens are computed.
    """

    step: int
    kind: str
    request_id: str
    block_ids: tuple[int, ...]
    num_tokens: int


class TableChange(NamedTuple):
    """A block table is now `block_ids` from entry `start` on; what stood before it still holds."""

    start: int
    block_ids: list[int]


class KVCacheManager(ABC):
    """Hands out slots, in blocks of `block_size`.

    Attributes:
        copies: block copies that the runner has still to make.
        events: where events are recorded; None (the default) records nothing.
        step: number of the current step, for the events; whoever drives the manager counts it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.copies = PendingCopies()
        self.events: list[MemoryEvent] | None = None
        self.step = 0
        self._changed: dict[str, int] = {}

    @abstractmethod
    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request that needs `num_tokens` slots fits into the pool when nobody else is there."""

    @abstractmethod
    def allocate_slots(self, request: KVRequest, num_new_tokens: int) -> bool:
        """Gives a request the slots for its next tokens, all or nothing.

        Returns:
            True: its block table covers num_computed_tokens + num_new_tokens, and the blocks that will be
            written are its own. False: there is too little room, and nothing has changed.

        Raises:
            AssertionError: no new token, or a request that has computed tokens and holds no memory.
        """

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

    def take_changes(self) -> dict[str, "TableChange"]:
        """Hands over what has changed in block tables since the last call, for those who keep a copy of them."""
        taken, self._changed = self._changed, {}
        return {name: TableChange(start, self._block_ids(name, start)) for name, start in taken.items()}

    def num_missing_blocks(self, request: KVRequest) -> int:
        """Blocks that a request has still to get for the tokens that it has so far."""
        return max(0, self.num_blocks_for(request.num_tokens) - self._num_blocks_of(request.request_id))

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
