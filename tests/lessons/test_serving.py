"""What lesson 07 uses beside the server."""

import asyncio

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minivllm.lessons.serving import CountingTokenizer, Watcher, bytes_of, samples, token_pieces

METRICS = """# HELP vllm:num_requests_running Requests with memory
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
# HELP vllm:request_success_total Requests that ended, by how
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 2.0
# HELP vllm:num_requests_waiting Requests without
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# HELP vllm:kv_cache_usage_perc Share
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


@pytest.fixture(scope="module")
def bytewise():
    """A byte-level vocabulary that has nothing but the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_tokens_bytes(bytewise):
    ids = bytewise.encode("a ï")
    assert [bytes_of(bytewise, token_id) for token_id in ids] == [b"a", b" ", b"\xc3", b"\xaf"]
    assert token_pieces(bytewise, ids) == [(b"a", "a"), (b" ", " "), (b"\xc3", ""), (b"\xaf", "ï")]


def test_decoded_tokens_are_counted_and_the_rest_is_the_tokenizers(bytewise):
    counting = CountingTokenizer(bytewise)
    ids = counting.encode("abc")
    assert counting.decode(ids) + counting.decode(ids[:1]) == "abca"
    assert counting.num_decoded == 4


def test_samples_have_names_and_labels():
    assert samples(METRICS) == {
        "num_requests_running": 4.0,
        "request_success_total abort": 2.0,
        "num_requests_waiting": 1.0,
        "kv_cache_usage_perc": 0.25,
    }


def test_a_watcher_sees_changes_and_gives_up_on_what_never_comes(monkeypatch):
    states = iter(range(1000))

    def answer(request):
        return httpx.Response(200, text=METRICS.replace("} 4.0", f"}} {next(states)}"))

    client = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **o: client(**o, transport=httpx.MockTransport(answer)))
    monkeypatch.setattr("minivllm.lessons.serving.PATIENCE_S", 0.3)

    async def main():
        async with Watcher("http://server", every_s=0.001) as seen:
            await seen.until(num_requests_running=5, num_requests_waiting=1)
            with pytest.raises(TimeoutError, match="'num_requests_waiting': 7"):
                await seen.until(num_requests_waiting=7)
        return seen

    seen = asyncio.run(main())
    running = seen.values["num_requests_running"]
    assert running == list(range(len(running))) and len(running) == len(seen.times)
    times, gauges = seen.evenly(10)
    assert len(times) == 10 and times[0] == 0 and times[-1] == pytest.approx(seen.times[-1])
    assert gauges["num_requests_running"] == sorted(gauges["num_requests_running"])
    assert gauges["num_requests_running"][-1] in running[-2:] and set(gauges["kv_cache_usage_perc"]) == {0.25}


def test_a_watcher_tells_why_it_sees_nothing():
    async def main():
        async with Watcher("http://127.0.0.1:9") as seen:
            await seen.until(num_requests_running=1)

    with pytest.raises(httpx.ConnectError):
        asyncio.run(main())
