"""What a client may ask for: OpenAI's fields and vLLM's, and what becomes of them.

A field that the engine has nothing for is refused by name as soon as it asks for something; one that nobody has heard
of is tolerated, as vLLM does, and logged once.
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from minivllm.sampling_params import SamplingParams
from minivllm.server.errors import APIError

logger = logging.getLogger(__name__)
MOST_LOGPROBS = 20
TokenIds = list[int]
# Without effect on the answer.
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
# What asks for nothing: a field that is not supported may have these.
NOTHING: tuple[Any, ...] = (None, False, [], {}, "", 0, 1, 1.0, "none", "auto", {"type": "text"})
UNSUPPORTED = (
    {
        "suffix",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "response_format",
        "truncate_prompt_tokens",
    }
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "logits_processors"}
    | {"tools", "tool_choice", "functions", "function_call", "audio", "modalities", "prediction", "web_search_options"}
    | {"reasoning_effort", "chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs"}
    | {"continue_final_message", "kv_transfer_params", "vllm_xargs", "return_tokens_as_token_ids"}
    | {"tool_calls", "tool_call_id", "return_token_strs"}
    | {"spaces_between_special_tokens", "prompt_embeds", "lora_request", "verbosity"}
)
_known_unknown: set[str] = set()


class Strict(BaseModel):
    """A body whose types are what they say: no text for a number, and no number for a truth."""

    model_config = ConfigDict(strict=True, extra="allow")

    def check_extra(self) -> None:
        """Refuses what is not supported, and logs what is not known, here and in what this holds."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Strict):
                    part.check_extra()
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name in UNSUPPORTED:
                if not any(type(value) is type(none) and value == none for none in NOTHING):
                    raise APIError(f"{name} is not supported by this server: leave it out", name)
            elif name not in IGNORED and name not in _known_unknown and len(_known_unknown) < 100:
                _known_unknown.add(name)
                logger.warning("a request has the field %r, which is not known here and is ignored", name[:100])


class StreamOptions(Strict):
    """Which chunks of a stream have usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Strict):
    """What both routes share: the fields of `SamplingParams`, and how the answer is sent. null is as good as nothing:
    the server's default counts, and where it has none, that of `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None

    SAME: ClassVar[tuple[str, ...]] = (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("allowed_token_ids", "bad_words", "skip_special_tokens"),
    )

    @property
    def num_answers(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    def check(self) -> None:
        """Raises APIError for what fits together badly."""
        self.check_extra()
        if self.stream_options is not None and not self.stream:
            raise APIError("stream_options is only allowed with stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise APIError("prompt_logprobs is not available in a stream: leave stream out", "prompt_logprobs")
        if self.cache_salt == "":
            raise APIError("cache_salt must be a non-empty string: leave it out to have none", "cache_salt")

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's; defaults are the server's own.

        Raises:
            APIError: a value is out of range; names the field.
        """
        raise NotImplementedError

    def sampling_params(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """What the routes' `params` share.

        Raises:
            APIError: a value is out of range; names the field.
        """
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                field = "top_logprobs" if name == "logprobs" and isinstance(self, ChatCompletionRequest) else name
                raise APIError(f"{field} must be at least 0 and at most {MOST_LOGPROBS}, got {count}", field)
        biases: dict[Any, float] = {}
        for text, bias in (self.logit_bias or {}).items():
            if not text.isascii() or not text.isdigit() or len(text) > 18:
                raise APIError(f"the keys of logit_bias are token ids, got {text[:40]!r}", "logit_bias")
            biases[int(text)] = bias
        given = {name: getattr(self, name) for name in self.SAME if getattr(self, name) is not None}
        try:
            return SamplingParams(
                **{**defaults, **given},
                stop=None if self.stop is None or self.stop == [] else self.stop,
                logit_bias=biases or None,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        except ValueError as error:
            raise APIError(str(error), field_of(str(error), type(self))) from None


def field_of(message: str, kind: type[BaseModel], otherwise: str | None = None) -> str | None:
    """The field that a message of the engine's is about: the first one that it names."""
    for word in message.replace(":", " ").replace(",", " ").split():
        if word in kind.model_fields:
            return word
    return otherwise


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | TokenIds]:
        """One or more."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else list(prompt)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """As of `Generation`; an echo's logprobs are the prompt's too."""
        asked = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return self.sampling_params(defaults, self.max_tokens, self.logprobs, asked)


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """Its text in one piece, as vLLM joins it."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatCompletionRequest(Generation):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool | None = False
    add_generation_prompt: bool = True
    add_special_tokens: bool = False

    def check(self) -> None:
        super().check()
        if self.echo:
            raise APIError("echo is not supported for chats: leave it out", "echo")
        if self.top_logprobs and not self.logprobs:
            raise APIError("top_logprobs needs logprobs: true", "top_logprobs")
        if not self.add_generation_prompt:
            raise APIError("add_generation_prompt: false is not supported: leave it out", "add_generation_prompt")

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """As of `Generation`."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(defaults, max_tokens, logprobs, self.prompt_logprobs)


class TokenizeRequest(Strict):
    """The body of /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
