"""Keys: one text, one key; another text, or another salt, another key; each computed once."""

import hashlib
import struct
from types import SimpleNamespace

import pytest

from minivllm.kv_cache import block_hash
from minivllm.kv_cache.block_hash import ALGORITHMS, ROOT_KEY, BlockHasher, ComparedKey, hash_block, short_key


def request(token_ids, salt=None):
    """As much of a request as a hasher looks at."""
    return SimpleNamespace(token_ids=list(token_ids), block_keys=[], cache_salt=salt, skip_reading_prefix_cache=False)


def keys(token_ids, salt=None, block_size=4, algorithm="sha256"):
    return BlockHasher(block_size, algorithm).keys(request(token_ids, salt))


@pytest.fixture
def counted(monkeypatch):
    """Counts the blocks that are hashed."""
    contents = []

    def count(original):
        return lambda parent, content: contents.append(content) or original(parent, content)

    for name, original in list(ALGORITHMS.items()):
        monkeypatch.setitem(ALGORITHMS, name, count(original))
    return contents


# --- SHA-256


def test_a_key_is_sha256_over_parent_tokens_and_extra_keys():
    parent = bytes(range(32))
    expected = parent + b"\x01\x00\x00\x00" + b"\x00\x02\x00\x00" + b"\xff\xff\xff\xff"
    assert hash_block(parent, [1, 512, 2**32 - 1]) == hashlib.sha256(expected).digest()
    expected += b"\x0a\x00\x00\x00cache_salt" + b"\x03\x00\x00\x00\xe2\x82\xac"
    assert hash_block(parent, [1, 512, 2**32 - 1], [("cache_salt", "€")]) == hashlib.sha256(expected).digest()
    assert bytes(32) == ROOT_KEY and len(hash_block(ROOT_KEY, [1])) == 32


