"""Prefix caching through the whole engine: what is found, by whom and when, what it saves, and what it tells."""

import copy
import random
from dataclasses import astuple

import pytest
import torch

from minivllm import LLM
from minivllm.config import EngineConfig
from minivllm.kv_cache import PrefixCacheStats, block_hash
from minivllm.kv_cache.block_hash import short_key
from minivllm.kv_cache.block_pool import BlockPool, KVCacheBlock
from minivllm.kv_cache.paged import PagedKVCache
from minivllm.request import Request
from minivllm.runner import _not_finite
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Decision
from minivllm.trace import request_times, summarize
from tests.conftest import TINY
from tests.fakes import expected_output, make_engine, run_to_end
from tests.lessons.test_naive import random_prompts
from tests.test_engine_cases import SpySampler, one_nan
from tests.test_identity import build_engine
from tests.test_llm import tiny_folder  # noqa: F401

ALGORITHMS = ["sha256", "builtin"]


def greedy(max_tokens=4, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def prompt_of(length, first=1):
    return [1 + (first + place) % 900 for place in range(length)]


def run(engine, name, prompt, params=None):
    """Runs one request to its end; returns its output, checked."""
    engine.add_request(name, prompt, params or greedy())
    output = run_to_end(engine)[name]
    engine.scheduler.manager.check()
    if isinstance(prompt, dict):
        prompt = prompt["prompt_token_ids"]
    for answer in output.outputs:
        assert answer.token_ids == expected_output(prompt, len(answer.token_ids), answer.index)
    return output


def cached(engine, name, prompt, params=None):
    return run(engine, name, prompt, params).num_cached_tokens


def findable(engine):
    """Block to its key, of all that can be found."""
    return {event.block_id: event.key for event in engine.scheduler.manager.findable()}


def decisions(trace, step=-1):
    return [Decision(**decision) for decision in trace.steps[step].get("decisions", ())]


def names(requests):
    return [request.request_id for request in requests]


# --- KV-04


@pytest.mark.parametrize("fields", [{}, {"batching": "static"}], ids=["continuous", "static"])
@pytest.mark.parametrize(("block_size", "expected"), [(16, [0, 16, 32]), (1, [0, 31, 32]), (8, [0, 24, 32])])
def test_kv04_a_full_hit_computes_its_last_block_again(block_size, expected, fields):
    engine = make_engine(200, block_size=block_size, **fields)
    trace = engine.start_recording()
    outputs = [run(engine, name, prompt_of(length)) for name, length in (("A", 32), ("B", 32), ("C", 48))]
    assert [output.num_cached_tokens for output in outputs] == expected
    assert outputs[0].outputs == outputs[1].outputs
    admitted = [
        step["scheduled"] for step in trace.steps if any(d["kind"] == "admit" for d in step.get("decisions", ()))
    ]
    assert admitted == [{"A": 32}, {"B": 32 - expected[1]}, {"C": 16}]


def test_kv04_the_logits_of_a_full_hit_are_those_of_the_cold_run(tiny_llama):
    model = copy.deepcopy(tiny_llama[1]).float()
    engine = build_engine(model, 20)
    spy, [prompt] = SpySampler(engine), random_prompts([48])
    outputs = []
    for seed, length in enumerate((32, 32, 48)):
        params = SamplingParams(temperature=0, seed=seed, max_tokens=8, ignore_eos=True)
        engine.add_request(str(seed), prompt[:length], params)
        if seed == 1:
            shared = engine.scheduler.manager.pool.find(keys_of(prompt)[0])
            before = slots_of(engine, shared)
        outputs += run_to_end(engine).values()
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 32]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert (spy.first_logits[0] - spy.first_logits[1]).abs().max() <= 1e-4
    assert torch.equal(slots_of(engine, shared), before)
    cold = build_engine(model, 20, enable_prefix_caching=False)
    spy_of_cold = SpySampler(cold)
    cold.add_request("2", prompt, SamplingParams(temperature=0, seed=2, max_tokens=8, ignore_eos=True))
    assert run_to_end(cold)["2"].outputs == outputs[2].outputs
    assert (spy.first_logits[2] - spy_of_cold.first_logits[2]).abs().max() <= 1e-4
    assert engine.runner.failures == []


def slots_of(engine, block):
    """A copy of the keys and values of a block, in all layers."""
    cache = engine.runner.cache
    return torch.stack([memory[:, block.block_id].clone() for memory in (cache.keys, cache.values)])


# --- KV-06


@pytest.mark.parametrize("kind", ["fake", "model"])
@pytest.mark.parametrize("variant", ["aborted", "preempted", "preempted and aborted"])
def test_kv06_only_what_was_computed_is_found(tiny_llama, variant, kind):
    fields = {"long_prefill_token_threshold": 20, "block_size": 16}
    engine = make_engine(8, **fields) if kind == "fake" else build_engine(tiny_llama[1], 8, **fields)
    [prompt] = random_prompts([48])
    trace = engine.start_recording()
    engine.add_request("A", prompt, greedy())
    engine.step()
    assert len(findable(engine)) == 1
    manager = engine.scheduler.manager
    if variant != "aborted":
        nowhere = Request("nowhere", [1] * 16 * manager.num_free_blocks, SamplingParams(), 10**6)
        assert manager.allocate_slots(nowhere, nowhere.num_tokens)
        manager.take_changes()
        engine.step()
        assert decisions(trace)[0] == Decision("preempt", "A", "no_free_block", "A", 1, 0)
        assert len(findable(engine)) == 1
        manager.free(nowhere)
    if variant != "preempted":
        engine.abort_request("A")
    engine.add_request("B", prompt, greedy())
    outputs = run_to_end(engine)
    first = next(d for step in trace.steps for d in step.get("decisions", ()) if d["available"] == 16)
    if variant == "preempted":  # then it is A that finds its first block, and B finds what A computes
        assert (first["kind"], first["request_id"]) == ("resume", "A")
        assert (outputs["A"].num_cached_tokens, outputs["B"].num_cached_tokens) == (0, 32)
    else:
        assert (first["kind"], first["request_id"], outputs["B"].num_cached_tokens) == ("admit", "B", 16)
    cold = make_engine(8) if kind == "fake" else build_engine(tiny_llama[1], 8, enable_prefix_caching=False)
    cold.add_request("B", prompt, greedy())
    assert run_to_end(cold)["B"].outputs == outputs["B"].outputs


