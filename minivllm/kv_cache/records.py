"""What a memory manager tells of itself: how its slots are used, what happened in it, what was found. Plain data."""

from dataclasses import dataclass, fields
from typing import NamedTuple


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


@dataclass
class PrefixCacheStats:
    """What lookups came to, in vLLM's sense: each counts once, when the request is admitted.

    Attributes:
        requests: requests that were looked up.
        queries: their tokens.
        hits: those of them that were found.
        resumed_requests: requests that were looked up again, after they had lost their memory. What they find is
            mostly their own, so it would flatter the hit rate.
        resumed_queries: their tokens.
        resumed_hits: those of them that were found.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    resumed_requests: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over queries, 0 to 1; 0 without queries."""
        return self.hits / self.queries if self.queries else 0.0

    def record(self, num_tokens: int, num_hits: int, resumed: bool) -> None:
        """Counts a lookup."""
        if resumed:
            self.resumed_requests += 1
            self.resumed_queries += num_tokens
            self.resumed_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
