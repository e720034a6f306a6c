"""Twenty minutes of load with clients that hang up: nothing may be lost, and memory must stay flat. Run by `make soak`.

A server in a process of its own, with too few blocks for all that is asked of it, so that requests are preempted.
Many clients ask for everything at random: streams and whole answers, chats and completions, several answers, stop
strings, logprobs, shared beginnings, nonsense. A third of them hang up somewhere on the way. Now and then everybody
pauses: then nothing may run or wait, no block may be in use, and the process's memory is looked at.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from benchmarks.process import MODEL, serving
from benchmarks.results import RESULTS, replace_block
from minivllm.lessons.serving import read_metrics
from minivllm.model.hub import resolve_model

CLIENTS, PAUSE_S, WARM_UP = 24, 60.0, 3  # the first pauses are not compared: caches fill, pools of memory grow
GROWTH = 0.05
OPTIONS = ("--dtype", "bfloat16", "--num-kv-blocks", "160", "--max-num-seqs", "16", "--max-num-batched-tokens", "512")
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Load:
    """Clients that ask at random, and what has become of their requests.

    Attributes:
        outcomes: how many requests ended how.
        tokens: of all answers that were read to their end.
        wrong: what should not have happened.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.rng, self.url = random.Random(seed), url
        self.outcomes: Counter[str] = Counter()
        self.tokens, self.wrong = 0, list[str]()
        self.beginnings = [[self.rng.randrange(3, 49000) for _ in range(200)] for _ in range(4)]

    def body(self) -> tuple[str, dict[str, Any]]:
        """Where to ask, and for what."""
        rng = self.rng
        own = [rng.randrange(3, 49000) for _ in range(rng.choice([1, 5, 40, 150, 600]))]
        prompt = (rng.choice(self.beginnings) if rng.random() < 0.5 else []) + own
        body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randint(1, 80), "stream": rng.random() < 0.7}
        body |= rng.choice([{"temperature": 0}, {"temperature": 1.0, "n": rng.randint(1, 3)}, {"temperature": 0.7}])
        body |= rng.choice([{}, {}, {"ignore_eos": True}, {"stop": ["e", "the end"]}, {"repetition_penalty": 1.2}])
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.3:
            words = " ".join(rng.choices(["why", "blocks", "été", "🙂", "cache"], k=rng.randint(1, 60)))
            logprobs = rng.choice([{}, {"logprobs": True, "top_logprobs": 2}])
            return "/v1/chat/completions", {**body, **logprobs, "messages": [{"role": "user", "content": words}]}
        return "/v1/completions", {**body, **rng.choice([{}, {"logprobs": 2}, {"echo": True}]), "prompt": prompt}

    async def client(self, until: float) -> None:
        """Asks again and again."""
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while time.monotonic() < until:
                try:
                    self.outcomes[await self.ask(http)] += 1
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(1)

    async def ask(self, http: httpx.AsyncClient) -> str:
        """One request; how it ended."""
        path, body = self.body()
        if self.rng.random() < 0.05:
            reply = await http.post(path, json={**body, "temperature": -1})
            return self.check("refused", reply.status_code == 400, reply.text)
        leaves = self.rng.random() < 0.33
        if not body["stream"]:
            try:
                reply = await http.post(path, json=body, timeout=self.rng.uniform(0.01, 3) if leaves else 120)
            except httpx.TimeoutException:
                return self.check("hung up", leaves, "timeout")
            return self.check("answered", reply.status_code == 200 and self.is_whole([reply.json()], body), reply.text)
        read = self.rng.randint(0, 20) if leaves else 10**9
        events: list[dict[str, Any]] = []
        async with http.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                return self.check("answered", False, str(reply.status_code))
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    return self.check("streamed", self.is_whole(events, body), str(events[-2:]))
                if line:
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) >= read:
                    return "hung up in a stream"
        return self.check("streamed", False, "the stream has no end")

    def check(self, outcome: str, good: bool, seen: str) -> str:
        """Keeps what is wrong."""
        if not good:
            self.wrong.append(f"{outcome}: {seen[:300]}")
        return outcome

    def is_whole(self, parts: list[dict[str, Any]], body: dict[str, Any]) -> bool:
        """Whether each answer has ended once, within its length, and usage is there."""
        if any("error" in part for part in parts):
            return False
        ends = Counter(
            choice["index"] for part in parts for choice in part["choices"] if choice["finish_reason"] is not None
        )
        count, n = parts[-1]["usage"]["completion_tokens"], body.get("n", 1)
        self.tokens += count
        return ends == Counter(range(n)) and n <= count <= n * body["max_tokens"]


def memory_mib(process: int) -> float:
    """Resident memory of a process, as ps gives it."""
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, check=True).stdout) / 1024


def at_rest(url: str) -> list[str]:
    """What still runs, waits or holds blocks when nobody asks any more; given ten seconds to end."""
    for _ in range(100):
        busy = [f"{name} {value}" for name, value in read_metrics(url).items() if name in IDLE and value]
        if not busy:
            return []
        time.sleep(0.1)
    return busy


def main() -> int:
    """The exit code is 1 where something was lost, wrong, or grew."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/RESULTS.md")
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "server.log"
    with serving(resolve_model(MODEL), args.port, log, *OPTIONS) as (url, process):
        load, sizes, end = Load(url, args.seed), list[float](), time.monotonic() + 60 * args.minutes
        while time.monotonic() < end and not load.wrong:
            until = min(time.monotonic() + PAUSE_S, end)

            async def together(until: float = until) -> None:
                await asyncio.gather(*(load.client(until) for _ in range(CLIENTS)))

            asyncio.run(together())
            load.wrong += [f"at rest: {what}" for what in at_rest(url)]
            sizes.append(memory_mib(process))
            print(f"{sum(load.outcomes.values()):,} requests, {sizes[-1]:.0f} MiB", flush=True)
        now = read_metrics(url)
    settled = min(WARM_UP, len(sizes))
    warm, last = sizes[settled - 1], sizes[-1]
    if last > warm * (1 + GROWTH):
        load.wrong.append(f"memory grew from {warm:.0f} to {last:.0f} MiB")
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(load.outcomes.items()))
    said = (
        f"{args.minutes:g} minutes, {CLIENTS} clients, {sum(load.outcomes.values()):,} requests ({outcomes}), "
        f"{now['generation_tokens_total']:,.0f} tokens, {now['num_preemptions_total']:,.0f} preemptions. All blocks "
        f"came back in each of {len(sizes)} pauses; resident memory was {warm:.0f} MiB in pause {settled} and "
        f"{last:.0f} MiB ({last / warm - 1:+.1%}) in the last."
    )
    print(said)
    for wrong in load.wrong[:20]:
        print(f"FAILED: {wrong} (the server's log is {log})")
    if args.write and not load.wrong:
        block = f"## Load with clients that hang up ({date.today()})\n\n`make soak`: {said}"
        RESULTS.write_text(replace_block(RESULTS.read_text(), "soak", block))
    return 1 if load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
