"""Static batching: a batch is formed, its prompts are computed, and it runs until its slowest member ends.

A member that has ended keeps its row, its slots and its compute until then, as in a padded batch. With
max_num_seqs=1 there is no batching at all. It is what continuous batching is measured against.
"""

from minivllm.config import EngineConfig
from minivllm.kv_cache import KVCacheManager
from minivllm.request import Request, RequestStatus
from minivllm.scheduler.plan import Decision, SchedulerOutput
from minivllm.scheduler.scheduler import Scheduler


class StaticScheduler(Scheduler):
    """Nobody is admitted while a batch runs."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, keep_finished_rows: bool = True) -> None:
        """Begins without requests.

        Args:
            config: the engine's.
            manager: an empty memory.
            keep_finished_rows: whether a member that has ended goes on being computed. False leaves its row out of
                the passes, which no padded batch could do; it shows how much of the gain is due to that alone.
        """
        super().__init__(config, manager)
        self.keep_finished_rows = keep_finished_rows

    def schedule(self, now: float) -> SchedulerOutput:
        plan = self._begin_plan()
        if not self.running:
            self._form_batch(plan, now)
        elif self.waiting:
            plan.decisions.append(Decision("wait", self.waiting.peek().request_id, "batch"))
        behind = [request for request in self.running if _reads_prompt(request)]
        if behind:
            self._serve_prompts(behind, plan, now)
        else:
            self._serve_rows(plan, now)
        return self._end_plan(plan)

    def _form_batch(self, plan: SchedulerOutput, now: float) -> None:
        """Admits as many as there are rows, and memory for their prompts."""
        num_rows = 0
        while self.waiting:
            request = self.waiting.peek()
            name, available = request.request_id, self.max_running - num_rows
            if request.num_samples > available:
                plan.decisions.append(Decision("wait", name, "max_num_seqs", None, request.num_samples, available))
                return
            found = self.manager.get_computed_blocks(request)
            num_cached = len(found) * self.manager.block_size
            needed = self.manager.num_missing_blocks(request, found)
            if not self.manager.allocate_slots(request, request.num_tokens - num_cached, found):
                free = self.manager.num_free_blocks
                if self.manager.can_ever_fit(request.num_tokens):
                    plan.decisions.append(Decision("wait", name, "memory", None, needed, free))
                    return
                self._outgrow(request, plan, now)
                continue
            self._admit(request, request.num_tokens - num_cached, num_cached, plan, now)
            num_rows += request.num_samples

    def _serve_prompts(self, behind: list[Request], plan: SchedulerOutput, now: float) -> None:
        """Computes prompts, in order, within the token budget; decoding begins when all are computed."""
        budget = self.token_budget
        for request in behind:
            missing = request.num_tokens - request.num_computed_tokens
            count = min(missing, self.chunk_limit, budget) if self._in_pieces(request) else missing
            if not 0 < count <= budget:
                return
            allocated = self.manager.allocate_slots(request, count)
            assert allocated, f"{request.request_id} was admitted without the memory for its prompt"
            self._schedule(request, count, plan)
            budget -= count
            if count == missing and request.num_samples > 1:
                plan.num_samples[request.request_id] = request.num_samples

    def _serve_rows(self, plan: SchedulerOutput, now: float) -> None:
        """One token for every row; those of ended members are of no use."""
        for request in list(self.running):
            if request not in self.running:  # it had to give its memory to one before it
                continue
            if request.status is not RequestStatus.RUNNING:
                if self.keep_finished_rows:
                    plan.rerun.append(request.request_id)
                    self._schedule(request, 1, plan)
            elif self.manager.allocate_slots(request, 1) or self._make_room(request, 1, plan, now):
                self._schedule(request, 1, plan)

    def _schedule(self, request: Request, count: int, plan: SchedulerOutput) -> None:
        plan.num_scheduled_tokens[request.request_id] = count
        self._in_flight.append(request)

    def _victim(self) -> Request:
        """An ended member before all others: nobody needs its slots."""
        ended = [request for request in self.running if request.status is not RequestStatus.RUNNING]
        return ended[-1] if ended else super()._victim()

    def _retire(self, request: Request) -> None:
        """An ended member stays until all have ended, unless nothing of it has been computed."""
        if request.num_computed_tokens == request.num_found_tokens:
            super()._retire(request)
        if all(member.status is not RequestStatus.RUNNING for member in self.running):
            for member in self.running:
                self._release(member)
            self.running.clear()


def _reads_prompt(request: Request) -> bool:
    """Whether a member has tokens to compute before it can decode."""
    behind = request.num_tokens - request.num_computed_tokens
    reads = behind > 1 or request.num_computed_tokens < request.num_prompt_tokens
    return request.status is RequestStatus.RUNNING and reads