def test_kv06_a_request_that_was_not_admitted_leaves_nothing_to_find():
    engine = make_engine(4, block_size=16, long_prefill_token_threshold=20, max_model_len=64)
    engine.add_request("R", prompt_of(30, first=500), greedy(8))
    engine.step()
    engine.add_request("A", prompt_of(48), greedy())
    trace = engine.start_recording()
    engine.step()
    assert decisions(trace) == [Decision("wait", "A", "memory", None, 3, 2)]
    held = set(engine.scheduler.manager.get_block_ids(engine.scheduler.requests["R"]))
    assert set(findable(engine)) <= held
    engine.abort_request("A")
    assert cached(engine, "B", prompt_of(48)) == 0


def test_kv06_what_was_found_in_vain_is_looked_up_again():
    """The block that A found while it had to wait is another's when it comes in."""
    engine = make_engine(4, block_size=16, max_model_len=64)
    run(engine, "X", prompt_of(17), greedy(1))
    engine.add_request("R", prompt_of(30, first=500), greedy(20))
    engine.step()
    engine.add_request("A", prompt_of(48), greedy(1))
    trace = engine.start_recording()
    engine.step()
    assert decisions(trace) == [Decision("wait", "A", "memory", None, 3, 2)]
    request = engine.scheduler.requests["A"]
    assert (request.num_computed_tokens, request.num_cached_tokens) == (0, 0)
    engine.scheduler.manager.pool.forget(engine.scheduler.manager.get_computed_blocks(request))
    output = run_to_end(engine)["A"]
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == expected_output(prompt_of(48), 1)


def test_kv06_a_refusal_by_memory_after_the_lookup_books_nothing(monkeypatch):
    engine = make_engine(8, block_size=16)
    run(engine, "X", prompt_of(33), greedy(1))
    before = engine.prefix_cache_stats
    allocate, refusals = PagedKVCache.allocate_slots, [1]
    monkeypatch.setattr(
        PagedKVCache, "allocate_slots", lambda *args: not (refusals and refusals.pop()) and allocate(*args)
    )
    engine.add_request("A", prompt_of(48), greedy(1))
    trace = engine.start_recording()
    engine.step()
    request = engine.scheduler.requests["A"]
    assert decisions(trace) == [Decision("wait", "A", "memory", None, 3, 8)]
    assert (request.num_computed_tokens, request.num_cached_tokens, engine.prefix_cache_stats) == (0, 0, before)
    assert run_to_end(engine)["A"].num_cached_tokens == 32


# --- KV-11


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kv11_only_the_same_salt_finds(algorithm):
    engine = make_engine(64, prefix_caching_hash_algo=algorithm)

    def salted(salt):
        return {"prompt_token_ids": prompt_of(32)} | ({} if salt is None else {"cache_salt": salt})

    outputs = [run(engine, str(place), salted(salt)) for place, salt in enumerate(["a", "a", "b", None, None, "b"])]
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 0, 0, 16, 16]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_kv11_who_has_another_salt_does_not_wait_for_a_prefix():
    engine = make_engine(64)
    for name, salt in (("A", "a"), ("B", "b"), ("C", "a")):
        engine.add_request(name, {"prompt_token_ids": prompt_of(40), "cache_salt": salt}, greedy())
    trace = engine.start_recording()
    engine.step()
    assert trace.steps[0]["scheduled"] == {"A": 40, "B": 40} and trace.steps[0]["waiting"] == ["C"]
    assert {name: output.num_cached_tokens for name, output in run_to_end(engine).items()} == {"A": 0, "B": 0, "C": 32}


@pytest.mark.parametrize(("length", "num_cached"), [(6, 12), (3, 8)], ids=["a block", "less than a block"])
def test_kv11_branches_keep_their_salt(length, num_cached):
    engine, prompt = make_engine(64, block_size=4), prompt_of(length)
    params = SamplingParams(n=2, temperature=1.0, seed=0, max_tokens=8)
    salted = run(engine, "A", {"prompt_token_ids": prompt, "cache_salt": "a"}, params)
    for answer in salted.outputs:
        assert cached(engine, "B", [*prompt, *answer.token_ids], greedy(1)) == 0
        engine.reset_prefix_cache()
        run(engine, "A", {"prompt_token_ids": prompt, "cache_salt": "a"}, params)
        longer = {"prompt_token_ids": [*prompt, *answer.token_ids], "cache_salt": "a"}
        assert cached(engine, "C", longer, greedy(1)) == num_cached


@pytest.mark.parametrize("salt", ["", None, 7, b"a", ["a"], True])
def test_kv11_what_is_no_salt_is_refused(salt):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"cache_salt must be a non-empty string, got .*: leave it out to have none"):
        engine.add_request("A", {"prompt_token_ids": [1, 2], "cache_salt": salt})
    assert not engine.has_unfinished_requests()


# --- SMP-09


def keys_of(token_ids, block_size=16):
    request = Request("keys", list(token_ids), SamplingParams(), 10**6)
    return block_hash.BlockHasher(block_size).keys(request)


