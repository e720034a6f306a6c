"""Matrix products, for weights that are packed once in the order in which they are read.

A product is made of tiles: a few rows of the activations by `WIDTH` columns of the result, which stay in registers
while the kernel goes along the columns of both matrices. A packed matrix stores, for each block of `WIDTH` outputs, one
row per step of that way, so that it is read from front to back whatever the number of tokens: with one token at the
speed of the memory, with many at the speed of the multipliers. In bfloat16 a step takes two columns, because the
instruction for it (AVX-512's `vdpbf16ps`) multiplies pairs; where the machine has none, both are widened.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from torch import Tensor, nn

from minivllm.cpu.compiled import features, inlined, intrinsic, loop, num_threads, one_at_a_time, parallel
from minivllm.cpu.llvm import INT32, INT64, LANES, Vector, add_products, address, size_of, spread
from minivllm.cpu.vectors import as_numpy, exp, fill, load, put, where_less

# Rows of a tile, and vectors side by side: as many sums as registers hold beside what they are made of.
ROWS, VECTORS = (8, 3) if "avx512f" in features() else (6, 1)
WIDTH = VECTORS * LANES


def tile_of(num_rows: int) -> Any:
    """The kernel for tiles of so many rows."""

    @intrinsic
    def multiply(typing: Any, x: Any, row: Any, packed: Any, layer: Any, block: Any, sums: Any, to: Any) -> Any:
        """Writes rows of x, from `row` on, times a block of a packed matrix to rows of `sums` from `to` on."""
        vector = Vector.of(x)
        step = INT32 if x.dtype == types.uint16 else vector.number
        weights = ir.VectorType(step, LANES)

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x_array, first, packed_array, of_layer, which, sums_array, to_row = arguments
            zero = ir.Constant(INT64, 0)

            def entry(array: Any, value: Any, *at: Any) -> Any:
                kind = types.UniTuple(types.intp, len(at))
                return address(context, builder, array, value, kind, cgutils.pack_array(builder, at))

            rows = [builder.add(first, ir.Constant(INT64, r)) for r in range(num_rows)]
            numbers = [builder.bitcast(entry(x, x_array, r, zero), step.as_pointer()) for r in rows]
            block_of = builder.bitcast(entry(packed, packed_array, of_layer, which, zero, zero), weights.as_pointer())
            view = context.make_array(packed)(context, builder, packed_array)
            num_steps = cgutils.unpack_tuple(builder, view.shape)[2]
            nothing = ir.Constant(vector.llvm, [0.0] * LANES)
            totals = [cgutils.alloca_once(builder, vector.llvm) for _ in range(num_rows * VECTORS)]
            for total in totals:
                builder.store(nothing, total)
            with cgutils.for_range(builder, num_steps) as loop:
                begin = builder.mul(loop.index, ir.Constant(INT64, VECTORS))
                columns = [builder.add(begin, ir.Constant(INT64, v)) for v in range(VECTORS)]
                row_of = [builder.load(builder.gep(block_of, [c]), align=4) for c in columns]
                for r in range(num_rows):
                    number = builder.load(builder.gep(numbers[r], [loop.index]), align=size_of(x))
                    number = spread(builder, number)
                    for v in range(VECTORS):
                        total = totals[r * VECTORS + v]
                        builder.store(add_products(builder, number, row_of[v], builder.load(total)), total)
            for r in range(num_rows):
                target = entry(sums, sums_array, builder.add(to_row, ir.Constant(INT64, r)), zero)
                target = builder.bitcast(target, vector.llvm.as_pointer())
                for v in range(VECTORS):
                    where = builder.gep(target, [ir.Constant(INT64, v)])
                    builder.store(builder.load(totals[r * VECTORS + v]), where, align=4)
            return context.get_dummy_value()

        return types.void(x, types.intp, packed, types.intp, types.intp, sums, types.intp), build

    return multiply


most_rows, four_rows, two_rows, one_row = (tile_of(count) for count in (ROWS, 4, 2, 1))


class Packed(NamedTuple):
    """The same matrix of all layers, packed.

    Attributes:
        weights: `[num_layers, num_blocks, steps, WIDTH]`: floats, or pairs of bfloat16 as 32-bit integers. Outputs that
            the last block has beyond the matrix are 0.
        bias: `[num_layers, num_blocks * WIDTH]`, at least float32; 0 where there is none.
    """

    weights: np.ndarray
    bias: np.ndarray


def pack(matrices: Sequence[tuple[Tensor, Tensor | None]]) -> Packed:
    """Packs pairs of a weight, `[num_outputs, num_inputs]`, of bfloat16, float32 or float64, with num_inputs even, and
    a bias, `[num_outputs]`, or None."""
    (first, _), num_layers = matrices[0], len(matrices)
    num_outputs, num_inputs = first.shape
    num_blocks, pair = -(-num_outputs // WIDTH), 2 if first.dtype == torch.bfloat16 else 1
    wide = torch.promote_types(first.dtype, torch.float32)
    number = torch.empty(0, dtype=wide).numpy().dtype
    stored = np.dtype(np.int32) if pair == 2 else number
    weights = on_large_pages((num_layers, num_blocks, num_inputs // pair, WIDTH), stored)
    bias = np.zeros((num_layers, num_blocks * WIDTH), number)
    for layer, (weight, added) in enumerate(matrices):
        whole = weight.new_zeros(num_blocks * WIDTH, num_inputs)
        whole[:num_outputs] = weight.detach()
        steps = whole.view(num_blocks, WIDTH, num_inputs // pair, pair).transpose(1, 2)
        torch.from_numpy(weights[layer]).view(first.dtype).view(steps.shape).copy_(steps)
        if added is not None:
            bias[layer, :num_outputs] = added.detach().to(wide).numpy()
    return Packed(weights, bias)


def on_large_pages(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory, on pages of 2 MiB where the system has them: weights are read from one end to the other,
    and each new page would cost a look-up."""
    memory = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


