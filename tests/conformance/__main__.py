"""Runs every load generator against a server of its own, and compares what both have counted.

Passed if no request failed, both sides count the same requests and output tokens, the means of TTFT and TPOT differ by
at most 10 ms + 5 % (the client's TTFT has the connection and both event loops in it; all share this machine's
cores), and a property-based test over the server's OpenAPI document finds no 5xx and nothing that the document does
not tell.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import httpx

from benchmarks.process import MODEL, serving
from benchmarks.results import RESULTS, replace_block
from minivllm.lessons.serving import read_metrics
from minivllm.model.hub import resolve_model
from tests.conformance.environments import AIPERF, GUIDELLM, SCHEMATHESIS, make_tools
from tests.conformance.generators import Reading, Run, from_server, runs

ALLOWED_MS, ALLOWED_SHARE = 10.0, 0.05
HEAD = """| load generator | requests | output tokens | TTFT, its and ours (ms) | TPOT, its and ours (ms) |
|---|---|---|---|---|"""
METHOD = """`make conformance`: {tools} and vLLM's `vllm bench serve`, unmodified, {dtype}, with our server on the same
cores. No request failed, and both sides count the same requests and tokens. Means over the requests."""
PROPERTIES = "{tool} over the server's OpenAPI document: {said}; no 5xx, and nothing that it does not tell."


def faults(client: Reading, server: Reading) -> list[str]:
    """Where the two sides disagree, in words."""
    found = []
    if client.failed or server.failed:
        found.append(f"{client.failed} requests failed, as the client says, and {server.failed}, as the server says")
    for name in ("completed", "output_tokens"):
        theirs, ours = getattr(client, name), getattr(server, name)
        if theirs != ours or not theirs:
            found.append(f"{name}: {theirs} at the client, {ours} at the server")
    for name in ("ttft_ms", "tpot_ms"):
        theirs, ours = getattr(client, name), getattr(server, name)
        if not abs(theirs - ours) <= ALLOWED_MS + ALLOWED_SHARE * ours:
            found.append(f"{name}: {theirs:.1f} at the client, {ours:.1f} at the server")
    return found


def call(command: str, log: Path) -> tuple[int, str]:
    """Runs a shell command; its exit code and what it printed, which is also kept."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    process = subprocess.run(
        ["bash", "-c", command],
        cwd=log.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    log.write_text(process.stdout + process.stderr)
    return process.returncode, process.stdout


def warm_up(url: str) -> None:
    """One request of each kind, so that nothing is loaded or compiled any more when times are compared."""
    for path, asked in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        httpx.post(f"{url}{path}", json={**asked, "max_tokens": 2}, timeout=60).raise_for_status()


def measure(run: Run, url: str, log: Path) -> tuple[str, list[str]]:
    """One call; its line of the table, and what is wrong."""
    before = read_metrics(url)
    code, printed = call(run.command, log)
    if code:
        return f"| {run.name} | exit code {code} | | | |", [f"{run.name} ended with {code}: {log}"]
    client, server = run.read(printed), from_server(before, read_metrics(url))
    line = f"| {run.name} | {client.completed} | {client.output_tokens:,} "
    line += f"| {client.ttft_ms:.1f}, {server.ttft_ms:.1f} | {client.tpot_ms:.1f}, {server.tpot_ms:.1f} |"
    return line, [f"{run.name}: {fault}" for fault in faults(client, server)]


def properties(command: str, url: str, examples: int, log: Path) -> tuple[str, list[str]]:
    """The property-based test; a sentence, and what is wrong. What fits a schema and is refused all the same is no
    fault here: a document can't tell that two fields exclude each other, or which token ids a model has."""
    options = f"--checks all --exclude-checks positive_data_acceptance --max-examples {examples} --seed 1"
    code, printed = call(f"{command} run {url}/openapi.json {options} --continue-on-failure --warnings off", log)
    lines = [line.strip() for line in printed.splitlines() if "generated" in line]
    said = lines[-1] if lines else "nothing was run"
    return said, [f"schemathesis ended with {code}: {log}"] if code or not lines else []


def report(lines: list[str], said: str, wrong: list[str], dtype: str) -> str:
    """The block of RESULTS.md."""
    generators, tool = f"{GUIDELLM} and {AIPERF}".replace("==", " "), SCHEMATHESIS.replace("==", " ")
    method, verdict = METHOD.format(tools=generators, dtype=dtype), PROPERTIES.format(tool=tool, said=said)
    if wrong:
        method, verdict = "Not passed: " + "; ".join(wrong), said
    title = f"## Other people's load generators against our server ({date.today()})"
    return "\n".join([title, "", " ".join(method.split()), "", HEAD, *lines, "", verdict])


def main() -> int:
    """The exit code is 1 where something is wrong, or could not be run."""
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("--installed", type=Path, help="folder with vLLM, as for `make bench`")
    parser.add_argument("--pip-args", default="", help="for pip")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--examples", type=int, default=50, help="of the property-based test, for each operation")
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/RESULTS.md")
    args = parser.parse_args()
    tools, folder = make_tools(args.installed, args.pip_args), resolve_model(MODEL)
    out = Path(tempfile.mkdtemp(prefix="conformance-"))
    print(f"their logs are in {out}\n\n{HEAD}", flush=True)
    lines, wrong = [], []
    with serving(folder, args.port, out / "server.log", "--dtype", args.dtype) as (url, _):
        warm_up(url)
        for number, run in enumerate(runs(tools, url, MODEL, folder, out)):
            line, found = measure(run, url, out / f"{number}.log")
            print(line, flush=True)
            lines.append(line)
            wrong += found
    if tools.vllm is None:
        wrong.append(
            "vllm bench serve was not run: there is no vllm on the PATH; PEERS_ENV= names the folder that has it"
        )
    short = ("--dtype", args.dtype, "--max-model-len", "128")
    with serving(folder, args.port, out / "server2.log", *short) as (url, _):
        said, found = properties(tools.schemathesis, url, args.examples, out / "schemathesis.log")
        wrong += found
    print(f"\nschemathesis: {said}")
    for fault in wrong:
        print(f"FAILED: {fault}")
    if args.write:
        RESULTS.write_text(replace_block(RESULTS.read_text(), "conformance", report(lines, said, wrong, args.dtype)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
