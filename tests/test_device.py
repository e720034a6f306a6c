"""Device and dtype are resolved by one documented rule."""

import sys
from dataclasses import replace

import pytest
import torch

from minivllm import device
from minivllm.backends import resolve_attention
from minivllm.device import has_bf16_matrix_units, resolve_device, resolve_dtype
from minivllm.model.attention import PagedAttention

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


@pytest.fixture
def a_card(monkeypatch):
    """A card to ask for its limits: 99 KiB of shared memory, 128 multiprocessors."""
    backend = pytest.importorskip("minivllm.kernels.backend")
    monkeypatch.setattr(backend, "card_limits", lambda device: (101_376, 128))
    return backend


def test_the_kernels_are_for_cuda_and_torch_for_everything_else(tiny_llama, a_card, caplog):
    config = tiny_llama[1].config
    assert resolve_attention("auto", config, CPU, torch.float32).__name__ == "NumbaAttention"
    assert resolve_attention("torch", config, CUDA, torch.float16) is PagedAttention
    assert resolve_attention("auto", config, CUDA, torch.bfloat16) is a_card.TritonAttention and not caplog.text
    assert resolve_attention("auto", config, CUDA, torch.float64) is PagedAttention
    assert "attention in plain torch, which is slower: the Triton kernels compute in float16" in caplog.text
    with pytest.raises(ValueError, match="'triton' and the device is cpu: the kernels need a CUDA"):
        resolve_attention("triton", config, CPU, torch.float32)
    with pytest.raises(ValueError, match=r"in float16, bfloat16 or float32, and the dtype is torch.float64"):
        resolve_attention("triton", config, CUDA, torch.float64)


def test_heads_too_large_for_a_card_are_found_at_the_start(tiny_llama, a_card, monkeypatch, caplog):
    config = replace(tiny_llama[1].config, head_dim=256, num_heads=256, num_kv_heads=1)
    monkeypatch.setattr(a_card, "card_limits", lambda device: (65_536, 40))
    with pytest.raises(ValueError, match=r"256 query heads per KV head need 278528 bytes of shared .* has 65536"):
        resolve_attention("triton", config, CUDA, torch.float16)
    assert resolve_attention("auto", config, CUDA, torch.float16) is PagedAttention
    assert len(caplog.records) == 1


def test_without_triton_the_kernels_are_refused_and_auto_takes_torch(tiny_llama, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("minivllm.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    assert resolve_attention("auto", tiny_llama[1].config, CUDA, torch.float16) is PagedAttention
    assert "Triton exists for Linux" in caplog.text
    with pytest.raises(ValueError, match="Triton exists for Linux"):
        resolve_attention("triton", tiny_llama[1].config, CUDA, torch.float16)
