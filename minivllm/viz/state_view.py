"""One state of a trace as HTML: queue and batch, token budget, memory, block tables, and what happened.

The same text serves the widget and the exported page. It has inline styles only, no identifiers and no scripts, so
that any number of views can stand on one page, and brings its own background, so that it reads on a dark page too.
What differs in kind differs in hatch or in a letter as well as in colour.
"""

from html import escape
from typing import Any

from minivllm.trace import RequestState, TraceState
from minivllm.viz import html_parts as html
from minivllm.viz import memory_view
from minivllm.viz.html_parts import HATCH, LINE, MOST_CHIPS, QUIET
from minivllm.viz.sentences import is_decode, narrate
from minivllm.viz.style import INK, request_color

COLUMNS = ("Request", "This step", "Tokens in memory / so far / at most", "Block table")
MOST_ROWS, MOST_SEGMENTS = 24, 48


def view(state: TraceState, header: dict[str, Any]) -> str:
    """HTML of everything as it stands after a step. Pure: the same state gives the same text.

    Args:
        state: the state after the step, of `Trace.state`.
        header: the trace's header.
    """
    colors = {name: request_color(index) for index, name in enumerate(state.requests)}
    told = html.section("What happened", _sentences(state, header), width_px=240)
    memory = html.section(*memory_view.memory(state, header, colors), grow=1.8, width_px=420)
    parts = (
        _title(state, header),
        html.columns(html.section(*_waiting(state, colors)), html.section(*_running(state, header, colors))),
        html.section(_budget_title(state, header), _budget(state, header, colors)),
        html.columns(told, memory),
        html.section("Block tables", _tables(state, colors, memory_view.caches_prefixes(header))),
    )
    style = f"background:#FFF;color:{INK};padding:10px 14px 12px;border-radius:6px;font:13px/1.45 system-ui,sans-serif"
    return f'<div style="{style};text-align:left">{"".join(parts)}</div>'


# The parts, from top to bottom. ---------------------------------------------------------------------------


def _title(state: TraceState, header: dict[str, Any]) -> str:
    took_ms = 1000 * (state.end_s - state.start_s)
    tokens = f"{state.num_scheduled_tokens} token{'' if state.num_scheduled_tokens == 1 else 's'} computed"
    kind = ", ".join(str(header["config"].get(key, "")) for key in ("batching", "kv_cache"))
    reservation = header["config"].get("reservation")
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;align-items:baseline"><b style="font-size:18px">'
        f"Step {state.step}</b><span>from {state.start_s:.3f} s to {state.end_s:.3f} s ({took_ms:.1f} ms), {tokens}"
        f'</span><span style="color:{QUIET};margin-left:auto">'
        f"{escape(kind + (f' ({reservation})' if reservation else ''))}</span></div>"
    )


def _waiting(state: TraceState, colors: dict[str, str]) -> tuple[str, str]:
    """Title and chips of the queue, its head first."""
    chips = [html.chip(state.requests[name], colors[name], state) for name in state.waiting[:MOST_CHIPS]]
    return f"Waiting: {len(state.waiting)}", html.lane(chips, len(state.waiting))


def _running(state: TraceState, header: dict[str, Any], colors: dict[str, str]) -> tuple[str, str]:
    """Title and chips of the batch, in the order of service, with its empty rows."""
    # Who ended with this step had a row in it, which nobody else could have.
    rows = [*state.running, *(name for name in state.finished if name in state.scheduled and name not in state.running)]
    places = {name: place for place, name in enumerate(state.scheduled)}
    rows.sort(key=lambda name: places.get(name, len(places)))
    chips = [html.chip(state.requests[name], colors[name], state) for name in rows[:MOST_CHIPS]]
    num_empty = max(0, min(header["max_running"] - len(rows), 8 - len(chips)))
    chips += [
        f'<span style="{html.chip_style(LINE)};border-style:dashed;color:{QUIET};padding:0 7px">empty</span>'
    ] * num_empty
    return f"Running: {len(rows)} of {header['max_running']} rows", html.lane(chips, len(rows))


def _budget_title(state: TraceState, header: dict[str, Any]) -> str:
    return f"Token budget of the step: {state.num_scheduled_tokens} of {header['token_budget']} used"


