"""Stage 3: sequences over blocks, without a scheduler.

`PagedSequences` is the engine's runner in small: slots from a memory manager, one pass over all tokens that
are due, logits for the last of each sequence. Two short drivers stand on it: `generate_paged` continues many
prompts, `sample_branches` continues one prompt several times and shares what they have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.config import check_int
from minivllm.kv_cache import KVCacheManager
from minivllm.lessons.naive import Generation, PickTokens, Work, check_batch, greedy, num_bytes
from minivllm.model.attention import KVCache, PagedAttention
from minivllm.model.decoder import Decoder
from minivllm.model.inputs import PassRow, pack_rows
from minivllm.sampler import Sampler
from minivllm.sampling_params import SamplingParams


@dataclass
class TextSequence:
    """A growing text, as memory sees it and as the model reads it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Its tokens so far."""
        return len(self.token_ids)

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def done(self) -> bool:
        """Whether it has come to its full length."""
        return self.num_tokens >= self.max_num_tokens


class PagedSequences:
    """Runs passes over a cache whose slots a manager hands out."""

    def __init__(self, model: Decoder, manager: KVCacheManager) -> None:
        """Makes the cache that the manager's block numbers stand for.

        Raises:
            ValueError: somebody holds blocks already: their content is in another cache.
        """
        if manager.num_free_blocks != manager.num_blocks:
            used = manager.num_blocks - manager.num_free_blocks
            raise ValueError(f"{used} of the manager's {manager.num_blocks} blocks are in use: take a fresh one")
        self.model, self.manager, self.work = model, manager, Work()
        self.cache = KVCache(model.config, manager.num_blocks, manager.block_size, model.dtype, model.device)
        self.work.bytes_reserved = num_bytes(self.cache.keys, self.cache.values)

    def run(self, scheduled: Sequence[tuple[TextSequence, int]]) -> Tensor:
        """Runs the next tokens of some sequences in one pass.

        Args:
            scheduled: pairs (sequence, number of its tokens to compute now).

        Returns:
            Logits after the last computed token of each sequence, `[num_sequences, vocab_size]`.

        Raises:
            ValueError: the pool is full.
        """
        for sequence, count in scheduled:
            if not self.manager.allocate_slots(sequence, count):
                raise ValueError(
                    f"{sequence.request_id} needs slots for {sequence.num_computed_tokens + count} tokens and "
                    f"{self.manager.num_free_blocks} of {self.manager.num_blocks} blocks are free"
                )
        copies = self.manager.take_copies()
        self.cache.copy_blocks(copies)
        self.work.bytes_copied += len(copies) * num_bytes(self.cache.keys[:, 0], self.cache.values[:, 0])
        rows = [
            PassRow(
                sequence.token_ids,
                sequence.num_computed_tokens,
                sequence.num_computed_tokens + count,
                self.manager.get_block_ids(sequence),
            )
            for sequence, count in scheduled
        ]
        metadata, input_ids, positions = pack_rows(rows, self.manager.block_size, self.model.device)
        attend = PagedAttention(self.cache, metadata, self.model.config.sliding_window)
        hidden = self.model(input_ids, positions, attend)
        for sequence, count in scheduled:
            sequence.num_computed_tokens += count
        self.work.steps += 1
        self.work.tokens_computed += len(input_ids)
        used = self.manager.fragmentation().used * self.work.bytes_reserved
        self.work.bytes_used = max(self.work.bytes_used, used // (self.manager.num_blocks * self.manager.block_size))
        return self.model.compute_logits(hidden[metadata.query_start_loc[1:] - 1])


@torch.inference_mode()
def generate_paged(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    manager: KVCacheManager,
    pick: PickTokens = greedy,
    chunk: int | None = None,
) -> Generation:
    """Continues every prompt; a sequence that has ended gives its blocks back at once.

    Args:
        model: the decoder.
        prompts: token ids, one list per sequence.
        max_tokens: tokens to put out, for all or one number per prompt.
        manager: whose slots are used; its pool must hold all sequences.
        pick: logits `[num_sequences, vocab_size]` to tokens.
        chunk: most prompt tokens of a sequence per pass; None runs prompts whole. Sequences with short
            prompts decode while others still read theirs.

    Raises:
        ValueError: a batch that the model can't take, a chunk below 1, or a pool that is in use or full.
    """
    if chunk is not None:
        check_int("chunk", chunk, minimum=1)
    limits = check_batch(model, prompts, max_tokens)
    sequences = [
        TextSequence(f"R{index}", list(prompt), len(prompt), len(prompt) + limit)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    runner = PagedSequences(model, manager)
    try:
        while active := [sequence for sequence in sequences if not sequence.done]:
            due = [len(s.token_ids) - s.num_computed_tokens for s in active]
            scheduled = [(s, min(count, chunk or count)) for s, count in zip(active, due, strict=True)]
            tokens = pick(runner.run(scheduled)).tolist()
            for (sequence, count), needed, token in zip(scheduled, due, tokens, strict=True):
                if count == needed:
                    sequence.token_ids.append(token)
                if sequence.done:
                    manager.free(sequence)
    finally:
        for sequence in sequences:
            manager.free(sequence)
    return Generation([s.output for s in sequences], ["length"] * len(sequences), runner.work)


@torch.inference_mode()
def sample_branches(
    model: Decoder, prompt: Sequence[int], params: Sequence[SamplingParams], manager: KVCacheManager
) -> tuple[list[list[int]], int]:
    """Continues one prompt several times; the prompt is computed once and its blocks are shared.

    Args:
        model: the decoder.
        prompt: token ids.
        params: one per branch; `max_tokens` must be given, and a `seed` for every branch that is sampled.
        manager: whose slots are used.

    Returns:
        The tokens of each branch, and the largest number of blocks that were held at once.

    Raises:
        ValueError: a prompt that the model can't take, params that lack something, or a pool that is in
            use or full.
    """
    if not params or any(p.max_tokens is None or (p.seed is None and not p.greedy) for p in params):
        raise ValueError(f"every branch needs max_tokens, and a seed unless it is greedy: got {list(params)}")
    limits = check_batch(model, [prompt] * len(params), [p.max_tokens or 0 for p in params])
    runner, sampler, peak = PagedSequences(model, manager), Sampler(), 0
    branches = [
        TextSequence(f"B{index}", list(prompt), len(prompt), len(prompt) + limit) for index, limit in enumerate(limits)
    ]
    seeds = [p.seed or 0 for p in params]
    try:
        logits = runner.run([(branches[0], len(prompt))]).expand(len(branches), -1)
        for branch in branches[1:]:
            branch.num_computed_tokens = len(prompt)
            if not manager.fork(branches[0], branch):
                raise ValueError(f"{branch.request_id} does not fit: {manager.num_free_blocks} blocks are free")
        active = list(range(len(branches)))
        while True:
            drawn = [len(branches[i].output) for i in active]
            tokens = sampler(logits, [params[i] for i in active], [seeds[i] for i in active], drawn)
            for index, token in zip(active, tokens.tolist(), strict=True):
                branches[index].token_ids.append(token)
            peak = max(peak, manager.num_blocks - manager.num_free_blocks)
            for branch in branches:
                if branch.done:
                    manager.free(branch)
            active = [index for index in active if not branches[index].done]
            if not active:
                return [branch.output for branch in branches], peak
            logits = runner.run([(branches[index], 1) for index in active])
    finally:
        for branch in branches:
            manager.free(branch)
