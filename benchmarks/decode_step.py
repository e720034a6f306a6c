"""A decode step of the default model by parts, in plain torch, with blocks read in place, and with compiled layers.

Run: .venv/bin/python -m benchmarks.decode_step [bfloat16|float32]
"""

import sys

import torch

from minivllm import LLM
from minivllm.cpu.paged_attention import NumbaAttention
from minivllm.lessons.cpu_speed import StepProfile, profile_step
from minivllm.lessons.machine import measure_rates
from minivllm.model.attention import PagedAttention

CASES = ((1, 192), (8, 192), (32, 192), (64, 192), (32, 560))


def row(name: str, step: StepProfile) -> str:
    """A line of the table."""
    parts = " | ".join(f"{ms:.1f}" for ms in step.parts.values())
    rate = 1000 * step.batch / step.total
    return f"| {step.batch}, {step.context} | {name} | {parts} | {step.total:.1f} | {rate:,.0f} |"


def main() -> None:
    """Prints the table."""
    dtype = sys.argv[1] if len(sys.argv) > 1 else "bfloat16"
    rates = measure_rates(torch.device("cpu"), getattr(torch, dtype))
    print(
        f"{dtype}; torch reads {rates.bytes_per_s / 1e9:.1f} GB/s, multiplies {rates.flops_per_s / 1e9:.0f} Gflop/s\n"
    )
    plain, fast = (
        LLM("smollm2-135m", dtype=dtype, attention_backend=name, num_kv_blocks=128).model for name in ("torch", "numba")
    )
    print("| batch, context | | products | attention | head | rest | step, ms | tokens/s |\n" + "|---" * 8 + "|")
    changes = (
        ("plain torch", plain, PagedAttention),
        ("blocks in place", plain, NumbaAttention),
        ("compiled layers", fast, NumbaAttention),
    )
    for batch, context in CASES:
        for name, model, backend in changes:
            print(row(name, profile_step(model, backend, batch, context, repeats=5)), flush=True)


if __name__ == "__main__":
    main()
