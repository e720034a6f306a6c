"""The engine gives transformers' tokens, whatever the batching, the chunks, the memory and the order of arrival."""

import random

import pytest

from minivllm import SamplingParams
from minivllm.clock import VirtualClock
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine, ModelLimits
from minivllm.kv_cache import ContiguousKVCache, PagedKVCache
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
    if config.kv_cache == "paged":
        manager = PagedKVCache(num_blocks, block_size)
    else:
        manager = ContiguousKVCache(num_blocks, block_size, min(128, num_blocks * block_size), config.reservation)
    if config.batching == "static":
        scheduler = StaticScheduler(config, manager, keep_finished_rows)
    else:
        scheduler = ContinuousScheduler(config, manager)
    runner = ModelRunner(model, num_blocks, block_size)
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
