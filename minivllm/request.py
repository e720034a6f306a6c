"""What goes into the engine and what comes out: sampling parameters, prompts, outputs.

Knows nothing of tensors or memory. Names and shapes are vLLM's. Everything is checked here, at the door,
so that no later stage has to ask whether a value makes sense.
"""

import contextlib
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict

from minivllm.config import check_int, is_int

FinishReason = Literal["stop", "length"]
MAX_SEED = 2**64 - 1


class TextPrompt(TypedDict):
    """A prompt as text, in a dict."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, in a dict."""

    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Order of operations: temperature, then top-k, then top-p among what is left, then one draw.

    Attributes:
        temperature: 0 is greedy (the likeliest token; the lowest id among equals); below 1e-5 too.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, in (0, 1]; the
            token that crosses the limit is kept. 1 keeps all.
        top_k: keep the k likeliest tokens; 0 and -1 keep all, as does any number from the vocabulary up.
        seed: the request's own random stream; None lets the engine's seed decide.
        max_tokens: most tokens to generate; None means as many as the model's length allows. A request
            also ends ("length") when prompt and output together reach max_model_len.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        ValueError: a field has the wrong type or is out of range; the message names field and value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0 (0 is greedy), got {self.temperature}")
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        check_int("top_k", self.top_k, minimum=-1)
        if self.seed is not None:
            check_int("seed", self.seed, minimum=0, maximum=MAX_SEED)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, minimum=1)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and no random number is drawn."""
        return self.temperature < 1e-5


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `stop_reason` is None when the end-of-sequence token or the length ended it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `prompt` is None when the request came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


def check_number(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite real number (numpy's too, not a bool)."""
    with contextlib.suppress(OverflowError):  # an integer beyond all floats
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return
    raise ValueError(f"{name} must be a finite number, got {value!r}")


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """Makes a list of prompts out of one prompt or many.

    A list of integers is one prompt of token ids; a list of anything else is a list of prompts.

    Raises:
        ValueError: not a string, a dict or a list, or an empty list.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(
            f"prompts must be a string, a list of token ids, or a list of either, got {type(prompts).__name__}"
        )
    if not prompts:
        raise ValueError("prompts is an empty list: give at least one prompt of at least one token")
    if all(is_int(item) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def split_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Splits a prompt into (text, token ids); exactly one of the two is given.

    Raises:
        ValueError: the prompt has another form than `Prompt` allows.
    """
    if isinstance(prompt, dict):
        kinds: dict[Any, Any] = {"prompt": str, "prompt_token_ids": (list, tuple)}
        if len(prompt) != 1 or not all(isinstance(value, kinds.get(key, ())) for key, value in prompt.items()):
            raise ValueError(
                "a prompt dict is {'prompt': text} or {'prompt_token_ids': list of ids}, "
                f"got { {key: type(value).__name__ for key, value in prompt.items()} }"
            )
        [prompt] = prompt.values()
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, (list, tuple)):
        for position, token_id in enumerate(prompt):
            if not is_int(token_id):
                raise ValueError(f"token ids must be integers, got {token_id!r} at position {position}")
        return None, [int(token_id) for token_id in prompt]
    raise ValueError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__}")


def check_prompt(token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    """Raises ValueError for a prompt that the model can't take: empty, too long, or with unknown ids."""
    if not token_ids:
        raise ValueError("the prompt is empty (0 tokens): give at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens and max_model_len is {max_model_len}: no room is left "
            f"for an output token; shorten it to at most {max_model_len - 1} tokens"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(
            f"token id {bad} at position {token_ids.index(bad)} is out of the vocabulary of {vocab_size} "
            f"(0 to {vocab_size - 1})"
        )
