"""pyproject.toml (what is needed), constraints.txt (which exactly) and environment.yml (for conda) agree."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]
PINNED = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in PINS}
NEEDED = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
]


def test_each_dependency_is_pinned_to_a_version_that_it_allows():
    for requirement in NEEDED:
        assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)]), requirement


def test_dependencies_have_lower_bounds_only():
    for requirement in NEEDED:
        assert re.fullmatch(r">=[\d.]+", str(requirement.specifier)), requirement


def test_constraints_are_exact_sorted_and_free_of_builds():
    names = [canonicalize_name(pin.name) for pin in PINS]
    assert names == sorted(set(names))
    for pin in PINS:
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{pin}: an exact public version, no +cpu or +cu130"
        assert pin.url is None and not belongs_to_torch(pin.name), pin


def test_everything_that_gets_installed_is_pinned():
    """Follows the requirements of the installed packages on this Python and platform."""
    seen: set[str] = set()
    queue = [(requirement, "") for requirement in [*NEEDED, Requirement("setuptools")]]
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if belongs_to_torch(name) or name in seen:
            continue
        seen.add(name)
        inner = importlib.metadata.requires(name) or []
        queue += [(Requirement(text), extra) for text in inner for extra in {"", *requirement.extras}]
    assert seen - set(PINNED) == set()


def test_only_platform_packages_have_markers():
    marked = {canonicalize_name(pin.name): str(pin.marker) for pin in PINS if pin.marker}
    assert marked == {
        "appnope": 'platform_system == "Darwin"',
        "overrides": 'python_version < "3.12"',
        "triton": 'platform_system == "Linux"',
    }


def test_conda_takes_the_same_python_and_leaves_the_rest_to_pip():
    *conda, pip = ENVIRONMENT["dependencies"]
    python = next(Requirement(text) for text in conda if text.startswith("python"))
    assert python.specifier == SpecifierSet(PROJECT["requires-python"])
    assert [Requirement(text).name for text in conda] == ["python", "pip"]
    extras = ",".join(PROJECT["optional-dependencies"])
    assert pip == {"pip": ["--constraint constraints.txt", f"--editable .[{extras}]"]}


def test_setup_installs_the_same_extras():
    extras = ",".join(PROJECT["optional-dependencies"])
    assert f'"--editable", ".[{extras}]"' in (ROOT / "minivllm" / "devtools" / "bootstrap.py").read_text()


def test_no_index_and_no_path_is_named():
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|index-url\s*=|file:|\s@\s", text), name


def belongs_to_torch(name: str) -> bool:
    """The CUDA libraries that only one build of torch asks for, each in the one version it was built with."""
    return canonicalize_name(name).startswith(("nvidia-", "cuda-"))
