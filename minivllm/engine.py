"""LLMEngine: requests in, tokens out, one step at a time.

The whole engine is the loop in `LLMEngine.step`. New requests and aborts may come from any thread; they are
only queued, and the loop applies them between two steps, so that everything else runs in one thread.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Lock, RLock
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from minivllm.clock import Clock, WallClock
from minivllm.config import EngineConfig, check_int
from minivllm.detokenizer import Detokenizer
from minivllm.kv_cache import PrefixCacheStats
from minivllm.prompts import Prompt, check_prompt, parse_prompt
from minivllm.request import Request, RequestOutput
from minivllm.sampler import derive_seed
from minivllm.sampling_params import SamplingParams, check_number
from minivllm.scheduler import Decision, RunnerOutput, Scheduler, SchedulerOutput
from minivllm.submission import OUTPUT_KINDS, OutputKind, Submission
from minivllm.tokenizer import encode
from minivllm.trace import Recorder, Trace


class Runner(Protocol):
    """Whoever carries a plan out: the model, or a simulation of it."""

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Computes what the plan asks for. A request that can't be computed is reported in `failed`."""


class Observer(Protocol):
    """Whoever wants to know what each step did, in the thread that makes it."""

    def observe(self, plan: SchedulerOutput, touched: list[Request], start: float, end: float) -> None:
        """A step has been made: its plan, the requests that got a token or ended, and when it began and ended."""


