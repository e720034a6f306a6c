"""The process: an engine, its server, and their end."""

import asyncio
import logging
import signal
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from minivllm.async_llm import AsyncLLM
from minivllm.server.app import Server, ServerOptions

logger = logging.getLogger(__name__)
SPARE_S = 30  # for a step that is being made when the engine is to end, and for telling


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, and for how long to wait at the end.

    Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        server: what the server does.
        shutdown_timeout_s: for how long requests that are running may go on when the process is told to end.
        log_requests: a line for each request.
    """

    host: str
    port: int
    server: ServerOptions
    shutdown_timeout_s: int = 30
    log_requests: bool = True
    uvicorn: dict[str, Any] = field(default_factory=dict)


def serve(llm: AsyncLLM, options: ServeOptions) -> int:
    """Serves until the process is told to end, or the engine breaks down.

    Returns:
        The exit code: 0, or 1 where the engine broke down.
    """
    server = make_server(llm, options)
    # uvicorn raises the signal that ended it once more when it is done, which is no news to us.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        llm.shutdown()
    return 1 if llm.broken else 0


class PatientServer(uvicorn.Server):
    """At its end, requests that are running have some time left. Then the engine ends, and who still waits is told;
    uvicorn alone would break the connections off."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, patience_s: float) -> None:
        super().__init__(config)
        self._llm, self._patience_s = llm, patience_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_engine())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_engine(self) -> None:
        await asyncio.sleep(self._patience_s)
        logger.warning("requests are still running after %g s, and are ended", self._patience_s)
        await asyncio.to_thread(self._llm.shutdown)


def make_server(llm: AsyncLLM, options: ServeOptions) -> uvicorn.Server:
    """A server that ends when its engine does."""
    app = Server(llm, options.server).app
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level="info",
        access_log=options.log_requests,
        timeout_graceful_shutdown=options.shutdown_timeout_s + SPARE_S,
        **options.uvicorn,
    )
    server = PatientServer(config, llm, options.shutdown_timeout_s)

    def end() -> None:
        server.should_exit = True

    llm.on_death = end
    return server


class ServerThread:
    """A server in a thread of this process, as the lesson and the tests take it: `with ServerThread(llm) as url:`.

    Attributes:
        url: where it listens, once it does.
        llm: its engine, which ends with it.
    """

    def __init__(self, llm: AsyncLLM, model_name: str = "smollm2-135m", port: int = 0, **options: Any) -> None:
        """Takes any other field of `ServerOptions`."""
        self.llm = llm
        self._server = make_server(
            llm,
            ServeOptions(
                "127.0.0.1",
                port,
                ServerOptions(model_name, **options),
                shutdown_timeout_s=5,
                log_requests=False,
                uvicorn={"log_config": None},
            ),
        )
        self._thread = threading.Thread(target=self._run, name="minivllm server", daemon=True)
        self._ready = threading.Event()
        self.url = ""

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if self._server.started:
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await serving

    def start(self) -> "ServerThread":
        """Starts, and waits until it listens.

        Raises:
            RuntimeError: it does not.
        """
        self._thread.start()
        self._ready.wait()
        if not self.url:
            raise RuntimeError("the server did not start: its log says why")
        return self

    def stop(self) -> None:
        """Ends the server and the engine."""
        self._server.should_exit = True
        self._thread.join()
        self.llm.shutdown()

    def __enter__(self) -> "ServerThread":
        """As `start`."""
        return self.start()

    def __exit__(self, *error: object) -> None:
        """As `stop`."""
        self.stop()