def test_smp09_nothing_of_a_request_with_bad_logits_is_found(tiny_llama):
    engine = build_engine(tiny_llama[1], 30, long_prefill_token_threshold=20)
    prompts = random_prompts([40, 50, 40])
    SpySampler(engine, one_nan, seed=7)
    for index, prompt in enumerate(prompts):
        engine.add_request(
            str(index),
            prompt,
            SamplingParams(temperature=0, seed=7 if index == 1 else 1, max_tokens=12, ignore_eos=True),
        )
    engine.step()
    assert set(findable(engine).values()) == {keys_of(prompt)[0] for prompt in prompts}
    outputs = run_to_end(engine)
    assert [outputs[name].outputs[0].finish_reason for name in "012"] == ["length", "error", "length"]
    texts = [prompts[index] + outputs[str(index)].outputs[0].token_ids[:-1] for index in (0, 2)]
    assert set(findable(engine).values()) == {key for text in texts for key in keys_of(text)}
    assert len(findable(engine)) == 6
    engine.add_request("again", prompts[1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert run_to_end(engine)["again"].num_cached_tokens == 0


def broken_at(model, token):
    """The model with a token whose embedding is not finite."""
    model = copy.deepcopy(model)
    table = next(parameter for name, parameter in model.named_parameters() if "embed" in name)
    assert table.shape[0] == TINY["vocab_size"]
    table[token] = torch.nan
    return model


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_smp09_a_broken_chunk_ends_the_request_in_its_step(tiny_llama, batching):
    """It draws nothing, so nobody looks at its logits; but its blocks would be found."""
    engine = build_engine(broken_at(tiny_llama[1], 96), 30, long_prefill_token_threshold=20, batching=batching)
    good, bad = [[min(token, 95) for token in prompt] for prompt in random_prompts([60, 60])]
    bad[25] = 96
    engine.add_request("good", good, greedy(3, ignore_eos=True))
    engine.add_request("bad", bad, greedy(3, ignore_eos=True))
    assert engine.step() == []
    assert set(findable(engine).values()) == {keys_of(good)[0], keys_of(bad)[0]}
    [output] = engine.step()
    [answer] = output.outputs
    assert (output.request_id, answer.finish_reason, answer.token_ids) == ("bad", "error", [])
    assert "NaN or infinite" in answer.stop_reason
    assert set(findable(engine).values()) == set(keys_of(good)[:2])
    assert run_to_end(engine)["good"].outputs[0].finish_reason == "length"
    engine.add_request("again", bad[:20], greedy(3, ignore_eos=True))
    output = run_to_end(engine)["again"]
    assert (output.num_cached_tokens, output.outputs[0].finish_reason) == (0, "length")


def test_smp09_a_broken_last_chunk_is_seen_by_its_logits(tiny_llama):
    engine = build_engine(broken_at(tiny_llama[1], 96), 30)
    engine.add_request("bad", [5] * 40 + [96], greedy(3))
    [output] = run_to_end(engine).values()
    assert output.outputs[0].finish_reason == "error" and findable(engine) == {}


def test_smp09_a_broken_chunk_of_one_token_ends_the_request_in_its_step(tiny_llama):
    """No row of its step has more than one token, and not all of them draw."""
    engine = build_engine(broken_at(tiny_llama[1], 96), 30, long_prefill_token_threshold=1)
    engine.add_request("bad", [5, 5, 96, 5, 5], greedy(3))
    assert engine.step() == [] and engine.step() == []
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "error"


def test_smp09_a_broken_token_that_the_last_one_does_not_see_ends_the_request(tiny_pair):
    """Its logits are sound; its block, which others might find, is not."""
    _, decoder = tiny_pair("Mistral", sliding_window=2)
    engine = build_engine(broken_at(decoder, 96), 30)
    engine.add_request("bad", [96, *[5] * 30], greedy(3))
    [output] = run_to_end(engine).values()
    assert output.outputs[0].finish_reason == "error" and findable(engine) == {}


def test_smp09_a_row_is_broken_if_any_of_its_tokens_is():
    """Also one that its last token does not see, as under a sliding window."""
    hidden = torch.zeros(7, 3)
    starts = torch.tensor([0, 3, 3, 4, 7])  # the second row has no tokens
    assert not _not_finite(hidden, starts).any()
    for token, row in enumerate([0, 0, 0, 2, 3, 3, 3]):
        for value in (torch.nan, torch.inf, -torch.inf):
            broken = hidden.clone()
            broken[token, 1] = value
            assert _not_finite(broken, starts).nonzero().tolist() == [[row]]
    hidden[[1, 2, 6]] = torch.nan
    assert _not_finite(hidden, starts).nonzero().flatten().tolist() == [0, 3]


def test_smp09_a_row_that_fails_takes_its_earlier_chunks_out_of_the_cache():
    engine = make_engine(30, block_size=4, long_prefill_token_threshold=8)
    engine.add_request("A", prompt_of(20), greedy())
    engine.step()
    assert len(findable(engine)) == 2
    engine.runner.fail["A"] = "broken"
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "error" and findable(engine) == {}
    assert cached(engine, "B", prompt_of(20)) == 0


def test_an_aborted_request_leaves_what_it_has_computed():
    engine = make_engine(30, block_size=4)
    engine.add_request("A", prompt_of(20), greedy())
    engine.step()
    engine.abort_request("A")
    run_to_end(engine)
    assert cached(engine, "B", prompt_of(20)) == 16


# --- statistics


def stats(engine):
    return astuple(engine.prefix_cache_stats)


def test_a_lookup_counts_once_at_admission():
    engine = make_engine(64)
    run(engine, "A", prompt_of(40))
    assert stats(engine) == (1, 40, 0, 0, 0, 0)
    run(engine, "B", prompt_of(50))
    assert stats(engine) == (2, 90, 32, 0, 0, 0) and engine.prefix_cache_stats.hit_rate == 32 / 90
    run(engine, "C", [7])
    assert stats(engine) == (3, 91, 32, 0, 0, 0)
    assert PrefixCacheStats().hit_rate == 0.0


def test_statistics_that_were_handed_out_do_not_change():
    engine = make_engine(64)
    before = engine.prefix_cache_stats
    run(engine, "A", prompt_of(40))
    assert before == PrefixCacheStats() and engine.prefix_cache_stats != before


def test_a_waiting_request_that_is_looked_up_in_every_step_counts_once(monkeypatch):
    """It needs 7 blocks, finds 2 of them in use, and 4 are free at most while A runs, which takes ten steps."""
    engine = make_engine(7, max_model_len=112)
    lookups, look = [], PagedKVCache.get_computed_blocks
    monkeypatch.setattr(
        PagedKVCache,
        "get_computed_blocks",
        lambda self, request: lookups.append(request.request_id) or look(self, request),
    )
    engine.add_request("A", prompt_of(40), greedy(10))
    engine.add_request("B", prompt_of(110), greedy(1))
    run_to_end(engine)
    assert lookups.count("B") == 11 and stats(engine) == (2, 150, 32, 0, 0, 0)


def test_what_a_resumed_request_finds_is_counted_apart():
    engine = make_engine(5, block_size=4, max_model_len=20)
    for name in "AB":
        engine.add_request(name, prompt_of(7, first=ord(name)), greedy(8))
    outputs = run_to_end(engine)
    assert [outputs[name].metrics.num_preemptions for name in "AB"] == [0, 1]
    assert stats(engine) == (2, 14, 0, 1, 9, 4) and engine.prefix_cache_stats.hit_rate == 0.0
    assert [outputs[name].num_cached_tokens for name in "AB"] == [0, 0]


def test_who_skips_the_cache_computes_all_is_not_counted_and_is_found():
    engine = make_engine(64)
    trace = engine.start_recording()
    for name in "AB":
        assert cached(engine, name, prompt_of(40), greedy(1, skip_reading_prefix_cache=True)) == 0
    assert [step["scheduled"] for step in trace.steps] == [{"A": 40}, {"B": 40}] and stats(engine) == (0,) * 6
    assert cached(engine, "C", prompt_of(40)) == 32 and stats(engine) == (1, 40, 32, 0, 0, 0)


def test_who_skips_the_cache_does_not_wait_for_it():
    engine = make_engine(64)
    for name in "AB":
        engine.add_request(name, prompt_of(40), greedy(1, skip_reading_prefix_cache=True))
    trace = engine.start_recording()
    engine.step()
    assert trace.steps[0]["scheduled"] == {"A": 40, "B": 40}
    engine.scheduler.manager.check()


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_skipping_is_true_or_false(value):
    with pytest.raises(ValueError, match=f"skip_reading_prefix_cache must be True or False, got {value!r}"):
        SamplingParams(skip_reading_prefix_cache=value)


@pytest.mark.parametrize("fields", [{"enable_prefix_caching": False}, {"kv_cache": "contiguous"}], ids=["off", "max"])
def test_without_a_prefix_cache_nothing_is_found_and_nothing_counted(fields):
    engine = make_engine(64, max_model_len=100, **fields)
    assert [cached(engine, name, prompt_of(40)) for name in "AB"] == [0, 0]
    assert stats(engine) == (0,) * 6 and findable(engine) == {}
    engine.reset_prefix_cache()
    engine.add_request("C", prompt_of(40), greedy())
    engine.step()
    engine.reset_prefix_cache()  # there is none, so nothing is refused
    assert run_to_end(engine)["C"].num_cached_tokens == 0


# --- what is found


def test_the_answers_of_one_prompt_store_it_once():
    engine = make_engine(64, block_size=4)
    trace = engine.start_recording()
    params = SamplingParams(n=3, temperature=1.0, seed=0, max_tokens=3)
    outputs = [run(engine, name, prompt_of(10), params) for name in "AB"]
    assert [output.num_cached_tokens for output in outputs] == [0, 8]
    assert outputs[0].outputs == outputs[1].outputs and len(outputs[1].outputs) == 3
    assert stats(engine) == (2, 20, 8, 0, 0, 0)
    state = next(s for s in trace.states() if s.running == ["B", "B/1", "B/2"])
    first = state.requests["B"].block_ids[:2]
    assert all(state.requests[name].block_ids[:2] == first for name in ("B/1", "B/2"))
    assert all(state.holders[block] == ["B", "B/1", "B/2"] for block in first)
    assert [state.requests[name].num_cached_tokens for name in state.running] == [8, 8, 8]
    summary = summarize(trace)
    assert (summary.num_cached_tokens, summary.num_prompt_tokens, summary.hit_rate) == (8, 20, 0.4)
    assert [request.num_cached_tokens for request in summary.requests] == [0, 0, 0, 8, 8, 8]


def test_the_next_turn_finds_the_answer_of_the_last():
    engine = make_engine(64)
    answer = run(engine, "A", prompt_of(20), greedy(29)).outputs[0].token_ids
    assert len(answer) == 29  # 48 of 49 tokens are computed: three blocks
    assert cached(engine, "B", [*prompt_of(20), *answer, 5, 6]) == 48


def test_a_preempted_requests_later_hits_are_not_its_cached_tokens():
    """RequestOutput tells what the first admission found."""
    engine = make_engine(6, block_size=4, max_model_len=24)
    run(engine, "X", prompt_of(5), greedy(1))
    engine.add_request("A", prompt_of(7, first=300), greedy(12))
    engine.add_request("B", prompt_of(9), greedy(8))
    outputs = run_to_end(engine)
    assert outputs["B"].metrics.num_preemptions > 0
    assert (outputs["A"].num_cached_tokens, outputs["B"].num_cached_tokens) == (0, 4)


@pytest.mark.parametrize("fields", [{}, {"max_num_seqs": 1}], ids=["batches", "one by one"])
def test_static_batches_find_what_earlier_batches_left(fields):
    engine = make_engine(64, batching="static", **({"max_num_seqs": 2} | fields))
    for name in "ABCD":
        engine.add_request(name, prompt_of(40), greedy(3))
    outputs = run_to_end(engine)
    expected = [0, 32, 32, 32] if fields else [0, 0, 32, 32]  # members of one batch find nothing of each other
    assert [outputs[name].num_cached_tokens for name in "ABCD"] == expected
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1


def test_a_static_batch_computes_only_what_it_did_not_find():
    engine = make_engine(64, batching="static", max_num_seqs=2)
    run(engine, "A", prompt_of(40))
    engine.add_request("B", prompt_of(50), greedy(3))
    engine.add_request("C", prompt_of(20, first=300), greedy(3))
    trace = engine.start_recording()
    engine.step()
    assert trace.steps[0]["scheduled"] == {"B": 18, "C": 20} and trace.steps[0]["cached"] == {"B": 32}


# --- one prefix, many requests at once


SHARED, OWN, NUM = 512, 32, 32


def crowd():
    return [prompt_of(SHARED) + prompt_of(OWN, first=600 + 7 * number) for number in range(NUM)]


def num_found(outputs):
    return sum(output.num_cached_tokens for output in outputs)


def test_32_requests_one_after_another_compute_their_common_prefix_once():
    engine = make_engine(200, max_model_len=600)
    outputs = [run(engine, str(number), prompt, greedy(1)) for number, prompt in enumerate(crowd())]
    assert num_found(outputs) == (NUM - 1) * SHARED  # all that can be shared
    assert engine.runner.num_computed == SHARED + NUM * OWN


@pytest.mark.parametrize(("budget", "num_steps"), [(2048, 2), (200, 8), (64, 24)])
def test_32_requests_at_once_compute_their_common_prefix_once(budget, num_steps):
    engine = make_engine(200, max_model_len=600, max_num_batched_tokens=budget)
    trace = engine.start_recording()
    for number, prompt in enumerate(crowd()):
        engine.add_request(str(number), prompt, greedy(1))
    outputs = run_to_end(engine)
    assert num_found(outputs.values()) == (NUM - 1) * SHARED
    assert engine.runner.num_computed == SHARED + NUM * OWN and len(trace) == num_steps
    for number, prompt in enumerate(crowd()):
        assert outputs[str(number)].outputs[0].token_ids == expected_output(prompt, 1)
    assert summarize(trace).num_computed_tokens == SHARED + NUM * OWN


def test_without_the_cache_everybody_computes_everything():
    engine = make_engine(2000, max_model_len=600, enable_prefix_caching=False)
    for number, prompt in enumerate(crowd()):
        engine.add_request(str(number), prompt, greedy(1))
    assert num_found(run_to_end(engine).values()) == 0 and engine.runner.num_computed == NUM * (SHARED + OWN)


def engine_of(*requests, **fields):
    """An engine, its trace, and requests that have come: (name, prompt, priority)."""
    engine = make_engine(**({"num_blocks": 64, "block_size": 4} | fields))
    for name, prompt, *priority in requests:
        engine.add_request(name, prompt, greedy(4), priority=priority[0] if priority else None)
    return engine, engine.start_recording()


def test_who_will_find_its_next_block_in_the_next_step_is_put_off_and_others_are_not():
    engine, trace = engine_of(("A", prompt_of(10)), ("B", prompt_of(11)), ("Z", prompt_of(10, first=300)))
    engine.step()
    assert decisions(trace) == [
        Decision("admit", "A", needed=10),
        Decision("wait", "B", "prefix", "A", 11, 0),
        Decision("admit", "Z", needed=10),
    ]
    assert trace.steps[0]["scheduled"] == {"A": 10, "Z": 10} and names(engine.scheduler.waiting) == ["B"]
    engine.step()
    assert decisions(trace) == [Decision("admit", "B", needed=3, available=8)]
    assert trace.steps[1]["scheduled"] == {"A": 1, "Z": 1, "B": 3} and trace.steps[1]["cached"] == {"B": 8}


def test_who_shares_less_than_a_block_is_not_put_off():
    engine, trace = engine_of(("A", prompt_of(10)), ("B", [*prompt_of(3), 999, *prompt_of(7)]), ("C", prompt_of(3)))
    engine.step()
    assert trace.steps[0]["scheduled"] == {"A": 10, "B": 11, "C": 3}


def test_a_block_that_the_others_chunk_only_begins_is_worth_waiting_for():
    engine, trace = engine_of(("A", prompt_of(12)), ("B", prompt_of(12)), long_prefill_token_threshold=6)
    for _ in range(3):
        engine.step()
    assert [step["scheduled"] for step in trace.steps] == [{"A": 6}, {"A": 6}, {"A": 1, "B": 4}]
    assert trace.steps[2]["cached"] == {"B": 8}


def test_a_block_that_a_generated_token_fills_is_worth_a_step():
    prompt = prompt_of(6)
    longer = prompt + expected_output(prompt, 4)
    engine, trace = engine_of(("A", prompt))
    engine.step()
    engine.add_request("B", longer, greedy(1))
    engine.step()  # A computes its seventh token, and nobody knows the eighth
    assert trace.steps[1]["scheduled"] == {"A": 1, "B": 6} and trace.steps[1]["cached"] == {"B": 4}
    engine, trace = engine_of(("A", prompt))
    engine.step()
    engine.step()
    engine.add_request("B", longer, greedy(1))
    engine.step()
    assert decisions(trace) == [Decision("wait", "B", "prefix", "A", 6, 4)]
    engine.step()
    assert trace.steps[3]["cached"] == {"B": 8}


def test_who_was_put_off_goes_before_all_that_came_later():
    engine, trace = engine_of(("A", prompt_of(10)), ("B", prompt_of(10)), ("C", prompt_of(11)), max_num_seqs=3)
    engine.step()
    assert names(engine.scheduler.waiting) == ["B", "C"]
    engine.add_request("Z", prompt_of(10, first=300), greedy(4))
    engine.step()
    assert decisions(trace)[:2] == [
        Decision("admit", "B", needed=2, available=8),
        Decision("admit", "C", needed=3, available=8),
    ]
    assert decisions(trace)[2:] == [Decision("wait", "Z", "max_num_seqs", None, 1, 0)]


def test_rows_are_kept_for_who_was_put_off():
    engine, trace = engine_of(
        ("A", prompt_of(10)), ("B", prompt_of(10)), ("Z", prompt_of(10, first=300)), max_num_seqs=2
    )
    engine.step()
    assert decisions(trace)[1:] == [
        Decision("wait", "B", "prefix", "A", 10, 0),
        Decision("wait", "Z", "max_num_seqs", None, 1, 0),
    ]
    engine.step()
    assert names(engine.scheduler.running) == ["A", "B"]


def test_who_was_put_off_is_not_overtaken_by_a_long_prompt():
    """Z would take the tokens of the steps to come as a running request, long before B's turn."""
    prompts = ("A", prompt_of(33)), ("B", [*prompt_of(33), 7]), ("Z", prompt_of(300, first=300))
    engine, trace = engine_of(*prompts, num_blocks=200, max_model_len=400, max_num_batched_tokens=64)
    engine.step()
    assert decisions(trace)[1:] == [
        Decision("wait", "B", "prefix", "A", 34, 0),
        Decision("wait", "Z", "token_budget", None, 300, 31),
    ]
    engine.step()
    assert trace.steps[1]["scheduled"] == {"A": 1, "B": 2, "Z": 61}


def test_an_aborted_member_of_a_static_batch_that_only_found_tokens_gives_its_row_up():
    engine = make_engine(block_size=4, batching="static", max_num_batched_tokens=8, max_num_seqs=4)
    run(engine, "first", prompt_of(9))
    trace = engine.start_recording()
    engine.add_request("long", prompt_of(40, first=300), greedy(2))
    engine.add_request("S", prompt_of(11), greedy(2))
    engine.step()
    assert engine.scheduler.requests["S"].num_computed_tokens == 8
    engine.abort_request("S")
    run_to_end(engine)
    assert not any("S" in step.get("rerun", ()) for step in trace.steps)


def test_a_row_is_kept_for_every_answer_of_who_was_put_off():
    engine = make_engine(block_size=4, max_num_seqs=4)
    trace = engine.start_recording()
    engine.add_request("A", prompt_of(10), greedy(4))
    engine.add_request("B", prompt_of(10), SamplingParams(n=3, temperature=1, max_tokens=4))
    engine.add_request("Z", prompt_of(10, first=300), greedy(4))
    engine.step()
    assert decisions(trace)[1:] == [
        Decision("wait", "B", "prefix", "A", 10, 0),
        Decision("wait", "Z", "max_num_seqs", None, 1, 0),
    ]
    engine.step()
    assert names(engine.scheduler.running) == ["A", "B", "B/1", "B/2"]


def test_memory_is_kept_for_who_was_put_off():
    """A takes 3 of 8 blocks, and B may need 3 more, so that Z, which needs 3, has to wait."""
    engine, trace = engine_of(
        ("A", prompt_of(10)), ("B", prompt_of(10)), ("Z", prompt_of(10, first=300)), num_blocks=8, max_model_len=32
    )
    engine.step()
    assert decisions(trace)[1:] == [
        Decision("wait", "B", "prefix", "A", 10, 0),
        Decision("wait", "Z", "memory", None, 3, 2),
    ]
    engine.step()
    assert names(engine.scheduler.running)[:2] == ["A", "B"]


def test_the_order_of_priorities_is_kept():
    engine, trace = engine_of(
        ("A", prompt_of(10), 0),
        ("D", prompt_of(10), 3),
        ("C", prompt_of(10), 2),
        ("B", prompt_of(10), 1),
        ("Z", prompt_of(10, first=300), 4),
        scheduling_policy="priority",
    )
    engine.step()
    assert trace.steps[0]["scheduled"] == {"A": 10, "Z": 10} and names(engine.scheduler.waiting) == ["B", "C", "D"]
    engine.add_request("Y", prompt_of(10, first=500), greedy(4), priority=-1)
    engine.step()
    admitted = [d.request_id for d in decisions(trace) if d.kind == "admit"]
    assert admitted == ["Y", "B", "C", "D"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_was_put_off_is_put_back_even_if_the_plan_breaks_off(monkeypatch, policy):
    engine, _ = engine_of(
        ("A", prompt_of(10)),
        ("B", prompt_of(10)),
        ("C", prompt_of(10)),
        ("Z", prompt_of(10, first=300)),
        scheduling_policy=policy,
    )
    allocate = PagedKVCache.allocate_slots

    def break_off(self, request, *args):
        if request.request_id == "Z":
            raise RuntimeError("broken off")
        return allocate(self, request, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PagedKVCache, "allocate_slots", break_off)
        with pytest.raises(RuntimeError, match="broken off"):
            engine.step()
    assert names(engine.scheduler.waiting) == ["A", "B", "C", "Z"] and engine.scheduler.running == []
    outputs = run_to_end(engine)
    assert sorted(outputs) == ["A", "B", "C", "Z"] and outputs["C"].num_cached_tokens == 8
    assert all(output.outputs[0].finish_reason == "length" for output in outputs.values())


def test_who_was_put_off_does_not_starve_when_the_computing_request_goes():
    engine, trace = engine_of(
        *((name, prompt_of(20)) for name in "ABC"), long_prefill_token_threshold=8, max_num_batched_tokens=8
    )
    engine.step()
    engine.abort_request("A")
    engine.step()
    assert decisions(trace)[0] == Decision("admit", "B", needed=8, available=8)
    engine.abort_request("B")
    engine.step()
    assert decisions(trace)[0] == Decision("admit", "C", needed=4, available=16)
    assert run_to_end(engine)["C"].outputs[0].token_ids == expected_output(prompt_of(20), 4)


def test_an_aborted_request_that_was_put_off_is_gone():
    engine, trace = engine_of(("A", prompt_of(10)), ("B", prompt_of(10)))
    engine.step()
    engine.abort_request("B")
    outputs = run_to_end(engine)
    assert outputs["B"].outputs[0].finish_reason == "abort" and len(engine.scheduler.waiting) == 0
    assert "B" not in {name for step in trace.steps for name in step.get("scheduled", ())}


# --- reset


def test_reset_empties_the_cache_and_the_engine_goes_on():
    engine = make_engine(64)
    run(engine, "A", prompt_of(40))
    assert len(findable(engine)) == 2
    engine.reset_prefix_cache()
    assert findable(engine) == {} and engine.scheduler.manager.num_cached_blocks == 0
    assert [cached(engine, name, prompt_of(40)) for name in "BC"] == [0, 32]


def test_reset_is_refused_with_the_numbers_while_requests_run():
    engine = make_engine(64)
    for name in "AB":
        engine.add_request(name, prompt_of(40, first=ord(name)), greedy())
    engine.step()
    before = findable(engine)
    message = "6 of 64 blocks are in use by 2 running requests; step until they have ended, or abort them and step"
    with pytest.raises(ValueError, match=message):
        engine.reset_prefix_cache()
    assert findable(engine) == before and len(before) == 4
    engine.abort_request(["A", "B"])
    engine.step()
    engine.reset_prefix_cache()
    assert findable(engine) == {}


def test_reset_with_requests_that_only_wait_is_allowed():
    engine = make_engine(64)
    run(engine, "A", prompt_of(40))
    engine.add_request("B", prompt_of(40), greedy())
    engine.reset_prefix_cache()
    assert run_to_end(engine)["B"].num_cached_tokens == 0


def test_an_llm_finds_empties_and_refuses_like_its_engine(tiny_folder):  # noqa: F811
    llm, [prompt] = LLM(str(tiny_folder), dtype="float64", device="cpu", block_size=4), random_prompts([20])

    def ask(salt=None):
        asked = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        [output] = llm.generate([asked], greedy(3, ignore_eos=True), use_tqdm=False)
        return output.num_cached_tokens, output.outputs[0].token_ids

    cold, warm, salted = ask(), ask(), ask("s")
    assert (cold[0], warm[0], salted[0]) == (0, 16, 0) and cold[1] == warm[1] == salted[1]
    llm.reset_prefix_cache()
    assert ask() == cold and ask() == warm
    llm.engine.add_request("A", prompt, greedy(3))
    llm.engine.step()
    with pytest.raises(ValueError, match="blocks are in use by 1 running requests"):
        llm.reset_prefix_cache()
    llm.engine.abort_request("A")
    run_to_end(llm.engine)


# --- options


def test_caching_is_on_where_memory_can():
    assert EngineConfig().enable_prefix_caching is None and EngineConfig().caches_prefixes
    assert EngineConfig(enable_prefix_caching=True).caches_prefixes
    assert not EngineConfig(enable_prefix_caching=False).caches_prefixes
    for value in (None, False):
        assert not EngineConfig(kv_cache="contiguous", enable_prefix_caching=value).caches_prefixes
    assert make_engine().scheduler.manager.caches_prefixes
    assert not make_engine(enable_prefix_caching=False).scheduler.manager.caches_prefixes
    assert not make_engine(kv_cache="contiguous").scheduler.manager.caches_prefixes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_prefix_caching": True, "kv_cache": "contiguous"}, "True and kv_cache is 'contiguous'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be None, True or False, got 1"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching must be None, True or False, got 'yes'"),
        ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo must be .*sha256.*builtin.*'md5'"),
        ({"prefix_caching_hash_algo": None}, "prefix_caching_hash_algo must be .*None"),
    ],
)
def test_an_option_that_can_not_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def busy(engine, seed=3):
    """Requests that share much, some at once; returns outputs by name, and statistics."""
    rng, outputs = random.Random(seed), {}
    for number in range(40):
        prompt = prompt_of(rng.choice([4, 8, 12]), first=rng.choice([1, 50])) + prompt_of(
            rng.randint(1, 9), rng.choice([7, 9])
        )
        engine.add_request(str(number), prompt, greedy(rng.randint(1, 9)))
        for _ in range(rng.randint(0, 3)):
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
        engine.scheduler.manager.check()
    outputs |= run_to_end(engine)
    engine.scheduler.manager.check()
    return {name: (output.outputs, output.num_cached_tokens) for name, output in outputs.items()}, stats(engine)


