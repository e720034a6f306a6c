"""Time, as the engine is given it: nothing in scheduler, memory or engine looks at a clock of its own."""

import time
from typing import Protocol


class Clock(Protocol):
    """What time it is, in seconds from some beginning."""

    def now(self) -> float:
        """The time."""

    def advance(self, elapsed_s: float) -> None:
        """A step has taken so long."""


class WallClock:
    """Real time, which goes on by itself."""

    def now(self) -> float:
        return time.perf_counter()

    def advance(self, elapsed_s: float) -> None:
        pass


class VirtualClock:
    """Time that passes only as steps take it: for simulations, and for tests that must not depend on speed."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, elapsed_s: float) -> None:
        self._now += elapsed_s
