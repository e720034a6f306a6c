"""A world for random lives of requests: engine, scheduler and memory together, on the fake runner.

Every plan is checked before it is run, memory after every step, and every output against what the text must be,
however it was scheduled. The world knows three kinds of trouble: aborts (also while a step runs), rows that fail,
and passes that break off.
"""

import pickle
import random
from dataclasses import dataclass, field

from minivllm.engine import ModelLimits
from minivllm.request import Request, RequestStatus, SamplingParams, branch_id
from minivllm.scheduler.invariants import check_plan
from minivllm.trace import Trace
from tests.fakes import VOCAB, FakeRunner, expected_output, make_engine, make_scheduler

STOP_TOKENS = frozenset(range(1, 40))


class ForgivingRows(dict):
    """A table of rows for a runner whose passes may break off: what it was never told of, it can't forget."""

    def __delitem__(self, name):
        self.pop(name, None)


class CheckingRunner(FakeRunner):
    """Runs only plans that went through a pickle and hold all that must hold.

    `during` is called in the middle of a pass; `break_off` ("before", "after") makes the next pass fail.
    """

    def __init__(self, scheduler):
        super().__init__(scheduler.manager)
        self.scheduler = scheduler
        self.rows = ForgivingRows()
        self.during, self.break_off = [], None
        self.plan, self.failed = None, {}

    def execute(self, plan):
        check_plan(self.scheduler, plan)
        assert len(plan.removed) == len(set(plan.removed)), f"removed twice: {plan.removed}"
        check_service(self.scheduler, plan)
        copied = pickle.loads(pickle.dumps(plan))
        assert copied == plan
        self.plan = plan
        broken, self.break_off = self.break_off, None
        if broken == "before":
            raise BrokenOffError("before the pass")
        result = super().execute(copied)
        if broken == "after":
            raise BrokenOffError("after the pass")
        for action in self.during:
            action()
        self.during, self.failed = [], dict(result.failed)
        assert set(self.rows) == {request.request_id for request in self.scheduler.running}
        return result


class BrokenOffError(Exception):
    """A pass that did not come to its end."""


def check_service(scheduler, plan):
    """Asserts who must have been served: somebody, and under continuous batching everybody who runs."""
    live = [request for request in scheduler.running if request.status is RequestStatus.RUNNING]
    if scheduler.requests and not any(decision.kind == "outgrow" for decision in plan.decisions):
        assert set(plan.num_scheduled_tokens) - set(plan.rerun), "there is work, and nobody gets on"
    if not hasattr(scheduler, "keep_finished_rows"):
        assert [request.request_id for request in live] == list(plan.num_scheduled_tokens), "a running one stands still"
        assert not plan.rerun
    preempted = [decision for decision in plan.decisions if decision.kind == "preempt"]
    admitted = [decision for decision in plan.decisions if decision.kind in ("admit", "resume")]
    assert not (preempted and admitted), "somebody was admitted in a step that preempted"
    held = {block for request in scheduler.running for block in scheduler.manager.get_block_ids(request)}
    for place, (_, target) in enumerate(plan.copies):
        read = {source for source, _ in plan.copies[place + 1 :]}
        assert target in held | read, f"block {target} is copied to, and nobody holds it"


