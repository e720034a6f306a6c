"""Set-up, driven as `make setup` drives it: a real process in its own folder, with a Python that is faked.

The fake stands for the system's Python and for the one in .venv. It notes each call and leaves behind what
the real programs would, or fails with the very text that they fail with (taken from pip 23.2 and 26.3). So
every failure is played for real, without a network and in a moment.
"""

import ast
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minivllm.devtools import bootstrap, refresh
from minivllm.model import default_model

ROOT = Path(__file__).parents[1]
SCRIPT = Path("minivllm") / "devtools" / "bootstrap.py"
STEPS = ["venv", "torch", "package", "kernel", "model"]
AGAIN = "run the same make command again, and it goes on from this step."
VERSION = "{}.{}".format(*sys.version_info)
OTHER_VERSION = "3.12" if VERSION != "3.12" else "3.13"

FAKE = r"""
import json, os, shutil, sys, time
me, args = sys.argv[1], sys.argv[2:]
marks = dict(venv="venv", torch="torch", package="--editable", kernel="ipykernel", model="minivllm.cli")
marks["loops"] = "minivllm.cpu.precompile"
step = next((name for name, mark in marks.items() if mark in args), "")
if step:
    with open("calls", "a") as calls:
        calls.write(json.dumps([step, *args]) + "\n")
with open("plan.json") as file:
    plan = json.load(file)
if step in plan:
    print(plan[step]["output"], flush=True)
    open("started", "w").close()
    try:
        time.sleep(plan[step]["sleep"])
    except KeyboardInterrupt:
        time.sleep(0.2)
        open("tidied", "w").close()
    sys.exit(plan[step]["code"])
if step == "venv":
    os.makedirs(args[-1] + "/bin")
    shutil.copy(me, args[-1] + "/bin/python")
elif step == "kernel":
    folder = ".venv/share/jupyter/kernels/python3"
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/kernel.json", "w") as file:
        name, _, variable, value = args[args.index("--display-name") + 1 :]
        json.dump(dict(argv=[me], display_name=name, env={variable: value}), file)
elif step == "model":
    os.makedirs("data/models/smollm2-135m")
    open("data/models/smollm2-135m/minivllm.json", "w").close()
elif args[:1] == ["-c"]:
    print("VERSION.5")
"""

# What pip prints at its last retry, and what it concludes: with a constraint, and without one.
RETRYING = "WARNING: Retrying (Retry(total=0, connect=None, read=None)) after connection broken by "
NO_VERSION = (
    ": /simple/torch/\n"
    "ERROR: Cannot install torch because these package versions have conflicting dependencies.\n\n"
    "The conflict is caused by:\n    The user requested torch\n"
    "    The user requested (constraint) torch==2.13.0\n\n"
    "ERROR: ResolutionImpossible: for help visit the documentation"
)
NO_MATCH = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
    "ERROR: No matching distribution found for torch==2.13.0"
)
REFUSED = (
    RETRYING + "'NewConnectionError('<pip._vendor.urllib3.connection.HTTPConnection object at 0x7f326f4356d0>: "
    "Failed to establish a new connection: [Errno 111] Connection refused')'" + NO_VERSION
)
PROXY = RETRYING + "'ProxyError('Cannot connect to proxy.', NewConnectionError('refused'))'" + NO_VERSION
CERTIFICATE = (
    RETRYING + "'SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify "
    "failed: self-signed certificate'))'" + NO_VERSION
)
CUT_OFF = (
    "  WARNING: Connection interrupted while downloading.\nerror: incomplete-download\n\n"
    "× Download failed after 6 attempts because not enough bytes were received (7 bytes/1000 kB)\n"
    "note: This is an issue with network connectivity, not pip."
)
WRONG_HASH = (
    "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the "
    "package versions, please update the hashes.\n    Expected sha256 0000\n         Got        795b"
)
GOT_OVER = RETRYING + "'ReadTimeoutError('Read timed out.')'\nERROR: HTTP error 403 while getting torch.whl"
NOT_THE_LAST_RETRY = REFUSED.replace("total=0", "total=4")

