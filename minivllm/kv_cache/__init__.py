"""Who owns which slot. Pure Python: nothing here knows tensors or the model."""

from minivllm.kv_cache.contiguous import ContiguousKVCache
from minivllm.kv_cache.manager import Fragmentation, KVCacheManager, KVRequest, MemoryEvent
from minivllm.kv_cache.paged import PagedKVCache

__all__ = ["ContiguousKVCache", "Fragmentation", "KVCacheManager", "KVRequest", "MemoryEvent", "PagedKVCache"]
