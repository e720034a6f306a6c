"""Predictions: a learner's guesses, kept until the recap lays them beside what happened."""

from collections.abc import Mapping


def compare(guesses: Mapping[str, float | str | None], happened: Mapping[str, float | str]) -> None:
    """Prints a table of guesses and outcomes; a number within a quarter of the outcome counts as right.

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
        elif isinstance(guess, str) or isinstance(outcome, str):
            verdict = "right" if str(guess).lower() == str(outcome).lower() else "look again"
        else:
            verdict = "right" if abs(guess - float(outcome)) <= abs(float(outcome)) / 4 else "look again"
        shown = "-" if guess is None else _form(guess)
        print(f"{question:<{width}}  {shown:>12}  {_form(outcome):>12}  {verdict}")


def _form(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
