"""OpenAI's own client, unmodified: what it gets is what the engine gives in process."""

import openai
import pytest

from minivllm import SamplingParams
from minivllm.tokenizer import load_tokenizer
from tests.conftest import ORACLE

from .conftest import MODEL, metric, wait_until_idle

pytestmark = pytest.mark.real_model
PROMPTS = ["The capital of France is", "Once upon a time", "👋 世界 means"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 24}
CHAT = [{"role": "user", "content": "Hi"}]


def expected(llm, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_completions_are_what_generate_gives(client, served_llm):
    for prompt, answer in zip(PROMPTS, expected(served_llm), strict=True):
        reply = client.completions.create(prompt=prompt, **ASKED)
        [choice] = reply.choices
        assert (choice.text, choice.finish_reason, choice.index) == (answer.text, answer.finish_reason, 0)
        assert reply.object == "text_completion" and reply.model == MODEL and reply.id.startswith("cmpl-")
        ids = served_llm.tokenizer.encode(prompt)
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), len(answer.token_ids))
        assert reply.usage.total_tokens == len(ids) + len(answer.token_ids)
        assert client.completions.create(prompt=ids, **ASKED).choices[0].text == answer.text


def test_many_prompts_in_one_request_keep_their_order(client, served_llm):
    texts = [answer.text for answer in expected(served_llm)]
    reply = client.completions.create(prompt=PROMPTS, **ASKED)
    assert [choice.text for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    ids = [served_llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [choice.text for choice in client.completions.create(prompt=ids, **ASKED).choices] == texts
    streamed = ["", "", ""]
    for chunk in client.completions.create(prompt=PROMPTS, stream=True, **ASKED):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_a_stream_joins_to_the_whole(client, served_llm):
    for prompt, answer in zip(PROMPTS, expected(served_llm), strict=True):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(prompt=prompt, **ASKED, **options))
        *said, last = chunks
        assert "".join(chunk.choices[0].text for chunk in said) == answer.text and len(said) == len(answer.token_ids)
        assert [chunk.choices[0].finish_reason for chunk in said] == [None] * (len(said) - 1) + [answer.finish_reason]
        assert last.choices == [] and all(chunk.usage is None for chunk in said)
        assert last.usage.completion_tokens == len(answer.token_ids)
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_chats(client, served_llm):
    """SRV-04: the template's own text, no second beginning, and the same tokens as in process."""
    [whole] = served_llm.chat(CHAT, GREEDY, use_tqdm=False)
    for content in ("Hi", [{"type": "text", "text": "Hi"}]):
        reply = client.chat.completions.create(messages=[{"role": "user", "content": content}], **ASKED)
        [choice] = reply.choices
        assert (choice.message.role, choice.message.content) == ("assistant", whole.outputs[0].text)
        assert reply.usage.prompt_tokens == 31 == len(whole.prompt_token_ids)
        assert reply.object == "chat.completion" and choice.finish_reason == whole.outputs[0].finish_reason
    empty = client.chat.completions.create(messages=[{"role": "user", "content": ""}], **ASKED)
    assert empty.usage.prompt_tokens == 30
    first, *rest = client.chat.completions.create(messages=CHAT, stream=True, **ASKED)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.object == "chat.completion.chunk" and all(chunk.choices[0].delta.role is None for chunk in rest)
    assert "".join(chunk.choices[0].delta.content for chunk in rest) == whole.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in rest][-2:] == [None, whole.outputs[0].finish_reason]