def test_the_hasher_gives_the_keys_of_hash_block():
    first = hash_block(ROOT_KEY, [1, 2, 3, 4])
    second = hash_block(first, [5, 6, 7, 8])
    assert keys([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, second]
    salted = hash_block(ROOT_KEY, [1, 2, 3, 4], [("cache_salt", "s")])
    assert keys([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="s") == [salted, hash_block(salted, [5, 6, 7, 8])]


def test_the_bytes_of_a_chain_are_those_that_anybody_can_compute():
    def sha256(*parts):
        return hashlib.sha256(b"".join(parts)).digest()

    salt = struct.pack("<I", 10) + b"cache_salt" + struct.pack("<I", 1) + b"s"
    first = sha256(bytes(32), struct.pack("<2I", 1, 23), salt)
    second = sha256(first, struct.pack("<2I", 12, 3))
    assert keys([1, 23, 12, 3], salt="s", block_size=2) == [first, second]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tokens_whose_digits_run_together_have_two_keys(algorithm):
    [first] = keys([1, 23], block_size=2, algorithm=algorithm)
    [second] = keys([12, 3], block_size=2, algorithm=algorithm)
    assert first != second and hash_block(ROOT_KEY, [1, 23]) != hash_block(ROOT_KEY, [12, 3])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_block_under_two_parents_has_two_keys(algorithm):
    one, other = keys([1, 1, 5, 5], block_size=2, algorithm=algorithm), keys([2, 2, 5, 5], 2 * "s", 2, algorithm)
    third = keys([2, 2, 5, 5], block_size=2, algorithm=algorithm)
    assert len({one[1], other[1], third[1]}) == 3
    assert keys([5, 5], block_size=2, algorithm=algorithm)[0] != one[1]


def test_extra_keys_are_told_apart_by_kind_and_by_length():
    pairs = [
        [],
        [("a", "bc")],
        [("ab", "c")],
        [("", "abc")],
        [("abc", "")],
        [("cache_salt", "x")],
        [("lora", "x")],
        [("cache_salt", "x"), ("lora", "y")],
        [("lora", "y"), ("cache_salt", "x")],
        [("cache_salt", "x\x04\x00\x00\x00lora\x01\x00\x00\x00y")],
    ]
    assert len({hash_block(ROOT_KEY, [7], extra) for extra in pairs}) == len(pairs)


def test_a_salt_can_not_pass_for_tokens():
    packed = struct.pack("<I", 10) + b"cache_salt" + struct.pack("<I", 6) + b"secret"  # 24 bytes: six tokens
    tokens = list(struct.unpack("<6I", packed))
    assert hash_block(ROOT_KEY, [1, 2, *tokens]) == hash_block(ROOT_KEY, [1, 2], [("cache_salt", "secret")])
    # So within one cache it matters that all blocks have one size.
    [salted], [unsalted] = keys([1, 2], "secret", 2), keys([1, 2, *tokens], None, 8)
    assert salted == unsalted and keys([1, 2, *tokens], None, 2)[0] != salted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_string_is_a_salt_of_its_own(algorithm):
    salts = [None, "\ud800", "\udfff", "\x00", "None", "ä", "a\u0308", "😀", "s" * 100_000]
    assert len({keys([1, 2], salt, 2, algorithm)[0] for salt in salts}) == len(salts)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_of_four_bytes_is_refused(token):
    with pytest.raises(struct.error):
        hash_block(ROOT_KEY, [token])


# --- the hasher


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_block_is_hashed_once_as_the_tokens_grow(counted, algorithm):
    hasher, asked = BlockHasher(4, algorithm), request([])
    for count in range(1, 41):
        asked.token_ids.append(count)
        assert len(hasher.keys(asked)) == len(hasher.keys(asked)) == len(counted) == count // 4
    assert asked.block_keys == keys(range(1, 41), algorithm=algorithm)
    assert hasher.keys(asked) is asked.block_keys


def test_keys_that_are_there_are_not_computed_again(counted):
    hasher, parent = BlockHasher(4), request(range(8))
    branch = request(range(12))
    branch.block_keys = list(hasher.keys(parent))
    assert len(counted) == 2
    assert hasher.keys(branch)[:2] == parent.block_keys and len(counted) == 3 and len(parent.block_keys) == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_salt_stands_in_the_first_block_only_and_is_inherited(counted, algorithm):
    salted = keys(range(12), "a", algorithm=algorithm)
    tag = block_hash.pack_extra_keys([("cache_salt", "a")])
    assert [content.endswith(tag) for content in counted] == [True, False, False]
    assert [len(content) for content in counted] == [16 + len(tag), 16, 16]
    for salt in ("b", None):
        assert not set(salted) & set(keys(range(12), salt, algorithm=algorithm))
    assert salted == keys(range(12), "a", algorithm=algorithm)


def test_the_salt_is_not_added_again_to_blocks_that_fill_later(counted):
    hasher, asked = BlockHasher(2), request([1, 2], "a")
    hasher.keys(asked)
    asked.token_ids += [3, 4]
    assert hasher.keys(asked) == keys([1, 2, 3, 4], "a", 2) and len(counted[1]) == 8


def test_a_block_that_is_not_full_has_no_key():
    assert keys([1, 2, 3]) == [] and keys([]) == [] and len(keys([1, 2, 3, 4, 5, 6, 7])) == 1


@pytest.mark.parametrize("algorithm", ["md5", "", "SHA256", "sha256_cbor"])
def test_an_unknown_algorithm_is_refused(algorithm):
    with pytest.raises(ValueError, match=f"the hash algorithm must be one of sha256, builtin, got {algorithm!r}"):
        BlockHasher(16, algorithm)


# --- Python's own hash, with a comparison


@pytest.fixture
def constant(monkeypatch):
    """The worst hash that there is."""
    monkeypatch.setattr(block_hash, "weak_hash", lambda value: 7)


def test_a_weak_key_is_found_by_an_equal_one(constant):
    stored = dict.fromkeys(keys(range(12), "a", algorithm="builtin"))
    assert list(stored) == keys(range(12), "a", algorithm="builtin") and len(stored) == 3


@pytest.mark.parametrize(
    ("token_ids", "salt"),
    [([1, 2, 9, 9], None), ([9, 9, 3, 4], None), ([3, 4, 1, 2], None), ([1, 2, 3, 4], "a"), ([3, 4], None)],
    ids=["other content", "other parent", "other order", "other salt", "no parent"],
)
def test_with_a_constant_hash_other_texts_have_other_keys(constant, token_ids, salt):
    mine, others = keys([1, 2, 3, 4], None, 2, "builtin"), keys(token_ids, salt, 2, "builtin")
    assert hash(mine[-1]) == hash(others[-1]) == 7
    assert mine[-1] != others[-1] and others[-1] not in dict.fromkeys(mine[1:])
    assert mine[-1] != 7 and mine[-1] is not None


def test_a_comparison_that_fails_changes_no_key(constant):
    one, other = keys([1, 2, 3, 4], None, 2, "builtin"), keys([9, 2, 3, 4], None, 2, "builtin")
    for _ in range(2):
        assert one[1] != other[1]
    assert one[1].parent is one[0] and other[1].parent is other[0]


@pytest.mark.parametrize("weak", [True, False])
def test_long_chains_are_compared_without_recursion(monkeypatch, weak):
    if weak:
        monkeypatch.setattr(block_hash, "weak_hash", lambda value: 7)
    tokens = list(range(5000))
    one, same = keys(tokens, None, 1, "builtin"), keys(tokens, None, 1, "builtin")
    other = keys([-1 % 2**32, *tokens[1:]], None, 1, "builtin")
    assert one[-1] == same[-1] and one[-1] != other[-1] and one[-1] != one[-2]
    assert len({one[-1], same[-1], other[-1]}) == 2


class CountingBytes(bytes):
    """Counts how often contents are compared."""

    compared = 0

    def __ne__(self, other):
        CountingBytes.compared += 1
        return bytes.__ne__(self, other)

    __hash__ = bytes.__hash__


def test_finding_a_long_chain_block_by_block_compares_each_block_about_once():
    """A thousand blocks are 500,000 comparisons if every key is compared down to the first block."""

    def chain():
        found = [ComparedKey(None, CountingBytes(b"first"))]
        for number in range(999):
            found.append(ComparedKey(found[-1], CountingBytes(b"%d" % number)))
        return found

    CountingBytes.compared = 0
    stored = {key: key for key in chain()}
    for _ in range(3):
        asked = chain()
        before = CountingBytes.compared
        assert all(stored[key] is not key for key in asked)
        assert CountingBytes.compared - before <= 2 * 1000
        before = CountingBytes.compared
        assert all(key in stored for key in asked)
        assert CountingBytes.compared - before <= 2 * 1000


# --- for those who look


def test_a_short_key_is_the_first_sixteen_digits():
    assert short_key(bytes(range(32))) == "0001020304050607"
    weak = ComparedKey(None, b"x")
    assert short_key(weak) == f"{hash(weak) % 2**64:016x}" and len(short_key(weak)) == 16
