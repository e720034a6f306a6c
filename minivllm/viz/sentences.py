"""What a step did, in sentences. Pure functions of a trace's states; nothing here draws.

`explain` turns one decision of the scheduler into one sentence, `narrate` a whole step into all of its sentences,
in the order in which things happen: decisions, evictions, copies, the pass, its results. Names of requests are put in
as they are: whoever makes HTML of a sentence escapes it.
"""

from typing import Any

from minivllm.trace import RequestState, TraceState
from minivllm.trace.trace import ADMISSIONS
from minivllm.viz import cache_sentences as cache
from minivllm.viz.wording import listed

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def explain(decision: dict[str, Any], state: TraceState | None = None, header: dict[str, Any] | None = None) -> str:
    """One sentence that tells what the scheduler decided, and why, with the numbers.

    Args:
        decision: a dict with the fields of `Decision`.
        state: the state after the decision's step; with it an admission tells of how many tokens.
        header: the trace's header; with it the sentence knows the limits, and whether memory is contiguous.

    Raises:
        ValueError: a kind or cause that is not in `Decision`.
    """
    kind, cause, name = decision["kind"], decision["cause"], decision["request_id"]
    if kind in ADMISSIONS and not cause:
        return _explain_admission(decision, state, _config(header).get("batching") == "static")
    if kind == "preempt" and cause == "no_free_block":
        return _explain_preemption(decision, state, _is_contiguous(header))
    if kind == "outgrow" and cause == "no_free_block":
        pool = f"the pool of {_count(header['num_blocks'], 'block')}" if header else "the whole pool"
        return f"{name} ended: with its next token it is too long for {pool}, even if nobody else were there."
    if kind == "wait":
        return f"{name} waits: {_obstacle(decision, header or {})}."
    raise ValueError(f"no decision has kind {kind!r} with cause {cause!r}")


def narrate(state: TraceState, header: dict[str, Any]) -> list[str]:
    """All sentences of a step, in the order in which things happen; at least one.

    Args:
        state: the state after the step.
        header: the trace's header.

    Raises:
        ValueError: a decision of a kind that is not known.
    """
    told = cache.tell_found_before(state)
    told += [explain(decision, state, header) for decision in state.decisions]
    told += cache.tell_evictions(state)
    told += _tell_copies(state, _is_contiguous(header))
    told += _tell_pass(state, _config(header).get("batching") == "static")
    told += cache.tell_publications(state)
    told += _tell_branches(state, _is_contiguous(header))
    told += _tell_first_tokens(state)
    told += _tell_ends(state)
    if not state.scheduled:
        told.append("Nothing was computed.")
    return told


def is_decode(state: TraceState, name: str) -> bool:
    """Whether a scheduled request computes the one token that it put out last, and not a part of a longer text."""
    request = state.requests[name]
    before = request.num_tokens - state.sampled.get(name, 0)
    return request.num_scheduled_tokens == 1 and _last_computed(state, name) == before > request.num_prompt_tokens


def _last_computed(state: TraceState, name: str) -> int:
    """Number, counted from 1, of the last token that the step computed for a request."""
    request = state.requests[name]
    # Those of a request that failed or was aborted meanwhile are computed, and not booked.
    in_vain = state.finished.get(name) in ("abort", "error")
    return request.num_computed_tokens + (request.num_scheduled_tokens if in_vain else 0)


def _explain_admission(decision: dict[str, Any], state: TraceState | None, static: bool) -> str:
    name, count, found = decision["request_id"], decision["needed"], decision["available"]
    word = "admitted" if decision["kind"] == "admit" else "resumed"
    if static:  # its tokens are computed when its turn comes, which may be in a later step
        cached = f", and {found} that {_was(found)} found in the prefix cache" if found else ""
        return f"{name} {word}: it joins the new batch with {_count(count, 'token')} to compute{cached}."
    again = ""
    if word == "resumed":
        word, again = "resumed after its preemption", " again"
    if state is None:
        cached = f"{_count(found, 'token')} {_was(found)} found in the prefix cache, and " if found else ""
        return f"{name} {word}: {cached}{_count(count, 'token')} {_is(count)} computed{again} in this step."
    total = state.requests[name].num_tokens - state.sampled.get(name, 0)
    if found:
        left = total - found
        rest = f"{count} of the other {left} {_is(count)}" if count < left else f"the other {left} {_is(left)}"
        cached = f"{found} of its {total} tokens {_was(found)} found in the prefix cache"
        return f"{name} {word}: {cached}, and {rest} computed{again} in this step."
    if count < total:
        return f"{name} {word}: {count} of its {total} tokens {_is(count)} computed{again} in this step."
    all_of_them = f"all its {total} tokens are" if total > 1 else "its only token is"
    return f"{name} {word}: {all_of_them} computed{again} in this step."


