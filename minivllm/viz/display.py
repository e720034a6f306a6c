"""Showing a figure: a picture for the eye and a sentence for everything else.

`show` puts out a PNG and a text twin. nbval compares the twin, so an empty or changed figure fails a
notebook's test; a screen reader, or a page without pictures, gets the sentence.
"""

import base64
import io
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from PIL import Image


def show(fig: Figure, alt: str, measured: bool = False) -> None:
    """Displays a figure with its alt text, and closes it.

    Args:
        fig: the figure.
        alt: one or two sentences that tell what is to be seen.
        measured: the figure shows times or rates of this machine: the text twin then lists titles, labels
            and counts only, so that another machine's notebook still compares equal.

    Raises:
        ValueError: no alt text, or a figure in which nothing is drawn.
    """
    if not alt.strip():
        raise ValueError("a figure needs alt text: one sentence that tells what is to be seen")
    text = digest(fig, values=not measured)
    data = {"image/png": base64.b64encode(png(fig)).decode(), "text/plain": f"[figure] {alt}\n{text}"}
    plt.close(fig)
    display(data, raw=True, metadata={"image/png": {"alt": alt}})


def png(fig: Figure) -> bytes:
    """A figure as a PNG of 256 colours: less than half of the size, and nobody sees a difference."""
    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def digest(fig: Figure, values: bool = True) -> str:
    """What a figure shows, in text: titles, labels, and its lines, bars, areas and images.

    Args:
        fig: the figure.
        values: whether numbers (rounded to three digits) are listed, or only how many there are.

    Raises:
        ValueError: nothing is drawn.
    """
    lines, num_series = [], 0
    for index, ax in enumerate(fig.axes):
        series = _series(ax, values)
        num_series += len(series)
        lines.append(f"axes {index}: {ax.get_title(loc='left')!r} x={ax.get_xlabel()!r} y={ax.get_ylabel()!r}")
        lines += [f"  {item}" for item in series]
    if not num_series:
        raise ValueError("the figure is empty: no line, bar or area is drawn in it")
    return "\n".join(lines)


def _series(ax: Axes, values: bool) -> list[str]:
    found = []
    for line in ax.get_lines():
        if not str(line.get_label()).startswith("_"):
            found.append(_one("line", line.get_label(), np.asarray(line.get_ydata()).tolist(), values))
    for container in ax.containers:
        if isinstance(container, BarContainer) and not str(container.get_label()).startswith("_"):
            upright = container.orientation == "vertical"
            sizes = [bar.get_height() if upright else bar.get_width() for bar in container.patches]
            found.append(_one("bars", container.get_label(), sizes, values))
    for image in ax.get_images():
        pixels = np.asarray(image.get_array())
        shape = " x ".join(map(str, pixels.shape[:2]))
        found.append(f"image {image.get_label()!r} {shape}" + (f", mean {pixels.mean():.3g}" if values else ""))
    for area in ax.collections:
        if isinstance(area, PolyCollection) and not str(area.get_label()).startswith("_"):
            found.append(_one("area", area.get_label(), [], values))
    return found


def _one(kind: str, label: Any, numbers: list[Any], values: bool) -> str:
    shown = [f"{float(number):.3g}" for number in numbers]
    if len(shown) > 12:
        shown = [*shown[:3], "…", *shown[-3:]]
    listed = f": {', '.join(shown)}" if values and numbers else ""
    return f"{kind} {label!r} n={len(numbers)}{listed}"