def _budget(state: TraceState, header: dict[str, Any], colors: dict[str, str]) -> str:
    """A bar of the tokens computed, by request and kind, out of those that a step may compute."""
    totals = {"prefill": 0, "decode": 0, "useless": 0}
    segments = []
    for name, count in state.scheduled.items():
        kind = _kind(state, name)
        totals[kind] += count
        segments.append((count, kind, name, colors[name]))
    if len(segments) > MOST_SEGMENTS:
        rest = segments[MOST_SEGMENTS:]
        del segments[MOST_SEGMENTS:]
        for kind in totals:
            counts = [count for count, of, _, _ in rest if of == kind]
            if counts:
                segments.append((sum(counts), kind, f"{len(counts)} others", QUIET))
    budget = max(header["token_budget"], state.num_scheduled_tokens)
    cells = []
    for count, kind, name, color in segments:
        text = f"{name}: {count} token{'' if count == 1 else 's'}, {kind}"
        label = f"{escape(name)}&nbsp;{count}" if 12 * count >= budget else ""
        cells.append(
            f'<div title="{escape(text)}" style="flex:{count} 1 0;min-width:8px;overflow:hidden;white-space:nowrap;'
            f"{html.fill(color, HATCH[kind])};border-right:1px solid #FFF;color:{html.text_on(color)};"
            f'line-height:26px;padding-left:{4 if label else 0}px;box-sizing:border-box">'
            f"{html.plate(label, kind)}</div>"
        )
    left = budget - state.num_scheduled_tokens
    if left:
        cells.append(
            f'<div title="{left} tokens not used" style="flex:{left} 1 0;{html.fill("#FFF", HATCH["empty"])}"></div>'
        )
    said = ", ".join(f"{count} {kind}" for kind, count in totals.items())
    keys = [
        html.key(f"{kind} {totals[kind]}", QUIET, HATCH[kind]) for kind in totals if totals[kind] or kind != "useless"
    ]
    keys.append(html.key(f"not used {left}", "#FFF", HATCH["empty"]))
    return (
        f'<div role="img" aria-label="Token budget: {said}, {left} not used, of {budget}." style="display:flex;'
        f'height:26px;border:1px solid {INK};border-radius:3px;overflow:hidden">{"".join(cells)}</div>'
        f"{html.keys(keys)}"
    )


def _sentences(state: TraceState, header: dict[str, Any]) -> str:
    items = "".join(f'<li style="margin:0 0 3px">{escape(text)}</li>' for text in narrate(state, header))
    return f'<ul style="margin:0;padding-left:18px">{items}</ul>'


def _tables(state: TraceState, colors: dict[str, str], caches: bool) -> str:
    """A row per request that waits, runs, ended in this step or holds blocks: its tokens and its block table."""
    shown = [
        request
        for request in state.requests.values()
        if request.block_ids or not request.ended or request.ended_in_step == state.step
    ]
    if len(shown) > MOST_ROWS:
        shown.sort(key=lambda request: not request.block_ids)
    longest = max((request.max_num_tokens for request in shown), default=1)
    rows = "".join(_table_row(request, state, colors, longest, caches) for request in shown[:MOST_ROWS])
    if len(shown) > MOST_ROWS:
        rows += html.row([f"and {len(shown) - MOST_ROWS} more"], span=4)
    head = "".join(
        f'<th scope="col" style="{html.td()};color:{QUIET};font-weight:600;background:#FFF;width:{width}%">{title}</th>'
        for title, width in zip(COLUMNS, (20, 12, 40, 28), strict=True)
    )
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;table-layout:fixed;width:100%;'
        f'min-width:640px;margin:0;font-size:13px;background:#FFF;color:{INK};border:0">'
        f'<thead><tr style="background:#FFF">{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _table_row(request: RequestState, state: TraceState, colors: dict[str, str], longest: int, caches: bool) -> str:
    color, name = colors[request.request_id], request.request_id
    kind = _kind(state, name) if name in state.scheduled else ""
    done = f"{request.num_scheduled_tokens} {kind}" if kind else f'<span style="color:{QUIET}">none</span>'
    most, stored, total = request.max_num_tokens, request.num_computed_tokens, request.num_tokens
    bar = (
        f'<div role="img" aria-label="{stored} of {total} tokens in memory, at most {most}" style="flex:1 1 60px;'
        f'min-width:60px;height:10px"><div style="width:{100 * most / longest:.1f}%;height:10px;position:relative;'
        f'box-sizing:border-box;border:1px solid {LINE};background:#FFF">'
        f'<div style="position:absolute;inset:0 auto 0 0;width:{100 * total / most:.1f}%;'
        f'{html.fill("#FFF", HATCH["empty"])}"></div>'
        f'<div style="position:absolute;inset:0 auto 0 0;width:{100 * min(stored, total) / most:.1f}%;'
        f'background:{color}"></div></div></div>'
    )
    tokens = f'<div style="display:flex;align-items:center;gap:8px">{bar}<span style="flex:0 0 118px;text-align:right">'
    tokens += f'{stored} / {total} / <span style="color:{QUIET}">{most}</span></span>'
    if caches:
        found = request.num_cached_tokens if request.block_ids or request.ended_in_step == state.step else 0
        told = f"found {found}" if found else ""
        tokens += f'<span style="flex:0 0 72px;white-space:nowrap;color:{QUIET}">{told}</span>'
    tokens += "</div>"
    blocks = html.ranges(request.block_ids) or f'<span style="color:{QUIET}">no blocks</span>'
    return html.row([html.chip(request, color, state), done, tokens, blocks])


# The pieces they are made of. -----------------------------------------------------------------------------


def _kind(state: TraceState, name: str) -> str:
    """What a scheduled request's tokens are in this step."""
    if name in state.rerun:
        return "useless"
    return "decode" if is_decode(state, name) else "prefill"
