"""minivllm beside other engines: the same token ids, the same type, in turns. Run by `make bench`.

Alone it measures minivllm. With `--peers FOLDER --installed FOLDER` it also runs each peer whose environment is there,
by the scripts of the first folder: vLLM's CPU build, llama.cpp's server, OpenVINO GenAI and transformers. Every engine
is started anew in each round and runs each workload once, after a warm-up; medians count. The result goes into
benchmarks/RESULTS.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import textwrap
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding

from benchmarks.results import RESULTS, replace_block
from benchmarks.workloads import NAMES, make
from minivllm import LLM
from minivllm.cpu.compiled import features
from minivllm.model.attention import KVCache, PagedAttention
from minivllm.model.hub import resolve_model
from minivllm.model.inputs import PassRow, pack_rows

ROOT = Path(__file__).parents[1]
OWNER, OURS = "bench", "minivllm"
METHOD = """
`make bench`: output tokens/s in {dtype}, the median of {rounds} rounds in turns and, in brackets, all of them;
random ids, greedy, ends ignored. W1: 64 requests at once, prompts of 32 to 256 tokens, outputs of 32 to 128. W2: 32
prompts of 512 shared and 32 own tokens, 32 out. W3: one request, 128 in, 128 out. Every engine with its defaults but
for 64 rows (16 slots for llama.cpp, with its KV cache in float16) and texts of 2,048 tokens. {machine}"""
CHOICES = """The last column holds each engine's tokens for eight requests of W1 against what the float32 model finds
likeliest after the same tokens: the share that is the same, and the largest difference of logits elsewhere."""
REST = """
minivllm: from the start of Python to the first token {start_up:.1f} s; peak memory {memory:.2f} GiB; of a step
with 64 decodes, {outside:.1%} is outside the model."""


def commands(args: argparse.Namespace) -> dict[str, tuple[str, Path]]:
    """Each engine's shell command, but for the options that all understand, and a file that is there if it is."""
    there, scripts, model = args.installed, args.peers, args.model_folder
    vllm = f". {there}/vllm_env.sh; exec {there}/vllm/bin/python {scripts}/bench_vllm.py --model {model}"
    llama = f"PEERS={there} exec {sys.executable} {scripts}/bench_llamaserver.py --model {model} --parallel 16"
    ov = f"exec {there}/ov/bin/python {scripts}/bench_ov.py --model {model} --ir {there}/ir"
    hf = f"exec {there}/hf/bin/python {scripts}/bench_hf.py --mode cb --model {model}"
    return {
        OURS: (f"exec {sys.executable} -m benchmarks.ours --model {model}", ROOT),
        "vLLM": (vllm, there / "vllm_env.sh"),
        "vLLM, 256 tokens per step": (f"{vllm} --chunked 256", there / "vllm_env.sh"),
        "llama.cpp's server": (llama, there / "llamacpp_build" / "bin" / "llama-server"),
        "OpenVINO GenAI, 8-bit KV cache": (ov, there / "ov"),
        "OpenVINO GenAI": (f"{ov} --kv {args.dtype}", there / "ov"),
        "transformers, continuous batching": (hf, there / "hf"),
    }