@pytest.mark.parametrize("constant", [False, True], ids=["hash", "constant"])
def test_the_weak_hash_gives_the_same_outputs_and_hits(monkeypatch, constant):
    fields = {"num_blocks": 20, "max_model_len": 40, "block_size": 4, "max_num_seqs": 6}
    outputs, counts = busy(make_engine(**fields))
    if constant:
        monkeypatch.setattr(block_hash, "weak_hash", lambda value: 7)
    assert busy(make_engine(prefix_caching_hash_algo="builtin", **fields)) == (outputs, counts)
    assert counts[0] == 40 and counts[2] > 100
    without, _ = busy(make_engine(enable_prefix_caching=False, **fields))
    assert {name: answers for name, (answers, _) in without.items()} == {n: a for n, (a, _) in outputs.items()}


# --- what a step costs


class CountingDict(dict):
    """Counts what is looked up, and refuses to be walked through."""

    num = 0

    def __getitem__(self, key):
        self.num += 1
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.num += 1
        return super().get(key, default)

    def setdefault(self, key, default=None):
        self.num += 1
        return super().setdefault(key, default)

    def __iter__(self):
        raise AssertionError("a step walks through all that is cached")

    values = items = keys = __iter__


def operations(monkeypatch, num_cached):
    """Looks at the map, and at blocks, that three requests cost beside so many cached blocks."""
    engine = make_engine(4000, block_size=4, max_model_len=4000)
    if num_cached:
        run(engine, "filler", prompt_of(4 * num_cached, first=400), greedy(1))
    pool = engine.scheduler.manager.pool
    assert pool.num_cached == num_cached
    pool._findable = counting = CountingDict(pool._findable)
    looks = [0]

    def look(block, name):
        looks[0] += 1
        return object.__getattribute__(block, name)

    with monkeypatch.context() as patch:
        patch.setattr(KVCacheBlock, "__getattribute__", look, raising=False)
        for name, prompt in (("A", prompt_of(30)), ("B", prompt_of(30)), ("C", prompt_of(30, first=200))):
            engine.add_request(name, prompt, greedy(10))
        run_to_end(engine)
    return counting.num, looks[0]


