"""RoPE: every type transformers knows, in full precision, for every position that will be asked."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minivllm.model.rotary import RotaryEmbedding, rope_frequencies

HEAD_DIM, THETA = 64, 100_000.0


def llama(rope_type="default", max_position_embeddings=8192, **rope):
    parameters = {"rope_type": rope_type, "rope_theta": THETA, **rope}
    return LlamaConfig(
        hidden_size=576,
        num_attention_heads=9,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=parameters,
    )


def plain_frequencies():
    return THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)


LONGROPE = {
    "short_factor": [1.0 + i / 64 for i in range(32)],
    "long_factor": [2.0 + i / 16 for i in range(32)],
    "original_max_position_embeddings": 2048,
    "factor": 4.0,
}
TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "longrope": LONGROPE,
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "proportional": {},
}


def test_every_type_that_transformers_knows_is_tried_here():
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} <= set(TYPES)


@pytest.mark.parametrize("rope_type", TYPES)
def test_tables_equal_transformers_at_short_positions(rope_type):
    if rope_type not in ROPE_INIT_FUNCTIONS and rope_type != "default":
        pytest.skip(f"this transformers has no {rope_type}")
    config = llama(rope_type, **TYPES[rope_type])
    reference = LlamaRotaryEmbedding(config)
    positions = torch.arange(64)
    cos, sin = reference(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(config, HEAD_DIM, 64)
    torch.testing.assert_close(ours.cos, cos[0, :, : HEAD_DIM // 2], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.sin, sin[0, :, : HEAD_DIM // 2], rtol=0, atol=1e-5)


def test_default_table_is_the_formula_to_1e_6_at_every_position():
    rotary = RotaryEmbedding(llama(), HEAD_DIM, 8192)
    angles = torch.arange(8192, dtype=torch.float64)[:, None] * plain_frequencies()
    assert (rotary.cos - angles.cos()).abs().max() <= 1e-6
    assert (rotary.sin - angles.sin()).abs().max() <= 1e-6
    assert rotary.cos.dtype == torch.float32


def test_casting_the_model_to_bf16_leaves_the_table_alone(tiny_pair):
    _, decoder = tiny_pair()
    before = decoder.rotary.cos.clone()
    decoder.to(torch.bfloat16)
    assert decoder.rotary.cos.dtype == torch.float64
    assert torch.equal(decoder.rotary.cos, before)


def test_rotation_of_bf16_heads_is_exact_beyond_position_256():
    # In bf16, position 257 would be 256: cos -0.040 instead of 0.819 for the fastest pair.
    rotary = RotaryEmbedding(llama(), HEAD_DIM, 512)
    x = torch.zeros(1, 1, HEAD_DIM, dtype=torch.bfloat16)
    x[..., 0] = 1
    rotated = rotary(x, torch.tensor([257]))
    assert rotated.dtype == torch.bfloat16
    assert rotated[0, 0, 0].item() == pytest.approx(math.cos(257), abs=4e-3)


def test_rotation_of_bf16_heads_is_rounded_once():
    rotary = RotaryEmbedding(llama(), HEAD_DIM, 8192)
    x = torch.randn(200, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(200) * 40
    exact = RotaryEmbedding(llama(), HEAD_DIM, 8192, torch.float64)(x.double(), positions)
    assert (rotary(x, positions) == exact.bfloat16()).float().mean() > 0.999


def test_linear_scaling_divides_the_angle_by_the_factor():
    frequencies, scale = rope_frequencies(llama("linear", factor=4.0), 8192)
    torch.testing.assert_close(frequencies, plain_frequencies() / 4, rtol=1e-12, atol=0)
    assert scale == 1


def test_dynamic_scaling_changes_nothing_within_the_original_length_and_only_what_is_beyond():
    frequencies, _ = rope_frequencies(llama("dynamic", max_position_embeddings=100, factor=4.0), 300)
    assert frequencies.shape == (300, HEAD_DIM // 2)
    torch.testing.assert_close(frequencies[:100], plain_frequencies().expand(100, -1), rtol=1e-12, atol=0)
    slower = frequencies[100:, 1:] < plain_frequencies()[1:]
    assert slower.all()
    assert (frequencies[101:, 1:] < frequencies[100:-1, 1:]).all()


def test_yarn_scales_the_amplitude_by_a_tenth_of_the_logarithm_plus_one():
    _, scale = rope_frequencies(llama("yarn", **TYPES["yarn"]), 8192)
    assert scale == pytest.approx(0.1 * math.log(4) + 1) == pytest.approx(1.1386, abs=1e-4)


def test_llama3_leaves_fast_pairs_and_divides_slow_ones():
    frequencies, _ = rope_frequencies(llama("llama3", **TYPES["llama3"]), 8192)
    plain = plain_frequencies()
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 2048 / 4, wavelength > 2048 / 1
    assert fast.any() and slow.any()
    torch.testing.assert_close(frequencies[fast], plain[fast], rtol=1e-12, atol=0)
    torch.testing.assert_close(frequencies[slow], plain[slow] / 8, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("max_model_len", "key"), [(2048, "short_factor"), (2049, "long_factor")])
def test_longrope_takes_the_factors_of_the_longest_text_it_will_see(max_model_len, key):
    frequencies, _ = rope_frequencies(llama("longrope", **LONGROPE), max_model_len)
    expected = plain_frequencies() / torch.tensor(LONGROPE[key], dtype=torch.float64)
    torch.testing.assert_close(frequencies, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rope_type", TYPES)
def test_the_last_position_is_in_the_table(rope_type):
    if rope_type not in ROPE_INIT_FUNCTIONS and rope_type != "default":
        pytest.skip(f"this transformers has no {rope_type}")
    rotary = RotaryEmbedding(llama(rope_type, **TYPES[rope_type]), HEAD_DIM, 8192)
    assert len(rotary.cos) == len(rotary.sin) == rotary.num_positions == 8192
    assert rotary(torch.ones(1, 1, HEAD_DIM), torch.tensor([8191])).isfinite().all()


def test_an_unknown_type_is_refused_by_name():
    config = llama()
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(ValueError, match="unknown rope_type 'spiral'"):
        RotaryEmbedding(config, HEAD_DIM, 8)


def test_a_partial_rotation_is_refused_with_its_size():
    config = llama("linear", factor=1.0, partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match="rotates 32 of 64 dimensions"):
        RotaryEmbedding(config, HEAD_DIM, 8)
