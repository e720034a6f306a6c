"""The life of every cached block, from the step that filled it to its eviction: drawn from a trace only."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minivllm.trace import Trace
from minivllm.trace.trace import CachedBlock
from minivllm.viz.style import INK, PALETTE, styled

MOST_ROWS, MOST_NAMED = 240, 60  # rows that are drawn, and rows that all have their number
FREE, HELD, HIT, EVICTED = "#B9DFF5", PALETTE[0], PALETTE[6], PALETTE[5]


def eviction_timeline(trace: Trace, *, title: str | None = None) -> Figure:
    """When which block could be found: from the step that filled it to the step in which it was handed out anew.

    Blocks that never could are left out; where there are many, neighbours share a row.

    Args:
        trace: what is drawn.
        title: of the figure.

    Raises:
        ValueError: no block of the trace can ever be found.
    """
    lives = _Lives(trace)
    if not lives.findable:
        raise ValueError("no block can be found in any step of the trace: record one of an engine that caches prefixes")
    blocks = sorted({block for block, _, _ in lives.findable})
    size = -(-len(blocks) // MOST_ROWS)
    rows = {block: index // size for index, block in enumerate(blocks)}
    num_rows, last = -(-len(blocks) // size), trace.steps[-1]["step"]
    named = len(blocks) <= MOST_NAMED
    with styled():
        height = 1.4 + (max(0.15, min(0.27, 5 / num_rows)) * max(6, num_rows) if named else 4.4)
        fig, ax = plt.subplots(figsize=(7.2, height))
        thick = 0.8 if named else 1.0
        _draw_lives(ax, lives.findable, rows, thick, FREE, "can be found, nobody holds it")
        _draw_lives(ax, lives.held, rows, thick, HELD, "can be found, and held")
        scale = 1.0 if named else 0.6
        _draw_marks(ax, lives.hits, rows, ("o", HIT, f"found by a request ({len(lives.hits)})"), 5 * scale)
        _draw_marks(ax, lives.evictions, rows, ("x", EVICTED, f"evicted ({len(lives.evictions)})"), 6 * scale)
        ax.set(title=title or "Which blocks can be found, and until when", xlabel="step")
        ax.set(xlim=(0, last + 1), ylim=(num_rows - 0.4, -0.6))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=True))
        _name_rows(ax, blocks, size, named)
        fig.legend(loc="outside lower center", ncols=2, fontsize=8.5)
        return fig


def _draw_lives(
    ax: Axes, spans: Sequence[tuple[int, int, int]], rows: Mapping[int, int], height: float, color: str, label: str
) -> None:
    if spans:
        ax.barh(
            [rows[block] for block, _, _ in spans],
            [end - start for _, start, end in spans],
            left=[start for _, start, _ in spans],
            height=height,
            color=color,
            edgecolor="white",
            linewidth=0.3 if height < 1 else 0.0,
            label=label,
        )


def _draw_marks(
    ax: Axes, marks: Sequence[tuple[int, float]], rows: Mapping[int, int], look: tuple[str, str, str], size: float
) -> None:
    """Marks at (block, step); `look` is marker, colour and label."""
    if marks:
        marker, color, label = look
        edge = color if marker == "x" else INK
        ax.plot(
            [step for _, step in marks],
            [rows[block] for block, _ in marks],
            marker,
            color=color,
            markeredgecolor=edge,
            markeredgewidth=0.3 * size if marker == "x" else 0.15 * size,
            markersize=size,
            label=label,
            zorder=4,
        )


def _name_rows(ax: Axes, blocks: Sequence[int], size: int, named: bool) -> None:
    """The numbers of the blocks, of all or of about a dozen."""
    firsts = blocks[::size]
    every = 1 if named else -(-len(firsts) // 12)
    shown = range(0, len(firsts), every)
    ax.set_yticks(list(shown), [str(firsts[row]) for row in shown], fontsize=8 if len(firsts) <= 30 else 6.5)
    ax.set_ylabel("block" if size == 1 else f"first of {size} blocks")
    ax.grid(axis="y", visible=False)


class _Lives:
    """When each block could be found and was held, in spans (block, first step, the step behind the last).

    Attributes:
        findable: from publication to eviction.
        held: those parts of them in which somebody held the block.
        hits: (block, step) in which a request found it.
        evictions: (block, step) in which it was evicted.
    """

    def __init__(self, trace: Trace) -> None:
        self.findable: list[tuple[int, int, int]] = []
        self.held: list[tuple[int, int, int]] = []
        self.hits: list[tuple[int, float]] = []
        self.evictions: list[tuple[int, float]] = []
        in_use = dict[int, list[int]]()
        size, end = trace.header["block_size"], len(trace)
        last: list[CachedBlock] = []
        for state in trace.states():
            for gone in state.evicted:
                stop = max(state.step, gone.published_in_step + 1)
                self._add(gone, stop)
                self.evictions.append((gone.block_id, stop))
            for name, num_found in state.cached.items():
                self.hits += [(block, state.step + 0.5) for block in state.cached_tables[name][: num_found // size]]
            last = list(state.cached_blocks.values())
            for cached in last:
                if cached.last_used_step == state.step:
                    in_use.setdefault(cached.block_id, []).append(state.step)
        for cached in last:
            self._add(cached, end)
        for block, steps in in_use.items():
            starts = [steps[0], *(b for a, b in pairwise(steps) if b > a + 1)]
            ends = [*(a + 1 for a, b in pairwise(steps) if b > a + 1), steps[-1] + 1]
            self.held += [(block, start, stop) for start, stop in zip(starts, ends, strict=True)]

    def _add(self, cached: CachedBlock, stop: int) -> None:
        self.findable.append((cached.block_id, max(0, cached.published_in_step), stop))
