"""Set-up: from a bare Python to a `.venv` with everything in it and the model on disk (`make setup`).

Runs under the system's Python by path, with the standard library only; it knows nothing of the package that
it installs. Each step leaves a stamp in `.venv/setup.json` (or a finished folder), so that a rerun costs
nothing and an interrupted one goes on where it stopped, and each expected failure is one sentence
(`SetupError`), never a traceback. The file must parse on Python 3.6: an old Python gets its sentence too.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # not a Unix: two set-ups at once are not kept apart
    fcntl = None  # type: ignore[assignment]

SUPPORTED = ("3.11", "3.12", "3.13")
THIS_PYTHON = ".".join(platform.python_version_tuple()[:2])
if THIS_PYTHON not in SUPPORTED:
    sys.exit(
        f"minivllm needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {platform.python_version()}: "
        "install one of the three, or name one you have (make setup PYTHON=/path/to/python3.12)."
    )

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMPS = VENV / "setup.json"
KERNEL = VENV / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
KERNEL_NAME = "Python 3 (minivllm)"
# A thread of torch that waits sleeps instead of spinning: the browser beside the notebook needs the core too.
KERNEL_ENV = {"OMP_WAIT_POLICY": "passive"}
COMPILED = ROOT / "minivllm" / "cpu" / "__pycache__" / "ready"
MODEL = ROOT / "data" / "models" / "smollm2-135m" / "minivllm.json"
MODEL_GB = 0.7
CUDA_BUILD_GB = 8.0
AGAIN = "run the same make command again, and it goes on from this step"


class SetupError(Exception):
    """An expected failure: its text is the sentence that the user reads."""


class Step(NamedTuple):
    title: str
    is_done: Callable[[], bool]
    do: Callable[[], None]
    size_gb: float


def main() -> int:
    # A closed terminal and a `kill` end in the sentence that Ctrl-C ends in, and take pip along.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    # PYTHON=... on make's command line asks for that version; otherwise any supported .venv is kept.
    versions = (THIS_PYTHON,) if "--this-python" in sys.argv[1:] else SUPPORTED
    try:
        with only_one_setup():
            take_steps(versions)
            return 0 if MODEL.is_file() else fetch_model()
    except KeyboardInterrupt:
        return report(f"Stopped: {AGAIN}.", 130)
    except SetupError as error:
        return report(str(error))
    except OSError as error:
        return report(explain_os_error(error))


def report(sentence: str, code: int = 1) -> int:
    print(sentence, file=sys.stderr)
    return code


@contextlib.contextmanager
def only_one_setup() -> Iterator[None]:
    """Waits while another set-up works in this folder."""
    with open(ROOT / ".setup.lock", "a") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("Another make is setting up this folder: waiting until it is done.", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # some network file systems have no locks
        yield


def take_steps(versions: tuple[str, ...]) -> None:
    """Takes those of the five steps that are not done yet."""
    steps = [
        Step("Python environment in .venv", lambda: not venv_problem(versions), make_venv, 0.1),
        Step("PyTorch", lambda: is_stamped("torch"), install_torch, 1.2),
        Step("the package and its dependencies", lambda: is_stamped("package"), install_package, 1.6),
        Step("Jupyter kernel", kernel_is_ours, install_kernel, 0.0),
        Step("loops for this processor", loops_are_compiled, compile_loops, 0.0),
    ]
    first = next((number for number, step in enumerate(steps) if not step.is_done()), len(steps))
    if first == len(steps):
        return
    model_gb = 0.0 if MODEL.is_file() else MODEL_GB
    check_space(sum(step.size_gb for step in steps[first:]) + model_gb, torch_to_come=first <= 1)
    for number, step in enumerate(steps[first:], first + 1):
        if not step.is_done():
            print(f"[{number}/{len(steps)}] {step.title}", flush=True)
            step.do()


# The steps: is it done, and do it. ------------------------------------------------------------------------


def venv_problem(versions: tuple[str, ...]) -> str:
    """Why .venv can't be used as it is, or an empty string."""
    probe = [str(PYTHON), "-c", "import pip, platform; print(platform.python_version())"]
    try:
        found = subprocess.run(probe, env=child_environment(), capture_output=True, text=True)
    except OSError:
        return "it has no working Python"
    version = ".".join(found.stdout.split(".")[:2])
    if found.returncode:
        return "it has no working Python"
    if version not in versions:
        return f"it has Python {version}"
    if read_stamps().get("venv") != f"{version} {VENV}":
        return "it was moved here, not finished, or made by something else"
    return ""


def make_venv() -> None:
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise SetupError(NO_VENV_MODULE)
    if VENV.exists():
        print(f"      .venv is made anew: {venv_problem((THIS_PYTHON,))}", flush=True)
    VENV.mkdir(exist_ok=True)
    # The stamps go first: a .venv that is half removed must not look finished. The folder itself stays, as it
    # may be a link to a roomier disk.
    for entry in sorted(VENV.iterdir(), key=lambda entry: entry != STAMPS):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    run_logged([sys.executable, "-m", "venv", str(VENV)])
    write_stamps(venv=f"{THIS_PYTHON} {VENV}")


