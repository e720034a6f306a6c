"""Attention in plain torch, through a block table: the reference that every faster back end is held against.

The dense rows of the naive stages are a special case of it, so there is one attention for all stages. Any
float type works; scores and weights are computed in float32 at least.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from minivllm.model.architecture import ModelConfig


@dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens of a pass belong to which request, and where its keys and values lie.

    The tokens of all requests stand behind each other in one row, without padding; prefill, decode and
    anything between them is a request with more or fewer query tokens.

    Attributes:
        query_start_loc: `[num_reqs + 1]`, where each request's tokens begin; the last entry is num_tokens.
        seq_lens: `[num_reqs]`, tokens of each request in the cache after this pass, its new ones included.
        block_table: `[num_reqs, max_blocks]`; entry i holds tokens i * block_size and following. Entries
            beyond a request's length may be anything.
        slot_mapping: `[num_tokens]`, where each new token's key and value go: block * block_size + offset;
            -1 for a padding token, which is not stored.
        max_query_len: most tokens of a request in the pass; a bound, where the tensors are not to be looked into.
        max_seq_len: most tokens of a request in the cache, likewise.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int = 1
    max_seq_len: int = 1

    @cached_property
    def row_groups(self) -> list[tuple[int, Tensor]]:
        """Requests that are computed together: pairs (query tokens of each, `[num_rows]` request indices).

        They have the same number of query tokens and lengths within a factor of two, so that a product pads
        none to more than twice its length. Requests without tokens (padding) are in no group.
        """
        query_lens = (self.query_start_loc[1:] - self.query_start_loc[:-1]).tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (query_len, seq_len) in enumerate(zip(query_lens, self.seq_lens.tolist(), strict=True)):
            if query_len and seq_len:
                groups.setdefault((query_len, seq_len.bit_length()), []).append(row)
        device = self.seq_lens.device
        return [(query_len, torch.tensor(rows, device=device)) for (query_len, _), rows in groups.items()]

    def gathers(self, block_size: int, window: int | None) -> list["Gather"]:
        """What attention reads for each group of rows; made once per pass, the same for all its layers."""
        key = (block_size, window)
        if key not in self._gathers:
            self._gathers[key] = [self._gather(*group, *key) for group in self.row_groups]
        return self._gathers[key]

    @cached_property
    def _gathers(self) -> dict[tuple[int, int | None], list["Gather"]]:
        return {}

    def _gather(self, query_len: int, rows: Tensor, block_size: int, window: int | None) -> "Gather":
        query = torch.arange(query_len, device=rows.device)
        seq_lens = self.seq_lens[rows, None]
        position = torch.arange(int(seq_lens.max()), device=rows.device)
        stored = position < seq_lens
        blocks = self.block_table[rows][:, position // block_size]
        slots = torch.where(stored, blocks * block_size + position % block_size, 0)
        query_position = (seq_lens - query_len + query)[..., None]
        visible = position <= query_position
        if window is not None:
            visible &= position > query_position - window
        missing = None if stored.all() else ~stored[..., None, None]
        return Gather(self.query_start_loc[rows, None] + query, slots, missing, visible)


@dataclass(frozen=True)
class Gather:
    """What a group of rows reads.

    Attributes:
        tokens: `[num_rows, query_len]`, indices of their tokens in the pass.
        slots: `[num_rows, longest]`, where their keys and values lie; 0 behind a row's end.
        missing: `[num_rows, longest, 1, 1]`, True behind a row's end; None if all rows are equally long.
        visible: `[num_rows, query_len, longest]`, which keys each token may see.
    """

    tokens: Tensor
    slots: Tensor
    missing: Tensor | None
    visible: Tensor


class KVCache:
    """Keys and values of all layers, in blocks: `[num_layers, num_blocks, block_size, num_kv_heads, head_dim]`."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.block_size = block_size

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in all layers, one after the other."""
        for source, target in copies:
            self.keys[:, target] = self.keys[:, source]
            self.values[:, target] = self.values[:, source]


class Attention(Protocol):
    """A back end: made for a pass, called once per layer."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, windows: tuple[int | None, ...]) -> None: ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    @classmethod
    def warm_up(cls, cache: "KVCache", num_heads: int) -> None:
        """Compiles and tries what passes will need; once, before the first."""
        ...


