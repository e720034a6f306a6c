"""What a request may ask for beyond temperature and length, through the whole engine."""

from dataclasses import replace

import pytest
import torch

from minivllm import SamplingParams
from minivllm.logprobs import token_logprobs
from tests.lessons.test_naive import random_prompts
from tests.test_identity import build_engine, run_staggered

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def generate(model, params, prompts=None, num_blocks=100, **fields):
    """The outputs of a fresh engine, which must not have failed otherwise than it should."""
    prompts = random_prompts([9, 20, 5]) if prompts is None else prompts
    params = params if isinstance(params, list) else [params] * len(prompts)
    return run_staggered(build_engine(model, num_blocks, **fields), prompts, params)


def answers(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def hf_logprobs(reference, token_ids):
    """Log-probabilities of all tokens but the first, `[num_tokens - 1, vocab_size]`."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)


def check_logprobs(entries, exact, token_ids, count):
    """Entries hold each token and the `count` likeliest, with the reference's values and ranks."""
    assert len(entries) == len(token_ids)
    for entry, row, token in zip(entries, exact, token_ids, strict=True):
        best = row.topk(count).indices.tolist()
        assert list(entry) == list(dict.fromkeys([token, *best]))
        for token_id, found in entry.items():
            assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
            assert found.rank == 1 + (row > row[token_id]).sum().item() and found.decoded_token is None


# --- logprobs ------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own(tiny_llama):
    """Of greedy and of drawn tokens, whatever temperature, filters and penalties make of the distribution."""
    reference, decoder = tiny_llama
    prompts = random_prompts([9, 20, 5])
    drawn = SamplingParams(temperature=2.0, top_k=40, seed=1, max_tokens=8, ignore_eos=True, logprobs=3)
    params = [replace(GREEDY, logprobs=5), replace(drawn, presence_penalty=1.5), replace(drawn, logprobs=0)]
    for prompt, p, output in zip(prompts, params, generate(decoder, params, prompts), strict=True):
        [answer] = output.outputs
        exact = hf_logprobs(reference, prompt + answer.token_ids)[len(prompt) - 1 :]
        check_logprobs(answer.logprobs, exact, answer.token_ids, p.logprobs)
        own = exact.gather(1, torch.tensor(answer.token_ids)[:, None]).sum().item()
        assert answer.cumulative_logprob == pytest.approx(own, abs=1e-4)
    assert generate(decoder, GREEDY)[0].outputs[0].logprobs is None
    everything = generate(decoder, replace(GREEDY, logprobs=-1, max_tokens=1))[0].outputs[0].logprobs
    assert len(everything[0]) == decoder.config.vocab_size


@pytest.mark.parametrize("budget", [2048, 7])
def test_prompt_logprobs_are_those_of_the_whole_prompt(tiny_llama, budget):
    """In chunks too, and for a prompt whose blocks are in the prefix cache: it is computed nevertheless."""
    reference, decoder = tiny_llama
    [prompt] = random_prompts([40])
    prompts, params = [prompt, prompt, prompt], [GREEDY, replace(GREEDY, prompt_logprobs=2), GREEDY]
    outputs = generate(decoder, params, prompts, max_num_batched_tokens=budget)
    assert outputs[0].prompt_logprobs is None and outputs[1].prompt_logprobs[0] is None
    check_logprobs(outputs[1].prompt_logprobs[1:], hf_logprobs(reference, prompt), prompt[1:], 2)
    assert outputs[1].num_cached_tokens == 0
    assert answers(outputs)[0] == answers(outputs)[1]


def test_each_answer_of_a_prompt_has_its_own_logprobs(tiny_llama):
    reference, decoder = tiny_llama
    [prompt] = random_prompts([9])
    params = SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    [output] = generate(decoder, params, [prompt])
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        exact = hf_logprobs(reference, prompt + answer.token_ids)
        check_logprobs(answer.logprobs, exact[len(prompt) - 1 :], answer.token_ids, 1)
        check_logprobs(output.prompt_logprobs[1:], exact[: len(prompt) - 1], prompt[1:], 1)


def test_ranks_of_equals_and_counts_beyond_the_vocabulary():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    [entry] = token_logprobs(logits, [2], [9])
    assert (entry.token_id, entry.rank, len(entry.top)) == (2, 1, 4) and entry.top[0][1] == entry.logprob
    assert token_logprobs(logits, [0], [0])[0].top == ()


# --- penalties, masks and biases -----------------------------------------------------------------------------------


def test_what_a_request_asks_for_stays_with_it(tiny_llama):
    """In a batch with others, and on the row that another one leaves."""
    decoder = tiny_llama[1]
    prompts = random_prompts([9, 9, 9, 9])
    asks = [
        replace(GREEDY, repetition_penalty=1.8, frequency_penalty=0.5),
        GREEDY,
        replace(GREEDY, logit_bias={5: 100}, presence_penalty=2),
        replace(GREEDY, allowed_token_ids=[7, 8, 9]),
    ]
    alone = [answers(generate(decoder, [p], [prompt]))[0] for p, prompt in zip(asks, prompts, strict=True)]
    for batch in (4, 1, 2):
        assert answers(generate(decoder, asks, prompts, max_num_seqs=batch)) == alone
    assert alone[2][0] == [5] * 12 and set(alone[3][0]) <= {7, 8, 9}
    assert alone[0] != answers(generate(decoder, [GREEDY], prompts[:1]))[0]


def test_neutral_values_give_the_same_tokens(tiny_llama):
    neutral = replace(GREEDY, repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0, min_tokens=0, stop=[])
    assert answers(generate(tiny_llama[1], neutral)) == answers(generate(tiny_llama[1], GREEDY))


def test_an_answer_has_min_tokens_before_it_may_end(tiny_llama):
    """SMP: end of sequence (token 2) and a stop token are as likely as can be, and not drawn too early."""
    for name, stop in (("eos", 2), ("stop token", 5)):
        params = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias={stop: 100}, stop_token_ids=[5])
        [output] = generate(tiny_llama[1], [params], random_prompts([9]))
        [answer] = output.outputs
        assert len(answer.token_ids) == 4 and answer.token_ids[3] == stop and stop not in answer.token_ids[:3]
        assert answer.finish_reason == "stop" and answer.stop_reason == (None if name == "eos" else 5)


