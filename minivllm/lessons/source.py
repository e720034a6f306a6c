"""Showing the package's own source in a notebook, so that a lesson never holds a copy of it."""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from IPython.display import Code, display

import minivllm.kernels


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


def show_kernel(name: str, *parts: int) -> None:
    """Displays the real source of a Triton kernel, or the parts of it that its comments "# 1.", "# 2.", … begin.

    The source is read from the package's files and nothing is imported, so that it can be read without Triton too.

    Args:
        name: of a function in `minivllm.kernels`.
        parts: numbers of the parts, in order; none shows all of it.

    Raises:
        ValueError: there is no such kernel, or no such part in it.
    """
    source = _kernel_source(name)
    if parts:
        pieces = re.split(r"(?=^    # \d+\.)", source, flags=re.MULTILINE)[1:]
        if not set(parts) <= set(range(1, len(pieces) + 1)):
            raise ValueError(f"{name} has the parts 1 to {len(pieces)}: got {', '.join(map(str, parts))}")
        source = "\n\n".join(textwrap.dedent(pieces[part - 1]).rstrip() for part in parts)
    display(Code(source, language="python"))


def _kernel_source(name: str) -> str:
    """The lines of a Triton function of the kernels' package, decorator included."""
    known = []
    for path in sorted(Path(minivllm.kernels.__path__[0]).glob("*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                known.append(node.name)
                if node.name == name:
                    return "\n".join(text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])
    raise ValueError(f"there is no kernel {name!r}: there are {', '.join(known)}")


def _without_docstrings(source: str) -> str:
    """Cuts out the docstrings by their line numbers, so that comments and layout stay."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[number] = "\0"
    return "\n".join(line for line in lines if line != "\0")
