"""What attention costs: flops and bytes by count, cards by their data sheets, the kernel's bandwidth by the clock."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minivllm.lessons.kernel import launch_kernel, make_call
from minivllm.lessons.machine import best_seconds
from minivllm.model.inputs import PassRow, pack_rows

CARDS = Path(__file__).resolve().parents[2] / "data" / "cards.json"


@dataclass(frozen=True)
class AttentionCost:
    """The least work of attention in one layer.

    Attributes:
        flops: multiplications and additions of the two products, for the keys that may be seen.
        kv_bytes: keys and values, each read once.
        query_bytes: queries read and outputs written.
    """

    flops: int
    kv_bytes: int
    query_bytes: int

    @property
    def intensity(self) -> float:
        """Flops per byte moved."""
        return self.flops / (self.kv_bytes + self.query_bytes)

    @property
    def gather_bytes(self) -> int:
        """Bytes that move where keys and values are first copied: read, written, and read again."""
        return 3 * self.kv_bytes + self.query_bytes


def attention_cost(
    rows: Sequence[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> AttentionCost:
    """Cost of attention for requests with (query tokens, all tokens), numbers of `itemsize` bytes."""
    seen = sum(n * (length - n) + n * (n + 1) // 2 for n, length in rows)
    return AttentionCost(
        flops=4 * num_heads * head_dim * seen,
        kv_bytes=2 * sum(length for _, length in rows) * num_kv_heads * head_dim * itemsize,
        query_bytes=2 * sum(n for n, _ in rows) * num_heads * head_dim * itemsize,
    )


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: bandwidth, dense bfloat16 rate, multiprocessors, and the data sheet's address."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    num_processors: int
    source: str


def cards() -> list[Card]:
    """The cards of data/cards.json."""
    return [Card(**card) for card in json.loads(CARDS.read_text())]


def measure_decode(device: torch.device, batch: int = 256, context: int = 8192) -> tuple[float, float, float]:
    """Measures a decode pass of the kernel (9 query and 3 KV heads of 64, bfloat16) beside a copy on the same device.

    Returns:
        Flops per byte of the pass, bytes per second of the kernel, bytes per second of the copy (read and written).
    """
    per_request = -(-context // 16)
    blocks = torch.randperm(batch * per_request).view(batch, per_request).tolist()
    metadata, _, _ = pack_rows([PassRow([0] * context, context - 1, context, table) for table in blocks], 16, device)
    keys, values, q = (
        torch.randn(*shape, dtype=torch.bfloat16, device=device)
        for shape in ((batch * per_request, 16, 3, 64),) * 2 + ((batch, 9, 64),)
    )
    call = make_call(q, keys, values, metadata)
    cost, target, times = attention_cost([(1, context)] * batch, 9, 3, 64, 2), torch.empty_like(keys), 10
    kernel_s = best_seconds(lambda: [launch_kernel(call) for _ in range(times)], device, repeats=5) / times
    copy_s = best_seconds(lambda: [target.copy_(keys) for _ in range(times)], device, repeats=5) / times
    return cost.intensity, (cost.kv_bytes + cost.query_bytes) / kernel_s, 2 * keys.nbytes / copy_s
