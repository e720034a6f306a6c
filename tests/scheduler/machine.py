"""A world for random lives of requests: engine, scheduler and memory together, on the fake runner.

Every plan is checked before it is run, memory after every step, and every output against what the text must be,
however it was scheduled. The world knows three kinds of trouble: aborts (also while a step runs), rows that fail,
and passes that break off. What the prefix cache may and must find is told by a second account of it, the
`PrefixOracle`, which knows texts and no keys.
"""

import pickle
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.engine import ModelLimits
from minivllm.kv_cache import PagedKVCache, PrefixCacheStats
from minivllm.kv_cache.block_hash import short_key
from minivllm.request import Request, RequestStatus, branch_id
from minivllm.sampling_params import SamplingParams
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
        self.prefixes = PrefixWatch(scheduler, self.slots)
        self.rows = ForgivingRows()
        self.during, self.break_off = [], None
        self.plan, self.failed = None, {}

    def execute(self, plan):
        check_plan(self.scheduler, plan)
        assert len(plan.removed) == len(set(plan.removed)), f"removed twice: {plan.removed}"
        check_service(self.scheduler, plan)
        self.prefixes.check_plan(plan)
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


class PrefixOracle:
    """What can be found in a paged memory, told by texts: which blocks hold which.

    A text is its salt and the mark of its last token, which stands for all tokens up to there. Whoever drives the
    memory tells what is computed and what fails; what is handed out the oracle sees for itself.
    """

    def __init__(self, manager, slots: list) -> None:
        self.manager, self.slots, self.size = manager, slots, manager.block_size
        self.texts: dict[int, tuple] = {}  # of each block that holds one
        self.marks: dict[int, list] = {}
        self.counts: Counter = Counter()
        self.forgotten: set = set()
        if isinstance(manager, PagedKVCache):
            allocate = manager.pool.allocate

            def watched(count):
                taken = allocate(count)
                self.drop([block.block_id for block in taken or ()])
                return taken

            manager.pool.allocate = watched

    def computed(self, salt, marks, table, before: int, end: int) -> None:
        """A pass has computed the tokens from `before` to `end` of a text, and it counts."""
        for index in range(before // self.size, end // self.size if self.manager.caches_prefixes else 0):
            assert table[index] not in self.texts, f"block {table[index]} is computed, and holds a text"
            stop = (index + 1) * self.size
            self.texts[table[index]] = text = (salt, marks[stop - 1])
            self.marks[table[index]] = marks[stop - self.size : stop]
            self.counts[text] += 1

    def forget(self, table: Iterable[int]) -> None:
        """What blocks hold is not to be trusted."""
        self.forgotten |= {self.texts[block] for block in table if block in self.texts}
        self.drop(table)

    def drop(self, blocks: Iterable[int]) -> None:
        """Blocks hold a text no more."""
        for block in blocks:
            if block in self.texts:
                text = self.texts.pop(block)
                del self.marks[block]
                self.counts[text] -= 1
                if not self.counts[text]:
                    del self.counts[text]

    def num_hits(self, salt, marks, num_tokens: int, skip: bool = False) -> int:
        """Blocks that must be found: the longest prefix of full ones, but never the last token."""
        count, most = 0, 0 if skip else (num_tokens - 1) // self.size
        while count < most and (salt, marks[(count + 1) * self.size - 1]) in self.counts:
            count += 1
        return count

    def check(self, used: set[int]) -> None:
        """Asserts that just what is there can be found: of each text all blocks that are in use, or else one."""
        found = {event.block_id for event in self.manager.findable()}
        assert len(found) == self.manager.num_cached_blocks
        assert found <= self.texts.keys(), f"blocks {found - self.texts.keys()} can be found, and hold no text"
        groups: dict[tuple, set[int]] = {}
        for block, text in self.texts.items():
            groups.setdefault(text, set()).add(block)
        for text, blocks in groups.items():
            if blocks & used:
                assert blocks & found == blocks & used, f"of {blocks}, {blocks & used} are used, {blocks & found} found"
            else:  # the one that was kept may have been the one that is not to be trusted
                wanted = (0, 1) if text in self.forgotten else (1,)
                assert len(blocks & found) in wanted, f"{blocks} hold the same, {blocks & found} can be found"
        self.drop(self.texts.keys() - found)
        self.forgotten.clear()
        for block in found:
            held = self.slots[block * self.size : (block + 1) * self.size]
            assert held == self.marks[block], f"block {block} is found by another text than it holds"


class PrefixWatch:
    """Follows a scheduler: tells the oracle what counts, and compares lookups, admissions and counts with it."""

    def __init__(self, scheduler, slots: list) -> None:
        self.scheduler, self.manager = scheduler, scheduler.manager
        self.oracle, self.size = PrefixOracle(self.manager, slots), self.manager.block_size
        self.stats, self.first_hits = PrefixCacheStats(), dict[str, int]()
        self.put_off: dict[str, int] = {}
        self._lookups: dict[str, int] = {}
        self._marks: dict[str, tuple[Request, list]] = {}
        lookup, schedule, update = self.manager.get_computed_blocks, scheduler.schedule, scheduler.update

        def watched_lookup(request):
            found = lookup(request)
            self._check_lookup(request, [block.block_id for block in found])
            return found

        def watched_schedule(now):
            plan = schedule(now)
            self._count(plan)
            return plan

        def watched_update(plan, result, now):
            rows = [request for request in scheduler._in_flight if request.status is RequestStatus.RUNNING]
            before = [(request, request.num_computed_tokens, self.manager.get_block_ids(request)) for request in rows]
            touched = update(plan, result, now)
            for request, start, table in before:
                if request.request_id in result.failed:
                    self.oracle.forget(table)
                    continue
                end = start + plan.num_scheduled_tokens[request.request_id]
                self.oracle.computed(request.cache_salt, self.marks_of(request), table, start, end)
            return touched

        self.manager.get_computed_blocks = watched_lookup
        scheduler.schedule, scheduler.update = watched_schedule, watched_update

    def marks_of(self, request: Request) -> list:
        """The marks of a request's tokens."""
        owner, marks = self._marks.get(request.request_id, (None, []))
        if owner is not request:
            self._marks[request.request_id] = request, (marks := [])
        for token in request.token_ids[len(marks) :]:
            marks.append(hash((marks[-1] if marks else None, token)))
        return marks

    def _text(self, request: Request, index: int) -> tuple:
        return request.cache_salt, self.marks_of(request)[(index + 1) * self.size - 1]

    def _check_lookup(self, request: Request, found: list[int]) -> None:
        marks, skip = self.marks_of(request), request.params.skip_reading_prefix_cache
        hits = self.oracle.num_hits(request.cache_salt, marks, request.num_tokens, skip)
        assert len(found) == hits, f"{request.request_id} finds {len(found)} blocks, and {hits} are there"
        texts = [self._text(request, index) for index in range(hits)]
        assert [self.oracle.texts.get(block) for block in found] == texts, f"{request.request_id} finds others' blocks"
        self._lookups[request.request_id] = hits

    def check_plan(self, plan) -> None:
        """What must hold of admissions and of those that are put off, before the pass."""
        admitted = {d.request_id: d for d in plan.decisions if d.kind in ("admit", "resume")}
        for request in self.scheduler._in_flight:
            if decision := admitted.get(request.request_id):
                self._check_admission(request, decision)
        self._check_put_off(plan, admitted)
        assert {event.block_id for event in self.manager.findable()} <= self.oracle.texts.keys(), "published too early"

    def _check_admission(self, request: Request, decision) -> None:
        name, num_cached = request.request_id, decision.available
        assert num_cached == self._lookups[name] * self.size, f"{name} is admitted with {num_cached} tokens"
        for index, block in enumerate(self.manager.get_block_ids(request)[: self._lookups[name]]):
            assert self.oracle.texts.get(block) == self._text(request, index), (
                f"{name}: block {block} is not what it was"
            )

    def _check_put_off(self, plan, admitted: dict) -> None:
        """Nobody computes a block that a row before it computes, and who is put off is put off for that."""
        computing: dict[tuple, str] = {}
        for request in self.scheduler._in_flight:
            start, end = request.num_computed_tokens, request.num_computed_tokens
            end += plan.num_scheduled_tokens[request.request_id]
            usable = 0 if request.params.skip_reading_prefix_cache else (request.num_tokens - 1) // self.size
            if request.request_id in admitted and start // self.size < usable and self._may_put_off:
                other = computing.get(self._text(request, start // self.size))
                assert other is None, f"{request.request_id} computes what {other} computes"
            for index in range(start // self.size, min(-(-end // self.size), request.num_tokens // self.size)):
                computing.setdefault(self._text(request, index), request.request_id)
        disturbed = any(decision.kind in ("preempt", "outgrow") for decision in plan.decisions)
        put_off = [decision for decision in plan.decisions if decision.cause == "prefix"]
        assert self._may_put_off or not put_off
        by_name = {request.request_id: request for request in self.scheduler.waiting}
        for decision in put_off:
            request = by_name[decision.request_id]
            hits = self._lookups[request.request_id]
            assert decision.available == hits * self.size
            assert self._text(request, hits) in computing, f"{request.request_id} waits for nothing"
        before = {} if disturbed else self.put_off
        if self.scheduler.policy == "fcfs":
            names = [decision.request_id for decision in put_off]
            assert [*by_name][: len(names)] == names, f"{names} are put off, {[*by_name]} wait"
            rowless = {decision.request_id for decision in plan.decisions if decision.cause == "max_num_seqs"}
            assert not rowless & before.keys(), f"{rowless & before.keys()} was put off, and its row is another's now"
        self.put_off = {d.request_id: before.get(d.request_id, 0) + 1 for d in put_off}
        for name, count in self.put_off.items():
            assert count <= by_name[name].num_tokens, f"{name} is put off for {count} steps"

    @property
    def _may_put_off(self) -> bool:
        return self.manager.caches_prefixes and not hasattr(self.scheduler, "keep_finished_rows")

    def _count(self, plan) -> None:
        """Counts the lookups of a plan."""
        running = {request.request_id: request for request in self.scheduler.running}
        for decision in plan.decisions:
            if decision.kind not in ("admit", "resume"):
                continue
            request = running[decision.request_id]
            if decision.kind == "admit":
                self.first_hits[request.request_id] = decision.available
            if self.manager.caches_prefixes and not request.params.skip_reading_prefix_cache:
                self.stats.record(request.num_tokens, decision.available, decision.kind == "resume")

    def check(self) -> None:
        """What must hold between two steps."""
        used = dict[int, str | None]()
        for request in self.scheduler.running:
            for block in self.manager.get_block_ids(request):
                salt = used.setdefault(block, request.cache_salt)
                assert salt == request.cache_salt, f"{request.request_id} shares block {block} with another salt"
        self.oracle.check(set(used))
        assert self.manager.prefix_cache_stats == self.stats


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
        request.arrival_time, request.eos_token_ids = arrival_time, frozenset(stop)
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
            self.runner.prefixes.check()
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
    prompt: list
    salt: str | None = None
    skip: bool = False
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
        self.num_refused = self.num_broken = self.num_resets = 0
        self.texts: list[list[int]] = []  # prompts, and prompts with their answers, for others to begin with

    def free_names(self):
        """Names of requests that have ended and hold nothing any more."""
        taken = {request.request_id.split("/")[0] for request in self.scheduler.running}
        return [name for name in self.ended if name not in taken]

    def add(
        self,
        length,
        max_tokens,
        n=1,
        priority=0,
        token=1,
        cumulative=True,
        name=None,
        begin=(),
        salt=None,
        skip=False,
    ):
        """Adds a request whose prompt begins like `begin` and goes on with tokens of its own; returns its name, or
        None if it was refused, which only a hopeless one may be."""
        name, self.count = name or f"R{self.count}", self.count + 1
        own = [1 + (token + self.count * 37 + place * 11) % (VOCAB - 1) for place in range(length)]
        prompt = [*begin[:length], *own[len(begin) :]]
        params = SamplingParams(
            n=n,
            temperature=float(n > 1),
            seed=self.count if n > 1 else None,
            max_tokens=max_tokens,
            skip_reading_prefix_cache=skip,
        )
        longest = min(self.limits.max_model_len, length + max_tokens)
        slots = self.manager.num_blocks * self.manager.block_size
        hopeless = longest - 1 > slots or n > self.scheduler.max_running
        try:
            kind = "cumulative" if cumulative else "final_only"
            asked = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
            self.engine.add_request(name, asked, params, priority=priority if not self.fair else 0, output_kind=kind)
        except ValueError:
            assert hopeless, f"{name} ({length} + {max_tokens}, n {n}) was refused"
            self.num_refused += 1
            return None
        assert not hopeless, f"{name} ({length} + {max_tokens}, n {n}) can't run and was not refused"
        seed = params.seed or 0
        texts = [until_stop(expected_output(prompt, longest - length, seed + i)) for i in range(n)]
        self.ended.pop(name, None)
        self.unfinished[name] = Expected(name, texts, cumulative, longest, prompt, salt, skip)
        self.runner.prefixes.first_hits.pop(name, None)
        self._keep(prompt)
        return name

    def _keep(self, text):
        self.texts = [*self.texts[-15:], text]

    def reset_prefix_cache(self):
        """Empties the prefix cache, or fails to, which it must exactly where a block is in use."""
        used, before = self.manager.num_free_blocks < self.manager.num_blocks, self.manager.findable()
        try:
            self.engine.reset_prefix_cache()
        except ValueError:
            assert used and self.manager.caches_prefixes and self.manager.findable() == before
            return
        assert not used or not self.manager.caches_prefixes
        self.num_resets += 1
        oracle = self.runner.prefixes.oracle
        oracle.drop(list(oracle.texts))
        assert self.manager.num_cached_blocks == 0

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
        broken, failing = self.num_broken, bool(self.runner.fail)
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
        if self.num_broken > broken or any(expected.aborted for expected in self.unfinished.values()) or failing:
            self.runner.prefixes.put_off.clear()
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
        assert output.num_cached_tokens == self.runner.prefixes.first_hits.get(output.request_id, 0)
        if output.finished:
            self.ended[output.request_id] = self.unfinished.pop(output.request_id)
            self._keep([*expected.prompt, *output.outputs[-1].token_ids])
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
        for request in scheduler.requests.values():
            asked = self.unfinished[request.request_id.split("/")[0]]
            assert (request.cache_salt, request.params.skip_reading_prefix_cache) == (asked.salt, asked.skip)
        self.runner.prefixes.check()
        assert self.engine.prefix_cache_stats == self.runner.prefixes.stats
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


def stem(number: int, length: int) -> list[int]:
    """A text that many prompts begin with."""
    return [1 + (number * 331 + place * 7) % (VOCAB - 1) for place in range(length)]


def random_beginning(world: World, rng: random.Random) -> list[int]:
    """What a prompt begins with: a stem, an earlier prompt, or one with its answer, as the next turn of a chat does;
    or nothing, or only a part of it."""
    if rng.random() < 0.2:
        return []
    earlier = bool(world.texts) and rng.random() < 0.5
    text = rng.choice(world.texts) if earlier else stem(rng.randint(0, 2), world.limits.max_model_len)
    return text if rng.random() < 0.5 else text[: rng.randint(1, len(text))]


def random_world(rng: random.Random, record: bool = False) -> World:
    """A world of random sizes and policies."""
    chunked = rng.random() < 0.7
    block_size = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.choice([24, 48])
    num_slots = rng.choice([max_model_len // 2, max_model_len, 2 * max_model_len, 4 * max_model_len])
    contiguous = rng.random() < 0.3
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
        enable_prefix_caching=None if contiguous or rng.random() < 0.8 else False,
        prefix_caching_hash_algo=rng.choice(["sha256", "builtin"]),
        batching=rng.choice(["continuous", "continuous", "static"]),
    )


def random_request(world: World, rng: random.Random, begin: list[int]) -> None:
    """A request that may begin like others."""
    length = rng.choice([1, 2, 7, 8, 9, 15, 16, 17, rng.randint(1, world.limits.max_model_len - 1)])
    if rng.random() < 0.5:
        length = len(begin) + rng.choice([0, 0, 1, 3])
    world.add(
        max(1, min(length, world.limits.max_model_len - 1)),
        rng.choice([1, 2, 3, 10, 30]),
        n=rng.choice([1, 1, 1, 1, 2, 3, 4]),
        priority=rng.randint(-1, 2),
        token=rng.randint(0, 900),
        cumulative=rng.random() < 0.9,
        name=rng.choice(world.free_names() or [None]) if rng.random() < 0.1 else None,
        begin=begin,
        salt=rng.choice([None, None, None, None, "a", "b"]),
        skip=rng.random() < 0.1,
    )


def random_act(world: World, rng: random.Random, trouble: float = 0.02) -> None:
    """Something that happens before a step, or nothing."""
    known = list(world.unfinished)
    if len(known) < 10 and rng.random() < 0.3:
        begin, together = random_beginning(world, rng), rng.choice([1, 1, 1, 1, 1, 3])
        for _ in range(together):
            random_request(world, rng, begin)
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
    if rng.random() < trouble:
        world.reset_prefix_cache()


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
    if not scheduler.manager.cache_events:  # else some of them have still to be recorded
        found = {event.block_id: short_key(event.key) for event in scheduler.manager.findable()}
        assert {block: cached.key for block, cached in state.cached_blocks.items()} == found
    assert abs(state.usage - scheduler.manager.usage) < 1e-6
    head = next(iter(scheduler.waiting), None)
    assert state.fragmentation == scheduler.manager.fragmentation(head)
