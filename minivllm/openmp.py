"""The threads that OpenMP keeps. GNU's runtime keeps helpers for each thread that has ever computed. Where these are
more than the processors, they all sleep between two pieces of work instead of waiting for the next, and a decode step
takes a third longer. So a thread that hands its computing over to another lets its helpers go first.
"""

import ctypes
import re
from pathlib import Path

SOFT = 1  # omp_pause_soft of OpenMP 5.0, section 3.2.44: what is set stays set


def release_threads() -> None:
    """Ends the helpers that GNU's OpenMP keeps for the calling thread, in each copy of it that is loaded (torch has one
    of its own). They come back when the thread computes again. Without effect where there are none."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:  # no Linux, and so no such runtime
        return
    for path in sorted(set(re.findall(r"/.*/libgomp[^/\n]*$", loaded, re.MULTILINE))):
        try:
            ctypes.CDLL(path).omp_pause_resource_all(SOFT)
        except (OSError, AttributeError):  # deleted since, or older than OpenMP 5.0
            continue
