"""The kernels give what their torch references give.

They run on a GPU where there is one, else in Triton's interpreter, which needs a process of its own:
`test_interpreter.py` starts it on this file.
"""

import os
from itertools import combinations, pairwise, product

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.model.attention import masked_attention, write_kv
from minivllm.model.attention import paged_attention as reference
from minivllm.model.inputs import PassRow, pack_rows
from tests.conftest import ORACLE, hf_generate
from tests.lessons.test_naive import random_prompts
from tests.pools import scattered
from tests.test_identity import build_engine, run_staggered

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_interpreter.py runs this file in a process of its own", allow_module_level=True)

from minivllm.kernels.launch import Launch, choose_launch, choose_splits  # noqa: E402
from minivllm.kernels.paged_attention import merge_kernel, paged_attention, paged_attention_kernel  # noqa: E402
from minivllm.kernels.reshape_and_cache import reshape_and_cache  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMIT = 101_376  # of an sm_89 card
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

HEAD_DIMS, RATIOS = (64, 80, 96, 112, 128, 256), (3, 1, 5, 7, 8, 17, 32)
DTYPES, BLOCK_SIZES = (torch.float32, torch.float16, torch.bfloat16), (1, 8, 16, 24, 48)
PAIRWISE = [
    (HEAD_DIMS[i], RATIOS[j], DTYPES[(i + 2 * j) % 3], BLOCK_SIZES[(i + j) % 5])
    for i, j in product(range(len(HEAD_DIMS)), range(len(RATIOS)))
]
MIXED = [(1, 17), (5, 5), (1, 1), (16, 40), (1, 15), (17, 17), (1, 16)]  # (query tokens, all tokens) of each request


class Case:
    """A pool full of NaN but for what the rows have stored, and their queries."""

    def __init__(self, rows, head_dim=64, ratio=3, dtype=torch.float32, block_size=16, kv_heads=2, seed=0):
        torch.manual_seed(seed)
        packed, slots_of_rows, num_blocks = scattered(rows, block_size)
        shape = (num_blocks, block_size, kv_heads, head_dim)
        self.keys = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        self.values = self.keys.clone()
        for slots in slots_of_rows:
            for memory in (self.keys, self.values):
                memory.flatten(0, 1)[slots] = torch.randn(len(slots), *shape[2:]).to(memory)
        self.metadata, ids, _ = pack_rows(packed, block_size, DEVICE)
        self.q = torch.randn(len(ids), kv_heads * ratio, head_dim).to(device=DEVICE, dtype=dtype)
        self.launch = choose_launch(head_dim, ratio, self.q.itemsize, LIMIT, max(count for count, _ in rows))

    def run(self, window=None, num_splits=1, launch=None):
        m = self.metadata
        where = (m.query_start_loc, m.seq_lens, m.block_table)
        return paged_attention(self.q, self.keys, self.values, *where, launch or self.launch, window, num_splits)

    def check(self, window=None, num_splits=1, launch=None):
        """Asserts that kernel and reference agree."""
        out, lse = self.run(window, num_splits, launch)
        expected, expected_lse = reference(self.q, self.keys, self.values, self.metadata, window)
        assert out.isfinite().all() and out.dtype == self.q.dtype
        assert (out.double() - expected.double()).abs().max() <= TOLERANCE[self.q.dtype]
        assert (lse - expected_lse).abs().max() <= 1e-4


def test_the_grid_holds_every_pair():
    for left, right in combinations(range(4), 2):
        sizes = [HEAD_DIMS, RATIOS, DTYPES, BLOCK_SIZES]
        assert {(case[left], case[right]) for case in PAIRWISE} == set(product(sizes[left], sizes[right]))


@pytest.mark.parametrize(("head_dim", "ratio", "dtype", "block_size"), PAIRWISE)
def test_a_mixed_pass_equals_the_reference(head_dim, ratio, dtype, block_size):
    Case(MIXED, head_dim, ratio, dtype, block_size, kv_heads=1 if ratio > 8 else 2).check()


@pytest.mark.parametrize("num_splits", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 1000])
def test_splits_change_nothing(length, num_splits):
    Case([(1, length), (1, 1), (1, 40)]).check(num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 16, 17, 100])
def test_a_window_ends_where_the_reference_says(window, num_splits):
    Case([*MIXED, (1, 90), (40, 130)]).check(window, num_splits)


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 15, 16])
def test_every_query_has_a_tile(num_tokens):
    """Ratio 3 makes tiles of 5 queries and a spare row; 17 makes tiles of one."""
    for ratio in (3, 17):
        Case([(num_tokens, num_tokens + 3), (1, 4)], ratio=ratio, kv_heads=1).check(
            launch=choose_launch(64, ratio, 4, LIMIT)
        )


@pytest.mark.parametrize("ratio", [3, 5, 7])
def test_no_head_reads_another_ones(ratio):
    """Every KV head holds a constant of its own, so any mix-up shows."""
    case = Case(MIXED, ratio=ratio, kv_heads=3)
    for head in range(3):
        case.values[:, :, head] = torch.where(case.values[:, :, head].isnan(), torch.nan, float(head + 1))
    out, _ = case.run()
    expected = torch.arange(1, 4.0, device=DEVICE).repeat_interleave(ratio)[None, :, None]
    assert (out - expected).abs().max() < 1e-5


