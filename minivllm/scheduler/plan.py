"""What passes between scheduler and runner: the plan of a step, and what came of it.

Both are plain data that can be pickled. A request is described in full when it starts (or starts again); after
that a plan holds only what has changed, and the runner keeps the rest.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from minivllm.kv_cache.records import TableChange
from minivllm.request import TokenLogprobs
from minivllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """All that a runner must know of a request that it has not seen, or has been told to forget.

    Attributes:
        request_id: its name.
        token_ids: prompt and output so far.
        num_computed_tokens: those of them that are in the cache already.
        block_ids: its block table.
        params: how its tokens are chosen.
        seed: of its random stream.
        num_prompt_tokens: how many of the tokens are its prompt.
        index: which answer of its prompt it is.
        parent_id: the request that it branched off from.
        stop_token_ids: tokens that end it.
        bad_words: the tokens of texts that must not appear.
    """

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    index: int = 0
    parent_id: str | None = None
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()


class Decision(NamedTuple):
    """Something that the scheduler decided, and why.

    Attributes:
        kind: "admit" (first tokens scheduled), "resume" (again, after a preemption), "preempt" (memory taken
            away), "wait" (the head of the queue stays there), "outgrow" (ended: its next token fits into no pool
            of this size).
        request_id: whom it concerns.
        cause: for "preempt" and "outgrow", "no_free_block"; for "wait", what is lacking: "memory", "max_num_seqs",
            "token_budget", "preempted" (nobody is admitted in a step that preempted), "batch" (a static batch is
            running), or "prefix" (its next block is being computed for another one). Empty otherwise.
        other: for "preempt", the request that needed the memory; for "wait" with "prefix", the one that computes.
        needed: blocks, rows or tokens that were needed; for "admit" and "resume", the tokens to compute; for "wait"
            with "prefix", the tokens that it would have to compute now.
        available: how many there were; for "admit" and "resume", the tokens that were found in the cache, and so for
            "wait" with "prefix", so far.
    """

    kind: Literal["admit", "resume", "preempt", "wait", "outgrow"]
    request_id: str
    cause: Literal["", "no_free_block", "memory", "max_num_seqs", "token_budget", "preempted", "batch", "prefix"] = ""
    other: str | None = None
    needed: int = 0
    available: int = 0


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step.

    Attributes:
        step: its number, from 0.
        removed: requests that the runner may forget (ended or preempted); before anything else. After a pass that
            broke off, there may be some that it has never got to know, or has forgotten already.
        new_requests: requests that it has to get to know.
        table_changes: what is new in the block tables of requests that it knows.
        copies: block copies (source, target) to make before the pass, in this order.
        num_scheduled_tokens: request to the number of tokens to compute for it, in the order of the rows.
        num_samples: tokens to draw for a request's logits row, where it is not 1: answer i draws with seed + i.
        rerun: requests whose last computed token is computed once more, to no use: ended rows of a static batch.
        decisions: what was decided and why.
    """

    step: int
    removed: list[str] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    table_changes: dict[str, TableChange] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    num_samples: dict[str, int] = field(default_factory=dict)
    rerun: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True)
class RunnerOutput:
    """What a pass gave.

    Attributes:
        sampled: request to its new tokens, for those whose computed tokens caught up.
        failed: request to what went wrong with it; the others are unharmed.
        elapsed_s: how long the pass took (or, in a simulation, would take), in seconds.
        logprobs: request to those of its new tokens, for those who asked.
        prompt_logprobs: request to those of its prompt's tokens that this step computed: the position of the first, and
            one for each.
    """

    sampled: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    elapsed_s: float = 0.0
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
