"""Continuous batching: the batch is made anew in every step (Yu et al., "Orca", OSDI 2022).

Whoever runs is served first, then whoever waits, for as long as the step's token budget, the rows and the
memory last. A long prompt is computed in chunks beside the others' tokens (Agrawal et al., "Sarathi-Serve",
OSDI 2024). When memory runs out, the last one to come gives its own back and starts again later.
"""

from dataclasses import dataclass
from functools import cached_property

from minivllm.kv_cache import KVCacheManager
from minivllm.kv_cache.block_hash import BlockKey
from minivllm.kv_cache.block_pool import KVCacheBlock
from minivllm.request import Request
from minivllm.scheduler.plan import Decision, SchedulerOutput
from minivllm.scheduler.scheduler import Scheduler


class ContinuousScheduler(Scheduler):
    """First the running requests, then the waiting ones, within the token budget."""

    def schedule(self, now: float) -> SchedulerOutput:
        plan = self._begin_plan()
        promised = self._serve_running(plan, now)
        self._serve_waiting(plan, promised, now)
        return self._end_plan(plan)

    def _serve_running(self, plan: SchedulerOutput, now: float) -> int:
        """Gives every running request at least one token.

        Returns:
            Blocks that running requests have still to get for prompts that are not computed yet.
        """
        running, rows, allocate = self.running, self._in_flight, self.manager.allocate_slots
        scheduled, budget, promised = plan.num_scheduled_tokens, self.token_budget, 0
        while len(rows) < len(running):
            request = running[len(rows)]
            missing = count = request.num_tokens - request.num_computed_tokens
            if missing > 1:
                # A chunk leaves a token for everybody behind it.
                count = min(missing, self.chunk_limit, budget - (len(running) - len(rows) - 1))
            if not allocate(request, count):
                gone = not self._make_room(request, count, plan, now)
                budget = self.token_budget - plan.num_tokens
                if gone:
                    continue
            scheduled[request.request_id] = count
            rows.append(request)
            budget -= count
            if count < missing:
                promised += self.manager.num_missing_blocks(request)
            elif request.num_samples > 1:
                plan.num_samples[request.request_id] = request.num_samples
        return promised

    def _serve_waiting(self, plan: SchedulerOutput, promised: int, now: float) -> None:
        """Admits waiting requests in their order; the first that can't come in stops all behind it.

        Only one that will find its next block in the next step does not: it is put off, and its row and its memory
        are left for it. Behind it comes in only who needs no tokens of a later step, which are the put-off one's.
        """
        if not self.waiting:
            return
        if any(decision.kind == "preempt" for decision in plan.decisions):
            plan.decisions.append(Decision("wait", self.waiting.peek().request_id, "preempted"))
            return
        num_rows = sum(request.num_samples for request in self.running)
        room = Room(self.token_budget - plan.num_tokens, self.max_running - num_rows, promised)
        put_off: list[Request] = []
        try:
            self._admit_waiting(room, put_off, plan, now)
        finally:
            for request in reversed(put_off):
                self.waiting.put_back(request)

    def _admit_waiting(self, room: "Room", put_off: list[Request], plan: SchedulerOutput, now: float) -> None:
        in_progress: dict[BlockKey, str] | None = None  # what this step computes, once somebody has to know
        while self.waiting:
            head = Candidate(self.waiting.peek(), self.manager)
            request = head.request
            obstacle = self._obstacle(head, room, whole=bool(put_off) or not self._in_pieces(request))
            if obstacle is None and head.next_key is not None:
                in_progress = self._keys_in_progress(plan) if in_progress is None else in_progress
                if head.next_key in in_progress:
                    other = in_progress[head.next_key]
                    wait = Decision("wait", request.request_id, "prefix", other, head.missing, head.num_cached)
                    plan.decisions.append(wait)
                    put_off.append(self.waiting.pop())
                    room.num_rows, room.promised = room.num_rows - request.num_samples, room.promised + head.needed
                    continue
            if obstacle is None:
                count = min(head.missing, self.chunk_limit, room.budget)
                if not self.manager.allocate_slots(request, count, head.found):
                    obstacle = self._lacks_memory(head, room)
            if obstacle is not None:
                if obstacle.cause == "memory" and not self.manager.can_ever_fit(request.num_tokens):
                    self._outgrow(request, plan, now)
                    continue
                plan.decisions.append(obstacle)
                return
            self._admit(request, count, head.num_cached, plan, now)
            plan.num_scheduled_tokens[request.request_id] = count
            self._in_flight.append(request)
            room.budget, room.num_rows = room.budget - count, room.num_rows - request.num_samples
            if in_progress is not None:
                in_progress |= dict.fromkeys(self.manager.keys_in_progress(request, count), request.request_id)
            if count < head.missing:
                room.promised += self.manager.num_missing_blocks(request)
            elif request.num_samples > 1:
                plan.num_samples[request.request_id] = request.num_samples

    def _keys_in_progress(self, plan: SchedulerOutput) -> dict[BlockKey, str]:
        """The keys of the blocks that this step's rows compute, to whose they are."""
        size, keys = self.manager.block_size, dict[BlockKey, str]()
        for request, count in zip(self._in_flight, plan.num_scheduled_tokens.values(), strict=True):
            is_lone_new_token = count == 1 and request.num_computed_tokens + 1 == request.num_tokens
            if not is_lone_new_token or request.num_tokens % size == 0:  # else its block has no key yet
                keys |= dict.fromkeys(self.manager.keys_in_progress(request, count), request.request_id)
        return keys

    def _obstacle(self, head: "Candidate", room: "Room", whole: bool) -> Decision | None:
        """What keeps a waiting request from being admitted now, `whole` or with a first piece; None if nothing does.

        A request is admitted when there is memory for all its tokens, not only for the first chunk, beside what others
        are promised: or it would be thrown out again before it has computed them.
        """
        request, name = head.request, head.request.request_id
        if request.num_samples > room.num_rows:
            return Decision("wait", name, "max_num_seqs", None, request.num_samples, room.num_rows)
        least = head.missing if whole else 1
        if room.budget < least:
            return Decision("wait", name, "token_budget", None, least, room.budget)
        if head.needed + room.promised > self.manager.num_free_blocks:
            return self._lacks_memory(head, room)
        return None

    def _lacks_memory(self, head: "Candidate", room: "Room") -> Decision:
        """There is too little memory for a waiting request, beside what others are promised."""
        available = self.manager.num_free_blocks - room.promised
        return Decision("wait", head.request.request_id, "memory", None, head.needed, available)


@dataclass(slots=True)
class Room:
    """What a step has left for newcomers.

    Attributes:
        budget: tokens.
        num_rows: rows.
        promised: free blocks that are others' already.
    """

    budget: int
    num_rows: int
    promised: int


class Candidate:
    """A request that waits for admission, and what it would take; looked up when somebody asks.

    Attributes:
        request: the request.
        manager: the memory.
    """

    def __init__(self, request: Request, manager: KVCacheManager) -> None:
        self.request, self.manager = request, manager

    @cached_property
    def found(self) -> list[KVCacheBlock]:
        """Its blocks that are in the prefix cache."""
        return self.manager.get_computed_blocks(self.request)

    @property
    def num_cached(self) -> int:
        """Tokens in them."""
        return len(self.found) * self.manager.block_size

    @property
    def missing(self) -> int:
        """Tokens that it has to compute."""
        return self.request.num_tokens - self.num_cached

    @property
    def needed(self) -> int:
        """Free blocks that all its tokens take."""
        return self.manager.num_missing_blocks(self.request, self.found)

    @property
    def next_key(self) -> BlockKey | None:
        """The key of its first block that is not in the prefix cache, if another one's could take its place."""
        return self.manager.next_key(self.request, self.found)
