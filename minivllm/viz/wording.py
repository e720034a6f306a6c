"""Lists in sentences."""

from collections.abc import Sequence

MOST_NAMES = 6  # a sentence with more names counts the rest


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "R1", "R1 and R2", "R1, R2 and R3", "R1, …, R6 and 12 others"."""
    shown = list(names)
    if len(shown) > MOST_NAMES + 1:
        shown[MOST_NAMES:] = [f"{len(names) - MOST_NAMES} others"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
