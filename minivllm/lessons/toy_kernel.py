"""A first Triton kernel, for lesson 04 to read before the real one: keys are gathered through a block table."""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gather_kernel(
    out,  # [num_keys, head_dim]
    keys,  # [num_blocks, block_size, head_dim]
    table,  # [max_blocks]
    num_keys,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """A program: one block of the request."""
    block = tl.load(table + tl.program_id(0))
    offset, dim = tl.arange(0, BLOCK_SIZE), tl.arange(0, HEAD_DIM)
    slot = block * BLOCK_SIZE + offset
    place = tl.program_id(0) * BLOCK_SIZE + offset  # of each slot's token in the text
    mask = (place < num_keys)[:, None]  # the last block may not be full
    tile = tl.load(keys + slot[:, None] * HEAD_DIM + dim, mask=mask)
    tl.store(out + place[:, None] * HEAD_DIM + dim, tile, mask=mask)


def gather(keys: Tensor, table: Tensor, num_keys: int) -> Tensor:
    """The keys of one request and one KV head behind each other, `[num_keys, head_dim]`.

    Args:
        keys: `[num_blocks, block_size, head_dim]`, contiguous; both sizes are powers of two.
        table: `[max_blocks]`, the request's blocks.
        num_keys: of the request.
    """
    _, block_size, head_dim = keys.shape
    out = torch.empty(num_keys, head_dim, dtype=keys.dtype, device=keys.device)
    num_blocks = triton.cdiv(num_keys, block_size)
    gather_kernel[(num_blocks,)](out, keys, table, num_keys, BLOCK_SIZE=block_size, HEAD_DIM=head_dim)
    return out
