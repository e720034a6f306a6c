"""What must hold of every plan: for tests, and for whoever looks for a mistake."""

from minivllm.request import RequestStatus
from minivllm.scheduler.plan import SchedulerOutput
from minivllm.scheduler.scheduler import Scheduler


def check_plan(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Asserts what must hold of every plan and of memory, before the plan is run."""
    scheduler.manager.check()
    assert plan.num_tokens <= scheduler.token_budget, (
        f"{plan.num_tokens} tokens, the budget is {scheduler.token_budget}"
    )
    assert sum(request.num_samples for request in scheduler.running) <= scheduler.max_running, "too many rows run"
    assert len({id(request) for request in scheduler.running}) == len(scheduler.running), "somebody runs twice"
    assert [request.request_id for request in scheduler._in_flight] == list(plan.num_scheduled_tokens), "rows differ"
    for request, count in zip(scheduler._in_flight, plan.num_scheduled_tokens.values(), strict=True):
        assert request in scheduler.running, f"{request.request_id} is scheduled and does not run"
        assert count > 0, f"{request.request_id} has a row without a token"
        if request.status is RequestStatus.RUNNING:
            end = request.num_computed_tokens + count
            covered = len(scheduler.manager.get_block_ids(request)) * scheduler.manager.block_size
            assert end <= min(request.num_tokens, covered), f"{request.request_id}: {end} of {request.num_tokens}"
    for request in scheduler.waiting:
        assert not scheduler.manager.get_block_ids(request), f"{request.request_id} waits and holds memory"
        assert request.num_computed_tokens == 0, f"{request.request_id} waits and has computed tokens"
