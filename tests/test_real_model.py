"""The real model: every stage gives transformers' frozen tokens, and the weights are the right ones."""

import itertools

import pytest
import torch

from minivllm import SamplingParams
from minivllm.lessons.naive import ConcatCache, SlabCache, Work, cached_steps, generate, greedy
from minivllm.model.attention import dense_attention
from minivllm.model.default_model import PROBE, PROBE_NLL, PROBE_TOLERANCE
from tests.conftest import ORACLE

pytestmark = pytest.mark.real_model

CASES = ORACLE["cases"]
PROMPTS = [case["prompt_token_ids"] for case in CASES]
EXPECTED = [case["token_ids"] for case in CASES]
NUM_TOKENS = 24


def test_the_frozen_prompts_have_no_near_tie_and_many_lengths():
    assert len(CASES) == 16
    assert all(case["min_gap"] >= 1e-3 and len(case["token_ids"]) == NUM_TOKENS for case in CASES)
    assert len({len(prompt) for prompt in PROMPTS}) >= 10


def test_the_frozen_prompts_are_what_our_tokenizer_makes_of_their_texts(real_llm):
    for case in CASES:
        assert real_llm.tokenizer.encode(case["text"]) == case["prompt_token_ids"]


def test_stage_0_gives_the_frozen_tokens(real_llm):
    result = generate(real_llm.model, PROMPTS[:4], NUM_TOKENS)
    assert result.token_ids == EXPECTED[:4]


def test_stage_1_gives_the_frozen_tokens(real_llm):
    result = generate(real_llm.model, PROMPTS, NUM_TOKENS, ConcatCache())
    assert result.token_ids == EXPECTED


def test_stage_2_gives_the_frozen_tokens_in_reversed_order(real_llm):
    result = generate(real_llm.model, PROMPTS[::-1], NUM_TOKENS, SlabCache(256))
    assert result.token_ids == EXPECTED[::-1]


@pytest.mark.parametrize(
    ("fields", "preempts"),
    [
        ({}, False),
        ({"long_prefill_token_threshold": 7, "max_num_batched_tokens": 24}, False),
        ({"num_kv_blocks": 14, "block_size": 8}, True),
        ({"num_kv_blocks": 24, "max_num_seqs": 5, "enable_chunked_prefill": False, "max_model_len": 300}, False),
        ({"batching": "static", "max_num_seqs": 5, "num_kv_blocks": 64}, False),
        ({"kv_cache": "contiguous", "reservation": "pow2", "num_kv_blocks": 30, "block_size": 8}, True),
    ],
    ids=["whole prompts", "chunks of 7", "preempted", "not chunked", "static", "contiguous"],
)
def test_the_engine_gives_the_frozen_tokens(real_llm, fields, preempts):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = real_llm.reconfigure(**fields).generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == EXPECTED
    assert (sum(output.metrics.num_preemptions for output in outputs) > 0) == preempts


def test_an_answer_stops_at_the_end_of_turn_token(real_llm):
    case = next(case for case in CASES if "capital of Italy" in case["text"])
    end = case["token_ids"].index(2) + 1
    [output] = real_llm.generate(
        [case["prompt_token_ids"]], SamplingParams(temperature=0, max_tokens=100), use_tqdm=False
    )
    assert output.outputs[0].token_ids == case["token_ids"][:end]
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


TURNS = (
    "What is the capital of Italy? Answer in one sentence.",
    "And what is the capital of France?",
    "Which of the two cities is larger?",
    "Thank you. Name one river that flows through Paris.",
)


