"""The fast path for CPUs gives what its references in plain torch give."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.backends import fast_decoder, resolve_attention
from minivllm.model.attention import KVCache, PagedAttention
from minivllm.model.inputs import PassInputs, PassRow
from tests.conftest import ORACLE, hf_generate
from tests.lessons.test_naive import random_prompts
from tests.test_identity import build_engine, run_staggered

numba = pytest.importorskip("numba")

from minivllm.cpu.decoder import CpuDecoder, PackedLinear, add_and_norm, rotate  # noqa: E402
from minivllm.cpu.numbers import as_numpy, exp, narrow  # noqa: E402
from minivllm.cpu.paged_attention import TILE_QUERIES, NumbaAttention, attention_kernel, divide  # noqa: E402
from minivllm.model.decoder import RMSNorm  # noqa: E402

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEAD_DIMS, RATIOS = (64, 80, 96, 256), (3, 1, 5, 17)
DTYPES, BLOCK_SIZES = (torch.float32, torch.bfloat16, torch.float64), (16, 1, 8, 24)
GRID = [
    (HEAD_DIMS[i], RATIOS[j], DTYPES[(i + j) % 3], BLOCK_SIZES[(i + 2 * j) % 4])
    for i, j in itertools.product(range(4), range(4))
]
MIXED = [(1, 17), (5, 5), (1, 1), (33, 70), (1, 15), (17, 17), (1, 16), (1, 200)]  # (query tokens, all tokens)


class Pass:
    """A pass over a pool that is full of NaN but for what its rows have stored before."""

    def __init__(self, rows, head_dim=64, ratio=3, dtype=torch.float32, block_size=16, kv_heads=2, padded=0):
        generator = torch.Generator().manual_seed(0)
        needed = [-(-length // block_size) for _, length in rows]
        self.cache = KVCache.__new__(KVCache)
        shape = (2, sum(needed) + 3, block_size, kv_heads, head_dim)
        self.cache.keys, self.cache.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        free, packed = torch.randperm(shape[1], generator=generator).tolist(), []
        for (count, length), blocks in zip(rows, needed, strict=True):
            table, free = free[:blocks], free[blocks:]
            packed.append(PassRow([0] * length, length - count, length, table))
            slots = [table[p // block_size] * block_size + p % block_size for p in range(length - count)]
            for memory in (self.cache.keys, self.cache.values):
                stored = torch.randn(2, len(slots), kv_heads, head_dim, generator=generator).to(dtype)
                memory.flatten(1, 2)[:, slots] = stored
        self.metadata, ids, _ = PassInputs(block_size, CPU).pack(packed, padded)
        heads = torch.randn(len(ids), (ratio + 2) * kv_heads, head_dim, generator=generator).to(dtype)
        self.qkv = heads.split((ratio * kv_heads, kv_heads, kv_heads), dim=1)  # strided, as the projection gives it

    def run(self, backend, window=None):
        """The output of layer 1, and what the cache then holds."""
        cache = copy.deepcopy(self.cache)
        return backend(cache, self.metadata, (None, window))(1, *self.qkv), cache

    def check(self, window=None):
        (out, cache), (expected, reference_cache) = (self.run(b, window) for b in (NumbaAttention, PagedAttention))
        assert out.dtype == expected.dtype and out.isfinite().all()
        assert (out.double() - expected.double()).abs().max() <= TOLERANCE[out.dtype]
        for ours, theirs in ((cache.keys, reference_cache.keys), (cache.values, reference_cache.values)):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


# --- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "ratio", "dtype", "block_size"), GRID)
def test_a_mixed_pass_equals_the_reference(head_dim, ratio, dtype, block_size):
    Pass(MIXED, head_dim, ratio, dtype, block_size).check()


@pytest.mark.parametrize("window", [1, 4, 16, 17, 100])
@pytest.mark.parametrize("block_size", [16, 5])
def test_a_window_ends_where_the_reference_says(window, block_size):
    Pass(MIXED, block_size=block_size).check(window)


def test_padded_rows_get_zeros_and_store_nothing():
    plain, padded = Pass(MIXED), Pass(MIXED, padded=3)
    (expected, cache), (out, padded_cache) = plain.run(NumbaAttention), padded.run(NumbaAttention)
    assert out.shape[0] == expected.shape[0] + 3 and (out[-3:] == 0).all()
    padded.check()
    assert torch.equal(cache.keys.isnan(), padded_cache.keys.isnan())


def test_broken_numbers_stay_with_their_request():
    """NaN, infinity, and a score that overflowed, in one request's query or keys."""
    for value in (torch.nan, torch.inf, -torch.inf):
        for part in range(3):
            case = Pass([(1, 20), (4, 4), (1, 30)])
            case.qkv[part][2] = value  # of the second request
            out, _ = case.run(NumbaAttention)
            reference, _ = case.run(PagedAttention)
            assert out[[0, 5]].isfinite().all() and not out[2].isfinite().any()
            assert torch.equal(out.isfinite(), reference.isfinite())


