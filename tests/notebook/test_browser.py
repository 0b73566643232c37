"""The view in JupyterLab in a real browser: it appears at once, moves, and stays when saved."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parents[2]
SETUP = """\
%load_ext megatrain_nb
from tests.notebook.fakes import install
install()
import megatrain_nb as mt
s = %megatrain init --offload-dir /nvme/run"""

KERNEL_IS_IDLE = (
    "() => window.jupyterapp.shell.currentWidget?.context?.sessionContext"
    "?.session?.kernel?.status === 'idle'"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """JupyterLab on this machine, in an empty home; returns its address."""
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    options = [f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token="]
    options += [
        f"--ServerApp.root_dir={tmp_path}",
        "--LabApp.expose_app_in_browser=True",
    ]
    paths = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path / "home")}
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [*command, *options], env=os.environ | paths, stdout=log, stderr=log
        )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(30)


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


def open_notebook(browser: Any, lab: str, name: str) -> Any:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{lab}/lab/tree/{name}?reset", timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
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


def test_view_in_jupyterlab(lab: str, browser: Any, tmp_path: Path) -> None:
    write_notebook(
        tmp_path / "view.ipynb", SETUP, "%%megatrain\ns.train(40, seconds=0.1);"
    )

    page = open_notebook(browser, lab, "view.ipynb")
    command(page, "notebook:run-all-cells")
    position = page.locator(".jp-OutputArea-output >> text=/^Step \\d+ of 40$/")
    position.wait_for(timeout=10_000)
    page.locator("text=training").wait_for(timeout=2_000)
    early = position.inner_text()
    page.wait_for_timeout(1_000)
    assert position.inner_text() != early
    assert position.count() == 1
    page.locator("text=/^done$/").wait_for(timeout=10_000)
    assert position.inner_text() == "Step 40 of 40"

    command(page, "docmanager:save")
    page.wait_for_timeout(2_000)
    page.close()
    saved = (tmp_path / "view.ipynb").read_text()
    changed = saved.replace("train(40,", "train(41,")  # so JupyterLab does not trust it
    (tmp_path / "copy.ipynb").write_text(changed)
    page = open_notebook(browser, lab, "copy.ipynb")
    curve = page.locator(".jp-OutputArea-output img[alt^='Loss from']")
    curve.wait_for(timeout=10_000)
    size = curve.bounding_box()
    assert size["width"] > 300
    assert size["height"] == 64
    bar = page.locator(".jp-OutputArea-output >> text=/^Step 40 of 40$/")
    assert bar.count() == 1


def test_buttons_answer_while_the_cell_runs(
    lab: str, browser: Any, tmp_path: Path
) -> None:
    write_notebook(
        tmp_path / "buttons.ipynb", SETUP, "%%megatrain\ns.train(seconds=0.1);"
    )
    page = open_notebook(browser, lab, "buttons.ipynb")
    command(page, "notebook:run-all-cells")
    output = page.locator(".jp-OutputArea-output")
    position = output.locator("text=/^Step \\d+$/")
    position.wait_for(timeout=20_000)

    page.get_by_role("button", name="Pause").click()
    output.locator("text=paused; nothing computes").wait_for(timeout=5_000)
    paused_at = position.inner_text()
    page.wait_for_timeout(1_000)
    assert position.inner_text() == paused_at

    page.get_by_role("button", name="Save model now").click()
    output.locator("text=/saved step \\d+ to megatrain-saved/").wait_for(timeout=5_000)
    assert position.inner_text() == paused_at
    page.get_by_role("button", name="Resume").click()
    page.wait_for_function(
        "before => ![...document.querySelectorAll('.jp-OutputArea-output span')]"
        ".some(span => span.innerText === before)",
        arg=paused_at,
        timeout=5_000,
    )
    before = int(position.inner_text().split()[1])
    page.get_by_role("button", name="Stop").click()
    output.locator("text=stopped, as asked").wait_for(timeout=5_000)
    assert int(position.inner_text().split()[1]) <= before + 20  # 2 s, at ten a second
    assert page.get_by_role("button", name="Save model now").count() == 0

    command(page, "docmanager:save")
    page.wait_for_timeout(2_000)
    page.close()
    saved = (tmp_path / "buttons.ipynb").read_text()
    assert "widgets" not in json.loads(saved)["metadata"]
    (tmp_path / "copy.ipynb").write_text(saved.replace("seconds=0.1", "seconds=0.2"))
    page = open_notebook(browser, lab, "copy.ipynb")
    page.locator("text=stopped, as asked").wait_for(timeout=10_000)
    assert page.locator("text=Error displaying widget").count() == 0