def chat_of_turns(llm):
    """A chat of several turns; returns each turn's output, and the logits of each of its tokens."""
    messages, outputs, logits, sampler = [], [], [], llm.engine.runner.sampler

    def watched(rows, **keywords):
        logits[-1].append(rows[0].clone())
        return sampler(rows, **keywords)

    llm.engine.runner.sampler = watched
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        logits.append([])
        [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
        outputs.append(output)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return outputs, logits


def test_a_chat_finds_its_earlier_turns_and_says_the_same(real_llm):
    block_size = 16
    plain, plain_logits = chat_of_turns(real_llm.reconfigure(enable_prefix_caching=False, block_size=block_size))
    found, logits = chat_of_turns(real_llm.reconfigure(block_size=block_size))
    for rows in plain_logits:
        best, second = torch.stack(rows).topk(2).values.T
        assert (best - second).min() >= 1e-3, "a near tie: take other questions"
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in plain]
    for rows, plain_rows in zip(logits, plain_logits, strict=True):
        assert (rows[0] - plain_rows[0]).abs().max() <= 1e-4
    assert [output.num_cached_tokens for output in plain] == [0] * len(TURNS)
    assert found[0].num_cached_tokens == 0
    for before, output in itertools.pairwise(found):
        held = before.prompt_token_ids + before.outputs[0].token_ids[:-1]  # nobody has computed the last token
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(held, output.prompt_token_ids, strict=False))
        common = len(list(pairs))
        assert output.num_cached_tokens == common // block_size * block_size
        assert common >= len(before.prompt_token_ids)


def test_mean_nll_of_the_probe_sentence_is_right(real_llm):
    # Permuted q and k rows give 2.447 and still say " Paris": one token is no gate.
    ids = torch.tensor([real_llm.tokenizer.encode(PROBE)])
    with torch.inference_mode():
        positions = torch.arange(ids.shape[1])[None]
        hidden = real_llm.model(ids, positions, lambda layer, q, k, v: dense_attention(q, k, v, (0,)))
        logits = real_llm.model.compute_logits(hidden)
        nll = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    assert nll == pytest.approx(PROBE_NLL, abs=PROBE_TOLERANCE)


def test_the_golden_ids_of_these_weights(real_llm):
    result = generate(real_llm.model, [[504, 3575, 282, 4649, 314]], 8, SlabCache(64))
    assert result.token_ids == [[7042, 30, 198, 198, 504, 2988, 314, 42]]


def test_the_head_is_the_embedding_and_counted_once(real_llm):
    model = real_llm.model
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert model.embed_tokens.weight.numel() == 49152 * 576 == 28_311_552
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_logits_hardly_depend_on_the_batch(real_llm):
    """Padding, batch mates and the cache change a float32 logit by less than a tenth of the smallest gap."""
    longest = max(PROMPTS, key=len)
    for prompt in (PROMPTS[0], longest):
        logits = []
        for batch in ([prompt], [prompt, longest, PROMPTS[3]]):
            seen = []

            def pick(rows, seen=seen):
                seen.append(rows[0])
                return greedy(rows)

            steps = cached_steps(real_llm.model, batch, pick, Work(), SlabCache(128))
            with torch.inference_mode():
                for _ in range(3):
                    next(steps)
            logits.append(torch.stack(seen))
        assert (logits[0] - logits[1]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # Digits are split one by one, before anything else: two spaces stay one token.
        ("x  5", [104, 256, 37]),
        ("2026", [34, 32, 34, 38]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_the_tokenizer_splits_as_smollm_does(real_llm, text, ids):
    found = real_llm.tokenizer.encode(text)
    assert real_llm.tokenizer.decode(found) == text
    assert found == ids


def test_chat_goes_through_the_models_template(real_llm):
    messages = [{"role": "user", "content": "What is the capital of Italy?"}]
    params = SamplingParams(temperature=0, max_tokens=24)
    [output] = real_llm.chat(messages, params, use_tqdm=False)
    assert output.prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert output.prompt.endswith("<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n")
    assert output.prompt_token_ids.count(1) == 3
    [same] = real_llm.generate([output.prompt_token_ids], params, use_tqdm=False)
    assert same.outputs == output.outputs
    both = real_llm.chat([messages, messages], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2
