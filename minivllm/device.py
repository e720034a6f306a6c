"""Which device and which number format to compute with, and the way to the device."""

import contextlib

import numpy as np
import torch
from torch import Tensor

from minivllm.config import DTYPES


def resolve_device(device: str) -> torch.device:
    """Turns "auto", "cpu", "cuda" or "cuda:N" into a device that is there.

    Raises:
        ValueError: unknown name, or no such card; the message says how many there are.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: give auto, cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} has no back end here: give auto, cpu, cuda or cuda:N")
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ValueError(f"device {device!r} is not there: torch sees {count} CUDA device(s); device='cpu' works")
    return found


def resolve_dtype(dtype: str, device: torch.device, checkpoint: torch.dtype | str | None) -> torch.dtype:
    """Turns a dtype name into a torch dtype.

    "auto" is the checkpoint's own type on a GPU. On a CPU it is bfloat16 if there are bf16 matrix units
    (AMX), which are several times faster in it; elsewhere bf16 is emulated or slower, so float32.

    Args:
        dtype: one of `minivllm.config.DTYPES`.
        device: where the model will be.
        checkpoint: the config's dtype; None (unknown) counts as float32.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.bfloat16 if has_bf16_matrix_units() else torch.float32
    if isinstance(checkpoint, str):
        return getattr(torch, checkpoint.removeprefix("torch."))
    return checkpoint or torch.float32


def has_bf16_matrix_units() -> bool:
    """Whether this CPU multiplies bf16 tiles in hardware (Intel AMX) and torch can use it."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(probe and probe())


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Sends an array on its way to the device and does not wait; on a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a card the current one, which Triton's launches go to whatever card their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
