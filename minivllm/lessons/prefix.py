"""What the lesson on prefix caching needs beside the engine: workloads that share prefixes, and a cache that is
deliberately weak."""

import hashlib
import random
from typing import Any

from minivllm.kv_cache.block_hash import BlockHasher, BlockKey, HashedRequest, pack_tokens
from minivllm.lessons.batching import Arrival
from minivllm.llm import LLM


def shared_prefix_workload(
    num_requests: int,
    num_prefixes: int | None,
    prefix_len: int = 512,
    own_len: int = 32,
    max_tokens: int = 16,
    every_s: float = 0.0,
    seed: int = 0,
) -> list[Arrival]:
    """Requests that begin with one of a few prefixes, drawn at random, and go on in their own way.

    Args:
        num_requests: how many.
        num_prefixes: how many different prefixes there are to draw from; None gives each request its own.
        prefix_len: tokens of a prefix.
        own_len: tokens behind it.
        max_tokens: tokens of an answer.
        every_s: seconds between two arrivals; 0 lets all come at once.
        seed: of the draw. The same seed draws the same requests, so that runs compare.
    """
    rng = random.Random(seed)
    requests = []
    for index in range(num_requests):
        prefix = index if num_prefixes is None else rng.randrange(num_prefixes)
        prompt = [1 + (prefix * 7919 + place) % 40_000 for place in range(prefix_len)]
        prompt += [50_000 + index * own_len + place for place in range(own_len)]
        requests.append(Arrival(prompt, max_tokens, at_s=every_s * index))
    return requests


class ParentlessHasher(BlockHasher):
    """Keys over a block's own tokens and nothing else: the mistake that section 3 of the lesson takes advantage of."""

    def keys(self, request: HashedRequest) -> list[BlockKey]:
        size, tokens = self.block_size, request.token_ids
        for start in range(len(request.block_keys) * size, len(tokens) // size * size, size):
            request.block_keys.append(hashlib.sha256(pack_tokens(tokens[start : start + size])).digest())
        return request.block_keys


def without_parents(llm: LLM, **fields: Any) -> LLM:
    """An `LLM` on the same weights whose prefix cache leaves the parent out of its keys. For the lesson only: it gives
    wrong answers."""
    weak = llm.reconfigure(**fields)
    weak.engine.scheduler.manager._hasher = ParentlessHasher(weak.config.block_size)  # type: ignore[attr-defined]
    return weak
