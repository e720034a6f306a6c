"""Attention through the block table, as one Triton kernel for rows of any kind.

One program takes a few query tokens of one request, with all query heads that share a KV head, and goes over the
request's keys tile by tile, keeping a running softmax (Dao et al., "FlashAttention", NeurIPS 2022). Where a pass has
too few programs to fill the card, the keys of a request are split among several, and what they found is merged by
log-sum-exp ("Flash-Decoding", 2023). The reference is `minivllm.model.attention.paged_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from minivllm.kernels.launch import Launch, next_power_of_2


@triton.jit
def find_request(starts, tile, num_reqs, BLOCK_Q: tl.constexpr):
    """The request that a query tile belongs to: the tiles of request i begin at starts[i] // BLOCK_Q + i."""
    low, high = 0, num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle).to(tl.int32) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "window", "table_stride", "num_splits"])
def paged_attention_kernel(
    out,  # [num_tokens, num_heads, head_dim], or [num_splits, …] in float32
    lse,  # [num_tokens, num_heads], or [num_splits, …]
    q,  # [num_tokens, num_heads, head_dim]
    keys,  # [num_blocks, block_size, num_kv_heads, head_dim]
    values,
    block_table,  # [num_reqs, max_blocks]
    starts,  # [num_reqs + 1]
    seq_lens,  # [num_reqs]
    scale,
    num_reqs,
    num_tokens,
    window,  # keys that a token may see; 0 for all
    table_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: Triton's interpreter can't multiply bfloat16
):
    """A program: one query tile of one request, one KV head, one split of the keys."""
    # 1. Who am I?
    request = find_request(starts, tl.program_id(0), num_reqs, BLOCK_Q)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts + request).to(tl.int32), tl.load(starts + request + 1).to(tl.int32)
    first_query = (tl.program_id(0) - start // BLOCK_Q - request) * BLOCK_Q
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    num_queries = tl.minimum(end - start, seq_len)
    if first_query >= num_queries:
        return

    # 2. The query tile: row m is query m // RATIO of the tile, head m % RATIO of the group.
    row, column, dim = tl.arange(0, BLOCK_M), tl.arange(0, TILE_N), tl.arange(0, WIDTH)
    query = first_query + row // RATIO
    head = kv_head * RATIO + row % RATIO
    row_ok = (row < BLOCK_Q * RATIO) & (query < num_queries)
    dim_ok = dim < HEAD_DIM
    token = (start + query).to(tl.int64)
    q_place = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim
    q_tile = tl.load(q + q_place, mask=row_ok[:, None] & dim_ok, other=0.0)
    if WIDEN:
        q_tile = q_tile.to(tl.float32)

    # 3. The keys that anybody in the tile may see, and this split's part of them.
    position = seq_len - num_queries + query  # of each row in its text
    last = seq_len - num_queries + tl.minimum(first_query + BLOCK_Q, num_queries)
    first = 0
    if window > 0:
        first = tl.maximum(seq_len - num_queries + first_query - window + 1, 0) // TILE_N
    tiles = tl.cdiv(last, TILE_N) - first
    per_split = tl.cdiv(tiles, num_splits)
    begin = first + split * per_split
    stop = tl.minimum(begin + per_split, first + tiles)

    # 4. Tile by tile: scores, running maximum and sum, output.
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for tile in range(begin, stop):
        place = tile * TILE_N + column
        stored = place < last
        block = tl.load(block_table + request.to(tl.int64) * table_stride + place // BLOCK_SIZE, mask=stored, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
        kv_place = (slot * (NUM_HEADS // RATIO) + kv_head)[:, None] * HEAD_DIM + dim
        mask = stored[:, None] & dim_ok
        k_tile = tl.load(keys + kv_place, mask=mask, other=0.0)
        v_tile = tl.load(values + kv_place, mask=mask, other=0.0)
        if WIDEN:
            k_tile, v_tile = k_tile.to(tl.float32), v_tile.to(tl.float32)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        visible = row_ok[:, None] & (place <= position[:, None])
        if window > 0:
            visible = visible & (place > position[:, None] - window)
        scores = tl.where(scores == float("-inf"), float("nan"), scores)  # it overflowed: no output may look sound
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a row that has seen nothing yet
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        highest = new_highest

    # 5. Output and log-sum-exp; a split that saw nothing gives 0 and -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    result = result / divisor[:, None]
    found = tl.where(total == 0.0, float("-inf"), highest + tl.log(divisor))
    place = (split.to(tl.int64) * num_tokens + token) * NUM_HEADS + head
    tl.store(out + place[:, None] * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=row_ok[:, None] & dim_ok)
    tl.store(lse + place, found, mask=row_ok)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_kernel(
    out,  # [num_tokens, num_heads, head_dim]
    lse,  # [num_tokens, num_heads]
    parts,  # [num_splits, num_tokens, num_heads, head_dim]
    part_lse,  # [num_splits, num_tokens, num_heads]
    num_rows,  # num_tokens * num_heads
    num_splits,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, padded to a power of two
):
    """A program: one token and head; parts are weighted by exp(their log-sum-exp)."""
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    split_ok, dim_ok = split < num_splits, dim < HEAD_DIM
    found = tl.load(part_lse + split * num_rows + row, mask=split_ok, other=float("-inf"))
    highest = tl.max(found, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(found - base)
    total = tl.sum(weights, 0)
    place = (split.to(tl.int64) * num_rows + row)[:, None] * HEAD_DIM + dim
    part = tl.load(parts + place, mask=split_ok[:, None] & dim_ok, other=0.0)
    divisor = tl.where(total == 0.0, 1.0, total)
    result = tl.sum(part * weights[:, None], 0) / divisor
    tl.store(out + row * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim_ok)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), base + tl.log(divisor)))


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    launch: Launch,
    window: int | None = None,
    num_splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every request's new tokens over its blocks, as the reference computes it.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, contiguous; float16, bfloat16 or float32.
        keys: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous.
        values: like `keys`.
        query_start_loc: `[num_reqs + 1]`.
        seq_lens: `[num_reqs]`; 0 for a padded row.
        block_table: `[num_reqs, max_blocks]`, contiguous in its rows.
        launch: sizes of the tiles.
        window: how many of the latest tokens, its own included, a token may see; None for all.
        num_splits: parts into which the keys of every request are divided.

    Returns:
        The output, like `q`, and the log-sum-exp, `[num_tokens, num_heads]`, float32. Tokens that belong to no request
        get 0 and -inf.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = keys.shape[1:3]
    width, ratio, num_reqs = next_power_of_2(head_dim), num_heads // num_kv_heads, len(seq_lens)
    out = torch.zeros_like(q)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device)
    parts, part_lse = out, lse
    if num_splits > 1:
        parts = torch.zeros((num_splits, *q.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.full((num_splits, num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device)
    num_tiles = num_tokens // launch.block_q + num_reqs  # at least as many as there are, known without looking
    paged_attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        parts,
        part_lse,
        q,
        keys,
        values,
        block_table,
        query_start_loc,
        seq_lens,
        head_dim**-0.5,
        num_reqs,
        num_tokens,
        window or 0,
        block_table.stride(0),
        num_splits,
        NUM_HEADS=num_heads,
        RATIO=ratio,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK_M=launch.block_m,
        BLOCK_Q=launch.block_q,
        TILE_N=launch.tile_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        WIDEN=q.dtype == torch.bfloat16 and isinstance(paged_attention_kernel, InterpretedFunction),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        merge_kernel[(num_tokens * num_heads,)](
            out,
            lse,
            parts,
            part_lse,
            num_tokens * num_heads,
            num_splits,
            HEAD_DIM=head_dim,
            WIDTH=width,
            SPLITS=next_power_of_2(num_splits),
        )
    return out, lse
