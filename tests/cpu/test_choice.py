"""Where the fast path can't run, and when it has to be compiled, is said."""

import pickle

import pytest
import torch

from minivllm.backends import fast_decoder, resolve_attention
from minivllm.model.attention import PagedAttention

pytest.importorskip("numba")

from minivllm.cpu import compiled
from tests.cpu.passes import CPU


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


def test_loops_that_were_written_to_a_full_disk_are_compiled_anew(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    folder = tmp_path / "__pycache__"
    folder.mkdir()

    def run():
        if list(folder.glob("*.nbc")):
            pickle.loads(b"")

    (folder / "half.nbc").touch()
    compiled.start(run)
    assert not list(folder.iterdir()) and "broken (Ran out of input): compiling them anew" in caplog.text
    with pytest.raises(EOFError):  # and what is broken without them stays an error
        compiled.start(lambda: pickle.loads(b""))