def test_padded_rows_are_left_alone():
    """Length 0 in the middle and behind the end, with a table of nonsense and tokens that belong to nobody."""
    case = Case([(1, 20), (3, 9)])
    m, (out, lse) = case.metadata, case.run()
    table = torch.cat(
        [m.block_table[:1], m.block_table.new_full((1, m.block_table.shape[1]), 10**6), m.block_table[1:]]
    )
    padded_table = torch.cat([table, table[1:2]])
    starts = torch.tensor([0, 1, 2, 5, 8], device=DEVICE)
    lens = torch.tensor([20, 0, 9, 0], device=DEVICE)
    q = torch.cat(
        [case.q[:1], torch.full_like(case.q[:1], torch.nan), case.q[1:], torch.full_like(case.q[:3], torch.nan)]
    )
    for num_splits in (1, 4):
        found, found_lse = paged_attention(
            q, case.keys, case.values, starts, lens, padded_table, case.launch, None, num_splits
        )
        real, padding = [0, 2, 3, 4], [1, 5, 6, 7]
        assert (found[real] - out).abs().max() < 1e-6 and (found_lse[real] - lse).abs().max() < 1e-5
        assert (found[padding] == 0).all() and (found_lse[padding] == -torch.inf).all()


def test_merging_two_empty_parts_gives_an_empty_one():
    parts = torch.zeros(2, 1, 1, 64, device=DEVICE)
    part_lse = torch.full((2, 1, 1), -torch.inf, device=DEVICE)
    out, lse = torch.full((1, 1, 64), 7.0, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    merge_kernel[(1,)](out, lse, parts, part_lse, 1, 2, HEAD_DIM=64, WIDTH=64, SPLITS=2)
    assert (out == 0).all() and lse.item() == -torch.inf


def test_parts_merge_to_the_whole():
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, length, heads, 80, device=DEVICE) for length, heads in ((1, 4), (30, 4), (30, 4)))
    visible = torch.ones(1, 1, 30, dtype=torch.bool, device=DEVICE)
    whole, whole_lse = masked_attention(q, k, v, visible)
    ends = [0, 4, 4, 29, 30]  # one part is empty
    parts = [
        masked_attention(q, k[:, a:b], v[:, a:b], visible[..., a:b])
        if b > a
        else (torch.zeros_like(q), torch.full((1, 1, 4), -torch.inf, device=DEVICE))
        for a, b in pairwise(ends)
    ]
    out, lse = torch.empty(1, 4, 80, device=DEVICE), torch.empty(1, 4, device=DEVICE)
    outs, lses = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    merge_kernel[(4,)](out, lse, outs, lses, 4, 4, HEAD_DIM=80, WIDTH=128, SPLITS=4)
    assert (out - whole[0]).abs().max() < 1e-6 and (lse - whole_lse[0]).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(3, 64, 16), (1, 80, 1), (2, 112, 24)])
def test_keys_and_values_go_into_their_slots(dtype, kv_heads, head_dim, block_size):
    torch.manual_seed(0)
    shape = (6, block_size, kv_heads, head_dim)
    keys, values = (torch.full(shape, 9.0, dtype=dtype, device=DEVICE) for _ in range(2))
    expected = keys.clone(), values.clone()
    slots = torch.tensor([5, -1, 0, 6 * block_size - 1, -1, 2], device=DEVICE)
    # As they come out of a fused projection: the tokens stand further apart than their heads are wide.
    qkv = torch.randn(6, 4 * kv_heads, head_dim).to(device=DEVICE, dtype=dtype)
    k, v = qkv[:, 2 * kv_heads : 3 * kv_heads].clone(), qkv[:, 3 * kv_heads :]
    reshape_and_cache(k, v, keys, values, slots)
    write_kv(k, v, *expected, slots)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    with pytest.raises(ValueError, match=r"6 tokens of \d heads of"):
        reshape_and_cache(k[:, :, :-1], v, keys, values, slots)
    if kv_heads == 1:
        return
    with pytest.raises(ValueError, match="the heads of a token must be contiguous"):
        reshape_and_cache(k.mT.contiguous().mT, v, keys, values, slots)


