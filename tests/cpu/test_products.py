"""Products with packed matrices equal torch's."""

import pytest
import torch

pytest.importorskip("numba")

from minivllm.cpu.products import ROWS, WIDTH, PackedLinear, pack
from tests.cpu.passes import DTYPES, TOLERANCE


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
