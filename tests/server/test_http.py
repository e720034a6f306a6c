"""What goes over the wire, also when what comes in is broken."""

import asyncio
import json
import math
import re
import time

import httpx
import pytest

from minivllm.server.app import Server
from minivllm.server.protocol import CompletionRequest

from .conftest import MODEL, metric, wait_until_idle

pytestmark = pytest.mark.real_model
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = [{"role": "user", "content": "Hi"}]
JSON = {"Content-Type": "application/json"}


def ask(**more):
    return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **more}


def check_error(reply, status, param=None, *words):
    """The error object and nothing else, short, and without what was sent."""
    assert reply.status_code == status, reply.text
    assert list(reply.json()) == ["error"] and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    error = reply.json()["error"]
    assert error["code"] == status and error["type"].endswith("Error") and error["param"] == param, error
    assert len(reply.content) < 4096 and "Traceback" not in reply.text and "site-packages" not in reply.text
    assert all(word in error["message"] for word in words), error["message"]


def events(text):
    """The events of a stream; each is one line and a blank one."""
    *lines, last, empty = text.split("\n\n")
    assert last == "data: [DONE]" and empty == "" and all("\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {"prompt": 1.5}, "prompt: Input should be a valid string, or: Input should be a valid list"),
        (
            COMPLETIONS,
            {"prompt": [1.5]},
            "prompt.0: Input should be a valid string, or: Input should be a valid integer, or: ",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "stop": 3},
            "stop: Input should be a valid string, or: Input should be a valid list",
        ),
        (
            CHATS,
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.content: Input should be a valid string, or: ",
        ),
        (
            CHATS,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: Input should be 'text'; messages.0.content.0.text: Field required",
        ),
        (COMPLETIONS, {"prompt": "a", "n": "x", "seed": "y", "top_p": "z", "min_p": "w"}, "(and 1 more)"),
    ],
)
def test_a_wrong_type_is_told_by_place_and_nearest_choice(http, path, body, message):
    reply = http.post(path, json=body)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text


def test_what_messages_hold_is_checked_too(http):
    """A client may send back an assistant's message as it came, with all that is empty in it."""
    empty = {
        "role": "assistant",
        "content": "Hi",
        "tool_calls": None,
        "refusal": None,
        "audio": None,
        "annotations": [],
    }
    assert http.post(CHATS, json={"messages": [empty, *CHAT], "max_tokens": 1}).status_code == 200
    for messages in ([{**empty, "tool_calls": [{"id": "1"}]}, *CHAT], [{**CHAT[0], "tool_call_id": "1"}]):
        [name] = {"tool_calls", "tool_call_id"} & {key for m in messages for key, value in m.items() if value}
        check_error(http.post(CHATS, json={"messages": messages, "max_tokens": 1}), 400, name, "not supported")
    check_error(http.post("/tokenize", json={"prompt": "a", "chat_template": "x"}), 400, "chat_template")


def test_long_names_are_refused_since_each_chunk_says_them(http):
    check_error(http.post(COMPLETIONS, json=ask(request_id="x" * 400)), 400, "request_id", "405 characters")
    check_error(http.post(COMPLETIONS, json=ask(), headers={"x-request-id": "x" * 400}), 400, "request_id")
    assert http.post(COMPLETIONS, json=ask(request_id="x" * 250)).json()["id"] == "cmpl-" + "x" * 250


