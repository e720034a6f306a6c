"""A small trace of requests that share a beginning, in a pool so small that something is evicted."""

from minivllm.sampling_params import SamplingParams
from tests.fakes import make_engine

BEGINNING = list(range(1, 33))  # four blocks of 8
PROMPTS = {"A": [*BEGINNING, *range(40, 48)], "B": [*BEGINNING, *range(50, 60)], "C": list(range(70, 87))}


def shared_trace(**fields):
    """A computes five blocks; B, with two answers, finds four of them; C finds nothing, and takes a block of A."""
    engine = make_engine(**({"num_blocks": 8, "block_size": 8, "max_num_batched_tokens": 64} | fields))
    trace = engine.start_recording()
    for name, prompt in PROMPTS.items():
        params = SamplingParams(n=2 if name == "B" else 1, temperature=1.0, seed=1, max_tokens=3)
        engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
    engine.stop_recording()
    return trace
