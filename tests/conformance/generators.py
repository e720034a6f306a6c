"""The load generators: how each is called, and where it says what it has seen.

They name the same things differently: what vLLM calls TPOT, (last token - first token) / (tokens - 1), is ITL to
guidellm and AIPerf.
"""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.environments import Tools


@dataclass(frozen=True)
class Reading:
    """What one side has counted of a run; times are means over the requests."""

    completed: int
    failed: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Run:
    """One call of a load generator.

    Attributes:
        name: for the report.
        command: as the shell takes it.
        read: makes a reading of what it has printed.
    """

    name: str
    command: str
    read: Callable[[str], Reading]


def runs(tools: Tools, url: str, model: str, folder: Path, out: Path) -> list[Run]:
    """All calls; vLLM's only where it is installed.

    Args:
        tools: how to call them.
        url: the server's.
        model: the name that it serves.
        folder: of the model, for its tokenizer.
        out: where they may write.
    """
    where, m, d = shlex.quote(url), shlex.quote(model), shlex.quote(str(folder))
    o = shlex.quote(str(out))
    vllm = f"--base-url {where} --model {m} --tokenizer {d} --dataset-name random --request-rate inf"
    vllm = f"{tools.vllm} bench serve {vllm} --ignore-eos --seed 0"
    percentiles = f"--percentile-metrics ttft,tpot,itl,e2el --save-result --result-dir {o} --result-filename r.json"
    guidellm = f"{tools.bin}/guidellm run --tokenizer kind=huggingface_auto,model={d}"
    guidellm += " --data kind=synthetic_text,prompt_tokens=64,output_tokens=16 --disable-console-interactive"
    backend = f"--backend kind=openai_http,target={where},model={m}"
    limit = "--constraint kind=max_requests,count"
    aiperf = f"{tools.bin}/aiperf profile --model {m} --tokenizer {d} --url {where} --streaming"
    aiperf += " --synthetic-input-tokens-mean 64 --synthetic-input-tokens-stddev 0 --output-tokens-mean 16"
    aiperf += " --output-tokens-stddev 0 --extra-inputs ignore_eos:true --random-seed 0 --ui none"

    def guide(name: str, options: str, file: str) -> Run:
        return Run(
            f"guidellm, {name}",
            f"{guidellm} {options} --output kind=json,path={o}/{file}",
            lambda _: from_guidellm(json.loads((out / file).read_text())),
        )

    def perf(name: str, options: str, subfolder: str) -> Run:
        return Run(
            f"AIPerf, {name}",
            f"{aiperf} {options} --artifact-dir {o}/{subfolder}",
            lambda _: from_aiperf(json.loads((out / subfolder / "profile_export_aiperf.json").read_text())),
        )

    of_vllm = [
        Run(
            "vllm bench serve, told no model",
            f"{tools.vllm} bench serve --base-url {where} --dataset-name random --random-input-len 64"
            " --random-output-len 16 --num-prompts 4 --ignore-eos --seed 1",
            from_vllm,
        ),
        Run(
            "vllm bench serve, completions, 16 at once",
            f"{vllm} --backend openai --random-input-len 128 --random-output-len 64 --num-prompts 32"
            f" --max-concurrency 16 --temperature 0 {percentiles}",
            from_vllm,
        ),
        Run(
            "vllm bench serve, chats, 4 at once",
            f"{vllm} --backend openai-chat --endpoint /v1/chat/completions --random-input-len 64 --random-output-len 16"
            " --num-prompts 4",
            from_vllm,
        ),
    ]
    return [
        *(of_vllm if tools.vllm else []),
        guide("chats, one by one", f"{backend} --profile kind=synchronous {limit}=4", "g1.json"),
        guide("chats, 2 at once", f"{backend} --profile kind=concurrent,streams=2 {limit}=8", "g2.json"),
        guide(
            "completions, 2 a second",
            f"{backend},request_format=/v1/completions --profile kind=constant,rate=2 {limit}=8",
            "g3.json",
        ),
        perf("chats, 2 at once", "--endpoint-type chat --concurrency 2 --request-count 6", "a1"),
        perf("completions, 2 at once", "--endpoint-type completions --concurrency 2 --request-count 6", "a2"),
    ]


def from_vllm(printed: str) -> Reading:
    """vLLM's, from the table that it prints."""

    def value(title: str) -> float:
        return float(re.findall(rf"^{re.escape(title)}:\s+([\d.]+)", printed, re.MULTILINE)[-1])

    return Reading(
        int(value("Successful requests")),
        int(value("Failed requests")),
        int(value("Total generated tokens")),
        value("Mean TTFT (ms)"),
        value("Mean TPOT (ms)"),
    )


def from_guidellm(report: dict[str, Any]) -> Reading:
    """guidellm's, from its JSON report."""
    [run] = report["benchmarks"]
    metrics = run["metrics"]
    totals = metrics["request_totals"]
    return Reading(
        totals["successful"],
        totals["errored"] + totals["incomplete"],
        round(metrics["output_token_count"]["successful"]["total_sum"]),
        metrics["time_to_first_token_ms"]["successful"]["mean"],
        metrics["inter_token_latency_ms"]["successful"]["mean"],
    )


def from_aiperf(report: dict[str, Any]) -> Reading:
    """AIPerf's, from its JSON report."""
    return Reading(
        round(report["request_count"]["avg"]),
        round((report.get("error_request_count") or {"avg": 0})["avg"]),
        round(report["total_usage_completion_tokens"]["avg"]),
        report["time_to_first_token"]["avg"],
        report["inter_token_latency"]["avg"],
    )


def from_server(before: dict[str, float], after: dict[str, float]) -> Reading:
    """Ours, from two looks at /metrics."""
    new = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def mean_ms(name: str) -> float:
        return 1000 * new[f"{name}_seconds_sum"] / max(new[f"{name}_seconds_count"], 1)

    return Reading(
        round(new["request_success_total length"] + new["request_success_total stop"]),
        round(new["request_success_total abort"] + new["request_success_total error"]),
        round(new["generation_tokens_total"]),
        mean_ms("time_to_first_token"),
        mean_ms("request_time_per_output_token"),
    )
