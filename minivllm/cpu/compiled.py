"""How Numba compiles the loops of the fast path, and on how many threads they run.

The decorators are `Any` to the type checker: what they return takes tuples of vectors and the like, which Python's
types don't know.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numba
import numba.extending
import torch
from llvmlite import binding

logger = logging.getLogger(__name__)
FOLDER = Path(__file__).parent


def forget(folder: Path) -> None:
    """Deletes what was compiled."""
    for compiled in (folder / "__pycache__").glob("*.nb[ic]"):
        compiled.unlink(missing_ok=True)


def forget_what_is_stale(folder: Path) -> None:
    """Deletes what was compiled from other sources. Numba looks at the file that a function is in, and not at
    those that its parts come from."""
    digest, kept = hashlib.sha256(), folder / "__pycache__" / "sources.sha256"
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    with suppress(OSError):  # a folder that can't be written to holds nothing stale either
        if not kept.exists() or kept.read_text() != digest.hexdigest():
            kept.parent.mkdir(exist_ok=True)
            forget(folder)
            kept.write_text(digest.hexdigest())


def start(run: Callable[[], object]) -> None:
    """Runs what loads the loops or compiles them; once more without what is on disk, if that ends in the middle (as
    what was written to a full disk does)."""
    try:
        run()
    except (EOFError, UnpicklingError) as error:
        logger.warning("the loops on disk are broken (%s): compiling them anew, about 20 seconds", error)
        with suppress(OSError):
            forget(FOLDER)
        run()


def features() -> set[str]:
    """What the processor that Numba compiles for can do, in LLVM's names."""
    config: Any = numba.config
    if config.CPU_FEATURES is not None or config.CPU_NAME is not None:
        return {name[1:] for name in (config.CPU_FEATURES or "").split(",") if name.startswith("+")}
    return {name for name, there in binding.get_host_cpu_features().items() if there}


def mark_of(dtype: torch.dtype) -> Path:
    """A file that is there once the loops are compiled for a type, and goes with what is compiled."""
    return FOLDER / "__pycache__" / f"{str(dtype).removeprefix('torch.')}.nbc"


def announce(dtype: torch.dtype) -> None:
    """Says that a wait is to come, if it is."""
    if not mark_of(dtype).exists():
        logger.warning("compiling the loops for %s, once on this machine: about 20 seconds", dtype)
        with suppress(OSError):
            mark_of(dtype).touch()


forget_what_is_stale(FOLDER)

_njit: Any = numba.njit
# Compiled once and kept on disk, called from Python without its lock.
parallel: Any = _njit(parallel=True, cache=True, nogil=True)
# A row of such calls, without Python between them.
sequence: Any = _njit(cache=True, nogil=True)
# One thread's share. Counting references to arrays would cost more than the work on them, so such a function makes no
# arrays; and it divides as numpy does, by 0 too.
loop: Any = _njit(cache=True, _nrt=False, error_model="numpy")
# Becomes a part of the function that calls it.
inlined: Any = _njit(forceinline=True, _nrt=False, error_model="numpy")
# A function whose instructions are written down, in place of its body.
intrinsic: Any = numba.extending.intrinsic
overload: Any = numba.extending.overload

one_at_a_time = threading.Lock()  # for parallel loops: not every threading layer of Numba bears two callers


def num_threads() -> int:
    """Threads that parallel loops use: as many as torch does."""
    return min(torch.get_num_threads(), numba.get_num_threads())
