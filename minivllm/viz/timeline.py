"""Who did what in which step: timelines of requests, drawn from traces only."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from minivllm.trace import Phase, RequestTimes, Span, Trace, request_times
from minivllm.viz.style import FAINT, INK, as_text, request_color, styled

TimeAxis = Literal["step", "seconds"]
AXIS_LABELS: dict[TimeAxis, str] = {"step": "step", "seconds": "time since the start of the trace (s)"}

# phase: (strength of the request's colour, hatch, height of the bar, what the legend calls it)
LOOKS: dict[Phase, tuple[float, str, float, str]] = {
    "queued": (0.0, "", 0.3, "queued"),
    "prefill": (1.0, "", 0.86, "prefill, a bar per step"),
    "decode": (0.45, "", 0.86, "decode"),
    "idle": (0.15, "....", 0.3, "in the batch, no row"),
    "preempted": (0.0, "//////", 0.6, "preempted: memory lost, waits"),
    "rerun": (0.0, "xxxx", 0.86, "ended, still computed"),
}
GREY, USELESS = "#666666", "#BBBBBB"


def request_timeline(trace: Trace, title: str, x: TimeAxis = "step") -> Figure:
    """One row per request, in order of arrival: waiting, prefill, decode, lost memory, and rows computed to no use.

    Args:
        trace: what is drawn.
        title: of the figure.
        x: "step" draws steps of equal width; "seconds" draws when things happened.

    Raises:
        ValueError: the trace has no steps.
    """
    return _timelines({"request": trace}, title, x)


def compare_traces(traces: Mapping[str, Trace], title: str, x: TimeAxis = "step") -> Figure:
    """The timelines of one workload under two or three policies, below each other on one axis.

    Args:
        traces: policy to its trace.
        title: of the figure.
        x: as in `request_timeline`.

    Raises:
        ValueError: fewer than two traces, more than three, or one without steps.
    """
    if not 2 <= len(traces) <= 3:
        raise ValueError(f"two or three traces can be compared, got {len(traces)}")
    return _timelines(traces, title, x)


def _timelines(traces: Mapping[str, Trace], title: str, x: TimeAxis) -> Figure:
    for name, trace in traces.items():
        if not trace.steps:
            raise ValueError(f"the trace {name!r} has no steps: record some first")
    histories = [request_times(trace) for trace in traces.values()]
    rows = [len(requests) for requests in histories]
    height = 0.3 if sum(rows) <= 24 else 0.17
    with styled():
        size = (7.2, 1.5 + sum(0.45 + height * max(count, 2) for count in rows))
        fig, stack = plt.subplots(
            len(rows), sharex=True, squeeze=False, figsize=size, height_ratios=[max(count, 2) for count in rows]
        )
        axes: list[Axes] = list(stack[:, 0])
        first = min(_edge(trace.steps[0], x, end=False) for trace in traces.values())
        last = max(_edge(trace.steps[-1], x, end=True) for trace in traces.values())
        axes[-1].set_xlim(first, last + 0.012 * (last - first))
        for ax, name, trace, requests in zip(axes, traces, traces.values(), histories, strict=True):
            _draw_rows(ax, requests, x, small=height < 0.3)
            ax.set_ylabel(as_text(name))
            if len(traces) > 1:
                _draw_end(ax, trace, x)
        axes[0].set_title(title, pad=6 if len(traces) == 1 else 18)
        axes[-1].set_xlabel(AXIS_LABELS[x])
        if x == "step":
            axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=True))
        spans = [span for requests in histories for request in requests for span in request.spans]
        _legend(fig, {span.phase for span in spans if _extent(span, x)[1]}, [r for rs in histories for r in rs])
        return fig


def _draw_rows(ax: Axes, requests: Sequence[RequestTimes], x: TimeAxis, small: bool) -> None:
    """The rows of one trace, from top to bottom, and their marks."""
    marker = 3.0 if small else 4.5
    for row, request in enumerate(requests):
        spans = [span for span in _merged(request.spans) if _extent(span, x)[1] > 0]
        _draw_spans(ax, row, as_text(request.request_id), request_color(row), spans, x, _num_found(request))
        if _num_found(request):
            _draw_found(ax, row, request, x, small)
        if request.token_steps and request.first_token_s is not None:
            place = request.token_steps[0] + 1 if x == "step" else request.first_token_s
            ax.plot([place], [row], "o", color="white", markeredgecolor=INK, markersize=marker, label="_first token")
        if request.end_step is not None and request.end_s is not None:
            place = request.end_step + 1 if x == "step" else request.end_s
            mark = "x" if request.finish_reason in ("abort", "error") else "|"
            ax.plot([place], [row], mark, color=INK, markersize=2.4 * marker, markeredgewidth=1.8, label="_end")
    names = [as_text(request.request_id) for request in requests]
    ax.set_yticks(range(len(names)), names, fontsize=6.5 if small else 9)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def _draw_spans(ax: Axes, row: int, name: str, color: str, spans: Sequence[Span], x: TimeAxis, num_found: int) -> None:
    """One container per request, so that the text twin has a line per request."""
    if not spans:
        return
    looks = [_look(span.phase, color) for span in spans]
    extents = [_extent(span, x) for span in spans]
    phases = ", ".join(dict.fromkeys(span.phase for span in spans))
    ax.barh(
        [row] * len(spans),
        [width for _, width in extents],
        left=[left for left, _ in extents],
        height=[look["height"] for look in looks],
        color=[look["facecolor"] for look in looks],
        edgecolor=[look["edgecolor"] for look in looks],
        hatch=[look["hatch"] for look in looks],
        linewidth=0.5,
        label=f"{name}: {phases}{f'; {num_found} found' if num_found else ''}",
    )


def _num_found(request: RequestTimes) -> int:
    """Tokens that it took over from the prefix cache; of answers that branched off, their parent shows them."""
    started = request.parent_id is None and request.first_scheduled_step is not None
    return request.num_cached_tokens if started else 0


def _draw_found(ax: Axes, row: int, request: RequestTimes, x: TimeAxis, small: bool) -> None:
    """A wedge where the first prefill begins, and how many tokens were found: left of it, if there is room."""
    by_step = x == "step"
    place = (request.first_scheduled_step if by_step else request.first_scheduled_s) or 0
    ax.plot([place], [row], marker=8, color=INK, markersize=3 if small else 5, label="_found", zorder=4)
    left, right = ax.get_xlim()
    at, ha, shift = place, "right", -5
    if place - left < 0.13 * (right - left):
        token = request.first_token_step if by_step else request.first_token_s
        at, ha, shift = place if token is None else token + by_step, "left", 5
    ax.annotate(
        f"{_num_found(request)} found",
        (at, row),
        xytext=(shift, 0),
        textcoords="offset points",
        ha=ha,
        va="center_baseline",
        fontsize=5.5 if small else 7,
        annotation_clip=False,
        path_effects=[withStroke(linewidth=1.8, foreground="white")] if ha == "right" else [],
        zorder=5,
    )


def _look(phase: Phase, color: str) -> dict[str, Any]:
    """How a span is drawn: the stronger the colour, the more was computed; waste is hatched."""
    strength, hatch, height, _ = LOOKS[phase]
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(color))
    face: Any = (red, green, blue)
    edge: Any = INK if phase == "prefill" else tuple(0.75 * part for part in to_rgb(color))
    if phase == "rerun":
        return {"facecolor": USELESS, "edgecolor": "white", "hatch": hatch, "height": height}
    if phase == "queued":
        return {"facecolor": FAINT, "edgecolor": FAINT, "hatch": hatch, "height": height}
    return {"facecolor": face, "edgecolor": edge, "hatch": hatch, "height": height}


def _draw_end(ax: Axes, trace: Trace, x: TimeAxis) -> None:
    """A line where the last step of a trace ends."""
    end = _edge(trace.steps[-1], x, end=True)
    text = f"all done after {len(trace)} steps" if x == "step" else f"all done after {end:.3g} s"
    ax.axvline(end, color=INK, linestyle="--", linewidth=1.0, label="_end of the trace")
    ax.annotate(
        f"{text} ", (end, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=8, annotation_clip=False,
    )  # fmt: skip


def _legend(fig: Figure, phases: set[Phase], requests: Sequence[RequestTimes]) -> None:
    """What there is to be seen, in grey, since the colours are the requests'."""
    handles: list[Any] = []
    for phase, (_, _, _, name) in LOOKS.items():
        if phase in phases:
            look = _look(phase, GREY)
            look.pop("height")
            handles.append(Patch(**look, linewidth=0.5, label=name))
    line: dict[str, Any] = {"color": INK, "linestyle": "none"}
    if any(map(_num_found, requests)):
        handles.append(Line2D([], [], **line, marker=8, markersize=5, label="found in the prefix cache (tokens)"))
    if any(request.first_token_s is not None for request in requests):
        handles.append(Line2D([], [], **line, marker="o", markerfacecolor="white", markersize=4.5, label="first token"))
    reasons = {request.finish_reason for request in requests}
    if reasons & {"stop", "length"}:
        handles.append(Line2D([], [], **line, marker="|", markersize=10, markeredgewidth=1.8, label="end"))
    if reasons & {"abort", "error"}:
        handles.append(Line2D([], [], **line, marker="x", markersize=6, markeredgewidth=1.8, label="aborted or failed"))
    fig.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, handlelength=1.6, columnspacing=1.2)


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Spans of which neighbours are one bar, except prefill, where every step stays to be seen."""
    bars: list[Span] = []
    for phase, group in groupby(spans, key=lambda span: span.phase):
        same = list(group)
        if phase == "prefill":
            bars += same
        else:
            bars.append(Span(phase, same[0].first_step, same[-1].last_step, same[0].start_s, same[-1].end_s))
    return bars


def _extent(span: Span, x: TimeAxis) -> tuple[float, float]:
    """Left end and width of a bar."""
    if x == "step":
        return span.first_step, span.last_step + 1 - span.first_step
    return span.start_s, span.end_s - span.start_s


def _edge(step: Mapping[str, Any], x: TimeAxis, end: bool) -> float:
    """Where a step begins or ends on the axis."""
    if x == "step":
        return step["step"] + end
    return step["end_s"] if end else step["start_s"]