NO_INDEX = (
    "The package index can't be reached: check the network (and PIP_ARGS and pip's index setting, "
    f"where you use them); then {AGAIN}"
)
NOTHING_FITS = (
    "pip finds no version that fits ({}; "
    f"Python {VERSION}, {platform.system()} {platform.machine()}): check PIP_ARGS and `.venv/bin/python -m "
    "pip config list` for another index or constraint, or take another Python (make setup PYTHON=...); "
    f"then {AGAIN}"
)
SENTENCES = {
    REFUSED: NO_INDEX,
    CUT_OFF: NO_INDEX,
    NOT_THE_LAST_RETRY: NOTHING_FITS.format("Cannot install torch"),
    NO_MATCH: NOTHING_FITS.format("No matching distribution found for torch==2.13.0"),
    PROXY: "The network proxy refuses or is not there (pip: ProxyError): mend HTTPS_PROXY or pip's proxy "
    f"setting; then {AGAIN}",
    CERTIFICATE: "The package index can't be trusted (pip: SSLError): name your network's own certificate "
    f"with `.venv/bin/python -m pip config set global.cert FILE`; then {AGAIN}",
    WRONG_HASH: "A downloaded file is damaged (pip: DO NOT MATCH THE HASHES): empty pip's store of downloads "
    f"with `.venv/bin/python -m pip cache purge`; then {AGAIN}",
    GOT_OVER: "The package index answers with an error (pip: HTTP error 403): check PIP_ARGS and pip's index "
    f"setting, or wait a while; then {AGAIN}",
    "PermissionError: [Errno 13] Permission denied: '/x/pip'": "A file can't be written (Permission denied: "
    f"'/x/pip'): give yourself the right to write there; then {AGAIN}",
}