def test_who_leaves_no_token_to_draw_has_made_the_mistake(http, server):
    body = ask(allowed_token_ids=[2], min_tokens=3)  # the end alone, and not yet
    check_error(http.post(COMPLETIONS, json=body), 400, None, "no token may be drawn")
    [error] = events(http.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert error["error"]["code"] == 400
    wait_until_idle(server.url)


def test_too_many_prompts_are_refused_before_one_is_tokenised(http, monkeypatch):
    monkeypatch.setattr(Server, "_encode", lambda *given: pytest.fail("was tokenised"))
    check_error(http.post(COMPLETIONS, json=ask(prompt=["a"] * 300)), 400, "prompt", "300 answers")


def test_an_event_is_one_line_for_everybody(http, server):
    """Python's splitlines, and so httpx, end a line at characters that end none for the protocol."""
    tokenizer = server.llm.llm.tokenizer
    for character in "\x85\u2028\u2029":
        pair = tokenizer.encode(character)
        body = ask(max_tokens=20, allowed_token_ids=pair, temperature=1.0, seed=0, stream=True)
        with http.stream("POST", COMPLETIONS, json=body) as reply:
            lines = [line for line in reply.iter_lines() if line]
        texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
        assert len(texts) == 20 and character in "".join(texts)


def test_a_request_arrives_before_it_is_tokenised(own_server, monkeypatch):
    """So that the server's time to first token is what its client sees."""
    server = own_server()
    encode = Server._encode

    def slow(*given):
        time.sleep(0.5)
        return encode(*given)

    monkeypatch.setattr(Server, "_encode", slow)
    began = time.monotonic()
    assert httpx.post(f"{server.url}{COMPLETIONS}", json=ask(max_tokens=1)).status_code == 200
    seen = time.monotonic() - began
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert 0.5 <= metric(server.url, f"{name}_seconds_sum") <= seen


def joined(parts):
    """A stream's choices as the whole answer has them."""
    choices = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        so_far = choices.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
        so_far["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            so_far["logprobs"] = so_far["logprobs"] or {name: [] for name in choice["logprobs"]}
            so_far["logprobs"][name] += values
        so_far.update(finish_reason=choice["finish_reason"], stop_reason=choice["stop_reason"])
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "The sun ☺♞ and the "},
        {"prompt": [22177], "echo": True},
        {"prompt": ["x", "The café ☺"], "echo": True},
        {"prompt": "<|im_start|>user", "echo": True},
        {"prompt": [1, 2, 500], "echo": True},
        {"prompt": [1, 2, 500], "echo": True, "skip_special_tokens": False},
        {"allowed_token_ids": [321, 118, 141, 223, 253], "max_tokens": 12, "temperature": 1.0, "seed": 1},
        {
            "allowed_token_ids": [0, 1, 253, 321, 118],
            "max_tokens": 12,
            "temperature": 1.0,
            "seed": 1,
            "ignore_eos": True,
        },
        {"stop": ["e", " th"], "max_tokens": 12},
    ],
)
def test_logprobs_stand_where_their_tokens_do_whole_or_streamed(http, more):
    body = ask(logprobs=2, **more)
    whole = http.post(COMPLETIONS, json=body).json()["choices"]
    streamed = joined(events(http.post(COMPLETIONS, json={**body, "stream": True}).text))
    for choice, other in zip(whole, streamed, strict=True):
        ours, theirs = choice.pop("logprobs"), other.pop("logprobs")
        assert choice == other
        assert (ours["tokens"], ours["text_offset"]) == (theirs["tokens"], theirs["text_offset"])
        pairs = zip(ours["token_logprobs"], theirs["token_logprobs"], strict=True)
        assert all(a == b or a == pytest.approx(b, abs=1e-3) for a, b in pairs)
        text = choice["text"]
        assert ours["text_offset"] == sorted(ours["text_offset"])
        for token, offset in zip(ours["tokens"], ours["text_offset"], strict=True):
            if offset < len(text) and "\ufffd" not in token and not token.startswith("<|"):
                assert text[offset:].startswith(token[: len(text) - offset])


# --- what is left out ---


def test_null_is_as_good_as_nothing(http):
    """OpenAI's document allows it for most fields; some clients send every field they have."""
    names = set(CompletionRequest.model_fields) - {"model", "prompt", "max_tokens", "temperature", "priority"}
    names -= {"add_special_tokens"}
    plain, nulls = ask(temperature=0), {**ask(temperature=0), **dict.fromkeys(names)}
    replies = [http.post(COMPLETIONS, json=body).json()["choices"] for body in (plain, nulls)]
    assert replies[0] == replies[1]


