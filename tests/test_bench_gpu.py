"""The GPU benchmark without a card: its arithmetic and its tables, and every measurement at tiny sizes.

The kernels are interpreted, which needs a process of its own: it runs this file as a program.
"""

import datetime
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu, gpu_engine, gpu_kernels, gpu_sections
from benchmarks.gpu_kernels import HeadShape, causal_flops, decode_bytes, layers_beyond, write_bytes
from benchmarks.gpu_report import Section, markdown, verdict
from benchmarks.gpu_sections import FULL, PARTS, QUICK, Sizes, measure
from benchmarks.gpu_timing import Bench, Measured, WrongResult, graph_timer, wall_timer
from benchmarks.results import markers

ROOT = Path(__file__).parents[1]
BEGIN, END = markers(gpu.OWNER)
SMALL = HeadShape("small", 6, 2, 16)
CONFIG = gpu_engine.LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)
TINY = Sizes(
    heads=(SMALL,),
    models=(("tiny", CONFIG),),
    copied_bytes=1_000,
    contexts=(20,),
    batches=(1, 3),
    against_torch=((20, 3),),
    prompts=(70,),
    writes=(19,),
    requests=(1, 2),
    lengths=(9, 2),
)


def millisecond(run):
    """A timer by which every run takes a millisecond."""
    run()
    return lambda: 1e-3


def make_bench(**changes):
    fields = {"device": torch.device("cpu"), "dtype": torch.float32, "timer": millisecond, "wall": millisecond}
    return Bench(**{**fields, "free_bytes": lambda: 2**32, "cache_bytes": 4_000, **changes})


def without_the_last_key(q, keys, values, metadata, real=gpu_kernels.attend):
    return real(q, keys, values, replace(metadata, seq_lens=metadata.seq_lens - 1))


def wrong_results(bench):
    """What is said of a kernel that gives something else: zeros, NaN, a key too few, or keys that are not stored."""
    said = []
    for name, broken, call in (
        ("attend", lambda q, *_: (torch.zeros_like(q), None), gpu_kernels.measure_decode),
        ("attend", lambda q, *_: (torch.full_like(q, torch.nan), None), gpu_kernels.measure_decode),
        ("attend", without_the_last_key, gpu_kernels.measure_decode),
        ("reshape_and_cache", lambda *_: None, gpu_kernels.measure_write),
    ):
        real = getattr(gpu_kernels, name)
        setattr(gpu_kernels, name, broken)
        try:
            call(bench, SMALL, 20, *([2] if name == "attend" else []))
        except WrongResult as error:
            said.append(str(error))
        setattr(gpu_kernels, name, real)
    return said


def program():
    """Runs in the interpreter: every part at tiny sizes, and broken kernels; prints what came out as JSON."""
    gpu_kernels.MIN_CALLS = 2
    bench = make_bench()
    sections = {section.title: vars(section) for section in measure(bench, TINY, tuple(PARTS))}
    half = replace(TINY, batches=(2,), against_torch=(), prompts=(17,))
    low = [len(s.rows) for s in measure(make_bench(dtype=torch.bfloat16), half, ("decode", "prefill", "write"))]
    print(json.dumps({"sections": sections, "bf16": low, "wrong": wrong_results(bench)}))


@pytest.fixture(scope="module")
def found():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "tests.test_bench_gpu"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_yardstick_counts_what_is_read_and_what_is_written(found):
    assert found["sections"]["Device copy"]["notes"] == [
        "0.0 GB/s, read and write counted: the best of 9 copies of 1,000 bytes."
    ]


def test_decode_gives_bytes_rates_and_shares(found):
    """A run takes 1 ms and has two calls, or one per layer: so many that the cache of 4,000 bytes holds a quarter of
    them. The copy moves 2,000 bytes in 1 ms."""
    section = found["sections"]["Decode attention"]
    assert [row[:2] for row in section["rows"]] == [["small", "20 × 1"], ["small", "20 × 3"]]
    moved = [decode_bytes(SMALL, 20, batch, 4) for batch in (1, 3)]
    assert [row[2] for row in section["rows"]] == [f"{work / 1e6:,.1f}" for work in moved]
    calls = [4, 2]
    assert [row[3] for row in section["rows"]] == ["250.0", "500.0"]
    assert [row[5] for row in section["rows"]] == [
        f"{work * count / 2_000:.1%}" for work, count in zip(moved, calls, strict=True)
    ]
    assert [row[6] for row in section["rows"]] == ["", "× 2.00"]
    assert section["notes"][1:] == ["Goal (at least 85% of the copy from 4,096 tokens × 32 requests up): not measured."]