class Checkout:
    """A folder with what set-up reads, and a fake Python in it."""

    def __init__(self, root: Path):
        self.root = root
        self.fake = root / "fake-python"
        (root / SCRIPT).parent.mkdir(parents=True)
        for name in (SCRIPT, "pyproject.toml", "constraints.txt", "Makefile"):
            shutil.copy(ROOT / name, root / name)
        (root / "fake.py").write_text(FAKE.replace("VERSION", VERSION))
        self.executable("fake-python", f'exec "{sys.executable}" -IS "{root}/fake.py" "$0" "$@"')
        self.plan()

    def executable(self, name: str, script: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.root / name).chmod(0o755)

    def plan(self, step: str = "", output: str = "", code: int = 1, sleep: float = 0) -> None:
        """Lets one step fail, or none."""
        plan = {step: {"output": output, "code": code, "sleep": sleep}} if step else {}
        (self.root / "plan.json").write_text(json.dumps(plan))

    def start(self, change: str = "pass", options: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
        """Starts set-up, with the fake as `sys.executable`, after a line that changes what set-up finds."""
        program = (
            f"import runpy, sys; sys.executable = {str(self.fake)!r}; sys.argv[1:] = {list(options)!r}\n"
            f"{change}\nrunpy.run_path({str(self.root / SCRIPT)!r}, run_name='__main__')"
        )
        return popen([sys.executable, "-c", program], self.root, env)

    def setup(self, change: str = "pass", options: tuple[str, ...] = (), **env: str) -> tuple[int, str, str]:
        """Runs set-up; returns (exit code, standard output, standard error)."""
        return finish(self.start(change, options, **env))

    def calls(self) -> list[list[str]]:
        """The calls since the last question: [step, arguments...]."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    def steps(self) -> list[str]:
        return [call[0] for call in self.calls()]


def popen(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    # A `make test PYTHON=...` around this test must not reach into it.
    ours = ("PYTHON", "PIP_ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**kept, **env}, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=20)
    assert "Traceback" not in out + err
    return process.returncode, out, err


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def done(checkout: Checkout) -> Checkout:
    """A checkout in which set-up is done."""
    assert checkout.setup()[0] == 0
    assert checkout.steps() == STEPS
    return checkout


def test_a_first_run_takes_every_step_and_says_so(checkout: Checkout):
    code, out, err = checkout.setup()
    assert (code, err) == (0, "")
    assert out.splitlines()[-4:] == [
        "[1/5] Python environment in .venv",
        "[2/5] PyTorch",
        "[3/5] the package and its dependencies",
        "[4/5] Jupyter kernel",
    ]
    assert checkout.steps() == STEPS


def test_the_loops_are_compiled_once_and_again_when_their_sources_change(done: Checkout):
    source = done.root / "minivllm" / "cpu" / "products.py"
    (source.parent / "__pycache__").mkdir(parents=True)
    source.touch()
    assert "[5/5] loops for this processor" in done.setup()[1] and done.steps() == ["loops"]
    assert "[5/5]" not in done.setup()[1]
    later = time.time() + 5
    os.utime(source, (later, later))
    done.plan("loops", "LLVM ERROR: out of memory")
    code, out, _ = done.setup()
    assert code == 0 and "left to the engine, which will take 20 s longer when it first starts" in out


def test_a_second_run_does_nothing(done: Checkout):
    assert done.setup() == (0, "", "")
    assert done.steps() == []


def test_torch_comes_first_and_alone_and_all_of_it_is_pinned(checkout: Checkout):
    checkout.setup(PIP_ARGS="--extra-index-url 'an address' --pre")
    calls = {call[0]: call[1:] for call in checkout.calls()}
    pip = [
        "-m",
        "pip",
        "install",
        "--constraint",
        "constraints.txt",
        "--extra-index-url",
        "an address",
        "--pre",
    ]
    assert calls["torch"] == [*pip, "setuptools", "torch"]
    assert calls["package"] == [*pip, "--no-build-isolation", "--editable", ".[notebooks,test]"]


def test_pip_args_that_worked_are_remembered_and_others_install_again(checkout: Checkout):
    checkout.setup(PIP_ARGS="--pre")
    checkout.calls()
    assert checkout.setup() == (0, "", "")
    checkout.setup(PIP_ARGS="--no-cache-dir")
    assert checkout.steps() == ["torch", "package"]


def test_changed_pins_install_again(done: Checkout):
    with (done.root / "constraints.txt").open("a") as file:
        file.write("# a new day\n")
    assert done.setup()[0] == 0
    assert done.steps() == ["torch", "package"]


@pytest.mark.parametrize("step", STEPS)
def test_a_rerun_goes_on_from_the_step_that_failed(checkout: Checkout, step: str):
    checkout.plan(step, "ERROR: something new", code=7)
    code, out, err = checkout.setup()
    at = STEPS.index(step)
    assert checkout.steps() == STEPS[: at + 1]
    if step == "model":
        assert (code, err) == (7, "")  # it has explained itself
        assert out.endswith("ERROR: something new\n")
    else:
        log = checkout.root / ".venv" / "setup.log"
        assert code == 1
        assert err == (
            "  | ERROR: something new\n"
            f"This step failed with the lines above (the others are in {log}): mend that; then {AGAIN}\n"
        )
        assert "ERROR: something new" in log.read_text()
    checkout.plan()
    assert checkout.setup()[0] == 0
    assert checkout.steps() == STEPS[at:]


@pytest.mark.parametrize("output", SENTENCES)
def test_what_pip_fails_with_becomes_one_sentence(checkout: Checkout, output: str):
    checkout.plan("torch", f"Collecting torch==2.13.0\n{output}")
    code, _, err = checkout.setup()
    assert (code, err) == (1, SENTENCES[output] + "\n")


@pytest.mark.parametrize("step", ["venv", "torch", "package"])
def test_a_disk_that_fills_up(checkout: Checkout, step: str):
    checkout.plan(step, "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
    code, _, err = checkout.setup()
    assert code == 1
    assert re.fullmatch(
        r"The disk is full \(\S+ has \d+\.\d GB free, \S+, for temporary files, has \d+\.\d GB\): free some, "
        rf"or name a roomier folder with TMPDIR=\.\.\.; then {re.escape(AGAIN)}\n",
        err,
    )


@pytest.mark.parametrize(("free_gb", "needed_gb"), [(2, "3.6"), (3.5, "3.6")])
def test_a_disk_that_is_too_small_from_the_start(checkout: Checkout, free_gb: float, needed_gb: str):
    code, out, err = checkout.setup(with_free_disk(free_gb))
    assert (code, out) == (1, "")
    assert err == (
        f"{checkout.root} has {free_gb:.1f} GB of free space, and what is still to do needs {needed_gb} GB: "
        f"free some; then {AGAIN}\n"
    )
    assert checkout.steps() == []


def test_only_what_is_still_to_do_needs_space(checkout: Checkout):
    checkout.plan("package", "ERROR: something new")
    checkout.setup()
    checkout.plan()
    assert checkout.setup(with_free_disk(2.4))[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch has no CUDA build")
def test_a_disk_too_small_for_the_cuda_build_gets_a_note(checkout: Checkout):
    code, out, _ = checkout.setup(with_free_disk(5))
    assert code == 0
    assert out.startswith("Note: 5.0 GB are free; PyTorch's CUDA build needs 8 GB.\n[1/5]")


def with_free_disk(free_gb: float) -> str:
    return f"import shutil, types; shutil.disk_usage = lambda folder: types.SimpleNamespace(free={free_gb}e9)"


@pytest.mark.parametrize("version", ["3.6.15", "3.10.13", "3.14.0", "4.0.0"])
def test_a_wrong_python(checkout: Checkout, version: str):
    code, out, err = checkout.setup(
        f"import platform; platform.python_version = lambda: {version!r}; "
        f"platform.python_version_tuple = lambda: {version!r}.split('.')"
    )
    assert (code, out) == (1, "")
    assert err == (
        f"minivllm needs Python 3.11, 3.12 or 3.13, and {checkout.fake} is {version}: "
        "install one of the three, or name one you have (make setup PYTHON=/path/to/python3.12).\n"
    )
    assert checkout.steps() == []


def test_an_old_python_can_parse_the_file():
    ast.parse((ROOT / SCRIPT).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("hide", ["sys.modules['ensurepip'] = None", "sys.modules['venv'] = None"])
def test_no_venv_module(checkout: Checkout, hide: str):
    code, _, err = checkout.setup(hide)
    sentence = (
        f"Python {VERSION} ({checkout.fake}) lacks its venv module: install it (Debian, Ubuntu: apt install "
        f"python3-venv, or python{VERSION}-venv for a Python that is not the system's); then {AGAIN}\n"
    )
    assert (code, err) == (1, sentence)
    checkout.plan("venv", "The virtual environment was not created successfully because ensurepip is not available.")
    assert checkout.setup()[::2] == (1, sentence)
    checkout.plan()
    checkout.calls()
    assert checkout.setup()[0] == 0
    assert checkout.steps() == STEPS


def test_a_broken_venv_is_made_anew(done: Checkout):
    (done.root / ".venv" / "bin" / "python").unlink()
    code, out, _ = done.setup()
    assert code == 0
    assert "      .venv is made anew: it has no working Python\n" in out
    assert done.steps() == ["venv", "torch", "package", "kernel"]


def test_a_moved_venv_is_made_anew(done: Checkout, tmp_path_factory: pytest.TempPathFactory):
    moved = Checkout(tmp_path_factory.mktemp("moved"))
    shutil.copytree(done.root / ".venv", moved.root / ".venv")
    code, out, _ = moved.setup()
    assert code == 0
    assert "      .venv is made anew: it was moved here, not finished, or made by something else\n" in out
    assert moved.steps() == STEPS


def test_another_supported_version_is_kept_unless_python_is_named(done: Checkout):
    done.executable(".venv/bin/python", f"echo {OTHER_VERSION}.1")
    stamps = done.root / ".venv" / "setup.json"
    stamps.write_text(json.dumps({**json.loads(stamps.read_text()), "venv": f"{OTHER_VERSION} {done.root}/.venv"}))
    assert "[1/5]" not in done.setup()[1]
    done.calls()
    code, out, _ = done.setup(options=("--this-python",))
    assert code == 0
    assert f"      .venv is made anew: it has Python {OTHER_VERSION}\n" in out
    assert done.steps() == ["venv", "torch", "package", "kernel"]


def test_a_kernel_of_another_python_is_replaced(done: Checkout):
    kernel = done.root / ".venv" / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.write_text('{"argv": ["python"], "display_name": "Python 3 (ipykernel)"}')
    assert done.setup()[0] == 0
    assert done.steps() == ["kernel"]


def test_quotes_that_do_not_close(checkout: Checkout):
    code, _, err = checkout.setup(PIP_ARGS="--pre '")
    assert (code, err) == (1, "PIP_ARGS can't be split into words (No closing quotation): mend its quotes.\n")


def test_a_missing_file_of_ours(checkout: Checkout):
    (checkout.root / "constraints.txt").unlink()
    code, _, err = checkout.setup()
    path = checkout.root / "constraints.txt"
    assert (code, err) == (1, f"{path} can't be used (No such file or directory): mend that; then {AGAIN}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_by_hand(checkout: Checkout, number: signal.Signals):
    checkout.plan("torch", "Collecting torch", sleep=60)
    process = checkout.start()
    wait_for(checkout.root / "started")
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err) == (130, f"Stopped: {AGAIN}\n")
    assert (checkout.root / "tidied").exists()  # pip had the time to
    checkout.plan()
    checkout.calls()
    assert checkout.setup()[0] == 0
    assert checkout.steps() == STEPS[1:]


def test_killed_for_lack_of_memory(checkout: Checkout):
    checkout.executable("fake-python", f'[ "$4" = --constraint ] && kill -9 $$\n{checkout.fake.read_text()}')
    code, _, err = checkout.setup()
    assert code == 1
    assert err == f"The step was killed, most likely for lack of memory: close other programs; then {AGAIN}\n"


def test_two_at_once_take_turns(checkout: Checkout):
    with (checkout.root / ".setup.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = checkout.start()
        assert process.stdout
        assert process.stdout.readline() == "Another make is setting up this folder: waiting until it is done.\n"
        assert checkout.steps() == []
    assert finish(process)[0] == 0
    assert checkout.steps() == STEPS


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_set_up_and_the_package_name_the_same_things():
    model = default_model.models_folder() / default_model.ALIAS
    assert model / default_model.MANIFEST == bootstrap.MODEL
    assert refresh.METADATA["kernelspec"]["display_name"] == bootstrap.KERNEL_NAME


def make(checkout: Checkout, *arguments: str) -> tuple[int, str, str]:
    """Runs make with no Python on the PATH but those in bin/."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not on the PATH")
    env = {"PATH": str(checkout.root / "bin"), "LC_ALL": "C"}
    return finish(popen([program, *arguments], checkout.root, env))


