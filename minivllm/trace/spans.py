"""What every request of a trace did in every step, and when.

Reads a trace and nothing else. A request's spans follow each other without a gap from its arrival to its end, so that
whatever is counted or drawn of them can be checked against the steps.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from minivllm.trace.trace import RequestState, Trace, TraceState

Phase = Literal["queued", "prefill", "decode", "idle", "preempted", "rerun"]
PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode", "idle", "preempted", "rerun")
COMPUTING: tuple[Phase, ...] = ("prefill", "decode", "rerun")


@dataclass(frozen=True)
class Span:
    """What a request did for one step, or for several if it computed nothing in them.

    Attributes:
        phase: "queued" (waits, and has never lost memory), "prefill" (computes tokens that are there already: its
            prompt, and after a preemption its output too), "decode" (computes its latest token, for the next),
            "idle" (is in the batch, and has no row in this step), "preempted" (lost its memory and waits), or "rerun"
            (has ended, and its row of a static batch is computed to no use).
        first_step: number of the first step.
        last_step: number of the last one.
        start_s: when it began, in seconds from the start of the trace.
        end_s: when it ended.
        num_tokens: tokens computed.
        num_recomputed_tokens: those of them that had been computed before and were lost.
        num_output_tokens: tokens put out.
    """

    phase: Phase
    first_step: int
    last_step: int
    start_s: float
    end_s: float
    num_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True)
class RequestTimes:
    """When what happened to a request; None for what did not happen while the trace was recorded.

    An answer that branched off has the arrival and the start of the request that it came from.

    Attributes:
        request_id: its name.
        parent_id: the request that it branched off from.
        num_prompt_tokens: tokens of its prompt.
        arrival_step: the first step that knew of it.
        arrival_s: when it came, in seconds from the start of the trace.
        first_scheduled_step: the first step that computed a token of it.
        first_scheduled_s: when that step began.
        token_steps: the step that gave each of its output tokens.
        first_token_s: when its first output token was there.
        last_token_s: when its latest one was.
        end_step: the step in which it ended.
        end_s: when that step's results were booked.
        finish_reason: how it ended.
        num_preemptions: how often it lost its memory.
        num_cached_tokens: tokens of its prompt that were found in the prefix cache when it was first admitted.
        spans: what it did, one after the other.
    """

    request_id: str
    parent_id: str | None
    num_prompt_tokens: int
    arrival_step: int
    arrival_s: float
    first_scheduled_step: int | None
    first_scheduled_s: float | None
    token_steps: tuple[int, ...]
    first_token_s: float | None
    last_token_s: float | None
    end_step: int | None
    end_s: float | None
    finish_reason: str | None
    num_preemptions: int
    num_cached_tokens: int
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that it put out."""
        return len(self.token_steps)

    @property
    def first_token_step(self) -> int | None:
        """The step that gave its first output token."""
        return self.token_steps[0] if self.first_token_s is not None else None

    @property
    def queue_s(self) -> float | None:
        """Seconds from its arrival to its first step."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: seconds from its arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from its arrival to its end."""
        return None if self.end_s is None else self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, in seconds; None for fewer than two.

        It is (e2e - TTFT) / (n - 1) for whoever ends with its last token; one that is aborted later is not charged
        for the time that it waited then.
        """
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def ttft_steps(self) -> int | None:
        """Steps up to its first token: 1 if the first step that knew of it gave it."""
        return None if self.first_token_step is None else self.first_token_step - self.arrival_step + 1

    @property
    def tpot_steps(self) -> float | None:
        """Steps per output token after the first: 1 if every step gave one; None for fewer than two."""
        if self.first_token_step is None or self.num_output_tokens < 2:
            return None
        return (self.token_steps[-1] - self.first_token_step) / (self.num_output_tokens - 1)

    @property
    def e2e_steps(self) -> int | None:
        """Steps from its arrival to its end, both counted."""
        return None if self.end_step is None else self.end_step - self.arrival_step + 1


def request_times(trace: Trace) -> tuple[RequestTimes, ...]:
    """What every request did and when, in order of arrival.

    A name that was used again after its request had ended gives one entry for each.
    """
    accounts: list[_Account] = []
    latest: dict[str, _Account] = {}
    for state in trace.states():
        for name, request in state.requests.items():
            account = latest.get(name)
            if account is None or account.end_step not in (None, request.ended_in_step):
                account = latest[name] = _Account(request, state, latest.get(request.parent_id or ""))
                accounts.append(account)
            account.note(request, state)
    return tuple(account.result() for account in accounts)


class _Account:
    """What is known of a request while its trace is read."""

    def __init__(self, request: RequestState, state: TraceState, parent: "_Account | None") -> None:
        self.request_id, self.parent_id = request.request_id, request.parent_id
        self.num_prompt_tokens, self.arrival_s = request.num_prompt_tokens, request.arrival_s
        self.arrival_step: int = parent.arrival_step if parent else state.step
        self.started: tuple[int, float] | None = parent.started if parent else None
        self.tokens: list[tuple[int, float]] = []  # step and time of each
        self.end_step: int | None = None
        self.end_s: float | None = None
        self.reason: str | None = None
        self.spans: list[Span] = []
        self.num_preemptions, self.times_lost = 0, request.num_preemptions
        self.num_cached_tokens: int = parent.num_cached_tokens if parent else 0
        num_tokens = request.num_tokens - state.sampled.get(self.request_id, 0)
        computed = request.num_computed_tokens - request.num_scheduled_tokens - state.cached.get(self.request_id, 0)
        self.began_before = num_tokens > self.num_prompt_tokens  # its first token is older than the trace
        self.reads = not self.began_before or num_tokens - computed > 1
        self.is_new = parent is None and not self.began_before and computed == 0
        self.farthest = computed  # most of its tokens that were ever in the cache

    def note(self, request: RequestState, state: TraceState) -> None:
        """Takes in what a step did with it."""
        name, ended_before = self.request_id, self.end_step is not None
        if request.num_preemptions > self.times_lost:
            self.times_lost, self.reads = request.num_preemptions, True
            preempted = any((d["kind"], d["request_id"]) == ("preempt", name) for d in state.decisions)
            self.num_preemptions += preempted or name not in state.finished  # an end takes the memory too
        if name in state.finished:
            self.end_step, self.end_s, self.reason = state.step, state.end_s, state.finished[name]
        if name in state.scheduled and self.started is None:
            self.started = (state.step, state.start_s)
            if not request.num_preemptions:  # else it was first admitted before the trace, or in vain
                self.num_cached_tokens = request.num_cached_tokens  # of a static batch, found in an earlier step
        num_new = state.sampled.get(name, 0)
        if name in state.scheduled:
            phase: Phase = "rerun" if name in state.rerun else "prefill" if self.reads else "decode"
            self._compute(phase, request, state, num_new)
        elif not ended_before and not num_new:  # a token without a row: it has just branched off
            self._wait(request, state)
        self.tokens += [(state.step, state.end_s)] * num_new
        self.reads = name in state.waiting or (self.reads and not num_new)

    def _compute(self, phase: Phase, request: RequestState, state: TraceState, num_new: int) -> None:
        """Adds a step with a row."""
        self._end_wait(state)
        count, again = request.num_scheduled_tokens, 0
        if phase != "rerun":
            before = request.num_computed_tokens - count
            again = max(0, min(self.farthest, request.num_computed_tokens) - before)
            self.farthest = max(self.farthest, request.num_computed_tokens)
        self.spans.append(Span(phase, state.step, state.step, state.start_s, state.end_s, count, again, num_new))

    def _wait(self, request: RequestState, state: TraceState) -> None:
        """Adds a step without a row, to the span of the steps before if it is of the same kind."""
        phase: Phase = "idle"
        if self.request_id in state.waiting:
            phase = "preempted" if request.status == "preempted" else "queued"
        elif request.ended and self.spans and self.spans[-1].phase in ("queued", "preempted"):
            phase = self.spans[-1].phase
        elif request.ended and not self.spans:
            phase = "queued"
        if self.spans and self.spans[-1].phase == phase:
            self.spans[-1] = replace(self.spans[-1], last_step=state.step, end_s=state.end_s)
            return
        if self.spans or phase != "queued":
            self._end_wait(state)
        start = state.start_s if self.spans or phase != "queued" else min(self.arrival_s, state.end_s)
        self.spans.append(Span(phase, state.step, state.step, start, state.end_s))

    def _end_wait(self, state: TraceState) -> None:
        """Waiting lasts until the next step begins, beyond the end of the last one that it saw."""
        if self.spans and self.spans[-1].phase in ("queued", "idle", "preempted"):
            end = max(self.spans[-1].start_s, state.start_s)
            self.spans[-1] = replace(self.spans[-1], end_s=end)
        elif not self.spans and self.is_new and self.arrival_s < state.start_s:
            self.spans.append(Span("queued", state.step, state.step - 1, self.arrival_s, state.start_s))

    def result(self) -> RequestTimes:
        known = bool(self.tokens) and not self.began_before
        return RequestTimes(
            request_id=self.request_id,
            parent_id=self.parent_id,
            num_prompt_tokens=self.num_prompt_tokens,
            arrival_step=self.arrival_step,
            arrival_s=self.arrival_s,
            first_scheduled_step=self.started[0] if self.started else None,
            first_scheduled_s=self.started[1] if self.started else None,
            token_steps=tuple(step for step, _ in self.tokens),
            first_token_s=self.tokens[0][1] if known else None,
            last_token_s=self.tokens[-1][1] if self.tokens else None,
            end_step=self.end_step,
            end_s=self.end_s,
            finish_reason=self.reason,
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
            spans=tuple(self.spans),
        )
