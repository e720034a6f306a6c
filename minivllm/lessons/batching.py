"""Driving an engine through a workload, with the model or without it.

Without the model the scheduler and the memory are the real ones; only the pass is replaced by a stated price
per step and per token, on a clock that moves by it. Times are then simulated seconds, the same on every machine.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.cache_size import KVCacheSize
from minivllm.clock import VirtualClock
from minivllm.config import EngineConfig, check_int
from minivllm.engine import LLMEngine, ModelLimits
from minivllm.llm import make_manager
from minivllm.request import RequestOutput
from minivllm.sampling_params import SamplingParams, check_number
from minivllm.scheduler import ContinuousScheduler, RunnerOutput, SchedulerOutput, StaticScheduler
from minivllm.trace import Trace


@dataclass(frozen=True)
class Arrival:
    """A request of a workload.

    Attributes:
        prompt: its tokens.
        max_tokens: tokens it puts out; end-of-sequence tokens are ignored, so that workloads compare.
        at_step: the step before which it comes; steps without anybody count too.
        at_s: when it comes, in seconds after the start on the engine's clock. Not together with at_step.
    """

    prompt: list[int]
    max_tokens: int
    at_step: int = 0
    at_s: float = 0.0

    def __post_init__(self) -> None:
        check_int("at_step", self.at_step, minimum=0)
        check_number("at_s", self.at_s)
        if self.at_s < 0 or (self.at_s and self.at_step):
            raise ValueError(f"at_step is {self.at_step} and at_s {self.at_s}: give one of them, of at least 0")


@dataclass(frozen=True)
class Served:
    """What came of a workload: the trace, and the final outputs in the order of the workload."""

    trace: Trace
    outputs: list[RequestOutput]

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of every request."""
        return [output.outputs[0].token_ids for output in self.outputs]


def serve(engine: LLMEngine, workload: Sequence[Arrival]) -> Served:
    """Runs a workload to its end, greedily; requests are named R0, R1, … in its order.

    Raises:
        ValueError: the engine is busy, or a request can never run.
    """
    if engine.has_unfinished_requests():
        raise ValueError("the engine has requests that have not ended: step it until they have")
    pending = sorted(range(len(workload)), key=lambda i: (-workload[i].at_step, -workload[i].at_s, -i))
    finished: dict[str, RequestOutput] = {}
    trace = engine.start_recording()
    step, start = 0, engine.clock.now()
    try:
        while pending or engine.has_unfinished_requests():
            while pending and _has_come(workload[pending[-1]], step, engine.clock.now() - start):
                index = pending.pop()
                arrival = workload[index]
                params = SamplingParams(temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True)
                time = start + arrival.at_s if arrival.at_s else None
                engine.add_request(f"R{index}", arrival.prompt, params, arrival_time=time, output_kind="final_only")
            if not engine.has_unfinished_requests() and workload[pending[-1]].at_s:
                engine.clock.advance(start + workload[pending[-1]].at_s - engine.clock.now())
                continue
            finished.update({output.request_id: output for output in engine.step()})
            step += 1
    finally:
        engine.stop_recording()
        engine.abort_request([f"R{index}" for index in range(len(workload))])
        if engine.has_unfinished_requests():
            engine.step()
    return Served(trace, [finished[f"R{index}"] for index in range(len(workload))])


def _has_come(arrival: Arrival, step: int, elapsed_s: float) -> bool:
    return arrival.at_step <= step and arrival.at_s <= elapsed_s + 1e-9


class PricedRunner:
    """A runner without a model: a pass takes `step_s`, and `token_s` more per token. Its tokens mean nothing."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self.step_s, self.token_s = step_s, token_s
        self._behind: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        for name in plan.removed:
            self._behind.pop(name, None)
        for new in plan.new_requests:
            self._behind[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        sampled = {}
        for name, count in plan.num_scheduled_tokens.items():
            if name in plan.rerun:
                continue
            self._behind[name] -= count
            if self._behind[name] == 0:
                sampled[name] = [0] * plan.num_samples.get(name, 1)
                self._behind[name] = 1
        return RunnerOutput(sampled, {}, self.step_s + self.token_s * plan.num_tokens)


def model_free_engine(
    num_kv_blocks: int = 4096,
    step_s: float = 0.05,
    token_s: float = 0.002,
    keep_finished_rows: bool = True,
    enable_prefix_caching: bool = False,
    **fields: Any,
) -> LLMEngine:
    """An engine on a priced runner and a virtual clock.

    Args:
        num_kv_blocks: size of the pool.
        step_s: seconds that every pass takes: reading the weights.
        token_s: seconds more for each token.
        keep_finished_rows: as in `StaticScheduler`.
        enable_prefix_caching: off unless asked for, so that prompts which are mere lengths find nothing.
        **fields: of `EngineConfig`.
    """
    config = EngineConfig.from_fields(
        num_kv_blocks=num_kv_blocks, enable_prefix_caching=enable_prefix_caching, **fields
    )
    size = KVCacheSize(num_kv_blocks, config.block_size, 0, "num_kv_blocks")
    manager = make_manager(config, size, config.max_model_len or size.num_slots)
    if config.batching == "static":
        scheduler: StaticScheduler | ContinuousScheduler = StaticScheduler(config, manager, keep_finished_rows)
    else:
        scheduler = ContinuousScheduler(config, manager)
    limits = ModelLimits(vocab_size=2**31, max_model_len=config.max_model_len or 2**31)
    return LLMEngine(config, scheduler, PricedRunner(step_s, token_s), limits, clock=VirtualClock())


def spread_lengths(count: int, mean: float, cv: float, seed: int = 0) -> list[int]:
    """Answer lengths of a given mean and spread: lognormal, at least 1.

    Args:
        count: how many.
        mean: of the lengths, in tokens.
        cv: standard deviation over mean; 0 makes all lengths equal.
        seed: of the draw.
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    rng = random.Random(seed)
    drawn = [math.exp(rng.gauss(0, 1) * sigma) for _ in range(count)]
    scale = mean * count / sum(drawn)
    return [max(1, round(length * scale)) for length in drawn]
