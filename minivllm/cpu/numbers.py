"""bfloat16 and a vectorised exp for loops that Numba compiles, which has neither.

bfloat16 is the upper half of a float32, so its numbers come as 16-bit integers. The functions without a body are for
compiled code only: Numba chooses their implementation by the type of their argument.
"""

import threading
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

# Sums may be reordered, which makes loops into vector instructions. NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
one_at_a_time = threading.Lock()  # for parallel loops: not every threading layer of Numba bears two callers


def as_numpy(x: Tensor) -> np.ndarray:
    """A tensor's memory as numpy sees it; bfloat16 as 16-bit integers."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def num_threads() -> int:
    """Threads that parallel loops use: as many as torch does."""
    return min(torch.get_num_threads(), numba.get_num_threads())


def widen(x: Any) -> Any:
    """A stored number as a float."""


def narrow(x: Any, like: Any) -> Any:
    """A float as it is stored in an array of this type, rounded to the nearest, ties to even."""


def exp(x: Any) -> Any:
    """e to the power of x, for x of at most 0; 0 for minus infinity. Within 2e-7 in float32."""


@overload(widen)
def _widen(x):  # type: ignore[no-untyped-def]
    if isinstance(x, types.Integer):
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@overload(narrow)
def _narrow(x, like):  # type: ignore[no-untyped-def]
    if isinstance(like.dtype, types.Integer):
        return lambda x, like: _to_bfloat16(np.float32(x))
    return lambda x, like: like.dtype.type(x)


@njit
def _to_bfloat16(x):  # type: ignore[no-untyped-def]
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@overload(exp)
def _exp(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _exp_of_float32(x)
    return lambda x: np.exp(x)


@njit(fastmath={"contract"})
def _exp_of_float32(x):  # type: ignore[no-untyped-def]
    """2 ** (whole + part), the part by a polynomial (Cephes' expf) and the whole by the exponent's bits."""
    kept = np.float32(x >= np.float32(-87.0) or x != x)  # a factor instead of a branch, which would end the vector
    x = max(x, np.float32(-87.0))
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    part = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * part + np.float32(1.3981999507e-3)
    series = series * part + np.float32(8.3334519073e-3)
    series = series * part + np.float32(4.1665795894e-2)
    series = series * part + np.float32(1.6666665459e-1)
    series = series * part + np.float32(5.0000001201e-1)
    series = series * part * part + part + np.float32(1.0)
    return kept * series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
