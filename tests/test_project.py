from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())[
    "project"
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXT = {".cfg", ".ipynb", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}


def project_files() -> list[Path]:
    """Return the text files that belong to the project, not what a run left behind."""
    top = [path for path in ROOT.iterdir() if path.suffix in TEXT]
    named = [ROOT / "Makefile", ROOT / ".ci" / "run"]
    folders = ("megatrain_nb", "tests", "notebooks", "docs")
    inside = [
        path
        for name in folders
        for path in (ROOT / name).rglob("*")
        if path.suffix in TEXT and ".ipynb_checkpoints" not in path.parts
    ]
    return sorted(path for path in [*top, *named, *inside] if path.is_file())


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["test"], *extras["dev"]]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, Version]:
    found: dict[str, Version] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            found[canonicalize_name(name)] = Version(version)
    return found


def fastest(script: str, *, runs: int, env: dict[str, str] | None = None) -> Any:
    """Run a script that prints ``{"s": ..., ...}`` some times; the quickest answer."""
    answers = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    return min(answers, key=lambda answer: float(answer["s"]))


# ------------------------------------------------------------------ start-up

IMPORT = """
import json, sys, time
start = time.perf_counter()
import megatrain_nb
seconds = time.perf_counter() - start
print(json.dumps({"s": seconds, "modules": sorted(sys.modules)}))
"""

LOAD_EXT = """
import json, time
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
start = time.perf_counter()
shell.run_line_magic("load_ext", "megatrain_nb")
seconds = time.perf_counter() - start
magics = shell.magics_manager.magics
print(json.dumps({
    "s": seconds,
    "line": "megatrain" in magics["line"],
    "cell": "megatrain" in magics["cell"],
}))
"""


def test_import_is_quick_and_light() -> None:
    answer = fastest(IMPORT, runs=7)
    heavy = {"torch", "numba", "IPython", "transformers", "numpy"}
    assert not heavy & set(answer["modules"])
    assert answer["s"] < 0.1


def test_extension_loads_quickly(tmp_path: Path) -> None:
    answer = fastest(LOAD_EXT, runs=3, env={"IPYTHONDIR": str(tmp_path)})
    assert answer["line"]
    assert answer["cell"]
    assert answer["s"] < 2.0


def test_every_public_name_resolves() -> None:
    import megatrain_nb as mt  # noqa: PLC0415 - collected before the package is whole

    missing = [name for name in mt.__all__ if not hasattr(mt, name)]
    assert not missing
    assert set(mt.__all__) <= set(dir(mt))


# ------------------------------------------------- what is installed, and how


def test_constraints_pin_every_requirement_within_its_bounds() -> None:
    pinned = pins()
    for requirement in requirements():
        if canonicalize_name(requirement.name) == "megatrain-nb":
            continue  # "dev" takes "test" in
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_torch_pin_names_a_release_and_no_build() -> None:
    assert pins()["torch"] == Version("2.13.0")
    assert pins()["torch"].local is None


def test_requirements_have_no_upper_bounds() -> None:
    operators = {spec.operator for item in requirements() for spec in item.specifier}
    assert operators <= {">="}


def test_environment_yml_agrees_with_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    assert pip == {"pip": ["--constraint constraints.txt", "--editable .[dev]"]}


def test_makefile_checks_the_python_that_pyproject_asks_for() -> None:
    major, minor = PROJECT["requires-python"].removeprefix(">=").split(".")
    makefile = (ROOT / "Makefile").read_text()
    assert f"sys.version_info < ({major}, {minor})" in makefile
    assert f"needs Python {major}.{minor} or later" in makefile


def test_pre_commit_fetches_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    languages = {hook["language"] for repo in config["repos"] for hook in repo["hooks"]}
    assert languages <= {"system", "pygrep"}


def test_license_is_apache_2() -> None:
    text = " ".join((ROOT / "LICENSE").read_text().split())
    assert text.startswith("Apache License Version 2.0, January 2004")
    assert "9. Accepting Warranty or Additional Liability." in text
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]


def test_type_information_ships() -> None:
    assert (ROOT / "megatrain_nb" / "py.typed").is_file()


# -------------------------------------------------------- what the files hold


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_holds_no_widget_state(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert "widgets" not in notebook["metadata"]
    assert path.stat().st_size < 1_000_000


def matches(pattern: str) -> list[str]:
    found = []
    for path in project_files():
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match.group()}")
    return found


def test_nothing_comes_from_a_cdn() -> None:
    # (?:) keeps this file from matching itself.
    assert not matches(r"https?:(?:)//cdn|unp(?:)kg|jsdel(?:)ivr")


def test_no_path_of_somebodys_machine() -> None:
    assert not matches(r"(?<![\w.~/-])/(?:home|root|work|Users)/\w+")


def test_python_sources_are_ascii() -> None:
    sources = [path for path in project_files() if path.suffix == ".py"]
    assert not [path for path in sources if not path.read_bytes().isascii()]
