"""Checks of the exercises. Each says in one sentence, with numbers, what is right or what is not yet.

A check never raises for a wrong answer: a blank exercise runs through like any other cell.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minivllm.kv_cache.block_hash import BlockHasher, short_key
from minivllm.lessons.batching import Arrival, model_free_engine, serve
from minivllm.lessons.checking import check, say
from minivllm.lessons.cost import pass_cost
from minivllm.lessons.kernel_exercises import check_merge, check_rows_of_tile, check_visible
from minivllm.lessons.serving_exercises import check_safe_length, check_texts_of_stream
from minivllm.model.architecture import ModelConfig
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams

__all__ = [
    "check_batch_at_ridge",
    "check_batches",
    "check_block_keys",
    "check_blocks_for_branches",
    "check_continuous_steps",
    "check_keys_read",
    "check_merge",
    "check_plan_step",
    "check_rows_of_tile",
    "check_safe_length",
    "check_slot_of",
    "check_slots",
    "check_text_of_tokens",
    "check_texts_of_stream",
    "check_tokens_computed",
    "check_tokens_found",
    "check_visible",
]


def check_text_of_tokens(answer: Callable[[Any, Sequence[int]], Any], tokenizer: Any) -> bool:
    """Lesson 00: `answer(tokenizer, token_ids)` lists the text piece of every token."""
    texts = ["The capital of France is", "unbelievable", "2026", "def fibonacci(n):"]
    cases = []
    for text in texts:
        ids = tokenizer.encode(text)
        cases.append((f"the tokens of {text!r}", (tokenizer, ids), [tokenizer.decode([i]) for i in ids]))
    return check(answer, cases)


def check_tokens_computed(answer: Callable[[int, int, bool], Any]) -> bool:
    """Lesson 01: `answer(prompt_len, output_len, cached)` counts the tokens run through the model."""
    cases = []
    for prompt_len, output_len in ((10, 1), (10, 5), (1, 100), (500, 200)):
        without = sum(prompt_len + step for step in range(output_len))
        cases.append((f"{prompt_len} + {output_len} tokens without a cache", (prompt_len, output_len, False), without))
        with_cache = prompt_len + output_len - 1
        cases.append((f"{prompt_len} + {output_len} tokens with a cache", (prompt_len, output_len, True), with_cache))
    return check(answer, cases)


def check_batch_at_ridge(answer: Callable[[ModelConfig, float], Any], config: ModelConfig) -> bool:
    """Lesson 01: `answer(config, ridge)` is the smallest batch whose decode step, at an empty context and in
    two-byte numbers, reaches an arithmetic intensity of `ridge`."""
    cases = []
    for ridge in (1.5, 8.0, 40.0, 200.0):
        batch = 1
        while pass_cost(config, batch, 1, 0, 2).intensity < ridge:
            batch += 1
        cases.append((f"a ridge at {ridge} flop/byte", (config, ridge), batch))
    return check(answer, cases)


def check_slots(answer: Callable[[Sequence[int], Sequence[int], int], Any]) -> bool:
    """Lesson 02: `answer(prompt_lens, output_lens, max_model_len)` is the share of all reserved slots that
    ever hold a token of a prompt or of an answer."""
    cases = []
    for prompts, outputs, slab in (([10], [5], 128), ([10, 2], [2, 6], 64), ([100, 5, 30], [1, 20, 60], 256)):
        used = sum(prompts) + sum(outputs) - len(outputs)
        what = f"prompts {prompts}, answers {outputs}, slabs of {slab}"
        cases.append((what, (prompts, outputs, slab), used / (slab * len(prompts))))
    return check(answer, cases)


def check_batches(answer: Callable[[Sequence[int], int], Any]) -> bool:
    """Lesson 02: `answer(output_lens, batch)` deals requests (by index) into full batches of `batch` rows so
    that as few row-steps as possible are computed. The number of requests is a multiple of `batch`."""
    for lens, batch in (([8, 1, 8, 1], 2), ([3, 9, 1, 9, 3, 1], 2), ([5, 1, 4, 2, 3, 6], 3)):
        order = sorted(range(len(lens)), key=lambda index: lens[index])
        best = _row_steps(lens, [order[start : start + batch] for start in range(0, len(order), batch)])
        try:
            groups = [list(group) for group in answer(lens, batch)]
            dealt = sorted(index for group in groups for index in group)
        except Exception as error:
            return say(False, f"not yet: for answers of {lens} tokens your function raised {error!r}")
        if dealt != list(range(len(lens))):
            return say(
                False,
                f"not yet: of requests 0 to {len(lens) - 1} you dealt {dealt}; each belongs in one batch",
            )
        if {len(group) for group in groups} != {batch}:
            sizes = [len(group) for group in groups]
            return say(False, f"not yet: your batches have {sizes} rows; each should have {batch}")
        found = _row_steps(lens, groups)
        if found > best:
            return say(
                False,
                f"not yet: answers of {lens} tokens cost {found} row-steps as you dealt; {best} is possible",
            )
    return say(True, "right: no other deal computes fewer row-steps")


def check_slot_of(answer: Callable[[Sequence[int], int, int], Any]) -> bool:
    """Lesson 03: `answer(block_table, position, block_size)` is the slot of a token."""
    cases = []
    for table, position, size in (
        ([6, 1, 3], 0, 4),
        ([6, 1, 3], 9, 4),
        ([2, 0], 16, 16),
        ([5], 0, 1),
        ([4, 3, 9], 7, 3),
    ):
        slot = table[position // size] * size + position % size
        cases.append((f"position {position} of table {table}, blocks of {size}", (table, position, size), slot))
    return check(answer, cases)


def check_blocks_for_branches(answer: Callable[[int, int, int, int], Any]) -> bool:
    """Lesson 03: `answer(prompt_len, output_len, n, block_size)` is the largest number of blocks that `n`
    branches of one prompt hold at once."""
    cases = []
    for prompt, output, n, size in ((44, 30, 4, 16), (32, 2, 3, 16), (5, 40, 1, 8), (48, 17, 8, 16), (3, 5, 4, 4)):
        shared, alone = prompt // size, -(-(prompt + output - 1) // size)
        what = f"{n} branches of {output} tokens after a prompt of {prompt}, blocks of {size}"
        cases.append((what, (prompt, output, n, size), shared + n * (alone - shared)))
    return check(answer, cases)


def check_plan_step(answer: Callable[[Sequence[int], Sequence[int], int, int], Any]) -> bool:
    """Lesson 05: `answer(missing, prompts, budget, max_num_seqs)` is one step of the scheduler: the tokens that each
    running request gets (it misses `missing` of them), then those of each waiting prompt that is admitted."""
    cases = []
    for missing, prompts, budget, rows in (
        ([1, 1], [5], 32, 4),
        ([1, 1, 1], [5, 5], 32, 4),
        ([], [40, 10], 32, 4),
        ([1, 100, 1], [9], 32, 4),
        ([60, 1, 1, 1], [9], 8, 8),
        ([1, 1], [20, 20, 20], 32, 8),
        ([1] * 8, [3], 8, 16),
    ):
        given = list[int]()
        for place, count in enumerate(missing):
            given.append(min(count, budget - sum(given) - (len(missing) - place - 1)))
        for length in prompts:
            if len(given) < rows and sum(given) < budget:
                given.append(min(length, budget - sum(given)))
        what = f"running miss {missing}, prompts {prompts} wait, budget {budget}, {rows} rows"
        cases.append((what, (missing, prompts, budget, rows), given))
    return check(answer, cases)


def check_continuous_steps(answer: Callable[[Sequence[int], int], Any]) -> bool:
    """Lesson 05: `answer(output_lens, rows)` is the number of steps that continuous batching takes for requests that
    are all there from the start, with short prompts and `rows` rows. Each case is run by the real scheduler."""
    cases = []
    for lens, rows in (([5, 1, 1], 2), ([3, 3, 3, 3], 2), ([1, 8, 2, 2, 2], 3), ([9], 4), ([2, 7, 1, 8, 2, 8], 2)):
        engine = model_free_engine(max_num_seqs=rows)
        steps = len(serve(engine, [Arrival([0], length) for length in lens]).trace)
        cases.append((f"answers of {lens} tokens, {rows} rows", (lens, rows), steps))
    return check(answer, cases)


def check_block_keys(answer: Callable[[list[int], int, str | None], Any]) -> bool:
    """Lesson 06: `answer(token_ids, block_size, salt)` lists the keys of a prompt's full blocks, as memory has them."""
    cases = []
    for length, size, salt in (
        (12, 4, None),
        (13, 4, None),
        (3, 4, None),
        (40, 16, None),
        (12, 4, "alice"),
        (40, 16, "bob"),
    ):
        tokens = list(range(7, 7 + length))
        request = Request("", tokens, SamplingParams(), length + 1, cache_salt=salt)
        keys = [short_key(key) for key in BlockHasher(size).keys(request)]
        cases.append((f"{length} tokens, blocks of {size}, salt {salt!r}", (tokens, size, salt), keys))

    def in_short(token_ids: list[int], block_size: int, salt: str | None) -> Any:
        keys = answer(token_ids, block_size, salt)
        listed = isinstance(keys, (list, tuple)) and all(isinstance(key, bytes) for key in keys)
        return [short_key(key) for key in keys] if listed else keys

    return check(in_short, cases)


