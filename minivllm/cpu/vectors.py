"""Vectors of 16 numbers for functions that Numba compiles: what a C programmer would call SIMD intrinsics.

Numba writes loops over single numbers and leaves it to LLVM to make vector instructions of them; whether that succeeds
hangs on details. With these functions it is written down: a `Vector` is 16 numbers in registers, float64 where the
array it comes from is, else float32. LLVM makes of it whatever the machine has: one AVX-512 register, two of AVX2, four
of NEON. All functions are for compiled code only. An index is a tuple with a number for each axis; the last axis of
every array must be contiguous, and nothing is checked, so that an index out of range reads or writes foreign memory.
"""

import operator
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model
from torch import Tensor

from minivllm.cpu.compiled import inlined, intrinsic, overload

LANES = 16
BYTE, INT32, INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def as_numpy(x: Tensor) -> Any:
    """A tensor's memory as numpy sees it; bfloat16, the upper half of a float32, as 16-bit integers."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def as_tensor(x: Any, dtype: torch.dtype) -> Tensor:
    """The other way round."""
    return torch.from_numpy(x).view(dtype)


class Vector(types.Type):
    """The type of 16 numbers, as Numba sees it."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")

    @classmethod
    def of(cls, array: types.Array) -> "Vector":
        """The vectors that an array's numbers become."""
        return cls(types.float64 if array.dtype == types.float64 else types.float32)

    @property
    def number(self) -> ir.Type:
        """A lane, as LLVM sees it."""
        return ir.DoubleType() if self.dtype == types.float64 else ir.FloatType()

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(self.number, LANES)

    @property
    def suffix(self) -> str:
        """How the names of LLVM's functions on it end."""
        return f"v{LANES}f{self.dtype.bitwidth}"


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Numba keeps a `Vector` in a vector register."""

    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


# --- how LLVM is told ------------------------------------------------------------------------------------------------


def spread(builder: Any, number: Any) -> Any:
    """One number in all lanes."""
    kind = ir.VectorType(number.type, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, nothing, lanes(INT32, [0] * LANES))


def lanes(number: ir.Type, values: list[int]) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(ir.VectorType(number, LANES), values)


def address(context: Any, builder: Any, array: types.Array, value: Any, index: Any, at: Any) -> Any:
    """Where an entry of an array lies."""
    view = context.make_array(array)(context, builder, value)
    where = zip(index, cgutils.unpack_tuple(builder, at, len(index)), strict=True)
    whole = [context.cast(builder, each, kind, types.intp) for kind, each in where]
    return cgutils.get_item_pointer(context, builder, array, view, whole)


def widened(builder: Any, stored: Any, vector: Vector) -> Any:
    """16 stored numbers as floats."""
    if isinstance(stored.type.element, ir.IntType):
        whole = builder.zext(stored, ir.VectorType(INT32, LANES))
        return builder.bitcast(builder.shl(whole, lanes(INT32, [16] * LANES)), vector.llvm)
    return stored


def rounded(builder: Any, x: Any) -> Any:
    """The bits of floats whose upper half is the nearest bfloat16, ties to even."""
    bits = builder.bitcast(x, ir.VectorType(INT32, LANES))
    last = builder.and_(builder.lshr(bits, lanes(INT32, [16] * LANES)), lanes(INT32, [1] * LANES))
    nearest = builder.add(builder.add(bits, lanes(INT32, [0x7FFF] * LANES)), last)
    return builder.select(builder.fcmp_unordered("uno", x, x), lanes(INT32, [0x7FC00000] * LANES), nearest)


def narrowed(builder: Any, x: Any, stored: ir.VectorType) -> Any:
    """16 floats as they are stored."""
    if not isinstance(stored.element, ir.IntType):
        return x
    return builder.trunc(builder.lshr(rounded(builder, x), lanes(INT32, [16] * LANES)), stored)


def first_lanes(builder: Any, count: Any) -> Any:
    """Which lanes are among the first `count`."""
    return builder.icmp_signed("<", lanes(INT64, list(range(LANES))), spread(builder, count))


def below(builder: Any, at: Any, rows: int) -> Any:
    """An index, `rows` further along the last axis but one."""
    row = builder.extract_value(at, len(at.type) - 2)
    return builder.insert_value(at, builder.add(row, ir.Constant(row.type, rows)), len(at.type) - 2)


def call(builder: Any, name: str, result: ir.Type, *operands: Any) -> Any:
    """Calls a function of LLVM's."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, operands)


