"""Continuous against static batching on the real model: one length mix, one memory, the same tokens.

48 requests, answers lognormal with a spread (standard deviation over mean) of at least 1, greedy, end of sequence
ignored, float32. Everybody has the same pool; the policies take turns, three rounds, and the medians count.

Run: OMP_WAIT_POLICY=passive .venv/bin/python benchmarks/continuous_batching.py
"""

import statistics
import time

from minivllm import LLM, SamplingParams
from minivllm.engine import LLMEngine
from minivllm.lessons.batching import spread_lengths
from minivllm.lessons.workload import random_prompt
from minivllm.llm import make_manager
from minivllm.scheduler import StaticScheduler

NUM_REQUESTS, ROWS, NUM_BLOCKS, LONGEST, ROUNDS = 48, 8, 128, 256, 3
PROMPTS = [random_prompt(16 + 3 * (i % 16), seed=i) for i in range(NUM_REQUESTS)]
LENGTHS = [min(length, LONGEST - len(p)) for length, p in zip(spread_lengths(48, 24, 1.3), PROMPTS, strict=True)]


def policies(llm: LLM) -> dict[str, LLM]:
    """Name to an engine; all have the same pool, and all but the last the same rows."""
    static = {"batching": "static", "max_num_seqs": ROWS}
    without = llm.reconfigure(**static)
    manager = make_manager(without.engine.config, without.kv_cache_size, without.max_model_len)
    parts = without.engine
    without.engine = LLMEngine(
        parts.config,
        StaticScheduler(parts.config, manager, keep_finished_rows=False),
        parts.runner,
        parts.limits,
        parts.tokenizer,
    )
    return {
        "static, padded (paged memory)": llm.reconfigure(**static),
        "static, padded (slabs for the longest text)": llm.reconfigure(
            **static, kv_cache="contiguous", reservation="max"
        ),
        "static, ended rows left out": without,
        "continuous": llm.reconfigure(max_num_seqs=ROWS),
        "continuous, as many rows as the memory holds": llm.reconfigure(),
    }


def run(llm: LLM) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of one run."""
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in LENGTHS]
    started = time.perf_counter()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return seconds, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    """Prints output tokens per second, and the ratio to the padded static batch."""
    cv = statistics.pstdev(LENGTHS) / statistics.mean(LENGTHS)
    total = sum(LENGTHS)
    print(f"{NUM_REQUESTS} requests, {total} output tokens, spread {cv:.2f}; {NUM_BLOCKS} blocks of 16, {ROWS} rows")
    engines = policies(
        LLM(
            "smollm2-135m",
            dtype="float32",
            num_kv_blocks=NUM_BLOCKS,
            max_model_len=LONGEST,
            enable_prefix_caching=False,  # every policy computes all prompts, in every round
        )
    )
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(ROUNDS):
        for name, llm in engines.items():
            taken, tokens[name] = run(llm)
            seconds[name].append(taken)
    first = next(iter(engines))
    base = statistics.median(seconds[first])
    print(f"{'':<46}{'tokens/s':>9}{'ratio':>7}   tokens as the first")
    for name, taken in seconds.items():
        median = statistics.median(taken)
        # Greedy tokens may differ at a near tie when the batch differs; the work is the same.
        same = sum(a == b for a, b in zip(tokens[name], tokens[first], strict=True))
        print(f"{name:<46}{total / median:>9.1f}{base / median:>7.2f}   {same} of {NUM_REQUESTS}")


if __name__ == "__main__":
    main()
