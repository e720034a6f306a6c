"""The naive stages: all give transformers' tokens, in any batch, and count what they waste."""

import itertools
import random

import pytest
import torch

from minivllm.lessons.naive import (
    ConcatCache,
    PaddedBatch,
    SlabCache,
    Work,
    cached_steps,
    generate,
    greedy,
    peak_tokens,
)
from tests.conftest import TINY, hf_generate

STAGES = {"no cache": lambda: None, "concat cache": ConcatCache, "slab cache": lambda: SlabCache(128)}
stages = pytest.mark.parametrize("make_cache", STAGES.values(), ids=STAGES.keys())


def random_prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(TINY["vocab_size"]) for _ in range(length)] for length in lengths]


@stages
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 60])
def test_one_prompt_gives_transformers_tokens(tiny_llama, make_cache, length):
    reference, decoder = tiny_llama
    [prompt] = random_prompts([length])
    result = generate(decoder, [prompt], 20, make_cache())
    assert result.token_ids == [hf_generate(reference, prompt, 20)]
    assert result.finish_reasons == ["length"]


@stages
@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 40], [33, 1, 16, 2, 17, 8]])
def test_every_row_of_a_batch_gives_transformers_tokens_in_any_order(tiny_llama, make_cache, lengths):
    reference, decoder = tiny_llama
    prompts = random_prompts(lengths)
    limits = [3 + 5 * row % 17 for row in range(len(prompts))]
    expected = [hf_generate(reference, p, limit) for p, limit in zip(prompts, limits, strict=True)]
    orders = list(itertools.permutations(range(len(prompts))))
    for order in random.Random(1).sample(orders, min(3, len(orders))):
        result = generate(decoder, [prompts[i] for i in order], [limits[i] for i in order], make_cache())
        assert result.token_ids == [expected[i] for i in order]


@stages
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 6}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 12}),
        ("Llama", {"num_key_value_heads": 3, "attention_bias": True}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}}),
    ],
)
def test_every_family_gives_transformers_tokens(tiny_pair, make_cache, family, changes):
    reference, decoder = tiny_pair(family, **changes)
    prompts = random_prompts([3, 11, 24])
    result = generate(decoder, prompts, 16, make_cache())
    assert result.token_ids == [hf_generate(reference, prompt, 16) for prompt in prompts]


@stages
def test_a_row_ends_at_its_stop_token_and_its_neighbours_go_on(tiny_llama, make_cache):
    _, decoder = tiny_llama
    prompts = random_prompts([4, 9])
    free = generate(decoder, prompts, 12, make_cache()).token_ids
    stop = free[0][3]
    cut = free[0][: free[0].index(stop) + 1]
    result = generate(decoder, prompts, 12, make_cache(), stop_token_ids=[{stop}, ()])
    assert result.token_ids == [cut, free[1]]
    assert result.finish_reasons == ["stop", "length"]


def test_stop_beats_length_when_both_come_with_the_same_token(tiny_llama):
    _, decoder = tiny_llama
    [prompt] = random_prompts([4])
    token = generate(decoder, [prompt], 1).token_ids[0][0]
    assert generate(decoder, [prompt], 1, stop_token_ids=[{token}]).finish_reasons == ["stop"]


@stages
def test_a_row_that_ended_at_the_models_length_does_not_stop_the_others(tiny_llama, make_cache):
    reference, decoder = tiny_llama
    prompts = random_prompts([120, 5])
    cache = SlabCache(200) if make_cache() is not None and isinstance(make_cache(), SlabCache) else make_cache()
    result = generate(decoder, prompts, [8, 60], cache)
    assert result.token_ids == [hf_generate(reference, prompts[0], 8), hf_generate(reference, prompts[1], 60)]


def test_the_first_real_token_of_every_row_has_position_0():
    batch = PaddedBatch.of([[7, 8, 9], [4]], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[7, 8, 9], [4, 4, 4]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.num_padding == (0, 2)


@stages
def test_a_broken_token_that_a_row_does_not_use_does_not_reach_it(tiny_pair, make_cache):
    _, decoder = tiny_pair()
    prompts = [[5, 6], [9, 8, 7, 6, 5]]
    expected = generate(decoder, prompts, 4, make_cache()).token_ids
    decoder.embed_tokens.weight[0] = torch.nan
    assert generate(decoder, prompts, 4, make_cache()).token_ids == expected


def test_unused_slots_may_hold_anything(tiny_llama, monkeypatch):
    _, decoder = tiny_llama
    prompts = random_prompts([3, 20])
    expected = generate(decoder, prompts, 10, SlabCache(64)).token_ids
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan) if a != (0,) else empty(*a, **k)
    )
    assert generate(decoder, prompts, 10, SlabCache(64)).token_ids == expected


