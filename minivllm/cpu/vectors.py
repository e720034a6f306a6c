"""Vectors of 16 numbers for functions that Numba compiles: what a C programmer would call SIMD intrinsics.

Numba writes loops over single numbers and leaves it to LLVM to make vector instructions of them; whether that succeeds
hangs on details. With these functions it is written down: a `Vector` is 16 numbers in registers, float64 where the
array it comes from is, else float32. All functions are for compiled code only. An index is a tuple with a number for
each axis; the last axis of every array must be contiguous, and nothing is checked, so that an index out of range reads
or writes foreign memory.
"""

import operator
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from minivllm.cpu.compiled import inlined, intrinsic, overload
from minivllm.cpu.llvm import (
    BYTE,
    INT32,
    LANES,
    Vector,
    add_products,
    address,
    below,
    call,
    everywhere,
    first_lanes,
    halves,
    lane_by_lane,
    lanes,
    narrowed,
    rounded,
    size_of,
    spread,
    suffix,
    vector_at,
    widened,
)


def as_numpy(x: Tensor) -> Any:
    """A tensor's memory as numpy sees it; bfloat16, the upper half of a float32, as 16-bit integers."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def as_tensor(x: Any, dtype: torch.dtype) -> Tensor:
    """The other way round."""
    return torch.from_numpy(x).view(dtype)


# --- memory ----------------------------------------------------------------------------------------------------------


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """The 16 numbers from an index on."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at = arguments
        where = vector_at(context, builder, array, memory, index, at)
        return widened(builder, builder.load(where, align=size_of(array)), vector.llvm)

    return vector(array, index), build


