"""The small pieces that a state's HTML is made of: sections, chips, cells, rows, keys. Inline styles only."""

from collections.abc import Iterable, Sequence
from html import escape

from minivllm.trace import RequestState, TraceState
from minivllm.viz.style import FAINT, INK

CELL_PX, BAR_PX = 30, 12  # height of a block, inside its border, and of the bar in it
MOST_CHIPS, MOST_LETTERS = 24, 6
QUIET, LINE = "#5A5A5A", "#B5B5B5"
HATCH = {
    "prefill": "",
    "decode": "radial-gradient(circle,#FFFD 1.1px,transparent 1.6px) 0 0/6px 6px",
    "useless": "repeating-linear-gradient(45deg,#FFFC 0 2px,transparent 2px 6px)",
    "empty": f"repeating-linear-gradient(135deg,{LINE} 0 1px,#FFF 1px 5px)",
    "dots": "radial-gradient(circle,#2229 .9px,transparent 1.3px) 0 0/5px 5px",
    "cross": "repeating-linear-gradient(45deg,#2228 0 1px,transparent 1px 5px),"
    "repeating-linear-gradient(135deg,#2228 0 1px,transparent 1px 5px)",
    "found": "repeating-linear-gradient(135deg,%s 0 1.5px,transparent 1.5px 4.5px)",
    "slash": "repeating-linear-gradient(135deg,#222A 0 1.5px,transparent 1.5px 6px)",
}


def section(title: str, body: str, grow: float = 1, width_px: int = 300) -> str:
    """A part with a title; beside another one, it is at least as wide as told and takes its share of what is left."""
    return (
        f'<div style="flex:{grow} 1 {width_px}px;min-width:0;margin-top:10px">'
        f'<div style="font-weight:600;margin-bottom:4px">{title}</div>{body}</div>'
    )


def columns(*parts: str) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:0 28px">{"".join(parts)}</div>'


def lane(chips: Sequence[str], count: int) -> str:
    more = f"<span>and {count - MOST_CHIPS} more</span>" if count > MOST_CHIPS else ""
    inner = "".join(chips) + more or f'<span style="color:{QUIET}">nobody</span>'
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px;align-items:center;min-height:26px">{inner}</div>'


def chip(request: RequestState, color: str, state: TraceState) -> str:
    """A request's name on its colour, and its status where that is not what the place tells."""
    note = ""
    if request.status == "preempted":
        note = f"preempted {request.num_preemptions}×"
    elif request.ended:
        note = "ended" if request.status in ("stop", "length") else f"ended ({request.status})"
    name, told = escape(request.request_id), escape(f"{request.request_id}: {request.status}")
    noted = f'<span style="padding:0 6px;background:#FFF">{note}</span>' if note else ""
    style = f"{chip_style(INK)};border-style:dashed" if note else chip_style(color)
    return (
        f'<span title="{told}" style="{style}"><span style="background:{color};color:{text_on(color)};'
        f'padding:0 7px;max-width:110px;overflow:hidden;text-overflow:ellipsis">{name}</span>{noted}</span>'
    )


def chip_style(color: str) -> str:
    return (
        f"display:inline-flex;height:22px;line-height:21px;border:1.5px solid {color};border-radius:4px;"
        "overflow:hidden;white-space:nowrap;box-sizing:border-box;font-weight:600;font-size:12px;padding:0"
    )


def cell(text: str, number: int, label: str, bars: Sequence[str], color: str, digits: str = "", ring: str = "") -> str:
    """A block, or a group of blocks, of the pool: there may be hundreds, so it is one element with a background.

    Args:
        text: what it says to a pointer that rests on it, and to a screen reader.
        number: of the block.
        label: whose it is; empty for a free one, whose border is dashed.
        bars: colour stops of its bars, one above the other.
        color: of its border.
        digits: the first of the key by which a free one can be found: its border is solid, and its bar hatched.
        ring: what is drawn around it, as CSS has it.
    """
    height = BAR_PX / max(1, len(bars))
    layers = ",".join(
        f"linear-gradient(90deg,{stops})0 {CELL_PX - height * (len(bars) - index):.3g}px/100% {height:.3g}px no-repeat"
        for index, stops in enumerate(bars)
    )
    if digits:
        layers = f"{HATCH['found'] % color} 0 {CELL_PX - BAR_PX}px/100% {BAR_PX}px no-repeat"
    border = f"{'2px solid' if label else '1px solid' if digits else '1px dashed'} {color}"
    name = f' <b style="color:{INK}">{escape(label)}</b>' if label else f" <i>{digits}</i>" if digits else ""
    return (
        f'<div role="img" title="{escape(text)}" style="border:{border};overflow:hidden'
        f'{f";outline:{ring}" if ring else ""}{f";background:{layers}" if layers else ""}">{number}{name}</div>'
    )


def short(name: str) -> str:
    """A name that fits into a cell: its end, where names differ."""
    return name if len(name) <= MOST_LETTERS else f"…{name[1 - MOST_LETTERS :]}"


def row(cells: Sequence[str], span: int = 1) -> str:
    inner = "".join(f'<td colspan="{span}" style="{td()}">{cell}</td>' for cell in cells)
    return f'<tr style="background:#FFF;border-top:1px solid {FAINT}">{inner}</tr>'


def td() -> str:
    return f"text-align:left;padding:2px 14px 2px 0;vertical-align:middle;border:0;color:{INK}"


def key(text: str, color: str, hatch: str, border: str = f"1px solid {INK}") -> str:
    box = f"width:13px;height:13px;border:{border};box-sizing:border-box;{fill(color, hatch)}"
    return f'<span style="display:inline-flex;gap:5px;align-items:center"><span style="{box}"></span>{text}</span>'


def keys(items: Iterable[str]) -> str:
    style = f"display:flex;flex-wrap:wrap;gap:2px 16px;margin-top:4px;font-size:12px;color:{INK}"
    return f'<div style="{style}">{"".join(items)}</div>'


def plate(label: str, kind: str) -> str:
    """A label that can be read on a hatch."""
    if not label or not HATCH[kind]:
        return label
    return f'<span style="background:#FFF;color:{INK};padding:1px 4px;border-radius:3px">{label}</span>'


def fill(color: str, hatch: str) -> str:
    return f"background:{hatch},{color}" if hatch else f"background:{color}"


def text_on(color: str) -> str:
    """Black or white, whichever can be read on a colour (by its luminance, WCAG 2)."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if luminance < 0.179 else INK


def ranges(block_ids: Sequence[int]) -> str:
    """Block ids in the order of the text; neighbours are joined: "7, 3–5, 12"."""
    runs: list[list[int]] = []
    for block in block_ids:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    shown = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    if len(shown) > 16:
        shown[15:] = [f"… ({len(block_ids)} blocks)"]
    return ", ".join(shown)