def _explain_preemption(decision: dict[str, Any], state: TraceState | None, contiguous: bool) -> str:
    name, other, needed, free = (decision[key] for key in ("request_id", "other", "needed", "available"))
    if contiguous:
        lack = f"a run longer by {_count(needed, 'block')} and there was none ({_count(free, 'block')} free in all)"
    elif free == 0:
        lack = f"{_count(needed, 'block', 'a')} and none was free"
    else:
        lack = f"{_count(needed, 'block')} and {free} {_was(free)} free"
    if other == name:
        return f"{name} preempted itself: it needed {lack}, and it is the last in line."
    if state is not None and state.requests[name].ended:
        return f"{name}, which has ended, lost its row and its blocks: {other} needed {lack}."
    return f"{name} preempted: {other} needed {lack}."


def _obstacle(decision: dict[str, Any], header: dict[str, Any]) -> str:
    """Why the head of the queue stays there; the header may be empty."""
    cause, needed, available = decision["cause"], decision["needed"], max(0, decision["available"])
    if cause == "memory":
        if not _is_contiguous(header):
            return f"it needs {_count(needed, 'block')} and {_free_for_it(available)}"
        if available < needed:
            return f"it needs {_count(needed, 'neighbouring block')} and {_free_for_it(available)}"
        return f"it needs {_count(needed, 'neighbouring block')} and no free run is that long ({available} free in all)"
    if cause == "max_num_seqs":
        rows = header.get("max_running")
        taken = f"{rows - available} of {rows} rows" if rows else ""
        if available:
            of = f" ({taken} taken)" if rows else ""
            return f"it needs {_count(needed, 'row')} and the batch has {available} left{of}"
        return f"the batch is full ({taken or '0 rows free'})"
    if cause == "token_budget":
        budget = header.get("token_budget")
        of = f" of {budget}" if budget else ""
        if available:
            return f"its {_count(needed, 'token')} must be computed in one step and {available}{of} are left"
        return f"the token budget of this step is used up ({available}{of} left)"
    if cause == "preempted":
        return "nobody is admitted in a step that preempted somebody"
    if cause == "batch":
        return "a static batch is running, and nobody joins it"
    if cause == "prefix":
        name, other, total = decision["request_id"], decision["other"], _count(needed + available, "token")
        so_far = f"{available or 'none'} of its {total} {_is(available or 1)} in the prefix cache "
        so_far += "already" if available else "yet"
        return f"{other} is computing the block that {name} needs next, and {name} will take it over ({so_far})"
    raise ValueError(f"no decision has kind 'wait' with cause {cause!r}")


def _tell_copies(state: TraceState, contiguous: bool) -> list[str]:
    """One sentence per request that got copies of blocks, and one for those whose new holder is gone already."""
    holders, by_holder = state.holders, dict[str, list[list[int]]]()
    for copy in state.copies:
        by_holder.setdefault(next(iter(holders.get(copy[1], [])), ""), []).append(copy)
    told = []
    for name, copies in by_holder.items():
        arrows = ", ".join(f"{source} → {target}" for source, target in copies)
        blocks = f"block{'' if len(copies) == 1 else 's'} {arrows}"
        if not name:
            told.append(f"Copied before the pass: {blocks}.")
        elif not contiguous:
            told.append(f"{name} writes into a block that others read too, and gets its own copy: {blocks}.")
        elif _has_just_branched(state, name):
            told.append(f"{name} branched off in the step before and gets a copy of what was computed: {blocks}.")
        else:
            told.append(f"{name} outgrew its run and moves to a longer one: {blocks}.")
    return told


def _has_just_branched(state: TraceState, name: str) -> bool:
    """Whether a request computes the token now that it was given when it branched off."""
    request = state.requests[name]
    return request.parent_id is not None and request.num_output_tokens - state.sampled.get(name, 0) == 1


