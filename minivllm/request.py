"""A request: its life in the engine, and what comes out of it.

Knows nothing of tensors or memory. Names are vLLM's.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from minivllm.detokenizer import Detokenizer
from minivllm.sampling_params import MAX_SEED, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(NamedTuple):
    """How likely a token was where it stands.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability, by the model's own logits.
        rank: its place among all tokens; 1 is the likeliest.
        top: the likeliest tokens and theirs, from the likeliest down.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RequestStatus(Enum):
    """Where a request stands. It ends in exactly one of the last four."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the request ended; None while it has not."""
        return FINISH_REASONS.get(self)


FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine: what it asks for, and how far it has come.

    There is no prefill phase and no decode phase: in every step the scheduler hands out tokens so that
    `num_computed_tokens` catches up with `num_tokens`; when it has, the next token is sampled.

    Attributes:
        request_id: its name; answers of one prompt beyond the first are named "ID/1", "ID/2", …
        prompt_token_ids: what was asked.
        params: how tokens are chosen.
        max_num_tokens: most tokens it can come to, prompt and output.
        seed: of its random stream.
        eos_token_ids: end-of-sequence tokens that end it.
        bad_words: the tokens of texts that must not appear.
        detokenizer: reads its tokens as they come, where somebody looks at its text before it ends.
        arrival_time: when it came, in seconds on the engine's clock.
        priority: under the priority policy, lower goes first.
        cache_salt: only requests with the same salt find each other's blocks in the prefix cache; None is one too.
        index: which answer of its prompt it is.
        num_samples: answers that its next logits row yields: n until they branch off, then 1.
        parent_id: the request that it branched off from.
        number: its place in the order of arrival.
        token_ids: prompt and output so far; `num_tokens` of them.
        num_computed_tokens: those of them whose keys and values are in the cache.
        block_keys: the keys of its full blocks in the prefix cache, as far as memory has computed them.
        num_cached_tokens: prompt tokens that were found in the cache instead of computed, when it was first admitted.
        num_found_tokens: tokens that were found when it was admitted last.
        num_preemptions: how often it lost its memory and had to start again.
        stop_reason: the stop string or the token of stop_token_ids that ended it; for an error, what went wrong.
        logprobs: of the tokens of its answer, if it asks for them.
        prompt_logprobs: of those of its prompt but the first, likewise.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_num_tokens: int
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    detokenizer: Detokenizer | None = None
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    index: int = 0
    num_samples: int = 1
    parent_id: str | None = None
    number: int = 0
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed_tokens: int = 0
    block_keys: list[Hashable] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_found_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether it computes all its tokens, whatever of them could be found: what is found has no logits."""
        return self.params.skip_reading_prefix_cache or self.params.prompt_logprobs is not None

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """All tokens that end it."""
        return self.eos_token_ids.union(self.params.stop_token_ids or ())

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.num_tokens - len(self.prompt_token_ids)

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Adds a token to the answer.

        Returns:
            Whether it ends there: at an end of sequence, a stop token or a stop string.
        """
        self.token_ids.append(token_id)
        self.num_tokens += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
        ended = False
        if self.num_output_tokens > self.params.min_tokens or not self.params.min_tokens:
            ended = token_id in self.eos_token_ids
            if not ended and token_id in (self.params.stop_token_ids or ()):
                ended, self.stop_reason = True, token_id
        if self.detokenizer is not None and (not ended or self.params.include_stop_str_in_output):
            stop = self.detokenizer.append(token_id)
            if stop is not None and not ended:
                ended, self.stop_reason = True, stop
        return ended

    def branch(self, index: int) -> "Request":
        """Answer `index` of the same prompt, of which everything is computed and nothing put out."""
        return Request(
            request_id=branch_id(self.request_id, index),
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            max_num_tokens=self.max_num_tokens,
            seed=(self.seed + index) & MAX_SEED,
            eos_token_ids=self.eos_token_ids,
            bad_words=self.bad_words,
            detokenizer=self.detokenizer and self.detokenizer.empty(),
            arrival_time=self.arrival_time,
            priority=self.priority,
            cache_salt=self.cache_salt,
            index=index,
            parent_id=self.request_id,
            number=self.number,
            num_computed_tokens=self.num_prompt_tokens,
            block_keys=list(self.block_keys),
            num_cached_tokens=self.num_cached_tokens,
            first_scheduled_time=self.first_scheduled_time,
        )


def branch_id(request_id: str, index: int) -> str:
    """The name of answer `index` of a request."""
    return f"{request_id}/{index}" if index else request_id


@dataclass(frozen=True)
class RequestMetrics:
    """When what happened to a request, in seconds on the engine's clock; None for what has not happened.

    Attributes:
        arrival_time: it was handed to the engine.
        first_scheduled_time: its first tokens were scheduled; until then it queued.
        first_token_time: the first token of any of its answers was there.
        finished_time: the last of its answers ended.
        num_preemptions: how often one of its answers lost its memory and was computed again.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


class Logprob(NamedTuple):
    """How likely a token was where it, or another one, stands.

    Attributes:
        logprob: natural logarithm of its probability, by the model's own logits.
        rank: its place among all tokens; 1 is the likeliest.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # of one position: the token that stands there first, then the likeliest


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, or what is new of it ("delta").

    Attributes:
        index: which of n it is.
        text: its text; a stop string or token that ended it is left out, unless include_stop_str_in_output.
        token_ids: its tokens, the one that ended it included.
        finish_reason: "stop" (end of sequence, a stop string or token), "length", "abort" or "error"; None while it
            goes on.
        stop_reason: the stop string, or the token of stop_token_ids, that ended it; None when the end-of-sequence token
            or the length did; for an error, what went wrong.
        logprobs: of its tokens, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all its tokens; None where logprobs were not asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for entry, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """What a request has come to.

    Attributes:
        request_id: its name.
        prompt: its text; None when it came as token ids.
        prompt_token_ids: its tokens.
        outputs: its answers, n of them once the first token is there; as "delta" those of which something is new.
        finished: whether all answers have ended.
        num_cached_tokens: prompt tokens that were found in the cache instead of computed.
        metrics: when what happened.
        prompt_logprobs: of the prompt's tokens, None for the first, if asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
