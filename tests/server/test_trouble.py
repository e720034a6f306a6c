"""Clients that hang up, models that fail, engines that die, and callers without a key."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from benchmarks.process import serving
from minivllm.sampler import Sampler

from .conftest import MODEL, metric, wait_until_idle
from .test_http import COMPLETIONS, ask, check_error, events

pytestmark = pytest.mark.real_model
ENDLESS = {"max_tokens": None, "ignore_eos": True}


# --- clients that hang up --------------------------------------------------------------------------------------------


async def hang_up(url, body, after):
    """Sends a request, reads as many events, and closes the connection."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        if body.get("stream"):
            async with client.stream("POST", COMPLETIONS, json=body) as reply:
                async for line in reply.aiter_lines():
                    after -= line.startswith("data: ")
                    if after <= 0:
                        return
        else:
            try:
                await client.post(COMPLETIONS, json=body, timeout=after)
            except httpx.TimeoutException:
                return


@pytest.mark.parametrize(
    ("body", "after", "clients"),
    [
        (ask(**ENDLESS, stream=True), 3, 1),
        (ask(**ENDLESS), 0.5, 1),
        (ask(**ENDLESS, prompt=[7] * 4000), 0.2, 1),
        (ask(**ENDLESS, stream=True), 3, 20),
        (ask(**ENDLESS, n=3, temperature=1.0, stream=True), 4, 2),
        (ask(**ENDLESS, prompt=["a", "b"], stream=True), 4, 2),
    ],
    ids=["in a stream", "no stream", "in the prompt", "20 at once", "n answers", "two prompts"],
)
def test_who_hangs_up_frees_everything(own_server, body, after, clients):
    """SRV-01: as /metrics says, without another request."""
    server = own_server(max_num_seqs=8, max_num_batched_tokens=256)  # short steps: an abort waits for the end of one

    async def main():
        await asyncio.gather(*(hang_up(server.url, body, after) for _ in range(clients)))

    with httpx.Client(base_url=server.url, timeout=60) as http:
        right = http.post(COMPLETIONS, json=ask()).json()["choices"]
        asyncio.run(main())
        wait_until_idle(server.url, within_s=2.0)
        ends = clients * body.get("n", 1) * (2 if body["prompt"] == ["a", "b"] else 1)
        assert metric(server.url, "request_success_total", finished_reason="abort") == ends
        manager = server.llm.llm.engine.scheduler.manager
        assert manager.num_free_blocks == manager.num_blocks
        assert http.post(COMPLETIONS, json=ask()).json()["choices"] == right


# --- what fails ------------------------------------------------------------------------------------------------------


class Broken(Sampler):
    """Draws nothing for requests of a seed, from a step on."""

    def __init__(self, seed, step):
        self.seed, self.step = seed, step

    def __call__(self, logits, params, seeds, output_indices):
        logits = logits.clone()
        for row, (p, index) in enumerate(zip(params, output_indices, strict=True)):
            if p.seed == self.seed and index >= self.step:
                logits[row] = float("nan")
        return super().__call__(logits, params, seeds, output_indices)


def test_a_request_that_fails_is_told_and_hurts_nobody(own_server):
    """SRV-07, SCH-08: 500, or an error in the stream; the others' text is what it was."""
    server = own_server()
    bodies = [ask(prompt=f"Number {number} is", max_tokens=12, seed=number) for number in range(8)]

    async def all_of(stream):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(client.post(COMPLETIONS, json={**b, "stream": stream}) for b in bodies))

    clean = [reply.json()["choices"] for reply in asyncio.run(all_of(False))]
    server.llm.llm.engine.runner.sampler = Broken(seed=5, step=4)
    for stream in (False, True):
        replies = asyncio.run(all_of(stream))
        for number, reply in enumerate(replies):
            if number == 5 and not stream:
                check_error(reply, 500, None, "NaN or infinite")
            elif number == 5:
                *said, error = events(reply.text)
                assert len(said) == 4 and list(error) == ["error"] and error["error"]["code"] == 500
            elif stream:
                text = "".join(event["choices"][0]["text"] for event in events(reply.text))
                assert text == clean[number][0]["text"]
            else:
                assert reply.json()["choices"] == clean[number]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert metric(server.url, "corrupted_requests_total") == 2
    assert metric(server.url, "request_success_total", finished_reason="error") == 2
    wait_until_idle(server.url)


def test_a_dead_engine_ends_all_streams_and_the_server(own_server):
    """SRV-07: streams, queued requests and newcomers are told within two seconds; the process would end."""
    server = own_server(max_num_seqs=3)

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [ask(**ENDLESS, prompt=f"{n}", stream=n < 4) for n in range(5)]
            tasks = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
            await asyncio.sleep(0.5)

            def broken(*args):
                raise MemoryError("no more")

            server._server.should_exit = False
            server.llm.on_death = lambda: None  # the server stays, so that newcomers can be seen
            server.llm.llm.engine.scheduler.update = broken
            began = time.monotonic()
            replies = await asyncio.gather(*tasks)
            assert time.monotonic() - began < 2
            for body, reply in zip(bodies, replies, strict=True):
                if body["stream"]:
                    assert events(reply.text)[-1]["error"]["code"] == 503
                else:
                    check_error(reply, 503, None, "MemoryError: no more")
            check_error(await client.post(COMPLETIONS, json=ask()), 503, None, "has broken down")
            check_error(await client.get("/health"), 503, None, "has broken down")

    asyncio.run(main())
    assert server.llm.broken


