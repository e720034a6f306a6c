"""LLM: the public face. Outputs in input order, tokens as the oracle's, and nothing bad gets in."""

import itertools
import json
import shutil

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import minivllm
from minivllm import LLM, EngineConfig, SamplingParams
from minivllm.config import GIB
from minivllm.lessons.naive import SlabCache, generate
from minivllm.runner import ModelRunner
from minivllm.sampler import Sampler
from minivllm.tokenizer import load_tokenizer, read_eos_token_ids
from tests.conftest import TINY, hf_generate, tiny_hf_model
from tests.lessons.test_naive import random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KV_BYTES = 2 * 2 * 2 * 8 * 8


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A tiny Llama with a tokenizer of one word per token: w0 to w96, w2 ending a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    folder = tmp_path_factory.mktemp("tiny")
    tiny_hf_model().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(TINY["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(str(tiny_folder), dtype="float64", device="cpu")


@pytest.fixture
def batch_sizes(monkeypatch):
    """The number of rows of every step that runs."""
    sizes, original = [], ModelRunner.execute

    def spy(self, plan):
        sizes.append(len(plan.num_scheduled_tokens))
        return original(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", spy)
    return sizes


def run(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_the_public_names_are_these():
    assert set(minivllm.__all__) == {
        "LLM",
        "AsyncLLM",
        "CompletionOutput",
        "EngineConfig",
        "EngineDeadError",
        "LLMEngine",
        "RequestOutput",
        "SamplingParams",
    }
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        minivllm.LMM  # noqa: B018


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 256])
def test_tokens_equal_transformers_in_input_order_for_any_batch_size(llm, max_num_seqs):
    reference = tiny_hf_model()
    prompts = random_prompts([9, 1, 30, 16, 2, 17, 5])
    params = [SamplingParams(temperature=0, max_tokens=3 + 4 * i, ignore_eos=True) for i in range(7)]
    outputs = run(llm.reconfigure(max_num_seqs=max_num_seqs), prompts, params)
    assert tokens(outputs) == [hf_generate(reference, p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.outputs[0].finish_reason == "length" and output.finished for output in outputs)


def test_a_batch_has_at_most_max_num_seqs_rows(llm, batch_sizes):
    run(llm.reconfigure(max_num_seqs=3), random_prompts([2] * 7))
    assert max(batch_sizes) == 3 and batch_sizes == [3] * 24 + [1] * 12


def test_every_token_of_an_answer_has_a_draw_of_its_own(llm):
    """The tokens are those that Sampler takes with the request's seed and output indices 0, 1, 2, …"""
    [prompt] = random_prompts([6])
    params, seed, index = SamplingParams(temperature=1.5, seed=9, max_tokens=20, ignore_eos=True), 9, itertools.count()
    expected = generate(
        llm.model, [prompt], 20, SlabCache(64), pick=lambda logits: Sampler()(logits, [params], [seed], [next(index)])
    )
    assert tokens(run(llm, [prompt], params)) == expected.token_ids


def test_a_request_without_a_seed_counts_only_its_like(llm):
    free = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    alone = tokens(run(llm.reconfigure(seed=1), [[7]], free))
    mates = [GREEDY, SamplingParams(seed=3, max_tokens=8), free]
    assert tokens(run(llm.reconfigure(seed=1), [[7], [7], [7]], mates))[2] == alone[0]


def test_a_small_memory_means_smaller_batches_and_the_same_tokens(llm, batch_sizes):
    prompts = random_prompts([9, 1, 30, 16])
    expected = tokens(run(llm, prompts))
    assert batch_sizes == [4] * 12
    batch_sizes.clear()
    # Blocks of 8: the first three prompts take 2, 1 and 4 blocks, and the last waits until there are 2.
    small = llm.reconfigure(block_size=8, kv_cache_memory_bytes=8 * 8 * KV_BYTES)
    assert small.kv_cache_size.num_blocks == 8
    assert tokens(run(small, prompts)) == expected
    assert batch_sizes[0] == 3 and max(batch_sizes) < 4


def test_text_prompts_are_tokenised_and_answers_are_text(llm):
    [output] = run(llm, "w5 w6 w7")
    assert output.prompt == "w5 w6 w7" and output.prompt_token_ids == [5, 6, 7]
    [completion] = output.outputs
    assert completion.index == 0 and completion.stop_reason is None
    special = {2}
    assert completion.text.split() == [f"w{t}" for t in completion.token_ids if t not in special]


def test_every_form_of_a_prompt_gives_the_same_tokens(llm):
    forms = ["w5 w6", [5, 6], {"prompt": "w5 w6"}, {"prompt_token_ids": [5, 6]}]
    outputs = run(llm, forms)
    assert len({tuple(t) for t in tokens(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["w5 w6", None, "w5 w6", None]
    assert tokens(run(llm, [5, 6])) == tokens(outputs)[:1]


def test_a_second_call_has_its_own_results_and_fresh_ids(llm):
    a, b = random_prompts([4, 6])
    first, second = run(llm, [a, b]), run(llm, [b])
    assert tokens(second) == tokens(first)[1:]
    ids = [output.request_id for output in first + second]
    assert len(set(ids)) == 3


def test_end_of_sequence_stops_unless_ignored_and_beats_length(llm):
    free = {}
    for start in range(3, 90):
        params = {"temperature": 3.0, "seed": start}
        [output] = run(llm, [[start]], SamplingParams(**params, max_tokens=40, ignore_eos=True))
        if 2 in output.outputs[0].token_ids[:-1]:
            free[start] = output.outputs[0].token_ids
    assert free, "no prompt of the tiny model meets its end-of-sequence token"
    for start, ids in free.items():
        end = ids.index(2) + 1
        for max_tokens in (None, 40, end):
            [output] = run(llm, [[start]], SamplingParams(temperature=3.0, seed=start, max_tokens=max_tokens))
            completion = output.outputs[0]
            assert completion.token_ids == ids[:end]
            assert completion.finish_reason == "stop"
            assert "w2" not in completion.text.split()


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [(8, 1, 1), (8, None, 120), (8, 10**9, 120), (126, 5, 2), (127, None, 1), (127, 5, 1)],
)
def test_an_answer_ends_at_the_models_length_at_the_latest(llm, length, max_tokens, expected):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    [output] = run(llm, random_prompts([length]), params)
    assert len(output.outputs[0].token_ids) == expected
    assert output.outputs[0].finish_reason == "length"


def test_a_shorter_max_model_len_is_kept(llm):
    short = llm.reconfigure(max_model_len=20)
    [output] = run(short, [[3] * 15], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 5
    with pytest.raises(ValueError, match="has 20 tokens and max_model_len is 20"):
        run(short, [[3] * 20])


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(llm):
    prompts = random_prompts([5, 9, 3, 20])
    seeded = SamplingParams(temperature=1.0, max_tokens=16, seed=42, ignore_eos=True)
    alone = tokens(run(llm, [prompts[0]], seeded))[0]
    others = [SamplingParams(max_tokens=20, ignore_eos=True), GREEDY, SamplingParams(seed=1, top_p=0.5)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0]):
        params = [seeded if i == 0 else others[i - 1] for i in order]
        for max_num_seqs in (1, 3, 8):
            outputs = run(llm.reconfigure(max_num_seqs=max_num_seqs), [prompts[i] for i in order], params)
            assert tokens(outputs)[order.index(0)] == alone
    other_seed = SamplingParams(temperature=1.0, max_tokens=16, seed=43, ignore_eos=True)
    assert tokens(run(llm, [prompts[0]], other_seed))[0] != alone


def test_without_a_seed_two_requests_differ_and_a_new_engine_repeats_them(llm):
    params = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
    fresh = [llm.reconfigure(seed=5) for _ in range(2)]
    first = [tokens(run(engine, [[7], [7]], params)) for engine in fresh]
    assert first[0] == first[1]
    assert first[0][0] != first[0][1]
    assert tokens(run(fresh[0], [[7]], params))[0] not in first[0]
    assert tokens(run(llm.reconfigure(seed=6), [[7], [7]], params)) != first[0]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[5], []], GREEDY, r"prompt 1: the prompt is empty \(0 tokens\)"),
        ("", GREEDY, r"prompt 0: the prompt is empty"),
        ([], GREEDY, "prompts is an empty list"),
        ([[5], [97]], GREEDY, "prompt 1: token id 97 at position 0 is out of the vocabulary of 97"),
        ([[5], [-1]], GREEDY, "token id -1 at position 0"),
        ([[5] * 128], GREEDY, "prompt 0: the prompt has 128 tokens and max_model_len is 128"),
        ([[5], [6]], [GREEDY], "2 prompts and 1 sampling params"),
        ([[5]], [{"temperature": 0}], "must be SamplingParams, got dict"),
        ([[5]], [], "1 prompts and 0 sampling params"),
        ([[5]], 5, "must be SamplingParams or a list of them, got int"),
        ([[5]], SamplingParams, "must be SamplingParams or a list of them, got type"),
        ("w5 \ud800", GREEDY, r"'w5 \\ud800' is no valid Unicode"),
        (5, GREEDY, "got int"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(llm, monkeypatch, prompts, params, message):
    monkeypatch.setattr(ModelRunner, "execute", None)
    with pytest.raises(ValueError, match=message):
        run(llm, prompts, params)


def test_after_a_refusal_the_engine_goes_on(llm):
    with pytest.raises(ValueError):
        run(llm, [[5], [97]])
    assert len(run(llm, [[5]])) == 1


def test_a_request_that_its_memory_could_never_hold_is_refused_with_the_numbers(llm):
    small = llm.reconfigure(block_size=4, num_kv_blocks=5)
    with pytest.raises(
        ValueError, match=r"prompt 0: the prompt has 21 tokens and the KV cache holds 20 \(5 blocks of 4"
    ):
        run(small, [[5] * 21], SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(ValueError, match=r"has 10 tokens and max_tokens is 12, which need 21 slots .* holds 20 \(5"):
        run(small, [[5] * 10], SamplingParams(temperature=0, max_tokens=12))
    assert len(tokens(run(small, [[5] * 10], SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)))[0]) == 11
    # 18 slots for the prompt and the tokens after it; the last token of all is never read again.
    [output] = run(small, [[5] * 18], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("reservation", ["max", "pow2", "exact"])
def test_contiguous_memory_holds_as_much_as_there_is(llm, reservation):
    small = llm.reconfigure(block_size=4, num_kv_blocks=5, kv_cache="contiguous", reservation=reservation)
    [output] = run(small, [[5] * 18], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


def test_a_max_model_len_that_the_memory_can_not_hold_is_refused_at_the_start(llm):
    with pytest.raises(ValueError, match="max_model_len is 82 and the KV cache holds 80 tokens"):
        llm.reconfigure(max_model_len=82, num_kv_blocks=5)
    assert llm.reconfigure(max_model_len=81, num_kv_blocks=5).max_model_len == 81


def test_memory_for_less_than_a_block_is_refused_at_once(llm, tiny_folder):
    message = f"a block of 16 tokens takes {16 * KV_BYTES} bytes of keys and values and there are {16 * KV_BYTES - 1}"
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_folder), dtype="float64", kv_cache_memory_bytes=16 * KV_BYTES - 1)
    with pytest.raises(ValueError, match=message):
        llm.reconfigure(kv_cache_memory_bytes=16 * KV_BYTES - 1)


def test_reconfigure_keeps_weights_and_refuses_what_needs_others(llm):
    other = llm.reconfigure(max_num_seqs=2)
    assert other.model is llm.model and other.config.max_num_seqs == 2 and llm.config.max_num_seqs == 256
    assert llm.reconfigure(**vars(llm.config)).model is llm.model
    for field, value in {"model": "x", "tokenizer": "x", "device": "auto", "dtype": "float32"}.items():
        with pytest.raises(ValueError, match=f"{field} can't change on loaded weights"):
            llm.reconfigure(**{field: value})
    with pytest.raises(ValueError, match="max_model_len is 129, but the model was loaded with 128"):
        llm.reconfigure(max_model_len=129)
    with pytest.raises(ValueError, match="unknown option"):
        llm.reconfigure(max_seqs=1)


def test_conversations_share_blocks_with_those_of_their_salt_only(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    llm = llm.reconfigure(block_size=4)
    chat = [{"role": "user", "content": "w5 w6 w7 w8 w9 w10"}]
    greedy = SamplingParams(temperature=0, max_tokens=2)

    def found(salt):
        [output] = llm.chat(chat, greedy, use_tqdm=False, cache_salt=salt)
        return output.num_cached_tokens > 0

    assert [found(salt) for salt in (None, "a", None, "b", "a", "b")] == [False, False, True, False, True, True]
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string, got ''"):
        llm.chat(chat, greedy, use_tqdm=False, cache_salt="")


def test_chat_without_a_template_or_with_bad_messages_is_refused(llm):
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    for messages in ([], None, "hi", {"role": "user", "content": "hi"}, iter([])):
        with pytest.raises(ValueError, match="messages must be a list"):
            llm.chat(messages)
    with pytest.raises(ValueError, match="a conversation is empty"):
        llm.chat([[]])
    bad = [{"role": "user", "content": None}, {"role": 1, "content": "x"}, {"role": "user", "content": ["x"]}]
    for messages in ([{"role": "user"}], [[{"content": "x"}]], [["hi"]], *([message] for message in bad)):
        with pytest.raises(ValueError, match="a message is a dict with role and content"):
            llm.chat(messages)


def test_the_bar_goes_to_stderr_and_can_be_switched_off(llm, capfd, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    run(llm, [[5]])
    assert capfd.readouterr() == ("", "")
    llm.generate([[5], [6]], GREEDY)
    assert "2/2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"device": "tpu"}, "unknown device 'tpu'|device 'tpu' has no back end"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not there"),
        ({"max_model_len": 129}, "max_model_len is 129"),
        ({"max_num_seq": 1}, "unknown option"),
    ],
)
def test_a_bad_option_is_refused(tiny_folder, fields, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_folder), **fields)


@pytest.mark.parametrize("model", ["gpt-17", "no/such/folder", "/no/such/folder", "~nobody/model", ""])
def test_an_unknown_model_is_refused(model):
    with pytest.raises(ValueError, match=r"unknown model|non-empty string"):
        LLM(model)


def test_a_hub_model_that_cant_be_fetched_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="'nobody/nothing' is no folder here and can't be fetched from the hub"):
        LLM("nobody/nothing")


@pytest.mark.parametrize("model", ["a" * 300, "a\0b"])
def test_a_name_that_no_file_system_takes_is_an_unknown_model(model):
    with pytest.raises(ValueError, match="unknown model"):
        LLM(model)


def test_a_path_object_is_a_model_too(tiny_folder):
    assert LLM(tiny_folder, device="cpu").config.model == str(tiny_folder)


def test_longrope_weights_keep_the_length_they_were_loaded_for(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"original_max_position_embeddings": 32, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    with pytest.raises(ValueError, match=r"max_model_len \(with longrope"):
        LLM(str(tmp_path), device="cpu").reconfigure(max_model_len=32)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, {2}), (5, None, {2, 5}), ([5, 6], None, {2, 5, 6}), (None, [7, 8], {2, 7, 8}), (5, 9, {2, 5, 9})],
)
def test_every_end_of_sequence_token_that_is_named_counts(tiny_folder, tmp_path, config_eos, generation_eos, expected):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": config_eos}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert read_eos_token_ids(tmp_path, load_tokenizer(tmp_path)) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"eos_token_id": "x"}'])
def test_a_broken_generation_config_is_told(tiny_folder, tmp_path, text):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json can't be read|are no ids"):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["null", "[]", "{"])
def test_a_broken_tokenizer_is_told(tiny_folder, tmp_path, name, text):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="has no tokenizer that can be read"):
        LLM(str(tmp_path), device="cpu")


