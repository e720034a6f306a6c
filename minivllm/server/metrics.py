"""Prometheus metrics with vLLM's names, labels and buckets, as far as this engine has something to count.

Counters and histograms are written by the engine's thread, once per step. What can be read off the engine at any time
is read when somebody asks, so that a gauge is right also when no step follows.

A request has arrived when its head is read: what is done before the engine has it (reading, templates, tokenising) is
part of its queue time and of its time to the first token, which is therefore what a client sees but for the connection.

A request counts its prompt's tokens when its first token is there; one that is aborted before counts none. Its times
and sizes are observed when it ends, however it ends, but for what it never came to. Answers beyond the first of one
prompt count as requests of their own, with no prompt.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from minivllm.engine import LLMEngine
from minivllm.request import Request
from minivllm.runner import NOT_FINITE
from minivllm.scheduler import SchedulerOutput

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, … up to a number."""
    return [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5) if digit * 10**power <= most]


class Metrics:
    """What is counted of an engine: its observer, and the text that /metrics gives.

    Attributes:
        registry: of its own, so that several servers of one process don't mix.
    """

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        """Begins at zero, and attaches itself to the engine."""
        self.registry, self._engine = CollectorRegistry(), engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self._seen: dict[str, tuple[int, float]] = {}  # tokens of a running answer, and when the last one came
        tokens = one_two_five(engine.limits.max_model_len)
        self.preemptions = self._counter("num_preemptions", "Requests that lost their memory")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that came to their first token")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Of these, found in the prefix cache")
        self.by_source = self._counter("prompt_tokens_by_source", "Prompt tokens by where they came from", "source")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers")
        self.success = self._counter("request_success", "Requests that ended, by how", "finished_reason")
        self.corrupted = self._counter("corrupted_requests", "Requests whose logits were not finite")
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step", STEP)
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer", TPOT)
        self.tpot = self._histogram("request_time_per_output_token_seconds", "The mean of these of a request", TPOT)
        self.times = {
            name: self._histogram(f"{name}_seconds", text, LATENCY)
            for name, text in (
                ("e2e_request_latency", "From arrival to the end"),
                ("request_queue_time", "From arrival to the first tokens scheduled"),
                ("request_inference_time", "From there to the end"),
                ("request_prefill_time", "From there to the first token"),
                ("request_decode_time", "From the first token to the end"),
            )
        }
        self.sizes = {
            name: self._histogram(name, text, tokens)
            for name, text in (
                ("request_prompt_tokens", "Tokens of the prompt"),
                ("request_generation_tokens", "Tokens of the answer"),
                ("request_max_num_generation_tokens", "Most tokens that the answer might have had"),
                ("request_params_max_tokens", "max_tokens, where it was given"),
                ("request_prefill_kv_computed_tokens", "Prompt tokens computed, and not found in the cache"),
            )
        }
        self.num_answers = self._histogram("request_params_n", "Answers asked for", SAMPLES)
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(**self._labels, finished_reason=reason)
        self.registry.register(EngineState(engine, self._labels))
        engine.observer = self

    def observe(self, plan: SchedulerOutput, touched: list[Request], start: float, end: float) -> None:
        """Books a step."""
        if plan.num_scheduled_tokens:
            self._of(self.step_tokens).observe(plan.num_tokens)
        preempted = sum(decision.kind == "preempt" for decision in plan.decisions)
        if preempted:
            self._of(self.preemptions).inc(preempted)
        for request in touched:
            before, last = self._seen.get(request.request_id, (0, request.arrival_time))
            new = request.num_output_tokens - before
            if new:
                self._of(self.generation_tokens).inc(new)
                if before == 0 and request.index == 0:
                    self._book_prompt(request, end)
                elif before:
                    self._of(self.itl).observe(end - last)
                self._seen[request.request_id] = request.num_output_tokens, end
            if request.status.finish_reason:
                self._seen.pop(request.request_id, None)
                self._book_end(request)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def _book_prompt(self, request: Request, now: float) -> None:
        cached, count = request.num_cached_tokens, request.num_prompt_tokens
        self._of(self.ttft).observe(now - request.arrival_time)
        self._of(self.prompt_tokens).inc(count)
        self._of(self.prompt_tokens_cached).inc(cached)
        for source, tokens in (("local_compute", count - cached), ("local_cache_hit", cached)):
            self.by_source.labels(**self._labels, source=source).inc(tokens)

    def _book_end(self, request: Request) -> None:
        self.success.labels(**self._labels, finished_reason=request.status.finish_reason).inc()
        if request.stop_reason == NOT_FINITE:
            self._of(self.corrupted).inc()
        arrival, scheduled = request.arrival_time, request.first_scheduled_time
        first, end, count = request.first_token_time, request.finished_time or 0.0, request.num_output_tokens
        self._of(self.times["e2e_request_latency"]).observe(end - arrival)
        if scheduled is not None:
            self._of(self.times["request_queue_time"]).observe(scheduled - arrival)
            self._of(self.times["request_inference_time"]).observe(end - scheduled)
            if first is not None:
                self._of(self.times["request_prefill_time"]).observe(first - scheduled)
        if first is not None:
            self._of(self.times["request_decode_time"]).observe(end - first)
            if count > 1:
                self._of(self.tpot).observe((end - first) / (count - 1))
        sizes = {
            "request_generation_tokens": count,
            "request_max_num_generation_tokens": request.max_num_tokens - request.num_prompt_tokens,
        }
        if request.params.max_tokens is not None:
            sizes["request_params_max_tokens"] = request.params.max_tokens
        if request.index == 0:
            sizes["request_prompt_tokens"] = request.num_prompt_tokens
            sizes["request_prefill_kv_computed_tokens"] = request.num_prompt_tokens - request.num_cached_tokens
            self._of(self.num_answers).observe(request.params.n)
        for name, value in sizes.items():
            self._of(self.sizes[name]).observe(value)

    def _of(self, metric: Any) -> Any:
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, [*self._labels, *labels], registry=self.registry)
        if not labels:
            self._of(counter)
        return counter

    def _histogram(self, name: str, text: str, buckets: Any) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self.registry)
        self._of(histogram)
        return histogram