@intrinsic
def load_first(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """The numbers from an index on in the first `count` lanes, and 0 in the others, which are not read."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at, how_many = arguments
        where = vector_at(context, builder, array, memory, index, at)
        return widened(builder, load_masked(builder, where, size_of(array), how_many), vector.llvm)

    return vector(array, index, types.intp), build


def load_masked(builder: Any, where: Any, size: int, count: Any) -> Any:
    """The first `count` of 16 numbers, which are aligned to `size` bytes; 0 in the other lanes."""
    kind, aligned = where.type.pointee, ir.Constant(INT32, size)
    asked, nothing = first_lanes(builder, count), ir.Constant(kind, [0] * LANES)
    return call(builder, f"llvm.masked.load.{suffix(kind)}.p0", kind, where, aligned, asked, nothing)


@intrinsic
def load_pairs(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """The first `count` of the 16 pairs of bfloat16 from an index on, as they lie; 0 in the other lanes."""
    vector = Vector(types.int32)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at, how_many = arguments
        where = builder.bitcast(address(context, builder, array, memory, index, at), vector.llvm.as_pointer())
        return load_masked(builder, where, size_of(array), how_many)

    return vector(array, index, types.intp), build


@intrinsic
def load_pair(typing: Any, array: Any, index: Any) -> Any:
    """The 32 numbers from an index on, as two vectors. Which number is where depends on the array's type: of bfloat16,
    where it takes one instruction for each vector, those with an even and those with an odd index."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at = arguments
        first, second = pair_at(context, builder, array, memory, index, at)
        pair = [builder.load(first, align=size_of(array))]
        if array.dtype == types.uint16:
            pair = halves(builder, pair[0], vector.llvm)
        else:
            pair.append(builder.load(second, align=size_of(array)))
        return cgutils.pack_array(builder, pair)

    return types.UniTuple(vector, 2)(array, index), build


def pair_at(context: Any, builder: Any, array: Any, memory: Any, index: Any, at: Any) -> tuple[Any, Any]:
    """Where the 16 numbers from an index on lie and where the next 16 do, or for bfloat16 16 pairs and the next 16."""
    number = INT32 if array.dtype == types.uint16 else Vector.of(array).number
    kind = ir.VectorType(number, LANES).as_pointer()
    first = builder.bitcast(address(context, builder, array, memory, index, at), kind)
    return first, builder.gep(first, [ir.Constant(INT32, 1)])


@intrinsic
def store_pair(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Writes two vectors where `load_pair` reads them."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at, vectors = arguments
        first, second = pair_at(context, builder, array, memory, index, at)
        pair = cgutils.unpack_tuple(builder, vectors, 2)
        if array.dtype == types.uint16:
            even, odd = (rounded(builder, half) for half in pair)
            upper = builder.and_(odd, everywhere(0xFFFF0000))
            builder.store(builder.or_(builder.lshr(even, everywhere(16)), upper), first, align=size_of(array))
        else:
            builder.store(pair[0], first, align=size_of(array))
            builder.store(pair[1], second, align=size_of(array))
        return context.get_dummy_value()

    return types.void(array, index, x), build


@intrinsic
def store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Writes 16 numbers from an index on."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at, vector = arguments
        where = vector_at(context, builder, array, memory, index, at)
        builder.store(narrowed(builder, vector, where.type.pointee), where, align=size_of(array))
        return context.get_dummy_value()

    return types.void(array, index, x), build


@intrinsic
def store_first(typing: Any, array: Any, index: Any, x: Any, count: Any) -> Any:
    """Writes the first `count` of 16 numbers from an index on."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at, vector, how_many = arguments
        where = vector_at(context, builder, array, memory, index, at)
        kind, aligned = where.type.pointee, ir.Constant(INT32, size_of(array))
        numbers, asked = narrowed(builder, vector, kind), first_lanes(builder, how_many)
        call(builder, f"llvm.masked.store.{suffix(kind)}.p0", ir.VoidType(), numbers, where, aligned, asked)
        return context.get_dummy_value()

    return types.void(array, index, x, types.intp), build


@inlined
def take(array, index, left):
    """As `load`, where only `left` numbers remain; 0 behind them."""
    return load(array, index) if left >= LANES else load_first(array, index, left)


@inlined
def put(array, index, x, left):
    """As `store`, where only `left` numbers remain."""
    if left >= LANES:
        store(array, index, x)
    else:
        store_first(array, index, x, left)


@intrinsic
def repeat(typing: Any, array: Any, index: Any) -> Any:
    """One number of an array of floats in all lanes."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at = arguments
        return spread(builder, builder.load(address(context, builder, array, memory, index, at)))

    return vector(array, index), build


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Asks for the memory at an index, which will be read soon, without waiting for it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory, at = arguments
        where = builder.bitcast(address(context, builder, array, memory, index, at), BYTE.as_pointer())
        read, keep, data = (ir.Constant(INT32, flag) for flag in (0, 3, 1))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), where, read, keep, data)
        return context.get_dummy_value()

    return types.void(array, index), build


@intrinsic
def transpose(typing: Any, source: Any, index: Any, target: Any, to: Any) -> Any:
    """Copies 16 rows of 16 floats or pairs from an index on, to be columns of another array of this type."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from_memory, at, to_memory, to_at = arguments
        rows = []
        for row in range(LANES):
            where = vector_at(context, builder, source, from_memory, index, below(builder, at, row))
            rows.append(builder.load(where, align=size_of(source)))
        distance = 1
        while distance < LANES:  # pairs of rows change quarters of the square they make, then larger ones
            for row in (row for row in range(LANES) if not row & distance):
                pair = rows[row], rows[row + distance]
                upper = [lane + (LANES - distance) * bool(lane & distance) for lane in range(LANES)]
                rows[row] = builder.shuffle_vector(*pair, lanes(INT32, upper))
                rows[row + distance] = builder.shuffle_vector(*pair, lanes(INT32, [lane + distance for lane in upper]))
            distance *= 2
        for row in range(LANES):
            where = vector_at(context, builder, target, to_memory, to, below(builder, to_at, row))
            builder.store(rows[row], where, align=size_of(target))
        return context.get_dummy_value()

    return types.void(source, index, target, to), build


# --- arithmetic ------------------------------------------------------------------------------------------------------


@intrinsic
def fill(typing: Any, number: Any, like: Any) -> Any:
    """A number in all lanes of a vector like another one."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return spread(builder, context.cast(builder, arguments[0], number, like.dtype))

    return like(number, like), build


