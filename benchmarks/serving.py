"""What HTTP costs: 16 streams from our server against the same work in this process, in turns. The same engine options,
prompts and tokens; greedy, ends ignored, prefix caching off, so that every round computes everything.

In process, `LLM.generate` gets all requests at once. Over HTTP they go to a server in a process of its own, which has
the same cores; the client counts events and parses them when the time has stopped, so that what is measured is the
server's work. Run: python -m benchmarks.serving [--write]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

from benchmarks.process import MODEL, serving
from benchmarks.results import RESULTS, replace_block
from minivllm import LLM, SamplingParams
from minivllm.model.hub import resolve_model

STREAMS, PROMPT, OUTPUT = 16, 64, 128


async def stream(port: int, prompt: list[int]) -> list[bytes]:
    """One streamed completion: its events as they came, by the plainest client there is."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(payload), payload)
    )
    events = [line async for line in reader if line.startswith(b"data: ")]
    writer.close()
    return events


def over_http(port: int, prompts: list[list[int]]) -> tuple[float, list[str]]:
    """Seconds, and the texts."""

    async def all_streams() -> list[list[bytes]]:
        return await asyncio.gather(*(stream(port, prompt) for prompt in prompts))

    begin = time.perf_counter()
    streams = asyncio.run(all_streams())
    seconds, texts = time.perf_counter() - begin, []
    for events in streams:
        parts = [json.loads(event[6:]) for event in events[:-1]]
        assert events[-1].strip() == b"data: [DONE]" and parts[-1]["usage"]["completion_tokens"] == OUTPUT
        assert len(parts) == OUTPUT + 1
        texts.append("".join(part["choices"][0]["text"] for part in parts[:-1]))
    return seconds, texts


def in_process(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[str]]:
    """Seconds, and the texts."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, [output.outputs[0].text for output in outputs]


def main() -> None:
    """Prints the figures; `--write` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, default=8012)
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/RESULTS.md")
    args = parser.parse_args()
    folder = resolve_model(MODEL)
    prompts = [[3 + (7919 * row + 31 * place) % 49_000 for place in range(PROMPT)] for row in range(STREAMS)]
    llm = LLM(str(folder), dtype=args.dtype, enable_prefix_caching=False, num_kv_blocks=2000)
    options = ("--dtype", args.dtype, "--no-enable-prefix-caching", "--num-kv-blocks", "2000")
    log = Path(tempfile.mkdtemp()) / "server.log"
    rates: dict[str, list[float]] = {"in process": [], "over HTTP": []}
    with serving(folder, args.port, log, *options):
        for number in range(args.rounds + 1):
            alone, texts = in_process(llm, prompts)
            served, streamed = over_http(args.port, prompts)
            assert streamed == texts, "the two gave different texts"
            if number:  # the first round warms up
                for name, seconds in (("in process", alone), ("over HTTP", served)):
                    rates[name].append(STREAMS * OUTPUT / seconds)
    ratios = [http / own for own, http in zip(rates["in process"], rates["over HTTP"], strict=True)]
    lines = [
        f"## What HTTP costs ({date.today()})",
        "",
        f"`benchmarks/serving.py`: {STREAMS} streams of {PROMPT} tokens in and {OUTPUT} out, {args.dtype}, the same "
        f"texts; {args.rounds} rounds in turns, medians and, in brackets, all rounds. Output tokens/s.",
        "",
        "| in process | over HTTP, streamed | ratio |",
        "|---|---|---|",
        "| "
        + " | ".join(f"{statistics.median(row):.0f} ({', '.join(f'{r:.0f}' for r in row)})" for row in rates.values())
        + f" | **{statistics.median(ratios):.2f}** ({', '.join(f'{ratio:.2f}' for ratio in ratios)}) |",
    ]
    print("\n".join(lines))
    if args.write:
        RESULTS.write_text(replace_block(RESULTS.read_text(), "serving", "\n".join(lines)))


if __name__ == "__main__":
    main()