# --- memory ----------------------------------------------------------------------------------------------------------


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """The 16 numbers from an index on."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, array, arguments[0], index, arguments[1])
        stored = ir.VectorType(context.get_data_type(array.dtype), LANES)
        found = builder.load(builder.bitcast(pointer, stored.as_pointer()), align=array.dtype.bitwidth // 8)
        return widened(builder, found, vector)

    return vector(array, index), build


@intrinsic
def load_first(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """The numbers from an index on in the first `count` lanes, and 0 in the others, which are not read."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, array, arguments[0], index, arguments[1])
        stored = ir.VectorType(context.get_data_type(array.dtype), LANES)
        where, aligned = builder.bitcast(pointer, stored.as_pointer()), ir.Constant(INT32, array.dtype.bitwidth // 8)
        name = f"llvm.masked.load.v{LANES}{'i' if array.dtype == types.uint16 else 'f'}{array.dtype.bitwidth}.p0"
        asked, nothing = first_lanes(builder, arguments[2]), ir.Constant(stored, [0] * LANES)
        return widened(builder, call(builder, name, stored, where, aligned, asked, nothing), vector)

    return vector(array, index, types.intp), build


@intrinsic
def load_pair(typing: Any, array: Any, index: Any) -> Any:
    """The 32 numbers from an index on, as two vectors. Which number is where depends on the array's type: of bfloat16,
    where it takes one instruction for each vector, those with an even and those with an odd index."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, size = address(context, builder, array, arguments[0], index, arguments[1]), array.dtype.bitwidth // 8
        if array.dtype == types.uint16:
            kind = ir.VectorType(INT32, LANES)
            both = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=size)
            even = builder.shl(both, lanes(INT32, [16] * LANES))
            odd = builder.and_(both, lanes(INT32, [0xFFFF0000] * LANES))
            pair = [builder.bitcast(half, vector.llvm) for half in (even, odd)]
        else:
            where = builder.bitcast(pointer, vector.llvm.as_pointer())
            pair = [builder.load(builder.gep(where, [ir.Constant(INT32, k)]), align=size) for k in range(2)]
        return cgutils.pack_array(builder, pair)

    return types.UniTuple(vector, 2)(array, index), build


@intrinsic
def store_pair(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Writes two vectors where `load_pair` reads them."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, size = address(context, builder, array, arguments[0], index, arguments[1]), array.dtype.bitwidth // 8
        pair = cgutils.unpack_tuple(builder, arguments[2], 2)
        if array.dtype == types.uint16:
            even, odd = (rounded(builder, half) for half in pair)
            even = builder.lshr(even, lanes(INT32, [16] * LANES))
            both = builder.or_(even, builder.and_(odd, lanes(INT32, [0xFFFF0000] * LANES)))
            builder.store(both, builder.bitcast(pointer, both.type.as_pointer()), align=size)
        else:
            where = builder.bitcast(pointer, pair[0].type.as_pointer())
            for k in range(2):
                builder.store(pair[k], builder.gep(where, [ir.Constant(INT32, k)]), align=size)
        return context.get_dummy_value()

    return types.void(array, index, x), build


@intrinsic
def store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Writes 16 numbers from an index on."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, array, arguments[0], index, arguments[1])
        stored = ir.VectorType(context.get_data_type(array.dtype), LANES)
        x = narrowed(builder, arguments[2], stored)
        builder.store(x, builder.bitcast(pointer, stored.as_pointer()), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, x), build


@intrinsic
def store_first(typing: Any, array: Any, index: Any, x: Any, count: Any) -> Any:
    """Writes the first `count` of 16 numbers from an index on."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, array, arguments[0], index, arguments[1])
        stored = ir.VectorType(context.get_data_type(array.dtype), LANES)
        where, aligned = builder.bitcast(pointer, stored.as_pointer()), ir.Constant(INT32, array.dtype.bitwidth // 8)
        name = f"llvm.masked.store.v{LANES}{'i' if array.dtype == types.uint16 else 'f'}{array.dtype.bitwidth}.p0"
        numbers = narrowed(builder, arguments[2], stored)
        call(builder, name, ir.VoidType(), numbers, where, aligned, first_lanes(builder, arguments[3]))
        return context.get_dummy_value()

    return types.void(array, index, x, types.intp), build


@intrinsic
def repeat(typing: Any, array: Any, index: Any) -> Any:
    """One number of an array of floats in all lanes."""
    vector = Vector.of(array)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return spread(builder, builder.load(address(context, builder, array, arguments[0], index, arguments[1])))

    return vector(array, index), build


@intrinsic
def fill(typing: Any, number: Any, like: Any) -> Any:
    """A number in all lanes of a vector like another one."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return spread(builder, context.cast(builder, arguments[0], number, like.dtype))

    return like(number, like), build


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Asks for the memory at an index, which will be read soon, without waiting for it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.bitcast(
            address(context, builder, array, arguments[0], index, arguments[1]), BYTE.as_pointer()
        )
        read, keep, data = (ir.Constant(INT32, flag) for flag in (0, 3, 1))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, keep, data)
        return context.get_dummy_value()

    return types.void(array, index), build


@intrinsic
def transpose(typing: Any, source: Any, index: Any, target: Any, to: Any) -> Any:
    """Copies 16 rows of 16 numbers from an index on, so that they become columns of another array of this type."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, kind = [], Vector.of(source).llvm.as_pointer()
        for row in range(LANES):
            pointer = address(context, builder, source, arguments[0], index, below(builder, arguments[1], row))
            rows.append(builder.load(builder.bitcast(pointer, kind), align=source.dtype.bitwidth // 8))
        distance = 1
        while distance < LANES:  # pairs of rows change quarters of the square they make, then larger ones
            for row in (row for row in range(LANES) if not row & distance):
                pair = rows[row], rows[row + distance]
                upper = [lane + (LANES - distance) * bool(lane & distance) for lane in range(LANES)]
                rows[row] = builder.shuffle_vector(*pair, lanes(INT32, upper))
                rows[row + distance] = builder.shuffle_vector(*pair, lanes(INT32, [lane + distance for lane in upper]))
            distance *= 2
        for row in range(LANES):
            pointer = address(context, builder, target, arguments[2], to, below(builder, arguments[3], row))
            builder.store(rows[row], builder.bitcast(pointer, kind), align=source.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(source, index, target, to), build


# --- arithmetic ------------------------------------------------------------------------------------------------------


def operation(name: str) -> Any:
    """A function of LLVM's on vectors, lane by lane."""

    @intrinsic
    def function(typing: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return call(builder, f"llvm.{name}.{x.suffix}", x.llvm, *arguments)

        return x(x), build

    return function


def reduction(combine: Any) -> Any:
    """A function that makes one number of a vector: its halves are combined, then the halves of what remains."""

    @intrinsic
    def function(typing: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rest, half = arguments[0], LANES // 2
            while half:
                other = builder.shuffle_vector(
                    rest, rest, ir.Constant(ir.VectorType(INT32, LANES), [*range(half, 2 * half)] * (LANES // half))
                )
                rest, half = combine(builder, rest, other), half // 2
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
        return call(builder, f"llvm.fma.{a.suffix}", a.llvm, *arguments)

    return a(a, b, c), build


@intrinsic
def where_less(typing: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """Lanes of x where a < b, and of y elsewhere, also where one is NaN."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", arguments[0], arguments[1]), arguments[2], arguments[3])

    return x(a, b, x, y), build


@intrinsic
def keep(typing: Any, x: Any, begin: Any, end: Any) -> Any:
    """The lanes begin..end - 1 of x, and minus infinity in the others."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        inside = builder.and_(builder.not_(first_lanes(builder, arguments[1])), first_lanes(builder, arguments[2]))
        return builder.select(inside, arguments[0], ir.Constant(x.llvm, [float("-inf")] * LANES))

    return x(x, types.intp, types.intp), build


@intrinsic
def power_of_two(typing: Any, whole: Any) -> Any:
    """2 to the power of whole numbers in float32, between -126 and 127."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.add(builder.fptosi(arguments[0], ir.VectorType(INT32, LANES)), lanes(INT32, [127] * LANES))
        return builder.bitcast(builder.shl(exponent, lanes(INT32, [23] * LANES)), whole.llvm)

    return whole(whole), build


def exp(x: Any) -> Any:
    """e to the power of x, for x of at most 0; 0 for minus infinity. Within 2e-7 in float32."""


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
