"""Sampling: the filters keep what they should, and every draw is a function of (seed, index) alone."""

import numpy as np
import pytest
import torch

from minivllm import SamplingParams
from minivllm.sampler import Sampler, derive_seed, keep_likeliest, philox4x32, philox_uniform

P = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])


def sample(logits, params, seeds=None, index=0):
    rows = len(logits)
    return Sampler()(logits, params, seeds or [0] * rows, [index] * rows).tolist()


def kept(top_k=0, top_p=1.0, logits=None):
    scores = P.log() if logits is None else logits
    return keep_likeliest(scores[None], [top_k], [top_p])[0].isfinite().tolist()


# Known answers of Random123 1.14.0, tests/kat_vectors, philox4x32 10.
KNOWN_ANSWERS = [
    ([0] * 6, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
    ([0xFFFFFFFF] * 6, ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ),
]


@pytest.mark.parametrize(("words", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(words, expected):
    output = philox4x32(*(np.array([word], dtype=np.uint64) for word in words))
    assert [f"{int(word[0]):08x}" for word in output] == expected


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_index():
    numbers = philox_uniform([7] * 20_000, range(20_000))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 0.001
    grid = philox_uniform(np.repeat(np.arange(50), 50).tolist(), np.tile(np.arange(50), 50).tolist())
    assert len(set(grid)) == 2500


def test_the_largest_seed_and_index_are_taken():
    assert 0 <= philox_uniform([2**64 - 1], [2**40])[0] < 1


def test_derived_seeds_differ_by_number_and_by_engine_seed():
    seeds = {derive_seed(seed, number) for seed in range(20) for number in range(20)}
    assert len(seeds) == 400 and max(seeds) < 2**64
    assert derive_seed(2**64 - 1, 0) != derive_seed(0, 0)


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 0.0]])
    assert sample(logits, [SamplingParams(temperature=0)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiny_temperature_is_greedy(temperature, dtype):
    logits = torch.tensor([[30.0, 29.5, -60000.0, 0.0]], dtype=dtype)
    for seed in range(50):
        assert sample(logits, [SamplingParams(temperature=temperature)], [seed]) == [0]


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.75, 2), (0.76, 3), (0.5, 1), (1e-9, 1), (0.875, 3), (0.9375, 4), (1.0, 5)]
)
def test_top_p_keeps_the_token_that_crosses_the_limit(top_p, expected):
    assert kept(top_p=top_p) == [True] * expected + [False] * (5 - expected)


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 5), (0, 5), (1, 1), (3, 3), (5, 5), (6, 5), (10**9, 5)])
def test_top_k_keeps_k_and_is_off_at_0_and_from_the_vocabulary_up(top_k, expected):
    assert kept(top_k=top_k) == [True] * expected + [False] * (5 - expected)


def test_top_k_among_equals_keeps_the_lowest_ids():
    for size in (4, 1000):
        assert kept(top_k=2, logits=torch.zeros(size)) == [True, True] + [False] * (size - 2)


def test_top_p_works_on_what_top_k_left():
    # Of the two that top-k keeps, the first has 2/3 of their probability.
    assert kept(top_k=2, top_p=0.6) == [True, False, False, False, False]
    assert kept(top_k=2, top_p=0.7) == [True, True, False, False, False]


def test_without_a_filter_the_scores_are_bit_identical():
    scores = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keep_likeliest(scores, [0, -1, 10**9], [1.0, 1.0, 1.0]), scores)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}])
def test_a_filter_that_leaves_one_token_is_greedy(params):
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    rows = [SamplingParams(temperature=1.5, **params)] * 64
    assert sample(logits, rows, list(range(64))) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.5}])
def test_frequencies_match_the_probabilities(params):
    params = SamplingParams(**params)
    expected = (P.log() / params.temperature).softmax(-1)
    expected = expected * torch.tensor(kept(params.top_k, params.top_p))
    expected = expected / expected.sum()
    draws = 20_000
    rows = P.log().expand(draws, -1)
    tokens = Sampler()(rows, [params] * draws, [11] * draws, list(range(draws)))
    counts = torch.bincount(tokens, minlength=5)
    assert (counts[expected == 0] == 0).all()
    deviation = (counts / draws - expected).abs().max()
    assert deviation < 0.02  # five standard deviations at p = 0.5


def test_rows_of_a_mixed_batch_equal_the_rows_alone():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.3, temperature=2.0),
        SamplingParams(top_k=7, top_p=0.5),
    ]
    for index in range(20):
        seeds = [100 + row for row in range(5)]
        together = sample(logits, params, seeds, index)
        alone = [sample(logits[r : r + 1], [params[r]], [seeds[r]], index)[0] for r in range(5)]
        assert together == alone
        back = sample(logits.flip(0), params[::-1], seeds[::-1], index)
        assert back[::-1] == together


