"""A request: how its tokens are chosen, its life in the engine, and what comes out of it.

Knows nothing of tensors or memory. Names are vLLM's. Parameters are checked here, at the door, so that no
later stage has to ask whether a value makes sense.
"""

import contextlib
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any, Literal

from minivllm.config import check_int

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Order of operations: temperature, min-p, top-k, then top-p among what is left, then one draw.

    Attributes:
        n: answers to make from one prompt, which is computed and stored once. Above 1 only with a temperature:
            greedy answers would all be the same.
        temperature: 0 is greedy (the likeliest token; the lowest id among equals); below 1e-5 too.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, in (0, 1]; the
            token that crosses the limit is kept. 1 keeps all.
        top_k: keep the k likeliest tokens; 0 and -1 keep all, as does any number from the vocabulary up.
        min_p: keep the tokens that are at least min_p times as likely as the likeliest, in [0, 1]; 0 keeps all.
        seed: the request's own random stream; answer i of n draws with seed + i. None lets the engine's seed
            decide.
        max_tokens: most tokens to generate; None means as many as the model's length and the memory allow. A
            request also ends ("length") when prompt and output together reach max_model_len.
        ignore_eos: go on after an end-of-sequence token.
        skip_reading_prefix_cache: compute the whole prompt, whatever of it is in the prefix cache.

    Raises:
        ValueError: a field has the wrong type or is out of range; the message names field and value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        check_int("n", self.n, minimum=1)
        check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0 (0 is greedy), got {self.temperature}")
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        check_int("top_k", self.top_k, minimum=-1)
        check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be at least 0 and at most 1, got {self.min_p}")
        if self.seed is not None:
            check_int("seed", self.seed, minimum=0, maximum=MAX_SEED)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, minimum=1)
        for name in ("ignore_eos", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("n", "top_k", "seed", "max_tokens"):  # numpy's integers overflow
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else int(value))
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.n > 1 and self.greedy:
            raise ValueError(f"n is {self.n} and the temperature {self.temperature}: greedy answers are all the same")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and no random number is drawn."""
        return self.temperature < 1e-5


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
        stop_token_ids: tokens that end it.
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
        stop_reason: for an error, what went wrong.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_num_tokens: int
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
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
        """Whether it computes all its tokens, whatever of them could be found."""
        return self.params.skip_reading_prefix_cache

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[len(self.prompt_token_ids) :]

    def branch(self, index: int) -> "Request":
        """Answer `index` of the same prompt, of which everything is computed and nothing put out."""
        return Request(
            request_id=branch_id(self.request_id, index),
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            max_num_tokens=self.max_num_tokens,
            seed=(self.seed + index) & MAX_SEED,
            stop_token_ids=self.stop_token_ids,
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


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of n it is.
        text: its text; special tokens are left out.
        token_ids: its tokens, the one that ended it included.
        finish_reason: "stop" (end of sequence), "length", "abort" or "error"; None while it goes on.
        stop_reason: None when the end-of-sequence token or the length ended it; for an error, what went wrong.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What a request has come to.

    Attributes:
        request_id: its name.
        prompt: its text; None when it came as token ids.
        prompt_token_ids: its tokens.
        outputs: its answers, n of them once the first token is there.
        finished: whether all answers have ended.
        num_cached_tokens: prompt tokens that were found in the cache instead of computed.
        metrics: when what happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


def check_number(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite real number (numpy's too, not a bool)."""
    with contextlib.suppress(OverflowError):  # an integer beyond all floats
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return
    raise ValueError(f"{name} must be a finite number, got {value!r}")
