"""One look for all figures: a colour-blind safe palette in which a request keeps its colour.

Seven colours are those of Okabe and Ito ("Color Universal Design", 2008); their black and grey are left to
what is nobody's, and a wine red stands in. What differs in kind differs in hatch too, so that a figure still
reads in grey.
"""

from contextlib import AbstractContextManager
from typing import Any

import matplotlib.pyplot as plt

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#882255")
INK, FAINT = "#222222", "#DDDDDD"

RC: dict[str, Any] = {
    "figure.figsize": (7.2, 3.4),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


def styled() -> AbstractContextManager[None]:
    """Everything drawn inside has our look; nothing outside changes."""
    return plt.rc_context(RC)  # type: ignore[arg-type]


def as_text(name: str) -> str:
    """A request's name for matplotlib, which would read mathematics between dollars and hide what begins with "_"."""
    text = name.encode("utf-8", "replace").decode().replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def request_color(index: int) -> str:
    """The colour of the `index`-th request of a notebook, in every figure of it."""
    return PALETTE[index % len(PALETTE)]
