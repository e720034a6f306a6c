"""Every exercise of every notebook: its solution passes its check, and its blank fails with a sentence."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SOLUTION = re.compile(r"<summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)
CHECK = re.compile(r"^done = exercises\.(check_\w+)\((\w+)(.*)\)$", re.MULTILINE)


def exercises_of(path):
    """Pairs of (blank cell with its check, source of the solution in the next text cell)."""
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    for cell, source, after in zip(cells, sources, [*sources[1:], ""], strict=True):
        if cell["cell_type"] == "code" and CHECK.search(source):
            solution = SOLUTION.search(after)
            assert solution, f"{path.name}: no solution after {CHECK.search(source).group(0)}"
            yield source, solution.group(1)


CASES = [(path.stem, blank, solution) for path in NOTEBOOKS for blank, solution in exercises_of(path)]


@pytest.fixture
def scope(real_llm):
    """The names that the notebooks have defined by then."""
    import torch

    from minivllm.kv_cache import ROOT_KEY, hash_block
    from minivllm.lessons import exercises
    from minivllm.lessons.cost import pass_cost

    names = {"exercises": exercises, "pass_cost": pass_cost, "ROOT_KEY": ROOT_KEY, "hash_block": hash_block}
    return {"llm": real_llm, "config": real_llm.model.config, "torch": torch, **names}


def test_every_lesson_has_an_exercise():
    assert {stem for stem, _, _ in CASES} == {path.stem for path in NOTEBOOKS}


@pytest.mark.real_model
@pytest.mark.parametrize(("stem", "blank", "solution"), CASES, ids=[f"{s}-{i}" for i, (s, _, _) in enumerate(CASES)])
def test_the_blank_fails_with_a_sentence_and_the_solution_passes(stem, blank, solution, scope, capsys):
    exec(compile(blank, stem, "exec"), scope)
    assert capsys.readouterr().out.startswith("not yet: ")
    check, name, rest = CHECK.search(blank).groups()
    exec(compile(solution, stem, "exec"), scope)
    assert eval(f"exercises.{check}({name}{rest})", scope) is True
    assert capsys.readouterr().out.startswith("right: ")
