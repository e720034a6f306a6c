"""What the prefix cache found, and what that saved: drawn from traces only."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minivllm.trace import RequestTimes, Trace, TraceState, request_times
from minivllm.trace.trace import ADMISSIONS
from minivllm.viz.style import PALETTE, as_text, styled

TTFTUnit = Literal["step", "s"]
MOST_CONNECTED = 16  # requests of which lines from trace to trace are not yet a thicket


@dataclass(frozen=True)
class Lookup:
    """What a request found in the prefix cache when it was admitted.

    Attributes:
        step: in which.
        request_id: who.
        num_tokens: its tokens, which were looked for.
        num_found: those of them that were found.
        resumed: whether it had been admitted before and had lost its memory.
    """

    step: int
    request_id: str
    num_tokens: int
    num_found: int
    resumed: bool


def lookups(trace: Trace) -> list[Lookup]:
    """All admissions of a trace, in order."""
    return [
        Lookup(
            step=state.step,
            request_id=decision["request_id"],
            num_tokens=_tokens_at_admission(state, decision["request_id"]),
            num_found=decision["available"],
            resumed=decision["kind"] == "resume",
        )
        for state in trace.states()
        for decision in state.decisions
        if decision["kind"] in ADMISSIONS
    ]


def hit_rate(trace: Trace, *, window: int | None = None, title: str | None = None) -> Figure:
    """How much of its tokens each request found when it was admitted, and what that comes to.

    The line is the share of all tokens looked for so far. Requests that came back after they had lost their memory
    find mostly what they had computed themselves: they are marked, and do not count in the line. One that skips reading
    the cache counts as one that found nothing.

    Args:
        trace: what is drawn.
        window: draws also the share among the last so many requests; None draws none.
        title: of the figure.

    Raises:
        ValueError: nobody was admitted for the first time, or a window below 1.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 request, got {window}")
    found = lookups(trace)
    first = [lookup for lookup in found if not lookup.resumed]
    if not first:
        raise ValueError("the trace admits nobody for the first time: begin to record before the requests come")
    last = trace.steps[-1]["step"]
    with styled():
        fig, ax = plt.subplots()
        rates = _rates(first, len(first))
        _draw_rate(ax, rates, last, "-", PALETTE[2], f"all requests so far: {rates[-1][1]:.1f} % at the end")
        if window is not None:
            rates = _rates(first, window)
            _draw_rate(ax, rates, last, "--", PALETTE[3], f"the last {window}: {rates[-1][1]:.1f} % at the end")
        _draw_points(ax, _shares(first), PALETTE[0], "o", PALETTE[0], f"a request is admitted ({len(first)})")
        again = [lookup for lookup in found if lookup.resumed]
        if again:
            _draw_points(ax, _shares(again), PALETTE[5], "D", "white", f"resumed, not in the rate ({len(again)})")
        ax.set(title=title or "Tokens found in the prefix cache", xlabel="step")
        ax.set(ylabel="found (% of the tokens looked for)", ylim=(-5, 105), xlim=(-0.5, last + 1))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=True))
        fig.legend(loc="outside lower center", ncols=2, fontsize=8.5)
        return fig


def _tokens_at_admission(state: TraceState, name: str) -> int:
    return state.requests[name].num_tokens - state.sampled.get(name, 0)


def _shares(found: Sequence[Lookup]) -> list[tuple[float, float]]:
    return [(lookup.step, 100 * lookup.num_found / lookup.num_tokens) for lookup in found]


def _rates(found: Sequence[Lookup], window: int) -> list[tuple[int, float]]:
    """Step to the share, in percent, of the tokens of the last `window` lookups that were found."""
    recent, by_step = deque[Lookup](maxlen=window), dict[int, float]()
    for lookup in found:
        recent.append(lookup)
        by_step[lookup.step] = 100 * sum(x.num_found for x in recent) / sum(x.num_tokens for x in recent)
    return list(by_step.items())


def _draw_rate(ax: Axes, rates: Sequence[tuple[int, float]], last: int, style: str, color: str, name: str) -> None:
    points = [*rates, (last + 1, rates[-1][1])]
    ax.plot(*zip(*points, strict=True), style, color=color, drawstyle="steps-post", label=name)


