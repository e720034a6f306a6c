"""What may stand as a prompt, and whether a model can take it. Knows nothing of requests or sampling."""

from typing import Any, NamedTuple, NotRequired, TypedDict

from minivllm.config import check_int, is_int


class TextPrompt(TypedDict):
    """A prompt as text, in a dict.

    `priority` counts under the priority policy; lower goes first. Only prompts with the same `cache_salt` (or all
    without one) find each other's blocks in the prefix cache: give each tenant one that the others can't know.
    """

    prompt: str
    priority: NotRequired[int]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, in a dict."""

    prompt_token_ids: list[int]
    priority: NotRequired[int]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt


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


class ParsedPrompt(NamedTuple):
    """A prompt taken apart; exactly one of text and token ids is given."""

    text: str | None
    token_ids: list[int] | None
    priority: int = 0
    cache_salt: str | None = None


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Takes a prompt of any form apart.

    Raises:
        ValueError: the prompt has another form than `Prompt` allows.
    """
    priority, salt = 0, None
    if isinstance(prompt, dict):
        rest = dict(prompt)
        priority, salt = rest.pop("priority", 0), rest.pop("cache_salt", None)
        check_int("priority", priority, minimum=-(2**63), maximum=2**63 - 1)
        if "cache_salt" in prompt and (not isinstance(salt, str) or not salt):
            raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}: leave it out to have none")
        kinds: dict[Any, Any] = {"prompt": str, "prompt_token_ids": (list, tuple)}
        if len(rest) != 1 or not all(isinstance(value, kinds.get(key, ())) for key, value in rest.items()):
            raise ValueError(
                "a prompt dict is {'prompt': text} or {'prompt_token_ids': list of ids}, with a 'priority' and a "
                f"'cache_salt' if wanted; got { {key: type(value).__name__ for key, value in prompt.items()} }"
            )
        [prompt] = rest.values()
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None, int(priority), salt)
    if isinstance(prompt, (list, tuple)):
        for position, token_id in enumerate(prompt):
            if not is_int(token_id):
                raise ValueError(f"token ids must be integers, got {token_id!r} at position {position}")
        return ParsedPrompt(None, [int(token_id) for token_id in prompt], int(priority), salt)
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