MIXED_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Mistral", {}), ("Mistral", {"sliding_window": 7}), ("Qwen2", MIXED_WINDOWS)],
    ids=["full", "window", "a window in one layer"],
)
def test_the_engine_gives_the_same_tokens_on_the_kernels(tiny_pair, family, changes):
    """Mixed passes, chunks, a prefix cache and a pool so small that requests are preempted, filled with NaN before."""
    reference_model, decoder = tiny_pair(family, **changes)
    decoder = decoder.float().to(DEVICE)
    prompts = random_prompts([20, 3, 17, 33])
    prompts.append(prompts[3] + [7])
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * len(prompts)
    fields = {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 12, "block_size": 8}
    engine = build_engine(decoder, 12, attention_backend="triton", **fields)
    assert engine.runner.attention.__name__ == "TritonAttention"
    outputs = run_staggered(engine, prompts, params, per_step=2)
    expected = [hf_generate(reference_model, prompt, 6) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected and not engine.runner.failures


@pytest.mark.real_model
def test_the_real_model_gives_the_frozen_tokens_on_the_kernels():
    device = DEVICE.type
    llm = LLM("smollm2-135m", device=device, dtype="float32", num_kv_blocks=64, attention_backend="triton")
    cases = sorted(ORACLE["cases"], key=lambda case: len(case["prompt_token_ids"]))[:4]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([case["prompt_token_ids"] for case in cases], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [case["token_ids"][:4] for case in cases]


def test_a_spare_row_writes_nothing():
    """The first tile alone, of 5 queries and a spare row: the token behind them is the next tile's."""
    case = Case([(6, 9)])
    m, launch = case.metadata, Launch(block_m=16, block_q=5, tile_n=16, num_warps=4, num_stages=1)
    out, lse = torch.zeros_like(case.q), torch.full(case.q.shape[:2], -torch.inf, device=DEVICE)
    places = (out, lse, case.q, case.keys, case.values, m.block_table, m.query_start_loc, m.seq_lens)
    constants = {"NUM_HEADS": 6, "RATIO": 3, "HEAD_DIM": 64, "WIDTH": 64, "BLOCK_SIZE": 16, "BLOCK_M": 16}
    constants |= {"BLOCK_Q": 5, "TILE_N": 16, "PRECISION": "ieee", "WIDEN": False}
    paged_attention_kernel[(1, 2, 1)](*places, 0.125, 1, 6, 0, m.block_table.stride(0), 1, **constants)
    expected, _ = case.run(launch=launch)
    assert torch.equal(out[:5], expected[:5]) and (out[5] == 0).all() and (lse[5] == -torch.inf).all()


@pytest.mark.parametrize(("head_dim", "ratio"), [(80, 3), (64, 5), (112, 7)])
def test_nothing_around_the_tensors_is_read_or_written(head_dim, ratio, monkeypatch):
    """Queries between NaN, keys and values at the very end of their memory, and outputs between guard numbers."""
    case = Case(MIXED, head_dim, ratio)
    expected, _ = case.run()
    size, guards = case.q.numel(), 4096
    around = torch.full((size + 2 * guards,), torch.nan, device=DEVICE)
    around[guards : guards + size] = case.q.flatten()
    case.q = around[guards : guards + size].view_as(case.q)
    outputs = []

    def guarded(like, **options):
        memory = torch.full((like.numel() + 2 * guards,), 7.0, device=DEVICE)
        outputs.append(memory)
        return memory[guards : guards + like.numel()].view_as(like).zero_()

    monkeypatch.setattr("minivllm.kernels.paged_attention.torch.zeros_like", guarded)
    out, _ = case.run()
    assert torch.equal(out, expected)
    assert (outputs[0][:guards] == 7).all() and (outputs[0][-guards:] == 7).all()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_score_that_overflowed_is_not_hidden(num_splits):
    """Plain torch gives NaN where the only score is minus infinity; 0 would look sound."""
    case = Case([(1, 1), (2, 2)])
    case.keys[..., 0] = torch.where(case.keys[..., 0].isnan(), torch.nan, -1.0)
    case.q[0, :, 0] = torch.inf
    out, _ = case.run(num_splits=num_splits)
    assert out[0].isnan().all() and out[1:].isfinite().all()


def test_pools_beyond_two_to_the_31_numbers():
    """Block numbers, slots and addresses in 64 bits. Only the pages that are touched take memory."""
    num_blocks = 2**31 // (16 * 64) + 5
    keys, values = (torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    k, v = (torch.randn(20, 1, 64, device=DEVICE).half() for _ in range(2))
    table = [num_blocks - 1, num_blocks - 3]
    slots = torch.tensor([table[p // 16] * 16 + p % 16 for p in range(20)], device=DEVICE)
    reshape_and_cache(k, v, keys, values, slots)
    assert torch.equal(keys[table[0]], k[:16]) and torch.equal(values[table[1], :4], v[16:])
    metadata, _, _ = pack_rows([PassRow([0] * 20, 19, 20, table)], 16, DEVICE)
    q = torch.randn(1, 3, 64, device=DEVICE).half()
    where = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
    out, _ = paged_attention(q, keys, values, *where, choose_launch(64, 3, 2, LIMIT))
    expected, _ = reference(q, keys, values, metadata)
    assert (out - expected).abs().max() <= TOLERANCE[torch.float16]


def test_splits_fill_the_card_and_no_more():
    assert choose_splits(num_programs=3, max_seq_len=4096, num_processors=132) == 16
    assert choose_splits(num_programs=96, max_seq_len=4096, num_processors=132) == 2
    assert choose_splits(num_programs=300, max_seq_len=4096, num_processors=132) == 1
    assert choose_splits(num_programs=3, max_seq_len=600, num_processors=132) == 2
    assert choose_splits(num_programs=3, max_seq_len=100, num_processors=132) == 1