def _draw_points(
    ax: Axes, points: Sequence[tuple[float, float]], color: str, marker: str, face: str, label: str, count: bool = True
) -> None:
    """Points of which equal ones are one, with their number beside it if that is wanted."""
    hollow = face != color
    ax.plot(
        *zip(*points, strict=True),
        marker,
        color=color,
        markerfacecolor=face,
        markersize=6 if hollow else 7,
        markeredgewidth=1.2,
        markeredgecolor=color if hollow else "white",
        label=label,
        zorder=3,
    )
    for point, number in Counter(points).items():
        if count and number > 1:
            ax.annotate(f"×{number}", point, xytext=(5, 3), textcoords="offset points", fontsize=8, color=color)


def ttft_cold_warm(traces: Trace | Mapping[str, Trace], *, unit: TTFTUnit = "step", title: str | None = None) -> Figure:
    """Time to first token of every request against the prompt tokens that it had to compute itself.

    A cold request found nothing in the prefix cache, a warm one found something. Of two traces with few requests, a
    thin line leads from each request of the first to itself in the second. No number in the figure's text is
    measured, so that one in seconds can be shown with `measured=True`.

    Args:
        traces: a trace, or names to traces.
        unit: "step" or "s" (seconds).
        title: of the figure.

    Raises:
        ValueError: another unit, or nobody put out a first token.
    """
    if unit not in ("step", "s"):
        raise ValueError(f"the unit must be 'step' or 's', got {unit!r}")
    named = {"": traces} if isinstance(traces, Trace) else dict(traces)
    points = {name: _ttft_points(trace, unit) for name, trace in named.items()}
    if not any(points.values()):
        raise ValueError("no request of the traces put out its first token: record until one has")
    top = max(y for by_request in points.values() for _, _, y in by_request.values())
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 3.8))
        if len(points) == 2 and max(map(len, points.values())) <= MOST_CONNECTED:
            _connect(ax, *points.values())
        for index, (name, by_request) in enumerate(points.items()):
            for kind, marker in (("cold", "o"), ("warm", "D")):
                chosen = [
                    (x, y)
                    for request, x, y in by_request.values()
                    if (request.num_cached_tokens > 0) == (kind == "warm")
                ]
                if not chosen:
                    continue
                color = PALETTE[1 if kind == "cold" else 0] if len(points) == 1 else PALETTE[index]
                of = f"{as_text(name)}, " if name else ""
                what = "nothing" if kind == "cold" else "a part"
                label = f"{of}{kind}: {what} found ({len(chosen)})"
                face = color if kind == "cold" else "none"
                _draw_points(ax, chosen, color, marker, face, label, count=unit == "step")
        ax.set(title=title or "Time to first token, and tokens left to compute")
        ax.set(xlabel="prompt tokens that the request had to compute", ylim=(-0.03 * top, 1.08 * top), xlim=(0, None))
        ax.set_ylabel("TTFT (steps)" if unit == "step" else "TTFT (s)")
        if unit == "step":
            ax.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        fig.legend(loc="outside lower center", ncols=2, fontsize=8.5)
        return fig


def _ttft_points(trace: Trace, unit: TTFTUnit) -> dict[str, tuple[RequestTimes, float, float]]:
    """Request to its times, its place on the x axis and its TTFT; answers that branched off have their parent's."""
    found: dict[str, tuple[RequestTimes, float, float]] = {}
    for request in request_times(trace):
        ttft = request.ttft_steps if unit == "step" else request.ttft_s
        if request.parent_id is None and ttft is not None:
            found[request.request_id] = (request, request.num_prompt_tokens - request.num_cached_tokens, float(ttft))
    return found


def _connect(ax: Axes, first: Mapping[str, tuple[Any, float, float]], second: Mapping[str, Any]) -> None:
    for name, (_, x, y) in first.items():
        if name in second:
            _, to_x, to_y = second[name]
            ax.plot([x, to_x], [y, to_y], color="#BBBBBB", linewidth=0.8, label="_same request", zorder=1)
