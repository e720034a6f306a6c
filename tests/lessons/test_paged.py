"""Stage 3 gives the tokens of the stages before it, on any memory, and shares what branches have in common."""

import random

import pytest
import torch

from minivllm import SamplingParams
from minivllm.kv_cache import ContiguousKVCache, PagedKVCache
from minivllm.lessons.naive import SlabCache, generate
from minivllm.lessons.paged import PagedSequences, TextSequence, generate_paged, sample_branches
from tests.conftest import ORACLE, hf_generate
from tests.lessons.test_naive import random_prompts


def shuffled(num_blocks, block_size, seed=0):
    """Paged memory whose blocks come in random order."""
    manager = PagedKVCache(num_blocks, block_size)
    blocks = manager.pool.allocate(num_blocks)
    random.Random(seed).shuffle(blocks)
    manager.pool.free(blocks)
    return manager


@pytest.fixture(autouse=True)
def nan_pool(monkeypatch):
    """Every cache starts full of NaN, so that a slot that was never written is loud."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))


LENGTHS = [33, 1, 16, 2, 17, 8, 48]
LIMITS = [7, 20, 1, 16, 17, 18, 2]


@pytest.fixture(scope="module")
def expected(tiny_llama):
    prompts = random_prompts(LENGTHS)
    tokens = [hf_generate(tiny_llama[0], prompt, limit) for prompt, limit in zip(prompts, LIMITS, strict=True)]
    assert generate(tiny_llama[1], prompts, LIMITS, SlabCache(128)).token_ids == tokens
    return prompts, tokens


@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 256])
@pytest.mark.parametrize("chunk", [None, 1, 5, 16])
def test_paged_tokens_equal_transformers_and_stage_2(tiny_llama, expected, block_size, chunk):
    prompts, tokens = expected
    manager = shuffled(512 // block_size + 8, block_size)
    result = generate_paged(tiny_llama[1], prompts, LIMITS, manager, chunk=chunk)
    assert result.token_ids == tokens
    assert manager.num_free_blocks == manager.num_blocks
    manager.check()


@pytest.mark.parametrize("reservation", ["max", "pow2", "exact"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_contiguous_memory_gives_the_same_tokens(tiny_llama, expected, reservation, block_size):
    prompts, tokens = expected
    manager = ContiguousKVCache(1024 // block_size, block_size, 128, reservation)
    result = generate_paged(tiny_llama[1], prompts, LIMITS, manager, chunk=9)
    assert result.token_ids == tokens
    assert (result.work.bytes_copied > 0) == (reservation == "pow2")
    assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 6}),
        ("Qwen3", {"head_dim": 12}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ],
)
def test_other_families_too(tiny_pair, family, changes):
    reference, decoder = tiny_pair(family, **changes)
    prompts = random_prompts([3, 11, 24])
    result = generate_paged(decoder, prompts, 16, shuffled(40, 4), chunk=7)
    assert result.token_ids == [hf_generate(reference, prompt, 16) for prompt in prompts]


def test_paging_reserves_and_uses_what_the_tokens_need(tiny_llama):
    manager = PagedKVCache(8, 4)
    work = generate_paged(tiny_llama[1], [[5] * 10], 4, manager).work
    per_slot = 2 * 2 * 2 * 8 * 8
    assert work.bytes_reserved == 32 * per_slot and work.bytes_used == 13 * per_slot
    assert work.tokens_computed == 10 + 3 and work.steps == 4 and work.bytes_copied == 0


def test_a_chunk_is_the_most_prompt_tokens_of_a_pass(tiny_llama):
    for chunk, steps in ((None, 3), (10, 3), (4, 5), (1, 12)):
        work = generate_paged(tiny_llama[1], [[5] * 10], 3, PagedKVCache(8, 4), chunk=chunk).work
        assert (work.steps, work.tokens_computed) == (steps, 12)


def test_what_has_ended_gives_its_blocks_to_the_others_at_once(tiny_llama):
    # 2 x 2 blocks at first; the second request can only grow into the blocks of the first.
    manager = PagedKVCache(4, 4)
    work = generate_paged(tiny_llama[1], [[5] * 8, [6] * 8], [1, 9], manager).work
    per_slot = 2 * 2 * 2 * 8 * 8
    assert work.bytes_used == 16 * per_slot  # both prompts, before the first was freed
    assert generate_paged(tiny_llama[1], [[6] * 8], 9, manager).work.bytes_used == 16 * per_slot


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "chunk", "message"),
    [
        ([], 4, None, "got 0 and 0"),
        ([[]], 4, None, "the prompt is empty"),
        ([[97]], 4, None, "token id 97"),
        ([[1] * 87], 60, None, "come to 147, and the model can tell 128 positions apart"),
        ([[1]], 0, None, "max_tokens must be at least 1, got 0"),
        ([[1], [2]], [3], None, "got 2 and 1"),
        ([[1]], 4, 0, "chunk must be at least 1, got 0"),
        ([[1]], 4, 2.5, "chunk must be an integer, got 2.5"),
    ],
)
def test_bad_input_is_refused_with_the_numbers(tiny_llama, prompts, max_tokens, chunk, message):
    manager = PagedKVCache(64, 4)
    with pytest.raises(ValueError, match=message):
        generate_paged(tiny_llama[1], prompts, max_tokens, manager, chunk=chunk)
    assert manager.num_free_blocks == 64


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "every branch needs max_tokens"),
        ([SamplingParams(temperature=0, max_tokens=None)], "every branch needs max_tokens"),
        ([SamplingParams(temperature=1, max_tokens=3)], "and a seed unless it is greedy"),
        ([SamplingParams(temperature=0, max_tokens=200)], "come to 201"),
    ],
)
def test_branches_that_lack_something_are_refused(tiny_llama, params, message):
    with pytest.raises(ValueError, match=message):
        sample_branches(tiny_llama[1], [5], params, PagedKVCache(64, 4))


def test_a_manager_that_is_in_use_is_refused(tiny_llama):
    manager = PagedKVCache(8, 4)
    manager.allocate_slots(TextSequence("mine", [1], 1, 10), 1)
    for run in (
        lambda: generate_paged(tiny_llama[1], [[5]], 3, manager),
        lambda: sample_branches(tiny_llama[1], [5], [GREEDY], manager),
    ):
        with pytest.raises(ValueError, match="1 of the manager's 8 blocks are in use"):
            run()


def test_branches_that_outgrow_the_pool_give_everything_back(tiny_llama):
    manager = PagedKVCache(4, 4)
    with pytest.raises(ValueError, match="needs slots for"):
        sample_branches(tiny_llama[1], [5] * 8, [GREEDY] * 3, manager)
    assert manager.num_free_blocks == 4
    manager.check()


def test_the_peak_is_the_most_blocks_held_at_any_time(tiny_llama):
    short, long = SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=0, max_tokens=30)
    _, peak = sample_branches(tiny_llama[1], [5] * 3, [short] * 6 + [long], PagedKVCache(64, 4))
    # Step 2 holds seven tables of one block each; later only the long branch is left, with eight.
    assert peak == 8
    _, peak = sample_branches(tiny_llama[1], [5] * 3, [short] * 20 + [long], PagedKVCache(64, 4))
    assert peak == 21


def test_a_full_pool_is_told_with_the_numbers_and_everything_comes_back(tiny_llama):
    manager = PagedKVCache(3, 4)
    with pytest.raises(ValueError, match="R0 needs slots for 13 tokens and 0 of 3 blocks are free"):
        generate_paged(tiny_llama[1], [[5] * 10], 10, manager)
    assert manager.num_free_blocks == 3


GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 32, 40])
@pytest.mark.parametrize("make", [lambda: shuffled(64, 16), lambda: ContiguousKVCache(64, 16, 128, "pow2")])
def test_greedy_branches_are_equal_and_equal_a_run_of_their_own(tiny_llama, prompt_len, make):
    reference, decoder = tiny_llama
    [prompt] = random_prompts([prompt_len])
    manager = make()
    branches, _ = sample_branches(decoder, prompt, [GREEDY] * 4, manager)
    assert branches == [hf_generate(reference, prompt, 20)] * 4
    assert manager.num_free_blocks == manager.num_blocks
    manager.check()


@pytest.mark.parametrize("prompt_len", [15, 16, 37])
def test_each_sampled_branch_equals_a_run_of_its_own(tiny_llama, prompt_len):
    _, decoder = tiny_llama
    [prompt] = random_prompts([prompt_len])
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=10 + 7 * seed) for seed in range(4)]
    together, _ = sample_branches(decoder, prompt, params, shuffled(64, 16))
    alone = [sample_branches(decoder, prompt, [p], shuffled(64, 16, seed=3))[0][0] for p in params]
    assert together == alone
    assert len({tuple(branch[:10]) for branch in together}) == 4


@pytest.mark.parametrize(("prompt_len", "shared"), [(16, 1), (15, 0), (37, 2), (48, 3)])
def test_four_branches_save_the_shared_full_blocks_three_times(tiny_llama, prompt_len, shared):
    _, decoder = tiny_llama
    [prompt] = random_prompts([prompt_len])
    _, four_branches = sample_branches(decoder, prompt, [GREEDY] * 4, PagedKVCache(64, 16))
    _, one = sample_branches(decoder, prompt, [GREEDY], PagedKVCache(64, 16))
    assert four_branches == 4 * one - 3 * shared


def test_a_branch_does_not_see_what_its_sister_writes_into_the_shared_block(tiny_llama):
    _, decoder = tiny_llama
    [prompt] = random_prompts([21])
    manager = PagedKVCache(16, 16)
    runner = PagedSequences(decoder, manager)
    a = TextSequence("a", [*prompt, 3], 21, 100)
    with torch.inference_mode():
        runner.run([(a, 21)])
        b = TextSequence("b", [*prompt, 4], 21, 100, num_computed_tokens=21)
        manager.fork(a, b)
        shared = manager.get_block_ids(a)[1]
        before = runner.cache.keys[:, shared, :5].clone()
        runner.run([(b, 1)])
        assert torch.equal(runner.cache.keys[:, shared, :5], before)
        assert runner.cache.keys[:, shared, 5:].isnan().all()
        own = manager.get_block_ids(b)[1]
        assert own != shared and torch.equal(runner.cache.keys[:, own, :5], before)
        assert runner.work.bytes_copied == 2 * 16 * 2 * 2 * 8 * 8


@pytest.mark.real_model
@pytest.mark.parametrize("chunk", [None, 16])
def test_the_real_model_gives_the_frozen_tokens_from_blocks(real_llm, chunk):
    prompts = [case["prompt_token_ids"] for case in ORACLE["cases"]]
    result = generate_paged(real_llm.model, prompts, 24, shuffled(64, 16), chunk=chunk)
    assert result.token_ids == [case["token_ids"] for case in ORACLE["cases"]]
