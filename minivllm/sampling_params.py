"""SamplingParams: how the tokens of one request are chosen, and when it ends.

Names and meanings are vLLM's. Values are checked here, at the door, so that no later stage has to ask whether one makes
sense; what depends on the model (token ids, texts that must be tokenised) is checked by the engine, also at its door.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from minivllm.config import check_int

MAX_SEED = 2**64 - 1
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Order of operations, as in vLLM: `logprobs` are taken from the model's own logits. Then, in float32:
    `allowed_token_ids`, `bad_words`, `min_tokens` and `logit_bias`; then the penalties, repetition first, frequency and
    presence after it. A greedy request takes the largest of these logits. Every other one goes on: temperature,
    `min_p`, `top_k`, then `top_p` among what is left, then one draw.

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
        presence_penalty: taken off the logit of every token that the answer has, in [-2, 2].
        frequency_penalty: taken off it once for each time that the answer has it, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of all tokens that the prompt or the answer
            has (Keskar et al., "CTRL", 2019), in [1e-6, 1e6]; 1 changes nothing.
        max_tokens: most tokens to generate; None means as many as the model's length and the memory allow. A
            request also ends ("length") when prompt and output together reach max_model_len.
        min_tokens: fewest tokens to generate: before, no token is drawn that would end the answer, and stop strings
            are not looked for.
        stop: a text, or several, that end the answer where the first of them begins.
        stop_token_ids: tokens that end the answer.
        include_stop_str_in_output: keep what ended the answer, a stop string or one of stop_token_ids, in its text.
        ignore_eos: go on after an end-of-sequence token.
        logit_bias: token id to what is added to its logit, in [-100, 100].
        allowed_token_ids: the only tokens that may be drawn; None allows all.
        bad_words: texts that never appear: the token that would complete one is not drawn.
        logprobs: for every token of the answer, its log-probability and that of so many likeliest; 0 gives only its
            own, -1 all of the vocabulary, None nothing.
        prompt_logprobs: the same for every token of the prompt but the first, which is computed in full for it.
        skip_special_tokens: leave special tokens out of the text.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("n", 1, None),
            ("top_k", -1, None),
            ("seed", 0, MAX_SEED),
            ("max_tokens", 1, None),
            ("min_tokens", 0, None),
            ("logprobs", -1, None),
            ("prompt_logprobs", -1, None),
        ):
            value = getattr(self, name)
            if value is not None or name in ("n", "top_k", "min_tokens"):
                check_int(name, value, minimum, maximum)
        check_range("temperature", self.temperature, 0, note=" (0 is greedy)")
        check_range("top_p", self.top_p, 0, 1, above=True)
        check_range("min_p", self.min_p, 0, 1)
        check_range("presence_penalty", self.presence_penalty, -2, 2)
        check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        check_range("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        for field in fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                raise ValueError(f"{field.name} must be True or False, got {getattr(self, field.name)!r}")
        self._check_lists()
        for name in INTEGERS:  # numpy's integers overflow
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else int(value))
        for name in NUMBERS:
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.n > 1 and self.greedy:
            raise ValueError(f"n is {self.n} and the temperature {self.temperature}: greedy answers are all the same")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: lower min_tokens")

    def _check_lists(self) -> None:
        """Checks texts and token ids, and makes tuples of them."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, texts in (("stop", stop), ("bad_words", self.bad_words)):
            checked = check_list(name, texts, "texts")
            for text in checked:
                if not isinstance(text, str) or not text:
                    raise ValueError(f"{name} must hold texts that are not empty, got {text!r}")
            object.__setattr__(self, name, tuple(dict.fromkeys(checked)))
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            ids = check_list(name, given, "token ids")
            for token_id in ids:
                check_int(name, token_id, minimum=0)
            if name == "allowed_token_ids" and given is not None and not ids:
                raise ValueError("allowed_token_ids is empty: no token could be drawn; leave it None to allow all")
            if given is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(map(int, ids))))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must be a dict of token id to number, got {self.logit_bias!r}")
        for token_id, bias in (self.logit_bias or {}).items():
            check_int("a token id in logit_bias", token_id, minimum=0)
            check_range(f"logit_bias of token {token_id}", bias, -100, 100)
        biases = {int(token_id): float(bias) for token_id, bias in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", biases)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and no random number is drawn."""
        return self.temperature < 1e-5

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def token_ids(self) -> list[tuple[str, int]]:
        """All token ids that are named: pairs (field, id)."""
        named = (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids))
        pairs = [(name, token_id) for name, ids in named for token_id in ids or ()]
        return pairs + [("logit_bias", token_id) for token_id in self.logit_bias or {}]


def check_list(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """Raises ValueError unless `value` is a list or a tuple; None is an empty one."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list of {what}, got {value!r}")
    return tuple(value)


def check_range(
    name: str, value: Any, minimum: float, maximum: float | None = None, above: bool = False, note: str = ""
) -> None:
    """Raises ValueError unless `value` is a finite number in [minimum, maximum], or above the minimum."""
    check_number(name, value)
    if value < minimum or (above and value == minimum) or (maximum is not None and value > maximum):
        lower = f"above {minimum}" if above else f"at least {minimum}"
        upper = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(f"{name} must be {lower}{upper}{note}, got {value}")


def check_number(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite real number (numpy's too, not a bool)."""
    with contextlib.suppress(OverflowError):  # an integer beyond all floats
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return
    raise ValueError(f"{name} must be a finite number, got {value!r}")
