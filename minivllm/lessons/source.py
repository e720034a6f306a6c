"""Showing the package's own source in a notebook, so that a lesson never holds a copy of it."""

import ast
import inspect
import re
import textwrap
from itertools import pairwise
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
        name: of a function in `minivllm.kernels`, or in `minivllm.lessons.toy_kernel`.
        parts: numbers of the parts, in order; 0 is what stands before the first: the signature. None shows all of it.

    Raises:
        ValueError: there is no such kernel, or no such part in it.
    """
    source = kernel_source(name)
    if parts:
        pieces = re.split(r"(?=^    # \d+\.)", source, flags=re.MULTILINE)
        if not set(parts) <= set(range(len(pieces))):
            raise ValueError(f"{name} has the parts 0 to {len(pieces) - 1}: got {', '.join(map(str, parts))}")
        source = "\n\n".join(textwrap.dedent(pieces[part]).rstrip() for part in parts)
    display(Code(source, language="python"))


def show_launch(name: str) -> None:
    """Displays the statement that launches a Triton kernel, `name[grid](…)`, and the one before it, which counts.

    Raises:
        ValueError: no such kernel is launched.
    """
    for text in _kernel_files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                for before, statement in pairwise(node.body):
                    if ast.unparse(statement).startswith(f"{name}["):
                        lines = text.splitlines()[before.lineno - 1 : statement.end_lineno]
                        display(Code(textwrap.dedent("\n".join(lines)), language="python"))
                        return
    raise ValueError(f"no kernel {name!r} is launched")


def kernel_source(name: str) -> str:
    """The lines of a Triton function, decorator included.

    Raises:
        ValueError: there is no such function; the message lists those that there are.
    """
    known = []
    for text in _kernel_files():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                known.append(node.name)
                if node.name == name:
                    return "\n".join(text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])
    raise ValueError(f"there is no kernel {name!r}: there are {', '.join(known)}")


def _kernel_files() -> list[str]:
    """The text of every file with kernels in it."""
    package, toy = Path(minivllm.kernels.__path__[0]), Path(__file__).with_name("toy_kernel.py")
    return [path.read_text() for path in (*sorted(package.glob("*.py")), toy)]


def _without_docstrings(source: str) -> str:
    """Cuts out the docstrings by their line numbers, so that comments and layout stay."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[number] = "\0"
    return "\n".join(line for line in lines if line != "\0")