def test_the_work_of_a_step_does_not_grow_with_what_is_cached(monkeypatch):
    little, much = operations(monkeypatch, 10), operations(monkeypatch, 900)
    assert little == much


def test_a_waiting_request_costs_a_lookup_per_block_that_it_finds_and_one(monkeypatch):
    engine = make_engine(51, block_size=4)
    run(engine, "X", prompt_of(13), greedy(1))
    engine.add_request("A", prompt_of(5, first=300), greedy(8))
    engine.step()
    engine.add_request("B", prompt_of(200), greedy(1))
    engine.add_request("C", prompt_of(200), greedy(1))
    finds, find = [], BlockPool.find
    monkeypatch.setattr(BlockPool, "find", lambda self, key: finds.append(key) or find(self, key))
    engine.step()
    assert len(finds) == 4  # three blocks of B's that are there, and one that is not; C's are not looked for


# --- traces


def compare_cache(trace, engine):
    """What the trace says that can be found is what can be found."""
    state = trace.state(-1)
    expected = {
        event.block_id: (short_key(event.key), None if event.parent is None else short_key(event.parent))
        for event in engine.scheduler.manager.findable()
    }
    assert {block: (entry.key, entry.parent) for block, entry in state.cached_blocks.items()} == expected
    assert all(entry.block_id == block for block, entry in state.cached_blocks.items())
    for block in state.holders.keys() & state.cached_blocks.keys():
        assert state.cached_blocks[block].last_used_step == state.step


