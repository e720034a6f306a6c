"""Text to token ids, by transformers' tokenizers: loading one, encoding, chat templates, end-of-sequence ids.

Knows nothing of requests or the model. transformers raises a dozen unrelated types for broken files; here
each becomes a ValueError that names the file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from minivllm.config import is_int
from minivllm.model.weights import load_config

Message = dict[str, str]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Reads the tokenizer of a model folder.

    Raises:
        ValueError: there is none, or it can't be read.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a broken file raises one of a dozen unrelated types
        raise ValueError(f"{folder} has no tokenizer that can be read: {error!r}") from error


def read_eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end a text: those of generation_config.json, the config and the tokenizer.

    Raises:
        ValueError: generation_config.json can't be read, or an id is no integer.
    """
    sources: list[Any] = [load_config(folder).eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        try:
            sources.append(GenerationConfig.from_pretrained(folder).eos_token_id)
        except Exception as error:  # a broken file raises one of several unrelated types
            raise ValueError(f"{folder / 'generation_config.json'} can't be read: {error!r}") from error
    found = {one for source in sources for one in (source if isinstance(source, list) else [source])} - {None}
    if not all(is_int(one) for one in found):
        raise ValueError(f"{folder} names end-of-sequence tokens that are no ids: {sorted(map(str, found))}")
    return frozenset(found)


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """A conversation as the text the model was trained on, up to where the assistant's answer begins.

    Raises:
        ValueError: no message, a message of another form, or a tokenizer without a chat template.
    """
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"a message is a dict with role and content, both strings, got {message!r}")
    if not messages:
        raise ValueError("a conversation is empty: give at least one {'role': …, 'content': …}")
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template: use generate() with a prompt of your own")
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)  # type: ignore


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text.

    Raises:
        ValueError: the text holds lone surrogates, which are no valid Unicode.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise ValueError(f"the text {text[:40]!r} is no valid Unicode and can't be tokenised") from error
