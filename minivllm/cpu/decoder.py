"""The decoder for a CPU: what `minivllm.model.decoder.Decoder` computes, from the same parameters, in two calls per
layer beside attention, on matrices that are packed once.

The one in torch makes some fifteen calls per layer. Each is taken apart in Python, wakes all threads, and writes to
memory what the next one reads; at a few tokens that costs as much as the products. Here compiled loops do everything
that stands between the matrices.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor, nn

from minivllm.cpu.compiled import inlined, loop, num_threads, one_at_a_time, parallel
from minivllm.cpu.paged_attention import NumbaAttention
from minivllm.cpu.products import (
    ROWS,
    WIDTH,
    PackedLinear,
    multiply_blocks,
    multiply_gated,
    pack,
    shares,
    shares_of,
)
from minivllm.cpu.vectors import LANES, as_numpy, as_tensor, fill, fma, load_first, put, take, total
from minivllm.model.architecture import ModelConfig
from minivllm.model.decoder import Attend, Decoder, DecoderLayer, RMSNorm

PARALLEL_ROWS = 32  # from here on a loop over tokens is worth waking the other threads


def can_run(config: ModelConfig) -> bool:
    """Whether the compiled loops know all that a model does: gated by SiLU, and sizes that divide into pairs."""
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return config.hidden_act in ("silu", "swish") and not any(size % 2 for size in sizes)


class CpuDecoder(Decoder):
    """A decoder made of another one's parameters, which it takes over."""

    def __init__(self, decoder: Decoder) -> None:
        """Packs the matrices one by one, so that none but the head's is there twice."""
        nn.Module.__init__(self)
        self.config, self.rotary = decoder.config, decoder.rotary
        self.embed_tokens, self.norm = decoder.embed_tokens, decoder.norm
        self.lm_head = PackedLinear(decoder.lm_head)  # type: ignore[assignment]
        self.layers = nn.ModuleList(CpuLayer(layer) for layer in decoder.layers)  # type: ignore[arg-type]
        token = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():  # compiles the loops, or loads what was compiled before
            self.compute_logits(self(token, token, lambda layer, q, k, v: q))

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As `Decoder.forward`; what a layer adds to the residual stream is added by the next norm."""
        embedded = self.embed_tokens(input_ids)
        stream = Stream.of(as_numpy(embedded.reshape(-1, embedded.shape[-1])), self.config)
        stream.delta[:] = 0
        wide = torch.promote_types(embedded.dtype, torch.float32)
        if not 0 <= positions.min() <= positions.max() < self.rotary.num_positions:  # compiled loops check nothing
            raise IndexError(f"positions {positions.tolist()} are not all below {self.rotary.num_positions}")
        turns = Turns(positions.reshape(-1).numpy(), *(x.to(wide).numpy() for x in (self.rotary.cos, self.rotary.sin)))
        rows = shares_of_rows(len(stream.hidden))
        for layer in self.layers:
            layer(stream, turns, rows, attend, embedded)
        with one_at_a_time:
            add_and_norm(stream.hidden, stream.delta, Norm.of(self.norm), stream.normed, rows)
        return as_tensor(stream.normed, embedded.dtype).view(embedded.shape)


class Stream(NamedTuple):
    """What the layers of a pass read and write; a row per token.

    Attributes:
        hidden: the residual stream.
        delta: what the last layer adds to it.
        normed: what goes into a product.
        heads: queries, keys and values, `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`.
        attended: what comes out of attention, `[num_tokens, num_heads, head_dim]`.
        gated: the middle of the feed-forward network.
    """

    hidden: np.ndarray
    delta: np.ndarray
    normed: np.ndarray
    heads: np.ndarray
    attended: np.ndarray
    gated: np.ndarray

    @classmethod
    def of(cls, hidden: np.ndarray, config: ModelConfig) -> "Stream":
        """Makes memory for the tokens of `hidden`, `[num_tokens, hidden_size]`."""
        heads = (config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        shapes = [heads, (config.num_heads, config.head_dim), (config.intermediate_size,)]
        rest = (np.zeros((len(hidden), *shape), hidden.dtype) for shape in shapes)  # padded tokens attend to nothing: 0
        return cls(hidden, np.empty_like(hidden), np.empty_like(hidden), *rest)


class Turns(NamedTuple):
    """By which angles heads turn: positions, `[num_tokens]`, and cos and sin, `[num_positions, head_dim / 2]`."""

    positions: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Norm(NamedTuple):
    """The weight of an RMSNorm and its epsilon."""

    weight: np.ndarray
    eps: float

    @classmethod
    def of(cls, norm: RMSNorm) -> "Norm":
        return cls(as_numpy(norm.weight.detach()), norm.eps)


class CpuLayer(nn.Module):
    """A layer of `CpuDecoder`."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.head_counts = attention.layer, attention.head_counts
        self.qkv, self.o, self.down = map(take_over, (attention.qkv_proj, attention.o_proj, mlp.down_proj))
        self.gate, self.up = take_over(mlp.gate_up_proj, parts=2)
        self.first_norm, self.second_norm = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        none = Norm(self.first_norm.weight[:0], 0.0)
        norms = (attention.q_norm, attention.k_norm)
        self.head_norms = tuple(Norm.of(norm) if isinstance(norm, RMSNorm) else none for norm in norms)

    def forward(self, stream: Stream, turns: Turns, rows: np.ndarray, attend: Attend, tokens: Tensor) -> None:
        """Adds what the layer before left in `stream.delta` to `stream.hidden`, and leaves there what this one adds.
        `tokens`: the embedded ones, for their type and for the shape that an `attend` of torch's expects."""
        with one_at_a_time:
            into_heads(
                stream,
                self.qkv,
                self.first_norm,
                *self.head_norms,
                self.head_counts[:2],
                turns,
                shares_of(self.qkv),
                rows,
            )
        if isinstance(attend, NumbaAttention):
            attend.on_heads(self.index, stream.heads, stream.attended)
        else:
            heads = as_tensor(stream.heads, tokens.dtype).view(*tokens.shape[:-1], *stream.heads.shape[1:])
            out = attend(self.index, *heads.split(self.head_counts, dim=-2))
            stream = stream._replace(attended=as_numpy(out.reshape(stream.attended.shape)))
        matrices = (self.o, self.gate, self.up, self.down)
        shares = (shares_of(matrix) for matrix in (self.o, self.gate, self.down))
        with one_at_a_time:
            out_of_heads(stream, *matrices, self.second_norm, *shares, rows)


