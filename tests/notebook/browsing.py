"""JupyterLab or Notebook 7 in a real browser.

MEGATRAIN_LAB_PYTHON names the interpreter of another environment (with other releases of ipykernel and JupyterLab, and
what this package needs); MEGATRAIN_FRONTEND is ``lab`` or ``notebook``.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MEGATRAIN_LAB_PYTHON") or sys.executable
FRONTEND = os.environ.get("MEGATRAIN_FRONTEND") or "lab"
_MODULES = {"lab": "jupyterlab", "notebook": "notebook"}
_APPS = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}
_PLACES = {"lab": "lab/tree", "notebook": "notebooks"}
KERNEL_IS_IDLE = (
    "() => window.jupyterapp?.shell.currentWidget?.context?.sessionContext"
    "?.session?.kernel?.status === 'idle'"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The frontend on this machine, with its home in the folder; returns its address."""
    port = free_port()
    command = [PYTHON, "-m", _MODULES[FRONTEND], "--no-browser", "--allow-root"]
    options = [
        f"--port={port}",
        "--ip=127.0.0.1",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
        f"--{_APPS[FRONTEND]}.expose_app_in_browser=True",
    ]
    settings = {"PYTHONPATH": str(ROOT), "HOME": str(folder / "home")}
    settings |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [*command, *options], env=os.environ | settings, stdout=log, stderr=log
        )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.2)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser that nobody sees."""
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The frontend in an empty home; returns its address."""
    with serving(tmp_path) as address:
        yield address


@pytest.fixture
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="no playwright")
    with browsing() as chromium:
        yield chromium


def open_notebook(browser: Any, lab: str, name: str, *, busy: bool = False) -> Any:
    """Return the page of a notebook; its kernel is there, and idle unless it may be ``busy``."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{lab}/{_PLACES[FRONTEND]}/{name}?reset", timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    if not busy:
        page.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
    return page


def write_notebook(path: Path, *sources: str) -> None:
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for number, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel},
        "cells": cells,
    }
    path.write_text(json.dumps(notebook))


def command(page: Any, name: str) -> None:
    page.evaluate(f"() => {{ window.jupyterapp.commands.execute('{name}') }}")


def run_cell(page: Any, number: int) -> None:
    """Run one cell."""
    page.locator(".jp-Notebook .jp-CodeCell").nth(number).locator(".cm-content").click()
    command(page, "notebook:run-cell")


def lab_has(module: str) -> str:
    """Return the version of a module where the kernel runs."""
    code = f"import {module}; print({module}.__version__)"
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