def test_a_servers_own_defaults(own_server):
    """They count where a request leaves them out, or sends null, and nowhere else."""
    url = own_server(defaults={"top_k": 1}).url

    def texts(**more):
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, **more}
        replies = [httpx.post(f"{url}{COMPLETIONS}", json={**body, "seed": seed}).json() for seed in range(4)]
        return {reply["choices"][0]["text"] for reply in replies}

    greedy = texts(temperature=0)
    assert len(greedy) == 1 and texts() == texts(temperature=1.0) == texts(top_k=None) == greedy
    assert len(texts(top_k=0)) > 1


# --- numbers ---------------------------------------------------------------------------------------------------------

BAD_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', "true", '"1"']
FIELDS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_numbers_that_are_none_are_refused_by_field(http, path, field):
    """SMP-02."""
    for value in BAD_NUMBERS:
        body = json.dumps({**ask(), "messages": CHAT} if path == CHATS else ask())
        body = body.replace('"temperature": 0', '"max_tokens": 4') if field == "temperature" else body
        began = time.monotonic()
        reply = http.post(
            path, content=body[:-1] + f', "{field}": {value}}}', headers={"Content-Type": "application/json"}
        )
        check_error(reply, 400, field)
        assert time.monotonic() - began < 0.5


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 10}, "presence_penalty"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),  # greedy
        ({"n": 300, "temperature": 1}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 1}, "priority"),
        ({"stream": "maybe"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"tools": [{}]}, "tools"),
        # SMP-07: the bound is the model's vocabulary
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [5279552648203111001]}, "prompt"),
        ({"logit_bias": {"49152": 5}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [49152], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-5], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        # SRV-04: nothing to begin with
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
    ],
)
def test_what_is_out_of_range_is_refused_by_field(http, asked, param):
    check_error(http.post(COMPLETIONS, json=ask(**asked)), 400, param)


def test_the_last_token_of_the_vocabulary_is_taken_everywhere(http):
    fields = {"prompt": [49151], "logit_bias": {"49151": 1}, "stop_token_ids": [49151], "allowed_token_ids": [49151, 5]}
    assert http.post(COMPLETIONS, json=ask(**fields)).status_code == 200


def test_a_bad_request_changes_nothing_for_the_others(http):
    good = http.post(COMPLETIONS, json=ask()).json()["choices"]
    for bad in ({"prompt": [49152]}, {"temperature": -1}, {"prompt": ""}):
        assert http.post(COMPLETIONS, json=ask(**bad)).status_code == 400
        assert http.post(COMPLETIONS, json=ask()).json()["choices"] == good


def test_the_length_of_an_answer(http, own_server):
    """SMP-12: one rule: prompt and max_tokens must fit; null takes what is left."""
    one = http.post(COMPLETIONS, json=ask(max_tokens=1)).json()
    assert one["usage"]["completion_tokens"] == 1 and one["choices"][0]["finish_reason"] == "length"
    for count in (8192, 8193):
        check_error(http.post(COMPLETIONS, json=ask(prompt=[5] * count)), 400, "prompt", "8192", str(count))
    check_error(http.post(COMPLETIONS, json=ask(prompt=[5] * 8190, max_tokens=3)), 400, "max_tokens", "8192", "8190")
    with httpx.Client(base_url=own_server(max_model_len=100).url, timeout=60) as short:
        for count, left in ((99, 1), (90, 10)):
            body = ask(prompt=[5] * count, max_tokens=None, ignore_eos=True)
            reply = short.post(COMPLETIONS, json=body).json()
            usage = {"prompt_tokens": count, "completion_tokens": left, "total_tokens": 100}
            assert {name: reply["usage"][name] for name in usage} == usage
            assert short.post(COMPLETIONS, json={**body, "max_tokens": left}).json()["choices"] == reply["choices"]
            check_error(short.post(COMPLETIONS, json={**body, "max_tokens": left + 1}), 400, "max_tokens", str(left))


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(http, path):
    """SRV-02."""
    deep = "[" * 10_000 + "]" * 10_000
    for body in ("{", "", "[]", "null", "123", '"x"', "{}", deep, '{"a":' * 5000, "\xff", '{"prompt": ["\\ud800"]}'):
        reply = http.post(path, content=body.encode("latin-1"), headers=JSON)
        if not (path == "/tokenize" and body == "{}"):
            assert reply.status_code == 400, body[:20]
        check_error(reply, 400, reply.json()["error"]["param"])
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        check_error(http.post(path, content="{}", headers={"Content-Type": kind}), 415)
    check_error(http.get(path), 405)
    check_error(http.get(path + "x"), 404)