def run(command: str, dtype: str, tokens_file: Path) -> list[dict[str, Any]]:
    """One start of an engine: a line for each workload."""
    own = " --started $(date +%s.%N)" if "benchmarks.ours" in command else ""
    options = f"--workload all --dtype {dtype} --save-outputs {tokens_file}{own}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    process = subprocess.run(
        ["bash", "-c", f"{command} {options}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or len(lines) != len(NAMES):
        raise SystemExit(f"{command}\nended with {process.returncode}, {len(lines)} results:\n{process.stderr[-2000:]}")
    return lines


@torch.inference_mode()
def agreement(llm: LLM, outputs: list[list[int]]) -> tuple[float, float]:
    """How an engine's tokens for W1's first requests stand beside float32's choice after the same tokens before them:
    the share that is the same, and by how much another was less likely at most (difference of logits)."""
    same, gaps = [], [0.0]
    for (prompt, _), output in zip(make("W1"), outputs, strict=False):
        text = prompt + output[:-1]
        metadata, ids, positions = pack_rows([PassRow(text, 0, len(text), [0])], len(text), torch.device("cpu"))
        cache = KVCache(llm.model.config, 1, len(text), torch.float32, torch.device("cpu"))
        hidden = llm.model(ids, positions, PagedAttention(cache, metadata, llm.model.config.sliding_window))
        logits = llm.model.compute_logits(hidden[len(prompt) - 1 :])
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        gap = logits.max(dim=1).values - chosen
        same += (gap == 0).tolist()
        gaps.append(gap.max().item())
    return sum(same) / len(same), max(gaps)


def report(lines: dict[str, list[list[dict[str, Any]]]], agreements: dict[str, tuple[float, float]], dtype: str) -> str:
    """The section of RESULTS.md."""
    rates = {
        engine: [[line["output_tok_per_s"] for line in (each[k] for each in rounds)] for k in range(len(NAMES))]
        for engine, rounds in lines.items()
    }
    medians = {engine: [statistics.median(values) for values in columns] for engine, columns in rates.items()}
    peers = [row for engine, row in medians.items() if engine != OURS]
    text = [
        f"## Beside other engines on a CPU ({date.today()})",
        "",
        wrapped(METHOD.format(dtype=dtype, rounds=len(lines[OURS]), machine=machine())),
        "",
        "| engine | " + " | ".join(f"{name}: {title}" for name, title in NAMES.items()) + " | float32's choice |",
        "|---|" + "---|" * (len(NAMES) + 1),
    ]
    for engine, columns in rates.items():
        cells = [
            f"{statistics.median(values):,.1f} ({', '.join(f'{value:,.0f}' for value in values)})" for values in columns
        ]
        share, gap = agreements[engine]
        text.append(f"| {engine} {lines[engine][0][0]['version']} | {' | '.join(cells)} | {share:.1%}, gap {gap:.2f} |")
    if peers:
        best = [max(row[k] for row in peers) for k in range(len(NAMES))]
        ratios = [f"**{ours / peer:.2f}**" for ours, peer in zip(medians[OURS], best, strict=True)]
        text.append(f"| minivllm to the best peer | {' | '.join(ratios)} | |")
    first = [line for each in lines[OURS] for line in each]
    outside = [line["outside_the_model"] for line in first if line["outside_the_model"] is not None]
    figures = {
        "start_up": statistics.median(line["start_up_s"] for line in first),
        "memory": max(line["peak_rss_gib"] for line in first),
        "outside": statistics.median(outside),
    }
    text += ["", wrapped(CHOICES), "", wrapped(REST.format(**figures))]
    return "\n".join(text)


def wrapped(text: str) -> str:
    """A paragraph in lines."""
    return textwrap.fill(" ".join(text.split()), 120)


def machine() -> str:
    """What was measured on."""
    units = ", ".join(name for name in ("amx-bf16", "avx512bf16", "avx512f", "avx2") if name in features())
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numba", "transformers"))
    return (
        f"{os.cpu_count()} cores of the kind {binding.get_host_cpu_name()} ({units or platform.machine()}), maybe "
        f"virtual ones; Python {platform.python_version()}, {versions}, {torch.get_num_threads()} threads."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the peers' scripts")
    parser.add_argument("--installed", type=Path, default=Path("peers-env"), help="folder with their environments")
    parser.add_argument("--only", nargs="*", help="engines whose name begins with one of these, and minivllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--dry", action="store_true", help="print the section and leave RESULTS.md as it is")
    args = parser.parse_args()
    args.model_folder, args.installed = resolve_model("smollm2-135m"), args.installed.resolve()
    engines = {
        name: command
        for name, (command, mark) in commands(args).items()
        if name == OURS or (args.peers and mark.exists() and (not args.only or name.startswith(tuple(args.only))))
    }
    lines: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in engines}
    outputs = {}
    tokens_file = Path(os.environ.get("TMPDIR", "/tmp")) / f"minivllm-bench-{os.getpid()}.json"
    for number in range(args.rounds):
        for name, command in engines.items():
            started = time.perf_counter()
            lines[name].append(run(command, args.dtype, tokens_file))
            rates = ", ".join(f"{line['workload']} {line['output_tok_per_s']:.1f}" for line in lines[name][-1])
            print(f"round {number + 1}, {name}: {rates} ({time.perf_counter() - started:.0f} s)", flush=True)
            if number == 0:
                outputs[name] = next(iter(json.loads(tokens_file.read_text()).values()))["outputs"]
            tokens_file.unlink(missing_ok=True)
    judge = LLM("smollm2-135m", dtype="float32", attention_backend="torch", num_kv_blocks=64)
    section = report(lines, {name: agreement(judge, tokens) for name, tokens in outputs.items()}, args.dtype)
    print("\n" + section)
    if not args.dry:
        RESULTS.write_text(replace_block(RESULTS.read_text(), OWNER, section))


if __name__ == "__main__":
    main()
