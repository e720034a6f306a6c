"""What all schedulers share: requests come in, get tokens and slots, and end exactly once.

Knows nothing of tensors or the model. There is no prefill phase and no decode phase: a request's
`num_computed_tokens` catches up with its `num_tokens`, in pieces of any size, and when it has, a token is
sampled. What differs between schedulers is who gets how many tokens, and who is admitted when.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from minivllm.config import EngineConfig
from minivllm.kv_cache import KVCacheManager
from minivllm.request import Request, RequestStatus, TokenLogprobs, branch_id
from minivllm.scheduler.plan import Decision, NewRequest, RunnerOutput, SchedulerOutput
from minivllm.scheduler.queue import FCFSQueue, PriorityQueue, RequestQueue, rank


class Scheduler(ABC):
    """Decides, step by step, which requests get how many tokens and which slots.

    Attributes:
        waiting: requests without memory: new ones and preempted ones.
        running: requests with memory, in the order in which they are served.
        requests: all of them that have not ended, by name.
        step: number of the next step.
    """

    def __init__(self, config: EngineConfig, manager: KVCacheManager) -> None:
        """Begins without requests, on an empty memory."""
        self.manager, self.policy = manager, config.scheduling_policy
        self.token_budget = config.max_num_batched_tokens
        # Each running request takes a token per step, so more than the budget never run.
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.chunked = config.enable_chunked_prefill
        self.chunk_limit = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self.waiting: RequestQueue = FCFSQueue() if self.policy == "fcfs" else PriorityQueue()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.step, self._num_added = 0, 0
        self._removed: list[str] = []  # what the runner may forget
        self._new: list[Request] = []  # what the runner has to get to know
        self._in_flight: list[Request] = []  # the rows of the plan that is being made or run
        self._ended: list[Request] = []  # got a token or ended, and no update has said so yet

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether anybody waits, runs, or has ended without being told."""
        return bool(self.requests or self._ended)

    @property
    def pending_removals(self) -> list[str]:
        """Requests whose memory was taken back and of which the runner has not been told yet."""
        return list(self._removed)

    def check(self, num_prompt_tokens: int, max_num_tokens: int, num_samples: int = 1) -> None:
        """Raises ValueError, with the numbers, for a request that could never run."""
        manager = self.manager
        pool = f"{manager.num_blocks * manager.block_size} ({manager.num_blocks} blocks of {manager.block_size})"
        if not manager.can_ever_fit(num_prompt_tokens):
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens and the KV cache holds {pool}: shorten the prompt or "
                "enlarge the cache"
            )
        if not manager.can_ever_fit(max_num_tokens - 1):
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_num_tokens - num_prompt_tokens}, "
                f"which need {max_num_tokens - 1} slots (the last token needs none), and the KV cache holds {pool}: "
                "lower max_tokens or enlarge the cache"
            )
        if not self.chunked and num_prompt_tokens > self.token_budget:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, max_num_batched_tokens is {self.token_budget} and "
                "enable_chunked_prefill is False: no step can take it"
            )
        if num_samples > self.max_running:
            raise ValueError(
                f"n is {num_samples} and at most {self.max_running} requests run together (max_num_seqs, and "
                "max_num_batched_tokens): lower n or raise them"
            )

    def add(self, request: Request) -> None:
        """Takes a request in; it waits.

        Raises:
            ValueError: its prompt can never run: too long for the memory or the token budget, or n is above what
                may run together. Also if its name, or that of one of its answers, is in use.
        """
        self.check(request.num_tokens, request.num_tokens + 1, request.num_samples)
        needed, num_blocks = self.manager.num_missing_blocks(request), self.manager.num_blocks
        if needed > num_blocks:  # contiguous memory reserves more than the prompt
            raise ValueError(
                f"{request.request_id} may come to {request.max_num_tokens} tokens, for which {needed} blocks would be "
                f"reserved, and the KV cache has {num_blocks}: lower max_tokens or enlarge the cache"
            )
        for index in range(request.num_samples):
            if branch_id(request.request_id, index) in self.requests:
                raise ValueError(f"there is a request {branch_id(request.request_id, index)!r} that has not ended")
        request.number, self._num_added = self._num_added, self._num_added + 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str, now: float) -> Request | None:
        """Ends a request, wherever it stands.

        Returns:
            The request; None if there is none of this name that has not ended.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, RequestStatus.FINISHED_ABORTED, now)
        return request

    @abstractmethod
    def schedule(self, now: float) -> SchedulerOutput:
        """Makes the plan of the next step; `now` is the time, in seconds."""

    def update(self, plan: SchedulerOutput, result: RunnerOutput, now: float) -> list[Request]:
        """Books what a step gave: counts, new tokens, ends.

        Returns:
            The requests that got a token or ended, each once.
        """
        touched = self._ended  # if this breaks off, the next update returns what was touched by then
        sampled, running, size = result.sampled, RequestStatus.RUNNING, self.manager.block_size
        for request, count in zip(self._in_flight, plan.num_scheduled_tokens.values(), strict=True):
            if request.status is not running:  # ended meanwhile, or only carried along
                continue
            if request.request_id in result.failed:  # nothing of it counts
                request.stop_reason = result.failed[request.request_id]
                self.manager.forget(request)  # nor of what it has stored, which may be what made it fail
                self._finish(request, RequestStatus.FINISHED_ERROR, now)
                touched.append(request)
                continue
            before = request.num_computed_tokens
            request.num_computed_tokens = end = before + count
            if end // size > before // size:
                self.manager.commit(request, before)
            if request.request_id in result.prompt_logprobs:
                position, entries = result.prompt_logprobs[request.request_id]
                request.prompt_logprobs[position - 1 :] = entries
            tokens = sampled.get(request.request_id)
            if tokens is None:
                continue
            logprobs: Sequence[TokenLogprobs | None] = result.logprobs.get(request.request_id) or [None] * len(tokens)
            if request.num_samples > 1:
                touched += self._branch_off(request, tokens, logprobs, now)
            touched.append(request)
            self._append(request, tokens[0], logprobs[0], now)
        self._in_flight, self._ended = [], []
        self.step += 1
        return touched

    def cancel(self, plan: SchedulerOutput) -> None:
        """The pass of a plan was not run to its end: everybody who runs starts again, with its output.

        How far the runner got nobody knows, so it is told once more whom it may forget.
        """
        self._in_flight.clear()
        for request in reversed(list(self.running)):
            self._preempt(request, plan)
        self._removed = list(dict.fromkeys([*plan.removed, *self._removed]))
        self.manager.take_copies()
        self.manager.take_changes()

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Adds a token, and ends the request if it was its last. A stop beats length."""
        if request.first_token_time is None:
            request.first_token_time = now
        if request.append(token, logprobs):
            self._finish(request, RequestStatus.FINISHED_STOPPED, now)
        elif request.num_tokens >= request.max_num_tokens:
            self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED, now)

    def _branch_off(
        self, request: Request, tokens: list[int], logprobs: Sequence[TokenLogprobs | None], now: float
    ) -> list[Request]:
        """Makes requests of the answers beyond the first; they share the memory of the prompt.

        They stand directly behind their parent, before anybody who came later. Where memory can't fork them they
        wait, at the front, and compute the prompt for themselves.
        """
        children = [request.branch(index) for index in range(1, len(tokens))]
        request.num_samples = 1
        for place, child in enumerate(children, start=self.running.index(request) + 1):
            self.requests[child.request_id] = child
            if self.manager.fork(request, child):
                child.status = RequestStatus.RUNNING
                self.running.insert(place, child)
                self._new.append(child)
        for child in reversed([child for child in children if child.status is RequestStatus.WAITING]):
            child.num_computed_tokens = 0
            self.waiting.put_back(child)
        for child in children:
            self._append(child, tokens[child.index], logprobs[child.index], now)
        return children

    def _finish(self, request: Request, status: RequestStatus, now: float) -> None:
        """The one way a request ends: its memory is given back and nobody will schedule it again."""
        assert status.finish_reason and request.status.finish_reason is None, f"{request.request_id} ends twice"
        del self.requests[request.request_id]
        was, request.status, request.finished_time = request.status, status, now
        if was is RequestStatus.RUNNING:
            self._retire(request)
        else:
            self.waiting.remove(request)

    def _retire(self, request: Request) -> None:
        """Takes a request that has ended out of the batch."""
        self.running.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Takes a request's memory away."""
        self.manager.free(request)
        if request in self._new:  # the runner has never heard of it
            self._new.remove(request)
        else:
            self._removed.append(request.request_id)

    def _begin_plan(self) -> SchedulerOutput:
        """An empty plan."""
        assert not self._in_flight, "update() has not been called for the last plan"
        self.manager.step = self.step
        return SchedulerOutput(self.step)

    def _end_plan(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Adds what the runner must know beside the counts."""
        plan.removed, self._removed = self._removed, []
        plan.copies, plan.table_changes = self.manager.take_copies(), self.manager.take_changes()
        new, self._new = self._new, []
        for request in new:
            plan.new_requests.append(self._describe(request))
            plan.table_changes.pop(request.request_id, None)
        return plan

    def _admit(self, request: Request, count: int, num_cached: int, plan: SchedulerOutput, now: float) -> None:
        """Moves the head of the queue, which has got its memory, into the batch; `num_cached` of its tokens are there
        already, and this step is to compute `count` more."""
        resumed = request.status is RequestStatus.PREEMPTED
        kind: Literal["admit", "resume"] = "resume" if resumed else "admit"
        plan.decisions.append(Decision(kind, request.request_id, needed=count, available=num_cached))
        request.num_computed_tokens = request.num_found_tokens = num_cached
        if not resumed:
            request.num_cached_tokens = num_cached
        if self.manager.caches_prefixes and not request.skip_reading_prefix_cache:
            self.manager.prefix_cache_stats.record(request.num_tokens, num_cached, resumed)
        taken = self.waiting.pop()
        assert taken is request, f"{request.request_id} was served before the head of the queue"
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._new.append(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now

    def _make_room(self, request: Request, num_tokens: int, plan: SchedulerOutput, now: float) -> bool:
        """Takes memory from others, the last first, until a running request has slots for its next tokens.

        Returns:
            False if the request lost its own memory instead, or ended because no pool of this size can hold it.
        """
        while not self.manager.allocate_slots(request, num_tokens):
            victim = self._victim()
            needed = max(1, self.manager.num_missing_blocks(request))  # at least a block to copy a shared one to
            free = self.manager.num_free_blocks
            if victim is request and not self.manager.can_ever_fit(request.num_tokens):
                self._outgrow(request, plan, now)
                return False
            plan.decisions.append(
                Decision("preempt", victim.request_id, "no_free_block", request.request_id, needed, free)
            )
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _outgrow(self, request: Request, plan: SchedulerOutput, now: float) -> None:
        """Ends a request that no pool of this size can hold any more."""
        needed = max(1, self.manager.num_missing_blocks(request))
        decision = Decision("outgrow", request.request_id, "no_free_block", None, needed, self.manager.num_free_blocks)
        plan.decisions.append(decision)
        self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED, now)
        self._ended.append(request)

    def _in_pieces(self, request: Request) -> bool:
        """Whether its tokens may be computed in pieces: with chunks off, only if it has grown beyond every step's
        budget and was preempted, so that it could never start again otherwise."""
        return self.chunked or request.num_tokens > self.token_budget

    def _victim(self) -> Request:
        """Who has to give its memory up."""
        return self.running[-1] if self.policy == "fcfs" else max(self.running, key=rank)

    def _preempt(self, victim: Request, plan: SchedulerOutput) -> None:
        """Takes a running request's memory; it will compute all its tokens again, and keeps its output."""
        if victim in self._in_flight:
            self._in_flight.remove(victim)
            del plan.num_scheduled_tokens[victim.request_id]
            plan.rerun = [name for name in plan.rerun if name != victim.request_id]
            plan.num_samples.pop(victim.request_id, None)
        self.running.remove(victim)
        self._release(victim)
        if victim.status is RequestStatus.RUNNING:
            victim.status = RequestStatus.PREEMPTED
            victim.num_computed_tokens = 0
            victim.num_preemptions += 1
            self.waiting.put_back(victim)

    def _describe(self, request: Request) -> NewRequest:
        return NewRequest(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_computed_tokens=request.num_computed_tokens,
            block_ids=self.manager.get_block_ids(request),
            params=request.params,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            index=request.index,
            parent_id=request.parent_id,
            stop_token_ids=request.stop_token_ids,
            bad_words=request.bad_words,
        )
