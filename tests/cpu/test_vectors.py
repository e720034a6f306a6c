"""Vectors are rounded as torch rounds, and their exponential is exact to rounding."""

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")

from minivllm.cpu.vectors import as_numpy, exp, load, store  # noqa: E402


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
