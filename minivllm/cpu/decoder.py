"""The decoder for a CPU: what `minivllm.model.decoder.Decoder` computes, from the same parameters, on matrices that
are packed once, in a single call for all layers.

The one in torch makes some fifteen calls per layer. Each is taken apart in Python, wakes all threads, and writes to
memory what the next one reads; at a few tokens that costs as much as the products. Here compiled loops do everything
that stands between the matrices.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor, nn

from minivllm.cpu.compiled import inlined, loop, num_threads, one_at_a_time, parallel, sequence, start
from minivllm.cpu.llvm import LANES
from minivllm.cpu.paged_attention import NumbaAttention, attention_kernel, padding
from minivllm.cpu.products import Packed, PackedLinear, gated_product, pack, product, shares, shares_of
from minivllm.cpu.vectors import as_numpy, as_tensor, fill, fma, load_first, put, take, total
from minivllm.model.architecture import ModelConfig
from minivllm.model.attention import KVCache
from minivllm.model.decoder import Attend, Decoder, RMSNorm

PARALLEL_ROWS = 32  # from here on a loop over tokens is worth waking the other threads


def can_run(config: ModelConfig) -> bool:
    """Whether the compiled loops know all that a model does: gated by SiLU, and sizes that divide into pairs."""
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return config.hidden_act in ("silu", "swish") and not any(size % 2 for size in sizes)


class CpuDecoder(Decoder):
    """A decoder made of another one's parameters, which it takes over.

    Attributes:
        matrices: of all layers: queries, keys and values; the projection behind attention; the gate, what it gates, and
            the way down.
        norms: of all layers.
        last_norm: the one before the head.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Packs the matrices kind by kind, so that at most one kind and the head are there twice."""
        nn.Module.__init__(self)
        self.config, self.rotary = decoder.config, decoder.rotary
        self.embed_tokens, self.norm = decoder.embed_tokens, decoder.norm
        self.lm_head = PackedLinear(decoder.lm_head)  # type: ignore[assignment]
        layers: list[Any] = list(decoder.layers)
        self.norms, self.last_norm = Norms.of(layers, decoder.config), as_numpy(decoder.norm.weight.detach())[None]
        attention, mlp = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        self.matrices = [
            *take_over([block.qkv_proj for block in attention]),
            *take_over([block.o_proj for block in attention]),
            *take_over([block.gate_up_proj for block in mlp], parts=2),
            *take_over([block.down_proj for block in mlp]),
        ]
        token = torch.zeros(1, dtype=torch.int64)
        attend = NumbaAttention(
            KVCache(self.config, 1, 1, self.dtype, self.device), padding(), self.config.sliding_window
        )
        with torch.inference_mode():
            start(lambda: self.compute_logits(self(token, token, attend)))

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As `Decoder.forward`; what a layer adds to the residual stream is added by the next norm."""
        embedded = self.embed_tokens(input_ids)
        stream = Stream.of(as_numpy(embedded.reshape(-1, embedded.shape[-1])), self.config)
        if not 0 <= positions.min() <= positions.max() < self.rotary.num_positions:  # compiled loops check nothing
            raise IndexError(f"positions {positions.tolist()} are not all below {self.rotary.num_positions}")
        wide = torch.promote_types(embedded.dtype, torch.float32)
        turns = Turns(positions.reshape(-1).numpy(), *(x.to(wide).numpy() for x in (self.rotary.cos, self.rotary.sin)))
        counts, rows = (self.config.num_heads, self.config.num_kv_heads), shares_of_rows(len(stream.hidden))
        qkv, *others = self.matrices
        begin = (stream, qkv, self.norms, counts, turns, shares_of(qkv), rows)
        end = (*others, *(shares_of(others[index]) for index in (0, 1, 3)))
        if isinstance(attend, NumbaAttention):
            with one_at_a_time:
                all_layers(begin, end, *attend.plan(stream.heads))
        else:
            self._layer_by_layer(begin, end, attend, embedded)
        with one_at_a_time:
            add_and_norm(stream.hidden, stream.delta, self.last_norm, 0, self.norm.eps, stream.normed, rows)
        return as_tensor(stream.normed, embedded.dtype).view(embedded.shape)

    def _layer_by_layer(self, begin: tuple[Any, ...], end: tuple[Any, ...], attend: Attend, embedded: Tensor) -> None:
        """The layers around an `attend` in torch, which sees the tokens in the shape of `embedded`."""
        stream, _, norms, (num_heads, num_kv_heads), _, _, rows = begin
        for layer in range(self.config.num_layers):
            with one_at_a_time:
                into_heads(*begin, layer)
            heads = as_tensor(stream.heads, embedded.dtype).view(*embedded.shape[:-1], *stream.heads.shape[1:])
            out = attend(layer, *heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-2))
            attended = as_numpy(out.reshape(stream.attended.shape))
            with one_at_a_time:
                out_of_heads(stream._replace(attended=attended), *end, norms, rows, layer)


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
        return cls(hidden, np.zeros_like(hidden), np.empty_like(hidden), *rest)


