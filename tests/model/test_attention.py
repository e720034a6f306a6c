"""Paged attention equals dense attention row by row, whatever lies in the slots that nobody uses."""

import random

import pytest
import torch

from minivllm.model.attention import AttentionMetadata, dense_attention, masked_attention, paged_attention, write_kv


def torch_attention(q, k, v, window=None):
    """torch's own attention for one row, `[num_tokens, heads, head_dim]`: the oracle."""
    position = torch.arange(len(k))
    query = position[len(k) - len(q) :, None]
    visible = (position <= query) & (position > query - (window or len(k)))
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=visible, enable_gqa=True)
    return output[0].transpose(0, 1)


class Batch:
    """Random requests in a pool of blocks in random order; unused slots hold `garbage`."""

    def __init__(self, lens, block_size, heads=(6, 2), head_dim=8, garbage=torch.nan, dtype=torch.float64, seed=0):
        """`lens` is a list of (context length, query length)."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.lens, num_blocks = lens, sum(-(-(c + q) // block_size) for c, q in lens) + 3
        shape = (num_blocks, block_size, heads[1], head_dim)
        self.keys, self.values = (torch.full(shape, garbage, dtype=dtype) for _ in range(2))
        ids = list(range(num_blocks))
        rng.shuffle(ids)
        tables, self.rows, starts, slots, new = [], [], [0], [], []
        for context, query in lens:
            total = context + query
            table = [ids.pop() for _ in range(-(-total // block_size))]
            places = [table[i // block_size] * block_size + i % block_size for i in range(total)]
            q = torch.randn(query, heads[0], head_dim, generator=generator, dtype=dtype)
            k, v = (torch.randn(total, heads[1], head_dim, generator=generator, dtype=dtype) for _ in range(2))
            write_kv(
                k[:context], v[:context], self.keys, self.values, torch.tensor(places[:context], dtype=torch.int64)
            )
            self.rows.append((q, k, v))
            new.append((q, k[context:], v[context:]))
            starts.append(starts[-1] + query)
            slots += places[context:]
            tables.append(table)
        longest = max(map(len, tables)) + 2
        # Entries behind a request's blocks are stale: they name blocks of others, or none that there is.
        stale = [10**9, -(10**9), 0]
        tables = [table + [stale[i % 3] for i in range(longest - len(table))] for table in tables]
        self.q, self.k, self.v = (torch.cat(parts) for parts in zip(*new, strict=True))
        self.metadata = AttentionMetadata(
            torch.tensor(starts), torch.tensor([c + q for c, q in lens]), torch.tensor(tables), torch.tensor(slots)
        )

    def paged(self, window=None):
        write_kv(self.k, self.v, self.keys, self.values, self.metadata.slot_mapping)
        return paged_attention(self.q, self.keys, self.values, self.metadata, window)

    def dense(self, window=None):
        return torch.cat([torch_attention(q, k, v, window) for q, k, v in self.rows])


MIXED = [(0, 1), (0, 17), (14, 1), (15, 1), (16, 1), (33, 1), (5, 12), (31, 17), (0, 40)]


@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 256])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_mixed_rows_equal_dense_rows(block_size, window):
    batch = Batch(MIXED, block_size)
    output, lse = batch.paged(window)
    torch.testing.assert_close(output, batch.dense(window), rtol=0, atol=1e-12)
    assert lse.isfinite().all()


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (9, 3), (5, 1), (8, 8), (14, 2), (17, 1), (32, 1)])
def test_any_ratio_of_heads(heads):
    batch = Batch(MIXED, 16, heads=heads)
    torch.testing.assert_close(batch.paged()[0], batch.dense(), rtol=0, atol=1e-12)


def test_a_query_head_reads_the_kv_head_of_its_group():
    # KV head h holds the constant h: neighbouring query heads share one.
    values = torch.arange(3.0).reshape(1, 1, 3, 1).expand(1, 4, 3, 8)
    output, _ = masked_attention(torch.randn(1, 2, 9, 8), torch.randn(1, 4, 3, 8), values, torch.ones(1, 2, 4) > 0)
    assert output[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize("length", [1, 15, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_of_nan_gives_the_same_as_a_pool_of_zeros(length, dtype):
    lens = [(length - 1, 1), (0, length)]
    clean, dirty = (Batch(lens, 16, garbage=g, dtype=dtype).paged()[0] for g in (0.0, torch.nan))
    assert dirty.isfinite().all()
    assert torch.equal(clean, dirty)


def test_the_log_sum_exp_is_that_of_the_visible_scores():
    batch = Batch([(5, 1)], 4)
    output, lse = batch.paged()
    q, k, v = batch.rows[0]
    for head in range(6):
        scores = k[:, head // 3] @ q[0, head] / 8**0.5
        assert lse[0, head].item() == pytest.approx(scores.logsumexp(0).item(), abs=1e-12)
        expected = (scores - lse[0, head]).exp() @ v[:, head // 3]
        torch.testing.assert_close(output[0, head], expected, rtol=0, atol=1e-12)


def test_two_halves_of_a_context_merge_by_their_log_sum_exp():
    batch = Batch([(19, 1)], 4)
    whole, _ = batch.paged()
    q, k, v = batch.rows[0]
    parts = [
        masked_attention(q[None], k[None, a:b], v[None, a:b], torch.ones(1, 1, b - a, dtype=torch.bool))
        for a, b in ((0, 7), (7, 20))
    ]
    weights = torch.stack([part_lse for _, part_lse in parts]).softmax(0)
    merged = sum(weight[..., None] * part for weight, (part, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(merged[0], whole, rtol=0, atol=1e-12)


def test_padding_tokens_are_not_stored_and_get_zero():
    batch = Batch([(3, 2), (0, 4)], 4)
    keys, values = batch.keys.clone(), batch.values.clone()
    expected, _ = batch.paged()
    pad = torch.zeros(3, *batch.q.shape[1:], dtype=batch.q.dtype)
    kv_pad = torch.full((3, *batch.k.shape[1:]), 7.0, dtype=batch.k.dtype)
    slots = torch.cat([batch.metadata.slot_mapping, torch.tensor([-1, -1, -1])])
    write_kv(torch.cat([batch.k, kv_pad]), torch.cat([batch.v, kv_pad]), keys, values, slots)
    assert torch.equal(keys.nan_to_num(9.0), batch.keys.nan_to_num(9.0))
    # Padding behind the last request, and padding that is a request of length 0 (with one or two queries).
    for starts, seq_lens in (([0, 2, 6], [5, 4]), ([0, 2, 6, 6], [5, 4, 0]), ([0, 2, 6, 7, 9], [5, 4, 0, 0])):
        table = batch.metadata.block_table[torch.tensor([0, 1, 1, 1])[: len(seq_lens)]]
        metadata = AttentionMetadata(torch.tensor(starts), torch.tensor(seq_lens), table, slots)
        output, lse = paged_attention(torch.cat([batch.q, pad]), keys, values, metadata)
        torch.testing.assert_close(output[:6], expected, rtol=0, atol=1e-12)
        assert (output[6:] == 0).all() and (lse[6:] == -torch.inf).all()


def test_no_row_is_padded_to_more_than_twice_its_length():
    rng = random.Random(0)
    lens = [rng.choice([1, 2, 3, 8, 100, 4096]) for _ in range(50)]
    metadata = AttentionMetadata(torch.arange(51), torch.tensor(lens), torch.zeros(50, 1), torch.zeros(50))
    seen = []
    for query_len, rows in metadata.row_groups:
        group = [lens[row] for row in rows.tolist()]
        assert query_len == 1 and max(group) < 2 * min(group) + 1
        seen += rows.tolist()
    assert sorted(seen) == list(range(50)) and len(metadata.row_groups) <= 6


def test_bf16_is_computed_in_float32():
    batch = Batch(MIXED, 16, dtype=torch.bfloat16)
    output, lse = batch.paged()
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    wide = torch.cat([torch_attention(*(x.double() for x in row)) for row in batch.rows])
    torch.testing.assert_close(output.double(), wide, rtol=2**-8, atol=2**-9)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_queries", [1, 4, 12])
def test_padded_rows_equal_torch_row_by_row(num_queries, window):
    generator = torch.Generator().manual_seed(0)
    num_padding = (0, 5, 11, 8)
    q = torch.randn(4, num_queries, 6, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(4, 12, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    output = dense_attention(q, k, v, num_padding, window)
    for row, padding in enumerate(num_padding):
        real = min(num_queries, 12 - padding)
        expected = torch_attention(q[row, num_queries - real :], k[row, padding:], v[row, padding:], window)
        torch.testing.assert_close(output[row, num_queries - real :], expected, rtol=0, atol=1e-12)
        assert (output[row, : num_queries - real] == 0).all()
