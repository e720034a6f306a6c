"""Who owns which slot. Pure Python: nothing here knows tensors or the model."""

from minivllm.kv_cache.block_hash import ROOT_KEY, hash_block
from minivllm.kv_cache.contiguous import ContiguousKVCache
from minivllm.kv_cache.manager import KVCacheManager, KVRequest
from minivllm.kv_cache.paged import PagedKVCache
from minivllm.kv_cache.records import Fragmentation, MemoryEvent, PrefixCacheStats

__all__ = [
    "ROOT_KEY",
    "ContiguousKVCache",
    "Fragmentation",
    "KVCacheManager",
    "KVRequest",
    "MemoryEvent",
    "PagedKVCache",
    "PrefixCacheStats",
    "hash_block",
]
