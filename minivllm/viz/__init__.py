"""Figures, drawn from plain records only; nothing here knows the engine."""

from minivllm.viz.display import digest, show
from minivllm.viz.evictions import eviction_timeline
from minivllm.viz.explorer import Explorer, export_html, view
from minivllm.viz.figures import SlabRow, growth, horizontal_bars, live_rows, roofline, slab_map
from minivllm.viz.kernel import card_rooflines, online_softmax, program_reads, programs_per_card
from minivllm.viz.memory import block_tables, fragmentation_over_time, memory_map, replay, stacked_shares
from minivllm.viz.prefix_cache import hit_rate, ttft_cold_warm
from minivllm.viz.prefix_tree import prefix_tree
from minivllm.viz.sentences import explain, narrate
from minivllm.viz.step_parts import step_parts
from minivllm.viz.streaming import gauges_over_time, text_over_time, token_bytes
from minivllm.viz.throughput import (
    BatchPoint,
    batch_point,
    batch_size_curves,
    knee,
    queue_and_usage,
    token_budget,
    token_gaps,
)
from minivllm.viz.timeline import compare_traces, request_timeline

__all__ = [
    "BatchPoint",
    "Explorer",
    "SlabRow",
    "batch_point",
    "batch_size_curves",
    "block_tables",
    "card_rooflines",
    "compare_traces",
    "digest",
    "eviction_timeline",
    "explain",
    "export_html",
    "fragmentation_over_time",
    "gauges_over_time",
    "growth",
    "hit_rate",
    "horizontal_bars",
    "knee",
    "live_rows",
    "memory_map",
    "narrate",
    "online_softmax",
    "prefix_tree",
    "program_reads",
    "programs_per_card",
    "queue_and_usage",
    "replay",
    "request_timeline",
    "roofline",
    "show",
    "slab_map",
    "stacked_shares",
    "step_parts",
    "text_over_time",
    "token_budget",
    "token_bytes",
    "token_gaps",
    "ttft_cold_warm",
    "view",
]
