"""LLM: the offline front. Text in, text out; everything between is the engine's.

It loads a model, builds an engine around it, and drives the engine's loop until its own requests are done. Any
number of threads may call `generate` at the same time: their requests run in the same batches.
"""

import contextlib
import copy
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from tqdm import tqdm

from minivllm.backends import fast_decoder
from minivllm.cache_size import KVCacheSize, choose_cache_size
from minivllm.config import EngineConfig
from minivllm.device import resolve_device, resolve_dtype
from minivllm.engine import LLMEngine, ModelLimits
from minivllm.kv_cache import ContiguousKVCache, KVCacheManager, PagedKVCache
from minivllm.model.hub import resolve_model
from minivllm.model.weights import load_config, load_decoder
from minivllm.prompts import Prompt, as_prompt_list
from minivllm.request import RequestOutput
from minivllm.runner import ModelRunner, profile_pass
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from minivllm.submission import OutputKind, Submission
from minivllm.tokenizer import Message, encode, load_tokenizer, read_eos_token_ids, render_chat
from minivllm.trace import Trace

LOADED_WITH_WEIGHTS = ("model", "tokenizer", "device", "dtype")
logger = logging.getLogger(__name__)


class LLM:
    """A model, its tokenizer, and an engine that runs prompts through them.

    Attributes:
        config: what it was built from.
        model: the decoder.
        tokenizer: transformers' tokenizer of the model.
        max_model_len: longest prompt + output, in tokens.
        kv_cache_size: how large the KV cache is, and why.
        engine: the engine, for those who want to step it themselves.
    """

    def __init__(self, model: str | os.PathLike[str] = "smollm2-135m", **fields: Any) -> None:
        """Loads a model.

        Args:
            model: an alias ("smollm2-135m"), a folder in Hugging Face format, or a hub id.
            **fields: any other field of `EngineConfig`.

        Raises:
            ValueError: a bad option, an unknown or broken model, a device that is not there, or a KV cache that
                can't hold one block, or not max_model_len tokens where that is given.
        """
        self.config = EngineConfig.from_fields(model=os.fspath(model), **fields)
        device = resolve_device(self.config.device)
        folder = resolve_model(self.config.model)
        dtype = resolve_dtype(self.config.dtype, device, load_config(folder).dtype)
        self.model = load_decoder(folder, device, dtype, self.config.max_model_len)
        self.model = fast_decoder(self.config.attention_backend, self.model)
        self.max_model_len = self.model.rotary.num_positions
        self.tokenizer = load_tokenizer(resolve_model(self.config.tokenizer) if self.config.tokenizer else folder)
        self.eos_token_ids = read_eos_token_ids(folder, self.tokenizer)
        self._build_engine()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues every prompt; all of them are checked before the first is run.

        Args:
            prompts: a string, a list of token ids, a dict with `prompt` or `prompt_token_ids` (and `priority`), or
                a list of any of these.
            sampling_params: one for all, or one per prompt; None means `SamplingParams()`.
            use_tqdm: show a bar of finished requests.

        Returns:
            One output per prompt, in the order of the prompts. One that failed on the way (its logits were not
            finite) has the finish reason "error" and says why in `stop_reason`; the others are unharmed.

        Raises:
            ValueError: an empty or too long prompt, text that is no Unicode, token ids out of the vocabulary,
                a wrong number of sampling params, or a request that the KV cache could never hold: prompt and
                max_tokens (up to max_model_len) need more slots than there are. With max_tokens=None an answer
                ends where the cache does.
        """
        return self._run(as_prompt_list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template.

        Args:
            messages: dicts with `role` and `content`, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            cache_salt: of all these conversations; None has none. See `Prompt`.

        Raises:
            ValueError: as in `generate`; no message; no chat template; a message of another form.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(
                "messages must be a list of at least one {'role': …, 'content': …}, or a list of such lists"
            )
        chats = [messages] if isinstance(messages[0], dict) else messages
        texts = [render_chat(self.tokenizer, chat) for chat in chats]
        ids = [encode(self.tokenizer, text, add_special_tokens=False) for text in texts]
        prompts: list[Prompt] = list(ids)
        if cache_salt is not None:
            prompts = [{"prompt_token_ids": tokens, "cache_salt": cache_salt} for tokens in ids]
        outputs = self._run(prompts, sampling_params, use_tqdm)
        return [replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Continues one prompt, and gives its text piece by piece as it becomes certain.

        Joined, the pieces are what `generate` returns. Who stops reading ends the request.

        Args:
            prompt: as in `generate`, one of them.
            sampling_params: None means `SamplingParams()`; with n=1.

        Raises:
            ValueError: as in `generate`, at once; n above 1.
            RuntimeError: while it is read: the request failed on the way.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        prompts = as_prompt_list(prompt)
        if len(prompts) != 1:
            raise ValueError(f"stream takes one prompt, got {len(prompts)}: use generate() for several")
        if isinstance(params, SamplingParams) and params.n != 1:
            raise ValueError(f"n is {params.n}, and stream gives the text of one answer: use generate()")
        [submission] = self._prepare(prompts, _one_per_prompt(params, 1), "delta")
        return self._stream(submission)

    def _stream(self, submission: Submission) -> Iterator[str]:
        name, outputs, ended = submission.request.request_id, deque[RequestOutput](), False

        def deliver(output: RequestOutput) -> None:
            outputs.append(output)
            if output.finished:
                self._finished[name] = output

        submission.deliver = deliver
        self.engine.submit(submission)
        try:
            while not ended:
                while outputs:
                    output = outputs.popleft()
                    ended = output.finished
                    for answer in output.outputs:
                        if answer.finish_reason == "error":
                            raise RuntimeError(f"the request failed: {answer.stop_reason}")
                        if answer.text:
                            yield answer.text
                if not ended:
                    self._step([name])
        finally:
            submission.deliver = _nobody
            if not ended:
                self.engine.abort_request(name)
                with contextlib.suppress(Exception):
                    self._step([name])
            self._finished.pop(name, None)

    def reconfigure(self, **fields: Any) -> "LLM":
        """A new `LLM` with some options changed, on the same weights and tokenizer, with a cache of its own.

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
        other._build_engine()
        return other

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Records every step of the engine while the block runs.

        Yields:
            The trace, which grows with every step.

        Raises:
            ValueError: it is recording already.
        """
        trace = self.engine.start_recording()
        try:
            yield trace
        finally:
            self.engine.stop_recording()

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, so that the next prompts are computed in full.

        Raises:
            ValueError: requests are running.
        """
        self.engine.reset_prefix_cache()

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take, over all layers."""
        return self.model.config.kv_values_per_token * self.model.dtype.itemsize

    def _build_engine(self) -> None:
        """The cache, its manager, a scheduler and a runner around the model."""
        # The check of what contradicts what runs again, on the length that is really used.
        config = replace(self.config, max_model_len=self.max_model_len)
        self.kv_cache_size = choose_cache_size(
            config, self.kv_bytes_per_token, self.model.device, lambda: profile_pass(self.model, config)
        )
        logger.info("KV cache: %s", self.kv_cache_size)
        manager = make_manager(config, self.kv_cache_size, self.max_model_len)
        if self.config.max_model_len is not None and not manager.can_ever_fit(self.max_model_len - 1):
            raise ValueError(
                f"max_model_len is {self.max_model_len} and the KV cache holds {self.kv_cache_size.num_slots} tokens "
                f"({self.kv_cache_size}): lower max_model_len, leave it None, or enlarge the cache"
            )
        self.engine = LLMEngine(
            config,
            make_scheduler(config, manager),
            ModelRunner(self.model, self.kv_cache_size.num_blocks, config.block_size, config.attention_backend),
            ModelLimits(self.model.config.vocab_size, self.max_model_len, self.eos_token_ids),
            self.tokenizer,
        )
        self._request_numbers, self._lock = count(), threading.Lock()
        self._finished: dict[str, RequestOutput] = {}  # of calls that are going on

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_per_prompt(SamplingParams() if sampling_params is None else sampling_params, len(prompts))
        submissions = self._prepare(prompts, params)
        names: list[str] = []  # of what was handed in
        try:
            for submission in submissions:
                self.engine.submit(submission)
                names.append(submission.request.request_id)
            with tqdm(total=len(names), desc="Requests", unit="req", disable=not use_tqdm) as bar:
                done = 0
                while done < len(names):
                    self._step(names)
                    done, before = sum(name in self._finished for name in names), done
                    if done > before:
                        bar.update(done - before)
            return [self._finished[name] for name in names]
        except BaseException:
            self.engine.abort_request(names)
            with contextlib.suppress(Exception):  # what went wrong first is what counts
                self._step(names)
            raise
        finally:
            for submission in submissions:
                submission.deliver = _nobody
                self._finished.pop(submission.request.request_id, None)

    def _step(self, names: Sequence[str]) -> None:
        """One step, which may finish other threads' requests too. What others handed to the engine is kept for them."""
        with self._lock:
            waiting = [name for name in names if name not in self._finished]
            if not waiting:  # another thread has done it meanwhile
                return
            lost = [name for name in waiting if not self.engine.is_unfinished(name) and name not in self._finished]
            assert not lost, f"the engine has lost {lost}"
            self.engine.hold_back(self.engine.step())

    def _deliver(self, output: RequestOutput) -> None:
        """Takes a finished output; the call that waits for it finds it by name."""
        self._finished[output.request_id] = output
        for answer in output.outputs:
            if answer.finish_reason == "error":
                logger.warning("request %s failed: %s", output.request_id, answer.stop_reason)

    def _prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], output_kind: OutputKind = "final_only"
    ) -> list[Submission]:
        """Checks all prompts, and gives them names that nobody uses."""
        free = (name for name in map("#{}".format, self._request_numbers) if not self.engine.is_unfinished(name))
        submissions = []
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                submissions.append(self.engine.prepare(next(free), prompt, p, output_kind=output_kind))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from None
            submissions[-1].deliver = self._deliver
        return submissions


def _nobody(output: RequestOutput) -> None:
    """Takes the outputs of a call that was given up."""


def make_manager(config: EngineConfig, size: KVCacheSize, max_model_len: int) -> KVCacheManager:
    """The memory manager that a config asks for."""
    if config.kv_cache == "paged":
        algorithm = config.prefix_caching_hash_algo if config.caches_prefixes else None
        return PagedKVCache(size.num_blocks, size.block_size, algorithm)
    longest = min(max_model_len, size.num_slots)
    return ContiguousKVCache(size.num_blocks, size.block_size, longest, config.reservation or "max")  # type: ignore


def make_scheduler(config: EngineConfig, manager: KVCacheManager) -> Scheduler:
    """The scheduler that a config asks for."""
    return {"continuous": ContinuousScheduler, "static": StaticScheduler}[config.batching](config, manager)


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
