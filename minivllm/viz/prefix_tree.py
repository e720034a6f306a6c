"""The prefix cache as a tree, drawn from a trace only: whoever shares a beginning shares a branch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minivllm.trace import Trace
from minivllm.viz.cache_tree import Node, build, lay_out, runs, walk
from minivllm.viz.html_parts import ranges, text_on
from minivllm.viz.style import INK, PALETTE, as_text, styled
from minivllm.viz.wording import listed

AGES = LinearSegmentedColormap.from_list("ages", [PALETTE[0], "#7FB2D6", "#F2F2EE"])  # the older, the paler
QUIET, PALE, LOST = "#5A5A5A", "#8A8A8A", PALETTE[5]
MOST_LETTERS = 34  # of the names at the end of a branch
SMALL_FROM = 24  # rows from which they are drawn lower
INCHES = 5.6  # width of the axes, about


def prefix_tree(
    trace: Trace, *, step: int = -1, labels: Mapping[str, str] | None = None, title: str | None = None
) -> Figure:
    """Every block that can be found after a step, each behind the one before it in the text.

    The outline is the wider the more requests hold a block, the colour the paler the longer nobody did. At the end of
    a branch stand the requests that hold it, or in grey whoever filled it. A block that can't be reached, because the
    one before it can't be found any more, stands below a line, at the left.

    Args:
        trace: what is drawn.
        step: index of the step; negative ones count from the end.
        labels: request to what stands for it at the end of its branch, where that is not its name.
        title: of the figure.

    Raises:
        ValueError: there is no such step, or after it nothing can be found.
    """
    state = trace.state(step)
    if not state.cached_blocks:
        raise ValueError(f"after step {state.step} no block can be found: choose a later step, or cache prefixes")
    roots, orphans = build(state)
    num_rows, first_orphan = lay_out(roots, orphans)
    nodes = [node for top in (*roots, *orphans) for node in walk(top)]
    ages = {node: state.step - node.last_used_step for node in nodes}
    names = {node: _names(node, labels or {}) for node in nodes if node.ending or not node.children}
    with styled():
        low = num_rows > SMALL_FROM
        fig, ax = plt.subplots(figsize=(7.2, 1.5 + (0.17 if low else 0.27) * max(4, num_rows)))
        colors = ScalarMappable(Normalize(0, max(1, *ages.values())), AGES)
        faces = {
            node: to_hex(color)
            for node, color in zip(nodes, colors.to_rgba(np.array(list(ages.values()))), strict=True)
        }
        span = _span(names, max(node.place for node in nodes) + 1)
        drawing = _Drawing(ax, faces, 0.74 if span <= 24 else 0.86, span, low)
        drawing.edges(roots, orphans)
        for run in runs((*roots, *orphans)):
            drawing.blocks(run, ages)
        drawing.numbers()
        drawing.ends(names)
        if orphans:
            drawing.divide(first_orphan)
        drawing.frame(num_rows, trace.header["block_size"])
        many = f"{len(state.cached_blocks)} block{'' if len(state.cached_blocks) == 1 else 's'}"
        ax.set_title(title or f"The prefix cache after step {state.step}: {many} can be found")
        bar = fig.colorbar(colors, ax=ax, label="steps since\nsomebody held it", fraction=0.05, pad=0.01, aspect=14)
        bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        _legend(fig, nodes, drawing)
        return fig


def _names(node: Node, labels: Mapping[str, str]) -> str:
    """Who stands at the end of a branch."""
    if not node.ending:
        who = labels.get(node.filled_by, node.filled_by)
        return f"filled by {who}" if who else "filled before the trace"
    return listed([labels.get(name, name) for name in node.ending])


def _span(names: Mapping[Node, str], depth: int) -> float:
    """How far the x axis must reach, so that the names at the ends of the branches fit onto it."""
    share = 0.0115  # of the axis, per letter
    ends = [
        (node.place + (2 if node.end_row is not None else 1)) / (1 - share * min(MOST_LETTERS, len(name)))
        for node, name in names.items()
    ]
    return max(float(depth), *ends) + 0.1


@dataclass(frozen=True)
class _Drawing:
    """Draws the parts of a tree.

    Attributes:
        ax: on which.
        faces: node to its colour.
        width: of a block, where the next one begins at 1.
        span: where the x axis ends.
        low: whether rows are low.
    """

    ax: Axes
    faces: Mapping[Node, str]
    width: float
    span: float
    low: bool

    @property
    def gap(self) -> float:
        """From the root to the first blocks."""
        return max(0.5, 0.025 * self.span)

    @property
    def points(self) -> float:
        """Width of a block on paper."""
        return 72 * INCHES * self.width / (self.span + 2 * self.gap)

    def line(self, num_holders: int) -> float:
        """Width of a line for so many requests, in points."""
        return min(1.2 * num_holders**0.5, 2.6 if self.low else 4.5) if num_holders else 0.7

    def outline(self, num_holders: int) -> float:
        """The same around a block, which it must not fill."""
        return min(self.line(num_holders), max(1.2, 0.2 * self.points))

    def blocks(self, run: Sequence[Node], ages: Mapping[Node, int]) -> None:
        """One container per run, so that the text twin has a line for it."""
        first, last, holders = run[0], run[-1], run[0].holders
        steps = sorted({ages[node] for node in run})
        used = f"{steps[0]}{f'–{steps[-1]}' if len(steps) > 1 else ''} step{'' if steps == [1] else 's'} ago"
        used = "in this step" if steps == [0] else used
        again = [block for node in run for block in node.block_ids[1:]]
        told = f"place {first.place}{f'–{last.place}' if first is not last else ''}: block"
        told += f"{'' if first is last else 's'} {ranges([node.block_ids[0] for node in run])}"
        told += f" (the same: {ranges(again)})" if again else ""
        told += f", held by {listed(holders)}" if holders else f", free, used {used}"
        self.ax.barh(
            [node.row for node in run],
            [self.width] * len(run),
            left=[node.place for node in run],
            height=0.66,
            color=[self.faces[node] for node in run],
            edgecolor=INK if holders else PALE,
            linewidth=self.outline(len(holders)),
            label=as_text(told),
            zorder=2 + 0.01 * len(holders),
        )

    def edges(self, roots: Sequence[Node], orphans: Sequence[Node]) -> None:
        """Lines from each block to those behind it, as wide as requests follow them."""
        middle = (min(node.row for node in roots) + max(node.row for node in roots)) / 2 if roots else 0.0
        for top in roots:
            self._edge((-self.gap, middle), (0, top.row), len(top.holders))
        for node in (node for top in (*roots, *orphans) for node in walk(top)):
            start = (node.place + self.width, node.row)
            for child in node.children:
                self._edge(start, (child.place, child.row), len(child.holders))
            if node.end_row is not None:
                self._edge(start, (node.place + 1, node.end_row), 1, ":")
        if roots:
            self.ax.plot([-self.gap], [middle], "o", color=INK, markersize=5, label="_root", zorder=3)
        for top in orphans:
            look: dict[str, Any] = {"color": LOST, "label": "_lost"}
            self.ax.plot([-self.gap, 0], [top.row] * 2, "--", linewidth=1.2, zorder=1, **look)
            self.ax.plot([-self.gap], [top.row], "x", markersize=6, markeredgewidth=1.8, zorder=3, **look)

    def _edge(self, start: tuple[float, float], end: tuple[float, float], num_holders: int, style: str = "-") -> None:
        bend = (start[0] + end[0]) / 2
        self.ax.plot(
            [start[0], bend, bend, end[0]],
            [start[1], start[1], end[1], end[1]],
            style,
            color=INK if num_holders else PALE,
            linewidth=self.line(num_holders),
            solid_capstyle="butt",
            label="_edge",
            zorder=1,
        )

    def numbers(self) -> None:
        """The numbers of the blocks where they fit, upright where blocks are narrow."""
        height = 6.0 if self.low else 8.0
        longest = max(len(str(node.block_ids[0])) for node in self.faces)
        lying = min(height, 1.5 * (self.points - 2) / longest)
        standing = min(height, 0.95 * (self.points - 2), 11 * height / 6 / longest)
        size = lying if lying >= 5 else standing
        if size < 4.3:
            return
        for node, face in self.faces.items():
            text = ", ".join(map(str, node.block_ids))
            if lying < 5 or len(text) * size > 1.5 * self.points:
                text = str(node.block_ids[0])
            self.ax.text(
                node.place + self.width / 2,
                node.row,
                text,
                ha="center",
                va="center_baseline" if lying >= 5 else "center",
                rotation=0 if lying >= 5 else 90,
                fontsize=size,
                color=text_on(face),
                zorder=4,
            )

    def ends(self, names: Mapping[Node, str]) -> None:
        """The names at the ends of the branches."""
        for node, name in names.items():
            text = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
            x, y = (node.place + self.width, node.row) if node.end_row is None else (node.place + 1, node.end_row)
            look: dict[str, Any] = {"color": INK, "weight": "bold"}
            if not node.ending:
                look = {"color": QUIET, "style": "italic"}
            size = 6.5 if self.low else 8
            self.ax.text(x, y, f" {as_text(text)}", va="center_baseline", fontsize=size, **look)

    def divide(self, first_orphan: int) -> None:
        """A line between what can be reached and what can't."""
        if first_orphan:
            self.ax.axhline(first_orphan - 1.3, color=LOST, linestyle="--", linewidth=0.8, label="_unreachable")
        text = "unreachable: the block before can't be found any more"
        look: dict[str, Any] = {"color": LOST, "fontsize": 6.5 if self.low else 8, "va": "center"}
        self.ax.text(-1.4 * self.gap, first_orphan - 0.8, text, **look)

    def frame(self, num_rows: int, block_size: int) -> None:
        """The axes around it, with a tick at the middle of a block."""
        ax, depth = self.ax, 1 + max(node.place for node in self.faces)
        ax.set(xlim=(-1.5 * self.gap, self.span), ylim=(num_rows - 0.4, -0.7), yticks=[])
        ticks = range(0, depth, next(step for step in (1, 2, 5, 10, 20, 50, depth) if 16 * step >= depth))
        ax.set_xticks([tick + self.width / 2 for tick in ticks], [str(tick) for tick in ticks])
        ax.set_xlabel(f"block of the text, counted from 0 ({block_size} tokens each)")
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)


def _legend(fig: Figure, nodes: Sequence[Node], drawing: _Drawing) -> None:
    """What the outlines mean, for the numbers of holders that there are."""
    counts = sorted({len(node.holders) for node in nodes})
    shown = counts if len(counts) <= 4 else [counts[0], counts[1], counts[len(counts) // 2], counts[-1]]
    handles = []
    for count in shown:
        text = f"held by {count} request{'' if count == 1 else 's'}" if count else "free, and can be found"
        look: dict[str, Any] = {"edgecolor": INK if count else PALE, "linewidth": drawing.line(count)}
        handles.append(Patch(facecolor="white", label=text, **look))
    fig.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, handlelength=1.8, handleheight=0.9)
