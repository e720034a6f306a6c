"""RESULTS.md, the file of figures: each program that measures has a block of it, between two markers."""

from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def markers(owner: str) -> tuple[str, str]:
    """The lines above and below the block of a `make` target."""
    return f"<!-- {owner}: begin -->", f"<!-- {owner}: end -->"


def replace_block(text: str, owner: str, block: str) -> str:
    """A file's text with a new block between its owner's markers; the rest is as it was. Without markers it goes to
    the end.

    Raises:
        ValueError: markers that are not one pair.
    """
    begin, end = markers(owner)
    marked = f"{begin}\n{block}\n{end}"
    if begin not in text and end not in text:
        return f"{text.rstrip()}\n\n{marked}\n"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or not found:
        raise ValueError(
            f"the file of figures must have {begin} once and {end} once behind it: mend it, or delete both"
        )
    return before + marked + after
