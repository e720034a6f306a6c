"""What the lesson on kernels needs beside the kernels: what a program reads, and runs of them wherever there is none.

Every run goes to `kernel_process.run`; without Triton the torch reference stands in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import minivllm.kernels
from minivllm.kernels.launch import SM_89, Launch, choose_launch
from minivllm.lessons import kernel_process
from minivllm.model.attention import AttentionMetadata, write_kv
from minivllm.model.attention import paged_attention as reference
from minivllm.model.inputs import PassRow, pack_rows

SHARED_LIMIT = SM_89  # bytes of the card that the lesson's tiles are chosen for


@dataclass(frozen=True)
class KernelCall:
    """What the paged attention kernel is called with.

    Attributes:
        q: `[num_tokens, num_heads, head_dim]`.
        keys: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        values: like `keys`.
        metadata: of the pass.
        launch: sizes of the tiles.
        window: keys that a token may see; None for all.
        num_splits: parts of every request's keys.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata
    launch: Launch
    window: int | None = None
    num_splits: int = 1

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.keys.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Query tiles (as many as there can be), KV heads, splits."""
        return len(self.q) // self.launch.block_q + len(self.metadata.seq_lens), self.keys.shape[2], self.num_splits

    def to(self, device: torch.device) -> "KernelCall":
        """The same call on another device."""
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        moved = replace(self.metadata, **{name: getattr(self.metadata, name).to(device) for name in names})
        tensors = {name: getattr(self, name).to(device) for name in ("q", "keys", "values")}
        return replace(self, metadata=moved, **tensors)


def make_call(q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> KernelCall:
    """A call with the tiles that the package would choose on a small card."""
    launch = choose_launch(q.shape[2], q.shape[1] // keys.shape[2], q.itemsize, SHARED_LIMIT, metadata.max_query_len)
    return KernelCall(q.contiguous(), keys, values, metadata, launch)


def random_call(
    rows: Sequence[tuple[int, int]],
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    seed: int = 0,
) -> KernelCall:
    """Random keys and values in scattered blocks of a pool that is full of NaN elsewhere, in float32.

    Args:
        rows: of each request (its query tokens, all its tokens); the queries are the last of its tokens.
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        head_dim: numbers per head.
        block_size: slots per block; three blocks of the pool stay free.
        seed: of the numbers and of the places.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for _, length in rows]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    keys, values = torch.full((2, len(order), block_size, num_kv_heads, head_dim), torch.nan)
    packed = []
    for (num_queries, length), count in zip(rows, counts, strict=True):
        table, order = order[:count], order[count:]
        packed.append(PassRow([0] * length, length - num_queries, length, table))
        slots = [table[p // block_size] * block_size + p % block_size for p in range(length)]
        for memory in (keys, values):
            memory.flatten(0, 1)[slots] = torch.randn(length, num_kv_heads, head_dim, generator=generator)
    metadata, ids, _ = pack_rows(packed, block_size, torch.device("cpu"))
    return make_call(torch.randn(len(ids), num_heads, head_dim, generator=generator), keys, values, metadata)


@dataclass(frozen=True)
class ProgramReads:
    """What one program of the attention kernel works on.

    Attributes:
        request: whose keys it reads.
        rows: of each row of its query tile (token of the pass, query head); None for a spare row.
        row_positions: of each row, where its token stands in its text; None for a spare row.
        key_tiles: positions of the keys in each tile, in the order in which the tiles are read.
        slot_tiles: the slots where they lie.
    """

    request: int
    rows: tuple[tuple[int, int] | None, ...]
    row_positions: tuple[int | None, ...]
    key_tiles: tuple[tuple[int, ...], ...]
    slot_tiles: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> set[int]:
        """All slots that it reads, of its KV head."""
        return {slot for tile in self.slot_tiles for slot in tile}


def program_reads(call: KernelCall, tile: int, kv_head: int, split: int = 0) -> ProgramReads | None:
    """What the program at a place of the grid reads, by the kernel's own arithmetic; None if it has nothing to do.

    Args:
        call: what the kernel is called with.
        tile: place in the grid: the query tile.
        kv_head: the KV head.
        split: the split of the keys.
    """
    block_q, tile_n, ratio, rows = call.launch.block_q, call.launch.tile_n, call.ratio, range(call.launch.block_m)
    starts, seq_lens = call.metadata.query_start_loc.tolist(), call.metadata.seq_lens.tolist()
    request = max(i for i in range(len(seq_lens)) if starts[i] // block_q + i <= tile)
    start, seq_len = starts[request], seq_lens[request]
    first_query = (tile - start // block_q - request) * block_q
    num_queries = min(starts[request + 1] - start, seq_len)
    if first_query >= num_queries:
        return None

    queries, heads = [first_query + row // ratio for row in rows], [kv_head * ratio + row % ratio for row in rows]
    used = [row < block_q * ratio and queries[row] < num_queries for row in rows]
    context = seq_len - num_queries
    last = context + min(first_query + block_q, num_queries)
    first = max(context + first_query - call.window + 1, 0) // tile_n if call.window else 0
    per_split = -(-(-(-last // tile_n) - first) // call.num_splits)
    begin = first + split * per_split
    ends = range(begin, min(begin + per_split, -(-last // tile_n)))
    key_tiles = [tuple(range(n * tile_n, min((n + 1) * tile_n, last))) for n in ends]
    table, size = call.metadata.block_table[request].tolist(), call.keys.shape[1]
    return ProgramReads(
        request,
        tuple((start + queries[row], heads[row]) if used[row] else None for row in rows),
        tuple(context + queries[row] if used[row] else None for row in rows),
        tuple(key_tiles),
        tuple(tuple(table[p // size] * size + p % size for p in keys) for keys in key_tiles),
    )


def run_kernel(*calls: KernelCall) -> list[tuple[Tensor, Tensor]]:
    """Runs the real kernel.

    Returns:
        Of each call the output, like `q`, and the log-sum-exp, `[num_tokens, num_heads]`; both on the CPU.

    Raises:
        RuntimeError: the interpreter failed; the message has what it said.
    """
    if not kernel_process.HAS_TRITON:
        return [reference(call.q, call.keys, call.values, call.metadata, call.window) for call in calls]
    return kernel_process.run(_launch_all, calls)


def run_changed(call: KernelCall, old: str, new: str) -> tuple[Tensor, Tensor]:
    """Runs the kernel with one piece of its source replaced, always in the interpreter; see `run_changes`."""
    return run_changes(call, [(old, new)])[0]


def run_changes(call: KernelCall, changes: Sequence[tuple[str, str]]) -> list[tuple[Tensor, Tensor]]:
    """Runs the kernel once for each change (old, new) of its source, always in the interpreter.

    Without Triton nothing changes.

    Returns:
        Of each change the output and the log-sum-exp, as `run_kernel` gives them.

    Raises:
        ValueError: `old` does not occur exactly once in the kernel.
        RuntimeError: the changed kernel fails; the message has what the interpreter said.
    """
    from minivllm.lessons.source import kernel_source  # brings IPython, which the interpreter need not wait for

    whole = Path(minivllm.kernels.__path__[0], "paged_attention.py").read_text()
    kernel, texts = kernel_source("paged_attention_kernel"), []
    for old, new in changes:
        if (count := kernel.count(old)) != 1:
            raise ValueError(f"{old!r} occurs {count} times in paged_attention_kernel; take a piece that occurs once")
        texts.append(whole.replace(kernel, kernel.replace(old, new)))
    if not kernel_process.HAS_TRITON:
        return run_kernel(*[call] * len(texts))
    return kernel_process.INTERPRETER.call(_launch_changed, call, texts)


def run_toy(keys: Tensor, table: Tensor, num_keys: int) -> Tensor:
    """Runs `toy_kernel.gather`: the keys of one request and one KV head behind each other, `[num_keys, head_dim]`."""
    if not kernel_process.HAS_TRITON:
        place, size = torch.arange(num_keys), keys.shape[1]
        return keys.flatten(0, 1)[table[place // size] * size + place % size]
    return kernel_process.run(_gather, keys, table, num_keys)


def run_write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Runs `reshape_and_cache`, and returns the pools that it makes of copies of `keys` and `values`."""
    if not kernel_process.HAS_TRITON:
        keys, values = keys.clone(), values.clone()
        write_kv(k, v, keys, values, slot_mapping)
        return keys, values
    return kernel_process.run(_write, k, v, keys, values, slot_mapping)


def run_engine(prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The token ids that the real model writes through the engine with `attention_backend="triton"`, greedily."""
    if not kernel_process.HAS_TRITON:
        return _generate(prompts, max_tokens, "torch")
    return kernel_process.run(_generate, prompts, max_tokens, "triton")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def launch_kernel(call: KernelCall, module: Any = None) -> tuple[Tensor, Tensor]:
    """Launches the kernel on the device where the call lies; in the interpreter's process if that is the CPU.

    Args:
        call: what it is called with.
        module: in which it is defined; None for the package's own.
    """
    from minivllm.kernels import paged_attention as own

    m = call.metadata
    where = (m.query_start_loc, m.seq_lens, m.block_table)
    launch = (module or own).paged_attention
    return launch(call.q, call.keys, call.values, *where, call.launch, call.window, call.num_splits)


def _launch_all(calls: Sequence[KernelCall]) -> list[tuple[Tensor, Tensor]]:
    return [(out.cpu(), lse.cpu()) for out, lse in (launch_kernel(call.to(_device())) for call in calls)]


def _launch_changed(call: KernelCall, texts: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
    results = []
    with TemporaryDirectory() as folder:
        for index, text in enumerate(texts):
            path = Path(folder, f"changed_{index}.py")
            path.write_text(text)
            spec = spec_from_file_location(path.stem, path)
            assert spec and spec.loader
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            results.append(launch_kernel(call, module))
    return results


def _gather(keys: Tensor, table: Tensor, num_keys: int) -> Tensor:
    from minivllm.lessons.toy_kernel import gather

    return gather(keys.to(_device()), table.to(_device()), num_keys).cpu()


def _write(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    from minivllm.kernels.reshape_and_cache import reshape_and_cache

    k, v, keys, values, slot_mapping = (tensor.to(_device(), copy=True) for tensor in tensors)
    reshape_and_cache(k, v, keys, values, slot_mapping)
    return keys.cpu(), values.cpu()


def _generate(prompts: Sequence[str], max_tokens: int, backend: str) -> list[list[int]]:
    from minivllm import LLM, SamplingParams

    where = {"device": _device().type, "attention_backend": backend}
    llm = LLM("smollm2-135m", dtype="float32", num_kv_blocks=64, **where)
    outputs = llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