class PagedAttention:
    """The `attend` of one pass over a paged cache."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, windows: tuple[int | None, ...]) -> None:
        self.cache, self.metadata, self.windows = cache, metadata, windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores the new keys and values of a layer, then attends; all shapes `[num_tokens, heads, head_dim]`."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write_kv(k, v, keys, values, self.metadata.slot_mapping)
        return paged_attention(q, keys, values, self.metadata, self.windows[layer])[0]

    @classmethod
    def warm_up(cls, cache: KVCache, num_heads: int) -> None:
        """Nothing: plain torch is compiled already."""


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's key and value into its slot; tokens with slot -1 are skipped.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`.
        v: like `k`.
        keys: `[num_blocks, block_size, num_kv_heads, head_dim]`, changed in place.
        values: like `keys`.
        slot_mapping: `[num_tokens]`, int64.
    """
    stored = slot_mapping >= 0
    keys.flatten(0, 1)[slot_mapping[stored]] = k[stored]
    values.flatten(0, 1)[slot_mapping[stored]] = v[stored]


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of every request's new tokens over its blocks.

    Requests of like shape are computed together (`AttentionMetadata.row_groups`), so that a batch of decodes
    is one product or a few. Slots beyond a request's length are never used, whatever they hold, NaN included.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, the tokens of all requests behind each other.
        keys: `[num_blocks, block_size, num_kv_heads, head_dim]`, the new tokens' already written.
        values: like `keys`.
        metadata: of the pass.
        window: how many of the latest tokens, its own included, a token may see, at least 1; None for all.

    Returns:
        The output, `[num_tokens, num_heads, head_dim]`, and the log-sum-exp of each token's scores,
        `[num_tokens, num_heads]`, float32 at least. Tokens that belong to no request get 0 and -inf.
    """
    output = torch.zeros_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    for gather in metadata.gathers(keys.shape[1], window):
        k, v = keys.flatten(0, 1)[gather.slots], values.flatten(0, 1)[gather.slots]
        if gather.missing is not None:
            k, v = k.masked_fill(gather.missing, 0), v.masked_fill(gather.missing, 0)
        output[gather.tokens], lse[gather.tokens] = masked_attention(q[gather.tokens], k, v, gather.visible)
    return output, lse


def dense_attention(q: Tensor, k: Tensor, v: Tensor, num_padding: tuple[int, ...], window: int | None = None) -> Tensor:
    """Causal attention over rows that lie side by side, one column per token: how it was before paging.

    It is paged attention over blocks of one slot (`dense_metadata`). Rows of different length are padded on
    the left, so that the newest token of every row stands in the last column.

    Args:
        q: `[batch, num_queries, num_heads, head_dim]`, the last columns.
        k: `[batch, num_columns, num_kv_heads, head_dim]`.
        v: like `k`.
        num_padding: how many columns at the left of each row are padding.
        window: how many of the latest columns, its own included, a token may see; None for all.

    Returns:
        `[batch, num_queries, num_heads, head_dim]`; 0 in padding columns.
    """
    metadata = dense_metadata(num_padding, q.shape[1], k.shape[1], q.device)
    keys, values = (x.flatten(0, 1).unsqueeze(1) for x in (k, v))
    return paged_attention(q.flatten(0, 1), keys, values, metadata, window)[0].unflatten(0, q.shape[:2])


@lru_cache(maxsize=8)
def dense_metadata(
    num_padding: tuple[int, ...], num_queries: int, num_columns: int, device: torch.device
) -> AttentionMetadata:
    """Padded rows as block tables: blocks of one slot, and each table names the neighbours behind the padding.

    A row is two requests: its padding, which has no tokens, and its text. All layers of a pass share the
    result.
    """
    lens = [num_columns - padding for padding in num_padding]
    starts, seq_lens, tables = [0], [], []
    for row, length in enumerate(lens):
        end = (row + 1) * num_columns
        starts += [(row + 1) * num_queries - min(length, num_queries), (row + 1) * num_queries]
        seq_lens += [0, length]
        tables += [[0] * num_columns, [*range(end - length, end), *([0] * (num_columns - length))]]
    return AttentionMetadata(
        torch.tensor(starts, device=device),
        torch.tensor(seq_lens, device=device),
        torch.tensor(tables, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
    )


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q · k / sqrt(head_dim)) · v over the visible keys.

    Grouped-query attention: num_heads is a multiple of num_kv_heads, and each KV head serves that many
    neighbouring query heads.

    Args:
        q: `[batch, num_queries, num_heads, head_dim]`.
        k: `[batch, num_keys, num_kv_heads, head_dim]`; finite, also where it is not visible.
        v: like `k`.
        visible: `[batch, num_queries, num_keys]`, bool; at least one True per query.

    Returns:
        The output, like `q`, and the log-sum-exp of the scores, `[batch, num_queries, num_heads]`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    num_kv_heads, head_dim = k.shape[-2:]
    # [batch, KV head, query head of its group x query, head_dim], so that each KV head is read once.
    grouped = q.to(wide).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scores = grouped.flatten(2, 3) @ k.to(wide).permute(0, 2, 3, 1) * head_dim**-0.5
    scores = scores.unflatten(2, (-1, q.shape[1])).masked_fill(~visible[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    output = weights.flatten(2, 3) @ v.to(wide).transpose(1, 2)
    output = output.unflatten(2, (-1, q.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output.to(q.dtype), lse.permute(0, 3, 1, 2).flatten(2, 3)