def step_all(engine, trace):
    while engine.has_unfinished_requests():
        engine.step()
        compare_cache(trace, engine)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_the_cache_of_a_trace_is_that_of_the_engine_after_every_step(warm, algorithm):
    engine = make_engine(14, block_size=4, max_model_len=40, max_num_seqs=4, prefix_caching_hash_algo=algorithm)
    if warm:
        busy(engine)
        assert len(findable(engine)) > 5
    trace, rng = engine.start_recording(), random.Random(1)
    for number in range(30):
        prompt = [*prompt_of(rng.choice([4, 8, 12]), first=rng.choice([1, 50, 90])), rng.randint(1, 9)]
        engine.add_request(f"T{number}", prompt, greedy(rng.randint(1, 9)))
        if number % 7 == 3 and engine.scheduler.running:
            engine.runner.fail[engine.scheduler.running[0].request_id] = "broken"
        engine.step()
        compare_cache(trace, engine)
    step_all(engine, trace)
    states = [(len(state.published), len(state.evicted)) for state in trace.states()]
    evicted = sum(count for _, count in states)
    assert evicted > 10 and sum(count for count, _ in states) - evicted == len(findable(engine))


def test_events_of_a_cache_in_a_trace():
    engine = make_engine(3, block_size=4, max_model_len=12)
    trace = engine.start_recording()
    run(engine, "A", prompt_of(6), greedy(3))
    run(engine, "B", prompt_of(12, first=300)[:9], greedy(1))
    first, second = (short_key(key) for key in keys_of([*prompt_of(6), *expected_output(prompt_of(6), 3)], 4))
    assert trace.steps[0]["cache"] == [{"publish": 0, "key": first, "parent": None, "request_id": "A"}]
    assert "cache" not in trace.steps[1] and "cached" not in trace.steps[0]
    assert trace.steps[2]["cache"] == [{"publish": 1, "key": second, "parent": first, "request_id": "A"}]
    events = trace.steps[3]["cache"]
    assert events[:2] == [{"evict": 1}, {"evict": 0}] and [event["publish"] for event in events[2:]] == [2, 1]
    state = trace.state(3)
    assert state.published == [2, 1] and [entry.block_id for entry in state.evicted] == [1, 0]
    gone = state.evicted[1]
    assert (gone.key, gone.request_id, gone.published_in_step, gone.last_used_step) == (first, "A", 0, 2)
    assert trace.state(2).cached_blocks[1].published_in_step == 2 and list(state.cached_blocks) == [2, 1]


