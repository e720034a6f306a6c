"""Times the prefix cache without a model: hashing and looking up, a step beside many cached blocks, and what it adds.

Run: .venv/bin/python benchmarks/prefix_cache.py
"""

import time
from itertools import count

from minivllm.config import EngineConfig
from minivllm.kv_cache import PagedKVCache
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ContinuousScheduler, RunnerOutput

BLOCK_SIZE, REPEATS = 16, 5
NUM_PROMPTS = 20  # that are looked up one after the other
NUM_RUNNING, NUM_STEPS, PROMPT_LENGTH = 256, 100, 1_000
NUM_ARRIVALS, ARRIVAL_LENGTH = 200, 512  # beside cached blocks
ALGORITHMS = ("sha256", "builtin")
NUMBERS = count()


def make_request(length: int, number: int, max_tokens: int = 1) -> Request:
    """A request whose tokens are its number's; two with one number share all of them."""
    prompt = [(number * 7_919 + place * 31) % 49_152 for place in range(length)]
    return Request(f"R{next(NUMBERS)}", prompt, SamplingParams(max_tokens=max_tokens), length + max_tokens)


def fill(manager: PagedKVCache, request: Request) -> None:
    """Computes a request, which then ends: its blocks are free and can be found."""
    if not manager.allocate_slots(request, request.num_tokens):
        raise ValueError("the pool is too small")
    request.num_computed_tokens = request.num_tokens
    manager.commit(request, 0)
    manager.free(request)


def measure_lookups(algorithm: str, length: int) -> list[float]:
    """Tokens per second that are looked up: for the first time (nothing is there), by another request (all is
    there), and once more by the same one, whose keys are known. The best of all repeats."""
    best = [0.0, 0.0, 0.0]
    for _ in range(REPEATS):
        manager = PagedKVCache(NUM_PROMPTS * length // BLOCK_SIZE, BLOCK_SIZE, algorithm)
        first, second = ([make_request(length, number) for number in range(NUM_PROMPTS)] for _ in range(2))
        found = []
        for place, requests in enumerate((first, second, second)):
            started = time.perf_counter()
            found.append(sum(len(manager.get_computed_blocks(request)) for request in requests))
            best[place] = max(best[place], NUM_PROMPTS * length / (time.perf_counter() - started))
            if requests is first:
                for request in first:
                    fill(manager, request)
        # Of a prompt that ends with a full block, that block is computed again.
        assert found == [0, all_but_last := NUM_PROMPTS * ((length - 1) // BLOCK_SIZE), all_but_last]
    return best


def measure_arrivals(num_cached: int) -> float:
    """Microseconds of a step that admits a request half of whose prompt is cached, in a pool of nothing but cached
    blocks, so that each block that it takes is evicted; the best of all repeats of the mean."""
    best = float("inf")
    for _ in range(REPEATS):
        manager = PagedKVCache(num_cached, BLOCK_SIZE, "sha256")
        config = EngineConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=8_192)
        scheduler = ContinuousScheduler(config, manager)
        while manager.num_cached_blocks < num_cached:
            length = min(ARRIVAL_LENGTH, (num_cached - manager.num_cached_blocks) * BLOCK_SIZE)
            fill(manager, make_request(length, 1_000_000 + next(NUMBERS)))
        shared = make_request(ARRIVAL_LENGTH // 2, 1).prompt_token_ids
        arrivals = [
            Request(r.request_id, shared + r.prompt_token_ids[len(shared) :], r.params, r.max_num_tokens)
            for r in (make_request(ARRIVAL_LENGTH, 2 + number) for number in range(NUM_ARRIVALS + 1))
        ]
        spent = 0.0
        for place, request in enumerate(arrivals):
            scheduler.add(request)
            started = time.perf_counter()
            scheduler.update(scheduler.schedule(0.0), RunnerOutput({request.request_id: [1]}), 0.0)
            spent += time.perf_counter() - started if place else 0.0  # the first finds nothing
            assert request.status.finish_reason and request.num_cached_tokens == (len(shared) if place else 0)
        best = min(best, spent / NUM_ARRIVALS)
    return best * 1e6


def measure_decodes(caching: bool) -> float:
    """Microseconds per request and step while everybody decodes: one time, in the mean over steps."""
    longest = PROMPT_LENGTH + NUM_STEPS + 2
    config = EngineConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=NUM_RUNNING * PROMPT_LENGTH)
    manager = PagedKVCache(NUM_RUNNING * -(-longest // BLOCK_SIZE), BLOCK_SIZE, "sha256" if caching else None)
    scheduler = ContinuousScheduler(config, manager)
    for number in range(NUM_RUNNING):
        scheduler.add(make_request(PROMPT_LENGTH, number, NUM_STEPS + 2))
    result = RunnerOutput({name: [1] for name in scheduler.requests})
    scheduler.update(scheduler.schedule(0.0), result, 0.0)
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, result, 0.0)
    spent = time.perf_counter() - started
    assert len(plan.num_scheduled_tokens) == NUM_RUNNING and not plan.decisions
    assert (manager.num_cached_blocks > 0) == caching
    return spent / NUM_STEPS / NUM_RUNNING * 1e6


def main() -> None:
    """Prints all three."""
    print(f"the best of {REPEATS} repeats each")
    print("hashing and lookup, million tokens/s: nothing is there, all is there, all is there and the keys are known")
    for algorithm in ALGORITHMS:
        for length in (512, 4_096):
            rates = "  ".join(f"{rate / 1e6:8.2f}" for rate in measure_lookups(algorithm, length))
            print(f"  {algorithm:>7}, prompts of {length:>5,}: {rates}")
    print(f"a step that admits {ARRIVAL_LENGTH} tokens, half of them found, in a pool of cached blocks")
    base = 0.0
    for num_cached in (1_000, 10_000, 100_000):
        cost = measure_arrivals(num_cached)
        base = base or cost
        print(f"  {num_cached:>7,} cached blocks: {cost:7.1f} µs per step (x {cost / base:4.2f})")
    print(f"{NUM_RUNNING} requests decode, in turns without and with the cache")
    rounds = [(measure_decodes(False), measure_decodes(True)) for _ in range(REPEATS)]
    off, on = (min(costs) for costs in zip(*rounds, strict=True))
    print(f"  {off:.3f} µs and {on:.3f} µs per request and step: {on - off:+.3f} µs (x {on / off:4.2f})")


if __name__ == "__main__":
    main()