class Turns(NamedTuple):
    """By which angles heads turn: positions, `[num_tokens]`, and cos and sin, `[num_positions, head_dim / 2]`."""

    positions: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Norms(NamedTuple):
    """The weights of all layers' RMSNorms, `[num_layers, size]`, and their epsilon.

    Attributes:
        first: before attention.
        second: before the feed-forward network.
        q: of the heads of queries; size 0 where there is none.
        k: of the heads of keys, likewise.
        eps: of all.
    """

    first: np.ndarray
    second: np.ndarray
    q: np.ndarray
    k: np.ndarray
    eps: float

    @classmethod
    def of(cls, layers: list[Any], config: ModelConfig) -> "Norms":
        def stacked(norms: list[nn.Module]) -> np.ndarray:
            none = layers[0].input_layernorm.weight[:0]
            weights = [norm.weight if isinstance(norm, RMSNorm) else none for norm in norms]
            return as_numpy(torch.stack(weights).detach())

        first, second = ([getattr(x, f"{name}_layernorm") for x in layers] for name in ("input", "post_attention"))
        q, k = ([getattr(layer.self_attn, name) for layer in layers] for name in ("q_norm", "k_norm"))
        return cls(stacked(first), stacked(second), stacked(q), stacked(k), config.rms_norm_eps)


def take_over(linears: list[nn.Linear], parts: int = 1) -> list[Packed]:
    """Packs a matrix of all layers, or equal parts of it, and lets the layers forget it."""
    cut = []
    for linear in linears:
        biases = [None] * parts if linear.bias is None else linear.bias.chunk(parts)
        cut.append(list(zip(linear.weight.chunk(parts), biases, strict=True)))
    packed = [pack(matrices) for matrices in zip(*cut, strict=True)]
    for linear in linears:
        del linear.weight
    return packed


def shares_of_rows(num_rows: int) -> np.ndarray:
    """Where each thread's rows begin, and the end: `[num_threads + 1]`, or a single share where rows are few."""
    return shares(num_rows, num_threads() if num_rows >= PARALLEL_ROWS else 1)


@sequence
def all_layers(begin, end, keys, values, places, plans, windows):
    """The layers of a pass around attention in place; see `into_heads`, `out_of_heads` and `attention_kernel`.

    plans: work and state for a layer where all may be seen, and for one with a window; windows: `[num_layers]`, 0 where
    there is none.
    """
    stream, qkv, norms, counts, turns, qkv_blocks, rows = begin
    o, gate, up, down, o_blocks, gate_blocks, down_blocks = end
    work, state, windowed_work, windowed_state = plans
    out, heads = stream.attended, stream.heads
    for layer in range(len(windows)):
        into_heads(stream, qkv, norms, counts, turns, qkv_blocks, rows, layer)
        window = windows[layer]  # a constant 0 would be a case of its own, and compiled apart
        if window == 0:
            attention_kernel(out, heads, keys[layer], values[layer], places, work, state, window)
        else:
            attention_kernel(out, heads, keys[layer], values[layer], places, windowed_work, windowed_state, window)
        out_of_heads(stream, o, gate, up, down, o_blocks, gate_blocks, down_blocks, norms, rows, layer)