def test_on_token_hears_every_token_once_in_order(tiny_llama):
    _, decoder = tiny_llama
    heard = []
    result = generate(decoder, random_prompts([2, 5]), [3, 1], on_token=lambda *event: heard.append(event))
    (a, b, c), (d,) = result.token_ids
    assert heard == [(0, a, None), (1, d, "length"), (0, b, None), (0, c, "length")]


KV_BYTES = 2 * 2 * 2 * 8 * 8  # keys and values, layers, KV heads, head_dim, float64


def test_work_without_a_cache_grows_with_the_square_of_the_length(tiny_llama):
    work = generate(tiny_llama[1], random_prompts([10]), 5).work
    assert work == Work(steps=5, tokens_computed=10 + 11 + 12 + 13 + 14)


def test_work_of_a_concat_cache_is_linear_in_tokens_but_copies_everything_each_step(tiny_llama):
    work = generate(tiny_llama[1], random_prompts([10]), 5, ConcatCache()).work
    assert work == Work(
        steps=5,
        tokens_computed=10 + 4,
        bytes_copied=(10 + 11 + 12 + 13) * KV_BYTES,
        bytes_reserved=14 * KV_BYTES,
        bytes_used=14 * KV_BYTES,
    )


def test_work_of_a_slab_cache_copies_nothing_but_reserves_the_longest_text(tiny_llama):
    work = generate(tiny_llama[1], random_prompts([10]), 5, SlabCache(128)).work
    assert work == Work(steps=5, tokens_computed=10 + 4, bytes_reserved=128 * KV_BYTES, bytes_used=14 * KV_BYTES)


def test_work_of_a_static_batch_counts_padding_and_ended_rows(tiny_llama):
    work = generate(tiny_llama[1], random_prompts([10, 2]), [2, 6], SlabCache(64)).work
    # Prefill runs 2 x 10 columns, then 5 steps run both rows, though the first ended after the first of them.
    assert work.tokens_computed == 2 * 10 + 5 * 2
    assert work.bytes_reserved == 2 * 64 * KV_BYTES
    # Most live tokens: step 2, with 10 + 1 and 2 + 1.
    assert work.bytes_used == 14 * KV_BYTES


def test_peak_tokens_counts_rows_until_they_end():
    assert peak_tokens([5], [1]) == 5
    assert peak_tokens([5, 5], [1, 1]) == 10
    assert peak_tokens([5, 5], [1, 20]) == 5 + 19
    assert peak_tokens([100, 5], [1, 20]) == 105


@stages
@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([], 4, r"at least one prompt and max_tokens for each: got 0 and 0"),
        ([[]], 4, r"the prompt is empty \(0 tokens\)"),
        ([[1], [2]], [4], "got 2 and 1"),
        ([[1]], 0, "max_tokens must be at least 1, got 0"),
        ([[1]], -3, "max_tokens must be at least 1, got -3"),
        ([[1]], 2.0, "max_tokens must be an integer, got 2.0"),
        ([[1]], True, "max_tokens must be an integer, got True"),
        ([[1] * 120], 9, "come to 129, and the model can tell 128 positions apart"),
        ([[97]], 4, r"token id 97 at position 0 is out of the vocabulary of 97 \(0 to 96\)"),
        ([[5, -1]], 4, "token id -1 at position 1"),
        ([[1] * 128], 4, "has 128 tokens and max_model_len is 128"),
    ],
)
def test_bad_input_is_refused_with_the_numbers(tiny_llama, make_cache, prompts, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_llama[1], prompts, max_tokens, make_cache())


def test_stop_tokens_are_given_for_every_row(tiny_llama):
    with pytest.raises(ValueError, match="there are 2 prompts and 1 collections of stop tokens"):
        generate(tiny_llama[1], [[1], [2]], 4, stop_token_ids=[()])


def test_a_slab_that_is_too_short_says_by_how_much(tiny_llama):
    generate(tiny_llama[1], [[1] * 10], 7, SlabCache(16))
    with pytest.raises(ValueError, match="needs column 17 of a slab of 16"):
        generate(tiny_llama[1], [[1] * 10], 8, SlabCache(16))


def test_steps_go_on_for_as_long_as_they_are_asked(tiny_llama):
    reference, decoder = tiny_llama
    [prompt] = random_prompts([6])
    with torch.inference_mode():
        steps = cached_steps(decoder, [prompt], greedy, Work(), SlabCache(64))
        tokens = [int(token) for token in itertools.islice(steps, 30)]
    assert tokens == hf_generate(reference, prompt, 30)
