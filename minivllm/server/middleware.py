"""What stands before the routes: nobody without a key, and no body that is too long."""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.server.errors import APIError, error_response

OPEN = ("/health", "/metrics", "/version", "/")  # need no key; the page holds nothing, and asks for one itself


class KeyCheck:
    """Lets nobody in without a key, but to what is open to all."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks, and passes on."""
        if scope["type"] == "http" and self.keys and scope["path"] not in OPEN:
            given = bearer(scope)
            if given is None or not any(hmac.compare_digest(given, key) for key in self.keys):
                message = "a valid API key is needed: send Authorization: Bearer KEY"
                await error_response(message, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def bearer(scope: Scope) -> bytes | None:
    """The key that comes with a request."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


class BodyLimit:
    """Refuses bodies that are too long, before they are in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts what comes in."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.limit:
            return await self._refuse(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise APIError(f"the body is longer than {self.limit} bytes", status=413)
            return message

        return await self.app(scope, counted, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(f"the body is longer than {self.limit} bytes", 413)(scope, receive, send)