def take_over(linear: nn.Linear, parts: int = 1) -> Any:
    """Packs a layer's matrix, or equal parts of it, and lets the layer forget it."""
    biases = [None] * parts if linear.bias is None else linear.bias.chunk(parts)
    packed = [pack(*pair) for pair in zip(linear.weight.chunk(parts), biases, strict=True)]
    del linear.weight
    return packed[0] if parts == 1 else packed


def shares_of_rows(num_rows: int) -> np.ndarray:
    """Where each thread's rows begin, and the end: `[num_threads + 1]`, or a single share where rows are few."""
    return shares(num_rows, num_threads() if num_rows >= PARALLEL_ROWS else 1)


@parallel
def into_heads(stream, qkv, norm, q_norm, k_norm, counts, turns, blocks, rows):
    """Adds `stream.delta` to `stream.hidden`, and makes `stream.heads` of it: normed, projected, turned.

    qkv: a `Packed` matrix; q_norm, k_norm: of the heads of queries and keys, empty where there is none; counts: query
    and KV heads; blocks, rows: where each thread's blocks and tokens begin.
    """
    hidden, delta, normed, heads, _, _ = stream
    add_and_norm(hidden, delta, norm, normed, rows)
    flat = heads.reshape(heads.shape[0], heads.shape[1] * heads.shape[2])
    for part in prange(len(blocks) - 1):
        sums = np.empty((ROWS, WIDTH), qkv.bias.dtype)
        multiply_blocks(normed, qkv, flat, blocks[part], blocks[part + 1], sums)
    if len(rows) == 2:
        turn_rows(heads, turns, q_norm, k_norm, counts, rows[0], rows[1])
    else:
        for part in prange(len(rows) - 1):
            turn_rows(heads, turns, q_norm, k_norm, counts, rows[part], rows[part + 1])


