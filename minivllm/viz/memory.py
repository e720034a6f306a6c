"""Figures of memory, drawn from plain records: events of a manager, fragmentation reports, block tables."""

import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from minivllm.kv_cache import Fragmentation, MemoryEvent
from minivllm.viz.style import FAINT, INK, PALETTE, as_text, request_color, styled

PARTS = {
    "used": (PALETTE[0], ""),
    "to_come": (PALETTE[4], ".."),
    "internal": (PALETTE[1], "xx"),
    "external": (PALETTE[5], "//"),
    "free": ("white", ""),
}


def memory_map(events: Sequence[MemoryEvent], num_blocks: int, block_size: int, title: str) -> Figure:
    """Slots over time: whose each slot is, and whether a token is in it.

    A request has one colour; a slot that is reserved and empty is pale and hatched. A shared block shows the
    colour of its oldest holder.

    Args:
        events: what a manager recorded, in order.
        num_blocks: size of its pool.
        block_size: slots per block.
        title: of the figure.

    Raises:
        ValueError: no events.
    """
    if not events:
        raise ValueError("there are no events: set manager.events to a list before the run")
    owner, stored = replay(events, num_blocks, block_size)
    names = sorted({event.request_id for event in events}, key=_natural)
    image = np.ones((*owner.shape, 3))
    for index in range(len(names)):
        color = np.array(to_rgb(request_color(index)))
        image[(owner == index) & stored] = color
        image[(owner == index) & ~stored] = 1 - 0.3 * (1 - color)
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 4.2))
        drawn = ax.imshow(image, aspect="auto", interpolation="nearest", origin="upper")
        drawn.set_label(f"owners {int((owner >= 0).sum())}, with a token {int(stored.sum())}")
        empty = ((owner >= 0) & ~stored).astype(float)
        if empty.any() and min(empty.shape) > 1:
            ax.contourf(empty, levels=[0.5, 1.5], colors="none", hatches=["////"])
        for index, name in enumerate(names):
            ax.bar([0], [0], color=request_color(index), label=as_text(name))
        ax.grid(visible=False)
        ax.set(title=title, xlabel="step", ylabel=f"slot (blocks of {block_size})")
        ax.set(xlim=(-0.5, owner.shape[1] - 0.5), ylim=(owner.shape[0] - 0.5, -0.5))
        for block in range(1, num_blocks):
            ax.axhline(block * block_size - 0.5, color=INK, linewidth=0.3, label="_block")
        fig.legend(loc="outside lower center", ncols=8, fontsize=8)
        return fig


