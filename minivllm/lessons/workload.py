"""Requests with the length spread of real traffic, made small enough for a laptop."""

import json
import random
from pathlib import Path

import numpy as np

TABLE = Path(__file__).resolve().parents[2] / "data" / "length_quantiles.json"


def real_lengths(count: int, trace: str = "sharegpt_8k", shrink: int = 1, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and answer lengths of `count` requests, spread as in a real trace.

    The lengths stand at the middles of `count` equal slices of each distribution, so that even a few of
    them have its spread; the two are shuffled apart (in the traces they hardly correlate).

    Args:
        count: how many requests.
        trace: a key of data/length_quantiles.json.
        shrink: divides every length; the shape of the distribution stays.
        seed: of the shuffle.

    Returns:
        Pairs (prompt tokens, answer tokens), each at least 1.

    Raises:
        ValueError: an unknown trace, or numbers below 1.
    """
    tables = json.loads(TABLE.read_text())
    if trace not in tables or count < 1 or shrink < 1:
        raise ValueError(
            f"trace must be one of {', '.join(tables)}, count and shrink at least 1: got {trace!r}, {count}, {shrink}"
        )
    middles = (np.arange(count) + 0.5) / count * 100
    columns = []
    for index, side in enumerate(("input", "output")):
        percentiles = {float(key): value for key, value in tables[trace][side]["percentiles"].items()}
        lengths = np.interp(middles, sorted(percentiles), [percentiles[key] for key in sorted(percentiles)])
        column = [max(1, round(length / shrink)) for length in lengths.tolist()]
        random.Random(f"{seed}-{index}").shuffle(column)
        columns.append(column)
    return list(zip(*columns, strict=True))


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids for a prompt whose content does not matter."""
    return [random.Random(f"{seed}-{i}").randrange(100, 40_000) for i in range(length)]
