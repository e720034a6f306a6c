"""LLM: the offline front. Text in, text out.

For now it runs stage 2 of the lessons, padded static batches on slabs; its signatures are those of the
finished engine. A slab is as long as its batch needs, and a batch is as large as `max_num_seqs` and the
memory for keys and values allow.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minivllm.config import GIB, EngineConfig
from minivllm.device import resolve_device, resolve_dtype
from minivllm.lessons.naive import SlabCache, generate
from minivllm.model.hub import resolve_model
from minivllm.model.weights import load_config, load_decoder
from minivllm.request import (
    CompletionOutput,
    FinishReason,
    Prompt,
    RequestOutput,
    SamplingParams,
    as_prompt_list,
    check_prompt,
    split_prompt,
)
from minivllm.sampler import Sampler, derive_seed
from minivllm.tokenizer import Message, encode, load_tokenizer, read_eos_token_ids, render_chat

LOADED_WITH_WEIGHTS = ("model", "tokenizer", "device", "dtype")


@dataclass(frozen=True)
class _Job:
    """A checked request on its way through `generate`."""

    number: int
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int


class LLM:
    """A model, its tokenizer, and a way to run prompts through them.

    Attributes:
        config: what it was built from.
        model: the decoder.
        tokenizer: transformers' tokenizer of the model.
        max_model_len: longest prompt + output, in tokens.
    """

    def __init__(self, model: str | os.PathLike[str] = "smollm2-135m", **fields: Any) -> None:
        """Loads a model.

        Args:
            model: an alias ("smollm2-135m"), a folder in Hugging Face format, or a hub id.
            **fields: any other field of `EngineConfig`.

        Raises:
            ValueError: a bad option, an unknown or broken model, or a device that is not there.
        """
        self.config = EngineConfig.from_fields(model=os.fspath(model), **fields)
        device = resolve_device(self.config.device)
        folder = resolve_model(self.config.model)
        dtype = resolve_dtype(self.config.dtype, device, load_config(folder).dtype)
        self.model = load_decoder(folder, device, dtype, self.config.max_model_len)
        self.max_model_len = self.model.rotary.num_positions
        self.tokenizer = load_tokenizer(resolve_model(self.config.tokenizer) if self.config.tokenizer else folder)
        self.eos_token_ids = read_eos_token_ids(folder, self.tokenizer)
        self._request_numbers, self._unseeded_numbers = count(), count()
        self._sampler = Sampler()
        self._check_memory()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues every prompt; all of them are checked before the first is run.

        Args:
            prompts: a string, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a list
                of any of these.
            sampling_params: one for all, or one per prompt; None means `SamplingParams()`.
            use_tqdm: show a bar of finished requests.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: an empty or too long prompt, text that is no Unicode, token ids out of the vocabulary,
                a wrong number of sampling params, or a request that the memory could never hold: prompt and
                max_tokens (up to max_model_len) need more than kv_cache_memory_bytes. With max_tokens=None an
                answer ends where the memory does. Also if the model's logits are not finite.
        """
        prompt_list = as_prompt_list(prompts)
        texts_and_ids = [split_prompt(prompt) for prompt in prompt_list]
        return self._run(
            [(text, encode(self.tokenizer, text or "") if ids is None else ids) for text, ids in texts_and_ids],
            sampling_params,
            use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template.

        Args:
            messages: dicts with `role` and `content`, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.

        Raises:
            ValueError: as in `generate`; no message; no chat template; a message of another form.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(
                "messages must be a list of at least one {'role': …, 'content': …}, or a list of such lists"
            )
        chats = [messages] if isinstance(messages[0], dict) else messages
        prompts = []
        for chat in chats:
            text = render_chat(self.tokenizer, chat)
            prompts.append((text, encode(self.tokenizer, text, add_special_tokens=False)))
        return self._run(prompts, sampling_params, use_tqdm)

    def reconfigure(self, **fields: Any) -> "LLM":
        """A new `LLM` with some options changed, on the same weights and tokenizer.

        Raises:
            ValueError: a bad option, or one that would need other weights (model, tokenizer, device,
                dtype, or a max_model_len beyond what was loaded).
        """
        other = copy.copy(self)
        other.config = EngineConfig.from_fields(**{**vars(self.config), **fields})
        fixed = [name for name in LOADED_WITH_WEIGHTS if getattr(other.config, name) != getattr(self.config, name)]
        rope_type = self.model.config.hf_config.rope_parameters.get("rope_type")
        if rope_type == "longrope" and other.config.max_model_len != self.config.max_model_len:
            fixed.append("max_model_len (with longrope it decides the rotation)")
        if fixed:
            raise ValueError(f"{', '.join(fixed)} can't change on loaded weights: build a new LLM")
        loaded = self.model.rotary.num_positions
        other.max_model_len = other.config.max_model_len or loaded
        if other.max_model_len > loaded:
            raise ValueError(f"max_model_len is {other.max_model_len}, but the model was loaded with {loaded}")
        other._request_numbers, other._unseeded_numbers = count(), count()
        other._check_memory()
        return other

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take, over all layers."""
        return self.model.config.kv_values_per_token * self.model.dtype.itemsize

    @property
    def kv_cache_bytes(self) -> int:
        """Memory for keys and values: as configured, else 1 GiB on a CPU and half of what a GPU has free."""
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        if self.model.device.type == "cpu":
            return GIB
        return torch.cuda.mem_get_info(self.model.device)[0] // 2

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_per_prompt(SamplingParams() if sampling_params is None else sampling_params, len(prompts))
        for index, ((_, ids), p) in enumerate(zip(prompts, params, strict=True)):
            self._check(index, ids, p.max_tokens)
        jobs = [self._job(text, ids, p) for (text, ids), p in zip(prompts, params, strict=True)]
        outputs = []
        with tqdm(total=len(jobs), desc="Requests", unit="req", disable=not use_tqdm) as bar:
            for batch in self._batches(jobs):
                outputs += self._run_batch(batch, bar)
        return outputs

    def _check_memory(self) -> None:
        if self.kv_cache_bytes < self.kv_bytes_per_token:
            raise ValueError(
                f"kv_cache_memory_bytes is {self.kv_cache_bytes}, and the keys and values of one token take "
                f"{self.kv_bytes_per_token}"
            )

    def _check(self, index: int, ids: list[int], max_tokens: int | None) -> None:
        try:
            check_prompt(ids, self.model.config.vocab_size, self.max_model_len)
            slots = min(self.max_model_len, len(ids) + (max_tokens or 1)) - 1
            needed, available = slots * self.kv_bytes_per_token, self.kv_cache_bytes
            if needed > available:
                raise ValueError(
                    f"its {len(ids)} tokens and max_tokens {max_tokens} need {needed} bytes of keys and values and "
                    f"there are {available}: raise kv_cache_memory_bytes or lower max_tokens"
                )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None

    def _job(self, text: str | None, ids: list[int], params: SamplingParams) -> _Job:
        number = next(self._request_numbers)
        fitting = self.kv_cache_bytes // self.kv_bytes_per_token - len(ids) + 1
        room = min(self.max_model_len - len(ids), fitting)
        seed = params.seed
        if seed is None:
            seed = 0 if params.greedy else derive_seed(self.config.seed, next(self._unseeded_numbers))
        return _Job(number, text, ids, params, min(params.max_tokens or room, room), seed)

    def _batches(self, jobs: list[_Job]) -> Iterator[list[_Job]]:
        """Cuts the requests, in order, into batches whose slabs fit into the memory."""
        batch: list[_Job] = []
        for job in jobs:
            grown = [*batch, job]
            too_large = len(grown) * _slab_len(grown) * self.kv_bytes_per_token > self.kv_cache_bytes
            if batch and (too_large or len(grown) > self.config.max_num_seqs):
                yield batch
                grown = [job]
            batch = grown
        yield batch

    def _run_batch(self, batch: list[_Job], bar: tqdm) -> list[RequestOutput]:
        params, seeds, steps = [job.params for job in batch], [job.seed for job in batch], count()

        def pick(logits: Tensor) -> Tensor:
            return self._sampler(logits, params, seeds, [next(steps)] * len(batch))

        def on_token(row: int, token: int, reason: FinishReason | None) -> None:
            if reason:
                bar.update()

        result = generate(
            self.model,
            [job.token_ids for job in batch],
            [job.max_tokens for job in batch],
            SlabCache(_slab_len(batch)),
            pick=pick,
            stop_token_ids=[frozenset() if p.ignore_eos else self.eos_token_ids for p in params],
            on_token=on_token,
        )
        outputs = []
        for job, ids, reason in zip(batch, result.token_ids, result.finish_reasons, strict=True):
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            completion = CompletionOutput(0, text, ids, reason)
            outputs.append(RequestOutput(str(job.number), job.prompt, job.token_ids, [completion], True))
        return outputs


def _slab_len(batch: Sequence[_Job]) -> int:
    """Columns a batch needs: the longest prompt, and every later token but the last, which is never read."""
    return max(len(job.token_ids) for job in batch) + max(job.max_tokens for job in batch) - 1


def _one_per_prompt(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts and {len(params)} sampling params: give one or as many")
    for item in params:
        if not isinstance(item, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(item).__name__}")
    return list(params)