class EngineState(Collector):
    """What is read off the engine when somebody asks."""

    def __init__(self, engine: LLMEngine, labels: dict[str, str]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Any]:
        """Gauges, and the prefix cache's own counters."""
        scheduler, manager = self._engine.scheduler, self._engine.scheduler.manager
        deferred = sum(d.kind == "wait" and d.cause == "prefix" for d in self._engine.last_decisions)
        waiting = len(scheduler.waiting)
        running = sum(request.status.finish_reason is None for request in list(scheduler.running))
        yield self._gauge("num_requests_running", "Requests with memory", running)
        yield self._gauge("num_requests_waiting", "Requests without", waiting)
        reasons = {"capacity": max(waiting - deferred, 0), "deferred": min(deferred, waiting)}
        gauge = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Why they wait", labels=[*self._labels, "reason"]
        )
        for reason, count in reasons.items():
            gauge.add_metric([*self._labels.values(), reason], count)
        yield gauge
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that is in use, 0 to 1", manager.usage)
        fields = {**asdict(self._engine.config), "num_gpu_blocks": manager.num_blocks}
        names: tuple[str, ...] = (
            "block_size",
            "num_gpu_blocks",
            "enable_prefix_caching",
            "prefix_caching_hash_algo",
            "kv_cache",
        )
        names = (*names, "gpu_memory_utilization", "num_kv_blocks", "kv_cache_memory_bytes", "reservation")
        info = GaugeMetricFamily("vllm:cache_config_info", "Options of the KV cache", labels=[*self._labels, *names])
        info.add_metric([*self._labels.values(), *(str(fields[name]) for name in names)], 1)
        yield info
        stats = self._engine.prefix_cache_stats
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked for in the prefix cache", stats.queries),
            ("prefix_cache_hits", "Tokens found there", stats.hits),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge
