"""What the GPU benchmark measures, part by part, and what it makes of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from transformers import PreTrainedConfig

from benchmarks.gpu_engine import QWEN3_0_6B, SMOLLM2_135M, measure_engine
from benchmarks.gpu_kernels import HeadShape, measure_copy, measure_decode, measure_prefill, measure_write
from benchmarks.gpu_report import Section, gb, micros, percent, verdict
from benchmarks.gpu_timing import Bench, Measured

DECODE_GOAL, PREFILL_GOAL = 0.85, 0.70
GOAL_CONTEXT, GOAL_BATCH = 4_096, 32  # from there on
SMOLLM, QWEN = HeadShape("SmolLM2-135M", 9, 3, 64), HeadShape("Qwen3-0.6B", 16, 8, 128)
LLAMA = HeadShape("Llama-3-8B", 32, 8, 128)


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        heads: the shapes that the kernels get.
        models: name and config of those that run as a whole.
        copied_bytes: of the device copy.
        contexts: of decoding, in tokens.
        batches: requests that decode together.
        against_torch: context and batch of those that plain torch does too.
        prompts: tokens of a prompt.
        writes: tokens whose keys and values are stored in one pass.
        requests: how many requests an engine gets; the first number on both back ends.
        lengths: tokens of each of their prompts and answers.
    """

    heads: tuple[HeadShape, ...] = (SMOLLM, QWEN, LLAMA)
    models: tuple[tuple[str, PreTrainedConfig], ...] = ((SMOLLM.model, SMOLLM2_135M), (QWEN.model, QWEN3_0_6B))
    copied_bytes: int = 2**30
    contexts: tuple[int, ...] = (1_024, 4_096, 16_384, 32_768)
    batches: tuple[int, ...] = (1, 8, 32, 128)
    against_torch: tuple[tuple[int, int], ...] = ((1_024, 8), (4_096, 32))
    prompts: tuple[int, ...] = (512, 1_024, 2_048, 4_096, 8_192)
    writes: tuple[int, ...] = (128, 2_048, 8_192)
    requests: tuple[int, ...] = (1, 32, 256)
    lengths: tuple[int, int] = (128, 128)


FULL = Sizes()
QUICK = Sizes(
    heads=(QWEN,),
    models=((SMOLLM.model, SMOLLM2_135M),),
    copied_bytes=2**28,
    contexts=(4_096,),
    batches=(1, 32),
    against_torch=((4_096, 32),),
    prompts=(2_048,),
    writes=(2_048,),
    requests=(1, 32),
    lengths=(128, 32),
)


def measure(bench: Bench, sizes: Sizes, parts: tuple[str, ...]) -> Iterator[Section]:
    """The sections, one by one as they are done.

    Raises:
        WrongResult: a kernel computes something else than its reference.
    """
    copy = measure_copy(bench, sizes.copied_bytes)
    note = f"{gb(copy.rate)} GB/s, read and write counted: the best of {3 * bench.rounds} copies of {copy.size}."
    yield Section("Device copy", notes=[note])
    for name, part in PARTS.items():
        if name in parts:
            yield part(bench, sizes, copy.rate)


def decode_section(bench: Bench, sizes: Sizes, copy_rate: float) -> Section:
    """Shares of the copy's bandwidth, when each request attends with one token."""
    cases, with_goal = {}, set()
    for heads, context, batch in product(sizes.heads, sizes.contexts, sizes.batches):
        name = f"{heads.model} {context:,} × {batch}"
        cases[name] = partial(measure_decode, bench, heads, context, batch, (context, batch) in sizes.against_torch)
        if context >= GOAL_CONTEXT and batch >= GOAL_BATCH:
            with_goal.add(name)
    found, left_out = run_all(cases)
    shares = {name: one.rate / copy_rate for name, one in found.items()}
    rows = []
    for name, one in found.items():
        columns = (one.model, one.size, f"{one.work / 1e6:,.1f}", micros(one.seconds), gb(one.rate))
        rows.append((*columns, percent(shares[name]), against_torch(one)))
    goal = f"at least {DECODE_GOAL:.0%} of the copy from {GOAL_CONTEXT:,} tokens × {GOAL_BATCH} requests up"
    judged = verdict(goal, DECODE_GOAL, {name: share for name, share in shares.items() if name in with_goal})
    method = (
        "To move: keys and values once, queries, output. Layers take turns, so that no key is still in the L2 cache."
    )
    header = ("model", "context × batch", "MB to move", "µs", "GB/s", "share of the copy", "plain torch takes")
    return Section("Decode attention", header, rows, [method, judged, *left_out])


