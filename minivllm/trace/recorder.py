"""The flight recorder: writes down what an engine does, one plain JSON object per step. Reading it is `trace.py`'s."""

from dataclasses import asdict
from typing import Any

from minivllm.config import EngineConfig
from minivllm.kv_cache.block_hash import short_key
from minivllm.request import Request
from minivllm.scheduler import Scheduler, SchedulerOutput
from minivllm.trace.trace import ADMISSIONS, SCHEMA, VERSION, Trace


class Recorder:
    """Writes an engine's steps into a trace."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, now: float) -> None:
        """Begins a trace; requests that are in the engine already come in with the first step."""
        self._scheduler, self._start = scheduler, now
        self._known: dict[str, int] = {}  # unfinished requests, and how often they have been preempted
        self._holders = [request.request_id for request in scheduler.running]
        self._added: list[dict[str, Any]] = []
        self._pass_usage: float | None = None
        manager = scheduler.manager
        self.trace = Trace(
            {
                "schema": SCHEMA,
                "version": VERSION,
                "config": asdict(config),
                "num_blocks": manager.num_blocks,
                "block_size": manager.block_size,
                "token_budget": scheduler.token_budget,
                "max_running": scheduler.max_running,
                "start_s": now,
            }
        )
        manager.cache_events = manager.findable()
        for request in [*scheduler.running, *scheduler.waiting]:
            self.add(request)

    def close(self) -> None:
        """The trace ends here."""
        self._scheduler.manager.cache_events = None

    def add(self, request: Request) -> None:
        """A request has come."""
        self._known[request.request_id] = request.num_preemptions
        reason = request.status.finish_reason  # a member of a static batch may have ended before the trace begins
        self._added.append(
            {
                "request_id": request.request_id,
                "num_prompt_tokens": request.num_prompt_tokens,
                "max_num_tokens": request.max_num_tokens,
                "arrival_s": round(request.arrival_time - self._start, 6),
                "priority": request.priority,
                "parent_id": request.parent_id,
                "num_tokens": request.num_tokens,
                "num_computed_tokens": request.num_computed_tokens,
                "num_cached_tokens": request.num_cached_tokens,
                "block_ids": self._scheduler.manager.get_block_ids(request),
                "num_preemptions": request.num_preemptions,
                **({"status": reason, "ended_in_step": -1} if reason else {}),
            }
        )

    def before_pass(self) -> None:
        """A plan has been made: what is held now is held during its pass, also by those who end with it."""
        self._pass_usage = self._scheduler.manager.usage

    def record(self, plan: SchedulerOutput, touched: list[Request], start: float, end: float) -> None:
        """A step has been made: its plan, and the requests that got a token or ended. A step of an engine without
        requests leaves no trace."""
        scheduler = self._scheduler
        if not (plan.num_scheduled_tokens or plan.decisions or touched or self._holders or scheduler.requests):
            return
        for request in touched:
            if request.request_id not in self._known:  # it branched off in this step, with its first token
                self.add(request)
                self._added[-1]["num_tokens"] -= 1
        blocks = {**{new.request_id: (0, new.block_ids) for new in plan.new_requests}, **plan.table_changes}
        finished = {r.request_id: r.status.finish_reason for r in touched if r.status.finish_reason}
        preempted = []
        for request in [*scheduler.requests.values(), *(r for r in touched if r.request_id in finished)]:
            name = request.request_id
            preempted += [name] * (request.num_preemptions - self._known[name])
            self._known[name] = request.num_preemptions
        for name in finished:
            del self._known[name]
        running, released = [request.request_id for request in scheduler.running], scheduler.pending_removals
        still_told = {*running, *released}
        lost = [*preempted, *(name for name in self._holders if name not in still_told)]
        step = {
            "step": len(self.trace),
            "start_s": round(start - self._start, 6),
            "end_s": round(end - self._start, 6),
            "added": self._added,
            "removed": list(dict.fromkeys(lost)),
            "preempted": preempted,
            "scheduled": dict(plan.num_scheduled_tokens),
            "rerun": plan.rerun,
            "blocks": {name: list(change) for name, change in blocks.items()},
            "cached": {d.request_id: d.available for d in plan.decisions if d.kind in ADMISSIONS and d.available},
            "copies": [list(copy) for copy in plan.copies],
            "decisions": [decision._asdict() for decision in plan.decisions],
            "tokens": {request.request_id: request.num_tokens for request in touched},
            "finished": finished,
            "released": released,
            "cache": self._cache_events(),
            "waiting": [request.request_id for request in scheduler.waiting],
            "running": running,
        }
        step = {name: value for name, value in step.items() if value or name in ("step", "start_s", "end_s")}
        step["usage"] = round(scheduler.manager.usage, 6)
        step["pass_usage"] = step["usage"] if self._pass_usage is None else round(self._pass_usage, 6)
        step["fragmentation"] = asdict(scheduler.manager.fragmentation(next(iter(scheduler.waiting), None)))
        self.trace.steps.append(step)
        self._added, self._holders = [], running

    def _cache_events(self) -> list[dict[str, Any]]:
        """What has become findable, and what is so no more, in order."""
        events, self._scheduler.manager.cache_events = self._scheduler.manager.cache_events or [], []
        return [
            {"evict": event.block_id}
            if event.kind == "evict"
            else {
                "publish": event.block_id,
                "key": short_key(event.key),
                "parent": None if event.parent is None else short_key(event.parent),
                "request_id": event.request_id,
            }
            for event in events
        ]
