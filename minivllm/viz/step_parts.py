"""What a step is made of: bars beside each other for what was changed, and below each other for batches."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from minivllm.viz.style import INK, PALETTE, styled

HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\")


def step_parts(
    steps: Mapping[str, Mapping[str, Mapping[str, float]]], floors: Sequence[float], title: str, xlabel: str
) -> Figure:
    """Stacked bars, a panel for each batch.

    Args:
        steps: name of a panel to names of bars to the parts of each, in its order.
        floors: one for each panel: below that no bar can be.
        title: of the figure.
        xlabel: with the unit.
    """
    with styled():
        num_bars = sum(len(bars) for bars in steps.values())
        fig, axes = plt.subplots(
            len(steps),
            1,
            figsize=(7.2, 1.3 + 0.36 * num_bars + 0.3 * len(steps)),
            squeeze=False,
            gridspec_kw={"height_ratios": [len(bars) for bars in steps.values()]},
        )
        for ax, (name, bars), floor in zip(axes[:, 0], steps.items(), floors, strict=True):
            left = dict.fromkeys(bars, 0.0)
            for index, part in enumerate(next(iter(bars.values()))):
                widths = [parts[part] for parts in bars.values()]
                look = {"color": PALETTE[index], "hatch": HATCHES[index], "edgecolor": "white", "linewidth": 0.5}
                ax.barh(list(bars), widths, left=list(left.values()), label=part, **look)
                left = {bar: left[bar] + width for bar, width in zip(bars, widths, strict=True)}
            for place, total in enumerate(left.values()):
                ax.text(total, place, f" {total:.3g}", va="center", color=INK)
            ax.axvline(floor, color=INK, linestyle="--", linewidth=1.2, label="floor")
            ax.invert_yaxis()
            ax.grid(axis="y", visible=False)
            ax.margins(x=0.12)
            ax.set_xlim(left=0)
            ax.set_title(name, fontsize="medium", loc="left")
        axes[-1, 0].set_xlabel(xlabel)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        fig.suptitle(title)
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return fig
