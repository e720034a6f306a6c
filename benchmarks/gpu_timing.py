"""What every GPU measurement shares: where it runs, what takes the time, and what comes out. Knows no kernel.

On a card the calls are recorded as a CUDA graph and replayed, so that Python's own time is not in the result.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]
Sample = Callable[[], float]  # seconds of one run
Timer = Callable[[Run], Sample]

SPARE_BYTES = 2**28  # beside what is counted: small tensors, and what the allocator rounds up


class WrongResult(Exception):
    """A kernel computes something else than its reference: its speed means nothing."""


@dataclass(frozen=True)
class Bench:
    """Where and how to measure.

    Attributes:
        device: where everything is.
        dtype: of keys, values, queries and weights.
        timer: for kernels.
        wall: for what needs the host between its kernels.
        free_bytes: memory that may still be taken.
        cache_bytes: the device's last cache, which is not to be measured.
        rounds: samples of each, in turns; their median counts.
    """

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    wall: Timer
    free_bytes: Callable[[], int]
    cache_bytes: int = 0
    rounds: int = 3

    def fits(self, num_bytes: int) -> bool:
        """Whether that much memory, and a little to spare, is free."""
        gc.collect()  # the graphs of what was measured before
        return num_bytes + SPARE_BYTES <= self.free_bytes()

    def medians(self, samples: Sequence[Sample]) -> list[float]:
        """The median time of each, sampled in turns, in seconds."""
        rounds = [[sample() for sample in samples] for _ in range(self.rounds)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class Measured:
    """What came out for one size.

    Attributes:
        model: whose shape.
        size: in words: tokens, requests.
        work: bytes that must move, or floating-point operations, or tokens.
        seconds: for it.
        rival_s: what plain torch takes for the same; None where it was not asked.
        rival: torch's way, in a word.
    """

    model: str
    size: str
    work: int
    seconds: float
    rival_s: float | None = None
    rival: str = ""

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.seconds


def graph_timer(run: Run) -> Sample:
    """Records a run as a CUDA graph; a sample replays it for about 5 ms, between two CUDA events."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(repeats: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    replay(1)
    repeats = max(1, int(5e-3 / max(replay(1), 1e-6)))
    return lambda: replay(repeats)


def wall_timer(run: Run) -> Sample:
    """A sample is one run, on the host's clock, from its first call until the device has nothing left to do."""

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def sample() -> float:
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - started

    return sample
