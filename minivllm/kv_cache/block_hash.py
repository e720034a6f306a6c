"""Keys of full blocks: two blocks with one key hold the same keys and values.

What attention writes for a token depends on all tokens before it, so a block's key covers them too, through the key of
the block before it (its parent). A wrong match would answer one user with another's text, so the default key is
cryptographic: nobody can make two texts with one SHA-256. Knows nothing of blocks and nothing of tensors.
"""

import hashlib
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

BlockKey = Hashable
ROOT_KEY = bytes(32)
"""The parent of a first block."""


class HashedRequest(Protocol):
    """What a memory that caches prefixes must know of a request.

    Attributes:
        token_ids: its tokens so far; they only grow.
        block_keys: the keys of its full blocks, as far as they are computed; kept by the hasher.
        cache_salt: only requests with the same salt share blocks; None is a salt of its own.
        skip_reading_prefix_cache: whether all its tokens are to be computed, whatever could be found.
    """

    token_ids: list[int]
    block_keys: list[BlockKey]
    cache_salt: str | None

    @property
    def skip_reading_prefix_cache(self) -> bool: ...


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[tuple[str, str]] = ()) -> bytes:
    """The SHA-256 key of a full block, 32 bytes.

    Over the parent's key, the token ids in four bytes each, little-endian (so that 1, 23 and 12, 3 differ), and then
    each extra key as its kind and its value, both in UTF-8 behind their length in four bytes (so that no value can pass
    for one of another kind).

    Args:
        parent: key of the block before it; `ROOT_KEY` for a first block.
        token_ids: all tokens of the block; within one cache they are always block_size many.
        extra_keys: whatever else the keys and values, or who may share them, depend on: pairs (kind, value).

    Raises:
        struct.error: a token id below 0 or above 2^32 - 1.
    """
    return hashlib.sha256(parent + pack_tokens(token_ids) + pack_extra_keys(extra_keys)).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids in four bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def pack_extra_keys(extra_keys: Sequence[tuple[str, str]]) -> bytes:
    """Kinds and values, each behind its length; a lone surrogate, which UTF-8 does not have, is taken as it is."""
    parts = [part.encode("utf-8", "surrogatepass") for pair in extra_keys for part in pair]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


class BlockHasher:
    """Computes each request's keys once, and as they come."""

    def __init__(self, block_size: int, algorithm: str = "sha256") -> None:
        """Takes the size of a block in tokens, and one of `ALGORITHMS`.

        Raises:
            ValueError: another algorithm.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"the hash algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        self.block_size = block_size
        self._key: Callable[[Any, bytes], BlockKey] = ALGORITHMS[algorithm]

    def keys(self, request: HashedRequest) -> list[BlockKey]:
        """The keys of a request's full blocks; those that it has already are not computed again."""
        keys, size = request.block_keys, self.block_size
        start, end = len(keys), len(request.token_ids) // size
        if start >= end:
            return keys
        packed, width = pack_tokens(request.token_ids[start * size : end * size]), 4 * size
        for place in range(0, len(packed), width):
            content = packed[place : place + width]
            if not keys and request.cache_salt is not None:  # the others inherit it from the first
                content += pack_extra_keys([("cache_salt", request.cache_salt)])
            keys.append(self._key(keys[-1] if keys else None, content))
        return keys


class ComparedKey:
    """A key with a cheap hash, for which everything that it stands for is compared.

    Python's own hash is no secret and not made to keep texts apart, so a match of hashes proves nothing here: equal
    are two keys whose contents, and all contents before them, are.
    """

    __slots__ = ("content", "parent", "value")

    def __init__(self, parent: "ComparedKey | None", content: bytes) -> None:
        self.parent, self.content = parent, content
        self.value: int = weak_hash((parent.value if parent else 0, content))

    def __hash__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        mine, others = self, other
        while mine is not others:
            if not (isinstance(mine, ComparedKey) and isinstance(others, ComparedKey)):
                return False
            if mine.content != others.content:
                return False
            mine, others = mine.parent, others.parent  # type: ignore[assignment]
        if isinstance(other, ComparedKey):
            other.parent = self.parent  # that of the stored one, so that the next block's comparison ends here
        return True


weak_hash = hash


def _sha256_key(parent: bytes | None, content: bytes) -> bytes:
    return hashlib.sha256((ROOT_KEY if parent is None else parent) + content).digest()


ALGORITHMS: dict[str, Callable[[Any, bytes], BlockKey]] = {"sha256": _sha256_key, "builtin": ComparedKey}


def short_key(key: BlockKey) -> str:
    """A key's first 16 hexadecimal digits, for those who look."""
    return key[:8].hex() if isinstance(key, bytes) else f"{hash(key) & (2**64 - 1):016x}"
