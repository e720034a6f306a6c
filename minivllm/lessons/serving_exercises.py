"""Checks of the exercises of lesson 07; reached through `minivllm.lessons.exercises`, like all others."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.lessons.checking import check


def check_safe_length(answer: Callable[[str, Sequence[str]], Any]) -> bool:
    """Lesson 07: `answer(text, stops)` is how many characters of an answer that is still growing may be shown: those
    before a stop string that is there, else those before what may become one."""
    cases = []
    for text, stops in (
        ("the ex", ["end"]),
        ("the en", ["end"]),
        ("the end of", ["end"]),
        ("aaa", ["aab"]),
        ("one\n", ["\n\n"]),
        ("stop", ["top!", "pt"]),
        ("a stop", ["top", "a s"]),
        ("ab", ["abcd", "b"]),
        ("nothing", []),
    ):
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        begun = [at for at in range(len(text)) for stop in stops if stop.startswith(text[at:])]
        cases.append((f"{text!r} with stop strings {stops}", (text, stops), min(found or [*begun, len(text)])))
    return check(answer, cases)


def check_texts_of_stream(answer: Callable[[Sequence[bytes]], Any]) -> bool:
    """Lesson 07: `answer(parts)` lists the texts of a streamed completion, whose bytes came from the network in parts
    that begin and end anywhere."""
    texts = ["na", "ïve", "", " ☺", "\n\ndata: x", "!"]
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": text}]} for text in texts]
    events.append({"choices": [], "usage": {"completion_tokens": len(texts)}})
    wire = b"".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events)
    wire += b"data: [DONE]\n\n"
    by_event = [event + b"\n\n" for event in wire.split(b"\n\n")[:-1]]
    cases: list[tuple[str, tuple[Any, ...], Any]] = [
        ("an event in each part", (by_event,), texts),
        ("everything in one part", ([wire],), texts),
    ]
    for size in (10, 3, 1):
        parts = [wire[at : at + size] for at in range(0, len(wire), size)]
        cases.append((f"parts of {size} bytes", (parts,), texts))
    return check(answer, cases)