def operation(name: str) -> Any:
    """A function of LLVM's on a vector, lane by lane."""

    @intrinsic
    def function(typing: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return lane_by_lane(builder, name, *arguments)

        return x(x), build

    return function


def reduction(combine: Any) -> Any:
    """A function that makes one number of a vector: its halves are combined, then the halves of what remains."""

    @intrinsic
    def function(typing: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rest, half = arguments[0], LANES // 2
            while half:
                upper = lanes(INT32, [*range(half, 2 * half)] * (LANES // half))
                rest, half = combine(builder, rest, builder.shuffle_vector(rest, rest, upper)), half // 2
            return builder.extract_element(rest, ir.Constant(INT32, 0))

        return x.dtype(x), build

    return function


def binary(symbol: Any, name: str) -> None:
    """Makes an operator of Python's one on vectors, and on a vector and a number."""

    @intrinsic
    def function(typing: Any, a: Any, b: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments, flags=("contract",))

        return a(a, b), build

    @overload(symbol)
    def choose(a, b):
        if isinstance(a, Vector):
            return (lambda a, b: function(a, b)) if isinstance(b, Vector) else (lambda a, b: function(a, fill(b, a)))
        return None


floor, exp_of_float64 = operation("floor"), operation("exp")
total = reduction(lambda builder, a, b: builder.fadd(a, b))  # the sum of all lanes
# The largest lane, if none is NaN.
highest = reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
binary(operator.add, "fadd")
binary(operator.sub, "fsub")
binary(operator.mul, "fmul")
binary(operator.truediv, "fdiv")


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return lane_by_lane(builder, "fma", *arguments)

    return a(a, b, c), build


@intrinsic
def add_product(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """c + a * b, rounded once; or, where a and b are pairs of bfloat16, c plus both products."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return add_products(builder, *arguments)

    return c(a, b, c), build


@intrinsic
def where_less(typing: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """Lanes of x where a < b, and of y elsewhere, also where one is NaN."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right, yes, no = arguments
        return builder.select(builder.fcmp_ordered("<", left, right), yes, no)

    return x(a, b, x, y), build


@intrinsic
def keep(typing: Any, x: Any, begin: Any, end: Any) -> Any:
    """The lanes begin..end - 1 of x, and minus infinity in the others."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, first, last = arguments
        inside = builder.and_(builder.not_(first_lanes(builder, first)), first_lanes(builder, last))
        return builder.select(inside, vector, ir.Constant(x.llvm, [float("-inf")] * LANES))

    return x(x, types.intp, types.intp), build


@intrinsic
def power_of_two(typing: Any, whole: Any) -> Any:
    """2 to the power of whole numbers in float32, between -126 and 127."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.add(builder.fptosi(arguments[0], ir.VectorType(INT32, LANES)), everywhere(127))
        return builder.bitcast(builder.shl(exponent, everywhere(23)), whole.llvm)

    return whole(whole), build


def exp(x: Any) -> Any:
    """e to the power of x, for x of at most 0; 0 for minus infinity. Within 2e-7 in float32."""


@overload(exp, inline="always")
def _exp(x):
    if x.dtype == types.float64:
        return lambda x: exp_of_float64(x)
    return lambda x: exp_of_float32(x)


@inlined
def exp_of_float32(x):
    """2 ** (whole + part), the part by a polynomial (Cephes' expf); 0 below e ** -87, which is where it ends."""
    zero, least = fill(0.0, x), fill(-87.0, x)
    whole = where_less(least, x, floor(x * 1.44269504 + 0.5), zero)
    part = x - whole * 0.693359375 + whole * 2.12194440e-4
    series = fma(fill(1.9875691500e-4, x), part, fill(1.3981999507e-3, x))
    series = fma(series, part, fill(8.3334519073e-3, x))
    series = fma(series, part, fill(4.1665795894e-2, x))
    series = fma(series, part, fill(1.6666665459e-1, x))
    series = fma(series, part, fill(5.0000001201e-1, x))
    return where_less(x, least, zero, (fma(series * part, part, part) + 1.0) * power_of_two(whole))