@pytest.mark.parametrize(
    "messages",
    [
        5,
        [],
        [{}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        ["x"],
        [{"role": 3}] * 10_000,
    ],
)
def test_messages_that_are_none(http, messages):
    body = {"model": MODEL, "messages": messages}
    check_error(http.post(CHATS, json=body), 400, "messages")


def test_long_bodies_and_long_answers_are_refused(own_server):
    server = own_server(max_body_bytes=1000, max_answers=3)
    with httpx.Client(base_url=server.url) as http:
        check_error(http.post(COMPLETIONS, json=ask(prompt="x" * 2000)), 413)

        def pieces():
            for _ in range(20):
                yield b" " * 100

        check_error(http.post(COMPLETIONS, content=pieces(), headers=JSON), 413)
        assert http.post(COMPLETIONS, json=ask(prompt=["a", "b", "c"])).status_code == 200
        check_error(http.post(COMPLETIONS, json=ask(prompt=["a"] * 4)), 400, "prompt", "4 answers")
        check_error(http.post(COMPLETIONS, json=ask(prompt=["a", "b"], n=2, temperature=1)), 400, "n", "4 answers")


def test_unknown_fields_are_tolerated_and_named_once_in_the_log(http, caplog):
    for _ in range(2):
        assert http.post(COMPLETIONS, json=ask(never_heard_of=1, user="me", best_of=1, tools=[])).status_code == 200
    assert caplog.text.count("never_heard_of") == 1 and "'user'" not in caplog.text


def test_a_thousand_broken_requests_leave_a_healthy_server(http):
    for number in range(1000):
        assert (
            http.post(
                COMPLETIONS, content="{" * (number % 50), headers={"Content-Type": "application/json"}
            ).status_code
            == 400
        )
    assert http.get("/health").status_code == 200 and http.post(COMPLETIONS, json=ask()).status_code == 200


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_stream_is_framed_as_clients_expect(http, path):
    """SRV-06."""
    body = {**ask(n=2, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True), "messages": CHAT}
    if path == CHATS:
        del body["prompt"]
    else:
        del body["messages"]
    whole = http.post(path, json=body).json()
    for options in (None, {}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        reply = http.post(path, json={**body, "stream": True, "stream_options": options})
        assert reply.headers["content-type"].startswith("text/event-stream")
        found = events(reply.text)
        asked = bool(options)
        assert len({(event["id"], event["created"], event["object"]) for event in found}) == 1
        assert all(("usage" in event) == asked for event in found)
        if asked:
            *found, last = found
            usage = {**whole["usage"], "prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
            assert last["choices"] == [] and last["usage"] == usage
            running = [event["usage"] and event["usage"]["completion_tokens"] for event in found]
            assert running == sorted(running) if options.get("continuous_usage_stats") else set(running) == {None}
        for index in range(2):
            mine = [event["choices"][0] for event in found if event["choices"][0]["index"] == index]
            if path == CHATS:
                first, *mine = mine
                assert first["delta"] == {"role": "assistant", "content": ""}
                assert all("role" not in choice["delta"] for choice in mine)
                text = "".join(choice["delta"]["content"] for choice in mine)
                assert text == whole["choices"][index]["message"]["content"]
            else:
                assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"]
            assert len(mine) == 12 and [choice["finish_reason"] for choice in mine] == [None] * 11 + ["length"]


def test_two_clients_may_choose_the_same_name(server):
    async def both():
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers={"x-request-id": "mine"}) as client:
            bodies = [ask(stream=True, max_tokens=12, ignore_eos=True), ask(max_tokens=12, ignore_eos=True)]
            return await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))

    streamed, whole = asyncio.run(both())
    assert whole.json()["id"] == "cmpl-mine" == events(streamed.text)[0]["id"]
    text = "".join(event["choices"][0]["text"] for event in events(streamed.text))
    assert text == whole.json()["choices"][0]["text"]


