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

from minivllm.cpu import compiled  # noqa: E402
from minivllm.cpu.decoder import CpuDecoder  # noqa: E402
from minivllm.cpu.paged_attention import NumbaAttention, attention_kernel  # noqa: E402
from minivllm.cpu.products import ROWS, WIDTH, PackedLinear, pack  # noqa: E402
from minivllm.cpu.vectors import as_numpy, exp, load, store  # noqa: E402
from minivllm.cpu.work import FEWEST_SHARERS, TILE_QUERIES, divide  # noqa: E402
from minivllm.model.decoder import Decoder  # noqa: E402

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
    assert seen == warm and len(warm) == 1


# --- the units of work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_work_is_dealt_evenly_and_completely(threads):
    starts = np.array([0, 1, 1, 41, 42, 43])
    lens = np.array([500, 90, 40, 0, 300])  # the second has no tokens, the fourth is padding
    work = divide(starts, lens, np.zeros((5, 32), np.int64), 16, 1, threads)
    expected = [[0, 1, 0, 0, 500], [1, 17, 2, 0, 16], [17, 33, 2, 0, 32], [33, 41, 2, 0, 40], [42, 43, 4, 0, 300]]
    assert work.units.tolist() == [[*unit, 0, 1] for unit in expected] and TILE_QUERIES == 16
    assert work.order.tolist() == list(range(43)) and not len(work.shared)
    assert work.bounds[0] == 0 and work.bounds[-1] == len(work.units) and len(work.bounds) == threads + 1
    assert (np.diff(work.bounds) >= 0).all()
    if threads == 2:
        assert work.bounds.tolist() == [0, 1, 5]  # 500 * 5, and 16 * 20 + 32 * 20 + 40 * 12 + 300 * 5
    nothing = divide(np.array([0, 1]), np.array([0]), np.zeros((1, 1), np.int64), 16, 1, threads)
    assert nothing.bounds.tolist() == [0] * (threads + 1)


def test_few_units_are_cut_by_heads():
    work = divide(np.array([0, 1]), np.array([100]), np.zeros((1, 7), np.int64), 16, 3, 2)
    assert work.units.tolist() == [[0, 1, 0, 0, 100, head, head + 1] for head in range(3)]
    many = divide(np.arange(10), np.full(9, 100), np.arange(63).reshape(9, 7), 16, 3, 2)
    assert many.units[:, 5:].tolist() == [[0, 3]] * 9


def test_what_decodes_begin_with_is_one_unit_for_all():
    """Their common blocks, as far as they are full for all; not those of a prefill, nor of too few."""
    table = np.array([[7, 3, 9, 1], [7, 3, 9, 2], [5, 0, 0, 0], [7, 3, 9, 4], [7, 3, 6, 0], [7, 3, 9, 8]])
    starts, lens = np.array([0, 1, 2, 3, 4, 5, 15]), np.array([30, 25, 9, 31, 24, 28])
    work = divide(starts, lens, table, 8, 1, 2)
    assert FEWEST_SHARERS == 4 and TILE_QUERIES == 16
    assert work.order[15:].tolist() == [0, 1, 3, 4]
    assert work.shared.tolist() == [[15, 17, 0, 0, 16, 0, 1], [17, 19, 0, 0, 16, 0, 1]]
    assert [unit[3] for unit in work.units.tolist()] == [16, 16, 0, 16, 16, 0]
    assert not len(divide(starts, lens, table, 8, 1, 2, sharing=False).shared)
    exact = np.array([16, 25, 9, 31, 24, 28])  # the first's last token is the last of the second block: its own
    assert divide(starts, exact, table, 8, 1, 2).shared[0].tolist() == [15, 17, 0, 0, 8, 0, 1]
    apart = table.copy()
    apart[[0, 1, 3, 4], 0] = [1, 1, 1, 2]
    assert not len(divide(starts, lens, apart, 8, 1, 2).shared)


# --- numbers -------------------------------------------------------------------------------------------------------


@numba.njit
def _bits(x, out):
    for i in range(0, len(x), 16):
        store(out, (i,), load(x, (i,)))


@numba.njit
def _exps(x, out):
    for i in range(0, len(x), 16):
        store(out, (i,), exp(load(x, (i,))))


def test_exp_is_exact_to_rounding():
    x = np.concatenate([np.linspace(-88, 0, 100_013), [-np.inf, np.nan, -1e30]]).astype(np.float32)
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


# --- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_torchs(dtype):
    """Every number of rows that a tile can have, and outputs that fill no block, with a bias and without."""
    torch.manual_seed(0)
    for num_outputs, bias in ((WIDTH, True), (2 * WIDTH + 5, False), (WIDTH - 16 + 1, True)):
        linear = torch.nn.Linear(70, num_outputs, bias).to(dtype)
        for num_tokens in (*range(1, ROWS + 2), 3 * ROWS + 3):
            x = torch.randn(num_tokens, 70).to(dtype)
            with torch.inference_mode():
                out, expected = PackedLinear(linear)(x), linear(x)
            assert out.dtype == dtype and out.shape == expected.shape
            assert (out.double() - expected.double()).abs().max() <= TOLERANCE[dtype]


def test_what_is_packed_beyond_the_matrix_is_zero():
    packed = pack([(torch.ones(5, 6), torch.ones(5)), (torch.ones(5, 6), None)])
    assert packed.weights.shape == (2, 1, 6, WIDTH) and packed.weights.sum() == 60
    assert packed.bias.tolist() == [[1] * 5 + [0] * (WIDTH - 5), [0] * WIDTH]


# --- the decoder ---------------------------------------------------------------------------------------------------


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


# --- where it can't run --------------------------------------------------------------------------------------------


def test_other_devices_types_and_a_missing_numba_are_refused_by_name(tiny_llama, monkeypatch, caplog):
    config = tiny_llama[1].config
    with pytest.raises(ValueError, match=r"in bfloat16, float32 or float64, and the model is on cpu in torch.float16"):
        resolve_attention("numba", config, CPU, torch.float16)
    with pytest.raises(ValueError, match=r"the model is on cuda in torch.float32"):
        resolve_attention("numba", config, torch.device("cuda"), torch.float32)
    assert fast_decoder("torch", tiny_llama[1]) is tiny_llama[1]
    monkeypatch.setitem(__import__("sys").modules, "minivllm.cpu.paged_attention", None)
    with pytest.raises(ValueError, match="install numba, or take 'torch'"):
        resolve_attention("numba", config, CPU, torch.float32)
    with caplog.at_level("WARNING"):
        assert resolve_attention("auto", config, CPU, torch.float32) is PagedAttention
    assert "attention in plain torch, which is slower: attention_backend 'numba'" in caplog.text
    assert fast_decoder("auto", tiny_llama[1]) is tiny_llama[1]


def test_a_wait_for_the_compiler_is_announced_once(tmp_path, monkeypatch, caplog):
    """And what was compiled from other sources is forgotten."""
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    (tmp_path / "loops.py").write_text("1")
    compiled.forget_what_is_stale(tmp_path)
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        compiled.announce(dtype)
    assert caplog.text.count("compiling the loops for torch.float32, once on this machine") == 1
    assert caplog.text.count("compiling the loops") == 2
    compiled.forget_what_is_stale(tmp_path)
    assert compiled.mark_of(torch.float32).exists()
    (tmp_path / "loops.py").write_text("2")
    compiled.forget_what_is_stale(tmp_path)
    assert not compiled.mark_of(torch.float32).exists()