def test_n_answers(client):
    options = {
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 5,
        "n": 3,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(prompt=PROMPTS[:2], **options)
    assert [choice.index for choice in whole.choices] == list(range(6)) and len({c.text for c in whole.choices}) == 6
    streamed, ends = [""] * 6, [0] * 6
    for chunk in client.completions.create(prompt=PROMPTS[:2], stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
        ends[chunk.choices[0].index] += chunk.choices[0].finish_reason is not None
    assert streamed == [choice.text for choice in whole.choices] and ends == [1] * 6
    assert whole.usage.completion_tokens == 48
    chat = client.chat.completions.create(messages=CHAT, stream=True, **options)
    roles = [chunk.choices[0].index for chunk in chat if chunk.choices[0].delta.role]
    assert sorted(roles) == [0, 1, 2]


def test_logprobs(client, served_llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    [answer] = expected(served_llm, PROMPTS[:1], params)
    asked = {**ASKED, "max_tokens": 5}
    legacy = client.completions.create(prompt=PROMPTS[0], logprobs=2, **asked).choices[0]
    exact = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert legacy.logprobs.token_logprobs == pytest.approx(exact, abs=1e-4)
    assert "".join(legacy.logprobs.tokens) == answer.text and legacy.logprobs.text_offset[0] == 0
    assert [len(top) for top in legacy.logprobs.top_logprobs] == [2] * 5
    assert [
        legacy.text[begin:][: len(token)]
        for begin, token in zip(legacy.logprobs.text_offset, legacy.logprobs.tokens, strict=True)
    ] == legacy.logprobs.tokens
    chunks = client.completions.create(prompt=PROMPTS[0], logprobs=2, stream=True, **asked)
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [one.token_logprobs[0] for one in streamed] == legacy.logprobs.token_logprobs
    assert [one.text_offset[0] for one in streamed] == legacy.logprobs.text_offset
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **asked).choices[0]
    assert "".join(entry.token for entry in chat.logprobs.content) == chat.message.content
    for entry in chat.logprobs.content:
        assert entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode() == entry.token
    plain = client.chat.completions.create(messages=CHAT, logprobs=True, **asked).choices[0]
    assert all(entry.top_logprobs == [] for entry in plain.logprobs.content)


def test_echo(client, served_llm):
    [answer] = expected(served_llm, PROMPTS[:1])
    for prompt in (PROMPTS[0], served_llm.tokenizer.encode(PROMPTS[0])):
        reply = client.completions.create(prompt=prompt, echo=True, logprobs=1, **ASKED).choices[0]
        assert reply.text == PROMPTS[0] + answer.text == "".join(reply.logprobs.tokens)
        assert reply.logprobs.token_logprobs[0] is None and None not in reply.logprobs.token_logprobs[1:]
        chunks = list(client.completions.create(prompt=prompt, echo=True, stream=True, **ASKED))
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPTS[0] + answer.text


def test_stop_strings_and_the_usage_of_what_was_cut(client, served_llm):
    text = expected(served_llm)[1].text
    stop = text[20:26]
    for stream in (False, True):
        asked = {"prompt": PROMPTS[1], "stop": stop, **ASKED}
        if stream:
            reply = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
            said, usage = "".join(chunk.choices[0].text for chunk in reply[:-1]), reply[-1].usage
            end = reply[-2].choices[0].finish_reason
        else:
            reply = client.completions.create(**asked)
            said, usage, end = reply.choices[0].text, reply.usage, reply.choices[0].finish_reason
        assert said == text[: text.index(stop)] and end == "stop"
        assert 0 < usage.completion_tokens < 24
    with_it = client.completions.create(**asked, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert with_it.text == text[: text.index(stop)] + stop and with_it.stop_reason == stop


def test_vllms_own_fields_come_through(client, served_llm):
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=12, repetition_penalty=1.3, bad_words=["Paris"])
    [answer] = expected(served_llm, PROMPTS[:1], params)
    extra = {"min_tokens": 12, "repetition_penalty": 1.3, "bad_words": ["Paris"], "ignore_eos": False, "top_k": 5}
    reply = client.completions.create(prompt=PROMPTS[0], **{**ASKED, "max_tokens": 12}, extra_body=extra)
    assert reply.choices[0].text == answer.text and "Paris" not in reply.choices[0].text
    forced = client.completions.create(prompt="x", **ASKED, logit_bias={"504": 100})
    assert set(served_llm.tokenizer.encode(forced.choices[0].text)) == {504}


def test_models_and_errors(client):
    [model] = client.models.list().data
    assert model.id == MODEL and model.max_model_len == 8192
    assert load_tokenizer(model.root).vocab_size == 49152  # as vllm bench does that is told no model
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(prompt="x", **{**ASKED, "model": "gpt-5"})
    assert missing.value.param == "model" and "'gpt-5'" in missing.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(prompt="x", **{**ASKED, "temperature": -1})
    assert wrong.value.param == "temperature" and wrong.value.code == "400" and "got -1" in wrong.value.message


def test_counters_agree_with_the_clients_sum(client, server):
    before = metric(server.url, "generation_tokens_total"), metric(server.url, "prompt_tokens_total")
    usages = [client.completions.create(prompt=prompt, **ASKED).usage for prompt in PROMPTS]
    after = metric(server.url, "generation_tokens_total"), metric(server.url, "prompt_tokens_total")
    assert after[0] - before[0] == sum(usage.completion_tokens for usage in usages)
    assert after[1] - before[1] == sum(usage.prompt_tokens for usage in usages)
    wait_until_idle(server.url)


def test_over_http_as_in_transformers(client, served_llm):
    """The frozen tokens of transformers' own generate, whole and streamed."""
    for case in ORACLE["cases"][:8]:
        text = served_llm.tokenizer.decode(case["token_ids"], skip_special_tokens=True)
        asked = {"model": MODEL, "prompt": case["prompt_token_ids"], "temperature": 0, "max_tokens": 24}
        reply = client.completions.create(**asked, extra_body={"ignore_eos": True})
        assert reply.choices[0].text == text and reply.usage.completion_tokens == 24
        assert reply.usage.prompt_tokens == len(case["prompt_token_ids"])
        chunks = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
