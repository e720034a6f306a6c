"""Faults that public engines had, on a tiny model: each must not be ours."""

import json
import math
import random
import threading

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.submission import Submission
from minivllm.trace import Recorder
from tests.conftest import hf_generate
from tests.lessons.test_naive import random_prompts
from tests.test_identity import build_engine, run_staggered
from tests.test_llm import tiny_folder  # noqa: F401


@pytest.fixture(scope="module")
def llm(tiny_folder):  # noqa: F811
    return LLM(str(tiny_folder), dtype="float64", device="cpu")


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def seeded(max_tokens, seed=42, temperature=0.8):
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def tokens(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


class SpySampler:
    """Stands before the runner's sampler: keeps what it is asked, and may spoil the logits of one request."""

    def __init__(self, engine, spoil=None, seed=None, index=3):
        self.original, self.asked, self.first_logits = engine.runner.sampler, [], {}
        self.spoil, self.seed, self.index = spoil, seed, index
        engine.runner.sampler = self

    def __call__(self, logits, params, seeds, output_indices):
        for row, (seed, index) in enumerate(zip(seeds, output_indices, strict=True)):
            self.asked.append((seed, index))
            if index == 0:
                self.first_logits[seed] = logits[row].clone()
            if self.spoil and (seed, index) == (self.seed, self.index):
                logits = logits.clone()
                logits[row] = self.spoil(logits[row])
        return self.original(logits, params, seeds, output_indices)


# --- chunked prefill -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [greedy(20), seeded(20)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 49, 50, 10000])
def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole_prompt(tiny_llama, chunk, params):
    [prompt] = random_prompts([50])
    engines = [build_engine(tiny_llama[1], 8, long_prefill_token_threshold=limit) for limit in (0, chunk)]
    spies = [SpySampler(engine) for engine in engines]
    traces = [engine.start_recording() for engine in engines]
    whole, chunked = (run_staggered(engine, [prompt], [params]) for engine in engines)
    assert tokens(whole) == tokens(chunked)
    first = [next(iter(spy.first_logits.values())) for spy in spies]
    assert (first[0] - first[1]).abs().max() < 1e-4
    # One draw for each token put out: a chunk that is not the last draws nothing.
    assert [index for _, index in spies[1].asked] == list(range(20))
    steps = [step for step in traces[1].steps if step.get("scheduled")]
    assert all(count > 0 for step in steps for count in step["scheduled"].values())
    first_token = next(number for number, step in enumerate(steps, start=1) if step.get("tokens"))
    assert first_token == math.ceil(50 / chunk)


def test_65_tokens_under_a_budget_of_64_take_two_steps(tiny_llama):
    engine = build_engine(tiny_llama[1], 16, max_num_batched_tokens=64)
    trace = engine.start_recording()
    run_staggered(engine, random_prompts([65]), [greedy(1)])
    assert [step["scheduled"] for step in trace.steps if "scheduled" in step] == [{"0": 64}, {"0": 1}]


def test_without_chunks_the_budget_must_hold_the_longest_text(llm):
    for fields in ({"max_model_len": 100}, {}):
        with pytest.raises(ValueError, match=r"max_num_batched_tokens is 64, max_model_len is 1\d\d and"):
            llm.reconfigure(max_num_batched_tokens=64, enable_chunked_prefill=False, **fields)
    small = llm.reconfigure(max_num_batched_tokens=64, enable_chunked_prefill=False, max_model_len=64)
    with pytest.raises(ValueError, match="65 tokens and max_model_len is 64"):
        small.generate([[5] * 65], use_tqdm=False)
    assert len(tokens(small.generate([[5] * 63], greedy(4), use_tqdm=False))[0][0]) == 1


# --- preemption ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True], ids=["alone", "with a prefix cache"])
@pytest.mark.parametrize("params", [greedy(40), seeded(40)], ids=["greedy", "seeded"])
def test_a_preemption_can_not_be_seen_in_the_output(tiny_llama, params, caching):
    prompts = random_prompts([40] * 4)
    outputs, num_cached = {}, 0
    for num_blocks in (12, 1000):
        engine = build_engine(tiny_llama[1], num_blocks, enable_prefix_caching=caching)
        trace = engine.start_recording()
        outputs[num_blocks] = run_staggered(engine, prompts, [params] * 4, per_step=8)
        resumed = [
            (step["step"], decision["request_id"])
            for step in trace.steps
            for decision in step.get("decisions", ())
            if decision["kind"] == "resume"
        ]
        for number, name in resumed:  # prompt and output are computed again, and then it goes on where it was
            before, after = trace.state(number - 1).requests[name], trace.state(number).requests[name]
            assert after.num_cached_tokens + after.num_scheduled_tokens == before.num_tokens
            assert after.num_computed_tokens == before.num_tokens
            num_cached += after.num_cached_tokens
            assert after.num_tokens == before.num_tokens + 1
        assert bool(resumed) == (num_blocks == 12)
    assert (num_cached > 0) == caching  # blocks that nobody has overwritten meanwhile are not computed again
    assert sum(output.metrics.num_preemptions for output in outputs[12]) > 0
    assert tokens(outputs[12]) == tokens(outputs[1000])
    for output in outputs[12]:
        assert len(output.outputs[0].token_ids) == 40 and output.outputs[0].finish_reason == "length"


# --- randomness ------------------------------------------------------------------------------------------------


def test_a_seeded_request_does_not_depend_on_its_batch_mates(tiny_llama):
    model = tiny_llama[1]
    prompt, *others = random_prompts([9, 30, 4, 17, 12, 25, 3, 8])
    [alone] = tokens(run_staggered(build_engine(model, 100), [prompt], [seeded(16)]))
    free = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
    for repeat in range(20):
        mates = others[: [0, 1, 3, 7][repeat % 4]]
        kinds = [free, seeded(16, seed=repeat), greedy(16)]
        params = [seeded(16), *(kinds[(repeat + i) % 3] for i in range(len(mates)))]
        fields = [
            {"num_blocks": 100},
            {"num_blocks": 4},
            {"num_blocks": 100, "long_prefill_token_threshold": 8},
            {"num_blocks": 100, "long_prefill_token_threshold": 64, "max_num_batched_tokens": 70},
        ][repeat // 5]
        outputs = run_staggered(build_engine(model, **fields), [prompt, *mates], params, seed=repeat)
        assert tokens(outputs)[0] == alone
    assert tokens(run_staggered(build_engine(model, 100), [prompt], [seeded(16, seed=43)])) != [alone]
    two = tokens(run_staggered(build_engine(model, 100), [prompt] * 2, [free] * 2))
    assert two[0] != two[1]


# --- logits that are not finite --------------------------------------------------------------------------------


def one_nan(row):
    row = row.clone()
    row[7] = torch.nan
    return row


@pytest.mark.parametrize(
    "spoil",
    [lambda row: row * torch.nan, one_nan, lambda row: torch.full_like(row, -torch.inf)],
    ids=["all NaN", "one NaN", "all minus infinity"],
)
@pytest.mark.parametrize("kind", [greedy, seeded])
def test_only_the_request_with_bad_logits_ends(tiny_llama, spoil, kind):
    prompts = random_prompts([9, 20, 5])
    params = [kind(12), seeded(12, seed=7), kind(12)]
    clean = run_staggered(build_engine(tiny_llama[1], 20), prompts, params)
    engine = build_engine(tiny_llama[1], 20)
    SpySampler(engine, spoil, seed=7)
    found = run_staggered(engine, prompts, params)
    assert [found[0].outputs, found[2].outputs] == [clean[0].outputs, clean[2].outputs]
    [answer] = found[1].outputs
    assert answer.finish_reason == "error" and "NaN or infinite" in answer.stop_reason
    assert answer.token_ids == clean[1].outputs[0].token_ids[:3]


# --- greedy tokens and the shape of the batch ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_far_the_shape_of_the_batch_moves_the_logits(tiny_llama, dtype):
    """In float32 no token changes. In bfloat16 tokens are not compared: the logits of the first tokens, for which
    the texts are still equal, differ by no more than twice what two batch shapes differ by anyway."""
    import copy

    model = copy.deepcopy(tiny_llama[1]).to(dtype)
    prompts = random_prompts([RNG.randint(1, 40) for RNG in [random.Random(i) for i in range(16)]])
    params = [greedy(64 if dtype is torch.float32 else 1)] * 16
    results, logits = {}, {}
    for size in (1, 2, 8, 16):
        engine = build_engine(model, 200, max_num_seqs=size)
        spies = SpySampler(engine)
        order = [SamplingParams(**{**vars(p), "seed": index}) for index, p in enumerate(params)]
        results[size] = tokens(run_staggered(engine, prompts, order, seed=size))
        logits[size] = torch.stack([spies.first_logits[index].double() for index in range(16)])
    if dtype is torch.float32:
        assert results[2] == results[8] == results[16] == results[1]
        assert max((logits[size] - logits[1]).abs().max() for size in (2, 8, 16)) < 1e-4
    else:
        tolerance = 2 * (logits[2] - logits[1]).abs().max() + 2**-6 * logits[1].abs().max()
        assert max((logits[size] - logits[1]).abs().max() for size in (8, 16)) <= tolerance


# --- length ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"),
    [(5, 1, 1), (5, None, 123), (5, 10**9, 123), (127, None, 1), (127, 1, 1), (127, 9, 1)],
)
def test_max_tokens_to_the_edge_of_the_context(llm, prompt_len, max_tokens, expected):
    [output] = llm.generate(random_prompts([prompt_len]), greedy(max_tokens), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == expected and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("prompt_len", [128, 129, 500])
def test_a_prompt_without_room_for_a_token_is_refused_with_both_numbers(llm, prompt_len):
    for max_tokens in (1, None):
        with pytest.raises(ValueError, match=f"the prompt has {prompt_len} tokens and max_model_len is 128"):
            llm.generate([[5] * prompt_len], greedy(max_tokens), use_tqdm=False)


# --- one bad request, and whose output is whose ----------------------------------------------------------------


class Breaking:
    """Raises in every pass that a certain text takes part in."""

    def __init__(self, engine, name):
        self.engine, self.name, self.original = engine, name, engine.runner._run
        engine.runner._run = self

    def __call__(self, scheduled):
        if any(item.row.request_id == self.name and len(item.row.token_ids) > 12 for item in scheduled):
            raise RuntimeError("context overrun")
        return self.original(scheduled)


@pytest.mark.parametrize("how", ["the pass raises", "its account is lost", "its block table is broken"])
def test_one_request_that_raises_inside_the_step_ends_alone(tiny_llama, how):
    prompts = random_prompts([9] * 8)
    params = [greedy(16) if index % 2 else seeded(16) for index in range(8)]
    clean = tokens(run_staggered(build_engine(tiny_llama[1], 40), prompts, params, per_step=20))
    engine = build_engine(tiny_llama[1], 40)
    for index in range(8):
        engine.add_request(str(index), prompts[index], params[index])
    if how == "the pass raises":
        Breaking(engine, "3")
    for _ in range(4):
        engine.step()
    if how == "its account is lost":
        del engine.runner._rows["3"]
    elif how == "its block table is broken":
        engine.runner._rows["3"].block_ids.clear()
    ended = {}
    while engine.has_unfinished_requests():
        ended.update({output.request_id: output for output in engine.step() if output.finished})
    assert sorted(ended) == [str(index) for index in range(8)]
    for index in range(8):
        [answer] = ended[str(index)].outputs
        if index == 3:
            assert answer.finish_reason == "error" and answer.stop_reason
            assert answer.token_ids == clean[3][0][: len(answer.token_ids)] and len(answer.token_ids) == 4
        else:
            assert answer.token_ids == clean[index][0] and answer.finish_reason == "length"
    assert engine.scheduler.manager.num_free_blocks == 40
    again = run_staggered(engine, prompts[:2], params[:2])
    assert tokens(again) == clean[:2]


def test_eight_threads_get_each_their_own_answers(llm, tiny_llama):
    reference, _ = tiny_llama
    shared = llm.reconfigure(max_num_seqs=32, num_kv_blocks=40, max_num_batched_tokens=128)
    prompts = {t: [[3 + t, 11 + i % 80, 3 + i // 80] for i in range(50)] for t in range(8)}
    found: dict[int, list] = {}

    def work(thread):
        half = prompts[thread][:25], prompts[thread][25:]
        found[thread] = [output for part in half for output in shared.generate(part, greedy(4), use_tqdm=False)]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [output.request_id for outputs in found.values() for output in outputs]
    assert len(names) == 400 == len(set(names))
    for t in range(8):
        assert [output.prompt_token_ids for output in found[t]] == prompts[t]
    sample = random.Random(0).sample([(t, i) for t in range(8) for i in range(50)], 40)
    for t, i in sample:
        assert found[t][i].outputs[0].token_ids == hf_generate(reference, prompts[t][i], 4)
    manager = shared.engine.scheduler.manager
    assert manager.num_free_blocks == manager.num_blocks and not shared._finished


def test_requests_that_were_given_to_the_engine_survive_a_call_of_generate(llm):
    fresh = llm.reconfigure()
    fresh.engine.add_request("mine", [5, 6, 7], greedy(3))
    fresh.engine.step()
    fresh.generate([[8]], greedy(9), use_tqdm=False)
    outputs = [output for output in fresh.engine.step() if output.finished]
    assert [output.request_id for output in outputs] == ["mine"]
    assert not fresh.engine.has_unfinished_requests()
    assert tokens(outputs) == tokens(llm.generate([[5, 6, 7]], greedy(3), use_tqdm=False))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch, error):
    fresh = llm.reconfigure()
    expected = tokens(fresh.generate([[5, 6], [7]], greedy(6), use_tqdm=False))
    execute, calls = fresh.engine.runner.execute, []

    def interrupted(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise error("stop")
        return execute(plan)

    monkeypatch.setattr(fresh.engine.runner, "execute", interrupted)
    with pytest.raises(error):
        fresh.generate([[5, 6], [7]], greedy(6), use_tqdm=False)
    manager = fresh.engine.scheduler.manager
    assert manager.num_free_blocks == manager.num_blocks and not fresh.engine.has_unfinished_requests()
    assert not fresh._finished
    assert tokens(fresh.generate([[5, 6], [7]], greedy(6), use_tqdm=False)) == expected


def test_usage_counts_a_prompt_once_for_all_its_answers(llm):
    fresh = llm.reconfigure(num_kv_blocks=40)
    with fresh.trace() as trace:
        [output] = fresh.generate(random_prompts([50]), SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True))
    assert [len(answer.token_ids) for answer in output.outputs] == [8] * 4
    computed = sum(sum(step.get("scheduled", {}).values()) for step in trace.steps)
    assert computed == 50 + 4 * 7
    # Three full blocks of the prompt are shared, the fourth (2 of 16) is copied: 3 + 4 blocks.
    assert max(len(state.holders) for state in (trace.state(k) for k in range(len(trace)))) == 7
    with pytest.raises(ValueError, match="n is 5 and at most 4 requests run together"):
        llm.reconfigure(max_num_seqs=4).generate([[5]], SamplingParams(n=5), use_tqdm=False)


def test_a_rows_account_ends_with_the_request(tiny_llama):
    engine = build_engine(tiny_llama[1], 20)
    run_staggered(engine, random_prompts([9, 3, 20]), [greedy(4), greedy(9), greedy(2)])
    engine.step()
    assert engine.runner._rows == {}


def test_a_pass_takes_time(tiny_llama):
    engine = build_engine(tiny_llama[1], 20)
    run_staggered(engine, [[5, 6]], [greedy(3)])
    assert engine.clock.now() > 0


def test_answers_whose_common_logits_are_not_finite_all_end(tiny_llama):
    engine = build_engine(tiny_llama[1], 20)
    SpySampler(engine, one_nan, seed=2**64 - 2, index=0)
    [output] = run_staggered(engine, [[5, 6]], [SamplingParams(n=3, seed=2**64 - 2, temperature=1.0, max_tokens=5)])
    assert output.finished and {answer.finish_reason for answer in output.outputs} == {"error"}


def test_seeds_of_answers_wrap_around(tiny_llama):
    def params(n, seed):
        return SamplingParams(n=n, seed=seed, temperature=1.5, max_tokens=9, ignore_eos=True)

    [many] = run_staggered(build_engine(tiny_llama[1], 20), [[5, 6]], [params(3, 2**64 - 1)])
    for index, seed in enumerate((2**64 - 1, 0, 1)):
        [one] = run_staggered(build_engine(tiny_llama[1], 20), [[5, 6]], [params(1, seed)])
        assert many.outputs[index].token_ids == one.outputs[0].token_ids


def test_numbers_of_numpy_are_numbers(tiny_llama):
    engine = build_engine(tiny_llama[1], 20, max_num_seqs=np.int64(4))
    trace = engine.start_recording()
    params = SamplingParams(temperature=np.float32(0.8), seed=np.int64(5), max_tokens=np.int8(100), ignore_eos=True)
    [output] = run_staggered(engine, [random_prompts([20])[0]], [params])
    assert len(output.outputs[0].token_ids) == 100
    json.dumps([trace.header, trace.steps], allow_nan=False)
    assert type(params.seed) is type(params.max_tokens) is int and type(params.temperature) is float


@pytest.mark.parametrize("where", ["_append", "_finish", "record", "output", "schedule"])
def test_a_step_that_breaks_off_anywhere_loses_nobody(llm, monkeypatch, where):
    fresh = llm.reconfigure()
    engine, broken = fresh.engine, []
    expected = tokens(fresh.generate([[5, 6], [7]], greedy(6), use_tqdm=False))
    target = {
        "_append": engine.scheduler,
        "_finish": engine.scheduler,
        "schedule": engine.scheduler.manager,
        "record": Recorder,
        "output": Submission,
    }[where]
    name = "allocate_slots" if where == "schedule" else where
    original, calls = getattr(target, name), []

    def breaking(*arguments):
        calls.append(name)
        if len(calls) == 2 and not broken:
            broken.append(True)
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(target, name, breaking)
    engine.start_recording()
    engine.add_request("mine", [9, 8], greedy(4))
    with pytest.raises(KeyboardInterrupt):
        fresh.generate([[5, 6], [7]], greedy(6), use_tqdm=False)
    ended = {}
    for _ in range(50):
        ended.update({output.request_id: output for output in engine.step() if output.finished})
        if not engine.has_unfinished_requests():
            break
    assert list(ended) == ["mine"] and len(ended["mine"].outputs[0].token_ids) == 4
    assert tokens(fresh.generate([[5, 6], [7]], greedy(6), use_tqdm=False)) == expected
    assert engine.scheduler.manager.num_free_blocks == engine.scheduler.manager.num_blocks and not fresh._finished


def test_a_users_name_that_generate_would_take_is_left_to_the_user(llm):
    fresh = llm.reconfigure()
    fresh.engine.add_request("#0", [9, 9, 9], greedy(5))
    [output] = fresh.generate([[5, 6, 7]], greedy(3), use_tqdm=False)
    assert output.request_id == "#1" and len(output.outputs[0].token_ids) == 3
    outputs = [o for _ in range(6) for o in fresh.engine.step() if o.finished]
    assert [(o.request_id, len(o.outputs[0].token_ids)) for o in outputs] == [("#0", 5)]


def test_two_failures_in_a_row_leave_nothing_behind(llm, monkeypatch):
    fresh = llm.reconfigure()
    execute, calls = fresh.engine.runner.execute, []

    def failing(plan):
        calls.append(plan)
        if len(calls) in (3, 4):
            raise MemoryError
        return execute(plan)

    monkeypatch.setattr(fresh.engine.runner, "execute", failing)
    with pytest.raises(MemoryError):
        fresh.generate([[5, 6, 7]], greedy(9), use_tqdm=False)
    fresh.generate([[5, 6, 7]], greedy(9), use_tqdm=False)
    assert not fresh.engine.has_unfinished_requests() and not fresh._finished


def test_somebody_who_steps_by_hand_takes_nothing_from_a_call_of_generate(llm):
    fresh = llm.reconfigure()
    found, stop = [], threading.Event()

    def step_by_hand():
        while not stop.is_set():
            found.extend(fresh.engine.step())

    thread = threading.Thread(target=step_by_hand)
    thread.start()
    outputs = fresh.generate(random_prompts([5] * 20), greedy(5), use_tqdm=False)
    stop.set()
    thread.join()
    assert len(outputs) == 20 and found == []


def test_recordings_begin_and_end_while_others_generate(llm):
    fresh = llm.reconfigure()
    done = []

    def work():
        for _ in range(10):
            done.extend(fresh.generate(random_prompts([4, 9]), greedy(3), use_tqdm=False))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with fresh.trace():
            pass
    for thread in threads:
        thread.join()
    assert len(done) == 60


def test_outputs_are_the_users_to_change(llm):
    engine = llm.reconfigure().engine
    engine.add_request("a", [5, 6], greedy(6))
    engine.step()[0].prompt_token_ids.append(3)
    outputs = [output for _ in range(5) for output in engine.step()]
    assert outputs[-1].prompt_token_ids == [5, 6] and len(outputs[-1].outputs[0].token_ids) == 6
