"""The naive stages: how text was generated before paged memory, each as short as it can be.

- stage 0, `no_cache_steps`: the whole text runs through the model for every token;
- stage 1, `cached_steps` on a `ConcatCache`: keys and values are kept, in tensors that grow by copying;
- stage 2, `cached_steps` on a `SlabCache`: one slab per request, reserved for the longest possible text.

All three work on one prompt or on a padded batch of many, and count what they do in a `Work`, so that
waste is a number and not a feeling. `generate` runs any of them until the last row has ended.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.config import check_int
from minivllm.model.attention import dense_attention
from minivllm.model.decoder import Decoder
from minivllm.prompts import check_prompt
from minivllm.request import FinishReason

PickTokens = Callable[[Tensor], Tensor]
OnToken = Callable[[int, int, FinishReason | None], None]


@dataclass
class Work:
    """What a generation cost, in counts that are the same on every machine.

    Attributes:
        steps: forward passes.
        tokens_computed: tokens run through the model, padding and ended rows included.
        bytes_copied: old keys and values moved to another place.
        bytes_reserved: memory set aside for keys and values, at its largest.
        bytes_used: keys and values of prompts and answers still being written, at their largest.
    """

    steps: int = 0
    tokens_computed: int = 0
    bytes_copied: int = 0
    bytes_reserved: int = 0
    bytes_used: int = 0


@dataclass(frozen=True)
class Generation:
    """The tokens that each row put out, why it ended, and what all of it cost."""

    token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    work: Work


def no_cache_steps(model: Decoder, prompts: Sequence[Sequence[int]], pick: PickTokens, work: Work) -> Iterator[Tensor]:
    """Stage 0. Yields the next token of every row, `[batch]`, for as long as it is asked.

    Keys and values of the whole text are computed for every token, used once, and thrown away.
    """
    batch = PaddedBatch.of(prompts, model.device)
    input_ids, positions = batch.input_ids, batch.positions

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_attention(q, k, v, batch.num_padding, model.config.sliding_window[layer])

    while True:
        hidden = model(input_ids, positions, attend)
        tokens = pick(model.compute_logits(hidden[:, -1]))
        work.steps += 1
        work.tokens_computed += input_ids.numel()
        yield tokens
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
        positions = torch.cat([positions, next_positions(model, positions)], dim=1)


def cached_steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    pick: PickTokens,
    work: Work,
    cache: "ConcatCache | SlabCache",
) -> Iterator[Tensor]:
    """Stages 1 and 2. Yields the next token of every row, `[batch]`, for as long as it is asked.

    The first pass runs the prompts (prefill); every pass after it runs one token per row (decode).
    """
    batch = PaddedBatch.of(prompts, model.device)
    cache.start(model, batch.num_padding, work)
    input_ids, positions = batch.input_ids, batch.positions
    while True:
        hidden = model(input_ids, positions, cache.attend)
        tokens = pick(model.compute_logits(hidden[:, -1]))
        work.steps += 1
        work.tokens_computed += input_ids.numel()
        yield tokens
        input_ids, positions = tokens[:, None], next_positions(model, positions)


class ConcatCache:
    """Stage 1: a pair of tensors per layer, replaced by a longer pair in every step."""

    def start(self, model: Decoder, num_padding: tuple[int, ...], work: Work) -> None:
        """Begins empty."""
        self.windows, self.num_padding, self.work = model.config.sliding_window, num_padding, work
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends, which copies everything that was there, and attends over all of it."""
        if layer in self.keys:
            self.work.bytes_copied += num_bytes(self.keys[layer], self.values[layer])
            k = torch.cat([self.keys[layer], k], dim=1)
            v = torch.cat([self.values[layer], v], dim=1)
        self.keys[layer], self.values[layer] = k, v
        held = num_bytes(*self.keys.values(), *self.values.values())
        self.work.bytes_reserved = max(self.work.bytes_reserved, held)
        return dense_attention(q, k, v, self.num_padding, self.windows[layer])


