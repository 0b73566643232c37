"""Execute a notebook from the command line, say where it is, print its result.

The result is the text of the cells tagged ``result``. The executed copy goes to
``build/``; the notebook itself is not touched.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

BUILD = Path(__file__).resolve().parent.parent / "build"
TICK_S = 15.0


class Progress:
    """One line per code cell; while a cell runs long, one line every 15 s."""

    def __init__(self, cells: list[Any]) -> None:
        self.code = [i for i, cell in enumerate(cells) if cell.cell_type == "code"]
        self.started_s = time.monotonic()
        self.label = ""

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def say(self, note: str) -> None:
        print(f"{self.elapsed_s():6.0f} s  {self.label}{note}", flush=True)

    def on_cell_start(self, cell: Any, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
        title = lines[0] if lines else "(empty)"
        number = self.code.index(cell_index) + 1
        self.label = f"cell {number:2d} of {len(self.code)}: {title[:56]}"
        self.say("")

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.say(" ... running")


def result_text(notebook: Any) -> str:
    """Return the text that the cells tagged ``result`` put out."""
    parts: list[str] = []
    for cell in notebook.cells:
        if "result" not in cell.metadata.get("tags", []):
            continue
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stdout":
                parts.append(output.text)
            elif "data" in output:
                parts.append(output.data.get("text/plain", ""))
    return "\n".join(part.rstrip() for part in parts)


async def execute(source: Path, target: Path) -> Any:
    """Run every cell in a kernel of this Python; write the copy even if one fails."""
    notebook = nbformat.read(source, as_version=4)
    progress = Progress(notebook.cells)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=None,
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(source.parent)}},
        on_cell_start=progress.on_cell_start,
    )
    ticker = asyncio.create_task(progress.tick())
    try:
        await client.async_execute()
    finally:
        ticker.cancel()
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)
    progress.label = f"done: {len(progress.code)} cells"
    progress.say("")
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    source: Path = parser.parse_args().notebook.resolve()
    if not source.is_file():
        parser.error(f"there is no notebook {source}")
    target = BUILD / source.name
    print(f"Executing {source.name}; some minutes on two cores.", flush=True)
    try:
        notebook = asyncio.run(execute(source, target))
    except CellExecutionError as error:
        print(f"\n{error}\nA cell failed. The notebook so far: {target}")
        return 1
    print(f"\n{result_text(notebook)}\n\nThe executed notebook: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