@dataclass(frozen=True)
class ModelLimits:
    """What the engine must know of the model to check a request.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: longest prompt + output, in tokens.
        eos_token_ids: tokens that end a text.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


class LLMEngine:
    """Runs any mix of requests together.

    Attributes:
        config: every option.
        scheduler: who runs when; its `manager` knows who owns which slot.
        runner: turns a plan into tokens.
        clock: what all times are read from.
        observer: is told of every step, if there is one.
        last_decisions: of the last step's plan.
    """

    observer: Observer | None = None
    last_decisions: Sequence[Decision] = ()

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        limits: ModelLimits,
        tokenizer: PreTrainedTokenizerBase | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Puts an engine together; `LLM` does it from a config.

        Args:
            config: every option.
            scheduler: on an empty memory.
            runner: whose cache the memory's block numbers stand for.
            limits: what the model can take.
            tokenizer: for prompts that are text, and for the text of answers (without it, answers have none).
            clock: None is real time.
        """
        self.config, self.scheduler, self.runner, self.limits = config, scheduler, runner, limits
        self.tokenizer, self.clock = tokenizer, clock or WallClock()
        self._submissions: dict[str, Submission] = {}
        self._names: set[str] = set()  # of all answers of what is in _submissions
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = Lock()  # for these three
        self._stepping = RLock()  # one step at a time, and no recording begins or ends in it
        self._touched: list[Request] = []  # got a token or ended, and not reported yet
        self._unseeded = count()
        self._recorder: Recorder | None = None
        self._held_back: dict[str, RequestOutput] = {}
        manager = scheduler.manager
        slots = range(1, manager.num_blocks * manager.block_size + 1)
        self._max_slots = bisect_left(slots, True, key=lambda slots: not manager.can_ever_fit(slots))

    def step(self) -> list[RequestOutput]:
        """Makes one step: every running request gets on by at least one token.

        Returns:
            What has come of the requests that got a token or ended: all their tokens so far (only in their last
            step, for those added with output_kind "final_only").
        """
        with self._stepping:
            self._take_in()
            start, plan = self.clock.now(), SchedulerOutput(self.scheduler.step)
            try:
                plan = self.scheduler.schedule(start)
                if self._recorder is not None:
                    self._recorder.before_pass()
                result = self.runner.execute(plan)
                self.clock.advance(result.elapsed_s)
                self._take_in()  # who was aborted meanwhile gets no token any more
                self.last_decisions, end = plan.decisions, self.clock.now()
                self._touched += self.scheduler.update(plan, result, end)
            except BaseException:
                self.scheduler.cancel(plan)
                raise
            if self._recorder is not None:
                self._recorder.record(plan, self._touched, start, end)
            if self.observer is not None:
                self.observer.observe(plan, self._touched, start, end)
            return self._outputs()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> None:
        """Hands a request to the engine; its answer comes out of `step`.

        Args:
            request_id: a name that no unfinished request has.
            prompt: a string, a list of token ids, or a dict with `prompt` or `prompt_token_ids`.
            sampling_params: None means `SamplingParams()`.
            arrival_time: in seconds on the engine's clock; None is now.
            priority: under the priority policy, lower goes first; None takes the prompt's, or 0.
            output_kind: "cumulative" gives all tokens so far in every step, "delta" those that are new, "final_only"
                the finished answer.

        Raises:
            ValueError: a prompt that the model or the memory can't take, a name that is in use, or a priority
                where the policy is first come, first served.
        """
        self.submit(self.prepare(request_id, prompt, sampling_params, priority, output_kind), arrival_time)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, wherever they stand: no token comes out after this call, and the next step reports the
        end. Without effect for names that are not there, or no more. Raises ValueError for what is no name and no
        list of names."""
        names = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(names, Iterable):
            raise ValueError(f"request_id must be a name or a list of names, got {request_id!r}")
        for name in list(names):
            with self._lock:
                submission = self._submissions.get(name)
                if submission is not None and not submission.aborted:
                    submission.aborted = True
                    self._inbox.append(partial(self._abort, submission))

    def has_unfinished_requests(self) -> bool:
        """Whether a step would have anything to do or to report."""
        return bool(self._submissions or self._held_back)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether there is a request of this name that has not ended, or whose end has not been reported."""
        return request_id in self._submissions

    def hold_back(self, outputs: list[RequestOutput]) -> None:
        """Keeps outputs for the next step, the latest of each request: they came out while somebody else drove the
        engine."""
        self._held_back |= {output.request_id: output for output in outputs}

    def start_recording(self) -> Trace:
        """Records every step from now on, into the trace that is returned and grows.

        Raises:
            ValueError: it is recording already.
        """
        with self._stepping:
            if self._recorder is not None:
                raise ValueError(
                    "the engine is recording already: end the other llm.trace(), or stop_recording(), first"
                )
            self._recorder = Recorder(self.config, self.scheduler, self.clock.now())
            return self._recorder.trace

    def stop_recording(self) -> None:
        """Ends the recording, if there is one."""
        with self._stepping:
            if self._recorder is not None:
                self._recorder.close()
            self._recorder = None

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """How many tokens were looked for in the prefix cache since the start, and how many found, so far."""
        return copy(self.scheduler.manager.prefix_cache_stats)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, between two steps; without effect where there is none.

        Raises:
            ValueError: blocks of it are in use.
        """
        with self._stepping:
            manager = self.scheduler.manager
            if manager.caches_prefixes and not manager.reset():
                used = manager.num_blocks - manager.num_free_blocks
                raise ValueError(
                    f"the prefix cache can't be emptied: {used} of {manager.num_blocks} blocks are in use by "
                    f"{len(self.scheduler.running)} running requests; step until they have ended, or abort them and "
                    "step"
                )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> Submission:
        """Checks a request, without handing it in; the first half of `add_request`, which raises what this raises."""
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, token_ids, own_priority, salt = parse_prompt(prompt)
        if token_ids is None:
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give the prompt as token ids")
            token_ids = encode(self.tokenizer, text or "")
        priority = own_priority if priority is None else priority
        check_int("priority", priority, minimum=-(2**63), maximum=2**63 - 1)
        if output_kind not in OUTPUT_KINDS:
            raise ValueError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {output_kind!r}")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(
                f"the request has priority {priority} and scheduling_policy is {self.config.scheduling_policy!r}, "
                "which does not look at it: build the engine with scheduling_policy='priority'"
            )
        check_prompt(token_ids, self.limits.vocab_size, self.limits.max_model_len)
        bad_words = self._check_params(params)
        longest = self.limits.max_model_len
        if params.max_tokens is None:
            longest = min(longest, self._max_slots + 1)
        else:
            longest = min(longest, len(token_ids) + params.max_tokens)
        self.scheduler.check(len(token_ids), max(longest, len(token_ids) + 1), params.n)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_num_tokens=longest,
            eos_token_ids=frozenset() if params.ignore_eos else self.limits.eos_token_ids,
            bad_words=bad_words,
            priority=int(priority),
            cache_salt=salt,
            num_samples=params.n,
        )
        if self.tokenizer is not None and (params.stop or output_kind != "final_only"):
            request.detokenizer = Detokenizer.of(self.tokenizer, params)
        return Submission(text, request, output_kind)

    def _check_params(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Checks what depends on the model. Returns the tokens of the bad words."""
        vocab_size = self.limits.vocab_size
        for name, token_id in params.token_ids:
            if token_id >= vocab_size:
                raise ValueError(
                    f"{name} has the token id {token_id}, which is out of the vocabulary of {vocab_size} (0 to "
                    f"{vocab_size - 1})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise ValueError(
                    f"{name} is {getattr(params, name)} and the vocabulary has {vocab_size} tokens: ask for at most "
                    "so many, or for all with -1"
                )
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise ValueError("stop and bad_words are texts, and this engine has no tokenizer: give stop_token_ids")
        if not params.bad_words:
            return ()
        assert self.tokenizer is not None
        # As texts are tokenised at their beginning, and behind a space.
        written = [form for word in params.bad_words for form in (word.lstrip() or word, f" {word.lstrip()}")]
        words = (tuple(encode(self.tokenizer, form, add_special_tokens=False)) for form in written)
        return tuple(dict.fromkeys(filter(None, words)))

    def submit(self, submission: Submission, arrival_time: float | None = None) -> None:
        """Hands in what `prepare` has checked; the second half of `add_request`, which raises what this raises."""
        request = submission.request
        if arrival_time is not None:
            check_number("arrival_time", arrival_time)
        request.arrival_time = self.clock.now() if arrival_time is None else float(arrival_time)
        names = submission.names
        with self._lock:
            # A member of a static batch keeps its row, and so its name, until the whole batch has ended.
            taken = names & self._names | names & {running.request_id for running in self.scheduler.running}
            if taken:
                raise ValueError(f"there is a request {min(taken)!r} that has not ended, or not given its row up")
            if request.params.seed is not None:
                request.seed = request.params.seed
            elif not request.params.greedy:
                request.seed = derive_seed(self.config.seed, next(self._unseeded))
            self._submissions[request.request_id] = submission
            self._names |= names
            self._inbox.append(partial(self._add, request))

    def _take_in(self) -> None:
        """Applies what has been queued."""
        while self._inbox:
            self._inbox.popleft()()

    def _add(self, request: Request) -> None:
        self.scheduler.add(request)
        if self._recorder is not None:
            self._recorder.add(request)

    def _abort(self, submission: Submission) -> None:
        now = self.clock.now()
        aborted = [self.scheduler.abort(answer.request_id, now) for answer in submission.answers.values()]
        self._touched += [answer for answer in aborted if answer is not None]

    def _outputs(self) -> list[RequestOutput]:
        """The outputs of requests that got a token or ended, each once; nothing is forgotten before all are made."""
        changed: dict[str, Submission] = {}
        for request in self._touched:
            name = request.parent_id or request.request_id
            submission = changed[name] = self._submissions[name]
            submission.answers[request.index] = request
        told = [s for s in changed.values() if s.finished or not (s.output_kind == "final_only" or s.aborted)]
        outputs = [(submission, submission.output(self.tokenizer)) for submission in told]
        returned, self._held_back = self._held_back, {}
        self._touched = []
        for submission, output in outputs:
            if submission.deliver is None:
                returned[output.request_id] = output
            else:
                submission.deliver(output)
            if submission.finished:  # only now: who waits for an output looks here whether it may still come
                with self._lock:
                    del self._submissions[output.request_id]
                    self._names -= submission.names
        return list(returned.values())
