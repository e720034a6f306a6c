"""Figures, drawn from plain records only; nothing here knows the engine."""

from minivllm.viz.display import digest, show
from minivllm.viz.figures import SlabRow, growth, horizontal_bars, live_rows, roofline, slab_map
from minivllm.viz.memory import block_tables, fragmentation_over_time, memory_map, replay, stacked_shares

__all__ = [
    "SlabRow",
    "block_tables",
    "digest",
    "fragmentation_over_time",
    "growth",
    "horizontal_bars",
    "live_rows",
    "memory_map",
    "replay",
    "roofline",
    "show",
    "slab_map",
    "stacked_shares",
]
