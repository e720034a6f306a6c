"""Predictions: a learner's guesses, kept until the recap lays them beside what happened."""

import re
from collections.abc import Mapping
from typing import Any


def compare(guesses: Mapping[str, Any], happened: Mapping[str, float | str]) -> None:
    """Prints a table of guesses and outcomes.

    A whole number up to 100 must be met exactly, any other number within a quarter of it; in a text only the
    words and numbers count.

    Args:
        guesses: question to guess; None where none was made.
        happened: question to outcome, for every question guessed.

    Raises:
        ValueError: a guess without an outcome.
    """
    unknown = sorted(set(guesses) - set(happened))
    if unknown:
        raise ValueError(f"no outcome for {', '.join(unknown)}")
    width = max(len(question) for question in (*happened, "question"))
    print(f"{'question':<{width}}  {'you':>12}  {'happened':>12}")
    for question, outcome in happened.items():
        guess = guesses.get(question)
        if guess is None:
            verdict = "(no guess yet)"
        else:
            verdict = "right" if _is_right(guess, outcome) else "look again"
        shown = "-" if guess is None else _form(guess)
        print(f"{question:<{width}}  {shown:>12}  {_form(outcome):>12}  {verdict}")


def _is_right(guess: Any, outcome: float | str) -> bool:
    if isinstance(outcome, str) or not isinstance(guess, (int, float)):
        return re.findall(r"\w+", str(guess).lower()) == re.findall(r"\w+", str(outcome).lower())
    tolerance = 0.0 if isinstance(outcome, int) and outcome <= 100 else abs(outcome) / 4
    return abs(guess - outcome) <= tolerance


def _form(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
