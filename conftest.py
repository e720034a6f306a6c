"""For the whole suite, notebooks too: the kernels' environment, and a pytest that runs from any folder."""

from pathlib import Path

import pytest

from minivllm.devtools import set_kernel_environment

# Here and not in a fixture: the kernels inherit it from this process, and nbval uses no fixtures.
set_kernel_environment()


def pytest_configure(config: pytest.Config) -> None:
    """Makes the path of the sanitize file absolute."""
    config.option.nbval_sanitize_with = str(Path(__file__).parent / config.option.nbval_sanitize_with)
