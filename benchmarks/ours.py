"""Runs the workloads on minivllm, one JSON line each, as the peers' scripts do: `python -m benchmarks.ours`."""

import argparse
import json
import resource
import statistics
import time
from typing import Any

import torch

import minivllm
from benchmarks.workloads import NAMES, Request, make, warm_up
from minivllm import LLM, SamplingParams

DTYPES = {"bf16": "bfloat16", "f32": "float32"}


class Clock:
    """How long each step took, and the model in it."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[tuple[int, float, float]] = []  # (tokens, seconds, of these in the model)
        self._model, self._tokens = 0.0, 0
        model, engine = llm.model, llm.engine
        forward, logits, step = model.forward, model.compute_logits, engine.step

        def timed_forward(input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
            self._tokens = len(input_ids)
            return self._timed(forward, input_ids, *others)

        def timed_step() -> Any:
            started, self._model = time.perf_counter(), 0.0
            result = step()
            self.steps.append((self._tokens, time.perf_counter() - started, self._model))
            return result

        model.forward, model.compute_logits = timed_forward, lambda hidden: self._timed(logits, hidden)
        engine.step = timed_step  # type: ignore[method-assign]

    def _timed(self, function: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        self._model += time.perf_counter() - started
        return result

    def share_outside(self, num_tokens: int) -> float | None:
        """The median share of a step of so many tokens that is spent outside the model."""
        shares = [1 - model / step for tokens, step, model in self.steps if tokens == num_tokens]
        return round(statistics.median(shares), 4) if shares else None


def run(llm: LLM, requests: list[Request]) -> tuple[float, float, list[list[int]]]:
    """Runs requests with an empty prefix cache; returns seconds, seconds to the first token, and the output ids."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    first = min(output.metrics.first_token_time - output.metrics.arrival_time for output in outputs)
    return elapsed, first, [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--workload", default="all", choices=[*NAMES, "all"])
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batched-tokens", type=int, default=2048)
    parser.add_argument("--save-outputs", help="file for the outputs of the first 8 requests of W1")
    parser.add_argument("--started", type=float, help="when the process was started, as time.time() gives it")
    args = parser.parse_args()
    options = {"attention_backend": args.backend, "max_num_batched_tokens": args.batched_tokens, "max_num_seqs": 64}
    llm = LLM(args.model, dtype=DTYPES[args.dtype], max_model_len=2048, **options)
    run(llm, [(make("W3")[0][0][:16], 1)])
    start_up = round(time.time() - args.started, 2) if args.started else None
    clock = Clock(llm)
    for name in NAMES if args.workload == "all" else [args.workload]:
        run(llm, warm_up(name))
        for _ in range(args.reps):
            clock.steps.clear()
            requests = make(name)
            elapsed, first, outputs = run(llm, requests)
            line = {"engine": "minivllm", "version": minivllm.__version__, "workload": name, "dtype": args.dtype}
            line |= {"output_tok_per_s": round(sum(map(len, outputs)) / elapsed, 2), "ttft_s": round(first, 4)}
            line |= {"outside_the_model": clock.share_outside(64), "start_up_s": start_up}
            line["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
            line["first_16_output_ids_of_request_0"] = outputs[0][:16]
            print(json.dumps(line), flush=True)
            if args.save_outputs and name == "W1":
                with open(args.save_outputs, "w") as file:
                    json.dump({"minivllm": {"outputs": outputs[:8]}}, file)


if __name__ == "__main__":
    main()