def install_torch() -> None:
    # setuptools comes along: the package is built with the one that is pinned, without another download.
    pip_install("torch", "setuptools", "torch")


def install_package() -> None:
    pip_install("package", "--no-build-isolation", "--editable", ".[notebooks,test]")


def pip_install(step: str, *what: str) -> None:
    try:
        extra = shlex.split(pip_args())
    except ValueError as error:
        raise SetupError(f"PIP_ARGS can't be split into words ({error}): mend its quotes.") from None
    run_logged([str(PYTHON), "-m", "pip", "install", "--constraint", "constraints.txt", *extra, *what])
    write_stamps(**{step: fingerprint(), "pip_args": pip_args()})


def kernel_is_ours() -> bool:
    try:
        spec = json.loads(KERNEL.read_text())
        return (spec["argv"][0], spec["display_name"], spec["env"]) == (str(PYTHON), KERNEL_NAME, KERNEL_ENV)
    except (OSError, ValueError, LookupError):
        return False


def install_kernel() -> None:
    options = ["--sys-prefix", "--name", "python3", "--display-name", KERNEL_NAME]
    for name, value in KERNEL_ENV.items():
        options += ["--env", name, value]
    run_logged([str(PYTHON), "-m", "ipykernel", "install", *options])


def loops_are_compiled() -> bool:
    sources = [source.stat().st_mtime for source in COMPILED.parents[1].glob("*.py")]
    return not sources or (COMPILED.is_file() and COMPILED.stat().st_mtime >= max(sources))


def compile_loops() -> None:
    """Without them the engine compiles them itself, when it starts; so a failure is told and no more."""
    try:
        run_logged([str(PYTHON), "-m", "minivllm.cpu.precompile"])
        COMPILED.touch()
    except (SetupError, OSError) as error:
        print(f"      left to the engine, which will take 20 s longer when it first starts: {error}", flush=True)


def fetch_model() -> int:
    """Fetches and converts the model, by a command that explains its own failures."""
    command = [str(PYTHON), "-m", "minivllm.cli", "model", "fetch", f"--pip-args={pip_args()}"]
    return subprocess.call(command, cwd=ROOT)


# Stamps. --------------------------------------------------------------------------------------------------


def read_stamps() -> dict[str, str]:
    try:
        return dict(json.loads(STAMPS.read_text()))
    except (OSError, ValueError):
        return {}


def write_stamps(**stamps: str) -> None:
    partial = STAMPS.with_suffix(".partial")
    partial.write_text(json.dumps({**read_stamps(), **stamps}, indent=1))
    partial.replace(STAMPS)


def is_stamped(step: str) -> bool:
    return read_stamps().get(step) == fingerprint()


