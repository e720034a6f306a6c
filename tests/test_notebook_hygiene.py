"""What every committed notebook keeps to, so that nbval's comparison means something and its diffs are small.

nbval itself lets a cell pass that was never executed; these tests are what forbids it.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAGS = {"nbval-ignore-output", "nbval-skip", "raises-exception"}

Notebook = dict[str, Any]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Notebook:
    return json.loads(request.param.read_text())


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def test_the_first_lessons_are_there():
    names = {path.stem for path in NOTEBOOKS}
    assert names >= {"00_start_here", "01_why_inference_engines", "02_naive_kv_cache"}


def test_executed_once_from_top_to_bottom(notebook: Notebook):
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_nothing_on_stderr(notebook: Notebook):
    noisy = [source(cell) for cell in code_cells(notebook) for out in cell["outputs"] if out.get("name") == "stderr"]
    assert noisy == []


def test_errors_only_where_they_are_announced(notebook: Notebook):
    for cell in code_cells(notebook):
        failed = any(out["output_type"] == "error" for out in cell["outputs"])
        assert failed == ("raises-exception" in tags(cell)), source(cell)


def test_metadata_is_minimal(notebook: Notebook):
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3 (minivllm)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags"}, source(cell)
        assert set(tags(cell)) <= TAGS, source(cell)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))


def test_every_picture_has_alt_text(notebook: Notebook):
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            for kind in output.get("data", {}):
                if kind.startswith("image/"):
                    assert output["metadata"].get(kind, {}).get("alt", "").strip(), source(cell)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            assert not re.search(r"!\[\s*\]\(", source(cell)), source(cell)
            for image in re.findall(r"<img\b[^>]*>", source(cell)):
                assert re.search(r"""alt=(["'])\s*\S""", image), image


def test_few_outputs_are_ignored(notebook: Notebook):
    cells = code_cells(notebook)
    ignored = [cell for cell in cells if "nbval-ignore-output" in tags(cell)]
    assert len(ignored) <= 0.15 * len(cells)


def test_cells_are_short(notebook: Notebook):
    long = [source(cell) for cell in code_cells(notebook) if len(source(cell).splitlines()) >= 25]
    assert long == []


def test_no_semicolon_hides_an_output(notebook: Notebook):
    """nbval executes without history, where IPython finds no semicolon and shows the output all the same."""
    hidden = [source(cell) for cell in code_cells(notebook) if source(cell).rstrip().endswith(";")]
    assert hidden == []


def test_file_is_small(notebook: Notebook):
    assert len(json.dumps(notebook)) < 400_000


def test_no_place_of_the_author_in_it(notebook: Notebook):
    text = json.dumps(notebook)
    assert str(ROOT) not in text and str(Path.home()) + "/" not in text
