"""What a step did with the prefix cache, in sentences. Pure functions of a state."""

from collections.abc import Iterable

from minivllm.trace import TraceState
from minivllm.trace.trace import CachedBlock
from minivllm.viz.html_parts import ranges
from minivllm.viz.wording import listed


def lost(state: TraceState) -> list[CachedBlock]:
    """Evicted blocks whose text is in no other block."""
    keys = {block.key for block in state.cached_blocks.values()}
    return [block for block in state.evicted if block.key not in keys]


def tell_found_before(state: TraceState) -> list[str]:
    """What could be found when the trace began."""
    known = [*state.cached_blocks.values(), *state.evicted] if state.step == 0 else []
    count = sum(block.published_in_step < 0 for block in known)
    if not count:
        return []
    return [f"{count} block{'' if count == 1 else 's'} could be found in the prefix cache when the trace began."]


def tell_evictions(state: TraceState) -> list[str]:
    """Whose blocks can't be found any more; nothing of those whose text is in another block too."""
    gone = lost(state)
    return [f"The prefix cache loses {_by_request(gone)}."] if gone else []


def tell_publications(state: TraceState) -> list[str]:
    """Whose blocks can be found from now on; nothing of those whose text could be found before."""
    known = {cached.key for block, cached in state.cached_blocks.items() if block not in state.published}
    new = list[CachedBlock]()
    for number in dict.fromkeys(state.published):
        cached = state.cached_blocks.get(number)
        if cached is not None and cached.request_id and cached.key not in known:
            known.add(cached.key)
            new.append(cached)
    return [f"The prefix cache gains {_by_request(new)}."] if new else []


def _by_request(blocks: Iterable[CachedBlock]) -> str:
    """ "R0's blocks 0–2 and R1's block 5"."""
    numbers: dict[str, list[int]] = {}
    for block in blocks:
        numbers.setdefault(block.request_id, []).append(block.block_id)
    parts = []
    for name, ids in numbers.items():
        told = f"block{'' if len(ids) == 1 else 's'} {ranges(sorted(ids))}"
        parts.append(f"{name}'s {told}" if name else told)
    return listed(parts)