def fingerprint() -> str:
    """Changes with all that decides what pip installs: the environment, the pins, the package, PIP_ARGS."""
    digest = hashlib.sha256(repr((read_stamps().get("venv"), pip_args())).encode())
    for name in ("constraints.txt", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def pip_args() -> str:
    """PIP_ARGS, or those that worked last: after `make lab PIP_ARGS=...`, `make test` has nothing to do."""
    return os.environ.get("PIP_ARGS") or read_stamps().get("pip_args", "")


# Commands whose output goes to the log. -------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """The caller's environment, less what would lead a Python in .venv, or its pip, out of .venv."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    return {**kept, "PYTHONUNBUFFERED": "1", "PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}


def run_logged(command: list[str]) -> None:
    """Runs a command with its output in the log and a sign of life on the screen.

    Raises:
        SetupError: it failed; the text says why, as far as its output tells.
    """
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    started = time.monotonic()
    with open(LOG, "ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through `stop` only, once
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=1 if live else 30)
                except subprocess.TimeoutExpired:
                    seconds = int(time.monotonic() - started)
                    show_progress(f"      {seconds // 60}:{seconds % 60:02d} {read_log(start)[-1].strip()}", live)
        finally:
            stop(process)
            if live:
                print("\r\033[K", end="", flush=True)
    if process.returncode:
        raise SetupError(explain(process.returncode, read_log(start)))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a command that still runs, as Ctrl-C does: pip then clears its gigabytes of temporary files away."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def show_progress(line: str, live: bool) -> None:
    line = line[: shutil.get_terminal_size().columns - 1]
    print(f"\r\033[K{line}" if live else line, end="" if live else "\n", flush=True)


def read_log(start: int) -> list[str]:
    """The lines of the log from a place on, without empty ones; at least one."""
    with open(LOG, "rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()] or [""]


# One sentence for each failure. ---------------------------------------------------------------------------

NO_VENV_MODULE = (
    f"Python {THIS_PYTHON} ({sys.executable}) lacks its venv module: install it (Debian, Ubuntu: apt install "
    f"python3-venv, or python{THIS_PYTHON}-venv for a Python that is not the system's); then {AGAIN}."
)
# What pip and venv print, and what it means; {match} is the text found. The first row that matches counts, so
# a cause stands above what pip concludes from it.
FAILURES = (
    (r"No space left on device|Errno 28|Disk quota exceeded", "{disk_full}"),
    (r"ensurepip is not available", NO_VENV_MODULE),
    (
        r"DO NOT MATCH THE HASHES|BadZipFile|is not a zip file|Wheel .* is invalid|zlib\.error|Bad CRC-32",
        "A downloaded file is damaged (pip: {match}): empty pip's store of downloads with "
        f"`.venv/bin/python -m pip cache purge`; then {AGAIN}.",
    ),
    (
        r"Permission denied[^\n]*|Read-only file system[^\n]*",
        f"A file can't be written ({{match}}): give yourself the right to write there; then {AGAIN}.",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|problem confirming the ssl certificate",
        "The package index can't be trusted (pip: {match}): name your network's own certificate with "
        f"`.venv/bin/python -m pip config set global.cert FILE`; then {AGAIN}.",
    ),
    (
        r"ProxyError|Cannot connect to proxy|Tunnel connection failed[^\n']*",
        "The network proxy refuses or is not there (pip: {match}): mend HTTPS_PROXY or pip's proxy setting; "
        f"then {AGAIN}.",
    ),
    (
        r"NewConnectionError|NameResolutionError|Name or service not known|name resolution|No route to host"
        r"|Network is unreachable|Connection (refused|reset|broken|aborted|interrupted)|[Tt]imed out"
        r"|IncompleteRead|incomplete-download|Max retries exceeded",
        "The package index can't be reached: check the network (and PIP_ARGS and pip's index setting, where "
        f"you use them); then {AGAIN}.",
    ),
    (
        r"HTTP error \d+|\b[45]\d\d (Client|Server) Error[^\n]*",
        "The package index answers with an error (pip: {match}): check PIP_ARGS and pip's index setting, or "
        f"wait a while; then {AGAIN}.",
    ),
    (
        r"No matching distribution found for [^\n]+|Cannot install [^\n]+?(?= because)|ResolutionImpossible",
        f"pip finds no version that fits ({{match}}; Python {THIS_PYTHON}, {platform.system()} "
        f"{platform.machine()}): check PIP_ARGS and `.venv/bin/python -m pip config list` for another index "
        f"or constraint, or take another Python (make setup PYTHON=...); then {AGAIN}.",
    ),
)


def explain(code: int, lines: list[str]) -> str:
    """What a failed command's output means, or its last lines where nothing is recognised."""
    if code == -signal.SIGKILL:
        return f"The step was killed, most likely for lack of memory: close other programs; then {AGAIN}."
    # pip's errors are read before its warnings, most of which it got over. Only that no version fits, the
    # last row, is also what it says when it reached no index: then the last retry, a warning, is the cause.
    text = "\n".join(line for line in lines if not re.search(r"Retry\(total=[1-9]", line))
    errors = re.search(r"^error[\s\S]*", text, re.IGNORECASE | re.MULTILINE)
    sentence = first_match(errors.group() if errors else "", FAILURES[:-1]) or first_match(text, FAILURES)
    if sentence:
        return sentence
    tail = "\n".join(f"  | {line}" for line in lines[-5:])
    return f"{tail}\nThis step failed with the lines above (the others are in {LOG}): mend that; then {AGAIN}."


def first_match(text: str, rows: tuple[tuple[str, str], ...]) -> str:
    for pattern, sentence in rows:
        match = re.search(pattern, text)
        if match:
            return sentence.replace("{match}", match.group().strip()).replace("{disk_full}", disk_full())
    return ""


def explain_os_error(error: OSError) -> str:
    known = first_match(str(error), FAILURES)
    return known or f"{error.filename or ROOT} can't be used ({error.strerror or error}): mend that; then {AGAIN}."


def disk_full() -> str:
    temporary = tempfile.gettempdir()
    return (
        f"The disk is full ({ROOT} has {free_gb(ROOT):.1f} GB free, {temporary}, for temporary files, has "
        f"{free_gb(temporary):.1f} GB): free some, or name a roomier folder with TMPDIR=...; then {AGAIN}."
    )


def free_gb(folder: str | Path) -> float:
    return shutil.disk_usage(folder).free / 1e9


def check_space(needed_gb: float, torch_to_come: bool) -> None:
    """Refuses what can't fit. PyTorch's CUDA build gets a note only: which build it takes, pip decides."""
    free = free_gb(ROOT)
    if free < needed_gb:
        raise SetupError(
            f"{ROOT} has {free:.1f} GB of free space, and what is still to do needs {needed_gb:.1f} GB: "
            f"free some; then {AGAIN}."
        )
    if torch_to_come and sys.platform == "linux" and free < CUDA_BUILD_GB:
        print(f"Note: {free:.1f} GB are free; PyTorch's CUDA build needs {CUDA_BUILD_GB:.0f} GB.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
