"""What a vector of 16 numbers is to Numba and to LLVM, and the instructions that `minivllm.cpu.vectors` is made of.

These functions run while Numba compiles: they write LLVM's intermediate code with a builder, and take and return its
values. LLVM makes of a vector whatever the machine has: one AVX-512 register, two of AVX2, four of NEON.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from minivllm.cpu.compiled import features

LANES = 16
PAIRS = {"avx512f", "avx512bf16"} <= features()  # whether the processor multiplies pairs of bfloat16
BYTE, INT32, INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


class Vector(types.Type):
    """The type of 16 numbers, as Numba sees it: floats, or pairs of bfloat16 in 32-bit integers."""

    def __init__(self, dtype: types.Float | types.Integer) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")

    @classmethod
    def of(cls, array: types.Array) -> "Vector":
        """The vectors that an array's numbers become."""
        return cls(array.dtype if array.dtype in (types.float64, types.int32) else types.float32)

    @property
    def number(self) -> ir.Type:
        """A lane, as LLVM sees it."""
        return {types.float64: ir.DoubleType(), types.int32: INT32}.get(self.dtype, ir.FloatType())

    @property
    def llvm(self) -> ir.VectorType:
        """The vector, as LLVM sees it."""
        return ir.VectorType(self.number, LANES)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Numba keeps a `Vector` in a vector register."""

    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


# --- constants and calls ---------------------------------------------------------------------------------------------


def lanes(number: ir.Type, values: list[int]) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(ir.VectorType(number, LANES), values)


def everywhere(value: int) -> ir.Constant:
    """A 32-bit integer in all lanes."""
    return lanes(INT32, [value] * LANES)


def spread(builder: Any, number: Any) -> Any:
    """One number in all lanes."""
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, nothing, everywhere(0))


def first_lanes(builder: Any, count: Any) -> Any:
    """Which lanes are among the first `count`."""
    return builder.icmp_signed("<", lanes(INT64, list(range(LANES))), spread(builder, count))


def call(builder: Any, name: str, result: ir.Type, *operands: Any) -> Any:
    """Calls a function of LLVM's."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, operands)


def suffix(kind: ir.VectorType) -> str:
    """How the names of LLVM's functions on a vector end."""
    if isinstance(kind.element, ir.IntType):
        return f"v{LANES}i{kind.element.width}"
    return f"v{LANES}f{64 if kind.element == ir.DoubleType() else 32}"


def lane_by_lane(builder: Any, name: str, *operands: Any) -> Any:
    """One of LLVM's functions that make a vector of vectors like it."""
    kind = operands[0].type
    return call(builder, f"llvm.{name}.{suffix(kind)}", kind, *operands)


# --- memory ----------------------------------------------------------------------------------------------------------


def address(context: Any, builder: Any, array: types.Array, value: Any, index: Any, at: Any) -> Any:
    """Where an entry of an array lies."""
    view = context.make_array(array)(context, builder, value)
    where = zip(index, cgutils.unpack_tuple(builder, at, len(index)), strict=True)
    whole = [context.cast(builder, each, kind, types.intp) for kind, each in where]
    return cgutils.get_item_pointer(context, builder, array, view, whole)


def vector_at(context: Any, builder: Any, array: types.Array, value: Any, index: Any, at: Any) -> Any:
    """The same, as the place of 16 numbers of the array's."""
    kind = ir.VectorType(context.get_data_type(array.dtype), LANES)
    return builder.bitcast(address(context, builder, array, value, index, at), kind.as_pointer())


def size_of(array: types.Array) -> int:
    """Bytes of an entry: what vectors in it are aligned to."""
    dtype: Any = array.dtype
    return dtype.bitwidth // 8


def below(builder: Any, at: Any, rows: int) -> Any:
    """An index, `rows` further along the last axis but one."""
    row = builder.extract_value(at, len(at.type) - 2)
    return builder.insert_value(at, builder.add(row, ir.Constant(row.type, rows)), len(at.type) - 2)


# --- bfloat16, which lies in 16-bit integers -------------------------------------------------------------------------


def widened(builder: Any, stored: Any, kind: ir.VectorType) -> Any:
    """16 stored numbers as floats; pairs stay what they are."""
    if stored.type.element == ir.IntType(16):
        whole = builder.zext(stored, ir.VectorType(INT32, LANES))
        return builder.bitcast(builder.shl(whole, everywhere(16)), kind)
    return stored


def rounded(builder: Any, x: Any) -> Any:
    """The bits of floats whose upper half is the nearest bfloat16, ties to even."""
    bits = builder.bitcast(x, ir.VectorType(INT32, LANES))
    last = builder.and_(builder.lshr(bits, everywhere(16)), everywhere(1))
    nearest = builder.add(builder.add(bits, everywhere(0x7FFF)), last)
    return builder.select(builder.fcmp_unordered("uno", x, x), everywhere(0x7FC00000), nearest)


def narrowed(builder: Any, x: Any, stored: ir.VectorType) -> Any:
    """16 floats as they are stored, likewise."""
    if stored.element != ir.IntType(16):
        return x
    return builder.trunc(builder.lshr(rounded(builder, x), everywhere(16)), stored)


def halves(builder: Any, pairs: Any, kind: ir.VectorType) -> list[Any]:
    """32 numbers in 16 integers as floats: the lower ones of the pairs, and the upper ones."""
    both = builder.shl(pairs, everywhere(16)), builder.and_(pairs, everywhere(0xFFFF0000))
    return [builder.bitcast(half, kind) for half in both]


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def add_products(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """A vector of sums, plus the products of two vectors; of pairs, both products."""
    if a.type.element != INT32:
        return lane_by_lane(builder, "fma", a, b, total)
    if PAIRS:
        kind = ir.VectorType(BFloat(), 2 * LANES)
        pairs = (builder.bitcast(each, kind) for each in (a, b))
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, *pairs)
    for factors in zip(*(halves(builder, each, total.type) for each in (a, b)), strict=True):
        total = lane_by_lane(builder, "fma", *factors, total)
    return total
