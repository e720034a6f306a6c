"""Figures of streaming and serving: what an answer's tokens are made of, how its text comes to a reader, and what a
server's gauges showed meanwhile."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from minivllm.viz.style import FAINT, INK, PALETTE, as_text, styled


def text_over_time(readers: Mapping[str, Sequence[tuple[float, int]]], title: str) -> Figure:
    """How much of an answer each reader has, as time goes on: a staircase, with a dot where the first text came.

    Args:
        readers: who, to (seconds since the question, characters so far), in order of time.
        title: of the figure.

    Raises:
        ValueError: somebody never got anything.
    """
    for name, came in readers.items():
        if not came:
            raise ValueError(f"{name}: nothing came, so that there is nothing to draw")
    end = max(came[-1][0] for came in readers.values())
    with styled():
        fig, ax = plt.subplots()
        for index, (name, came) in enumerate(readers.items()):
            color, style = PALETTE[index], ["-", "--", ":", "-."][index % 4]
            times, sizes = [0.0, *(at for at, _ in came), end], [0, *(size for _, size in came), came[-1][1]]
            ax.step(times, sizes, style, where="post", color=color, label=as_text(name))
            ax.plot([came[0][0]], [came[0][1]], "o", color=color)
        ax.set(title=title, xlabel="seconds since the question", ylabel="characters to read", xlim=(0, end))
        ax.set_ylim(bottom=0)
        ax.legend(loc="upper left")
        return fig


def token_bytes(tokens: Sequence[tuple[bytes, str]], title: str) -> Figure:
    """An answer's bytes, the characters above them, and below them the tokens with the text that each makes certain.

    A token in which no character ends is hatched: it has nothing to show.

    Args:
        tokens: (bytes, text that can be shown once it is there), in order; the texts make up what the bytes say.
        title: of the figure.

    Raises:
        ValueError: the texts are not what the bytes say.
    """
    joined, text = b"".join(piece for piece, _ in tokens), "".join(shown for _, shown in tokens)
    if joined.decode("utf-8", "replace") != text:
        raise ValueError(f"the tokens' bytes say {joined!r}, and the texts shown are {text!r}")
    with styled():
        fig, ax = plt.subplots(figsize=(7.2, 2.6))
        at = 0
        for character in text:
            width = len(character.encode())
            _box(ax, at, width, 3, "white", _visible(character))
            at += width
        for place, byte in enumerate(joined):
            _box(ax, place, 1, 2, FAINT, f"{byte:02x}")
        at = 0
        for number, (piece, shown) in enumerate(tokens, start=1):
            _box(ax, at, len(piece), 1, PALETTE[4] if shown else "white", f"{number}", hatch="" if shown else "////")
            _box(ax, at, len(piece), 0, "white", _visible(shown) if shown else "–")
            at += len(piece)
        lengths = [len(piece) for piece, _ in tokens]
        ax.bar(range(len(lengths)), lengths, width=0, label="bytes of each token")  # for the text twin
        ax.set(title=title, xlim=(0, len(joined)), ylim=(0, 4), xlabel="byte of the answer", ylabel="")
        ax.set_yticks([3.5, 2.5, 1.5, 0.5], ["characters", "bytes", "tokens", "shown with it"])
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.tick_params(length=0)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        return fig


def gauges_over_time(times: Sequence[float], gauges: Mapping[str, Sequence[float]], title: str, ylabel: str) -> Figure:
    """What was counted at each time, as stairs: a gauge keeps what it shows until somebody looks again.

    Args:
        times: `[n]`, in seconds.
        gauges: name to `[n]` counts.
        title: of the figure.
        ylabel: what is counted.
    """
    with styled():
        fig, ax = plt.subplots()
        for index, (name, counts) in enumerate(gauges.items()):
            color, style = PALETTE[index], ["-", "--", ":", "-."][index % 4]
            ax.step(times, counts, style, where="post", color=color, label=as_text(name))
        ax.set(title=title, xlabel="seconds", ylabel=ylabel, xlim=(0, times[-1]))
        ax.set_ylim(0, 1.1 * max(1.0, *map(max, gauges.values())))
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        if len(gauges) > 1:
            ax.legend(loc="upper right")
        return fig


def _box(ax: Axes, x: float, width: float, y: float, color: str, text: str, hatch: str = "") -> None:
    ax.add_patch(Rectangle((x, y + 0.1), width, 0.8, facecolor=color, edgecolor=INK, hatch=hatch, linewidth=0.8))
    bbox = {"facecolor": "white", "edgecolor": "none", "pad": 1} if hatch else None
    ax.text(x + width / 2, y + 0.5, as_text(text), ha="center", va="center", fontsize=9, bbox=bbox)


def _visible(text: str) -> str:
    """A text whose spaces can be seen."""
    return text.replace(" ", "␣")
