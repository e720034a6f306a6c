"""Many clients at once: none is lost, and none gets another one's text."""

import asyncio
import json

import httpx
import pytest

from .conftest import MODEL, metric, wait_until_idle

pytestmark = pytest.mark.real_model
COUNT, LENGTH = 500, 4


def test_500_streams_at_once(own_server):
    """Each may draw a single token, which is its own."""
    server = own_server()
    tokens = range(2000, 2000 + COUNT)
    tokenizer = server.llm.llm.tokenizer

    async def stream(client, token):
        body = {"model": MODEL, "prompt": [token], "allowed_token_ids": [token], "max_tokens": LENGTH, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
        assert lines[-1] == "[DONE]" and len(lines) == LENGTH + 1
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    async def main():
        limits = httpx.Limits(max_connections=COUNT)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(stream(client, token) for token in tokens))

    texts = asyncio.run(main())
    assert texts == [tokenizer.decode([token] * LENGTH) for token in tokens]
    wait_until_idle(server.url)
    assert metric(server.url, "generation_tokens_total") == COUNT * LENGTH
    assert metric(server.url, "request_success_total", finished_reason="length") == COUNT
