"""Times schedule() and update() without a model: what scheduling costs per step, and what it depends on.

Run: .venv/bin/python benchmarks/scheduler.py
"""

import statistics
import time

from minivllm.config import EngineConfig
from minivllm.kv_cache import PagedKVCache
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ContinuousScheduler, RunnerOutput, SchedulerOutput
from minivllm.trace import Recorder

STEPS, REPEATS = 100, 7
BLOCK_SIZE = 16
BASE = {"num_running": 256, "num_tokens": 1_000, "num_blocks": 0}


def make_batch(num_running: int, num_tokens: int, num_blocks: int) -> tuple[ContinuousScheduler, EngineConfig]:
    """A scheduler in which `num_running` requests of `num_tokens` tokens decode; 0 blocks means just enough."""
    length = num_tokens + STEPS + 2
    needed = num_running * -(-length // BLOCK_SIZE)
    config = EngineConfig(max_num_seqs=num_running, max_num_batched_tokens=num_running * num_tokens)
    scheduler = ContinuousScheduler(config, PagedKVCache(max(needed, num_blocks), BLOCK_SIZE))
    prompt = list(range(1, num_tokens + 1))
    for index in range(num_running):
        scheduler.add(Request(f"R{index}", prompt, SamplingParams(max_tokens=length), num_tokens + length))
    step(scheduler, {f"R{index}": [1] for index in range(num_running)})
    return scheduler, config


def step(scheduler: ContinuousScheduler, tokens: dict[str, list[int]]) -> tuple[SchedulerOutput, list[Request]]:
    """One step whose pass is already done: everybody gets a token."""
    plan = scheduler.schedule(0.0)
    return plan, scheduler.update(plan, RunnerOutput(tokens), 0.0)


def measure(num_running: int, num_tokens: int, num_blocks: int, recording: bool = False) -> float:
    """Microseconds per request and step: the median over repeats of the mean over steps."""
    means = []
    for _ in range(REPEATS):
        scheduler, config = make_batch(num_running, num_tokens, num_blocks)
        recorder = Recorder(config, scheduler, 0.0) if recording else None
        tokens = {request.request_id: [1] for request in scheduler.running}
        started = time.perf_counter()
        for _ in range(STEPS):
            plan, touched = step(scheduler, tokens)
            if recorder is not None:
                recorder.record(plan, touched, 0.0, 0.0)
        means.append((time.perf_counter() - started) / STEPS)
        assert len(plan.num_scheduled_tokens) == num_running and not plan.decisions
    return statistics.median(means) / num_running * 1e6


def main() -> None:
    """Prints the cost for each size, and its ratio to the first line of its group."""
    groups = {
        "running requests": [BASE | {"num_running": count} for count in (256, 32, 64, 128, 512)],
        "tokens per request": [BASE | {"num_tokens": count} for count in (1_000, 100, 4_000)],
        "blocks in the pool": [BASE | {"num_blocks": count} for count in (0, 100_000, 1_000_000)],
    }
    print(f"median of {REPEATS} repeats of {STEPS} steps; microseconds per request and step")
    for title, sizes in groups.items():
        print(title)
        base = 0.0
        for size in sizes:
            cost = measure(**size)
            base = base or cost
            count, blocks = size["num_running"], f"{size['num_blocks']:,}" if size["num_blocks"] else "just enough"
            print(
                f"  {count:>4} running, {size['num_tokens']:>5,} tokens, {blocks:>11} blocks: {cost:6.3f} µs"
                f" (x {cost / base:4.2f}), {cost * count / 1000:6.3f} ms per step"
            )
    cost = measure(**BASE, recording=True)
    print(f"with the recorder on, 256 running: {cost:6.3f} µs, {cost * BASE['num_running'] / 1000:6.3f} ms per step")


if __name__ == "__main__":
    main()
