"""AsyncLLM: the streaming front. One thread drives the engine; any number of asyncio tasks read from it.

The engine's thread never waits for a reader, and a reader never blocks the event loop: what a step gives is handed to
each event loop in a single call, and goes from there to whoever waits for it. A request whose reader goes away is
aborted. An engine that breaks tells everybody, at once, and takes no more requests.
"""

import asyncio
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count
from typing import Any

from minivllm.llm import LLM
from minivllm.openmp import release_threads
from minivllm.prompts import Prompt
from minivllm.request import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.submission import OutputKind, Submission

logger = logging.getLogger(__name__)
Queue = asyncio.Queue[RequestOutput | Exception]


class EngineDeadError(RuntimeError):
    """The engine has broken down or was shut down: nothing comes of a request any more."""


class AsyncLLM:
    """A model and its engine, in a thread of its own.

    Attributes:
        llm: what it was built from: its model, tokenizer and engine. Only `engine.abort_request` may be called while
            requests are running.
        on_death: called once, in the engine's thread, when it ends.
    """

    def __init__(self, model: str | os.PathLike[str] = "smollm2-135m", **fields: Any) -> None:
        """Loads a model and starts the thread; arguments and errors are those of `LLM`."""
        self._start(LLM(model, **fields))

    @classmethod
    def from_llm(cls, llm: LLM) -> "AsyncLLM":
        """The streaming front of a loaded model. Nobody else may drive its engine from now on: take
        `llm.reconfigure()` for an engine of its own on the same weights."""
        self = cls.__new__(cls)
        self._start(llm)
        return self

    def _start(self, llm: LLM) -> None:
        self.llm, self._engine = llm, llm.engine
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, Queue]] = {}
        self._given: dict[asyncio.AbstractEventLoop, list[tuple[Queue, RequestOutput | Exception]]] = defaultdict(list)
        self._wake, self._closing = threading.Condition(), False
        self._error: EngineDeadError | None = None
        self._numbers = count()
        self.on_death: Callable[[], None] = lambda: None
        self._step_began: float | None = None
        release_threads()  # those of who has loaded the model
        self._thread = threading.Thread(target=self._run, name="minivllm engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncIterator[RequestOutput]:
        """Continues a prompt: `async for output in llm.generate(…)`. Who stops reading aborts the request.

        Args:
            prompt: as in `LLM.generate`.
            sampling_params: None means `SamplingParams()`.
            request_id: a name that no unfinished request has; None makes one.
            priority: under the priority policy, lower goes first; None takes the prompt's, or 0.
            output_kind: "cumulative" gives all tokens so far, "delta" those that are new, "final_only" one output.

        Yields:
            An output whenever a token has come, until it is `finished`. One that failed on the way has the finish
            reason "error".

        Raises:
            ValueError: as in `LLMEngine.add_request`.
            EngineDeadError: the engine has broken down, before or while the answer was made.
        """
        submission = await self.prepare(prompt, sampling_params, request_id, priority, output_kind)
        async for output in self.run(submission):
            yield output

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> Submission:
        """Checks and tokenises a request, outside the event loop; the first half of `generate`."""
        name = f"#{next(self._numbers)}" if request_id is None else request_id
        return await asyncio.to_thread(self._engine.prepare, name, prompt, sampling_params, priority, output_kind)

    async def run(self, submission: Submission, arrival_time: float | None = None) -> AsyncIterator[RequestOutput]:
        """Runs what `prepare` has checked; the second half of `generate`. It came at `arrival_time`, in seconds on the
        engine's clock; None is now."""
        queue: Queue = asyncio.Queue()
        name, loop, ended = submission.request.request_id, asyncio.get_running_loop(), False
        submission.deliver = partial(self._collect, loop, queue)
        with self._wake:
            self._check()
            self._engine.submit(submission, arrival_time)
            self._streams[name] = loop, queue
            self._wake.notify()
        try:
            while not ended:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                ended = output.finished
                yield output
        finally:
            with self._wake:
                self._streams.pop(name, None)
            if not ended:
                self.abort(name)

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it stands; without effect where there is none of this name."""
        with self._wake:
            self._engine.abort_request(request_id)
            self._wake.notify()

    @property
    def broken(self) -> bool:
        """Whether the engine has broken down, and was not shut down."""
        return self._error is not None and self._error.__cause__ is not None

    @property
    def stalled_s(self) -> float:
        """For how long the step that is being made has been going on, in seconds; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has broken down or was shut down."""
        with self._wake:
            self._check()

    def shutdown(self) -> None:
        """Ends the thread after the step that is being made; who still reads gets an EngineDeadError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error.__cause__

    def _run(self) -> None:
        """The engine's thread."""
        cause: BaseException | None = None
        try:
            while self._wait():
                self._step_began = time.monotonic()
                self._engine.step()
                self._step_began = None
                self._hand_over()
        except BaseException as error:
            cause = error
            logger.exception("the engine has broken down")
        self._end(cause)

    def _wait(self) -> bool:
        """Waits for work. Returns whether to go on."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._engine.has_unfinished_requests())
            return not self._closing

    def _collect(self, loop: asyncio.AbstractEventLoop, queue: Queue, output: RequestOutput | Exception) -> None:
        """Takes an output, in the engine's thread."""
        self._given[loop].append((queue, output))

    def _hand_over(self) -> None:
        """Gives each event loop what has come for it."""
        given, self._given = self._given, defaultdict(list)
        for loop, items in given.items():
            try:
                loop.call_soon_threadsafe(_put, items)
            except RuntimeError:  # the loop is closed, and its readers are gone with it
                logger.debug("an event loop was closed with %d outputs to come", len(items))

    def _end(self, cause: BaseException | None) -> None:
        """Tells everybody that the engine is no more."""
        what = "was shut down" if cause is None else f"has broken down: {type(cause).__name__}: {cause}"
        error = EngineDeadError(f"the engine {what}")
        error.__cause__ = cause
        with self._wake:
            self._error, self._step_began = error, None
            for loop, queue in self._streams.values():
                self._collect(loop, queue, EngineDeadError(str(error)))
        self._hand_over()
        self.on_death()


def _put(items: list[tuple[Queue, RequestOutput | Exception]]) -> None:
    for queue, item in items:
        queue.put_nowait(item)