def test_a_server_ends_when_its_engine_dies(own_server):
    server = own_server()

    def broken(*args):
        raise MemoryError("no more")

    server.llm.llm.engine.scheduler.update = broken
    assert httpx.post(f"{server.url}{COMPLETIONS}", json=ask(), timeout=60).status_code == 503
    server._thread.join(timeout=10)
    assert not server._thread.is_alive()


# --- owners and swaps ------------------------------------------------------------------------------------------------


def test_answers_reach_their_owners(server):
    """SCH-08: eight threads, each with prompts whose answers it can tell."""
    swapped, count = [], [0]

    def caller(number):
        with httpx.Client(base_url=server.url, timeout=120) as http:
            for turn in range(10):
                token = 1000 + 50 * number + turn
                body = ask(prompt=[token], allowed_token_ids=[token], max_tokens=3, logprobs=0)
                choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
                own = http.post("/detokenize", json={"tokens": [token]}).json()["prompt"]
                count[0] += 1
                if choice["text"] != own * 3:
                    swapped.append((token, choice))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not swapped and count == [80]


# --- keys ------------------------------------------------------------------------------------------------------------


def test_no_route_is_open_without_a_key(own_server):
    """SRV-09: a route that is new is closed too."""
    server = own_server(api_keys=("secret", "other"))
    app = server._server.config.app
    open_to_all = {"/health", "/metrics", "/version", "/"}
    paths = {route.path for route in app.routes}
    paths |= {"//v1/completions", "/V1/completions", "/v1/completions/", "/nothing"}
    paths |= {"/v1/models", "/openapi.json", "/docs"}
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}, {"Authorization": "secret"}]
    wrong += [{"Authorization": "Bearer"}, {"Authorization": b"Bearer \xff\xfe"}, {"Authorization": "Bearer secre"}]
    with httpx.Client(base_url=server.url) as http:
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
                for headers in wrong:
                    reply = http.request(method, path, headers=headers)
                    if path in open_to_all:
                        assert reply.status_code in (200, 405), (method, path)
                    else:
                        assert reply.status_code == 401, (method, path, headers)
                        assert reply.headers["www-authenticate"] == "Bearer" and "secre" not in reply.text
        for headers in ({"Authorization": "Bearer secret"}, {"authorization": "bearer other"}):
            assert http.post(COMPLETIONS, json=ask(), headers=headers).status_code == 200


def test_owners_of_different_keys_find_nothing_of_each_other(own_server):
    """KV-11: with keys, the salt comes from the key; a client's own salt makes it narrower still."""
    server = own_server(api_keys=("first", "second"))
    prompt, texts = list(range(200, 232)), set()
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def cached(key, **more):
            body = ask(prompt=prompt, **more)
            reply = http.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"})
            texts.add(reply.json()["choices"][0]["text"])
            return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached("first"), cached("first")] == [0, 16]
        assert [cached("second"), cached("second")] == [0, 16]
        assert [cached("first", cache_salt="a"), cached("first", cache_salt="a"), cached("second", cache_salt="a")] == [
            *(0, 16, 0)
        ]
        assert len(texts) == 1


def test_a_clients_salt_without_keys(http):
    def cached(**more):
        return http.post(COMPLETIONS, json=ask(prompt=list(range(300, 332)), **more)).json()["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]

    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 16, 0, 0]


def test_who_hangs_up_before_the_body_is_there_is_no_error(own_server, caplog):
    server = own_server()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)
    time.sleep(0.2)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


# --- the command -----------------------------------------------------------------------------------------------------


def test_serve_from_the_command_line(real_folder, tmp_path):
    """Starts, answers, ends at a signal with what it was doing, and gives 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        "--port",
        str(port),
        "--served-model-name",
        MODEL,
        "--dtype",
        "float32",
        "--num-gpu-blocks-override",
        "64",
    ]
    options += ["--override-generation-config", '{"temperature": 0}', "--disable-uvicorn-access-log"]
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "minivllm.cli", "serve", str(real_folder), *options, "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ})
    try:
        url, began = f"http://127.0.0.1:{port}", time.monotonic()
        while True:
            try:
                assert httpx.get(f"{url}/health").status_code == 200
                break
            except httpx.ConnectError:
                assert process.poll() is None and time.monotonic() - began < 60, (tmp_path / "log").read_text()
                time.sleep(0.1)
        likeliest = {seed: httpx.post(f"{url}{COMPLETIONS}", json=ask(temperature=None, seed=seed)) for seed in (1, 2)}
        assert likeliest[1].json()["choices"] == likeliest[2].json()["choices"]
        body = ask(max_tokens=100, ignore_eos=True, stream=True)
        with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: {")]
        assert len(rest) == 99 and json.loads(rest[-1][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(timeout=30) == 0
        assert "POST" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        log.close()


def test_who_is_not_ready_at_the_end_is_told(real_folder, tmp_path):
    """Whole or streamed, with the error object and a stream's end; the log has no traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--dtype", "float32", "--num-kv-blocks", "600", "--shutdown-timeout", "1"]
    replies = {}

    def post(name, url, body):
        replies[name] = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60)

    with serving(real_folder, port, tmp_path / "log", *options) as (url, process):
        bodies = {"whole": ask(**ENDLESS), "streamed": ask(**ENDLESS, stream=True)}
        threads = [threading.Thread(target=post, args=(name, url, body)) for name, body in bodies.items()]
        for thread in threads:
            thread.start()
        while metric(url, "num_requests_running") < 2:
            time.sleep(0.02)
        os.kill(process, signal.SIGTERM)
        for thread in threads:
            thread.join()
    check_error(replies["whole"], 503, None, "was shut down")
    parts = events(replies["streamed"].text)
    assert len(parts) > 2 and parts[-1]["error"]["code"] == 503
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and "still running after 1 s" in log
