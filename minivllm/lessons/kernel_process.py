"""A process in which Triton interprets kernels. Knows nothing of kernels: it calls functions there.

Triton decides when it is imported whether it compiles or interprets. So the interpreter has a process of its own,
`python -m minivllm.lessons.kernel_process`. It starts with the first call and serves all later ones, since starting is
what takes time; it ends with the process that started it, whose pipe it reads.
"""

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HAS_TRITON = find_spec("triton") is not None
ROOT = Path(__file__).resolve().parents[2]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function where Triton's kernels can run: here if there is a GPU, else in the interpreter's process.

    Args:
        function: of a module, so that it can be named to another process.
        arguments: its arguments.

    Raises:
        RuntimeError: it failed in the interpreter's process; the message has what was said there.
    """
    return function(*arguments) if torch.cuda.is_available() else INTERPRETER.call(function, *arguments)


def where_it_runs() -> str:
    """What `run` does on this machine, in a sentence or two."""
    if not HAS_TRITON:
        return (
            "There is no Triton here (it exists for Linux only). Wherever a kernel would run you see the torch "
            "reference instead: the checks compare it with itself and show nothing about the kernel. What a program of "
            "the kernel leaves unread, and what a change of its source does, can't be seen here."
        )
    if torch.cuda.is_available():
        return f"The kernel is compiled and runs on the GPU, {torch.cuda.get_device_name()}."
    return "There is no GPU here: Triton's interpreter runs the kernel, line by line, in a process of its own."


class Interpreter:
    """Calls functions in a process where Triton interprets; a new one is started where there is none (any more)."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of a module in the process; what it takes and returns is pickled.

        Raises:
            RuntimeError: it failed, or the process ended; the message has what was said there.
        """
        if self._process is None:
            self._start()
        process = self._process
        assert process and process.stdin and process.stdout
        try:
            pickle.dump((function, arguments), process.stdin)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")[-2000:].strip()
            self.stop()
            raise RuntimeError(f"Triton's interpreter ended with {code}:\n{said}") from None
        except BaseException:  # an interrupt: the answer that is still to come belongs to nobody
            self.stop()
            raise
        if error:
            raise RuntimeError(f"Triton's interpreter failed:\n{error}")
        return result

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None
            atexit.unregister(self.stop)

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        command = [sys.executable, "-m", "minivllm.lessons.kernel_process"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would fill up)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=self._errors)
        atexit.register(self.stop)


INTERPRETER = Interpreter()


def _serve() -> None:
    """The process's side: calls what is sent, until the pipe ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints must not get between the answers
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        result = error = None
        try:
            result = function(*arguments)
        except Exception as cause:
            while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
                cause = cause.__cause__  # Triton wraps what a kernel raised
            error = "".join(traceback.format_exception(cause))[-2000:].strip()
        pickle.dump((result, error), answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