def test_the_kernel_is_compiled_before_the_first_pass(monkeypatch):
    """For one token and for many, and for a block table that is narrower than the buffer behind it."""
    seen = set()

    def noting(*arguments):
        seen.add(tuple(str(numba.typeof(argument)) for argument in arguments))
        attention_kernel(*arguments)

    monkeypatch.setattr("minivllm.cpu.paged_attention.attention_kernel", noting)
    NumbaAttention.warm_up(Pass(MIXED).cache, 6)
    warm = set(seen)
    for rows in ([(1, 40)], MIXED):
        case = Pass(rows)
        wider = torch.nn.functional.pad(case.metadata.block_table, (0, 3))
        case.metadata = replace(case.metadata, block_table=wider[:, :-3])
        case.check()
    assert seen == warm and len(warm) == 2


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_work_is_dealt_evenly_and_completely(threads, monkeypatch):
    monkeypatch.setattr("minivllm.cpu.paged_attention.num_threads", lambda: threads)
    starts = np.array([0, 1, 1, 41, 42, 43])
    lens = np.array([500, 90, 40, 0, 300])  # the second has no tokens, the fourth is padding
    units, bounds = divide(starts, lens)
    expected = [[0, 0, 1], [2, 0, 16], [2, 16, 16], [2, 32, 8], [4, 0, 1]]
    assert units.tolist() == expected and TILE_QUERIES == 16
    assert bounds[0] == 0 and bounds[-1] == len(units) and len(bounds) == threads + 1
    assert (np.diff(bounds) >= 0).all()
    if threads == 2:
        assert bounds.tolist() == [0, 2, 5]  # 500 + 256 scores, and 512 + 320 + 300
    assert divide(np.array([0, 1]), np.array([0]))[1].tolist() == [0] * (threads + 1)


# --- numbers -------------------------------------------------------------------------------------------------------


@numba.njit
def _bits(x, out):
    for i in range(len(x)):
        out[i] = narrow(x[i], out)


@numba.njit
def _exps(x, out):
    for i in range(len(x)):
        out[i] = exp(x[i])


def test_exp_is_exact_to_rounding():
    x = np.concatenate([np.linspace(-88, 0, 100_001), [-np.inf, np.nan, -1e30]]).astype(np.float32)
    out = np.empty_like(x)
    _exps(x, out)
    exact, normal = np.exp(x.astype(np.float64)), x > -87
    assert np.abs(out[normal] / exact[normal] - 1).max() < 2e-7
    assert out[-3] == 0 and np.isnan(out[-2]) and out[-1] == 0 and (out[:-3] >= 0).all()


def test_bfloat16_is_rounded_as_torch_rounds():
    torch.manual_seed(0)
    x = torch.randn(100_000) * 10.0 ** torch.randint(-38, 38, (100_000,))
    x[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])
    out = torch.empty(len(x), dtype=torch.bfloat16)
    _bits(x.numpy(), as_numpy(out))
    assert torch.equal(out.nan_to_num(7), x.bfloat16().nan_to_num(7)) and out[2].isnan()


# --- the decoder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_sum_and_norm_equal_the_decoders(dtype, num_tokens):
    torch.manual_seed(0)
    norm = RMSNorm(576, 1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    hidden, delta = torch.randn(2, num_tokens, 576).to(dtype)
    summed = hidden + delta
    with torch.inference_mode():
        assert torch.allclose(add_and_norm(hidden.clone(), None, norm), norm(hidden), atol=TOLERANCE[dtype])
        residual = hidden.clone()
        normed = add_and_norm(residual, delta, norm)
        assert torch.equal(residual, summed) and torch.allclose(normed, norm(summed), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_rotation_equals_the_decoders(tiny_llama, num_tokens):
    rotary, config = tiny_llama[1].rotary, tiny_llama[1].config
    heads = torch.randn(num_tokens, 5, config.head_dim, dtype=torch.float64)
    positions = torch.randint(0, rotary.num_positions, (num_tokens,))
    rotated = heads.clone()
    rotate(rotated, positions, rotary, 3)
    assert torch.allclose(rotated[:, :3], rotary(heads[:, :3], positions), atol=1e-12)
    assert torch.equal(rotated[:, 3:], heads[:, 3:])


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
    assert isinstance(decoder.lm_head, PackedLinear) == (
        dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )
    prompts = random_prompts([20, 3, 17, 33, 64])
    prompts.append(prompts[3] + [7])
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * len(prompts)
    fields = {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 24, "block_size": 8}
    engine = build_engine(decoder, 14, attention_backend="numba", **fields)
    assert engine.runner.attention is NumbaAttention
    outputs = run_staggered(engine, prompts, params, per_step=2)
    expected = [hf_generate(reference, prompt, 6) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected and not engine.runner.failures


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


# --- where it can't run --------------------------------------------------------------------------------------------


def test_other_devices_types_and_a_missing_numba_are_refused_by_name(tiny_llama, monkeypatch):
    config = tiny_llama[1].config
    with pytest.raises(ValueError, match=r"in bfloat16, float32 or float64, and the model is on cpu in torch.float16"):
        resolve_attention("numba", config, CPU, torch.float16)
    with pytest.raises(ValueError, match=r"the model is on cuda in torch.float32"):
        resolve_attention("numba", config, torch.device("cuda"), torch.float32)
    assert fast_decoder("auto", tiny_llama[1]) is fast_decoder("torch", tiny_llama[1]) is tiny_llama[1]
    monkeypatch.setitem(__import__("sys").modules, "minivllm.cpu.paged_attention", None)
    with pytest.raises(ValueError, match="install numba, or take 'torch'"):
        resolve_attention("numba", config, CPU, torch.float32)
