"""The decoder of compiled loops gives what the one in torch gives, alone and in the engine."""

import copy
import subprocess
import sys

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.backends import fast_decoder
from minivllm.model.attention import KVCache, PagedAttention
from minivllm.model.decoder import Decoder
from minivllm.model.inputs import PassInputs, PassRow
from tests.conftest import ORACLE, ROOT, hf_generate, tiny_hf_model
from tests.lessons.test_naive import random_prompts
from tests.test_identity import build_engine, run_staggered

pytest.importorskip("numba")

from minivllm.cpu.decoder import CpuDecoder
from minivllm.cpu.paged_attention import NumbaAttention
from tests.cpu.passes import CPU, DTYPES, TOLERANCE


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_decoder_equals_the_one_in_torch(tiny_pair, family, dtype):
    """With either attention, at few tokens and at more than one thread's share."""
    decoder = tiny_pair(family)[1].to(dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    fast = fast_decoder("numba", copy.deepcopy(decoder))
    assert type(decoder) is Decoder and type(fast) is CpuDecoder
    for count in (1, 3, 90):
        rows = [PassRow(list(range(count)), 0, count, list(range(20)))]
        metadata, ids, positions = PassInputs(8, CPU).pack(rows)
        results = []
        for model, backend in ((decoder, PagedAttention), (fast, NumbaAttention), (fast, PagedAttention)):
            cache = KVCache(model.config, 20, 8, dtype, CPU)
            with torch.inference_mode():
                hidden = model(ids, positions, backend(cache, metadata, model.config.sliding_window))
                results.append(model.compute_logits(hidden).double())
        scale = results[0].abs().max()
        for other in results[1:]:
            assert (other - results[0]).abs().max() <= 5 * TOLERANCE[dtype] * scale


def test_positions_that_have_no_angle_are_refused(tiny_pair):
    fast = fast_decoder("numba", tiny_pair("Llama")[1])
    for wrong in (-1, fast.rotary.num_positions):
        with pytest.raises(
            IndexError, match=rf"positions \[0, {wrong}\] are not all below {fast.rotary.num_positions}"
        ):
            fast(torch.tensor([1, 2]), torch.tensor([0, wrong]), lambda layer, q, k, v: q)


def test_a_model_that_the_loops_do_not_know_stays_in_torch(tiny_pair):
    decoder = tiny_pair("Llama", hidden_act="gelu")[1]
    assert fast_decoder("numba", decoder) is decoder


MIXED_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("Mistral", {"sliding_window": 7}), ("Qwen2", MIXED_WINDOWS), ("Qwen3", {})],
    ids=["Llama", "a window", "a window in one layer, biases", "norms of heads"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_engine_gives_the_same_tokens(tiny_pair, family, changes, dtype):
    """Mixed passes, chunks, a prefix cache and a pool so small that requests are preempted, filled with NaN before."""
    reference, decoder = tiny_pair(family, **changes)
    decoder = fast_decoder("numba", decoder.to(dtype))
    assert isinstance(decoder, CpuDecoder)
    prompts = random_prompts([20, 3, 17, 33, 64])
    prompts.append(prompts[3] + [7])
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * len(prompts)
    fields = {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 24, "block_size": 8}
    engine = build_engine(decoder, 14, attention_backend="numba", **fields)
    assert engine.runner.attention is NumbaAttention
    outputs = run_staggered(engine, prompts, params, per_step=2)
    expected = [hf_generate(reference, prompt, 6) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected and not engine.runner.failures


AFTER_SETUP = """
from pathlib import Path
import sys
import torch
from minivllm.backends import fast_decoder
from minivllm.cpu import decoder, paged_attention, precompile, products
from minivllm.model.weights import load_decoder
from tests.test_identity import build_engine, run_staggered
from minivllm import SamplingParams

precompile.precompile("float32")
entered = (decoder.all_layers, decoder.add_and_norm, products.product)  # from Python
known = [len(function.signatures) for function in entered]
assert known == [1, 1, 1], known
model = fast_decoder("auto", load_decoder(Path(sys.argv[1]), torch.device("cpu"), torch.float32))
engine = build_engine(model, 40, max_num_batched_tokens=48)
prompts = [list(range(2, 2 + count)) for count in (70, 70, 71, 72, 73, 3, 40)]
run_staggered(engine, prompts, [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 7, per_step=2)
assert not engine.runner.failures and engine.runner.attention is paged_attention.NumbaAttention
assert [len(function.signatures) for function in entered] == known
"""


@pytest.mark.parametrize(
    ("family", "changes"), [("Qwen2", {**MIXED_WINDOWS, "tie_word_embeddings": True}), ("Qwen3", {})]
)
def test_what_setup_compiles_is_all_that_any_model_needs(tmp_path, family, changes):
    """Nobody waits for the compiler in the middle of an answer. In a process of its own: others compile other types."""
    tiny_hf_model(family, **changes).save_pretrained(tmp_path)
    command = [sys.executable, "-c", AFTER_SETUP, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.real_model
def test_the_real_model_gives_the_frozen_tokens():
    llm = LLM("smollm2-135m", dtype="float32", attention_backend="numba", num_kv_blocks=256)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([case["prompt_token_ids"] for case in ORACLE["cases"]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [case["token_ids"] for case in ORACLE["cases"]]
    small = llm.reconfigure(num_kv_blocks=14, block_size=8)  # preempted, on the same packed weights
    outputs = small.generate([case["prompt_token_ids"] for case in ORACLE["cases"]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [case["token_ids"] for case in ORACLE["cases"]]


@pytest.mark.real_model
def test_the_real_model_in_bfloat16_stays_as_near_as_torch_does():
    """To float32, over the frozen prompts and answers: in the distributions, and in the likeliest token."""
    texts = [case["prompt_token_ids"] + case["token_ids"] for case in ORACLE["cases"]]

    def log_softmax(dtype, name, backend):
        model = LLM("smollm2-135m", dtype=dtype, attention_backend=name, num_kv_blocks=8).model
        rows = []
        for text in texts:
            cache = KVCache(model.config, 1, len(text), model.dtype, CPU)
            metadata, ids, positions = PassInputs(len(text), CPU).pack([PassRow(text, 0, len(text), [0])])
            with torch.inference_mode():
                hidden = model(ids, positions, backend(cache, metadata, model.config.sliding_window))
                rows.append(model.compute_logits(hidden).float().log_softmax(-1))
        return torch.cat(rows)

    exact = log_softmax("float32", "torch", PagedAttention)
    fast, plain = log_softmax("bfloat16", "numba", NumbaAttention), log_softmax("bfloat16", "torch", PagedAttention)
    distances = [(exact.exp() * (exact - other)).sum(-1).mean().item() for other in (fast, plain)]
    assert distances[0] <= 1.2 * distances[1] < 0.003
    assert (fast.argmax(-1) == exact.argmax(-1)).float().mean() >= 0.98
    following = torch.tensor([token for text in texts for token in [*text[1:], text[0]]])[
        :, None
    ]  # each text's last: any
    nll = [-rows.gather(1, following).mean().item() for rows in (exact, fast, plain)]
    assert abs(nll[1] - nll[0]) < max(0.01, 1.2 * abs(nll[2] - nll[0])), nll