class SlabCache:
    """Stage 2: per request one contiguous slab with room for `max_model_len` tokens, reserved at once."""

    def __init__(self, max_model_len: int) -> None:
        check_int("max_model_len", max_model_len, minimum=1)
        self.max_model_len = max_model_len

    def start(self, model: Decoder, num_padding: tuple[int, ...], work: Work) -> None:
        """Reserves the slabs; the first token will stand in column 0."""
        c = model.config
        shape = (c.num_layers, len(num_padding), self.max_model_len, c.num_kv_heads, c.head_dim)
        self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.values = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.windows, self.num_padding, self.length = c.sliding_window, num_padding, 0
        work.bytes_reserved = num_bytes(self.keys, self.values)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes into the next free columns, which copies nothing, and attends over the columns so far."""
        end = self.length + k.shape[1]
        if end > self.max_model_len:
            raise ValueError(f"the batch needs column {end} of a slab of {self.max_model_len}: reserve longer slabs")
        self.keys[layer, :, self.length : end] = k
        self.values[layer, :, self.length : end] = v
        if layer == len(self.keys) - 1:
            self.length = end
        keys, values = self.keys[layer, :, :end], self.values[layer, :, :end]
        return dense_attention(q, keys, values, self.num_padding, self.windows[layer])


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts side by side, the newest token of each in the last column.

    Attributes:
        input_ids: `[batch, longest]`; padding repeats the row's first token, and no real token sees it.
        positions: `[batch, longest]`; the first real token of a row has position 0 (padding too).
        num_padding: padding columns at the left of each row.
    """

    input_ids: Tensor
    positions: Tensor
    num_padding: tuple[int, ...]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> "PaddedBatch":
        """Pads prompts on the left."""
        longest = max(len(prompt) for prompt in prompts)
        rows = [[prompt[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        num_padding = tuple(longest - len(prompt) for prompt in prompts)
        positions = torch.arange(longest, device=device) - torch.tensor(num_padding, device=device)[:, None]
        return cls(torch.tensor(rows, device=device), positions.clamp(min=0), num_padding)


def next_positions(model: Decoder, positions: Tensor) -> Tensor:
    """Positions after the last column, `[batch, 1]`; rows that ended long ago stay within the model's length."""
    return (positions[:, -1:] + 1).clamp(max=model.rotary.num_positions - 1)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    cache: ConcatCache | SlabCache | None = None,
    *,
    pick: PickTokens | None = None,
    stop_token_ids: Sequence[Collection[int]] | None = None,
    on_token: OnToken | None = None,
) -> Generation:
    """Runs a static batch: until its last row has ended.

    A row that has ended keeps its place and goes on being computed, as padded batches did; what it puts
    out from then on is dropped.

    Args:
        model: the decoder.
        prompts: token ids, one list per row.
        max_tokens: most tokens to put out, for all rows or one number per row.
        cache: None is stage 0, a `ConcatCache` stage 1, a `SlabCache` stage 2.
        pick: logits `[batch, vocab_size]` to tokens `[batch]`; None is greedy.
        stop_token_ids: per row, the tokens that end it; None ends rows by length only.
        on_token: called with (row, token, finish reason or None) for every token put out.

    Raises:
        ValueError: no prompt, an empty one, one that comes with max_tokens to more than the model's length,
            ids out of the vocabulary, max_tokens below 1, or a slab too short for the batch.
    """
    limits = check_batch(model, prompts, max_tokens)
    stops = [()] * len(prompts) if stop_token_ids is None else stop_token_ids
    if len(stops) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(stops)} collections of stop tokens")
    work, outputs = Work(), [list[int]() for _ in prompts]
    reasons: list[FinishReason | None] = [None] * len(prompts)
    if cache is None:
        steps = no_cache_steps(model, prompts, pick or greedy, work)
    else:
        steps = cached_steps(model, prompts, pick or greedy, work, cache)
    for tokens in steps:
        for row, token in enumerate(tokens.tolist()):
            if reasons[row] is None:
                outputs[row].append(token)
                if token in stops[row]:
                    reasons[row] = "stop"
                elif len(outputs[row]) == limits[row]:
                    reasons[row] = "length"
                if on_token:
                    on_token(row, token, reasons[row])
        if None not in reasons:
            break
    if cache is not None:
        bytes_per_token = model.config.kv_values_per_token * model.dtype.itemsize
        work.bytes_used = bytes_per_token * peak_tokens([len(p) for p in prompts], [len(o) for o in outputs])
    return Generation(outputs, [reason for reason in reasons if reason], work)


def check_batch(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int]) -> list[int]:
    """Checks a batch; returns the number of tokens to put out for each prompt.

    Raises:
        ValueError: no prompt, an empty one, one that comes with max_tokens to more than the model's length,
            ids out of the vocabulary, or max_tokens that are not one number of at least 1 for each.
    """
    limits = list(max_tokens) if isinstance(max_tokens, Sequence) else [max_tokens] * len(prompts)
    if not prompts or len(prompts) != len(limits):
        raise ValueError(f"give at least one prompt and max_tokens for each: got {len(prompts)} and {len(limits)}")
    longest = model.rotary.num_positions
    for prompt, limit in zip(prompts, limits, strict=True):
        check_prompt(list(prompt), model.config.vocab_size, longest)
        check_int("max_tokens", limit, minimum=1)
        if len(prompt) + limit > longest:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens {limit} come to {len(prompt) + limit}, and the model "
                f"can tell {longest} positions apart"
            )
    return limits


def peak_tokens(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> int:
    """Most tokens of unfinished rows in the cache at once, over the steps of a static batch.

    In step s, from 1, a row that is not done holds its prompt and the s - 1 tokens it put out before.
    """
    lens = list(zip(prompt_lens, output_lens, strict=True))
    return max(sum(p + s - 1 for p, o in lens if o >= s) for s in range(1, max(output_lens) + 1))


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of every row, `[batch, vocab_size]` to `[batch]`; the lowest id among equals."""
    return logits.argmax(dim=-1)


def num_bytes(*tensors: Tensor) -> int:
    """Bytes of the elements of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