def test_a_beginning_of_sequence_token_comes_once(tiny_folder, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    tokenizer.chat_template = "w1 {% for m in messages %}{{ m['content'] }}{% endfor %}"
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu")
    assert run(llm, "w5 w6")[0].prompt_token_ids == [1, 5, 6]
    [answer] = llm.chat([{"role": "user", "content": "w5 w6"}], GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == [1, 5, 6]


def test_broken_weights_end_in_a_sentence(tiny_folder, caplog):
    llm = LLM(str(tiny_folder), device="cpu", dtype="float32")
    llm.model.norm.weight.fill_(torch.nan)
    for params in (GREEDY, SamplingParams(temperature=1.0)):
        for output in run(llm, [[5], [6]], params):
            [answer] = output.outputs
            assert output.finished and answer.finish_reason == "error" and answer.token_ids == []
            assert "logits are NaN or infinite" in answer.stop_reason
    assert len(caplog.records) == 4 and "failed: the model's logits are NaN" in caplog.text


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    tiny_hf_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer that can be read"):
        LLM(str(tmp_path))


def test_memory_defaults_to_one_gib_on_a_cpu(llm):
    assert llm.kv_bytes_per_token == KV_BYTES
    assert llm.kv_cache_size.num_blocks == GIB // (16 * KV_BYTES)
    assert (
        "1.00 GiB): kv_cache_memory_bytes is not set, which means 1 GiB on a CPU" in str(llm.kv_cache_size)
        and EngineConfig().kv_cache_memory_bytes is None
    )


def test_low_precision_runs(tiny_folder):
    for dtype in ("bfloat16", "float16"):
        llm = LLM(str(tiny_folder), dtype=dtype, device="cpu")
        assert llm.model.dtype == getattr(torch, dtype)
        assert len(tokens(run(llm, [[5, 6], [7]]))[0]) == 12
