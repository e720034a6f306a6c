"""Device and dtype are resolved by one documented rule."""

import sys

import pytest
import torch

from minivllm import device
from minivllm.device import has_bf16_matrix_units, resolve_device, resolve_dtype
from minivllm.runner import resolve_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_a_card_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == CUDA and resolve_device("cuda:1").index == 1
    with pytest.raises(ValueError, match=r"'cuda:2' is not there: torch sees 2 CUDA device"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU == resolve_device("cpu")
    with pytest.raises(ValueError, match="torch sees 0 CUDA"):
        resolve_device("cuda")


@pytest.mark.parametrize("name", ["tpu9", "mps", "meta", "cuda:x", "c p u"])
def test_other_devices_are_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"device '{name}'"):
        resolve_device(name)


@pytest.mark.parametrize(("units", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_is_bf16_only_with_matrix_units(monkeypatch, units, expected):
    monkeypatch.setattr(device, "has_bf16_matrix_units", lambda: units)
    assert resolve_dtype("auto", CPU, torch.bfloat16) == expected == resolve_dtype("auto", CPU, torch.float32)


@pytest.mark.parametrize("checkpoint", [torch.float16, "float16", "torch.float16"])
def test_auto_on_a_card_is_the_checkpoints_type(checkpoint):
    assert resolve_dtype("auto", CUDA, checkpoint) == torch.float16
    assert resolve_dtype("auto", CUDA, None) == torch.float32


def test_a_named_dtype_is_that_dtype():
    assert resolve_dtype("float64", CPU, torch.bfloat16) == torch.float64
    with pytest.raises(ValueError, match=r"dtype must be one of auto, .*got 'int8'"):
        resolve_dtype("int8", CPU, None)


def test_the_probe_for_matrix_units_answers_on_any_machine(monkeypatch):
    assert has_bf16_matrix_units() in (True, False)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert has_bf16_matrix_units() is False


def test_the_kernels_are_for_cuda_and_torch_for_everything_else():
    assert resolve_attention("auto", CPU, torch.float32) is resolve_attention("torch", CUDA, torch.float16)
    assert resolve_attention("auto", CUDA, torch.float64).__name__ == "PagedAttention"
    pytest.importorskip("triton")
    assert resolve_attention("auto", CUDA, torch.bfloat16).__name__ == "TritonAttention"
    with pytest.raises(
        ValueError, match="attention_backend is 'triton' and the device is cpu: the kernels need a CUDA"
    ):
        resolve_attention("triton", CPU, torch.float32)
    with pytest.raises(ValueError, match=r"in float16, bfloat16 or float32, and the dtype is torch.float64"):
        resolve_attention("triton", CUDA, torch.float64)


def test_without_triton_the_kernels_are_refused_and_auto_takes_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("minivllm.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    assert resolve_attention("auto", CUDA, torch.float16).__name__ == "PagedAttention"
    with pytest.raises(ValueError, match="Triton exists for Linux"):
        resolve_attention("triton", CUDA, torch.float16)
