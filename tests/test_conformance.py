"""How load generators' figures are read, and when they count as ours. (Running them takes `make conformance`.)"""

from dataclasses import replace

import pytest

from tests.conformance.__main__ import faults
from tests.conformance.generators import Reading, from_aiperf, from_guidellm, from_server, from_vllm

SEEN = Reading(completed=4, failed=0, output_tokens=64, ttft_ms=100.0, tpot_ms=20.0)


@pytest.mark.parametrize(
    ("client", "server", "word"),
    [
        ({"failed": 1}, {}, "1 requests failed"),
        ({}, {"failed": 2}, "2, as the server says"),
        ({"completed": 3}, {}, "completed: 3 at the client, 4 at the server"),
        ({"completed": 0}, {"completed": 0}, "completed"),
        ({}, {"output_tokens": 65}, "output_tokens"),
        ({"ttft_ms": 115.1}, {}, "ttft_ms: 115.1"),
        ({"tpot_ms": 31.1}, {}, "tpot_ms"),
        ({"ttft_ms": float("nan")}, {}, "ttft_ms"),
    ],
)
def test_what_is_a_fault(client, server, word):
    [fault] = faults(replace(SEEN, **client), replace(SEEN, **server))
    assert word in fault


def test_what_is_none():
    assert faults(SEEN, SEEN) == []
    assert faults(replace(SEEN, ttft_ms=114.9, tpot_ms=30.9), SEEN) == []


def test_each_sides_figures_are_found():
    table = """
Successful requests:                     4
Failed requests:                         0
Total generated tokens:                  64
Mean TTFT (ms):                          100.00
Mean TPOT (ms):                          20.00
"""
    assert from_vllm(table) == SEEN

    def mean(value):
        return {"successful": {"mean": value, "total_sum": 4 * value}}

    metrics = {"request_totals": {"successful": 4, "errored": 0, "incomplete": 0}, "output_token_count": mean(16.0)}
    metrics |= {"time_to_first_token_ms": mean(100.0), "inter_token_latency_ms": mean(20.0)}
    assert from_guidellm({"benchmarks": [{"metrics": metrics}]}) == SEEN

    averages = {"request_count": 4.0, "total_usage_completion_tokens": 64.0, "time_to_first_token": 100.0}
    averages["inter_token_latency"] = 20.0
    assert from_aiperf({name: {"avg": value} for name, value in averages.items()}) == SEEN

    before = {"request_success_total stop": 3.0, "generation_tokens_total": 1000.0}
    after = {
        "request_success_total stop": 4.0,
        "request_success_total length": 3.0,
        "request_success_total abort": 0.0,
        "request_success_total error": 0.0,
        "generation_tokens_total": 1064.0,
        "time_to_first_token_seconds_sum": 0.4,
        "time_to_first_token_seconds_count": 4.0,
        "request_time_per_output_token_seconds_sum": 0.08,
        "request_time_per_output_token_seconds_count": 4.0,
    }
    assert from_server(before, after) == SEEN
