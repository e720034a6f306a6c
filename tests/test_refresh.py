"""`make refresh`: what is executed anew and says the same stays as it was, to the byte."""

import base64
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minivllm.devtools.refresh import essence, refresh


def printed(text: str, source: str = "", tags: tuple[str, ...] = ()) -> NotebookNode:
    return new_code_cell(source, metadata={"tags": list(tags)}, outputs=[new_output("stream", text=text)])


def pictured(picture: bytes, source: str) -> NotebookNode:
    data = {"image/png": base64.b64encode(picture).decode(), "text/plain": "[figure] Two bars."}
    return new_code_cell(source, outputs=[new_output("display_data", data)])


def test_times_and_rates_are_no_change_but_counts_are():
    assert essence(printed("12 blocks\n0.5 s, 31 tok/s")) == essence(printed("12 blocks\n0.7 s, 12 tok/s"))
    assert essence(printed("12 blocks")) != essence(printed("13 blocks"))


def test_in_an_ignored_cell_numbers_are_no_change_but_words_are():
    tags = ("nbval-ignore-output",)
    assert essence(printed("cores:  2", tags=tags)) == essence(printed("cores: 64", tags=tags))
    assert essence(printed("cores: 2", tags=tags)) != essence(printed("sockets: 2", tags=tags))


def test_a_measured_picture_is_no_change_but_another_one_is():
    measured, counted = "show(fig, 'Two bars.', measured=True)", "show(fig, 'Two bars.')"
    assert essence(pictured(b"a", measured)) == essence(pictured(b"b", measured))
    assert essence(pictured(b"a", counted)) != essence(pictured(b"b", counted))


def test_refreshing_twice_changes_nothing_the_second_time(tmp_path: Path):
    path = tmp_path / "lesson.ipynb"
    cells = [
        new_markdown_cell("A lesson"),
        new_code_cell("import time\nprint(f'{time.time()} s')"),
        new_code_cell("2 + 2"),
    ]
    cells[1].metadata["collapsed"] = True
    nbformat.write(new_notebook(cells=cells), path)
    assert refresh(path)
    first = path.read_bytes()
    assert not refresh(path)
    assert path.read_bytes() == first
    done = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in done.cells[1:]] == [1, 2]
    assert done.cells[2].outputs[0].data["text/plain"] == "4"
    assert all(cell.metadata == {} for cell in done.cells)


def test_a_notebook_that_fails_is_left_as_it_was(tmp_path: Path):
    path = tmp_path / "lesson.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), path)
    before = path.read_bytes()
    with pytest.raises(CellExecutionError):
        refresh(path)
    assert path.read_bytes() == before
