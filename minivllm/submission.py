"""A prompt on its way through the engine: the requests that its answers are, and what comes out for the user."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedTokenizerBase

from minivllm.request import CompletionOutput, Request, RequestMetrics, RequestOutput, branch_id

OutputKind = Literal["cumulative", "final_only"]
OUTPUT_KINDS = ("cumulative", "final_only")


@dataclass(eq=False)
class Submission:
    """A checked prompt, and the requests that its answers are: one at first, n once they branch off.

    Attributes:
        prompt: its text; None when it came as token ids.
        request: the first of its answers.
        output_kind: "cumulative" puts out all tokens so far in every step, "final_only" the finished answer.
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
        """What it has come to so far; answers have no text without a tokenizer."""
        request, answers = self.request, [answer for _, answer in sorted(self.answers.items())]
        first_times = [a.first_token_time for a in answers if a.first_token_time is not None]
        end_times = [a.finished_time for a in answers if a.finished_time is not None]
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[_completion(answer, tokenizer) for answer in answers],
            finished=self.finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=min(first_times, default=None),
                finished_time=max(end_times) if self.finished else None,
                num_preemptions=sum(answer.num_preemptions for answer in answers),
            ),
        )


def _completion(answer: Request, tokenizer: PreTrainedTokenizerBase | None) -> CompletionOutput:
    token_ids = answer.output_token_ids
    text = "" if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=True))
    return CompletionOutput(answer.index, text, token_ids, answer.status.finish_reason, answer.stop_reason)
