"""For the whole suite, notebooks too: the kernels' environment, and a pytest that runs from any folder."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from minivllm.devtools import set_kernel_environment

# Here and not in a fixture: the kernels inherit it from this process, and nbval uses no fixtures.
set_kernel_environment()


def pytest_configure(config: pytest.Config) -> None:
    """Makes the path of the sanitize file absolute."""
    config.option.nbval_sanitize_with = str(Path(__file__).parent / config.option.nbval_sanitize_with)


# Lesson 04 shows what the kernels do; where there is no Triton (it exists for Linux only) it can be read and run, but
# the reference stands in for the kernels, and a few of its outputs are others.
collect_ignore = [] if find_spec("triton") else ["notebooks/04_paged_attention_kernel.ipynb"]
