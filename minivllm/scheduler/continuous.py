"""Continuous batching: the batch is made anew in every step (Yu et al., "Orca", OSDI 2022).

Whoever runs is served first, then whoever waits, for as long as the step's token budget, the rows and the
memory last. A long prompt is computed in chunks beside the others' tokens (Agrawal et al., "Sarathi-Serve",
OSDI 2024). When memory runs out, the last one to come gives its own back and starts again later.
"""

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

        A request comes in when there is memory for all its tokens, not only for the first chunk, beside what
        running requests have still to get: or it would be thrown out again before it has computed them.
        """
        budget = self.token_budget - plan.num_tokens
        num_rows = sum(request.num_samples for request in self.running) if self.waiting else 0
        while self.waiting:
            request = self.waiting.peek()
            count = min(request.num_tokens, self.chunk_limit, budget)
            obstacle = self._obstacle(request, plan, num_rows, budget, promised)
            if obstacle is None and not self.manager.allocate_slots(request, count):
                obstacle = self._lacks_memory(request, promised)
            if obstacle is not None:
                if obstacle.cause == "memory" and not self.manager.can_ever_fit(request.num_tokens):
                    self._outgrow(request, plan, now)
                    continue
                plan.decisions.append(obstacle)
                return
            self._admit(request, count, plan, now)
            plan.num_scheduled_tokens[request.request_id] = count
            self._in_flight.append(request)
            budget, num_rows = budget - count, num_rows + request.num_samples
            if count < request.num_tokens:
                promised += self.manager.num_missing_blocks(request)
            elif request.num_samples > 1:
                plan.num_samples[request.request_id] = request.num_samples

    def _obstacle(
        self, request: Request, plan: SchedulerOutput, num_rows: int, budget: int, promised: int
    ) -> Decision | None:
        """What keeps a waiting request from being admitted now; None if nothing does."""
        name = request.request_id
        if any(decision.kind == "preempt" for decision in plan.decisions):
            return Decision("wait", name, "preempted")
        if num_rows + request.num_samples > self.max_running:
            return Decision("wait", name, "max_num_seqs", None, request.num_samples, self.max_running - num_rows)
        least = 1 if self._in_pieces(request) else request.num_tokens
        if budget < least:
            return Decision("wait", name, "token_budget", None, least, budget)
        if self.manager.num_missing_blocks(request) + promised > self.manager.num_free_blocks:
            return self._lacks_memory(request, promised)
        return None

    def _lacks_memory(self, request: Request, promised: int) -> Decision:
        """There is too little memory for a waiting request, beside what running ones are promised."""
        needed, free = self.manager.num_missing_blocks(request), self.manager.num_free_blocks
        return Decision("wait", request.request_id, "memory", None, needed, free - promised)