def _tell_pass(state: TraceState, static: bool) -> list[str]:
    """Chunks that no admission has told of, decodes, and useless rows."""
    told_before = set() if static else {d["request_id"] for d in state.decisions if d["kind"] in ADMISSIONS}
    told, decoding = [], []
    for name in state.scheduled:
        if name in state.rerun or name in told_before:
            continue
        if is_decode(state, name):
            decoding.append(name)
        else:
            told.append(_tell_chunk(state, name))
    if decoding:
        count = len(decoding)
        subject = decoding[0] if count == 1 else f"{_spelled(count).capitalize()} requests"
        told.append(f"{subject} decode{'s' if count == 1 else ''} one token{'' if count == 1 else ' each'}.")
    if state.rerun:
        one = len(state.rerun) == 1
        told.append(
            f"{listed(state.rerun)} {'has' if one else 'have'} ended and {'is' if one else 'are'} computed once more, "
            "to no use: a static batch keeps its rows until its slowest member ends."
        )
    return told


def _tell_chunk(state: TraceState, name: str) -> str:
    """Which of its tokens a request computes, counted from 1."""
    request = state.requests[name]
    last, total = _last_computed(state, name), request.num_tokens - state.sampled.get(name, 0)
    first = last - request.num_scheduled_tokens + 1
    span = f"token {first}" if first == last else f"tokens {first} to {last}"
    if total <= request.num_prompt_tokens:
        return f"{name} computes {span} of its prompt of {request.num_prompt_tokens}."
    return f"{name} computes {span} of its {total} again (prompt {request.num_prompt_tokens})."


def _tell_branches(state: TraceState, contiguous: bool) -> list[str]:
    children: dict[str, list[RequestState]] = {}
    for name, count in state.sampled.items():
        request = state.requests[name]
        if request.parent_id is not None and request.num_output_tokens == count:
            children.setdefault(request.parent_id, []).append(request)
    told = []
    for parent, branches in children.items():
        waiting = [child.request_id for child in branches if child.request_id in state.waiting]
        running = [child.request_id for child in branches if child.request_id not in state.waiting]
        if running:
            one = len(running) == 1
            how = f"and share{'s' if one else ''} its blocks"
            if contiguous:
                how = "in a run of its own" if one else "each in a run of its own"
            told.append(f"{listed(running)} branch{'es' if one else ''} off from {parent}, {how}.")
        if waiting:
            one = len(waiting) == 1
            told.append(
                f"{listed(waiting)} branch{'es' if one else ''} off from {parent} and wait{'s' if one else ''}: "
                f"there is no memory for {'it' if one else 'them'} yet."
            )
    return told


def _tell_first_tokens(state: TraceState) -> list[str]:
    names = [name for name, r in state.requests.items() if 0 < r.num_output_tokens == state.sampled.get(name)]
    if not names:
        return []
    one = len(names) == 1
    return [f"{listed(names)} put{'s' if one else ''} out {'its' if one else 'their'} first token."]


def _tell_ends(state: TraceState) -> list[str]:
    told = []
    outgrown = {decision["request_id"] for decision in state.decisions if decision["kind"] == "outgrow"}
    for name, reason in state.finished.items():
        request = state.requests[name]
        output = f"after {_count(request.num_output_tokens, 'token')} of output"
        if reason == "stop":
            told.append(f"{name} ended {output}: it came to a stop.")
        elif reason == "length" and name not in outgrown:
            told.append(f"{name} ended {output}, the most that it may put out.")
        elif reason == "abort":
            told.append(f"{name} was aborted {output}.")
        elif reason == "error":
            told.append(f"{name} failed {output}.")
    return told


def _config(header: dict[str, Any] | None) -> dict[str, Any]:
    return (header or {}).get("config", {})


def _is_contiguous(header: dict[str, Any] | None) -> bool:
    return _config(header).get("kv_cache") == "contiguous"


def _count(number: int, what: str, one: str = "1") -> str:
    """ "1 block", "3 blocks"; `one` stands for the 1."""
    return f"{one} {what}" if number == 1 else f"{number} {what}s"


def _spelled(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _free_for_it(available: int) -> str:
    """What is free, less what running requests have still to get for their prompts."""
    return f"{available or 'none'} {_is(available or 1)} free for it"
