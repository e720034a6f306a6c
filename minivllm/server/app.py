"""The routes. A request is checked, handed to the engine, and its answer sent; who hangs up is forgotten at once."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

import minivllm
from minivllm.async_llm import AsyncLLM, EngineDeadError
from minivllm.model.default_model import ALIAS
from minivllm.model.hub import resolve_model
from minivllm.request import RequestOutput
from minivllm.server.answers import DONE, Reply, merged, new_id, sse
from minivllm.server.errors import NOBODY_READS, APIError, add_handlers, error_body, failure, from_validation
from minivllm.server.metrics import Metrics
from minivllm.server.middleware import BodyLimit, KeyCheck, bearer
from minivllm.server.openapi import ANY_ERROR, EVENTS, JSON, add_schemas, answered, asked
from minivllm.server.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
    field_of,
)
from minivllm.submission import Submission
from minivllm.tokenizer import encode, render_chat

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("chat.html")
LONGEST_NAME = 300  # characters: each chunk of a stream says it
STALLED_S = 60.0  # a step that takes longer is taken for a hang
Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
TextAndIds = tuple[str | None, list[int]]


@dataclass(frozen=True)
class ServerOptions:
    """What a server does beside its engine.

    Attributes:
        model_name: how clients call the model.
        api_keys: any of these must come as a bearer token; empty asks for none.
        max_body_bytes: longest body of a request.
        max_answers: most answers of a request: prompts times n.
        defaults: fields of `SamplingParams` for requests that leave them out.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_answers: int = 256
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Server:
    """The application, and what its routes share.

    Attributes:
        app: for uvicorn, or any other ASGI server.
        metrics: what is counted.
    """

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        """Builds the routes around an engine."""
        self.llm, self.options, self._numbers = llm, options, count()
        self.metrics = Metrics(llm.llm.engine, options.model_name)
        model = llm.llm.config.model
        self._root = str(resolve_model(model)) if model == ALIAS else model
        self.app = FastAPI(title="minivllm", version=minivllm.__version__, docs_url="/docs", redoc_url=None)
        self.app.add_middleware(BodyLimit, limit=options.max_body_bytes)
        self.app.add_middleware(KeyCheck, keys=options.api_keys)
        add_handlers(self.app)
        self._add_routes()

    def _add_routes(self) -> None:
        """All routes, and what the OpenAPI document says of them."""
        taking: list[tuple[str, Callable[..., Any], type[BaseModel], tuple[str, ...]]] = [
            ("/v1/completions", self.completions, CompletionRequest, (JSON, EVENTS)),
            ("/v1/chat/completions", self.chat_completions, ChatCompletionRequest, (JSON, EVENTS)),
            ("/tokenize", self.tokenize, TokenizeRequest, (JSON,)),
            ("/detokenize", self.detokenize, DetokenizeRequest, (JSON,)),
        ]
        for path, route, kind, media_types in taking:
            responses = answered(media_types, ANY_ERROR)
            self.app.post(path, response_model=None, openapi_extra=asked(kind), responses=responses)(route)
        emptying: dict[str, Any] = {"response_class": Response, "responses": answered((), (400, 401))}
        self.app.post("/reset_prefix_cache", response_model=None, **emptying)(self.reset_prefix_cache)
        reading: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
            ("/v1/models", self.models, {"responses": answered(errors=(401,))}),
            ("/health", self.health, {"response_class": Response, "responses": answered((), (503,))}),
            ("/metrics", self.metrics_text, {"response_class": PlainTextResponse}),
            ("/version", self.version, {}),
            ("/", self.page, {"response_class": HTMLResponse}),
        ]
        for path, route, told in reading:
            self.app.get(path, response_model=None, **told)(route)
            self.app.head(path, response_model=None, include_in_schema=False)(route)
        add_schemas(self.app, [kind for _, _, kind, _ in taking])

    # --- generation -------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Continues one prompt, or several."""
        arrival_time = self.llm.llm.engine.clock.now()
        body = await self._read(request, CompletionRequest)
        self._check(body, len(body.prompts))
        prompts: list[Any] = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                prompts.append((prompt, await asyncio.to_thread(self._encode, prompt, body.add_special_tokens)))
            else:
                prompts.append((None, prompt))
        return await self._answer(request, arrival_time, body, prompts)

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        arrival_time = self.llm.llm.engine.clock.now()
        body = await self._read(request, ChatCompletionRequest)
        self._check(body, 1)
        text, ids = await asyncio.to_thread(self._encode_chat, body.messages, body.add_special_tokens)
        return await self._answer(request, arrival_time, body, [(text, ids)])

    def _check(self, body: Generation, num_prompts: int) -> None:
        """Refuses what can't be done, before anything is tokenised."""
        self._check_model(body.model)
        body.check()
        num_answers = num_prompts * max(body.num_answers, 1)
        if num_answers > self.options.max_answers:
            raise APIError(
                f"{num_prompts} prompts with n={body.num_answers} make {num_answers} answers, and at most "
                f"{self.options.max_answers} may be asked for at once: send several requests",
                "n" if body.num_answers > 1 else "prompt",
            )

    async def _answer(
        self, request: Request, arrival_time: float, body: Generation, prompts: list[tuple[str | None, list[int]]]
    ) -> Response:
        name = new_id(body, request.headers.get("x-request-id"))
        if len(name) > LONGEST_NAME:
            raise APIError(
                f"request_id, or the header x-request-id, makes a name of {len(name)} characters; the most are "
                f"{LONGEST_NAME}",
                "request_id",
            )
        salt = self._salt(request, body.cache_salt)
        submissions = []
        for text, ids in prompts:  # the engine's names are its own: two clients may send the same x-request-id
            submissions.append(await self._prepare(body, f"{name}-{next(self._numbers)}", text, ids, salt))
        reply = Reply(body, self.options.model_name, self.llm.llm.tokenizer, name, arrival_time)
        reply.prompt_tokens = sum(len(submission.request.prompt_token_ids) for submission in submissions)
        self.llm.check_health()
        if body.stream:
            return StreamingResponse(self._stream(reply, submissions), media_type=EVENTS)
        outputs = await unless_gone(request, self._whole(reply, submissions))
        if outputs is None:
            return Response(status_code=NOBODY_READS)
        for output in outputs:
            for answer in output.outputs:
                if answer.finish_reason == "error":
                    raise failure(answer.stop_reason)
        return JSONResponse(reply.whole(outputs))

    async def _prepare(
        self, body: Generation, name: str, text: str | None, ids: list[int], salt: str | None
    ) -> Submission:
        """Checks one prompt of a request."""
        params = body.params(self.options.defaults)
        longest = self.llm.llm.max_model_len
        if params.max_tokens is not None and 0 < len(ids) < longest < len(ids) + params.max_tokens:
            raise APIError(
                f"the model's context is {longest} tokens, the prompt has {len(ids)} and max_tokens is "
                f"{params.max_tokens}: ask for at most {longest - len(ids)}",
                "max_tokens",
            )
        prompt: dict[str, Any] = {"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})}
        kind = "delta" if body.stream else "final_only"
        try:
            submission = await self.llm.prepare(prompt, params, name, body.priority, kind)  # type: ignore[arg-type]
        except ValueError as error:
            otherwise = "messages" if isinstance(body, ChatCompletionRequest) else "prompt"
            raise APIError(str(error), field_of(str(error), type(body), otherwise)) from None
        submission.prompt = text
        return submission

    async def _whole(self, reply: Reply, submissions: Sequence[Submission]) -> list[RequestOutput]:
        """Waits for all answers. One that is refused now takes the others with it."""

        async def one(submission: Submission) -> RequestOutput:
            async with aclosing(self.llm.run(submission, reply.arrival_time)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    last = output
            return last

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(submission)) for submission in submissions]
        except* EngineDeadError as problems:
            raise problems.exceptions[0] from None
        except* ValueError as problems:
            raise APIError(str(problems.exceptions[0])) from None
        outputs = [task.result() for task in tasks]
        reply.cached_tokens = sum(output.num_cached_tokens for output in outputs)
        return outputs

    async def _stream(self, reply: Reply, submissions: Sequence[Submission]) -> AsyncIterator[str]:
        """The events of a stream. What goes wrong now can only be told in it."""
        begun: set[int] = set()
        try:
            streams = [self.llm.run(submission, reply.arrival_time) for submission in submissions]
            async with aclosing(merged(streams)) as outputs:  # type: ignore[type-var]
                async for number, output in outputs:
                    if number not in begun:
                        begun.add(number)
                        reply.cached_tokens += output.num_cached_tokens
                    failed = [answer for answer in output.outputs if answer.finish_reason == "error"]
                    if failed:
                        raise failure(failed[0].stop_reason)
                    yield "".join(sse(chunk) for chunk in reply.chunks(number, output))
            yield "".join(sse(chunk) for chunk in reply.last()) + DONE
        except (APIError, EngineDeadError, ValueError) as error:
            status = {APIError: getattr(error, "status", 500), EngineDeadError: 503}.get(type(error), 400)
            yield sse(error_body(str(error), status)) + DONE

    # --- the other routes -------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """The only model that there is; `root` is a name by which its tokenizer can be loaded."""
        name, llm = self.options.model_name, self.llm.llm
        card = {"id": name, "object": "model", "created": 0, "owned_by": "minivllm", "root": self._root}
        return {"object": "list", "data": [{**card, "parent": None, "max_model_len": llm.max_model_len}]}

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """The tokens of a text, or of a conversation."""
        body = await self._read(request, TokenizeRequest)
        self._check_model(body.model)
        body.check_extra()
        if (body.prompt is None) == (body.messages is None):
            raise APIError("give either prompt or messages", "prompt")
        if body.prompt is not None:
            tokens = await asyncio.to_thread(self._encode, body.prompt, body.add_special_tokens is not False)
        else:
            _, tokens = await asyncio.to_thread(self._encode_chat, body.messages or [], bool(body.add_special_tokens))
        return {"count": len(tokens), "max_model_len": self.llm.llm.max_model_len, "tokens": tokens}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """The text of tokens."""
        body = await self._read(request, DetokenizeRequest)
        self._check_model(body.model)
        body.check_extra()
        size = self.llm.llm.model.config.vocab_size
        wrong = [token for token in body.tokens if not 0 <= token < size]
        if wrong:
            raise APIError(
                f"tokens has {wrong[0]}, which is out of the vocabulary of {size} (0 to {size - 1})", "tokens"
            )
        return {"prompt": await asyncio.to_thread(self.llm.llm.tokenizer.decode, body.tokens)}

    async def reset_prefix_cache(self) -> Response:
        """Empties the prefix cache; refused while requests are running."""
        try:
            await asyncio.to_thread(self.llm.llm.reset_prefix_cache)
        except ValueError as error:
            raise APIError(str(error)) from None
        return Response(status_code=200)

    async def health(self) -> Response:
        """200 while the engine lives and gets on."""
        self.llm.check_health()
        if self.llm.stalled_s > STALLED_S:
            raise APIError(f"the engine's step has been going on for {self.llm.stalled_s:.0f} s", status=503)
        return Response(status_code=200)

    async def metrics_text(self) -> Response:
        """What is counted, for Prometheus."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self) -> dict[str, str]:
        """Of minivllm."""
        return {"version": minivllm.__version__}

    async def page(self) -> Response:
        """A small chat."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    # --- what they share --------------------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """A body as an object of its kind."""
        given = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if given != "application/json":
            raise APIError("the body must be JSON: send Content-Type: application/json", status=415)
        try:
            value = from_json(await request.body(), allow_inf_nan=True)
        except ValueError as error:
            raise APIError(f"the body is no JSON: {str(error)[:200]}") from None
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            raise from_validation(error) from None

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.options.model_name:
            raise APIError(
                f"there is no model {name[:100]!r} here: the only one is {self.options.model_name!r}",
                "model",
                status=404,
            )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return encode(self.llm.llm.tokenizer, text, add_special_tokens)
        except ValueError as error:
            raise APIError(str(error), "prompt") from None

    def _encode_chat(self, messages: Sequence[ChatMessage], add_special_tokens: bool) -> tuple[str, list[int]]:
        tokenizer = self.llm.llm.tokenizer
        try:
            text = render_chat(tokenizer, [{"role": message.role, "content": message.text} for message in messages])
            return text, encode(tokenizer, text, add_special_tokens)
        except Exception as error:  # a template may raise whatever it likes
            raise APIError(f"the chat template refuses these messages: {error}", "messages") from None

    def _salt(self, request: Request, given: str | None) -> str | None:
        """The cache salt: with keys, nobody finds what another key's owner has sent."""
        if not self.options.api_keys:
            return given
        key = bearer(request.scope) or b""
        return hmac.new(key, f"minivllm cache salt:{given or ''}".encode(), hashlib.sha256).hexdigest()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of some work, or None if the client hangs up before; then the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
