"""A trace: every step of an engine as one plain JSON object, and the state rebuilt from them.

A trace is a header and a list of steps. It can be saved (JSON lines: the header first), loaded, and opened in
Perfetto. Everything that is drawn is drawn from a trace, through `Trace.state`. Nothing here draws.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from minivllm.config import check_int, is_int
from minivllm.kv_cache import Fragmentation

SCHEMA, VERSION = "minivllm.trace", 2
ADMISSIONS = ("admit", "resume")  # the kinds of decision that bring a request into the batch


@dataclass
class RequestState:
    """A request as it stands after a step.

    Attributes:
        request_id: its name.
        num_prompt_tokens: tokens of its prompt.
        max_num_tokens: most tokens it can come to.
        arrival_s: when it came, in seconds from the start of the trace (negative: before it).
        priority: lower goes first, under the priority policy.
        parent_id: the request that it branched off from.
        status: "waiting", "running", "preempted", or how it ended: "stop", "length", "abort", "error".
        num_tokens: its tokens, prompt and output.
        num_computed_tokens: those of them that are in the cache.
        num_scheduled_tokens: those that this step computed.
        num_cached_tokens: those that it found in the prefix cache when it was admitted last; for one that was
            admitted before the trace, the first time.
        block_ids: its block table.
        num_preemptions: how often it has lost its memory.
        ended_in_step: the step in which it ended. In a static batch it may hold its blocks beyond that.
    """

    request_id: str
    num_prompt_tokens: int
    max_num_tokens: int
    arrival_s: float = 0.0
    priority: int = 0
    parent_id: str | None = None
    status: str = "waiting"
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    ended_in_step: int | None = None

    @property
    def ended(self) -> bool:
        """Whether it has come to an end."""
        return self.ended_in_step is not None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that it has put out."""
        return self.num_tokens - self.num_prompt_tokens


@dataclass
class CachedBlock:
    """A block that can be found by what it holds.

    Attributes:
        block_id: its number.
        key: the first 16 hexadecimal digits of its key.
        parent: those of the block before it; None for a first block.
        request_id: whose tokens filled it; empty if that was before the trace.
        published_in_step: when it became findable; -1 if that was before the trace.
        last_used_step: the last step in which somebody held it; -1 likewise.
    """

    block_id: int
    key: str
    parent: str | None = None
    request_id: str = ""
    published_in_step: int = -1
    last_used_step: int = -1