def test_end_of_sequence_beats_a_stop_token_and_both_beat_length(tiny_llama):
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias={2: 100}, stop_token_ids=[2])
    [answer] = generate(tiny_llama[1], [params], random_prompts([9]))[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    [answer] = generate(tiny_llama[1], [replace(params, ignore_eos=True)], random_prompts([9]))[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 2)


def test_a_request_that_leaves_itself_no_token_fails_alone_and_says_why(tiny_llama):
    prompts, plain = random_prompts([9, 9]), answers(generate(tiny_llama[1], GREEDY, random_prompts([9, 9])))
    impossible = replace(GREEDY, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2)
    first, second = generate(tiny_llama[1], [impossible, GREEDY], prompts)
    assert first.outputs[0].finish_reason == "error" and "no token may be drawn" in first.outputs[0].stop_reason
    assert answers([second]) == plain[1:]


# --- preemption ----------------------------------------------------------------------------------------------------

KINDS = {
    "greedy": replace(GREEDY, max_tokens=40, logprobs=2),
    "seeded": SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, logprobs=2),
    "penalties": replace(
        GREEDY, max_tokens=40, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, logprobs=2
    ),
    "min_tokens": SamplingParams(
        temperature=0, max_tokens=40, min_tokens=39, logit_bias={2: 3.0}, logprobs=2, prompt_logprobs=1
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_losing_the_memory_changes_nothing_of_an_answer(tiny_llama, kind):
    """SCH-03."""
    prompts, params = random_prompts([40] * 4), KINDS[kind]
    small, large = (generate(tiny_llama[1], params, prompts, num_blocks=blocks) for blocks in (12, 1000))
    assert sum(output.metrics.num_preemptions for output in small) >= 1
    assert sum(output.metrics.num_preemptions for output in large) == 0
    for ours, theirs in zip(small, large, strict=True):
        [a], [b] = ours.outputs, theirs.outputs
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) and len(a.token_ids) in (39, 40)
        pairs = [(a.logprobs, b.logprobs)]
        if params.prompt_logprobs is not None:
            pairs.append((ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:]))
        for one, other in pairs:
            assert [list(entry) for entry in one] == [list(entry) for entry in other]
            for x, y in zip(one, other, strict=True):
                assert all(abs(x[token].logprob - y[token].logprob) <= 1e-4 for token in x)


# --- the door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop_token_ids": [97]}, r"stop_token_ids has the token id 97, .* vocabulary of 97 \(0 to 96\)"),
        ({"logit_bias": {97: 1}}, "logit_bias has the token id 97"),
        ({"allowed_token_ids": [1, 10**18]}, f"allowed_token_ids has the token id {10**18}"),
        ({"logprobs": 98}, "logprobs is 98 and the vocabulary has 97 tokens"),
        ({"prompt_logprobs": 98}, "prompt_logprobs is 98"),
        ({"stop": "x"}, "this engine has no tokenizer: give stop_token_ids"),
        ({"bad_words": ["x"]}, "this engine has no tokenizer"),
    ],
)
def test_what_the_model_does_not_have_is_refused(tiny_llama, asked, message):
    """SMP-07; the last token of the vocabulary is taken in every field."""
    engine = build_engine(tiny_llama[1], 20)
    with pytest.raises(ValueError, match=message):
        engine.add_request("r", [1, 2, 3], replace(GREEDY, **asked))
    assert not engine.has_unfinished_requests()
    last = {"stop_token_ids": [96], "logit_bias": {96: 1}, "allowed_token_ids": [96], "logprobs": 97}
    engine.add_request("r", [96], replace(GREEDY, **last))
