"""The memory of a state as HTML: a cell per block, with its holders or its key, and what the slots are used for."""

from collections.abc import Sequence
from typing import Any

from minivllm.trace import TraceState
from minivllm.trace.trace import CachedBlock
from minivllm.viz import html_parts as html
from minivllm.viz.html_parts import CELL_PX, HATCH, LINE, QUIET
from minivllm.viz.style import INK, PALETTE
from minivllm.viz.wording import listed

MOST_BLOCKS = 256  # a larger pool is drawn in groups of neighbouring blocks
MOST_GROUPS = 64
MOST_HOLDERS = 4
# The parts of `Fragmentation`: what they are called, and how they are drawn in all figures.
PARTS = {
    "used": ("with a token", PALETTE[0], ""),
    "to_come": ("reserved, token to come", PALETTE[4], HATCH["dots"]),
    "internal": ("reserved, never used", PALETTE[1], HATCH["cross"]),
    "external": ("free, in too short runs", PALETTE[5], HATCH["slash"]),
    "free": ("free", "#FFFFFF", ""),
}


FOUND, EVICTED = f"2px solid {PALETTE[2]}", f"2px dashed {PALETTE[5]}"  # what is drawn around a block


def caches_prefixes(header: dict[str, Any]) -> bool:
    """Whether the engine of a trace finds blocks by what they hold."""
    config = header["config"]
    return config.get("kv_cache") == "paged" and config.get("enable_prefix_caching") is not False


def memory(state: TraceState, header: dict[str, Any], colors: dict[str, str]) -> tuple[str, str]:
    """Title and body of the memory after a step.

    Args:
        state: the state after the step.
        header: the trace's header.
        colors: request to its colour.
    """
    num_blocks, size = header["num_blocks"], header["block_size"]
    held, share = round(state.usage * num_blocks), f"{100 * state.usage:.0f} %"
    title = f"Memory after the step: {held} of {num_blocks} blocks held ({share}), {size} slots each"
    if num_blocks > MOST_BLOCKS:
        cells = _group_cells(state, header, colors)
        about, width_px = f"Pool of {num_blocks} blocks, in groups of neighbours", 78
    else:
        cells = _block_cells(state, header, colors)
        about, width_px = f"Pool of {num_blocks} blocks", 64 if num_blocks <= 100 else 76
    grid = (
        f'<div role="group" aria-label="{about}, each with its holders and the slots filled." style="display:grid;'
        f"grid-template-columns:repeat(auto-fill,minmax({width_px}px,1fr));grid-auto-rows:{CELL_PX + 4}px;gap:4px;"
        f'font-size:11px;line-height:17px;text-indent:3px;white-space:nowrap;color:{QUIET}">{"".join(cells)}</div>'
    )
    counts = _block_keys(state, num_blocks, size) if caches_prefixes(header) else ""
    return title, grid + counts + _fragmentation(state)


def _block_keys(state: TraceState, num_blocks: int, size: int) -> str:
    """How many blocks are in which state, and how that is drawn."""
    holders = state.holders
    shared = sum(len(names) > 1 for names in holders.values())
    free = sum(block not in holders for block in state.cached_blocks)
    empty, found = num_blocks - len(holders) - free, len(_found(state, size))
    return html.keys(
        [
            html.key(f"held by one {len(holders) - shared}", QUIET, "", f"2px solid {QUIET}"),
            html.key(f"shared by n (×n) {shared}", QUIET, "", f"2px solid {INK}"),
            html.key(f"free, can be found {free}", "#FFF", HATCH["found"] % QUIET, f"1px solid {QUIET}"),
            html.key(f"free, nothing to find {empty}", "#FFF", "", f"1px dashed {LINE}"),
            html.key(f"found in this step {found}", "#FFF", "", FOUND),
            html.key(f"evicted in this step {len(state.evicted)}", "#FFF", "", EVICTED),
        ]
    )


def _fragmentation(state: TraceState) -> str:
    """What the slots of the pool are used for: a bar and its numbers."""
    total = max(1, state.fragmentation.total)
    cells, keys, said = [], [], []
    for part, (name, color, hatch) in PARTS.items():
        count = getattr(state.fragmentation, part)
        said.append(f"{count} {name}")
        keys.append(html.key(f"{name} {count}", color, hatch))
        if count:
            cells.append(
                f'<div title="{count} of {total} slots {name}" style="flex:{count} 1 0;min-width:2px;'
                f'{html.fill(color, hatch)}"></div>'
            )
    return (
        f'<div role="img" aria-label="Slots: {"; ".join(said)}; of {total}." style="display:flex;height:12px;'
        f'margin-top:8px;border:1px solid {INK};border-radius:3px;overflow:hidden">{"".join(cells)}</div>'
        f"{html.keys(keys)}"
    )


