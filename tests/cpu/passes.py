"""What the tests of the compiled loops share: a pass over scattered blocks, and how near results must be."""

import copy

import torch

from minivllm.cpu.paged_attention import NumbaAttention
from minivllm.model.attention import KVCache, PagedAttention
from minivllm.model.inputs import PassInputs
from tests.pools import scattered

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
MIXED = [(1, 17), (5, 5), (1, 1), (33, 70), (1, 15), (17, 17), (1, 16), (1, 200)]  # (query tokens, all tokens)


class Pass:
    """A pass over a pool that is full of NaN but for what its rows have stored before.

    The first `num_shared` blocks of all rows are those of the first.
    """

    def __init__(
        self, rows, head_dim=64, ratio=3, dtype=torch.float32, block_size=16, kv_heads=2, padded=0, num_shared=0
    ):
        torch.manual_seed(0)
        packed, slots_of_rows, num_blocks = scattered(rows, block_size, num_shared)
        self.cache = KVCache.__new__(KVCache)
        shape = (2, num_blocks, block_size, kv_heads, head_dim)
        self.cache.keys, self.cache.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for row, slots in zip(packed, slots_of_rows, strict=True):
            for memory in (self.cache.keys, self.cache.values):
                stored = torch.randn(2, row.start, kv_heads, head_dim).to(dtype)
                memory.flatten(1, 2)[:, slots[: row.start]] = stored
        self.metadata, ids, _ = PassInputs(block_size, CPU).pack(packed, padded)
        heads = torch.randn(len(ids), (ratio + 2) * kv_heads, head_dim).to(dtype)
        self.qkv = heads.split((ratio * kv_heads, kv_heads, kv_heads), dim=1)  # strided, as the projection gives it

    def run(self, backend, window=None):
        """The output of layer 1, and what the cache then holds."""
        cache = copy.deepcopy(self.cache)
        return backend(cache, self.metadata, (None, window))(1, *self.qkv), cache

    def check(self, window=None):
        (out, cache), (expected, reference_cache) = (self.run(b, window) for b in (NumbaAttention, PagedAttention))
        assert out.dtype == expected.dtype and out.isfinite().all()
        assert (out.double() - expected.double()).abs().max() <= TOLERANCE[out.dtype]
        for ours, theirs in ((cache.keys, reference_cache.keys), (cache.values, reference_cache.values)):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
