"""A server on the real model, in a thread of the tests' process."""

import time

import httpx
import openai
import pytest

from minivllm import LLM, AsyncLLM
from minivllm.server.app import ServerOptions
from minivllm.server.serve import ServerThread

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def served_llm(real_folder):
    """The default model in float32, on the engine that `serve` takes by itself."""
    return LLM(str(real_folder), dtype="float32", device="cpu", num_kv_blocks=600)


@pytest.fixture(scope="session")
def server(served_llm):
    """A server for tests that leave it as it was."""
    with ServerThread(AsyncLLM.from_llm(served_llm.reconfigure()), MODEL) as running:
        yield running


@pytest.fixture
def own_server(served_llm):
    """Starts servers for tests that break them; takes fields of `ServerOptions` and of `EngineConfig`."""
    started = []

    def start(**given):
        options = {name: given.pop(name) for name in [*given] if name in ServerOptions.__dataclass_fields__}
        llm = AsyncLLM.from_llm(served_llm.reconfigure(**given))
        started.append(ServerThread(llm, MODEL, **options).__enter__())
        return started[-1]

    yield start
    for thread in started:
        thread.__exit__()


@pytest.fixture
def http(server):
    """Raw HTTP."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server):
    """OpenAI's own client, without retries."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def metric(url, name, **labels):
    """A number from /metrics."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"vllm:{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"/metrics has no {name} {labels}")


def wait_until_idle(url, within_s=2.0):
    """Waits until nothing runs, waits or holds memory, as /metrics says; returns how long that took."""
    began = time.monotonic()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(metric(url, name) for name in names):
        assert time.monotonic() - began < within_s, {name: metric(url, name) for name in names}
        time.sleep(0.02)
    return time.monotonic() - began
