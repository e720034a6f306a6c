"""Appendix 1: where a decode step's time goes on a CPU, part by part, and how short it could be."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.cpu.decoder import CpuDecoder
from minivllm.cpu.products import Packed, product, shares_of
from minivllm.cpu.vectors import as_numpy
from minivllm.lessons.machine import best_seconds
from minivllm.model.attention import Attention, AttentionMetadata, KVCache
from minivllm.model.decoder import Decoder
from minivllm.model.inputs import PassRow, pack_rows

BLOCK_SIZE, REPEATS = 16, 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepProfile:
    """A decode step and its parts, in milliseconds.

    Attributes:
        batch: requests, each with one new token.
        context: tokens of each, the new one included.
        products: the matrices of all layers.
        attention: of all layers, with the new keys and values stored.
        head: the matrix that makes scores of all vocabulary entries.
        rest: what remains of the step: norms, rotation, activation, and the calls themselves.
    """

    batch: int
    context: int
    products: float
    attention: float
    head: float
    rest: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.products + self.attention + self.head + self.rest

    @property
    def parts(self) -> dict[str, float]:
        """Name to milliseconds, from the first part of a layer on."""
        return {name: getattr(self, name) for name in ("products", "attention", "head", "rest")}


class DecodeStep:
    """A decode step on random keys and values, in blocks that lie scattered.

    Attributes:
        metadata: of its pass.
    """

    def __init__(self, model: Decoder, backend: type[Attention], batch: int, context: int, num_shared: int = 0) -> None:
        """Fills the memory.

        Args:
            model: the decoder, on a CPU.
            backend: how it attends.
            batch: requests.
            context: tokens of each.
            num_shared: tokens that all begin with, in the same blocks; whole blocks of them count.
        """
        torch.manual_seed(0)
        self.model, self.batch, self.context, config = model, batch, context, model.config
        self.metadata, self.input_ids, self.positions = decode_inputs(batch, context, num_shared)
        self.cache = KVCache(config, batch * -(-context // BLOCK_SIZE), BLOCK_SIZE, model.dtype, CPU)
        self.cache.keys.normal_()
        self.cache.values.normal_()
        self._attend: Callable[[], Any] = lambda: backend(self.cache, self.metadata, config.sliding_window)

    def run(self) -> Tensor:
        """The step, up to the scores: `[batch, vocab_size]`."""
        hidden = self.model(self.input_ids, self.positions, self._attend())
        return self.model.compute_logits(hidden)

    def attention(self) -> None:
        """Attention alone, of all layers."""
        config, attend = self.model.config, self._attend()
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        heads = torch.zeros(self.batch, sum(counts), config.head_dim, dtype=self.model.dtype).split(counts, dim=1)
        for layer in range(config.num_layers):
            attend(layer, *heads)

    def products(self) -> None:
        """The matrices of all layers alone, on whatever numbers."""
        for multiply in products_of(self.model, self.batch):
            multiply()

    def head(self) -> None:
        """The last matrix alone."""
        self.model.compute_logits(torch.zeros(self.batch, self.model.config.hidden_size, dtype=self.model.dtype))


def decode_inputs(batch: int, context: int, num_shared: int = 0) -> tuple[AttentionMetadata, Tensor, Tensor]:
    """The metadata, ids and positions of a decode step, for requests whose blocks lie scattered but for those of
    `num_shared` tokens, which are the same for all."""
    per_row, common = -(-context // BLOCK_SIZE), num_shared // BLOCK_SIZE
    tables = torch.randperm(batch * per_row).view(batch, per_row)
    tables[:, :common] = tables[0, :common].clone()
    rows = [PassRow([0] * context, context - 1, context, table) for table in tables.tolist()]
    return pack_rows(rows, BLOCK_SIZE, CPU)


def products_of(model: Decoder, rows: int) -> list[Callable[[], object]]:
    """The products of all layers of either decoder with so many rows of zeros, each as a function."""
    if isinstance(model, CpuDecoder):
        return [
            partial(_packed_product, packed, layer, rows, model.dtype)
            for layer in range(model.config.num_layers)
            for packed in model.matrices
        ]
    linears = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
    return [partial(linear, torch.zeros(rows, linear.in_features, dtype=model.dtype)) for linear in linears]


def _packed_product(packed: Packed, layer: int, rows: int, dtype: torch.dtype) -> None:
    pair = 2 if dtype == torch.bfloat16 else 1
    x = torch.zeros(rows, packed.weights.shape[2] * pair, dtype=dtype)
    out = torch.empty(rows, packed.bias.shape[1], dtype=dtype)
    product(as_numpy(x), packed, layer, as_numpy(out), shares_of(packed))


@torch.inference_mode()
def profile_step(
    model: Decoder, backend: type[Attention], batch: int, context: int, repeats: int = REPEATS
) -> StepProfile:
    """Measures a decode step and its parts, each alone and in turns; the best of several, in one sitting."""
    step = DecodeStep(model, backend, batch, context)
    runs = (step.run, step.products, step.attention, step.head)
    best = [float("inf")] * len(runs)
    for number in range(repeats + 1):  # the first warms up
        for index, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[index] = min(best[index], 1000 * (time.perf_counter() - started)) if number else best[index]
    total, *parts = best
    products, attention, head = parts
    return StepProfile(batch, context, products, attention, head, max(total - sum(parts), 0.0))


@torch.inference_mode()
def attention_ms(model: Decoder, backend: type[Attention], batch: int, context: int, num_shared: int) -> float:
    """Attention of a decode step, all layers: the best of several, in milliseconds."""
    step = DecodeStep(model, backend, batch, context, num_shared)
    return 1000 * best_seconds(step.attention, CPU, REPEATS)
