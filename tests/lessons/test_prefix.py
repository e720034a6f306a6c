"""What lesson 06 uses beside the engine: the tree, the workloads, and the cache without parents."""

import random

import pytest

from minivllm.lessons.batching import Arrival, model_free_engine, serve
from minivllm.lessons.prefix import ParentlessHasher, shared_prefix_workload, without_parents
from minivllm.lessons.radix import RadixCache
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams


def longest_common(sequences, sequence):
    """The longest beginning that a sequence has in common with one of several."""
    shared = [next((i for i, (a, b) in enumerate(zip(s, sequence, strict=False)) if a != b), None) for s in sequences]
    ends = [min(len(s), len(sequence)) if end is None else end for s, end in zip(sequences, shared, strict=True)]
    return max(ends, default=0)


def random_sequences(seed, count=60):
    """Sequences over few tokens, so that they share beginnings of all lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(2) for _ in range(rng.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_with_room_finds_the_longest_common_beginning_but_for_the_last_token(seed):
    tree, before = RadixCache(10_000), []
    for sequence in random_sequences(seed):
        assert tree.serve(sequence) == min(longest_common(before, sequence), len(sequence) - 1)
        before.append(sequence)
    stored = {tuple(s[:end]) for s in before for end in range(1, len(s) + 1)}
    assert tree.num_used == len(stored)  # each beginning is stored once


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_finds_what_blocks_of_one_token_find(seed):
    sequences, tree = random_sequences(seed), RadixCache(10_000)
    engine = model_free_engine(block_size=1, max_num_seqs=1, enable_prefix_caching=True)
    served = serve(engine, [Arrival(sequence, 1) for sequence in sequences])
    assert [output.num_cached_tokens for output in served.outputs] == [tree.serve(s) for s in sequences]


def test_a_full_tree_drops_the_leaf_that_was_used_longest_ago():
    tree = RadixCache(8)
    tree.serve([1, 2, 3, 4])
    tree.serve([1, 2, 5, 6])  # two tokens shared: six are stored
    tree.serve([1, 2, 3, 4])
    tree.serve([7, 8, 9])  # nine: 5, 6 go
    assert tree.num_used == 7
    assert tree.serve([1, 2, 3, 4]) == 3
    assert tree.serve([1, 2, 5]) == 2


@pytest.mark.parametrize("seed", range(10))
def test_a_full_tree_stays_within_its_size(seed):
    tree = RadixCache(20)
    for sequence in random_sequences(seed):
        tree.serve(sequence)
        assert tree.num_used == sum(len(node.token_ids) for node in tree._nodes(tree.root)) <= 20


def test_requests_share_as_many_prefixes_as_there_are():
    for num_prefixes in (1, 3, None):
        requests = shared_prefix_workload(30, num_prefixes, prefix_len=8, own_len=4, every_s=0.5)
        assert len({tuple(r.prompt[:8]) for r in requests}) == (30 if num_prefixes is None else num_prefixes)
        assert len({tuple(r.prompt[8:]) for r in requests}) == 30
        assert [r.at_s for r in requests] == [0.5 * index for index in range(30)]
        assert {len(r.prompt) for r in requests} == {12}
    assert requests == shared_prefix_workload(30, None, prefix_len=8, own_len=4, every_s=0.5)


def test_keys_without_parents_are_those_of_the_blocks_alone():
    request = Request("", [1, 2, 3, 4, 1, 2, 9], SamplingParams(), 8)
    hasher = ParentlessHasher(2)
    first, second, third = hasher.keys(request)
    assert first == third != second
    request.token_ids.append(9)
    assert hasher.keys(request)[:3] == [first, second, third] and len(hasher.keys(request)) == 4


@pytest.mark.real_model
def test_without_parents_a_block_of_another_text_is_found(real_llm):
    greedy = SamplingParams(temperature=0, max_tokens=1)
    first, second, form = ([start + place for place in range(16)] for start in (1000, 2000, 3000))
    for llm, found in ((without_parents(real_llm, num_kv_blocks=16), 32), (real_llm.reconfigure(num_kv_blocks=16), 16)):
        llm.generate([[*first, *form, 5], [*second, 5]], greedy, use_tqdm=False)
        [output] = llm.generate([[*second, *form, 5]], greedy, use_tqdm=False)
        assert output.num_cached_tokens == found
