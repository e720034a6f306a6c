"""Attention in place gives what the reference in plain torch gives."""

import itertools
from dataclasses import replace

import pytest
import torch

numba = pytest.importorskip("numba")

from minivllm.cpu.paged_attention import NumbaAttention, attention_kernel  # noqa: E402
from minivllm.cpu.vectors import as_numpy  # noqa: E402
from minivllm.model.attention import PagedAttention  # noqa: E402
from tests.cpu.passes import DTYPES, MIXED, Pass  # noqa: E402

HEAD_DIMS, RATIOS, BLOCK_SIZES = (64, 80, 96, 256), (3, 1, 5, 17), (16, 1, 8, 24)
GRID = [
    (HEAD_DIMS[i], RATIOS[j], DTYPES[(i + j) % 3], BLOCK_SIZES[(i + 2 * j) % 4])
    for i, j in itertools.product(range(4), range(4))
]


@pytest.mark.parametrize(("head_dim", "ratio", "dtype", "block_size"), GRID)
def test_a_mixed_pass_equals_the_reference(head_dim, ratio, dtype, block_size):
    Pass(MIXED, head_dim, ratio, dtype, block_size).check()


@pytest.mark.parametrize("window", [1, 4, 16, 17, 100])
@pytest.mark.parametrize("block_size", [16, 5])
def test_a_window_ends_where_the_reference_says(window, block_size):
    Pass(MIXED, block_size=block_size).check(window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_blocks_that_decodes_begin_with_serve_all_of_them(dtype, window):
    """Full to the last shared token but one, or far beyond; more of them than a unit has; and a prefill between."""
    case = Pass([(1, 66), (1, 90), (5, 80), *[(1, 200)] * 35, (1, 65)], dtype=dtype, num_shared=4)
    planned = NumbaAttention(case.cache, case.metadata, (None, window)).plan(as_numpy(torch.cat(case.qkv, dim=1)))
    assert len(planned[3][0].shared) >= 3
    case.check(window)


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
