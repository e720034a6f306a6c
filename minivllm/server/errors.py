"""The one form in which the server says that something is wrong: OpenAI's error object."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minivllm.async_llm import EngineDeadError
from minivllm.runner import NOTHING_LEFT

logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
NOBODY_READS = 499  # nginx's number for a client that has hung up
LONGEST = 1000  # characters of a message: what was sent is not to come back in full


class APIError(Exception):
    """Something that the client is told.

    Attributes:
        status: of the response.
        message: what is wrong, and what to do.
        param: the field that it is about.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The error object."""
    message = message if len(message) <= LONGEST else message[:LONGEST] + "…"
    error = {"message": message, "type": TYPES.get(status, TYPES[400]), "param": param, "code": status}
    return {"error": error}


def error_response(
    message: str, status: int, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response that holds nothing else."""
    if status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(error_body(message, status, param), status, headers)


def failure(reason: int | str | None) -> APIError:
    """A request that has failed on the way: the client's fault if it left no token to draw, else ours."""
    return APIError(f"the request failed: {reason}", status=400 if reason == NOTHING_LEFT else 500)


def from_validation(error: ValidationError) -> APIError:
    """What pydantic found, without what was sent: the first problems, and how many there are.

    Where a field may be of several types, only the nearest count: those whose problem lies deepest.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    deepest: dict[Any, int] = {}
    for problem in problems:
        field = _before_choice(problem["loc"])
        deepest[field] = max(deepest.get(field, 0), len(problem["loc"]))
    told: dict[str, list[str]] = {}
    for problem in problems:
        if len(problem["loc"]) == deepest[_before_choice(problem["loc"])]:
            where = ".".join(str(part) for part in problem["loc"][:8] if not _is_choice(part))
            told.setdefault(where[:100] or "body", []).append(problem["msg"][:200])
    lines = [f"{where}: {', or: '.join(dict.fromkeys(messages))}" for where, messages in told.items()]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    first = problems[0]["loc"]
    return APIError("; ".join(lines[:3]) + more, str(first[0])[:100] if first else None)


def _is_choice(part: int | str) -> bool:
    """Whether a part of a problem's place names one of several types that a field may have."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or part.endswith("]"))


def _before_choice(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A problem's place up to where types part."""
    return next((place[:index] for index, part in enumerate(place) if _is_choice(part)), place)


def add_handlers(app: FastAPI) -> None:
    """Whatever a route raises is told in this form."""

    @app.exception_handler(APIError)
    async def told(request: Request, error: APIError) -> Response:
        return error_response(error.message, error.status, error.param)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=NOBODY_READS)

    @app.exception_handler(EngineDeadError)
    async def dead(request: Request, error: EngineDeadError) -> Response:
        return error_response(str(error), 503)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        return error_response(str(error.detail), error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.exception("a request has failed")
        return error_response("something went wrong in the server; its log says what", 500)
