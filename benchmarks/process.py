"""Our server as a process of its own."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

MODEL = "smollm2-135m"


@contextmanager
def serving(folder: Path, port: int, log: Path, *options: str) -> Iterator[tuple[str, int]]:
    """A server from the command line, for as long as the block lasts; gives its address and process."""
    command = [sys.executable, "-m", "minivllm.cli", "serve", str(folder), "--served-model-name", MODEL]
    command += ["--port", str(port), "--disable-uvicorn-access-log", *options]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            for _ in range(600):
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
                try:
                    httpx.get(f"{url}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
