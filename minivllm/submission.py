"""A prompt on its way through the engine: the requests that its answers are, and what comes out for the user."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedTokenizerBase

from minivllm.detokenizer import decode
from minivllm.request import (
    CompletionOutput,
    Logprob,
    Logprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestStatus,
    TokenLogprobs,
    branch_id,
)

OutputKind = Literal["cumulative", "delta", "final_only"]
OUTPUT_KINDS = ("cumulative", "delta", "final_only")


@dataclass(eq=False)
class Submission:
    """A checked prompt, and the requests that its answers are: one at first, n once they branch off.

    Attributes:
        prompt: its text; None when it came as token ids.
        request: the first of its answers.
        output_kind: "cumulative" puts out all tokens so far in every step, "delta" those that are new, "final_only" the
            finished answer.
        answers: index to answer.
        aborted: whether somebody has asked for its end.
        deliver: called with each output; None lets the step return them, to whoever makes it.
    """

    prompt: str | None
    request: Request
    output_kind: OutputKind
    answers: dict[int, Request] = field(default_factory=dict)
    aborted: bool = False
    deliver: Callable[[RequestOutput], None] | None = None
    _told: dict[int, int] = field(default_factory=dict)  # tokens of each answer that have been put out; -1 with its end

    def __post_init__(self) -> None:
        self.answers[0] = self.request

    @property
    def names(self) -> set[str]:
        """The names of all answers that it has, or will have."""
        return {branch_id(self.request.request_id, index) for index in range(self.request.params.n)}

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.status.finish_reason for answer in self.answers.values())

    def output(self, tokenizer: PreTrainedTokenizerBase | None) -> RequestOutput:
        """What it has come to so far, or since the last time; answers have no text without a tokenizer."""
        request, answers = self.request, [answer for _, answer in sorted(self.answers.items())]
        first, delta = not self._told, self.output_kind == "delta"
        if delta:
            answers = [answer for answer in answers if self._is_new(answer)]
        first_times = [a.first_token_time for a in self.answers.values() if a.first_token_time is not None]
        end_times = [a.finished_time for a in self.answers.values() if a.finished_time is not None]
        asked = request.params.prompt_logprobs is not None and (first or not delta)
        there = len(request.prompt_logprobs) == request.num_prompt_tokens - 1  # not where it ended before
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[self._completion(answer, tokenizer, delta) for answer in answers],
            finished=self.finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=min(first_times, default=None),
                finished_time=max(end_times) if self.finished else None,
                num_preemptions=sum(answer.num_preemptions for answer in self.answers.values()),
            ),
            prompt_logprobs=[None, *described(request.prompt_logprobs, tokenizer)] if asked and there else None,
        )

    def _is_new(self, answer: Request) -> bool:
        told = self._told.get(answer.index, 0)
        return told >= 0 and bool(answer.status.finish_reason or answer.num_output_tokens > told)

    def _completion(self, answer: Request, tokenizer: PreTrainedTokenizerBase | None, delta: bool) -> CompletionOutput:
        """An answer so far, or what is new of it."""
        token_ids, ended = answer.output_token_ids, bool(answer.status.finish_reason)
        begin = self._told.get(answer.index, 0) if delta else 0
        self._told[answer.index] = -1 if ended else len(token_ids)
        if answer.detokenizer is not None:
            if ended:
                answer.detokenizer.finish()
            text = answer.detokenizer.take()
            text = text if delta else answer.detokenizer.shown
        else:
            text = "" if tokenizer is None else _whole_text(answer, tokenizer)
        return CompletionOutput(
            index=answer.index,
            text=text,
            token_ids=token_ids[begin:],
            finish_reason=answer.status.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=None if answer.params.logprobs is None else described(answer.logprobs[begin:], tokenizer),
        )


def _whole_text(answer: Request, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an answer that nobody has read before; a token that ended it is left out unless it is wanted."""
    token_ids, params = answer.output_token_ids, answer.params
    if answer.status is RequestStatus.FINISHED_STOPPED and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    return decode(tokenizer, token_ids, params.skip_special_tokens)


def described(entries: Sequence[TokenLogprobs], tokenizer: PreTrainedTokenizerBase | None) -> list[Logprobs]:
    """Log-probabilities as they are put out, with the texts of the tokens."""

    def one(token_id: int, logprob: float, rank: int) -> tuple[int, Logprob]:
        return token_id, Logprob(logprob, rank, None if tokenizer is None else str(tokenizer.decode([token_id])))

    return [
        dict([one(e.token_id, e.logprob, e.rank), *(one(*pair, rank) for rank, pair in enumerate(e.top, start=1))])
        for e in entries
    ]