def prefill_section(bench: Bench, sizes: Sizes, copy_rate: float) -> Section:
    """One prompt, against torch's own attention."""
    cases = {
        f"{heads.model} {num_tokens:,}": partial(measure_prefill, bench, heads, num_tokens)
        for heads, num_tokens in product(sizes.heads, sizes.prompts)
    }
    found, left_out = run_all(cases)
    rows, shares = [], {}
    for name, one in found.items():
        assert one.rival_s is not None
        shares[name] = one.rival_s / one.seconds
        columns = (one.model, one.size, micros(one.seconds), f"{one.rate / 1e12:,.1f}")
        rows.append((*columns, micros(one.rival_s), percent(shares[name]), one.rival))
    header = ("model", "tokens", "µs", "TFLOP/s", "torch's µs", "share of torch's rate", "torch's kernel")
    note = "torch: scaled_dot_product_attention, causal, on contiguous keys and values, in turns with ours."
    judged = verdict(f"at least {PREFILL_GOAL:.0%} of torch's rate", PREFILL_GOAL, shares)
    return Section("Prefill attention", header, rows, [note, judged, *left_out])


def write_section(bench: Bench, sizes: Sizes, copy_rate: float) -> Section:
    """Shares of the copy's bandwidth, when keys and values go into their slots."""
    cases = {
        f"{heads.model} {num_tokens:,}": partial(measure_write, bench, heads, num_tokens)
        for heads, num_tokens in product(sizes.heads, sizes.writes)
    }
    found, left_out = run_all(cases)
    rows = [
        (one.model, one.size, micros(one.seconds), gb(one.rate), percent(one.rate / copy_rate))
        for one in found.values()
    ]
    return Section("KV write", ("model", "tokens", "µs", "GB/s", "share of the copy"), rows, left_out)


def engine_section(bench: Bench, sizes: Sizes, copy_rate: float) -> Section:
    """Output tokens per second of whole runs."""
    cases = {
        f"{model} {count}": partial(
            measure_engine, bench, model, config, count, sizes.lengths, count == sizes.requests[0]
        )
        for (model, config), count in product(sizes.models, sizes.requests)
    }
    found, left_out = run_all(cases)
    prompt, answer = sizes.lengths
    rows = [
        (one.model, one.size, f"{one.rate:,.1f}", micros(one.seconds / answer), against_torch(one))
        for one in found.values()
    ]
    header = ("model", "requests", "output tokens/s", "µs per token of each", "plain torch attention takes")
    note = f"{prompt} tokens in and {answer} out, greedy; all requests come together, and their prefill counts."
    return Section("End to end", header, rows, [note, *left_out])


PARTS = {"decode": decode_section, "prefill": prefill_section, "write": write_section, "engine": engine_section}


def run_all(cases: Mapping[str, Callable[[], Measured | None]]) -> tuple[dict[str, Measured], list[str]]:
    """What came out of each, and a note on those for which the memory did not suffice, if any."""
    found, skipped = {}, []
    for name, run in cases.items():
        try:
            one = run()
        except torch.OutOfMemoryError:
            one = None
        if one is None:
            skipped.append(name)
        else:
            found[name] = one
    note = f"Left out, since it does not fit into the memory that is free: {'; '.join(skipped)}."
    return found, [note] if skipped else []


def against_torch(one: Measured) -> str:
    """How many times as long plain torch takes."""
    return "" if one.rival_s is None else f"× {one.rival_s / one.seconds:.2f}"