@dataclass
class TraceState:
    """Everything, as it stands after a step; requests that ended in earlier steps are there too.

    Attributes:
        step: number of the step.
        start_s: when it began, in seconds from the start of the trace.
        end_s: when its results were booked.
        requests: all requests so far, in order of arrival.
        waiting: names of those without memory, the next one first.
        running: names of those in the batch, in the order of service.
        scheduled: request to tokens computed in this step.
        cached: request to tokens that it found in the prefix cache, for those that were admitted in this step and
            found some.
        cached_tables: their block tables in the pass, which begin with what they found.
        rerun: rows of this step that were of no use (ended members of a static batch).
        sampled: request to number of tokens put out in this step.
        finished: request to finish reason, for those that ended in this step.
        decisions: what the scheduler decided: dicts with the fields of `Decision`.
        copies: block copies (source, target) made before the pass.
        cached_blocks: block to what it can be found by, for those that can be found.
        published: blocks that became findable in this step.
        evicted: those that are so no more, as they were.
        holders: block to the requests whose tables name it.
        usage: share of the blocks that somebody holds after the step, 0 to 1.
        pass_usage: the same during its pass, where those who ended with it held theirs.
        fragmentation: what every slot is used for.
    """

    step: int = -1
    start_s: float = 0.0
    end_s: float = 0.0
    requests: dict[str, RequestState] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    scheduled: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    cached_tables: dict[str, list[int]] = field(default_factory=dict)
    rerun: list[str] = field(default_factory=list)
    sampled: dict[str, int] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    copies: list[list[int]] = field(default_factory=list)
    cached_blocks: dict[int, CachedBlock] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    evicted: list[CachedBlock] = field(default_factory=list)
    usage: float = 0.0
    pass_usage: float = 0.0
    fragmentation: Fragmentation = field(default_factory=lambda: Fragmentation(0, 0, 0, 0, 0))

    @property
    def holders(self) -> dict[int, list[str]]:
        """Block to the requests whose tables name it, in order of arrival."""
        found: dict[int, list[str]] = {}
        for request in self.requests.values():
            for block in request.block_ids:
                found.setdefault(block, []).append(request.request_id)
        return found

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computed."""
        return sum(self.scheduled.values())


class Trace:
    """What an engine did, step by step.

    Attributes:
        header: schema, version, and what the engine was: `config` (fields of EngineConfig), `num_blocks`,
            `block_size`, `token_budget` (tokens per step), `max_running` (rows), `start_s` (on the engine's clock).
        steps: one dict per step, numbered from 0; times are seconds from the start of the trace.
    """

    def __init__(self, header: dict[str, Any], steps: list[dict[str, Any]] | None = None) -> None:
        """Takes a header and the steps there are.

        Raises:
            ValueError: not a trace, or one of another version, or with steps missing.
        """
        if header.get("schema") != SCHEMA or header.get("version") != VERSION:
            raise ValueError(
                f"this is {header.get('schema')!r} version {header.get('version')!r}, and {SCHEMA!r} version {VERSION} "
                "is what can be read: record it anew"
            )
        for name in ("num_blocks", "block_size", "token_budget", "max_running"):
            check_int(f"the header's {name}", header.get(name), minimum=1)
        for place, step in enumerate(steps or []):
            number, start, end = (step.get(name) for name in ("step", "start_s", "end_s"))
            timed = isinstance(start, (int, float)) and isinstance(end, (int, float))
            if not is_int(number) or number != place or not timed:
                raise ValueError(f"step {place} says that it is step {number!r}, from {start!r} to {end!r}")
        self.header, self.steps = header, [] if steps is None else steps
        self._reached = (-1, TraceState())

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        num_requests = sum(len(step.get("added", ())) for step in self.steps)
        seconds = self.steps[-1]["end_s"] if self.steps else 0.0
        return f"<Trace: {len(self)} steps, {num_requests} requests, {seconds:.2f} s>"

    def save(self, path: str | PathLike[str]) -> None:
        """Writes JSON lines: the header, then a line per step."""
        with open(path, "w", encoding="utf-8") as file:
            for item in (self.header, *self.steps):
                file.write(json.dumps(item, separators=(",", ":"), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Trace":
        """Reads what `save` wrote.

        Raises:
            ValueError: no trace, or one that breaks off; the message names file and line.
        """
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        items = []
        for number, line in enumerate(lines, start=1):
            try:
                items.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
            if not isinstance(items[-1], dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
        if not items:
            raise ValueError(f"{path} is empty: a trace has a header at least")
        try:
            return cls(items[0], items[1:])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def state(self, k: int) -> TraceState:
        """Everything as it stands after the trace's step of index `k`; negative ones count from the end.

        Going forward costs as much as the steps between; going back begins anew.

        Raises:
            ValueError: there is no such step.
        """
        check_int("the index of a step", k, minimum=-(2**63))
        if not -len(self) <= k < len(self):
            raise ValueError(f"there is no step {k}: the trace has {len(self)}, numbered from 0")
        k %= len(self)
        reached, state = self._reached if self._reached[0] <= k else (-1, TraceState())
        for step in self.steps[reached + 1 : k + 1]:
            _advance(state, step)
        self._reached = (k, state)
        return copy.deepcopy(state)

    def states(self) -> Iterator[TraceState]:
        """The states after all steps, one after the other; each is the last one changed, so copy what you keep."""
        state = TraceState()
        for step in self.steps:
            _advance(state, step)
            yield state

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Writes Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open."""
        from minivllm.trace.perfetto import trace_events

        Path(path).write_text(json.dumps({"traceEvents": trace_events(self)}), encoding="utf-8")


def _advance(state: TraceState, step: dict[str, Any]) -> None:
    """Turns the state before a step into the state after it."""
    requests = state.requests
    for fields in step.get("added", ()):
        requests.pop(fields["request_id"], None)  # an earlier one of that name has ended
        requests[fields["request_id"]] = RequestState(**copy.deepcopy(fields))
    for name in step.get("preempted", ()):
        requests[name].block_ids, requests[name].num_computed_tokens = [], 0
        requests[name].num_preemptions += 1
    for name, (start, block_ids) in step.get("blocks", {}).items():
        requests[name].block_ids[start:] = block_ids
    state.scheduled, state.rerun = step.get("scheduled", {}), step.get("rerun", [])
    state.finished, state.cached = step.get("finished", {}), step.get("cached", {})
    for decision in step.get("decisions", ()):
        if decision["kind"] in ADMISSIONS:
            request = requests[decision["request_id"]]
            request.num_cached_tokens = request.num_computed_tokens = state.cached.get(request.request_id, 0)
    in_vain = {*state.rerun, *(name for name, reason in state.finished.items() if reason in ("abort", "error"))}
    for name, request in requests.items():
        request.num_scheduled_tokens = state.scheduled.get(name, 0)
        if name not in in_vain:
            request.num_computed_tokens += request.num_scheduled_tokens
    state.sampled = {}
    for name, num_tokens in step.get("tokens", {}).items():
        state.sampled[name] = num_tokens - requests[name].num_tokens
        requests[name].num_tokens = num_tokens
    for name, reason in state.finished.items():
        requests[name].status, requests[name].ended_in_step = reason, step["step"]
    state.cached_tables = {name: list(requests[name].block_ids) for name in state.cached}
    _advance_cache(state, step)
    state.waiting, state.running = step.get("waiting", []), step.get("running", [])
    for name in requests.keys() - state.running:
        requests[name].block_ids = []
    for name in state.waiting:
        requests[name].status = "preempted" if requests[name].num_preemptions else "waiting"
    for name in state.running:
        if not requests[name].ended:
            requests[name].status = "running"
    state.step, state.start_s, state.end_s = step["step"], step["start_s"], step["end_s"]
    state.decisions, state.copies = step.get("decisions", []), step.get("copies", [])
    state.usage, state.pass_usage = step["usage"], step["pass_usage"]
    state.fragmentation = Fragmentation(**step["fragmentation"])


def _advance_cache(state: TraceState, step: dict[str, Any]) -> None:
    """What became findable in a step, and what ceased to be; block tables are those of its pass."""
    state.published, state.evicted = [], []
    for event in step.get("cache", ()):
        if "evict" in event:
            state.evicted.append(state.cached_blocks.pop(event["evict"]))
            continue
        block, name = event["publish"], event["request_id"]
        number = step["step"] if name else -1
        state.cached_blocks[block] = CachedBlock(block, event["key"], event["parent"], name, number, number)
        state.published.append(block)
    for block in state.cached_blocks.keys() & {b for r in state.requests.values() for b in r.block_ids}:
        state.cached_blocks[block].last_used_step = step["step"]
