"""Executes the notebooks anew, in place (`make refresh`); where nothing changed, not a byte changes.

An old output stays where the new one says the same: equal after the substitutions of
`tests/nbval_sanitize.cfg` (which nbval compares with, too), in cells whose output nbval ignores equal but for
its numbers, and in cells with `measured=True` equal but for the pictures.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from minivllm.devtools import set_kernel_environment

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = ROOT / "tests" / "nbval_sanitize.cfg"
METADATA = {
    # The display name is that of the kernel which set-up registers, so that JupyterLab keeps it.
    "kernelspec": {"display_name": "Python 3 (minivllm)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    set_kernel_environment()
    failed = 0
    for path in paths:
        try:
            changed = refresh(path)
        except (OSError, CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path} is left as it was: {error}", file=sys.stderr)
            failed += 1
        else:
            print(f"{path}: {'refreshed' if changed else 'nothing changed'}")
    return 1 if failed else 0


def refresh(path: Path) -> bool:
    """Executes one notebook in place; returns whether the file changed.

    Raises:
        CellExecutionError, CellTimeoutError, DeadKernelError: a cell failed; the file is as it was.
    """
    before = path.read_text()
    old, new = nbformat.reads(before, as_version=4), nbformat.reads(before, as_version=4)
    # Streams are joined, for how a kernel cuts its output into messages differs from run to run.
    NotebookClient(
        new,
        timeout=120,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # the kernel's, whose warnings come between our lines
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    new.metadata = nbformat.from_dict(METADATA)
    for old_cell, cell in zip(old.cells, new.cells, strict=True):
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if "tags" in cell.metadata else {})
        if cell.cell_type == "code" and essence(old_cell) == essence(cell):
            cell.outputs = old_cell.outputs
    after = nbformat.writes(new) + "\n"
    if after != before:
        path.write_text(after)
    return after != before


def essence(cell: Any) -> str:
    """What a code cell's outputs say, without what differs from run to run."""
    outputs = json.loads(json.dumps(cell.outputs))
    ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
    if ignored or "measured=True" in cell.source:
        for output in outputs:
            output.get("data", {}).pop("image/png", None)
    # The patterns look at what stands before a number, and that must not be the n of an escaped line end.
    text = json.dumps(outputs, ensure_ascii=False, sort_keys=True).replace("\\n", "\n")
    text = re.sub(r'"model_id": "\w+"', "", text)
    rules = re.findall(r"^regex: (.*)\nreplace: (.*)$", SANITIZE.read_text(), re.MULTILINE)
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return re.sub(r" *\d+(\.\d+)?", "<NUMBER>", text) if ignored else text


if __name__ == "__main__":
    sys.exit(main())
