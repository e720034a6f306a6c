"""Figures of the attention kernel: the running softmax, what a program reads, how full a card is, its roofline."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from minivllm.viz.style import FAINT, INK, PALETTE, styled

if TYPE_CHECKING:  # it brings torch along, which no figure needs
    from minivllm.lessons.kernel import KernelCall, ProgramReads
    from minivllm.lessons.kernel_cost import Card


def online_softmax(scores: Sequence[float], tile_n: int, title: str) -> Figure:
    """Scores in tiles with the running maximum, and under it the running sum: what is kept of it, and what is added.

    Args:
        scores: `[num_keys]`.
        tile_n: keys per tile.
        title: of the figure.

    Raises:
        ValueError: no scores.
    """
    if not len(scores):
        raise ValueError("there are no scores to draw")
    tiles = [np.asarray(scores[start : start + tile_n]) for start in range(0, len(scores), tile_n)]
    edges = [index * tile_n - 0.5 for index in range(len(tiles))]
    colors = [PALETTE[index % len(PALETTE)] for index in range(len(tiles))]
    maxima, factors, kept, added = _running(tiles)
    with styled():
        fig, (top, low) = plt.subplots(2, figsize=(7.2, 4.4), sharex=True)
        for index, (edge, tile) in enumerate(zip(edges, tiles, strict=True)):
            top.bar(edge + 0.5 + np.arange(len(tile)), tile, color=colors[index], label=f"tile {index}")
        for ax in (top, low):
            ax.vlines(edges[1:], 0, 1, transform=ax.get_xaxis_transform(), color=INK, linewidth=0.6)
        (line,) = top.plot([*edges, len(scores) - 0.5], [*maxima, maxima[-1]], color=INK, drawstyle="steps-post")
        line.set_label("running maximum m")
        top.set(title=title, ylabel="score")
        middles = [edge + 0.28 * tile_n for edge in edges]  # with room at the right for what is kept
        width, peak = 0.4 * tile_n, max(map(sum, zip(kept, added, strict=True)))
        rest = low.bar(
            middles, kept, width, color=FAINT, edgecolor=INK, linewidth=0.6, hatch="//", label="kept of the sum so far"
        )
        new = low.bar(middles, added, width, bottom=kept, color=colors, label="added by the tile, in its colour")
        for x, factor, height in list(zip(middles, factors, kept, strict=True))[1:]:
            low.text(x + 0.55 * width, max(height / 2, 0.06 * peak), f"kept: × {factor:.2f}", va="center", fontsize=8.5)
        low.set(xlabel="key", ylabel="running sum d", ylim=(0, 1.1 * peak), xlim=(-0.6, len(scores) - 0.4))
        low.grid(axis="x", visible=False)
        fig.legend(handles=[line, rest, new], loc="outside lower center", ncols=3, fontsize=9)
        return fig


def _running(tiles: Sequence[np.ndarray]) -> tuple[list[float], ...]:
    """After each tile: the maximum, the factor on what was summed before, what that leaves, and what is added."""
    highest, total = -np.inf, 0.0
    steps = []
    for tile in tiles:
        new = max(highest, float(tile.max()))
        factor = float(np.exp(highest - new))
        steps.append((new, factor, total * factor, float(np.exp(tile - new).sum())))
        highest, total = new, steps[-1][2] + steps[-1][3]
    return tuple(map(list, zip(*steps, strict=True)))


def program_reads(call: "KernelCall", reads: "ProgramReads", title: str) -> Figure:
    """One program of the attention kernel: the scores it computes, row by row, and the slots of the pool it reads.

    A tile of keys has one colour in both halves and its number, the order in which it is read. A pale score is computed
    and hidden by the mask; a hatched slot holds a key of the request that the program does not read.

    Args:
        call: what the kernel is called with.
        reads: of the program.
        title: of the figure.
    """
    seq_len = int(call.metadata.seq_lens[reads.request])
    with styled():
        fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.2), width_ratios=(1.7, 1))
        num_hidden = _draw_scores(left, reads, seq_len, call.window)
        _draw_pool(right, call, reads, seq_len)
        for index in range(len(reads.key_tiles)):
            right.bar([-9], [1], color=PALETTE[index % len(PALETTE)], label=f"tile {index}")
        num_blocks, size = call.keys.shape[:2]
        num_stored = int(call.metadata.seq_lens.sum())
        box: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.5}
        for occurs, label, look in (
            (num_hidden, "pale: hidden by the mask", {"color": "#BFDBEB"}),
            (seq_len - len(reads.slots), "its own, not read", {"color": "white", "hatch": "////", **box}),
            (num_stored - seq_len, "other requests'", {"color": "#BBBBBB"}),
            (num_blocks * size - num_stored, "empty", {"color": "white", **box}),
        ):
            if occurs:
                right.bar([-9], [1], label=label, **look)
        right.set(xlim=(-0.5, size - 0.5), ylim=(num_blocks - 0.5, -0.5))
        left.set_title(title)
        fig.legend(loc="outside lower center", ncols=7, fontsize=8)
        return fig


def _draw_scores(ax: Axes, reads: "ProgramReads", seq_len: int, window: int | None) -> int:
    """Draws the left half, and returns how many scores are hidden."""
    image = np.ones((len(reads.rows), seq_len, 3))
    hidden = np.zeros(image.shape[:2])
    for index, keys in enumerate(reads.key_tiles):
        color = np.array(to_rgb(PALETTE[index % len(PALETTE)]))
        for row, position in enumerate(reads.row_positions):
            for key in keys:
                seen = position is not None and position - (window or seq_len) < key <= position
                image[row, key] = color if seen else 1 - 0.25 * (1 - color)
                hidden[row, key] = not seen
    drawn = ax.imshow(image, aspect="auto", interpolation="nearest")
    drawn.set_label(f"scores: {sum(map(len, reads.key_tiles)) * len(reads.rows)} computed, {int(hidden.sum())} hidden")
    names = [
        "spare" if row is None else f"token {row[0]} (at {position}), head {row[1]}"
        for row, position in zip(reads.rows, reads.row_positions, strict=True)
    ]
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.set(xlabel="key (position in the text)", xlim=(-0.5, seq_len - 0.5))
    for edge in range(1, seq_len):
        ax.axvline(edge - 0.5, color="white", linewidth=0.3, label="_edge")
    for row in range(1, len(names)):
        ax.axhline(row - 0.5, color="white", linewidth=0.3, label="_edge")
    ax.grid(visible=False)
    ax.set_ylabel("row of the query tile")
    first, end = (reads.key_tiles[0][0], reads.key_tiles[-1][-1] + 1) if reads.key_tiles else (0, 0)
    for left, width in ((0, first), (end, seq_len - end)):
        if width:
            _hatch(ax, (left, 0), width, len(names))
    return int(hidden.sum())


def _draw_pool(ax: Axes, call: "KernelCall", reads: "ProgramReads", seq_len: int) -> None:
    num_blocks, size = call.keys.shape[:2]
    image = np.ones((num_blocks * size, 3))
    tables, lens = call.metadata.block_table.tolist(), call.metadata.seq_lens.tolist()
    for request, (table, length) in enumerate(zip(tables, lens, strict=True)):
        if request != reads.request:
            image[[table[p // size] * size + p % size for p in range(length)]] = to_rgb("#BBBBBB")
    own = [tables[reads.request][p // size] * size + p % size for p in range(seq_len)]
    for slot in sorted(set(own) - reads.slots):
        _hatch(ax, (slot % size, slot // size), 1, 1)
    for index, slots in enumerate(reads.slot_tiles):
        image[list(slots)] = to_rgb(PALETTE[index % len(PALETTE)])
        for slot in slots:
            dark = index % len(PALETTE) not in (1, 4, 6)
            ax.text(
                slot % size,
                slot // size,
                str(index),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else INK,
            )
    drawn = ax.imshow(image.reshape(num_blocks, size, 3), aspect="auto", interpolation="nearest")
    drawn.set_label(f"slots: {len(reads.slots)} read, {len(set(own) - reads.slots)} of the request's not")
    for edge in range(1, num_blocks):
        ax.axhline(edge - 0.5, color=INK, linewidth=0.8, label="_edge")
    for edge in range(1, size):
        ax.axvline(edge - 0.5, color=FAINT, linewidth=0.5, label="_edge")
    ax.spines[["top", "right"]].set_visible(True)
    ax.grid(visible=False)
    ax.set_yticks(range(num_blocks), [str(block) for block in range(num_blocks)], fontsize=8)
    ax.set_xticks(range(size), [str(offset) for offset in range(size)], fontsize=8)
    table = ", ".join(map(str, tables[reads.request][: -(-seq_len // size)]))
    ax.set(ylabel="block of the pool", xlabel="offset in the block", title=f"table: {table}")


def _hatch(ax: Axes, cell: tuple[int, int], width: int, height: int) -> None:
    box = Rectangle((cell[0] - 0.5, cell[1] - 0.5), width, height, hatch="////", fill=False, linewidth=0)
    box.set_edgecolor(INK)
    ax.add_patch(box)


def programs_per_card(
    batches: Sequence[int], programs: Mapping[str, Sequence[int]], num_processors: int, title: str
) -> Figure:
    """Programs of a decode pass against its batch, beside the number of multiprocessors.

    Args:
        batches: `[n]` requests in the pass.
        programs: name to `[n]` programs that have something to do.
        num_processors: of the card.
        title: of the figure.
    """
    with styled():
        fig, ax = plt.subplots()
        for index, (name, counts) in enumerate(programs.items()):
            ax.plot(batches, counts, "os"[index % 2] + ("-", "--")[index % 2], color=PALETTE[index], label=name)
        ax.axhline(num_processors, color=INK, linewidth=1.2, linestyle=":", label=f"{num_processors} multiprocessors")
        ax.set(xscale="log", yscale="log", xticks=batches, xticklabels=[str(batch) for batch in batches])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set(title=title, xlabel="requests that decode", ylabel="programs with work")
        fig.legend(loc="outside lower center", ncols=3, fontsize=9)
        return fig


def card_rooflines(
    cards: Sequence["Card"],
    workloads: Mapping[str, float],
    title: str,
    measured: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:
    """The rooflines of several cards by their data sheets, and where workloads lie on them.

    Args:
        cards: whose roofs are drawn.
        workloads: name to flops per byte; a point on every roof: the most that the card can reach there.
        title: of the figure; it should say what is computed and what is measured.
        measured: name to (flops per byte, flops per second); None draws none.
    """
    points = list(workloads.values())
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 4.4))
        xs = [0.5 * min(points), 4 * max(*points, *(card.flops_per_s / card.bytes_per_s for card in cards))]
        for index, card in enumerate(cards):
            ridge = card.flops_per_s / card.bytes_per_s
            roof = [min(x * card.bytes_per_s, card.flops_per_s) / 1e12 for x in (xs[0], ridge, xs[1])]
            ax.loglog(
                [xs[0], ridge, xs[1]],
                roof,
                ("-", "--", "-.")[index % 3],
                color=PALETTE[index],
                label=f"{card.name} (ridge {ridge:.0f})",
            )
            reached = [min(x * card.bytes_per_s, card.flops_per_s) / 1e12 for x in points]
            ax.plot(points, reached, "o", color=PALETTE[index], label=f"_{card.name}")
        for index, (name, x) in enumerate(workloads.items()):
            ax.axvline(x, color=INK, linewidth=0.8, linestyle=":", label="_workload")
            ax.annotate(f" {name}", (x, 0.07 - 0.05 * (index % 2)), xycoords=("data", "axes fraction"), fontsize=8.5)
        for name, (x, flops_per_s) in (measured or {}).items():
            ax.plot([x], [flops_per_s / 1e12], "*", color=PALETTE[5], markersize=14, label=f"measured: {name}")
        ax.set(title=title, xlabel="arithmetic intensity (flop per byte moved)", ylabel="Tflop/s", xlim=xs)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator())
            axis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        fig.legend(loc="outside lower center", ncols=3, fontsize=9)
        return fig