def test_what_was_there_before_the_trace_has_no_step_and_no_request():
    engine = make_engine(16, block_size=4)
    run(engine, "A", prompt_of(9), greedy(1))
    trace = engine.start_recording()
    run(engine, "B", prompt_of(5), greedy(1))
    used, other = (trace.state(0).cached_blocks[block] for block in (0, 1))
    assert (used.request_id, used.published_in_step, used.last_used_step) == ("", -1, 0)
    assert (other.request_id, other.published_in_step, other.last_used_step) == ("", -1, -1)
    assert other.parent == used.key and used.parent is None


def test_cached_tokens_of_a_trace_are_those_that_were_found():
    engine = make_engine(16, block_size=4)
    trace = engine.start_recording()
    for name in "AB":
        engine.add_request(name, prompt_of(11), greedy(2))
    step_all(engine, trace)
    assert [step.get("cached") for step in trace.steps] == [None, {"B": 8}, None]
    state = trace.state(1)
    assert state.cached == {"B": 8} and state.scheduled["B"] == 3
    assert (state.requests["B"].num_cached_tokens, state.requests["B"].num_computed_tokens) == (8, 11)
    assert state.requests["B"].block_ids[:2] == trace.state(0).requests["A"].block_ids[:2]
    assert trace.state(2).cached == {} and trace.state(2).requests["B"].num_cached_tokens == 8