def _block_cells(state: TraceState, header: dict[str, Any], colors: dict[str, str]) -> list[str]:
    """One cell per block: its number, its holders, how many of its slots are filled, and what it can be found by."""
    size = header["block_size"]
    filled: dict[int, dict[str, int]] = {}
    for name, request in state.requests.items():
        for index, block in enumerate(request.block_ids):
            filled.setdefault(block, {})[name] = max(0, min(size, request.num_computed_tokens - index * size))
    found, evicted = _found(state, size), {block.block_id: block for block in state.evicted}
    cells = []
    for block in range(header["num_blocks"]):
        counts, cached = filled.get(block, {}), state.cached_blocks.get(block)
        names = list(counts)
        ring = EVICTED if block in evicted else FOUND if block in found else ""
        by_key = f"; can be found by {_key_of(cached)}" if cached else ""
        by_key += f"; found by {listed(found[block])} in this step" if block in found else ""
        by_key += f"; in this step it was evicted with {_key_of(evicted[block])}" if block in evicted else ""
        if not names:
            color = colors.get(cached.request_id, QUIET) if cached else LINE
            key = cached.key[:3] if cached else ""
            cells.append(html.cell(f"block {block}, free{by_key}", block, "", [], color, key, ring))
            continue
        shared = f", shared by {len(names)}" if len(names) > 1 else ""
        text = f"block {block}{shared}: " + ", ".join(f"{name} {counts[name]} of {size} slots" for name in names)
        label = (f"×{len(names)} " if shared else "") + html.short(names[0])
        bars = [_stops([(counts[name], colors[name]), (size - counts[name], colors[name] + "38")]) for name in names]
        border = INK if shared else colors[names[0]]
        cells.append(html.cell(text + by_key, block, label, bars[:MOST_HOLDERS], border, ring=ring))
    return cells


def _found(state: TraceState, size: int) -> dict[int, list[str]]:
    """Block to the requests that found it in this step."""
    found: dict[int, list[str]] = {}
    for name, num_tokens in state.cached.items():
        for block in state.cached_tables[name][: num_tokens // size]:
            found.setdefault(block, []).append(name)
    return found


def _key_of(block: CachedBlock) -> str:
    """ "key 3f2a91c0 (filled by R1 in step 3)"."""
    by = f"by {block.request_id} in step {block.published_in_step}" if block.request_id else "before the trace"
    return f"key {block.key[:8]} (filled {by})"


def _group_cells(state: TraceState, header: dict[str, Any], colors: dict[str, str]) -> list[str]:
    """One cell per group of neighbouring blocks: how many are held, and by whom."""
    size = -(-header["num_blocks"] // MOST_GROUPS)
    holders = state.holders
    cells = []
    for first in range(0, header["num_blocks"], size):
        last = min(first + size, header["num_blocks"]) - 1
        counts: dict[str, int] = {}
        for block in range(first, last + 1):
            for name in holders.get(block, [])[:1]:
                counts[name] = counts.get(name, 0) + 1
        held, total = sum(counts.values()), last - first + 1
        free = sum(block in state.cached_blocks and block not in holders for block in range(first, last + 1))
        most = sorted(counts, key=lambda name: -counts[name])[:MOST_HOLDERS]
        listing = ", ".join(f"{name} {counts[name]}" for name in most)
        others = f", others {held - sum(counts[name] for name in most)}" if len(counts) > len(most) else ""
        text = f"blocks {first} to {last}: {held} of {total} held" + (f" ({listing}{others})" if held else "")
        text += f", {free} free can be found" if free else ""
        parts = [(counts[name], colors[name]) for name in most]
        parts += [(held - sum(count for count, _ in parts), QUIET), (free, LINE), (total - held - free, "#FFF")]
        label = f"{held}/{total}" if held else ""
        cells.append(html.cell(text, first, label, [_stops(parts)] if held or free else [], INK if held else LINE))
    return cells


def _stops(parts: Sequence[tuple[int, str]]) -> str:
    """Colour stops of a gradient whose parts, (size, colour), stand side by side with sharp edges."""
    total, at, stops = sum(size for size, _ in parts), 0, []
    for size, color in parts:
        if size:
            stops.append(f"{color} {100 * at / total:.3g}% {100 * (at + size) / total:.3g}%")
        at += size
    return ",".join(stops)
