"""The Triton kernels and the engine on a CUDA card, with random numbers of real models' shapes.

Every kernel is compared with plain torch on that card before it is timed. Memory is taken as far as it is free; what
does not fit is left out, and named.

Run: make bench-gpu BENCH_ARGS="--quick" (or: .venv/bin/python -m benchmarks.gpu --help)
"""

import argparse
import datetime
import importlib.util
import sys
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_report import markdown
from benchmarks.results import RESULTS, replace_block

if TYPE_CHECKING:  # what needs Triton is imported only where there is a card
    from benchmarks.gpu_timing import Bench

OWNER = "bench-gpu"
PARTS = ("decode", "prefill", "write", "engine")
DTYPES = ("bfloat16", "float16", "float32")


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and with --write records; the exit code."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few sizes, in less than a minute")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}, with commas between")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--write", action="store_true", help=f"put the tables of a full run into {RESULTS.name}")
    options = parser.parse_args(arguments)
    parts = tuple(options.only.split(","))
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only knows {', '.join(PARTS)}, and not {', '.join(map(repr, unknown))}")
    if options.write and (options.quick or set(parts) != set(PARTS)):
        parser.error("--write records full runs: leave out --quick and --only")
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    return run(options, parts)


def run(options: argparse.Namespace, parts: tuple[str, ...]) -> int:
    """The part of `main` that needs a card."""
    from benchmarks.gpu_sections import FULL, QUICK, measure
    from benchmarks.gpu_timing import WrongResult

    if options.write:
        try:
            replace_block(RESULTS.read_text(), OWNER, "")  # what fails is to fail now, not after five minutes
        except ValueError as error:
            print(f"Stopped: {error}.", file=sys.stderr)
            return 1
    bench, sections, started = bench_on_card(options.dtype), [], time.perf_counter()
    name = torch.cuda.get_device_name(bench.device)
    print(f"{name}, torch {torch.__version__}, {options.dtype}; medians of {bench.rounds} rounds in turns")
    try:
        for section in measure(bench, QUICK if options.quick else FULL, parts):
            print(section.as_text(), flush=True)
            sections.append(section)
    except WrongResult as error:
        print(f"Stopped: {error}.", file=sys.stderr)
        return 1
    print(f"{time.perf_counter() - started:.0f} s in all")
    if options.write:
        block = markdown(sections, name, options.dtype, bench.rounds, datetime.date.today())
        RESULTS.write_text(replace_block(RESULTS.read_text(), OWNER, block))
    return 0


def why_not() -> str | None:
    """A sentence on why nothing can be measured here, if so."""
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else " (it is a build for CPUs)"
        return f"bench-gpu needs a CUDA card, and torch {torch.__version__} sees none{build}."
    if importlib.util.find_spec("triton") is None:
        return "bench-gpu needs Triton, which is not installed here: it exists for Linux."
    return None


def bench_on_card(dtype: str) -> "Bench":
    """The card that is current, its timers, and nine tenths of the memory that is free on it."""
    from benchmarks.gpu_timing import Bench, graph_timer, wall_timer

    device = torch.device("cuda", torch.cuda.current_device())

    def free_bytes() -> int:
        torch.cuda.empty_cache()
        return int(0.9 * torch.cuda.mem_get_info(device)[0])

    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return Bench(device, getattr(torch, dtype), graph_timer, wall_timer, free_bytes, cache_bytes)


if __name__ == "__main__":
    sys.exit(main())
