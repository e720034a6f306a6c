"""What the steps were filled with, and what it came to: budgets, queues, rates and gaps, drawn from traces only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minivllm.trace import Phase, TokenGap, Trace, TraceSummary, request_times
from minivllm.trace import token_gaps as gaps_of
from minivllm.viz.style import INK, PALETTE, as_text, request_color, styled

Unit = Literal["step", "second"]
GapAxis = Literal["token", "step"]
GapUnit = Literal["tokens", "seconds"]

KINDS: dict[Phase, tuple[str, str, str]] = {
    "decode": (PALETTE[1], "", "decode"),
    "prefill": (PALETTE[0], "", "prefill"),
    "rerun": ("#BBBBBB", "xxxx", "ended rows, of no use"),
}


def token_budget(trace: Trace, title: str) -> Figure:
    """What every step computed, in tokens: decode, prefill, and rows of no use; and how much it might have.

    Raises:
        ValueError: the trace has no steps.
    """
    steps = _steps(trace)
    tokens = {kind: np.zeros(len(steps)) for kind in KINDS}
    for request in request_times(trace):
        for span in request.spans:
            if span.phase in tokens:
                tokens[span.phase][span.first_step - steps[0]] += span.num_tokens
    budget, total = trace.header["token_budget"], sum(tokens.values(), np.zeros(len(steps)))
    with styled():
        fig, ax = plt.subplots()
        bottom = np.zeros(len(steps))
        for kind, (color, hatch, name) in KINDS.items():
            if tokens[kind].any():
                look: dict[str, Any] = {
                    "hatch": hatch,
                    "edgecolor": "white",
                    "linewidth": 0.0 if len(steps) > 80 else 0.4,
                }
                ax.bar(
                    steps,
                    tokens[kind],
                    width=1.0,
                    bottom=bottom,
                    color=color,
                    label=f"{name}: {tokens[kind].sum():.0f}",
                    **look,
                )
                bottom += tokens[kind]
        top = max(total.max(), 1) * 1.15
        far = budget > 4 * top
        label = f"token budget: {budget}{' (far above)' if far else ''}"
        ax.axhline(budget, color=INK, linestyle="--", linewidth=1.2, label=f"_{label}" if far else label)
        if far:
            ax.text(steps[-1] + 0.5, top, f"token budget: {budget}, far above ↑ ", ha="right", va="top", fontsize=9)
        else:
            top = max(top, budget * 1.08)
        ax.set(title=title, xlabel="step", ylabel="tokens computed", ylim=(0, top))
        _step_axis(ax, steps)
        fig.legend(loc="outside lower center", ncols=4, fontsize=9)
        return fig


def queue_and_usage(trace: Trace, title: str) -> Figure:
    """Two panels over the steps: how many rows run and how many requests wait, and how full the KV cache is.

    Rows and memory are those of a step's pass, with what ended in it; who waits is counted after the step.

    Raises:
        ValueError: the trace has no steps.
    """
    steps = _steps(trace)
    running, new, preempted, usage, filled = [], [], [], [], []
    held = set[str]()  # who holds memory after the step before
    for state in trace.states():
        running.append(len(state.scheduled) - len(state.rerun))
        preempted.append(sum(state.requests[name].status == "preempted" for name in state.waiting))
        new.append(len(state.waiting) - preempted[-1])
        usage.append(100 * state.pass_usage)
        were_here = [state.requests[name] for name in {*held, *state.scheduled}]
        gone = [request for request in were_here if request.ended and not request.block_ids]
        used = state.fragmentation.used + sum(request.num_computed_tokens for request in gone)
        held = {name for name, request in state.requests.items() if request.block_ids}
        filled.append(min(usage[-1], 100 * used / max(1, state.fragmentation.total)))
    with styled():
        fig, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7.2, 4.4))
        for y, style, color, name in (
            (running, "-", PALETTE[0], "running"),
            (new, "--", PALETTE[1], "waiting"),
            (preempted, ":", PALETTE[5], "preempted"),
        ):
            top.plot(steps, y, style, color=color, drawstyle="steps-mid", label=f"{name} (mean {fmean(y):.1f})")
        top.set(title=title, ylabel="requests")
        top.set_ylim(0, 1.08 * max(1, *running, *new, *preempted))
        top.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        bottom.plot(
            steps, usage, color=PALETTE[0], drawstyle="steps-mid", label=f"held by somebody (mean {fmean(usage):.0f} %)"
        )
        bottom.fill_between(steps, filled, step="mid", color=PALETTE[2], alpha=0.35, linewidth=0, label="_filled")
        bottom.plot(
            steps,
            filled,
            "--",
            color=PALETTE[2],
            drawstyle="steps-mid",
            label=f"with a token in it ({fmean(filled):.0f} %)",
        )
        bottom.set(xlabel="step", ylabel="KV cache (% of slots)", ylim=(0, 105))
        _step_axis(bottom, steps)
        for ax in (top, bottom):
            ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=3, fontsize=8.5, borderaxespad=0.1)
        top.set_title(title, pad=22)
        return fig


@dataclass(frozen=True)
class BatchPoint:
    """What a workload came to with one batch size, in seconds or in steps throughout.

    Attributes:
        throughput: output tokens per second (or step).
        mean_ttft: time to first token, mean over the requests that got one.
        mean_tpot: time per output token after the first, mean over the requests that have two.
        mean_running: rows per step, without useless ones.
        mean_usage: share of the KV cache in use, 0 to 1.
    """

    throughput: float
    mean_ttft: float
    mean_tpot: float
    mean_running: float
    mean_usage: float


def batch_point(summary: TraceSummary, unit: Unit = "step") -> BatchPoint:
    """The point of one trace; a mean over nobody is NaN."""
    by_step = unit == "step"
    ttft = [request.ttft_steps if by_step else request.ttft_s for request in summary.requests]
    tpot = [request.tpot_steps if by_step else request.tpot_s for request in summary.requests]
    return BatchPoint(
        throughput=summary.output_tokens_per_step if by_step else summary.output_tokens_per_s,
        mean_ttft=fmean([value for value in ttft if value is not None] or [float("nan")]),
        mean_tpot=fmean([value for value in tpot if value is not None] or [float("nan")]),
        mean_running=summary.mean_running,
        mean_usage=summary.mean_usage,
    )


def knee(points: Mapping[int, BatchPoint], share: float = 0.9) -> int:
    """The smallest batch that reaches `share` of the best throughput: beyond it, more rows mostly add latency."""
    best = max(point.throughput for point in points.values())
    return min(size for size, point in points.items() if point.throughput >= share * best)


def batch_size_curves(points: Mapping[int, BatchPoint], title: str, unit: Unit = "step") -> Figure:
    """Throughput and latency against the batch size, and how much of rows and memory was in use.

    The knee (see `knee`) is marked: the smallest batch with 90 % of the best throughput.

    Args:
        points: max_num_seqs to what came of it.
        title: of the figure.
        unit: the unit of the points: "step" or "second".

    Raises:
        ValueError: fewer than two points.
    """
    if len(points) < 2:
        raise ValueError(f"a curve needs at least two batch sizes, got {len(points)}")
    sizes, marked = sorted(points), knee(points)
    chosen = [points[size] for size in sizes]
    with styled():
        fig, grid = plt.subplots(2, 2, sharex=True, figsize=(7.2, 4.8))
        (throughput, ttft), (tpot, filled) = grid
        _curve(throughput, sizes, [p.throughput for p in chosen], 0, f"output tokens per {unit}")
        _curve(ttft, sizes, [p.mean_ttft for p in chosen], 5, f"mean TTFT ({unit}s)")
        _curve(tpot, sizes, [p.mean_tpot for p in chosen], 7, f"mean TPOT ({unit}s)")
        _curve(filled, sizes, [100 * p.mean_running / s for p, s in zip(chosen, sizes, strict=True)], 2, "rows in use")
        _curve(filled, sizes, [100 * p.mean_usage for p in chosen], 3, "KV cache in use", "s--")
        filled.set(ylabel="% in use", ylim=(0, 105))
        filled.legend(fontsize=8.5)
        for ax in grid.flat:
            ax.axvline(marked, color=INK, linestyle=":", linewidth=1.2, label="_knee")
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.minorticks_off()
        # Measured in seconds, the knee is another machine's at another size: its number is no part of the label.
        label = "knee (90 % of the best)" if unit == "second" else f"knee: {marked} (90 % of the best)"
        throughput.plot([marked], [points[marked].throughput], "o", color=INK, markersize=10, fillstyle="none",
                        label=label)  # fmt: skip
        throughput.legend(handles=throughput.get_lines()[-1:], loc="lower right", fontsize=8.5)
        for ax in grid[1]:
            ax.set_xlabel("batch size (max_num_seqs)")
        throughput.set_title(title)
        return fig


def token_gaps(
    traces: Mapping[str, Trace],
    request_ids: str | Sequence[str],
    title: str,
    x: GapAxis = "token",
    unit: GapUnit = "tokens",
) -> Figure:
    """How long readers waited for each token, one panel per trace: a long prompt beside them shows as a stall.

    The wait is measured in tokens that the engine computed between one output token and the next, which is the same
    on every machine, or in seconds.

    Args:
        traces: policy to its trace.
        request_ids: whose tokens.
        title: of the figure.
        x: "token" goes by the number of the output token, "step" by the step that gave it.
        unit: "tokens" or "seconds".

    Raises:
        ValueError: a trace does not know one of the requests, or there is no gap at all.
    """
    names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    gaps = {policy: {name: gaps_of(trace, name) for name in names} for policy, trace in traces.items()}
    if not any(found for by_name in gaps.values() for found in by_name.values()):
        raise ValueError(f"{', '.join(names)}: none has put out two tokens, so that there is no gap to draw")
    with styled():
        size = (7.2, 1.2 + 1.5 * len(traces))
        fig, stack = plt.subplots(len(traces), sharex=True, sharey=True, squeeze=False, figsize=size)
        for ax, (policy, by_name) in zip(stack[:, 0], gaps.items(), strict=True):
            for index, (name, found) in enumerate(by_name.items()):
                color, style = request_color(index), ["-", "--", ":", "-."][index % 4]
                places = [gap.step if x == "step" else number for number, gap in enumerate(found, start=2)]
                ax.plot(places, [_size(gap, unit) for gap in found], style, color=color, marker="o", markersize=3,
                        linewidth=1.2, label=as_text(name))  # fmt: skip
            _mark_longest(ax, [gap for found in by_name.values() for gap in found], unit)
            ax.set_ylabel(f"{as_text(policy)}\n({unit})")
            ax.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=True))
        stack[0, 0].set(title=title)
        stack[0, 0].set_ylim(
            0, 1.2 * max(_size(gap, unit) for named in gaps.values() for f in named.values() for gap in f)
        )
        stack[-1, 0].set_xlabel("step that gave the token" if x == "step" else "output token")
        what = "tokens computed" if unit == "tokens" else "seconds"
        legend: dict[str, Any] = {"loc": "outside lower center", "ncols": 8, "fontsize": 8.5, "title_fontsize": 8.5}
        fig.legend(handles=stack[0, 0].get_lines()[: len(names)], title=f"{what} since the token before, for", **legend)
        return fig


def _mark_longest(ax: Axes, gaps: Sequence[TokenGap], unit: GapUnit) -> None:
    """Writes down the longest wait of a panel, and how often the usual (median) one it is."""
    if gaps:
        sizes = [_size(gap, unit) for gap in gaps]
        longest, usual = max(sizes), float(np.median(sizes))
        text = f"longest: {longest:.3g} {unit}" + (f", {longest / usual:.3g} × the median" if usual else "")
        label = "longest" if unit == "seconds" else text  # measured values stay out of the text twin's labels
        ax.axhline(longest, color=INK, linestyle="--", linewidth=0.8, label=label)
        ax.annotate(text, (1.0, longest), xycoords=("axes fraction", "data"), xytext=(0, 2),
                    textcoords="offset points", ha="right", va="bottom", fontsize=8.5)  # fmt: skip


def _size(gap: TokenGap, unit: GapUnit) -> float:
    return gap.num_tokens if unit == "tokens" else gap.seconds


def _curve(ax: Axes, sizes: Sequence[int], y: Sequence[float], color: int, name: str, style: str = "o-") -> None:
    ax.plot(sizes, y, style, color=PALETTE[color], markersize=5, label=name)
    ax.set_ylabel(name)
    ax.set_ylim(bottom=0)


def _steps(trace: Trace) -> list[int]:
    if not trace.steps:
        raise ValueError("the trace has no steps: record some first")
    return [step["step"] for step in trace.steps]


def _step_axis(ax: Axes, steps: Sequence[int]) -> None:
    ax.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=True))
