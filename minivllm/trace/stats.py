"""What a trace comes to: totals, the gaps between a request's tokens, and what happened to its memory.

Reads a trace and nothing else; knows nothing of drawing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from minivllm.kv_cache import MemoryEvent
from minivllm.trace.spans import RequestTimes, request_times
from minivllm.trace.trace import Trace


@dataclass(frozen=True)
class TraceSummary:
    """The totals of a trace.

    Attributes:
        num_steps: steps.
        num_requests: requests, answers that branched off among them.
        num_prompt_tokens: tokens of all prompts; a prompt with many answers counts once.
        num_cached_tokens: those of them that were found in the prefix cache.
        num_output_tokens: tokens put out.
        num_computed_tokens: tokens that the steps computed, to use or not.
        num_recomputed_tokens: those of them that had been computed before and were lost.
        num_useless_tokens: those of them that ended members of a static batch were computed for, one per row and step.
        num_preemptions: how often somebody lost memory.
        mean_running: rows per step, without the useless ones.
        peak_running: most rows in a step, without the useless ones.
        mean_waiting: requests without memory after a step.
        mean_usage: share of the blocks that somebody held during a step, 0 to 1.
        peak_usage: the most it came to.
        duration_s: seconds from the start of the first step to the end of the last.
        requests: their times, in order of arrival.
    """

    num_steps: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_useless_tokens: int
    num_preemptions: int
    mean_running: float
    peak_running: int
    mean_waiting: float
    mean_usage: float
    peak_usage: float
    duration_s: float
    requests: tuple[RequestTimes, ...] = field(repr=False)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were found in the prefix cache over all of them, 0 to 1; 0 without prompts. Those of
        requests that skip reading the cache, or had not begun, count too."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def output_tokens_per_step(self) -> float:
        """Tokens put out per step; 0 without steps."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens put out per second; 0 if no time has passed."""
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0


def summarize(trace: Trace) -> TraceSummary:
    """Adds a trace up. One without steps comes to zeros."""
    requests = request_times(trace)
    spans = [span for request in requests for span in request.spans]
    running, waiting, usage = [0], [0], [0.0]
    if trace.steps:
        running = [len(step.get("scheduled", ())) - len(step.get("rerun", ())) for step in trace.steps]
        waiting = [len(step.get("waiting", ())) for step in trace.steps]
        usage = [step["pass_usage"] for step in trace.steps]
    return TraceSummary(
        num_steps=len(trace),
        num_requests=len(requests),
        num_prompt_tokens=sum(request.num_prompt_tokens for request in requests if request.parent_id is None),
        num_cached_tokens=sum(request.num_cached_tokens for request in requests if request.parent_id is None),
        num_output_tokens=sum(request.num_output_tokens for request in requests),
        num_computed_tokens=sum(span.num_tokens for span in spans),
        num_recomputed_tokens=sum(span.num_recomputed_tokens for span in spans),
        num_useless_tokens=sum(span.num_tokens for span in spans if span.phase == "rerun"),
        num_preemptions=sum(request.num_preemptions for request in requests),
        mean_running=fmean(running),
        peak_running=max(running),
        mean_waiting=fmean(waiting),
        mean_usage=fmean(usage),
        peak_usage=max(usage),
        duration_s=trace.steps[-1]["end_s"] - trace.steps[0]["start_s"] if trace.steps else 0.0,
        requests=requests,
    )


@dataclass(frozen=True)
class TokenGap:
    """What lay between an output token and the one before it.

    Attributes:
        step: the step that gave the token.
        num_tokens: tokens that the engine computed from then on, for everybody: what the reader waited for.
        seconds: how long that took.
    """

    step: int
    num_tokens: int
    seconds: float


def token_gaps(trace: Trace, request_id: str) -> list[TokenGap]:
    """The gaps between the output tokens of a request, from its second token on.

    Raises:
        ValueError: the trace knows no such request.
    """
    found = [request for request in request_times(trace) if request.request_id == request_id]
    if not found:
        raise ValueError(f"the trace has no request {request_id!r}")
    first, sizes, ends = trace.steps[0]["step"], [], []
    for step in trace.steps:
        sizes.append(sum(step.get("scheduled", {}).values()))
        ends.append(step["end_s"])
    places = [step - first for step in found[-1].token_steps]
    return [
        TokenGap(now + first, sum(sizes[before + 1 : now + 1]), ends[now] - ends[before])
        for before, now in pairwise(places)
    ]


def memory_events(trace: Trace) -> list[MemoryEvent]:
    """What happened to everybody's memory, as `viz.memory_map` reads it.

    Steps count from 0 at the first of the trace. Within a step come first those who lost their memory before the
    pass, then those who held some during it, then those who gave it back at its end.
    """
    events: list[MemoryEvent] = []
    tables: dict[str, list[int]] = {}
    for index, state in enumerate(trace.states()):
        step = trace.steps[index]
        for name in step.get("removed", ()):
            if tables.pop(name, None):
                events.append(MemoryEvent(index, "free", name, (), 0))
        for name, table in _tables_in_step(step, tables).items():
            kind = _kind(table, tables.get(name, []), moves=trace.header["config"]["kv_cache"] == "contiguous")
            if _is_born(name, step):
                kind = "fork"
            released = name in step.get("released", ())
            if name in state.scheduled or released or table != tables.get(name):
                computed = state.requests[name].num_computed_tokens
                events.append(MemoryEvent(index, kind, name, tuple(table), computed))
            tables[name] = table
        for name in step.get("released", ()):
            if tables.pop(name, None):
                events.append(MemoryEvent(index, "free", name, (), 0))
    return events


def _tables_in_step(step: Mapping[str, Any], before: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The block tables as the pass found them, of the answers that branched off by it too, which come last."""
    tables = dict(before)
    added = {fields["request_id"]: list(fields["block_ids"]) for fields in step.get("added", ()) if fields["block_ids"]}
    tables |= {name: table for name, table in added.items() if not _is_born(name, step)}
    for name, (start, block_ids) in step.get("blocks", {}).items():
        tables[name] = [*tables.get(name, [])[:start], *block_ids]
    return tables | {name: table for name, table in added.items() if _is_born(name, step)}


def _is_born(name: str, step: Mapping[str, Any]) -> bool:
    """Whether a request branched off in a step: it got a token and had no row."""
    return name in step.get("tokens", {}) and name not in step.get("scheduled", {})


def _kind(table: list[int], before: list[int], moves: bool) -> str:
    if table == before:
        return "grow"
    if table[: len(before)] == before:
        return "allocate"
    return "move" if moves else "copy"
