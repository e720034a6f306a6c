"""The decoder for a CPU: the same layers with fewer and larger operations, and weights that are packed once.

It computes what `minivllm.model.decoder.Decoder` computes, from the same parameters: matrices are in the order in which
oneDNN multiplies them; a residual sum and the norm behind it are one loop, and so is the rotation of all heads.
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor, nn

from minivllm.cpu.numbers import FASTMATH, as_numpy, narrow, num_threads, one_at_a_time, widen
from minivllm.model.decoder import MLP, Attend, Attention, Decoder, DecoderLayer, RMSNorm
from minivllm.model.rotary import RotaryEmbedding

PARALLEL_ROWS = 128  # from here on a loop over tokens is worth waking the other threads


class CpuDecoder(Decoder):
    """A decoder made of another one's parameters, which it takes over."""

    def __init__(self, decoder: Decoder) -> None:
        """Packs the matrices one by one, so that none but the head's is there twice."""
        nn.Module.__init__(self)
        self.config, self.rotary = decoder.config, decoder.rotary
        self.embed_tokens, self.norm = decoder.embed_tokens, decoder.norm
        self.lm_head = pack(decoder.lm_head)  # type: ignore[assignment]
        self.layers = nn.ModuleList(CpuLayer(layer) for layer in decoder.layers)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As `Decoder.forward`; what a layer adds to the residual stream is added by the next norm."""
        hidden, delta = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, delta = layer(hidden, delta, positions, self.rotary, attend)
        return add_and_norm(hidden, delta, self.norm)


class CpuLayer(nn.Module):
    """A layer of `CpuDecoder`."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for block, names in ((self.self_attn, ("qkv_proj", "o_proj")), (self.mlp, ("gate_up_proj", "down_proj"))):
            for name in names:
                setattr(block, name, pack(getattr(block, name)))

    def forward(
        self, hidden: Tensor, delta: Tensor | None, positions: Tensor, rotary: RotaryEmbedding, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Adds `delta` to the residual stream `hidden`, in place, and returns it with what this layer adds."""
        normed = add_and_norm(hidden, delta, self.input_layernorm)
        delta = self._attention(self.self_attn, normed, positions, rotary, attend)
        normed = add_and_norm(hidden, delta, self.post_attention_layernorm)
        return hidden, self._mlp(self.mlp, normed)

    def _attention(
        self, block: Attention, normed: Tensor, positions: Tensor, rotary: RotaryEmbedding, attend: Attend
    ) -> Tensor:
        heads = block.qkv_proj(normed).unflatten(-1, (-1, block.head_dim))
        q, k, v = heads.split(block.head_counts, dim=-2)
        if isinstance(block.q_norm, RMSNorm):
            q, k = rotary(block.q_norm(q), positions), rotary(block.k_norm(k), positions)
        else:
            rotate(heads, positions, rotary, sum(block.head_counts[:2]))
        return block.o_proj(attend(block.layer, q, k, v).flatten(-2))

    def _mlp(self, block: MLP, normed: Tensor) -> Tensor:
        gate, up = block.gate_up_proj(normed).chunk(2, dim=-1)
        return block.down_proj(block.act(gate).mul_(up))


class PackedLinear(nn.Module):
    """A linear layer whose matrix is stored in oneDNN's own order: a product need not reorder it first."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "none", [], "")


def pack(linear: nn.Linear) -> nn.Module:
    """A packed layer, or the same one where torch has no oneDNN or it does not know the type."""
    known = linear.weight.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    return PackedLinear(linear) if known and hasattr(torch.ops.mkldnn, "_linear_pointwise") else linear


def add_and_norm(hidden: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
    """`hidden += delta`, in place, then RMSNorm of it. All `[..., hidden_size]`."""
    out, size = torch.empty_like(hidden), hidden.shape[-1]
    x, y = as_numpy(hidden.view(-1, size)), as_numpy(out.view(-1, size))
    added = x if delta is None else as_numpy(delta.reshape(-1, size))
    one = np.ones(1, np.float64 if hidden.dtype == torch.float64 else np.float32)
    arguments = (x, added, delta is not None, as_numpy(norm.weight), norm.eps, y, one)
    if len(x) < PARALLEL_ROWS:
        _norm_rows(*arguments, 0, len(x))
    else:
        with one_at_a_time:
            _norm_in_threads(*arguments, shares(len(x)))
    return out


def rotate(heads: Tensor, positions: Tensor, rotary: RotaryEmbedding, num_rotated: int) -> None:
    """Rotates the first heads of every token in place, as `RotaryEmbedding` does.

    Args:
        heads: `[..., num_heads, head_dim]`, contiguous.
        positions: `[...]`.
        rotary: the tables.
        num_rotated: heads to rotate; those behind them stay as they are.
    """
    x = as_numpy(heads.view(-1, *heads.shape[-2:]))
    arguments = (x, positions.reshape(-1).numpy(), rotary.cos.numpy(), rotary.sin.numpy(), num_rotated)
    if len(x) < PARALLEL_ROWS:
        _rotate_rows(*arguments, 0, len(x))
    else:
        with one_at_a_time:
            _rotate_in_threads(*arguments, shares(len(x)))


def shares(num_rows: int) -> np.ndarray:
    """Where each thread's rows begin, and the end: `[num_threads + 1]`."""
    return np.linspace(0, num_rows, num_threads() + 1).astype(np.int64)


@njit(fastmath=FASTMATH, cache=True, nogil=True)
def _norm_rows(hidden, delta, adds, weight, eps, out, one, begin, end):  # type: ignore[no-untyped-def]
    size = hidden.shape[1]
    for token in range(begin, end):
        if adds:
            for d in range(size):
                hidden[token, d] = narrow(widen(hidden[token, d]) + widen(delta[token, d]), hidden)
        total = one.dtype.type(0.0)
        for d in range(size):
            total += widen(hidden[token, d]) * widen(hidden[token, d])
        scale = one.dtype.type(1.0 / np.sqrt(total / size + eps))
        for d in range(size):
            normed = narrow(widen(hidden[token, d]) * scale, out)
            out[token, d] = narrow(widen(weight[d]) * widen(normed), out)


@njit(parallel=True, cache=True, nogil=True)
def _norm_in_threads(hidden, delta, adds, weight, eps, out, one, bounds):  # type: ignore[no-untyped-def]
    for part in prange(len(bounds) - 1):
        _norm_rows(hidden, delta, adds, weight, eps, out, one, bounds[part], bounds[part + 1])


@njit(fastmath=FASTMATH, cache=True, nogil=True)
def _rotate_rows(heads, positions, cos, sin, num_rotated, begin, end):  # type: ignore[no-untyped-def]
    half = heads.shape[2] // 2
    for token in range(begin, end):
        position = positions[token]
        for head in range(num_rotated):
            for d in range(half):
                first, second = widen(heads[token, head, d]), widen(heads[token, head, half + d])
                c, s = cos[position, d], sin[position, d]
                heads[token, head, d] = narrow(first * c - second * s, heads)
                heads[token, head, half + d] = narrow(second * c + first * s, heads)


@njit(parallel=True, cache=True, nogil=True)
def _rotate_in_threads(heads, positions, cos, sin, num_rotated, bounds):  # type: ignore[no-untyped-def]
    for part in prange(len(bounds) - 1):
        _rotate_rows(heads, positions, cos, sin, num_rotated, bounds[part], bounds[part + 1])
