"""Figures of streaming and serving."""

import matplotlib.pyplot as plt
import pytest

from minivllm import viz

PIECES = [(b"na", "na"), (b"\xc3\xafve", "ïve"), (b" \xe2", " "), (b"\x98", ""), (b"\xba", "☺"), (b"!", "!")]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def boxes(fig):
    """Row to its boxes, each as (first byte, bytes, text, whether it is hatched)."""
    [ax] = fig.axes
    texts = [text.get_text() for text in ax.texts]
    found = {}
    for patch, text in zip(ax.patches[: len(texts)], texts, strict=True):
        x, y = patch.get_xy()
        found.setdefault(int(y), []).append((x, patch.get_width(), text, bool(patch.get_hatch())))
    return [found[row] for row in (3, 2, 1, 0)]


def test_bytes_characters_and_tokens_lie_above_each_other():
    characters, each_byte, tokens, shown = boxes(viz.token_bytes(PIECES, "Title"))
    assert [(x, width, text) for x, width, text, _ in characters] == [
        *[(0, 1, "n"), (1, 1, "a"), (2, 2, "ï"), (4, 1, "v"), (5, 1, "e"), (6, 1, "␣"), (7, 3, "☺"), (10, 1, "!")]
    ]
    assert "".join(text for _, _, text, _ in each_byte) == "naïve ☺!".encode().hex()
    assert [(x, width) for x, width, *_ in tokens] == [(0, 2), (2, 4), (6, 2), (8, 1), (9, 1), (10, 1)]
    assert [hatched for *_, hatched in tokens] == [False, False, False, True, False, False]
    assert [text for _, _, text, _ in shown] == ["na", "ïve", "␣", "–", "☺", "!"]


def test_texts_must_be_what_the_bytes_say():
    with pytest.raises(ValueError, match=r"the tokens' bytes say b'na', and the texts shown are 'no'"):
        viz.token_bytes([(b"na", "no")], "Title")


def test_a_reader_has_nothing_and_then_stairs():
    fig = viz.text_over_time({"streamed": [(1.0, 3), (2.0, 5), (4.0, 9)], "whole": [(3.0, 9)]}, "Title")
    streamed, whole = (fig.axes[0].lines[index] for index in (0, 2))
    assert (list(streamed.get_xdata()), list(streamed.get_ydata())) == ([0, 1, 2, 4, 4], [0, 3, 5, 9, 9])
    assert (list(whole.get_xdata()), list(whole.get_ydata())) == ([0, 3, 4], [0, 9, 9])  # to the end of the other
    assert streamed.get_drawstyle() == "steps-post"


def test_who_got_nothing_can_not_be_drawn():
    with pytest.raises(ValueError, match="whole: nothing came"):
        viz.text_over_time({"streamed": [(1.0, 3)], "whole": []}, "Title")


def test_gauges_are_stairs_with_whole_numbers():
    fig = viz.gauges_over_time([0.0, 0.5, 1.0], {"running": [0, 4, 2], "waiting": [0, 2, 0]}, "Title", "requests")
    text = viz.digest(fig).splitlines()
    assert text[1:] == ["  line 'running' n=3: 0, 4, 2", "  line 'waiting' n=3: 0, 2, 0"]
    assert all(line.get_drawstyle() == "steps-post" for line in fig.axes[0].lines)
    assert all(tick == int(tick) for tick in fig.axes[0].get_yticks())