class Loop:
    """A scheduler alone with the fake runner, one step at a time, for tests that look at single plans."""

    def __init__(self, num_blocks=64, scheduler=None, **fields):
        self.scheduler = scheduler or make_scheduler(num_blocks, **fields)
        self.manager, self.runner = self.scheduler.manager, CheckingRunner(self.scheduler)
        self.now, self.plans, self.reported = 0.0, [], []

    def add(self, name, length, max_tokens=16, n=1, priority=0, arrival_time=0.0, stop=()):
        """Adds a request whose prompt is its own."""
        prompt = [1 + (ord(name[-1]) * 31 + place) % (VOCAB - 1) for place in range(length)]
        params = SamplingParams(n=n, max_tokens=max_tokens)
        request = Request(name, prompt, params, length + max_tokens, num_samples=n, priority=priority)
        request.arrival_time, request.stop_token_ids = arrival_time, frozenset(stop)
        self.scheduler.add(request)
        return request

    def step(self, count=1):
        """Makes steps; returns the last plan."""
        for _ in range(count):
            plan = self.scheduler.schedule(self.now)
            self.plans.append(plan)
            result = self.runner.execute(plan)
            self.now += 1
            self.touched = self.scheduler.update(plan, result, self.now)
            self.reported += [request.request_id for request in self.touched if request.status.finish_reason]
            self.manager.check()
        return plan

    def counts(self, count=1):
        """Tokens per request in each of the next steps."""
        return [dict(self.step().num_scheduled_tokens) for _ in range(count)]

    def fill(self, leave=0):
        """Lets a request from nowhere take all free blocks but a few; returns it."""
        count = (self.manager.num_free_blocks - leave) * self.manager.block_size
        nowhere = Request("nowhere", [1] * count, SamplingParams(), count + 1)
        assert self.manager.allocate_slots(nowhere, count)
        self.manager.take_changes()
        return nowhere

    def end(self, limit=1000):
        """Steps until nothing is left."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests:
                self.step()
                assert self.runner.rows == {} and self.manager.num_free_blocks == self.manager.num_blocks
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")


def output_of(request):
    """What a request has put out, checked against what its text must be."""
    tokens = request.output_token_ids
    assert tokens == expected_output(request.prompt_token_ids, len(tokens), request.seed), request.request_id
    return tokens


def names(requests):
    return [request.request_id for request in requests]


@dataclass
class Expected:
    """What is known of a request outside the engine."""

    request_id: str
    texts: list  # what each answer must be, if nothing goes wrong
    cumulative: bool
    max_num_tokens: int
    seen: dict = field(default_factory=dict)
    aborted: bool = False
    steps: int = 0
    bound: int | None = None


class World:
    """An engine, everything that may happen to it, and everything that must hold."""

    def __init__(self, num_blocks=12, keep_finished_rows=True, record=False, max_model_len=48, **fields):
        self.engine = make_engine(num_blocks, max_model_len, **fields)
        self.scheduler, self.manager = self.engine.scheduler, self.engine.scheduler.manager
        if fields.get("batching") == "static":
            self.scheduler.keep_finished_rows = keep_finished_rows
        self.runner = self.engine.runner = CheckingRunner(self.scheduler)
        self.limits = self.engine.limits = ModelLimits(VOCAB, max_model_len, STOP_TOKENS)
        self.trace = self.engine.start_recording() if record else None
        self.fair = fields.get("scheduling_policy", "fcfs") == "fcfs"
        self.unfinished, self.ended, self.count, self.num_steps = {}, {}, 0, 0
        self.num_refused = self.num_broken = 0

    def free_names(self):
        """Names of requests that have ended and hold nothing any more."""
        taken = {request.request_id.split("/")[0] for request in self.scheduler.running}
        return [name for name in self.ended if name not in taken]

    def add(self, length, max_tokens, n=1, priority=0, token=1, cumulative=True, name=None):
        """Adds a request; returns its name, or None if it was refused, which only a hopeless one may be."""
        name, self.count = name or f"R{self.count}", self.count + 1
        prompt = [1 + (token + self.count * 37 + place * 11) % (VOCAB - 1) for place in range(length)]
        params = SamplingParams(
            n=n, temperature=float(n > 1), seed=self.count if n > 1 else None, max_tokens=max_tokens
        )
        longest = min(self.limits.max_model_len, length + max_tokens)
        slots = self.manager.num_blocks * self.manager.block_size
        hopeless = longest - 1 > slots or n > self.scheduler.max_running
        try:
            kind = "cumulative" if cumulative else "final_only"
            self.engine.add_request(name, prompt, params, priority=priority if not self.fair else 0, output_kind=kind)
        except ValueError:
            assert hopeless, f"{name} ({length} + {max_tokens}, n {n}) was refused"
            self.num_refused += 1
            return None
        assert not hopeless, f"{name} ({length} + {max_tokens}, n {n}) can't run and was not refused"
        seed = params.seed or 0
        texts = [until_stop(expected_output(prompt, longest - length, seed + i)) for i in range(n)]
        self.ended.pop(name, None)
        self.unfinished[name] = Expected(name, texts, cumulative, longest)
        return name

    def abort(self, name):
        """Aborts a request, or one that is not there."""
        self.engine.abort_request(name)
        if name in self.unfinished:
            self.unfinished[name].aborted = True

    def abort_in_flight(self, name):
        """Aborts a request in the middle of the next step."""
        self.runner.during.append(lambda: self.abort(name))

    def fail(self, name):
        """Lets the next row of a request fail."""
        self.runner.fail[name] = f"{name} broke"

    def step(self):
        """One step, with everything that must hold after it."""
        self.num_steps += 1
        try:
            outputs = self.engine.step()
        except BrokenOffError:
            self.num_broken += 1
            outputs = []
        self.runner.during, self.runner.break_off = [], None
        self.runner.fail.clear()
        seen = [output.request_id for output in outputs]
        assert len(seen) == len(set(seen)), f"two outputs of one request in one step: {seen}"
        for output in outputs:
            self._take(output)
        self.check()
        assert self.engine.has_unfinished_requests() == bool(self.unfinished)
        for expected in self.unfinished.values():
            expected.steps += 1
            if expected.bound is None and self.fair:
                self._set_bound(expected)
            if expected.bound is not None and not self.num_broken:
                assert expected.steps <= expected.bound, f"{expected.request_id} starves after {expected.steps} steps"

    def _set_bound(self, expected):
        """Under first come, first served: the first that runs is never preempted and gets a token in each step, and
        nobody who comes later goes before an older one (once it has branched off). So it takes at most as many steps
        as all answers of those that are here have tokens, and one each to come in. A static batch ends at least one
        of its members, whatever it preempts: at most as many batches as answers."""
        if expected.seen or not expected.cumulative:
            sizes = [other.max_num_tokens + 1 for other in self.unfinished.values() for _ in other.texts]
            batches = 1 if not hasattr(self.scheduler, "keep_finished_rows") else len(sizes)
            expected.bound = expected.steps + sum(sizes) * batches

    def _take(self, output):
        expected = self.unfinished[output.request_id]
        for answer in output.outputs:
            text, before = expected.texts[answer.index], expected.seen.get(answer.index, [])
            tokens = answer.token_ids
            assert tokens == text[: len(tokens)], f"{output.request_id}/{answer.index}: {tokens}, not {text}"
            assert len(tokens) >= len(before), f"{output.request_id}: tokens were taken back"
            if expected.cumulative and not expected.aborted:
                most = len(before) + 1
                assert len(tokens) <= most, f"{output.request_id}: {len(tokens)} tokens, had {len(before)}"
            elif expected.cumulative:
                assert len(tokens) == len(before), f"{output.request_id}: a token after the abort"
            expected.seen[answer.index] = tokens
            reason = answer.finish_reason
            if reason == "stop":
                assert tokens == text and tokens[-1] in STOP_TOKENS
            elif reason == "length":
                assert tokens == text and tokens[-1] not in STOP_TOKENS
            elif reason == "abort":
                assert expected.aborted
            elif reason == "error":
                name = branch_id(output.request_id, answer.index)
                assert answer.stop_reason == f"{name} broke"
        for name, message in self.runner.failed.items():
            for answer in output.outputs:
                if branch_id(output.request_id, answer.index) == name and name not in self.runner.plan.rerun:
                    assert answer.finish_reason in ("error", "abort"), f"{name} failed ({message}) and goes on"
        if len(output.outputs) < len(expected.texts):
            [answer] = output.outputs
            assert answer.token_ids == [] and answer.finish_reason in ("abort", "error"), "answers are missing"
        assert output.finished == all(answer.finish_reason for answer in output.outputs)
        if output.finished:
            self.ended[output.request_id] = self.unfinished.pop(output.request_id)
        else:
            assert expected.cumulative and not expected.aborted

    def check(self):
        """What must hold between two steps."""
        self.manager.check()
        scheduler = self.scheduler
        running, waiting = scheduler.running, list(scheduler.waiting)
        live = [request for request in running if request.status is RequestStatus.RUNNING]
        assert sorted(scheduler.requests) == sorted(request.request_id for request in [*live, *waiting])
        assert len(running) <= scheduler.max_running
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == 0 and not self.manager.get_block_ids(request)
        for request in live:
            assert request.num_computed_tokens < request.num_tokens < request.max_num_tokens
        if not scheduler.waiting and not running:
            assert self.manager.num_free_blocks == self.manager.num_blocks

    def drain(self):
        """Steps until nothing is left, and looks for what was left behind."""
        work = sum(len(e.texts) * (e.max_num_tokens + 1) for e in self.unfinished.values())
        steps = 0
        while self.unfinished:
            self.step()
            steps += 1
            assert steps <= work * (1 + 8 * hasattr(self.scheduler, "keep_finished_rows")), "no end in sight"
        self.step()
        scheduler = self.scheduler
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.runner.rows == {} and scheduler.running == [] and len(scheduler.waiting) == 0
        assert scheduler.requests == {} and not scheduler.has_unfinished_requests
        assert not self.engine.has_unfinished_requests() and self.engine.step() == []
        assert self.manager.take_copies() == [] and self.manager.take_changes() == {}


def until_stop(tokens):
    """The tokens up to and with the first that ends a text."""
    for place, token in enumerate(tokens):
        if token in STOP_TOKENS:
            return tokens[: place + 1]
    return tokens


def random_world(rng: random.Random, record: bool = False) -> World:
    """A world of random sizes and policies."""
    chunked = rng.random() < 0.7
    block_size = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.choice([24, 48])
    num_slots = rng.choice([max_model_len // 2, max_model_len, 2 * max_model_len, 4 * max_model_len])
    contiguous = rng.random() < 0.5
    return World(
        num_blocks=max(1, num_slots // block_size),
        max_model_len=max_model_len,
        keep_finished_rows=rng.random() < 0.7,
        record=record,
        block_size=block_size,
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 20, 64]) if chunked else max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 5]) if chunked else 0,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        kv_cache="contiguous" if contiguous else "paged",
        reservation=rng.choice(["max", "pow2", "exact"]) if contiguous else None,
        batching=rng.choice(["continuous", "continuous", "static"]),
    )


def random_act(world: World, rng: random.Random, trouble: float = 0.02) -> None:
    """Something that happens before a step, or nothing."""
    known = list(world.unfinished)
    if len(known) < 10 and rng.random() < 0.35:
        length = rng.choice([1, 2, 7, 8, 9, 15, 16, 17, rng.randint(1, world.limits.max_model_len - 1)])
        world.add(
            min(length, world.limits.max_model_len - 1),
            rng.choice([1, 2, 3, 10, 30]),
            n=rng.choice([1, 1, 1, 1, 2, 3, 4]),
            priority=rng.randint(-1, 2),
            token=rng.randint(0, 900),
            cumulative=rng.random() < 0.9,
            name=rng.choice(world.free_names() or [None]) if rng.random() < 0.1 else None,
        )
    if rng.random() < 2 * trouble:
        name = rng.choice([*known, "nobody"])
        for _ in range(rng.choice([1, 1, 2])):
            world.abort(name)
    if known and rng.random() < trouble:
        world.abort_in_flight(rng.choice(known))
    if world.scheduler.running and rng.random() < trouble:
        world.fail(rng.choice(world.scheduler.running).request_id)
    if rng.random() < trouble / 2:
        world.runner.break_off = rng.choice(["before", "after"])


def compare(trace: Trace, engine, step: int = -1) -> None:
    """Asserts that the state of a trace after its last step is the state of the engine."""
    scheduler = engine.scheduler
    if not len(trace):  # the steps of an engine without requests are not recorded
        assert not scheduler.requests and not scheduler.running
        return
    state = trace.state(step)
    assert state.waiting == [request.request_id for request in scheduler.waiting]
    assert state.running == [request.request_id for request in scheduler.running]
    for request in [*scheduler.running, *scheduler.waiting]:
        seen, name = state.requests[request.request_id], request.request_id
        assert seen.status == request.status.value, f"{name} is {request.status}, the trace says {seen.status}"
        assert seen.num_tokens == request.num_tokens, name
        assert seen.num_prompt_tokens == request.num_prompt_tokens, name
        assert seen.num_computed_tokens == request.num_computed_tokens, name
        assert seen.block_ids == scheduler.manager.get_block_ids(request), name
        assert seen.num_preemptions == request.num_preemptions, name
        assert (seen.priority, seen.parent_id) == (request.priority, request.parent_id)
        assert seen.max_num_tokens == request.max_num_tokens
    here = {*state.running, *state.waiting}
    for seen in state.requests.values():
        if seen.request_id not in here:
            assert seen.ended and seen.block_ids == [], f"{seen.request_id} is gone, the trace says {seen}"
    assert abs(state.usage - scheduler.manager.usage) < 1e-6
    head = next(iter(scheduler.waiting), None)
    assert state.fragmentation == scheduler.manager.fragmentation(head)
