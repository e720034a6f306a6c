"""The flight recorder: what an engine did, step by step, and what can be read from it. Nothing here draws."""

from minivllm.trace.recorder import Recorder
from minivllm.trace.spans import Phase, RequestTimes, Span, request_times
from minivllm.trace.stats import TokenGap, TraceSummary, memory_events, summarize, token_gaps
from minivllm.trace.trace import RequestState, Trace, TraceState

__all__ = [
    "Phase",
    "Recorder",
    "RequestState",
    "RequestTimes",
    "Span",
    "TokenGap",
    "Trace",
    "TraceState",
    "TraceSummary",
    "memory_events",
    "request_times",
    "summarize",
    "token_gaps",
]
