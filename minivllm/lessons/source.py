"""Showing the package's own source in a notebook, so that a lesson never holds a copy of it."""

import ast
import inspect
import textwrap
from typing import Any

from IPython.display import Code, display


def show_source(*objects: Any, docstrings: bool = True) -> None:
    """Displays the real source of classes or functions, with colours.

    Args:
        objects: what to show, in order.
        docstrings: leave docstrings in.
    """
    parts = [textwrap.dedent(inspect.getsource(item)).rstrip() for item in objects]
    if not docstrings:
        parts = [_without_docstrings(part) for part in parts]
    display(Code("\n\n".join(parts), language="python"))


def _without_docstrings(source: str) -> str:
    """Cuts out the docstrings by their line numbers, so that comments and layout stay."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[number] = "\0"
    return "\n".join(line for line in lines if line != "\0")