def test_text_with_quotes_newlines_and_halves_of_characters(http):
    """One chunk per token, also where its text is empty."""
    tokens = http.post("/tokenize", json={"prompt": '"\n\\ 👋'}).json()["tokens"]
    for token in tokens:
        body = ask(allowed_token_ids=[token], max_tokens=3, stream=True)
        found = events(http.post(COMPLETIONS, json=body).text)
        whole = http.post(COMPLETIONS, json={**body, "stream": False}).json()["choices"][0]["text"]
        assert len(found) == 3 and "".join(event["choices"][0]["text"] for event in found) == whole
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": '"\n\\ 👋'}


# --- the other routes ------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(http, served_llm):
    reply = http.post("/tokenize", json={"model": MODEL, "prompt": "Once upon a time"}).json()
    assert reply["tokens"] == served_llm.tokenizer.encode("Once upon a time") and reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == 8192
    chat = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    assert len(chat) == 31 and chat[:3] == [1, 9690, 198] and chat[-4:] == [1, 520, 9531, 198]
    check_error(http.post("/tokenize", json={}), 400, "prompt")
    check_error(http.post("/tokenize", json={"prompt": "a", "messages": CHAT}), 400, "prompt")
    check_error(http.post("/detokenize", json={"tokens": [49152]}), 400, "tokens", "49152")
    check_error(http.post("/tokenize", json={"prompt": "a", "model": "other"}), 404, "model")


def test_small_routes(http):
    assert http.get("/version").json()["version"]
    assert http.get("/health").content == b"" and http.head("/health").status_code == 200
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<title>minivllm</title>" in page.text
    assert http.head("/metrics").status_code == 200
    assert http.get("/metrics").headers["content-type"].startswith("text/plain")
    wrong = http.put("/version")
    check_error(wrong, 405)
    assert wrong.headers["allow"] == "GET"


def test_the_openapi_document_is_whole(http):
    """Every reference leads somewhere, and every status that a test has seen is told."""
    text = http.get("/openapi.json").text
    document = json.loads(text)
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"} <= set(document["paths"])
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in document["components"]["schemas"]
    asking = document["paths"]["/v1/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "415", "503"} <= set(asking["responses"])
    assert set(asking["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_the_prefix_cache_can_be_emptied(http, server):
    wait_until_idle(server.url)
    body = ask(prompt=list(range(100, 140)))
    assert http.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert http.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    wait_until_idle(server.url)
    assert http.post("/reset_prefix_cache").status_code == 200
    assert http.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_metrics_are_what_happened(own_server):
    server = own_server()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        usage = [
            http.post(COMPLETIONS, json=ask(prompt=list(range(50, 90)), max_tokens=5)).json()["usage"] for _ in range(2)
        ]
    assert [one["prompt_tokens_details"]["cached_tokens"] for one in usage] == [0, 32]
    url = server.url
    assert metric(url, "generation_tokens_total") == 10 and metric(url, "prompt_tokens_total") == 80
    assert metric(url, "prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert metric(url, "prompt_tokens_cached_total") == 32 == metric(url, "prefix_cache_hits_total")
    assert metric(url, "prefix_cache_queries_total") == 80
    assert metric(url, "request_success_total", finished_reason="length") == 2
    assert metric(url, "request_success_total", finished_reason="abort") == 0
    for name, count, total in (
        ("time_to_first_token_seconds", 2, None),
        ("inter_token_latency_seconds", 8, None),
        ("request_time_per_output_token_seconds", 2, None),
        ("e2e_request_latency_seconds", 2, None),
        ("request_queue_time_seconds", 2, None),
        ("request_prompt_tokens", 2, 80),
        ("request_generation_tokens", 2, 10),
        ("request_prefill_kv_computed_tokens", 2, 48),
        ("request_params_max_tokens", 2, 10),
        ("request_params_n", 2, 2),
        ("iteration_tokens_total", 10, 40 + 8 + 8),
    ):
        assert metric(url, f"{name}_count") == count, name
        found = metric(url, f"{name}_sum")
        assert found == total if total is not None else found > 0, name
    assert metric(url, "cache_config_info", block_size="16") == 1
    assert not math.isnan(metric(url, "kv_cache_usage_perc"))