def test_prefill_is_held_against_torch(found):
    section = found["sections"]["Prefill attention"]
    [[model, tokens, taken, _, torch_taken, share, kernel]] = section["rows"]
    assert (model, tokens, taken, torch_taken, share, kernel) == ("small", "70", "500.0", "500.0", "100.0%", "fused")
    assert section["notes"][1] == "Goal (at least 70% of torch's rate): met; the lowest is 100.0% (small 70)."


def test_the_kv_write_gives_its_share(found):
    [row] = found["sections"]["KV write"]["rows"]
    assert row[:3] == ["small", "19", "500.0"] and row[4] == f"{write_bytes(SMALL, 19, 4) * 2 / 2_000:.1%}"


def test_the_engine_gives_tokens_per_second(found):
    assert found["sections"]["End to end"]["rows"] == [
        ["tiny", "1", "2,000.0", "500.0", "× 1.00"],
        ["tiny", "2", "4,000.0", "500.0", ""],
    ]


def test_bfloat16_runs_too(found):
    assert found["bf16"] == [0, 1, 1, 1]


def test_a_wrong_kernel_is_named_before_it_is_timed(found):
    zeros, nan, too_few, write = found["wrong"]
    for said in (zeros, too_few):
        assert said.startswith(
            "the attention kernel is wrong on this device: heads of small, 2 request(s) of 20 tokens"
        )
    assert "it is off by nan from the reference, and 0.0001 is allowed" in nan
    assert write == "the KV write is wrong on this device: 20 keys of small, torch.float32"


def test_what_does_not_fit_is_left_out_and_named():
    free = [2**32]  # for the copy alone
    bench = make_bench(free_bytes=lambda: free.pop() if free else 0)
    _, *sections = measure(bench, TINY, tuple(PARTS))
    assert not any(section.rows for section in sections)
    start = "Left out, since it does not fit into the memory that is free: "
    names = ["small 20 × 1; small 20 × 3.", "small 70.", "small 19.", "tiny 1; tiny 2."]
    assert [section.notes[-1] for section in sections] == [start + name for name in names]


def test_bytes_and_operations():
    heads = HeadShape("any", 4, 2, 8)
    # Two tensors of 10 x 3 tokens of 2 heads of 8; queries and output of 3 tokens of 4 heads of 8.
    assert decode_bytes(heads, context=10, batch=3, itemsize=2) == 2 * 30 * 16 * 2 + 2 * 3 * 32 * 2
    assert write_bytes(heads, num_tokens=5, itemsize=2) == 2 * (2 * 5 * 16 * 2) + 5 * 8
    # 1 + 2 + 3 keys are seen, each with 8 multiplications and 8 additions in each of two products, by 4 heads.
    assert causal_flops(heads, 3) == 6 * 2 * 16 * 4
    assert Measured("any", "", work=10, seconds=2.0).rate == 5.0


def test_the_layers_are_larger_than_the_cache():
    assert layers_beyond(0, 100) == 1
    assert layers_beyond(100, 100) == 4
    assert layers_beyond(100, 150) == 3
    assert layers_beyond(100, 10**6) == 1
    assert layers_beyond(10**9, 1) == gpu_kernels.MAX_LAYERS


def test_medians_are_taken_in_turns():
    order, times = [], {"a": [3.0, 1.0, 2.0], "b": [9.0, 9.0, 4.0]}

    def sample(name):
        order.append(name)
        return times[name].pop()

    assert make_bench().medians([lambda: sample("a"), lambda: sample("b")]) == [2.0, 9.0]
    assert "".join(order) == "ababab"


def test_the_wall_timer_runs_once_per_sample():
    runs = []
    sample = wall_timer(lambda: runs.append(len(runs)))
    assert sample() >= 0 and sample() >= 0 and len(runs) == 2


