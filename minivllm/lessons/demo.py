"""`make demo`: a tour of about a minute in the terminal, on the real model.

First an answer is streamed; then the stages that exist so far write the same text, and their work, their
memory and their speed are laid side by side, and the engine runs answers of mixed lengths.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from minivllm import LLM
from minivllm.kv_cache import PagedKVCache
from minivllm.lessons.batching import Arrival, serve
from minivllm.lessons.naive import ConcatCache, Generation, SlabCache, generate
from minivllm.lessons.paged import generate_paged
from minivllm.tokenizer import encode, render_chat
from minivllm.trace import summarize

QUESTION = "Why do large language models need a key-value cache?"
STORY = "Operating systems divide memory into pages of a fixed size, because"
MIB = 2**20


def main() -> None:
    """Runs the tour."""
    started = time.perf_counter()
    llm = LLM("smollm2-135m", attention_backend="torch")  # the readable one, for all stages alike
    config = llm.model.config
    print(f"minivllm · {llm.config.model} · {llm.model.device}, {str(llm.model.dtype).removeprefix('torch.')}")
    print(
        f"loaded in {time.perf_counter() - started:.1f} s: {config.num_layers} layers, {config.num_heads} query heads"
    )
    print(f"on {config.num_kv_heads} KV heads, {llm.kv_bytes_per_token / 1024:.1f} KiB of keys and values per token\n")
    print(f"You: {QUESTION}\nModel: ", end="", flush=True)
    stream_answer(llm, QUESTION, max_tokens=64)
    compare_stages(llm, max_tokens=48, batch=4)
    compare_batching(llm, lengths=(16, 2, 2, 3, 2, 18, 3, 2, 3, 2, 17, 2), rows=4)


def stream_answer(llm: LLM, question: str, max_tokens: int) -> None:
    """Prints the answer to a question while it is generated."""
    text = render_chat(llm.tokenizer, [{"role": "user", "content": question}])
    prompt = encode(llm.tokenizer, text, add_special_tokens=False)
    printer = TextPrinter(llm.tokenizer)
    started, first = time.perf_counter(), []

    def on_token(row: int, token: int, reason: object) -> None:
        first.append(time.perf_counter() - started)
        printer.add(token)

    slab = SlabCache(len(prompt) + max_tokens)
    result = generate(llm.model, [prompt], max_tokens, slab, stop_token_ids=[llm.eos_token_ids], on_token=on_token)
    printer.close()
    count = len(result.token_ids[0])
    rate = (count - 1) / (first[-1] - first[0]) if count > 1 else 0.0
    print(f"\n\nfirst token after {first[0] * 1000:.0f} ms, then {rate:.1f} tokens/s\n")


def compare_stages(llm: LLM, max_tokens: int, batch: int) -> None:
    """Prints a table of the course's stages: same prompt, same tokens, different bills."""
    prompt = llm.tokenizer.encode(STORY)
    length, blocks = llm.max_model_len, -(-(len(prompt) + max_tokens) // 16)

    def stage(cache: ConcatCache | SlabCache | None, rows: int = 1) -> Callable[[], Generation]:
        return lambda: generate(llm.model, [prompt] * rows, max_tokens, cache)

    stages: dict[str, Callable[[], Generation]] = {
        "0 no cache": stage(None),
        "1 growing cache": stage(ConcatCache()),
        "2 slab": stage(SlabCache(length)),
        f"2 slab, batch of {batch}": stage(SlabCache(length), batch),
        f"3 blocks, batch of {batch}": lambda: generate_paged(
            llm.model, [prompt] * batch, max_tokens, PagedKVCache(batch * blocks, 16)
        ),
    }
    print(f"The same {max_tokens} tokens after a prompt of {len(prompt)}, by each stage:\n")
    print(f"{'stage':<20}{'tokens/s':>10}{'computed':>10}{'copied':>12}{'reserved':>13}{'used':>11}  same tokens")
    answers = []
    for name, run in stages.items():
        started = time.perf_counter()
        result = run()
        seconds, rows = time.perf_counter() - started, len(result.token_ids)
        answers += result.token_ids
        print(f"{name:<20}{rows * max_tokens / seconds:>10.1f}{_bill(result)}  {_same(answers)}")
    print("\ncomputed: tokens run through the model; copied, reserved, used: MiB of keys and values.")
    print("Most of what stage 2 reserves is never used; blocks are handed out one by one.\n")


def compare_batching(llm: LLM, lengths: Sequence[int], rows: int) -> None:
    """Prints what the engine makes of answers of mixed lengths, one by one, in static batches and continuously."""
    prompt = llm.tokenizer.encode(STORY)
    workload = [Arrival(prompt, length) for length in lengths]
    policies: dict[str, dict[str, Any]] = {
        "one by one": {"batching": "static", "max_num_seqs": 1},
        f"static, {rows} rows": {"batching": "static", "max_num_seqs": rows},
        f"continuous, {rows} rows": {"max_num_seqs": rows},
    }
    print(f"{len(lengths)} answers of {min(lengths)} to {max(lengths)} tokens, by the engine:\n")
    print(f"{'batching':<20}{'tokens/s':>10}{'steps':>8}{'useless rows':>14}  same tokens")
    answers: list[list[list[int]]] = []
    for name, fields in policies.items():
        run = serve(llm.reconfigure(**fields).engine, workload)
        summary = summarize(run.trace)
        answers.append(run.token_ids)
        useless, rate = summary.num_useless_tokens, summary.output_tokens_per_s
        print(f"{name:<20}{rate:>10.1f}{summary.num_steps:>8}{useless:>14}  {_same(answers)}")
    print("\nuseless rows: computed for answers that had ended. How and why is the course: make lab")


def _bill(result: Generation) -> str:
    work = result.work
    megabytes = [work.bytes_copied / MIB, work.bytes_reserved / MIB, work.bytes_used / MIB]
    return f"{work.tokens_computed:>10}{megabytes[0]:>12.1f}{megabytes[1]:>13.1f}{megabytes[2]:>11.1f}"


def _same(answers: Sequence[Any]) -> str:
    return "yes" if all(answer == answers[0] for answer in answers) else "near tie"


class TextPrinter:
    """Prints text as its tokens come in; a character whose bytes are not complete yet waits."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.token_ids, self.shown = tokenizer, list[int](), ""

    def add(self, token_id: int) -> None:
        """Takes one more token."""
        self.token_ids.append(token_id)
        text = self._text()
        if not text.endswith("\ufffd"):
            self._print(text)

    def close(self) -> None:
        """Prints what was held back."""
        self._print(self._text())

    def _text(self) -> str:
        return str(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))

    def _print(self, text: str) -> None:
        sys.stdout.write(text[len(self.shown) :])
        sys.stdout.flush()
        self.shown = text


if __name__ == "__main__":
    main()