@parallel
def out_of_heads(stream, o, gate, up, down, norm, o_blocks, gate_blocks, down_blocks, rows):
    """What follows attention: its projection and the feed-forward network, which leaves in `stream.delta` what it adds.

    o, gate, up, down: `Packed` matrices; o_blocks and so on: where each thread's blocks of them begin; rows: where its
    tokens begin.
    """
    hidden, delta, normed, _, attended, gated = stream
    flat = attended.reshape(attended.shape[0], attended.shape[1] * attended.shape[2])
    for part in prange(len(o_blocks) - 1):
        sums = np.empty((ROWS, WIDTH), o.bias.dtype)
        multiply_blocks(flat, o, delta, o_blocks[part], o_blocks[part + 1], sums)
    add_and_norm(hidden, delta, norm, normed, rows)
    for part in prange(len(gate_blocks) - 1):
        sums, up_sums = np.empty((ROWS, WIDTH), o.bias.dtype), np.empty((ROWS, WIDTH), o.bias.dtype)
        multiply_gated(normed, gate, up, gated, gate_blocks[part], gate_blocks[part + 1], sums, up_sums)
    for part in prange(len(down_blocks) - 1):
        sums = np.empty((ROWS, WIDTH), o.bias.dtype)
        multiply_blocks(gated, down, delta, down_blocks[part], down_blocks[part + 1], sums)


@parallel
def add_and_norm(hidden, delta, norm, out, rows):
    """`hidden += delta`, and RMSNorm of it; all `[num_tokens, hidden_size]`. rows: where each thread's tokens begin."""
    if len(rows) == 2:
        norm_rows(hidden, delta, norm, out, rows[0], rows[1])
    else:
        for part in prange(len(rows) - 1):
            norm_rows(hidden, delta, norm, out, rows[part], rows[part + 1])


@loop
def norm_rows(hidden, delta, norm, out, begin, end):
    """`add_and_norm` of a thread's tokens."""
    size = hidden.shape[1]
    for token in range(begin, end):
        squares = fill(0.0, load_first(hidden, (token, 0), 0))
        for d in range(0, size, LANES):
            x = take(hidden, (token, d), size - d) + take(delta, (token, d), size - d)
            put(hidden, (token, d), x, size - d)
            x = take(hidden, (token, d), size - d)  # as it was rounded
            squares = fma(x, x, squares)
        scale = 1.0 / np.sqrt(total(squares) / size + norm.eps)
        for d in range(0, size, LANES):
            put(out, (token, d), take(hidden, (token, d), size - d) * scale, size - d)
            x = take(norm.weight, (d,), size - d) * take(out, (token, d), size - d)
            put(out, (token, d), x, size - d)


@loop
def turn_rows(heads, turns, q_norm, k_norm, counts, begin, end):
    """Norms the heads of a thread's queries and keys, where the model does, and turns them in place."""
    dim, half = heads.shape[2], heads.shape[2] // 2
    for token in range(begin, end):
        position = turns.positions[token]
        for head in range(counts[0] + counts[1]):
            norm = q_norm if head < counts[0] else k_norm
            if len(norm.weight):
                norm_head(heads, token, head, norm, dim)
            for d in range(0, half, LANES):
                first, second = take(heads, (token, head, d), half - d), take(heads, (token, head, half + d), half - d)
                c, s = take(turns.cos, (position, d), half - d), take(turns.sin, (position, d), half - d)
                put(heads, (token, head, d), first * c - second * s, half - d)
                put(heads, (token, head, half + d), second * c + first * s, half - d)


@inlined
def norm_head(heads, token, head, norm, dim):
    """RMSNorm of one head."""
    squares = fill(0.0, load_first(heads, (token, head, 0), 0))
    for d in range(0, dim, LANES):
        x = take(heads, (token, head, d), dim - d)
        squares = fma(x, x, squares)
    scale = 1.0 / np.sqrt(total(squares) / dim + norm.eps)
    for d in range(0, dim, LANES):
        put(heads, (token, head, d), take(heads, (token, head, d), dim - d) * scale, dim - d)
        x = take(norm.weight, (d,), dim - d) * take(heads, (token, head, d), dim - d)
        put(heads, (token, head, d), x, dim - d)
