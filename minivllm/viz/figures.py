"""The figures of the first lessons. Each takes plain numbers and returns a matplotlib figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from minivllm.viz.style import FAINT, INK, PALETTE, request_color, styled


def growth(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> Figure:
    """Curves over a common axis, each named at its right end.

    Args:
        x: `[n]`.
        series: name to `[n]` values.
        title: of the figure.
        xlabel: with the unit.
        ylabel: with the unit.
        log: both axes logarithmic.
    """
    with styled():
        fig, ax = plt.subplots()
        styles = ["-", "--", ":", "-."]
        for index, (name, y) in enumerate(series.items()):
            ax.plot(x, y, styles[index % 4], color=PALETTE[index], label=name)
            ax.annotate(f" {name}", (x[-1], y[-1]), color=PALETTE[index], va="center", annotation_clip=False)
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel, xlim=(min(x), max(x)))
        if log:
            ax.set(xscale="log", yscale="log", xticks=x, xticklabels=[f"{value:g}" for value in x])
            low, high = ax.get_ylim()
            if high < 1000 * low:
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.yaxis.set_major_formatter("{x:g}")
            ax.minorticks_off()
        else:
            ax.set_ylim(bottom=0)
            if all(isinstance(value, int) for value in x):
                ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        return fig


def horizontal_bars(values: Mapping[str, float], title: str, xlabel: str, form: str = "{:.3g}") -> Figure:
    """One bar per name, the value written beside it.

    Args:
        values: name to value, top to bottom.
        title: of the figure.
        xlabel: with the unit.
        form: how a value is written.
    """
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 0.8 + 0.42 * len(values)))
        colors = [PALETTE[index % len(PALETTE)] for index in range(len(values))]
        bars = ax.barh(list(values), list(values.values()), color=colors, label=xlabel)
        ax.bar_label(bars, [f" {form.format(value)}" for value in values.values()])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.15)
        ax.set(title=title, xlabel=xlabel)
        return fig


@dataclass(frozen=True)
class SlabRow:
    """How the slots of one request's slab were used in a static batch, in tokens, left to right.

    Attributes:
        padding: columns before its prompt.
        prompt: its prompt.
        output: its answer.
        dead: written after it had ended, while others went on.
        reserved: never written.
    """

    padding: int
    prompt: int
    output: int
    dead: int
    reserved: int


SLAB_PARTS = {
    "padding": (FAINT, "..."),
    "prompt": ("", ""),
    "output": ("", ""),
    "dead": ("#BBBBBB", "xxx"),
    "reserved": ("white", "///"),
}


def slab_map(rows: Sequence[SlabRow], title: str) -> Figure:
    """A memory map: one slab per row, its slots from left to right, used and wasted.

    Prompts are in the request's colour, answers in a lighter tone of it; what is hatched is waste.
    """
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 1.2 + 0.36 * len(rows)))
        names = [f"R{index}" for index in range(len(rows))]
        left = np.zeros(len(rows))
        for part, (color, hatch) in SLAB_PARTS.items():
            width = np.array([getattr(row, part) for row in rows])
            colors = [color or request_color(index) for index in range(len(rows))]
            ax.barh(
                names,
                width,
                left=left,
                color=colors,
                alpha=0.5 if part == "output" else 1.0,
                hatch=hatch,
                edgecolor=INK,
                linewidth=0.4,
                height=0.8,
                label=part,
            )
            left += width
        ax.invert_yaxis()
        ax.grid(visible=False)
        ax.set(title=title, xlabel="slot of the slab (tokens)", ylabel="request", xlim=(0, left.max()))
        fig.legend(loc="outside lower center", ncols=len(SLAB_PARTS), fontsize=9)
        return fig


def live_rows(output_lens: Sequence[int], title: str) -> Figure:
    """The end of a static batch: per step, rows that still answer and rows that are only carried along.

    Args:
        output_lens: tokens each row put out, `[batch]`.
        title: of the figure.
    """
    steps = np.arange(1, max(output_lens) + 1)
    live = (np.asarray(output_lens)[:, None] >= steps).sum(axis=0)
    with styled():
        fig, ax = plt.subplots()
        ax.bar(steps, live, width=1.0, color=PALETTE[0], label="rows that answer")
        dead = len(output_lens) - live
        ax.bar(
            steps,
            dead,
            width=1.0,
            bottom=live,
            color="#BBBBBB",
            hatch="xxx",
            edgecolor="white",
            label="ended rows",
        )
        ax.set(title=title, xlabel="step of the batch", ylabel="rows computed", xlim=(0.5, steps[-1] + 0.5))
        fig.legend(loc="outside lower center", ncols=2, fontsize=9)
        return fig


def roofline(bytes_per_s: float, flops_per_s: float, points: Mapping[str, tuple[float, float]], title: str) -> Figure:
    """The roofline of a machine (Williams, Waterman and Patterson, 2009) with workloads on it.

    Args:
        bytes_per_s: memory bandwidth.
        flops_per_s: matrix rate.
        points: name to (arithmetic intensity in flop per byte, reached rate in flop per second).
        title: of the figure.
    """
    ridge = flops_per_s / bytes_per_s
    xs = [
        min(0.1, *(x for x, _ in points.values())),
        ridge,
        max(ridge * 30, *(x * 2 for x, _ in points.values())),
    ]
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 4.0))
        ax.loglog(xs, [min(x * bytes_per_s, flops_per_s) / 1e9 for x in xs], color=INK, label="roof of this machine")
        ax.axvline(ridge, color=FAINT, label="_ridge")
        ax.annotate(
            f"ridge: {ridge:.1f} flop/byte",
            (ridge, flops_per_s / 1e9),
            xytext=(4, 6),
            textcoords="offset points",
        )
        for index, (name, (x, y)) in enumerate(points.items()):
            ax.plot(x, y / 1e9, "os^Dv"[index % 5], color=PALETTE[index], markersize=8, label=name)
        ax.set(title=title, xlabel="arithmetic intensity (flop per byte moved)", ylabel="Gflop/s")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.legend(loc="lower right")
        return fig