def test_the_graph_timer_replays_what_it_recorded(monkeypatch):
    """With a card that notes what it is asked for, and on which a run takes 2 ms."""
    said = []

    class Card:
        def __init__(self, **_):
            self.at = len(said)

        def replay(self):
            said.append("replay")

        def record(self):
            self.at = said.count("replay")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 2.0 * (end.at - self.at)

    @contextmanager
    def recording(graph):
        said.append("begin")
        yield
        said.append("end")

    for name, stand_in in (("Stream", Card), ("CUDAGraph", Card), ("Event", Card), ("graph", recording)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    sample = graph_timer(lambda: said.append("run"))
    assert said == ["run", "wait", "begin", "run", "end", "replay", "replay"]
    assert sample() == 2e-3 and said[7:] == ["replay", "replay"]  # in 5 ms there is time for two


def test_memory_that_runs_out_leaves_one_case_out():
    def too_large():
        raise torch.OutOfMemoryError("out of memory")

    one = Measured("any", "", 1, 1.0)
    found, notes = gpu_sections.run_all({"a": too_large, "b": lambda: one, "c": lambda: None})
    assert found == {"b": one} and notes[0].endswith(": a; c.")


def test_the_goal_is_met_or_missed_in_words():
    assert verdict("x", 0.85, {}) == "Goal (x): not measured."
    assert verdict("x", 0.85, {"a": 0.85, "b": 0.9}) == "Goal (x): met; the lowest is 85.0% (a)."
    shares = {"a": 0.9, "b": 0.846, "c": 0.8}
    assert verdict("x", 0.85, shares) == "Goal (x): missed in 2 of 3; the lowest is 80.0% (c)."


def test_a_section_as_text_and_as_markdown():
    section = Section("Title", ("model", "µs"), [("a", "10.0"), ("long", "1.0")], ["A note."])
    assert section.as_text() == "Title\n  model    µs\n      a  10.0\n   long   1.0\n  A note."
    assert section.as_markdown() == (
        "### Title\n\n| model | µs |\n| --- | --- |\n| a | 10.0 |\n| long | 1.0 |\n\nA note."
    )


def test_the_block_says_when_where_and_how():
    text = markdown([Section("Title", notes=["A note."])], "Some card", "bfloat16", 3, datetime.date(2026, 12, 1))
    assert text.startswith(
        f"## On a card (2026-12-01)\n\n`make bench-gpu`: Some card; torch {torch.__version__}, triton "
    )
    assert "; bfloat16; " in text and "medians of 3 rounds" in text and text.endswith("\n\n### Title\n\nA note.")


def test_a_full_run_is_written_and_a_wrong_one_is_not(tmp_path, monkeypatch, capsys):
    def measured(bench, sizes, parts):
        assert sizes is FULL and parts == gpu.PARTS
        yield Section("Title", notes=["A note."])
        if wrong:
            raise WrongResult("the kernel is wrong")

    file = tmp_path / "RESULTS.md"
    file.write_text("# Figures\n")
    monkeypatch.setattr(gpu, "RESULTS", file)
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(gpu, "bench_on_card", lambda dtype: make_bench())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some card")
    monkeypatch.setattr(gpu_sections, "measure", measured)
    file.write_text(BEGIN)
    assert gpu.main(["--write"]) == 1 and capsys.readouterr().err.startswith("Stopped: the file of figures must have")
    file.write_text("# Figures\n")
    wrong = True
    assert gpu.main(["--write"]) == 1 and file.read_text() == "# Figures\n"
    assert capsys.readouterr().err == "Stopped: the kernel is wrong.\n"
    wrong = False
    assert gpu.main([]) == 0 and file.read_text() == "# Figures\n"
    assert gpu.main(["--write"]) == 0
    assert file.read_text().startswith(f"# Figures\n\n{BEGIN}\n## On a card (")
    assert "Some card" in file.read_text() and file.read_text().endswith(f"A note.\n{END}\n")


def test_without_a_card_it_says_so_in_one_sentence():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("bench-gpu needs a CUDA card, and torch ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--write", "--quick"], ["--write", "--only", "decode"], ["--only", "x"]])
def test_options_that_contradict_each_other_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        gpu.main(arguments)
    assert error.value.code == 2


def test_the_parts_and_the_shapes_are_those_that_are_promised():
    assert tuple(PARTS) == gpu.PARTS
    assert set(QUICK.heads) < set(FULL.heads)
    for (name, config), heads in zip(FULL.models, FULL.heads[:2], strict=True):
        read = gpu_engine.ModelConfig.from_hf(config)
        assert (name, read.num_heads, read.num_kv_heads, read.head_dim) == heads


if __name__ == "__main__":
    program()