def test_make_takes_the_first_python_that_runs_and_fits(checkout: Checkout):
    checkout.executable("bin/python3", "echo 3.10")
    checkout.executable("bin/python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    checkout.executable("bin/python3.12", '[ "$1" = -c ] && echo 3.12 || echo "runs $@"')
    checkout.executable("bin/python3.11", "echo 3.11")
    assert make(checkout, "setup") == (0, "runs minivllm/devtools/bootstrap.py\n", "")


def test_make_finds_no_python_that_fits(checkout: Checkout):
    checkout.executable("bin/python3", "echo 3.10")
    checkout.executable("bin/python3.12", "exit 127")
    checkout.executable("bin/python", "echo 2.7")
    code, out, err = make(checkout, "setup")
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == (
        "minivllm needs Python 3.11, 3.12 or 3.13 and finds none (python3 is 3.10, python is 2.7): install "
        "one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.13), or name "
        "one you have: make setup PYTHON=/path/to/python3.12"
    )


def test_make_takes_the_python_that_is_named(checkout: Checkout):
    checkout.executable("bin/my python", '[ "$1" = -c ] || echo "runs $@"')
    named = f"PYTHON={checkout.root}/bin/my python"
    assert make(checkout, "setup", named) == (0, "runs minivllm/devtools/bootstrap.py --this-python\n", "")
    code, _, err = make(checkout, "setup", "PYTHON=no such")
    assert code == 2
    assert err.splitlines()[0] == 'PYTHON="no such" is no Python 3 that runs: name a Python 3.11, 3.12 or 3.13.'