@parallel
def into_heads(stream, qkv, norms, counts, turns, blocks, rows, layer):
    """Adds `stream.delta` to `stream.hidden`, and makes `stream.heads` of it: normed, projected, turned.

    qkv: a `Packed` matrix; counts: query and KV heads; blocks, rows: where each thread's blocks and tokens begin.
    """
    hidden, delta, normed, heads, _, _ = stream
    add_and_norm(hidden, delta, norms.first, layer, norms.eps, normed, rows)
    flat = heads.reshape(heads.shape[0], heads.shape[1] * heads.shape[2])
    product(normed, qkv, layer, flat, blocks)
    single = heads.reshape(heads.shape[0] * heads.shape[1], heads.shape[2])
    if len(rows) == 2:
        turn_rows(single, turns, norms, layer, counts, rows[0], rows[1])
    else:
        for part in prange(len(rows) - 1):
            turn_rows(single, turns, norms, layer, counts, rows[part], rows[part + 1])


@sequence
def out_of_heads(stream, o, gate, up, down, o_blocks, gate_blocks, down_blocks, norms, rows, layer):
    """What follows attention: its projection and the feed-forward network, which leaves in `stream.delta` what it adds.

    o, gate, up, down: `Packed` matrices; o_blocks and so on: where each thread's blocks of them begin; rows: where its
    tokens begin.
    """
    hidden, delta, normed, _, attended, gated = stream
    flat = attended.reshape(attended.shape[0], attended.shape[1] * attended.shape[2])
    product(flat, o, layer, delta, o_blocks)
    add_and_norm(hidden, delta, norms.second, layer, norms.eps, normed, rows)
    gated_product(normed, gate, up, layer, gated, gate_blocks)
    product(gated, down, layer, delta, down_blocks)


@parallel
def add_and_norm(hidden, delta, weights, layer, eps, out, rows):
    """`hidden += delta`, and RMSNorm of it; all `[num_tokens, hidden_size]`. rows: where each thread's tokens begin."""
    if len(rows) == 2:
        norm_rows(hidden, delta, weights, layer, eps, out, rows[0], rows[1])
    else:
        for part in prange(len(rows) - 1):
            norm_rows(hidden, delta, weights, layer, eps, out, rows[part], rows[part + 1])


@loop
def norm_rows(hidden, delta, weights, layer, eps, out, begin, end):
    """`add_and_norm` of a thread's tokens."""
    size = hidden.shape[1]
    for token in range(begin, end):
        for d in range(0, size, LANES):
            x = take(hidden, (token, d), size - d) + take(delta, (token, d), size - d)
            put(hidden, (token, d), x, size - d)
        norm_row(hidden, token, weights, layer, eps, out)


@loop
def turn_rows(heads, turns, norms, layer, counts, begin, end):
    """Norms the heads of a thread's queries and keys, where the model does, and turns them in place.

    heads: `[num_tokens * (num_heads + 2 * num_kv_heads), head_dim]`.
    """
    half, num_turned, num_heads = heads.shape[1] // 2, counts[0] + counts[1], counts[0] + 2 * counts[1]
    for token in range(begin, end):
        position = turns.positions[token]
        for index in range(num_turned):
            head = token * num_heads + index
            if norms.q.shape[1]:
                norm_row(heads, head, norms.q if index < counts[0] else norms.k, layer, norms.eps, heads)
            for d in range(0, half, LANES):
                first, second = take(heads, (head, d), half - d), take(heads, (head, half + d), half - d)
                c, s = take(turns.cos, (position, d), half - d), take(turns.sin, (position, d), half - d)
                put(heads, (head, d), first * c - second * s, half - d)
                put(heads, (head, half + d), second * c + first * s, half - d)


@inlined
def norm_row(x, row, weights, layer, eps, out):
    """RMSNorm of a row: rounded to the type of x before it is multiplied by the weights, as the reference does."""
    size = x.shape[1]
    squares = fill(0.0, load_first(x, (row, 0), 0))
    for d in range(0, size, LANES):
        numbers = take(x, (row, d), size - d)
        squares = fma(numbers, numbers, squares)
    scale = 1.0 / np.sqrt(total(squares) / size + eps)
    for d in range(0, size, LANES):
        put(out, (row, d), take(x, (row, d), size - d) * scale, size - d)
        put(out, (row, d), take(weights, (layer, d), size - d) * take(out, (row, d), size - d), size - d)
