"""What the lesson on serving needs beside the server: tokens as bytes, and eyes on /metrics."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minivllm.detokenizer import Detokenizer

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
PATIENCE_S = 30.0


def bytes_of(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for; such a vocabulary spells each byte as a character
    of its own ("Ġ" is a space), as GPT-2's did first."""
    spelled = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(spelled[character] for character in tokenizer.convert_ids_to_tokens(token_id))


def token_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[tuple[bytes, str]]:
    """Each token's bytes, and the text that can be shown once it is there: what `viz.token_bytes` draws."""
    detokenizer, pieces = Detokenizer(tokenizer), []
    for token_id in token_ids:
        detokenizer.append(token_id)
        pieces.append((bytes_of(tokenizer, token_id), detokenizer.take()))
    return pieces


class CountingTokenizer:
    """A tokenizer that counts the tokens it decodes.

    Attributes:
        num_decoded: so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.num_decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """As the tokenizer does."""
        self.num_decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, **options))


def samples(metrics: str) -> dict[str, float]:
    """What /metrics say, by name, with the labels beside the model's behind it, as in "request_success_total abort"."""
    found = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name not in ("model_name", "engine")]
            found[" ".join([sample.name.removeprefix("vllm:"), *labels])] = sample.value
    return found


def read_metrics(url: str) -> dict[str, float]:
    """A server's metrics, now."""
    return samples(httpx.get(f"{url}/metrics").text)


class Watcher:
    """Looks at a server's gauges again and again while something else goes on: `async with Watcher(url) as seen:`.

    Attributes:
        times: of each look, in seconds since the first.
        values: gauge to its value at each look.
    """

    def __init__(self, url: str, every_s: float = 0.02) -> None:
        self._url, self._every_s = url, every_s
        self.times: list[float] = []
        self.values: dict[str, list[float]] = {name: [] for name in GAUGES}

    async def __aenter__(self) -> "Watcher":
        """Begins."""
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Looks for the last time."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def until(self, **wanted: float) -> None:
        """Waits until a look has found these values.

        Raises:
            TimeoutError: it has not come to that within half a minute.
            httpx.HTTPError: the server doesn't answer.
        """
        begin, values = time.perf_counter(), self.values
        while not self.times or any(values[name][-1] != value for name, value in wanted.items()):
            if self._task.done():
                self._task.result()
            if time.perf_counter() - begin > PATIENCE_S:
                last = {name: values[name][-1] for name in wanted if values[name]}
                raise TimeoutError(f"{wanted} was not seen in {PATIENCE_S:g} s, but {last}")
            await asyncio.sleep(0.005)

    def evenly(self, num_points: int = 100) -> tuple[list[float], dict[str, list[float]]]:
        """Times with even gaps, and what each gauge showed last at each of them: a figure has as many points on every
        machine."""
        times = [self.times[-1] * point / (num_points - 1) for point in range(num_points)]
        looks = [max(bisect_right(self.times, at) - 1, 0) for at in times]
        return times, {name: [values[look] for look in looks] for name, values in self.values.items()}

    async def _watch(self) -> None:
        begin = time.perf_counter()
        async with httpx.AsyncClient(base_url=self._url) as client:
            while True:
                found = samples((await client.get("/metrics")).text)
                self.times.append(time.perf_counter() - begin)
                for name, values in self.values.items():
                    values.append(found[name])
                await asyncio.sleep(self._every_s)
