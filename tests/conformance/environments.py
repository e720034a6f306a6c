"""Where the tools live: each in an environment of its own, so that none of their needs meets ours."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".conformance"
GUIDELLM, AIPERF, SCHEMATHESIS = "guidellm==0.8.1", "aiperf==0.13.0", "schemathesis==4.32.5"


@dataclass(frozen=True)
class Tools:
    """What to call the tools by, as the shell takes it.

    Attributes:
        bin: folder of guidellm and aiperf.
        schemathesis: the command.
        vllm: the command, or None where there is none.
    """

    bin: Path
    schemathesis: str
    vllm: str | None


def make_tools(installed: Path | None, pip_args: str = "") -> Tools:
    """Installs what is not there yet; a few minutes the first time.

    Args:
        installed: folder of `make bench`'s other engines, which has vLLM; None looks for it on the PATH.
        pip_args: for pip.
    """
    [torch] = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    generators = _environment("generators", [[torch], [GUIDELLM, AIPERF]], pip_args)
    schemathesis = _environment("schemathesis", [[SCHEMATHESIS]], pip_args)
    vllm = shutil.which("vllm")
    if installed is not None and (installed / "vllm_env.sh").exists():
        vllm = f". {shlex.quote(str(installed / 'vllm_env.sh'))}; {shlex.quote(str(installed / 'vllm/bin/vllm'))}"
    return Tools(generators / "bin", str(schemathesis / "bin" / "st"), vllm)


def _environment(name: str, packages: list[list[str]], pip_args: str) -> Path:
    """An environment that has these packages, installed group by group."""
    folder = FOLDER / name
    done, wanted = folder / "installed.txt", repr(packages)
    if not done.exists() or done.read_text() != wanted:
        names = " ".join(package for group in packages for package in group)
        print(f"installing {names} into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for group in packages:
            command = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*command, *shlex.split(pip_args), *group], check=True)
        done.write_text(wanted)
    return folder
