"""Writing keys and values into their slots, as a Triton kernel. The reference is `write_kv` of attention in torch."""

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.launch import next_power_of_2


@triton.jit
def reshape_and_cache_kernel(
    k,  # [num_tokens, num_kv_heads, head_dim]
    v,
    keys,  # [num_blocks, block_size, num_kv_heads, head_dim]
    values,
    slot_mapping,  # [num_tokens]
    k_stride,  # from one token to the next
    v_stride,
    SIZE: tl.constexpr,  # num_kv_heads * head_dim
    WIDTH: tl.constexpr,  # SIZE, padded to a power of two
):
    """A program: one token, all its heads, which lie behind each other in the cache as they do in the pass."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:  # padding
        return
    place = tl.arange(0, WIDTH)
    mask = place < SIZE
    tl.store(keys + slot * SIZE + place, tl.load(k + token * k_stride + place, mask=mask), mask=mask)
    tl.store(values + slot * SIZE + place, tl.load(v + token * v_stride + place, mask=mask), mask=mask)


def reshape_and_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's key and value into its slot; tokens with slot -1 are skipped.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`; the heads of a token contiguous, tokens at any stride.
        v: like `k`.
        keys: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, changed in place.
        values: like `keys`.
        slot_mapping: `[num_tokens]`.

    Raises:
        ValueError: shapes that do not belong together, or heads that are not contiguous.
    """
    if not k.shape == v.shape == (len(slot_mapping), *keys.shape[2:]):
        raise ValueError(
            f"k has the shape {tuple(k.shape)} and v {tuple(v.shape)}, and {len(slot_mapping)} tokens of "
            f"{keys.shape[2]} heads of {keys.shape[3]} are to be stored"
        )
    for name, x in (("k", k), ("v", v)):
        if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
            raise ValueError(f"{name} has strides {x.stride()}: the heads of a token must be contiguous")
    size = k.shape[1] * k.shape[2]
    reshape_and_cache_kernel[(len(k),)](
        k, v, keys, values, slot_mapping, k.stride(0), v.stride(0), SIZE=size, WIDTH=next_power_of_2(size)
    )
