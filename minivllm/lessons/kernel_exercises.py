"""Checks of the exercises of lesson 04; reached through `minivllm.lessons.exercises`, like all others."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.lessons.checking import WrongForm, check


def check_visible(answer: Callable[[int, int, int | None], Any]) -> bool:
    """Lesson 04: `answer(num_queries, seq_len, window)` is the mask `[num_queries, seq_len]`: which keys each
    query may see. The queries are the last tokens of their text."""
    cases = []
    for queries, length, window in ((3, 3, None), (2, 5, None), (1, 4, None), (3, 6, 2), (4, 4, 9), (1, 5, 1)):
        places = range(length - queries, length)
        mask = [[key <= place and (not window or key > place - window) for key in range(length)] for place in places]
        cases.append((f"{queries} queries, {length} tokens, window {window}", (queries, length, window), mask))
    return check(answer, cases, _mask, _first_wrong_entry)


def check_rows_of_tile(answer: Callable[[int, int], Any]) -> bool:
    """Lesson 04: `answer(ratio, block_m)` lists (query of the tile, head of the group) of each row of a query tile;
    None for a spare row."""
    cases = []
    for ratio, block_m in ((3, 4), (3, 16), (1, 4), (2, 8), (5, 16), (7, 8)):
        used = block_m // ratio * ratio
        rows = [(row // ratio, row % ratio) if row < used else None for row in range(block_m)]
        cases.append((f"ratio {ratio}, {block_m} rows", (ratio, block_m), rows))
    return check(answer, cases, _rows)


def check_merge(answer: Callable[[Tensor, Tensor], Any]) -> bool:
    """Lesson 04: `answer(outs, lses)` merges outputs `[num_parts, head_dim]` with their log-sum-exps `[num_parts]` into
    one (output, lse). An empty part has the output 0 and the log-sum-exp -inf. Three digits after the point count."""
    cases = []
    for what, outs, weights, shift in (
        ("two parts alike", [[1.0, 2.0], [3.0, 6.0]], [1, 1], 0.0),
        ("a part of three times the weight", [[1.0, 2.0], [3.0, 6.0]], [1, 3], 0.0),
        ("four parts, two of them empty", [[0.0], [8.0], [0.0], [4.0]], [0, 1, 0, 3], 2.0),
        ("scores around 1000", [[1.0, 2.0], [3.0, 6.0]], [1, 3], 1000.0),
        ("scores around -1000", [[1.0, 2.0], [3.0, 6.0]], [3, 1], -1000.0),
        ("two empty parts", [[0.0, 0.0], [0.0, 0.0]], [0, 0], 0.0),
    ):
        total = sum(weights)
        mean = [
            sum(w * x for w, x in zip(weights, column, strict=True)) / (total or 1)
            for column in zip(*outs, strict=True)
        ]
        lses = [math.log(weight) + shift if weight else -math.inf for weight in weights]
        whole = round(math.log(total) + shift, 3) if total else -math.inf
        given = tuple(torch.tensor(x, dtype=torch.float64) for x in (outs, lses))
        cases.append((what, given, (mean, whole)))
    return check(answer, cases, _merged)


def _mask(found: Any, expected: list[list[bool]]) -> list[list[bool]]:
    mask, shape = _tensor(found), [len(expected), len(expected[0])]
    if mask is None or list(mask.shape) != shape:
        raise WrongForm(f"you returned {_described(found)}, and a mask of the shape {shape} is expected")
    if mask.dtype != torch.bool:
        raise WrongForm(
            f"the entries must be True or False (a comparison gives them): yours at [0, 0] is {mask[0, 0].item()}"
        )
    return mask.tolist()


def _first_wrong_entry(found: list[list[bool]], expected: list[list[bool]]) -> str:
    length = len(expected[0])
    wrong = ((query, key) for query in range(len(expected)) for key in range(length))
    query, key = next((query, key) for query, key in wrong if found[query][key] != expected[query][key])
    position, yours = length - len(expected) + query, found[query][key]
    return f"query {query}, at position {position}, and key {key} you got {yours}, it is {not yours}"


def _rows(found: Any, expected: list[tuple[int, int] | None]) -> list[tuple[int, ...] | None]:
    if not isinstance(found, (list, tuple, Tensor)):
        raise WrongForm(f"you returned {_described(found)}, and a list with an entry per row is expected")
    rows = list[tuple[int, ...] | None]()
    for index, row in enumerate(found):
        numbers = None if row is None else _tensor(row)
        if row is not None and (numbers is None or list(numbers.shape) != [2] or bool((numbers < 0).any())):
            shown = tuple(numbers.tolist()) if numbers is not None and numbers.dim() == 1 else _described(row)
            raise WrongForm(f"your row {index} is {shown}: a pair (query, head) is expected, and None for a spare row")
        rows.append(None if numbers is None else tuple(numbers.tolist()))
    return rows


def _merged(found: Any, expected: tuple[list[float], float]) -> tuple[list[float], float]:
    head_dim = len(expected[0])
    asked = f"a pair (output of the shape [{head_dim}], log-sum-exp) is expected"
    if not isinstance(found, (list, tuple)) or len(found) != 2:
        raise WrongForm(f"you returned {_described(found)}, and {asked}")
    out, lse = map(_tensor, found)
    if out is None or lse is None or list(out.shape) != [head_dim] or lse.numel() != 1:
        swapped = lse is not None and list(lse.shape) == [head_dim] and out is not None and out.numel() == 1
        hint = " in this order" if swapped else ""
        raise WrongForm(f"you returned a pair of {_described(found[0])} and {_described(found[1])}, and {asked}{hint}")
    return [round(x, 3) for x in out.tolist()], round(lse.item(), 3)


def _tensor(found: Any) -> Tensor | None:
    """Numbers, tensors, and lists of either as a tensor; None if that can't be."""
    try:
        if isinstance(found, (list, tuple)):
            return torch.stack([torch.as_tensor(_tensor(item)) for item in found])
        return torch.as_tensor(found)
    except Exception:
        return None


def _described(found: Any) -> str:
    tensor = _tensor(found)
    if tensor is None:
        return repr(found)
    if not tensor.dim():
        return f"the number {tensor.item()}"
    return f"{'a tensor' if isinstance(found, Tensor) else 'a list'} of the shape {list(tensor.shape)}"
