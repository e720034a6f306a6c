"""Figures, drawn from plain records only; nothing here knows the engine."""

from minivllm.viz.display import digest, show
from minivllm.viz.figures import SlabRow, growth, horizontal_bars, live_rows, roofline, slab_map

__all__ = ["SlabRow", "digest", "growth", "horizontal_bars", "live_rows", "roofline", "show", "slab_map"]
