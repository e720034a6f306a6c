"""The kernels compile for real cards, which needs none: shared memory, registers and spills are read off the result."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels can't be compiled", allow_module_level=True)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from minivllm.kernels.launch import Launch, choose_launch, next_power_of_2, shared_memory_bytes  # noqa: E402
from minivllm.kernels.paged_attention import merge_kernel, paged_attention_kernel  # noqa: E402
from minivllm.kernels.reshape_and_cache import reshape_and_cache_kernel  # noqa: E402

SHARED = {
    75: 65_536,
    80: 166_912,
    89: 101_376,
    90: 232_448,
}  # bytes that a program may use on sm_75, sm_80, sm_89, sm_90
SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on a card: bytes of shared memory per program, registers and bytes of stack per thread."""

    shared: int
    registers: int
    stack: int


def compiled(kernel, arch, types, constants, num_warps=4, num_stages=1):
    """Compiles a kernel; pointers are aligned to 16 bytes, as torch's are."""
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    target = GPUTarget("cuda", arch, 32)
    binary = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return Compiled(binary.metadata.shared, registers, stack)


def attention(arch, dtype, head_dim, ratio, launch: Launch, split=False):
    part = "fp32" if split else dtype
    pointers = {"out": part, "lse": "fp32", "q": dtype, "keys": dtype, "values": dtype}
    types = {name: f"*{kind}" for name, kind in pointers.items()}
    types |= dict.fromkeys(("block_table", "starts", "seq_lens"), "*i64")
    types |= {"scale": "fp32", "num_reqs": "i32", "num_tokens": "i32", "window": "i32", "table_stride": "i32"}
    types |= {"num_splits": "i32"}
    constants = {"NUM_HEADS": 3 * ratio, "RATIO": ratio, "HEAD_DIM": head_dim, "WIDTH": next_power_of_2(head_dim)}
    constants |= {"BLOCK_SIZE": 16, "BLOCK_M": launch.block_m, "BLOCK_Q": launch.block_q, "TILE_N": launch.tile_n}
    constants |= {"PRECISION": "ieee" if dtype == "fp32" else "tf32", "WIDEN": False}
    return compiled(paged_attention_kernel, arch, types, constants, launch.num_warps, launch.num_stages)


def tiles(launch, head_dim, dtype):
    """What shared memory is taken for."""
    return launch.block_m, launch.tile_n, head_dim, SIZES[dtype], launch.num_stages


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("max_query_len", [1, 512])
@pytest.mark.parametrize("dtype", SIZES)
def test_the_default_model_spills_nothing(arch, dtype, max_query_len):
    """SmolLM2: heads of 64, nine query heads on three KV heads."""
    launch = choose_launch(64, 3, SIZES[dtype], SHARED[arch], max_query_len)
    for split in (False, True):
        found = attention(arch, dtype, 64, 3, launch, split)
        assert found.stack == 0 and 32 <= found.registers <= 255
        assert 0 < found.shared <= shared_memory_bytes(*tiles(launch, 64, dtype), arch == 75)


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(("head_dim", "ratio"), [(80, 1), (96, 8), (112, 7), (128, 4), (256, 8), (128, 17), (256, 32)])
def test_all_heads_compile_and_fit_the_card(arch, head_dim, ratio):
    for dtype, max_query_len in product(("fp16" if arch == 75 else "bf16", "fp32"), (1, 64)):
        launch = choose_launch(head_dim, ratio, SIZES[dtype], SHARED[arch], max_query_len)
        found = attention(arch, dtype, head_dim, ratio, launch)
        estimate = shared_memory_bytes(*tiles(launch, head_dim, dtype), arch == 75)
        assert found.shared <= estimate <= SHARED[arch]
        if arch > 75 or ratio <= 16:  # a card of that age has too few registers for more than 16 rows of such heads
            assert found.stack <= (16 if dtype == "fp32" else 0)  # bytes: a float32 product may put a few numbers aside


@pytest.mark.parametrize("arch", SHARED)
def test_the_small_kernels_compile_without_spills(arch):
    types = dict.fromkeys(("k", "v", "keys", "values"), "*bf16") | {"slot_mapping": "*i64"}
    types |= dict.fromkeys(("k_stride", "v_stride"), "i32")
    found = compiled(reshape_and_cache_kernel, arch, types, {"SIZE": 192, "WIDTH": 256})
    assert found.stack == 0 and found.shared == 0
    types = {"out": "*bf16", "lse": "*fp32", "parts": "*fp32", "part_lse": "*fp32", "num_rows": "i32"}
    types |= {"num_splits": "i32"}
    found = compiled(merge_kernel, arch, types, {"HEAD_DIM": 64, "WIDTH": 64, "SPLITS": 16})
    assert found.stack == 0


@pytest.mark.parametrize("limit", [65_536, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
def test_a_legal_launch_is_found_for_every_card(limit, head_dim):
    """Also for cards of 64 KB, where the tiles of a large card fail at the first request."""
    for ratio, itemsize, max_query_len in product((1, 3, 4, 8, 17, 32), (2, 4), (1, 7, 512)):
        launch = choose_launch(head_dim, ratio, itemsize, limit, max_query_len)
        sizes = launch.block_m, launch.tile_n, head_dim, itemsize, launch.num_stages
        used = shared_memory_bytes(*sizes, old_card=limit == 65_536)
        assert used <= limit
        assert launch.block_m >= 16 and launch.tile_n >= 16 and launch.num_stages >= 1
        assert launch.block_m & (launch.block_m - 1) == 0 and 1 <= launch.block_q == launch.block_m // ratio


def test_a_card_that_is_too_small_is_told_so():
    with pytest.raises(ValueError, match=r"heads of 256 numbers and 8 query heads .* need 49152 bytes .* has 40000"):
        choose_launch(256, 8, 4, 40_000)
