"""Tools for working on minivllm: set-up, notebook refresh, the oracle's maker. The package needs none."""

import os
from pathlib import Path


def set_kernel_environment() -> None:
    """Sets what the notebooks' kernels inherit when pytest or `make refresh` starts them.

    No progress bars (they go to stderr), no call to the hub, no warning of the tokenizers after a fork, one
    order of sets; and `import minivllm` finds this checkout, whatever else is installed. The number of
    threads is left alone: no result depends on it. But a waiting thread sleeps instead of spinning: with
    anything else running beside it, a spinning one made a decode step 5 to 20 times slower (2 cores).
    """
    root = str(Path(__file__).resolve().parents[2])
    os.environ.update(
        TQDM_DISABLE="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONHASHSEED="0",
        OMP_WAIT_POLICY="passive",
        PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    )