def test_a_reset_during_a_recording_shows_in_the_next_step():
    engine = make_engine(16, block_size=4)
    trace = engine.start_recording()
    run(engine, "A", prompt_of(9), greedy(1))
    engine.reset_prefix_cache()
    run(engine, "B", prompt_of(9), greedy(1))
    compare_cache(trace, engine)
    assert [entry.block_id for entry in trace.state(1).evicted] == [0, 1] and trace.state(1).cached == {}
    assert trace.state(1).published == [0, 1]


def test_after_a_recording_nothing_is_recorded_any_more():
    engine = make_engine(16, block_size=4)
    trace = engine.start_recording()
    manager = engine.scheduler.manager
    run(engine, "A", prompt_of(9), greedy(1))
    assert manager.cache_events == []
    engine.stop_recording()
    assert manager.cache_events is None
    run(engine, "B", prompt_of(9, first=300), greedy(1))
    assert manager.cache_events is None and len(trace) == 1
    again = engine.start_recording()
    run(engine, "C", prompt_of(9), greedy(1))
    compare_cache(again, engine)
    assert again.state(0).cached == {"C": 8}


def test_a_request_that_hits_in_its_first_step_queued_before_it():
    engine = make_engine(64)
    run(engine, "A", prompt_of(40), greedy(2))
    now = engine.clock.now()
    trace = engine.start_recording()
    engine.add_request("B", prompt_of(40), greedy(2), arrival_time=now - 0.5)
    step_all(engine, trace)
    [request] = request_times(trace)
    assert request.num_cached_tokens == 32 and request.queue_s == pytest.approx(0.5)
    queued, prefill, decode = request.spans
    assert (queued.phase, queued.start_s, queued.end_s, queued.num_tokens) == ("queued", pytest.approx(-0.5), 0.0, 0)
    assert (prefill.phase, prefill.num_tokens, prefill.num_recomputed_tokens, prefill.num_output_tokens) == (
        "prefill",
        8,
        0,
        1,
    )
    assert (decode.phase, decode.num_tokens) == ("decode", 1)


def test_what_a_full_hit_computes_again_was_not_lost():
    engine = make_engine(64)
    trace = engine.start_recording()
    run(engine, "A", prompt_of(32), greedy(1))
    run(engine, "B", prompt_of(32), greedy(1))
    summary = summarize(trace)
    assert (summary.num_cached_tokens, summary.num_computed_tokens, summary.num_recomputed_tokens) == (16, 48, 0)
    assert summary.hit_rate == 0.25


def test_who_was_resumed_in_a_recording_that_began_later_found_nothing_at_its_first_admission():
    engine = make_engine(5, block_size=4, max_model_len=20)
    for name in "AB":
        engine.add_request(name, prompt_of(7, first=ord(name)), greedy(8))
    while not any(request.num_preemptions for request in engine.scheduler.waiting):
        engine.step()
    trace = engine.start_recording()
    outputs = run_to_end(engine)
    assert sum(step.get("cached", {}).get("B", 0) for step in trace.steps) == 4
    by_name = {request.request_id: request for request in request_times(trace)}
    assert by_name["B"].num_cached_tokens == outputs["B"].num_cached_tokens == 0


def test_a_member_of_a_static_batch_may_compute_only_in_a_later_step_what_it_did_not_find():
    engine = make_engine(64, batching="static", max_num_batched_tokens=40)
    run(engine, "X", prompt_of(40), greedy(1))
    trace = engine.start_recording()
    for name, prompt in (("A", prompt_of(40, first=300)), ("B", prompt_of(50))):
        engine.add_request(name, prompt, greedy(2))
    step_all(engine, trace)
    assert [step["scheduled"] for step in trace.steps] == [{"A": 40}, {"B": 18}, {"A": 1, "B": 1}]
    assert [step.get("cached") for step in trace.steps] == [{"B": 32}, None, None]
    assert trace.state(0).requests["B"].num_computed_tokens == 32
    assert [request.num_cached_tokens for request in request_times(trace)] == [0, 32]
    assert summarize(trace).num_recomputed_tokens == 0
