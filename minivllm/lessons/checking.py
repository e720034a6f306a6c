"""How a check of an exercise goes: case by case; the first that is not right is told in a sentence, with numbers."""

from collections.abc import Callable, Sequence
from typing import Any


class WrongForm(Exception):
    """What is returned is not of the form that was asked for; the message says what is."""


def check(
    answer: Callable[..., Any],
    cases: Sequence[tuple[str, tuple[Any, ...], Any]],
    form: Callable[[Any, Any], Any] | None = None,
    difference: Callable[[Any, Any], str] | None = None,
) -> bool:
    """Prints a sentence, and returns whether all cases are right.

    Args:
        answer: the function that the learner wrote.
        cases: (what it is, in words; arguments; what is to be returned).
        form: of (what was returned, what is right), what was returned in the form that is compared; it raises
            `WrongForm` where there is none.
        difference: of the same two, in that form, what differs, in words; None says both in full.
    """
    for what, arguments, expected in cases:
        try:
            found = answer(*arguments)
        except Exception as error:
            return say(False, f"not yet: for {what} your function raised {error!r}")
        if found is None or found is ...:
            return say(False, f"not yet: for {what} your function returned {found!r}; fill in its body")
        try:
            found = form(found, expected) if form else found
        except WrongForm as problem:
            return say(False, f"not yet: for {what} {problem}")
        if not _equal(found, expected):
            told = difference(found, expected) if difference else f"you got {found!r}, it is {expected!r}"
            return say(False, f"not yet: for {what} {told}")
    return say(True, f"right: all {len(cases)} cases")


def say(right: bool, sentence: str) -> bool:
    """Prints the sentence."""
    print(sentence)
    return right


def _equal(found: Any, expected: Any) -> bool:
    """Whether an answer is right; any sequence will do for a list, and an answer of any other kind is wrong."""
    try:
        if isinstance(expected, list):
            return list(found) == expected
        if isinstance(expected, float):
            return abs(float(found) - expected) < 1e-9
        return bool(found == expected)
    except Exception:
        return False
