"""The decoder: Llama, Mistral, Qwen2, Qwen3 and SmolLM in one straight line of plain torch.

It knows nothing of requests, batches or memory. Where keys and values live, and which of them a token may
see, is decided by the `attend` function that each pass brings along: the naive stages and the engine run
this very code and differ only in what they pass in.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from minivllm.model.architecture import ModelConfig
from minivllm.model.rotary import RotaryEmbedding


class Attend(Protocol):
    """Stores the new keys and values of a layer and returns the attention over all that may be seen."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends.

        Args:
            layer: index of the layer, 0 to num_layers - 1.
            q: `[..., num_heads, head_dim]`, the new tokens' queries, rotated.
            k: `[..., num_kv_heads, head_dim]`, their keys, rotated.
            v: `[..., num_kv_heads, head_dim]`, their values.

        Returns:
            `[..., num_heads, head_dim]`.
        """
        ...


class Decoder(nn.Module):
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.config = config
        self.rotary = rotary
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Runs the new tokens through all layers.

        Args:
            input_ids: token ids, int64, any shape `[...]` that `attend` understands.
            positions: place of each token in its text, same shape, int64.
            attend: memory and attention of this pass.

        Returns:
            Hidden states after the last norm, `[..., hidden_size]`.
        """
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, positions, self.rotary, attend)
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary entry as the next token: `[..., hidden_size]` to `[..., vocab_size]`."""
        return self.lm_head(hidden)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type the model computes in."""
        return self.norm.weight.dtype


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, positions: Tensor, rotary: RotaryEmbedding, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Projections and rotation around `attend`. Queries, keys and values come out of one fused product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        width = config.num_heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.head_counts) * config.head_dim, config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, hidden: Tensor, positions: Tensor, rotary: RotaryEmbedding, attend: Attend) -> Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.head_counts, dim=-2)
        q, k = rotary(self.q_norm(q), positions), rotary(self.k_norm(k), positions)
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class MLP(nn.Module):
    """The gated feed-forward network: down(act(gate(x)) * up(x)), gate and up in one fused product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich, 2019), computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
