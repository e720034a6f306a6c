"""What this machine is: the check of lesson 00 and the two measurements of lesson 01."""

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

from minivllm.config import GIB
from minivllm.device import has_bf16_matrix_units, resolve_device
from minivllm.model.default_model import ALIAS, MANIFEST, models_folder


@dataclass(frozen=True)
class Rates:
    """The two numbers of a roofline.

    Attributes:
        bytes_per_s: how fast weights can be read from memory.
        flops_per_s: how fast large matrices can be multiplied.
    """

    bytes_per_s: float
    flops_per_s: float

    @property
    def ridge(self) -> float:
        """Flops per byte from which on the matrix rate is the limit and no longer the bandwidth."""
        return self.flops_per_s / self.bytes_per_s


def check_machine() -> None:
    """Prints one line per thing the course needs, [OK] or [FAIL] with what to do."""
    free_disk = shutil.disk_usage(models_folder().parent if models_folder().parent.exists() else ".").free
    fetched = (models_folder() / ALIAS / MANIFEST).is_file()
    version = ".".join(map(str, sys.version_info[:3]))
    device = resolve_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    memory = memory_bytes()
    lines = [
        (sys.version_info[:2] in ((3, 11), (3, 12), (3, 13)), f"Python {version}", "use 3.11, 3.12 or 3.13"),
        (True, f"torch {torch.__version__}, transformers {transformers.__version__}", ""),
        (True, f"device: {device} ({name}), {torch.get_num_threads()} threads", ""),
        (True, f"bf16 matrix units on the CPU: {'yes' if has_bf16_matrix_units() else 'no'}", ""),
        (
            memory is None or memory >= 3 * GIB,
            f"memory: {(memory or 0) / GIB:.0f} GiB",
            "the lessons need about 3 GiB",
        ),
        (free_disk >= GIB, f"free disk: {free_disk / GIB:.0f} GiB", "free at least 1 GiB"),
        (fetched, f"model {ALIAS}: {'here' if fetched else 'not here'}", "run `minivllm model fetch`"),
    ]
    for good, fact, advice in lines:
        print(f"[ OK ] {fact}" if good else f"[FAIL] {fact}: {advice}")


def memory_bytes() -> int | None:
    """Physical memory, or None where the system does not tell."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


@torch.inference_mode()
def measure_rates(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """Measures a device as a decoder uses it: a large matrix times one row, and times many rows.

    The matrix (300 MB in float32) is larger than the caches, so that the first product is bound by reading
    it. Best of several, since everything else on the machine can only slow a run down.
    """
    rows, columns = 18_432, 4_096
    matrix = torch.randn(rows, columns, device=device, dtype=dtype)
    row, many = (torch.randn(count, columns, device=device, dtype=dtype) for count in (1, 256))
    linear = torch.nn.functional.linear
    reading = best_seconds(lambda: linear(row, matrix), device, repeats=8)
    small = matrix[:4096]
    computing = best_seconds(lambda: linear(many, small), device, repeats=5)
    return Rates(matrix.nbytes / reading, 2 * many.numel() * len(small) / computing)


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The shortest of `repeats` runs after one warm-up, in seconds."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
