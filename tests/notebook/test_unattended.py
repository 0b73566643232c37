"""A notebook that is executed by itself: lines for the log while it trains, and the summary that is kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter, PythonExporter

from tests.notebook.test_kernel import ROOT, SETUP

if TYPE_CHECKING:
    from collections.abc import Iterator

CELL = "%%megatrain train\ns.train(30, seconds=0.05)"
# What `mt.Trainer.train` does in a plain cell.
PLAIN = """\
from megatrain_nb.notebook.trainer import shown
with shown(s, None, quiet=False):
    s.train(30, seconds=0.05)"""
AFTER = "import time; time.sleep(0.5)"
LINE = re.compile(r"Step \d+ of 30: loss \d.*per step.* elapsed, about .* left, RAM ")


@pytest.fixture(scope="module", params=[CELL, PLAIN], ids=["magic", "plain"])
def executed(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The notebook as nbclient leaves it; nbconvert and papermill use nbclient as well."""
    patch = pytest.MonkeyPatch()
    # A terminal of JupyterLab's passes this on, and still nobody looks on.
    patch.setenv("JPY_SESSION_NAME", "of-another-notebook.ipynb")
    sources = [SETUP, request.param, AFTER]
    v4: Any = nbformat.v4
    cells = [v4.new_code_cell(source) for source in sources]
    notebook = v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=60, resources=resources).execute()
    yield notebook
    patch.undo()


def test_lines_while_it_trains_and_a_summary_that_is_kept(executed: Any) -> None:
    _, cell, after = executed.cells
    lines = [out.text for out in cell.outputs if out.output_type == "stream"]
    assert LINE.match("".join(lines))
    assert len("".join(lines).splitlines()) == 1  # the next one is due after 10 s
    summaries = [
        out.data
        for out in cell.outputs
        if "Step 30 of 30" in out.get("data", {}).get("text/html", "")
    ]
    assert len(summaries) == 1
    assert summaries[0]["text/plain"].startswith("Step 30 of 30 (done): loss ")
    kinds = {kind for out in cell.outputs for kind in out.get("data", {})}
    assert not any("widget" in kind for kind in kinds)
    assert "widgets" not in executed.metadata
    assert after.outputs == []


def test_the_executed_notebook_as_html_and_as_a_script(executed: Any) -> None:
    exporters: list[Any] = [HTMLExporter, PythonExporter]
    html, script = (each().from_notebook_node(executed)[0] for each in exporters)
    assert html.count("Step 30 of 30</span>") == 1
    compile(script, "script", "exec")
    assert "s.train(30, seconds=0.05)" in script