def replay(events: Sequence[MemoryEvent], num_blocks: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The state of every slot during every step; what ran in it and was freed at its end still counts.

    Returns:
        `[num_slots, num_steps]`: the index of the owner (-1 is nobody; requests count in their natural
        order), and whether a token is in the slot.
    """
    names = sorted({event.request_id for event in events}, key=_natural)
    num_steps = max(event.step for event in events) + 1
    owner = np.full((num_blocks * block_size, num_steps), -1)
    stored = np.zeros(owner.shape, dtype=bool)
    tables: dict[str, tuple[tuple[int, ...], int]] = {}
    by_step: list[list[MemoryEvent]] = [[] for _ in range(num_steps)]
    for event in events:
        by_step[event.step].append(event)
    ended: list[str] = []
    for step, happened in enumerate(by_step):
        for name in ended:
            tables.pop(name, None)
        ended = []
        for index, event in enumerate(happened):
            if event.kind != "free":
                tables[event.request_id] = (event.block_ids, event.num_tokens)
            elif any(other.request_id == event.request_id for other in happened[:index]) and all(
                other.kind == "free" for other in happened[index:]
            ):
                ended.append(event.request_id)  # it ran in this step and ended with it
            else:
                tables.pop(event.request_id, None)
        for name in reversed(tables):
            block_ids, num_tokens = tables[name]
            for index, block in enumerate(block_ids):
                slots = slice(block * block_size, block * block_size + block_size)
                owner[slots, step] = names.index(name)
                filled = max(0, min(block_size, num_tokens - index * block_size))
                stored[block * block_size : block * block_size + filled, step] = True
    return owner, stored


def fragmentation_over_time(steps: Sequence[int], samples: Sequence[Fragmentation], title: str) -> Figure:
    """What the slots of the pool are used for, stacked, in percent of all slots.

    Args:
        steps: `[n]`.
        samples: `[n]` reports.
        title: of the figure.
    """
    with styled():
        fig, ax = plt.subplots()
        shares = [[100 * getattr(sample, part) / sample.total for sample in samples] for part in PARTS]
        means = [sum(share) / len(share) for share in shares]
        labels = [f"{part} {mean:.0f} %" for part, mean in zip(PARTS, means, strict=True)]
        areas = ax.stackplot(steps, shares, labels=labels, colors=[color for color, _ in PARTS.values()])
        for area, (_, hatch) in zip(areas, PARTS.values(), strict=True):
            area.set(hatch=hatch, edgecolor=INK, linewidth=0.3)
        ax.set(title=title, xlabel="step", ylabel="percent of all slots", xlim=(min(steps), max(steps)), ylim=(0, 100))
        fig.legend(loc="outside lower center", ncols=5, fontsize=9)
        return fig


def stacked_shares(shares: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """One bar per policy, divided into what the slots were used for.

    Args:
        shares: policy to (part of `Fragmentation` to percent of all slots).
        title: of the figure.
    """
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 1.3 + 0.45 * len(shares)))
        left = np.zeros(len(shares))
        for part, (color, hatch) in PARTS.items():
            width = np.array([parts.get(part, 0.0) for parts in shares.values()])
            bars = ax.barh(
                list(shares), width, left=left, color=color, hatch=hatch, edgecolor=INK, linewidth=0.4, label=part
            )
            if part == "used":
                ax.bar_label(bars, [f"{value:.0f} %" for value in width], label_type="center", color="white")
            left += width
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set(title=title, xlabel="percent of all slots", xlim=(0, 100))
        fig.legend(loc="outside lower center", ncols=5, fontsize=9)
        return fig


def block_tables(
    tables: Mapping[str, Sequence[int]], num_tokens: Mapping[str, int], num_blocks: int, block_size: int, title: str
) -> Figure:
    """Block tables as arrows: the blocks of each text in its own order, and where they lie in the pool.

    Args:
        tables: request to its block table.
        num_tokens: request to the tokens it holds.
        num_blocks: size of the pool.
        block_size: slots per block.
        title: of the figure.
    """
    with styled():
        rows = sum(len(table) + 1 for table in tables.values()) - 1
        fig, ax = plt.subplots(figsize=(7.2, 0.9 + 0.28 * max(rows, num_blocks)))
        scale, y = max(rows, num_blocks) / num_blocks, 0.0
        owners: dict[int, list[int]] = {}
        for index, (name, table) in enumerate(tables.items()):
            color = request_color(index)
            for place, block in enumerate(table):
                owners.setdefault(block, []).append(index)
                filled = max(0, min(block_size, num_tokens[name] - place * block_size))
                ax.barh(y, 1.0, height=0.8, color="white", edgecolor=INK, label="_box")
                ax.barh(y, filled / block_size, height=0.8, color=color, alpha=0.8, label="_box")
                ax.text(-0.08, y, f"{name} block {place}", ha="right", va="center", fontsize=8)
                ax.plot([1.03, 2.97], [y, block * scale], color=color, linewidth=1.2, label="_arrow")
                ax.plot([2.97], [block * scale], ">", color=color, markersize=5, label="_arrow")
                y += 1
            ax.plot([], [], color=color, label=f"{name} → {', '.join(map(str, table))}")
            y += 1
        _draw_pool(ax, owners, num_blocks, scale)
        ax.text(0.5, -1.0, "block table (the text's order)", ha="center", fontsize=9)
        ax.text(3.5, -1.0, "pool", ha="center", fontsize=9)
        ax.set(title=title, xlim=(-1.2, 4.6), ylim=(max(rows, num_blocks) - 0.3, -1.6))
        ax.axis("off")
        return fig


def _draw_pool(ax: Axes, owners: Mapping[int, Sequence[int]], num_blocks: int, scale: float) -> None:
    """The column of blocks on the right; a block shows the colours of all its holders."""
    for block in range(num_blocks):
        holders = owners.get(block, [])
        ax.barh(
            block * scale,
            1.0,
            left=3,
            height=0.8,
            color=FAINT if not holders else "white",
            edgecolor=INK,
            label="_box",
        )
        for part, index in enumerate(holders):
            width = 1 / len(holders)
            ax.barh(
                block * scale,
                width,
                left=3 + part * width,
                height=0.8,
                color=request_color(index),
                alpha=0.8,
                label="_box",
            )
        ax.text(4.08, block * scale, f"{block}", va="center", fontsize=8)


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts R2 before R10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]