def test_all_64_bits_of_a_seed_count():
    numbers = philox_uniform([0, 1, 1 << 32, 1 << 63, 2**64 - 1], [0] * 5)
    assert len(set(numbers)) == 5
    assert philox_uniform([0], [1 << 32])[0] != numbers[0]


def test_derived_seeds_are_not_the_numbers_that_requests_draw():
    draws = philox4x32(*(np.array([word], dtype=np.uint64) for word in (3, 0, 0, 0, 7, 0)))
    assert derive_seed(7, 3) != (int(draws[0][0]) << 32) | int(draws[1][0])


def test_top_p_that_is_reached_exactly_keeps_no_further_token():
    assert kept(top_p=0.5, logits=torch.zeros(4)) == [True, True, False, False]
    assert kept(top_p=0.75, logits=torch.zeros(4)) == [True, True, True, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_only_the_row_whose_logits_are_not_finite_gets_no_token(bad, temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rows = [SamplingParams(temperature=temperature)] * 3
    expected = sample(logits, rows)
    logits[1, :] = bad
    assert sample(logits, rows) == [expected[0], -1, expected[2]]
    logits[1, :] = 0
    logits[1, 7] = bad
    found = sample(logits, rows)
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert (found[1] == -1) == (bad != -torch.inf)


@pytest.mark.parametrize(("min_p", "expected"), [(0, 5), (0.1, 5), (0.126, 3), (0.25, 3), (0.26, 2), (0.51, 1), (1, 1)])
def test_min_p_keeps_what_is_at_least_min_p_times_as_likely_as_the_likeliest(min_p, expected):
    logits = P.log().expand(2000, -1)
    tokens = Sampler()(logits, [SamplingParams(min_p=min_p)] * 2000, [3] * 2000, list(range(2000)))
    assert set(tokens.tolist()) == set(range(expected))


def test_min_p_counts_after_the_temperature_and_before_top_p():
    # At temperature 0.5 the probabilities are as 64 : 16 : 4 : 1 : 1, and 4 is 0.0625 of 64.
    def drawn(**fields):
        return set(sample(P.log().expand(3000, -1), [SamplingParams(**fields)] * 3000, list(range(3000))))

    assert drawn(temperature=0.5, min_p=0.06) == {0, 1, 2} and drawn(temperature=0.5, min_p=0.07) == {0, 1}
    # Of what min-p keeps (0.5 and 0.25), the first has two thirds.
    assert drawn(min_p=0.3, top_p=0.66) == {0} and drawn(min_p=0.3, top_p=0.67) == {0, 1}


def test_min_p_of_1_is_greedy_and_of_0_changes_no_bit():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    rows = [SamplingParams(temperature=1.5, min_p=1)] * 64
    assert sample(logits, rows, list(range(64))) == logits.argmax(-1).tolist()
    plain, off = SamplingParams(temperature=1.5), SamplingParams(temperature=1.5, min_p=0.0)
    assert sample(logits, [plain] * 64, list(range(64))) == sample(logits, [off] * 64, list(range(64)))


def test_rows_with_and_without_min_p_do_not_touch_each_other():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(4))
    params = [SamplingParams(), SamplingParams(min_p=0.2), SamplingParams(temperature=0), SamplingParams(min_p=1.0)]
    for index in range(20):
        alone = [sample(logits[r : r + 1], [params[r]], [r], index)[0] for r in range(4)]
        assert sample(logits, params, [0, 1, 2, 3], index) == alone


def test_no_draw_can_fall_behind_the_last_token(monkeypatch):
    monkeypatch.setattr("minivllm.sampler.philox_uniform", lambda seeds, _: np.full(len(seeds), 1 - 2.0**-53))
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]]).repeat(200, 1)
    logits += torch.rand(200, 1, generator=torch.Generator().manual_seed(0))
    assert set(sample(logits, [SamplingParams()] * 200)) == {1}


def test_top_p_of_1_keeps_what_rounds_to_no_probability():
    scores = torch.tensor([[100.0, 0.0, -100.0]])
    assert torch.equal(keep_likeliest(scores, [3], [1.0]), scores)


def test_a_draw_of_0_takes_no_token_without_probability(monkeypatch):
    monkeypatch.setattr("minivllm.sampler.philox_uniform", lambda seeds, _: np.zeros(len(seeds)))
    assert sample(torch.tensor([[-torch.inf, 0.0, 1.0]]), [SamplingParams()]) == [1]