@lru_cache
def shares(count: int, parts: int) -> np.ndarray:
    """Where the parts of a whole begin, and the end: `[parts + 1]`."""
    return np.linspace(0, count, parts + 1).astype(np.int64)


def shares_of(packed: Packed) -> np.ndarray:
    """Where each thread's blocks begin, and the end."""
    return shares(packed.weights.shape[1], num_threads())


class PackedLinear(nn.Module):
    """A linear layer of a packed matrix."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed, self.num_outputs = pack([(linear.weight, linear.bias)]), linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(rows), self.num_outputs)
        with one_at_a_time:
            product(as_numpy(rows), self.packed, 0, as_numpy(out), shares_of(self.packed))
        return out.view(*x.shape[:-1], -1)


@parallel
def product(x, packed, layer, out, bounds):
    """x, `[num_tokens, num_inputs]`, times a layer's matrix, to `out`, `[num_tokens, num_outputs]`. bounds: where each
    thread's blocks begin, and the end."""
    for part in prange(len(bounds) - 1):
        sums = np.empty((ROWS, WIDTH), packed.bias.dtype)
        multiply_blocks(x, packed, layer, out, bounds[part], bounds[part + 1], sums)


@parallel
def gated_product(x, gate, up, layer, out, bounds):
    """SiLU of x times a layer's first matrix, times x times the second."""
    for part in prange(len(bounds) - 1):
        sums, up_sums = np.empty((ROWS, WIDTH), gate.bias.dtype), np.empty((ROWS, WIDTH), gate.bias.dtype)
        multiply_gated(x, gate, up, layer, out, bounds[part], bounds[part + 1], sums, up_sums)


@loop
def multiply_blocks(x, packed, layer, out, begin, end, sums):
    """The outputs of blocks begin..end - 1. sums: scratch memory, `[ROWS, WIDTH]`."""
    num_tokens, num_outputs = out.shape
    for block in range(begin, end):
        for row in range(0, num_tokens, ROWS):
            count = min(ROWS, num_tokens - row)
            multiply_rows(x, row, count, packed.weights, layer, block, sums)
            for i in range(count):
                for d in range(0, WIDTH, LANES):
                    to = block * WIDTH + d
                    if to < num_outputs:
                        put(out, (row + i, to), load(sums, (i, d)) + load(packed.bias, (layer, to)), num_outputs - to)


@loop
def multiply_gated(x, gate, up, layer, out, begin, end, sums, up_sums):
    """As `multiply_blocks`, for two matrices: SiLU of the first's outputs times the second's."""
    num_tokens, num_outputs = out.shape
    for block in range(begin, end):
        for row in range(0, num_tokens, ROWS):
            count = min(ROWS, num_tokens - row)
            multiply_rows(x, row, count, gate.weights, layer, block, sums)
            multiply_rows(x, row, count, up.weights, layer, block, up_sums)
            for i in range(count):
                for d in range(0, WIDTH, LANES):
                    to = block * WIDTH + d
                    if to < num_outputs:
                        first, second = load(sums, (i, d)), load(up_sums, (i, d))
                        both = silu(first + load(gate.bias, (layer, to))) * (second + load(up.bias, (layer, to)))
                        put(out, (row + i, to), both, num_outputs - to)


@inlined
def multiply_rows(x, row, count, weights, layer, block, sums):
    """Up to `ROWS` rows of x times a block."""
    if count == ROWS:
        most_rows(x, row, weights, layer, block, sums, 0)
    else:
        done = 0
        if count >= 4:
            four_rows(x, row, weights, layer, block, sums, 0)
            done = 4
        if count - done >= 2:
            two_rows(x, row + done, weights, layer, block, sums, done)
            done += 2
        if count - done:
            one_row(x, row + done, weights, layer, block, sums, done)


@inlined
def silu(x):
    """x / (1 + e ** -x), by e ** -|x|, which can't overflow."""
    zero, one = fill(0.0, x), fill(1.0, x)
    small = exp(where_less(x, zero, x, x * -1.0))
    return x * where_less(x, zero, small, one) / (small + one)