def check_tokens_found(answer: Callable[[list[list[int]], int], Any]) -> bool:
    """Lesson 06: `answer(prompts, block_size)` lists how many tokens each prompt finds of those before it. Each case
    is run by the real scheduler and memory."""
    stem, other = list(range(1, 41)), list(range(101, 141))
    cases = []
    for lens, prompts, size in (
        ("40, 40", [stem, stem], 16),
        ("32, 32, 33", [stem[:32], stem[:32], stem[:33]], 16),
        ("40, 40 that differ in token 20", [stem, [*stem[:20], 0, *stem[21:]]], 16),
        ("40, 40 others, 40 (half of each)", [stem, other, [*stem[:16], *other[16:]]], 16),
        ("9, 17, 40", [stem[:9], stem[:17], stem], 4),
        ("5, 5", [stem[:5], stem[:5]], 1),
    ):
        engine = model_free_engine(block_size=size, max_num_seqs=1, enable_prefix_caching=True)
        outputs = serve(engine, [Arrival(prompt, 1) for prompt in prompts]).outputs
        found = [output.num_cached_tokens for output in outputs]
        cases.append((f"prompts of {lens} tokens, blocks of {size}", (prompts, size), found))
    return check(answer, cases)


def check_keys_read(answer: Callable[[Sequence[int], int, int], Any]) -> bool:
    """Appendix 1: `answer(lens, num_shared, block_size)` counts the keys that one decode step reads per KV head, if
    what all requests begin with is read once: whole blocks, and of each request at least its newest token apart."""
    cases = []
    for lens, shared, size in (([560] * 32, 512, 16), ([40, 41, 60], 40, 16), ([33, 70], 32, 16), ([32, 64], 32, 16)):
        common = min(shared, min(lens) - 1) // size * size
        what = f"texts of {list(dict.fromkeys(lens))} tokens ({len(lens)} in all), {shared} shared, blocks of {size}"
        cases.append((what, (lens, shared, size), common + sum(length - common for length in lens)))
    return check(answer, cases)


def _row_steps(lens: Sequence[int], groups: Iterable[Sequence[int]]) -> int:
    return sum(len(group) * max(lens[index] for index in group) for group in groups)
