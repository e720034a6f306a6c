"""Tables of the GPU benchmark, for the terminal and for the file of figures. Knows nothing of what is measured."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch


@dataclass(frozen=True)
class Section:
    """A table, and what is to be said of it."""

    title: str
    header: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    notes: Sequence[str] = ()

    def as_text(self) -> str:
        """For the terminal."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  " + "  ".join(map(str.rjust, line, widths)) for line in lines] if self.rows else []
        return "\n".join([self.title, *table, *("  " + note for note in self.notes)])

    def as_markdown(self) -> str:
        """For the file."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines) if self.rows else ""
        return "\n\n".join(filter(None, [f"### {self.title}", table, *self.notes]))


def gb(rate: float) -> str:
    """Bytes per second in GB/s."""
    return f"{rate / 1e9:,.1f}"


def micros(seconds: float) -> str:
    """Seconds in microseconds."""
    return f"{seconds * 1e6:,.1f}"


def percent(share: float) -> str:
    """With a decimal: a goal of 85 % that was missed by 84.6 is to be seen as missed."""
    return f"{share:.1%}"


def verdict(goal: str, least: float, shares: dict[str, float]) -> str:
    """Whether a goal was met, in words."""
    if not shares:
        return f"Goal ({goal}): not measured."
    worst = min(shares, key=lambda name: shares[name])
    lowest, missed = f"the lowest is {percent(shares[worst])} ({worst})", sum(s < least for s in shares.values())
    return f"Goal ({goal}): {f'missed in {missed} of {len(shares)}' if missed else 'met'}; {lowest}."


def markdown(sections: list[Section], device: str, dtype: str, rounds: int, today: datetime.date) -> str:
    """The block for the file, without its markers."""
    versions = f"torch {torch.__version__}, triton {version('triton')}"
    method = f"medians of {rounds} rounds in turns; kernels are replayed as a CUDA graph, without the host's time"
    head = f"## On a card ({today})\n\n`make bench-gpu`: {device}; {versions}; {dtype}; random numbers; {method}."
    return "\n\n".join([head, *(section.as_markdown() for section in sections)])
