"""A trace as Chrome's trace events, which ui.perfetto.dev and chrome://tracing open.

The format is Google's "Trace Event Format": complete events ("X") are slices, counters ("C") are curves, and metadata
("M") names the tracks. Times are whole microseconds from the start of the trace. The engine is one process with a
track of its steps, the requests are another with a track each.
"""

from collections.abc import Iterator
from typing import Any

from minivllm.trace.spans import RequestTimes, request_times
from minivllm.trace.trace import Trace, TraceState

Event = dict[str, Any]
ENGINE, REQUESTS = 1, 1_000_000  # Perfetto puts a thread with the number of its process first
STEPS = 1


def trace_events(trace: Trace) -> list[Event]:
    """All events of a trace, metadata first, then in the order of time. What lies before the trace is cut off."""
    requests = request_times(trace)
    events, num_hits = list[Event](), 0
    for state in trace.states():
        num_hits += sum(state.cached.values())
        events += _engine_events(state, trace.header["token_budget"], num_hits)
    for number, request in enumerate(requests, start=1):
        events += _request_events(request, number)
    names = [_name("process_name", ENGINE, 0, "engine"), _name("process_name", REQUESTS, 0, "requests")]
    names.append(_name("thread_name", ENGINE, STEPS, "steps"))
    names += [_name("thread_name", REQUESTS, number, request.request_id) for number, request in enumerate(requests, 1)]
    # Chrome sorts tracks by name unless it is told their order.
    names += [
        {"ph": "M", "name": "thread_sort_index", "pid": REQUESTS, "tid": number, "args": {"sort_index": number}}
        for number in range(1, len(requests) + 1)
    ]
    return names + sorted(events, key=lambda event: event["ts"])


def _engine_events(state: TraceState, token_budget: int, num_hits: int) -> Iterator[Event]:
    """The slice of a step, and the curves: what it computes and holds from its beginning, who waits from its end; and
    the tokens that were found in the prefix cache so far."""
    args = {
        "tokens": state.num_scheduled_tokens,
        "token_budget": token_budget,
        "cached_tokens": sum(state.cached.values()),
        "evicted_blocks": len(state.evicted),
        "rows": len(state.scheduled),
        "useless_rows": len(state.rerun),
        "output_tokens": sum(state.sampled.values()),
        "decisions": state.decisions,
    }
    yield _slice(f"step {state.step}", ENGINE, STEPS, state.start_s, state.end_s, args)
    yield _counter("tokens in step", state.start_s, state.num_scheduled_tokens)
    yield _counter("running", state.start_s, len(state.scheduled) - len(state.rerun))
    yield _counter("prefix cache hits (tokens so far)", state.start_s, num_hits)
    yield _counter("waiting", state.end_s, len(state.waiting))
    yield _counter("KV cache usage (%)", state.start_s, round(100 * state.pass_usage, 2))


def _request_events(request: RequestTimes, number: int) -> Iterator[Event]:
    """The spans of a request, and marks for its first token and its end. Its first prefill tells what it found."""
    first = next((span for span in request.spans if span.phase == "prefill"), None)
    for span in request.spans:
        args: Event = {"steps": [span.first_step, span.last_step]} if span.first_step <= span.last_step else {}
        if span.num_tokens:
            args |= {"tokens": span.num_tokens, "recomputed_tokens": span.num_recomputed_tokens}
            args["output_tokens"] = span.num_output_tokens
        if span is first and request.parent_id is None:
            args["num_cached_tokens"] = request.num_cached_tokens
        yield _slice(span.phase, REQUESTS, number, span.start_s, span.end_s, args)
    if request.first_token_s is not None:
        yield _mark("first token", number, request.first_token_s)
    if request.end_s is not None:
        yield _mark(f"ended: {request.finish_reason}", number, request.end_s)


def _slice(name: str, pid: int, tid: int, start_s: float, end_s: float, args: Event) -> Event:
    start, end = _micros(start_s), _micros(end_s)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def _counter(name: str, time_s: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": ENGINE, "tid": STEPS, "ts": _micros(time_s), "args": {"value": value}}


def _mark(name: str, number: int, time_s: float) -> Event:
    return {"ph": "i", "s": "t", "name": name, "pid": REQUESTS, "tid": number, "ts": _micros(time_s)}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _micros(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
