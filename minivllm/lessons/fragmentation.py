"""The fragmentation study: one request mix through one memory manager, without a model.

A loop in steps, as an engine has it: everybody who runs gets one more token, and whoever waits comes in as
soon as memory allows, in order. Only memory limits who runs. The pool is under pressure for as long as
somebody waits; the averages are taken over those steps.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from minivllm.config import check_int
from minivllm.kv_cache import Fragmentation, KVCacheManager


@dataclass(eq=False)
class LengthOnly:
    """A request of which only the lengths matter."""

    request_id: str
    num_tokens: int
    max_num_tokens: int
    num_computed_tokens: int = 0


@dataclass
class MixReport:
    """What happened to memory, sampled while somebody waited.

    Attributes:
        steps: the sampled steps.
        samples: the use of all slots in each of them.
        running: requests that ran in each of them.
        num_steps: steps until the last request ended.
        num_preemptions: how often a request had to give its memory back and start again.
        num_recomputed_tokens: tokens that were computed once more because of that.
    """

    steps: list[int] = field(default_factory=list)
    samples: list[Fragmentation] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    def share(self, part: str) -> float:
        """Average share of the pool's slots that were `part` (a field of Fragmentation), 0 to 1; NaN if nobody
        ever waited."""
        return _mean([getattr(sample, part) / sample.total for sample in self.samples])

    @property
    def used_of_reserved(self) -> float:
        """Average of: slots that hold a token over slots that are reserved, 0 to 1."""
        return _mean([sample.used_of_reserved for sample in self.samples])

    @property
    def mean_running(self) -> float:
        """Requests that ran together, on average."""
        return _mean(self.running)


PARTS = tuple(part.name for part in fields(Fragmentation))


def run_mix(lengths: Sequence[tuple[int, int]], manager: KVCacheManager, sample_every: int = 8) -> MixReport:
    """Runs requests of given lengths to their end.

    When a running request can't get its next slot, the one that came last gives everything back and waits
    at the front, to start again with the tokens it has.

    Args:
        lengths: pairs (prompt tokens, answer tokens), in order of arrival; all are there from the start.
        manager: an empty memory manager.
        sample_every: steps between two samples.

    Raises:
        ValueError: a length below 1, a pool that is in use, or a request that it can never hold.
    """
    check_int("sample_every", sample_every, minimum=1)
    requests = _requests(lengths, manager)
    waiting, running, report = deque(requests), list[LengthOnly](), MixReport()
    while waiting or running:
        manager.step, preemptions_before = report.num_steps, report.num_preemptions
        for request in list(running):
            while request in running and not manager.allocate_slots(request, 1):
                victim = running.pop()
                manager.free(victim)
                report.num_recomputed_tokens += victim.num_computed_tokens
                victim.num_computed_tokens = 0
                waiting.appendleft(victim)
                report.num_preemptions += 1
        # Nobody comes in while somebody had to go.
        preempted = report.num_preemptions > preemptions_before
        while waiting and not preempted and manager.allocate_slots(waiting[0], waiting[0].num_tokens):
            running.append(waiting.popleft())
        assert running or preempted, f"step {report.num_steps}: {len(waiting)} wait, nobody runs, and nobody fits"
        for request in running:
            request.num_computed_tokens = request.num_tokens
            request.num_tokens += 1
        if waiting and report.num_steps % sample_every == 0:
            report.steps.append(report.num_steps)
            report.samples.append(manager.fragmentation(waiting[0]))
            report.running.append(len(running))
        for request in [request for request in running if request.num_tokens >= request.max_num_tokens]:
            manager.free(request)
            running.remove(request)
        report.num_steps += 1
    return report


def _requests(lengths: Sequence[tuple[int, int]], manager: KVCacheManager) -> list[LengthOnly]:
    """The requests of a mix, once it is sure that an empty manager can bring each of them to its end."""
    for prompt, answer in lengths:
        check_int("a prompt's length", prompt, minimum=1)
        check_int("an answer's length", answer, minimum=1)
    if manager.num_free_blocks != manager.num_blocks:
        raise ValueError(f"{manager.num_blocks - manager.num_free_blocks} blocks are in use: take an empty manager")
    requests = [LengthOnly(f"R{i}", prompt, prompt + answer) for i, (prompt, answer) in enumerate(lengths)]
    for request in requests:
        if not manager.can_ever_fit(request.max_num_tokens - 1):
            slots = manager.num_blocks * manager.block_size
            raise ValueError(
                f"{request.request_id} comes to {request.max_num_tokens} tokens, the pool has {slots} slots"
            )
    return requests


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
