"""The engine gives transformers' tokens, whatever the batching, the chunks, the memory and the order of arrival, and
whatever of a prompt is in the prefix cache."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.cache_size import KVCacheSize
from minivllm.clock import VirtualClock
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine, ModelLimits
from minivllm.llm import make_manager
from minivllm.runner import ModelRunner
from minivllm.scheduler import ContinuousScheduler, StaticScheduler
from minivllm.scheduler.invariants import check_plan
from tests.conftest import TINY, hf_generate
from tests.lessons.test_naive import random_prompts

NUM_REQUESTS, LONGEST = 64, 63
RNG = random.Random(5)
PROMPTS = random_prompts([RNG.randint(1, 40) for _ in range(NUM_REQUESTS)])
LIMITS = [min(RNG.choice([1, 2, 5, 9, 16, 24]), LONGEST + 1 - len(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(tiny_llama):
    reference, _ = tiny_llama
    return [hf_generate(reference, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


def build_engine(model, num_blocks, block_size=16, keep_finished_rows=True, **fields):
    """An engine on a model, with a virtual clock, that checks every plan and the memory behind it."""
    config = EngineConfig(max_model_len=128, num_kv_blocks=num_blocks, block_size=block_size, **fields)
    manager = make_manager(config, KVCacheSize(num_blocks, block_size, 0, ""), 128)
    if config.batching == "static":
        scheduler = StaticScheduler(config, manager, keep_finished_rows)
    else:
        scheduler = ContinuousScheduler(config, manager)
    runner = ModelRunner(model, num_blocks, block_size, config.attention_backend)
    runner.cache.keys.fill_(float("nan"))
    runner.cache.values.fill_(float("nan"))
    execute, runner.failures = runner.execute, []

    def checked(plan):
        check_plan(scheduler, plan)
        result = execute(plan)
        runner.failures += result.failed.items()
        return result

    runner.execute = checked
    limits = ModelLimits(TINY["vocab_size"], 128, frozenset([2]))
    return LLMEngine(config, scheduler, runner, limits, clock=VirtualClock())


def run_staggered(engine, prompts, params, seed=0, per_step=6):
    """Hands in the requests in a shuffled order, up to `per_step` a step; returns the outputs in the given order."""
    rng = random.Random(seed)
    order = list(range(len(prompts)))
    rng.shuffle(order)
    outputs = {}
    while order or engine.has_unfinished_requests():
        for _ in range(rng.randint(0, per_step)):
            if order:
                index = order.pop()
                engine.add_request(str(index), prompts[index], params[index])
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs
                outputs[output.request_id] = output
    manager = engine.scheduler.manager
    manager.check()
    assert manager.num_free_blocks == manager.num_blocks and not engine.scheduler.requests
    return [outputs[str(index)] for index in range(len(prompts))]


MEMORY = {
    "huge": {"num_blocks": 300},
    "barely": {"num_blocks": 4},
    "tight": {"num_blocks": 17, "block_size": 7},
    "max": {"num_blocks": 20, "kv_cache": "contiguous", "reservation": "max"},
    "pow2": {"num_blocks": 30, "kv_cache": "contiguous", "reservation": "pow2", "block_size": 5},
    "exact": {"num_blocks": 9, "kv_cache": "contiguous", "reservation": "exact"},
}
BATCHING = {
    "none": {"batching": "static", "max_num_seqs": 1},
    "static": {"batching": "static", "max_num_seqs": 8},
    "continuous": {"max_num_seqs": 16},
}


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("batching", BATCHING)
def test_every_configuration_gives_transformers_tokens(tiny_llama, expected, batching, memory, chunk):
    params = [SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True) for limit in LIMITS]
    fields = {"long_prefill_token_threshold": chunk, "max_num_batched_tokens": 80}
    engine = build_engine(tiny_llama[1], **MEMORY[memory], **BATCHING[batching], **fields)
    outputs = run_staggered(engine, PROMPTS, params, seed=chunk)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"} and not engine.runner.failures
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    if batching == "continuous" and memory in ("barely", "tight"):
        assert preemptions > 0
    if batching == "none" or memory in ("huge", "max", "exact"):
        assert preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_change_the_order_and_no_token(tiny_llama, expected, policy):
    engine = build_engine(tiny_llama[1], 5, max_num_seqs=8, scheduling_policy=policy)
    for index, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        priority = {"priority": index % 3} if policy == "priority" else {}
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        engine.add_request(str(index), {"prompt_token_ids": prompt, **priority}, params)
    ended = []
    while engine.has_unfinished_requests():
        ended += [output for output in engine.step() if output.finished]
    found = {output.request_id: output.outputs[0].token_ids for output in ended}
    assert [found[str(index)] for index in range(NUM_REQUESTS)] == expected
    if policy == "priority":
        places = [[place for place, o in enumerate(ended) if int(o.request_id) % 3 == p] for p in range(3)]
        assert sum(places[0]) / len(places[0]) < sum(places[1]) / len(places[1]) < sum(places[2]) / len(places[2])


@pytest.mark.parametrize("keep", [True, False])
def test_ended_rows_of_a_static_batch_change_no_token(tiny_llama, expected, keep):
    params = [SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True) for limit in LIMITS]
    engine = build_engine(tiny_llama[1], 300, batching="static", max_num_seqs=8, keep_finished_rows=keep)
    trace = engine.start_recording()
    outputs = run_staggered(engine, PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert any(step.get("rerun") for step in trace.steps) == keep
    assert engine.runner.failures == []  # not even of those rows whose outcome nobody looks at


@pytest.mark.parametrize("memory", ["huge", "tight", "pow2", "exact"])
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_answer_i_of_n_is_the_answer_with_seed_plus_i(tiny_llama, memory, batching):
    memories = {**MEMORY, "exact": {**MEMORY["exact"], "num_blocks": 14}}
    fields = {**memories[memory], **BATCHING[batching], "long_prefill_token_threshold": 7}
    prompts = random_prompts([16, 5, 33, 1, 15])
    branched = [SamplingParams(n=4, seed=10 * i, temperature=1.2, max_tokens=20, ignore_eos=True) for i in range(5)]
    outputs = run_staggered(build_engine(tiny_llama[1], **fields), prompts, branched, per_step=2)
    for index, output in enumerate(outputs):
        assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
        for answer in output.outputs:
            alone = SamplingParams(seed=10 * index + answer.index, temperature=1.2, max_tokens=20, ignore_eos=True)
            [single] = run_staggered(build_engine(tiny_llama[1], 300), [prompts[index]], [alone])
            assert answer.token_ids == single.outputs[0].token_ids
            assert answer.finish_reason == "length"


STEMS = random_prompts([40, 23, 10], seed=7)


def shared_prompt(stem, shared, own, index):
    """A prompt that begins like others, and goes on with tokens of its own."""
    return STEMS[stem][:shared] + random_prompts([own], seed=1000 + index)[0]


def make_shared_workload():
    """Prompts with three beginnings, some of them twice, and the output limits that go with them."""
    rng, prompts = random.Random(11), []
    for index in range(36):
        if index % 6 == 5:
            prompts.append(prompts[rng.randrange(index)])
        else:
            stem = rng.randrange(3)
            shared = len(STEMS[stem]) - rng.choice([0, 0, 0, 1, 4, 9])
            prompts.append(shared_prompt(stem, shared, rng.choice([1, 1, 2, 7, 16]), index))
    return prompts, [min(rng.choice([1, 2, 5, 9, 16]), LONGEST + 1 - len(prompt)) for prompt in prompts]


SHARED, SHARED_LIMITS = make_shared_workload()
PAGED = {name: MEMORY[name] for name in ("huge", "barely", "tight")}


@pytest.fixture(scope="module")
def shared_expected(tiny_llama):
    reference, _ = tiny_llama
    return [hf_generate(reference, prompt, limit) for prompt, limit in zip(SHARED, SHARED_LIMITS, strict=True)]


def greedy(limits, **fields):
    return [SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, **fields) for limit in limits]


def num_found(engine):
    """Tokens that were found in the prefix cache."""
    stats = engine.prefix_cache_stats
    return stats.hits + stats.resumed_hits


@pytest.mark.parametrize("caching", [{}, {"prefix_caching_hash_algo": "builtin"}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("memory", PAGED)
def test_found_prefixes_change_no_token(tiny_llama, shared_expected, memory, chunk, caching):
    fields = {**PAGED[memory], "max_num_seqs": 16, "long_prefill_token_threshold": chunk, "max_num_batched_tokens": 80}
    engine = build_engine(tiny_llama[1], **fields, **caching)
    outputs = run_staggered(engine, SHARED, greedy(SHARED_LIMITS), seed=chunk, per_step=3)
    assert [output.outputs[0].token_ids for output in outputs] == shared_expected and not engine.runner.failures
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert engine.prefix_cache_stats.hits == sum(output.num_cached_tokens for output in outputs)
    if caching.get("enable_prefix_caching") is False:
        assert num_found(engine) == 0
    else:
        assert engine.prefix_cache_stats.hits > (300 if memory == "huge" else 100)
        assert (preemptions > 0) == (memory != "huge")


def test_a_static_batch_finds_prefixes_too(tiny_llama, shared_expected):
    engine = build_engine(tiny_llama[1], 40, batching="static", max_num_seqs=6, long_prefill_token_threshold=7)
    outputs = run_staggered(engine, SHARED, greedy(SHARED_LIMITS))
    assert [output.outputs[0].token_ids for output in outputs] == shared_expected and not engine.runner.failures
    assert num_found(engine) > 300


def test_salted_and_unreading_requests_get_the_same_tokens(tiny_llama, shared_expected):
    engine = build_engine(tiny_llama[1], 40, max_num_seqs=6, block_size=8)
    salts = [{"cache_salt": "ab"[index % 2]} if index % 3 else {} for index in range(len(SHARED))]
    prompts = [{"prompt_token_ids": prompt, **salt} for prompt, salt in zip(SHARED, salts, strict=True)]
    params = greedy(SHARED_LIMITS)
    params[::5] = greedy(SHARED_LIMITS[::5], skip_reading_prefix_cache=True)
    outputs = run_staggered(engine, prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == shared_expected and num_found(engine) > 0
    assert {output.num_cached_tokens for output in outputs[::5]} == {0}


@pytest.mark.parametrize("memory", PAGED)
def test_aborts_in_the_middle_harm_nobody_who_shares(tiny_llama, shared_expected, memory):
    engine = build_engine(tiny_llama[1], **PAGED[memory], max_num_seqs=16, long_prefill_token_threshold=7)
    rng, found, pending = random.Random(3), {}, list(range(len(SHARED)))
    doomed = set(rng.sample(pending, 12))
    while pending or engine.has_unfinished_requests():
        for index in pending[:2]:
            engine.add_request(str(index), SHARED[index], greedy([SHARED_LIMITS[index]])[0])
        pending = pending[2:]
        live = [int(name) for name in engine.scheduler.requests if int(name) in doomed]
        if live and rng.random() < 0.5:
            engine.abort_request(str(rng.choice(live)))
        found |= {int(output.request_id): output.outputs[0] for output in engine.step() if output.finished}
    assert {found[index].finish_reason for index in doomed} >= {"abort"}
    for index, tokens in enumerate(shared_expected):
        assert found[index].token_ids == tokens[: len(found[index].token_ids)]
        assert found[index].finish_reason == "length" or index in doomed
    assert num_found(engine) > 100 and not engine.runner.failures


@pytest.mark.parametrize("memory", PAGED)
def test_answers_that_branch_off_a_found_prefix_are_those_with_seed_plus_i(tiny_llama, memory):
    prompts = [shared_prompt(stem, length, own, 50) for stem, length, own in ((0, 32, 1), (0, 40, 4), (0, 32, 1))]
    branched = [SamplingParams(n=3, seed=10 * i, temperature=1.2, max_tokens=12, ignore_eos=True) for i in range(3)]
    engine = build_engine(tiny_llama[1], **PAGED[memory], max_num_seqs=8, long_prefill_token_threshold=7)
    outputs = run_staggered(engine, prompts, branched, per_step=1)
    for index, output in enumerate(outputs):
        for answer in output.outputs:
            alone = SamplingParams(seed=10 * index + answer.index, temperature=1.2, max_tokens=12, ignore_eos=True)
            single = build_engine(tiny_llama[1], 300, enable_prefix_caching=False)
            [expected] = run_staggered(single, [prompts[index]], [alone])
            assert answer.token_ids == expected.outputs[0].token_ids
    assert engine.prefix_cache_stats.hits > 0


def watch_first_logits(engine):
    """Collects the logits of each request's first output token, by the request's seed."""
    seen, sampler = {}, engine.runner.sampler

    def watched(logits, *, params, seeds, output_indices):
        for row, (seed, index) in enumerate(zip(seeds, output_indices, strict=True)):
            if index == 0:
                assert seed not in seen
                seen[seed] = logits[row].clone()
        return sampler(logits, params=params, seeds=seeds, output_indices=output_indices)

    engine.runner.sampler = watched
    return seen


SHARED_REQUEST = st.tuples(st.integers(0, 1), st.integers(0, 24), st.integers(1, 8), st.integers(1, 16))


def test_any_workload_gives_the_same_tokens_and_logits_with_and_without_the_cache(tiny_llama):
    double, single, total = tiny_llama[1], copy.deepcopy(tiny_llama[1]).float(), {"hits": 0, "preemptions": 0}

    @settings(max_examples=25, deadline=None, derandomize=True)  # for the totals below
    @given(
        requests=st.lists(SHARED_REQUEST, min_size=4, max_size=9),
        block_size=st.sampled_from([1, 4, 8, 16]),
        num_slots=st.sampled_from([48, 48, 64, 128]),
        chunk=st.sampled_from([0, 1, 5, 16]),
        algorithm=st.sampled_from(["sha256", "builtin"]),
        seed=st.integers(0, 99),
    )
    def check(requests, block_size, num_slots, chunk, algorithm, seed):
        prompts = [shared_prompt(stem, shared, own, i) for i, (stem, shared, own, _) in enumerate(requests)]
        params = [
            SamplingParams(temperature=0, max_tokens=r[3], ignore_eos=True, seed=i) for i, r in enumerate(requests)
        ]
        fields = {"num_blocks": num_slots // block_size, "block_size": block_size, "max_num_seqs": 6}
        fields |= {"long_prefill_token_threshold": chunk, "prefix_caching_hash_algo": algorithm}
        without, tokens = build_engine(single, 300, enable_prefix_caching=False), {}
        reference = watch_first_logits(without)
        run_staggered(without, prompts, params, seed)
        for model, caching in ((double, True), (double, False), (single, True)):
            engine = build_engine(model, **fields, enable_prefix_caching=caching)
            logits = watch_first_logits(engine)
            outputs = run_staggered(engine, prompts, params, seed, per_step=3)
            assert not engine.runner.failures
            total["hits"] += num_found(engine)
            total["preemptions"] += sum(output.metrics.num_preemptions for output in outputs)
            if model is double:
                tokens[caching] = [output.outputs[0].token_ids for output in outputs]
        assert tokens[True] == tokens[False]
        assert max((logits[i] - reference[i]).abs().max().item() for i in range(len(requests))) <= 1e-4

    check()
    assert total["hits"] > 200 and total["preemptions"] > 0
