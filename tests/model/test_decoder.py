"""Our decoder computes what transformers computes, for every switch of the Llama family."""

import pytest
import torch

from minivllm.model.attention import dense_attention
from minivllm.model.decoder import RMSNorm
from tests.conftest import TINY

VARIANTS = {
    "llama": ("Llama", {}),
    "llama with one KV head per query head": ("Llama", {"num_key_value_heads": 6}),
    "llama with one KV head": ("Llama", {"num_key_value_heads": 1}),
    "llama with biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("Llama", {"tie_word_embeddings": True}),
    "llama with its own head_dim": ("Llama", {"head_dim": 10}),
    "llama with gelu": ("Llama", {"hidden_act": "gelu"}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a sliding window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with a window in its later layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
}


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_transformers(tiny_pair, family, changes):
    reference, decoder = tiny_pair(family, **changes)
    ids = torch.randint(0, TINY["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(1))

    def attend(layer, q, k, v):
        return dense_attention(q, k, v, (0, 0, 0), decoder.config.sliding_window[layer])

    with torch.inference_mode():
        expected = reference(ids).logits
        found = decoder.compute_logits(decoder(ids, torch.arange(40).expand(3, 40), attend))
    # transformers computes norms and RoPE in float32 even in a float64 model.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_a_norm_of_bf16_values_is_computed_in_float32():
    norm = RMSNorm(576, 1e-5)
    x = torch.randn(50, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    norm.weight.data = norm.weight.data.bfloat16()
    assert (norm(x) == exact.bfloat16()).float().mean() > 0.999


def test_a_padding_column_is_seen_by_nobody_whatever_it_holds():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    alone = dense_attention(q[:, 2:], k[:, 2:], v[:, 2:], (0,))
    k[:, :2], v[:, :2] = torch.nan, torch.nan
    padded = dense_attention(q, k, v, (2,))
    torch.testing.assert_close(padded[:, 2:], alone, rtol=0, atol=1e-12)
    assert (padded[:, :2] == 0).all()


@pytest.mark.parametrize("num_queries", [1, 4, 9])
@pytest.mark.parametrize("window", [1, 4, 9, 100])
def test_a_window_of_w_sees_exactly_the_latest_w_tokens(num_queries, window):
    # Equal scores and one-hot values: each output lists the weights over the columns.
    columns = 9
    q = torch.zeros(1, num_queries, 1, columns)
    k = torch.zeros(1, columns, 1, columns)
    v = torch.eye(columns).reshape(1, columns, 1, columns)
    weights = dense_attention(q, k, v, (0,), window)[0, :, 0]
    for row, position in zip(weights, range(columns - num_queries, columns), strict=True):
        seen = min(position + 1, window)
        expected = torch.zeros(columns)
        expected[position + 1 - seen : position + 1] = 1 / seen
        torch.testing.assert_close(row, expected)
