"""The runs that were started in the background."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain_nb.notebook.cell import Run

_MAX_ENDED = 5


class Runs:
    """Runs by number, oldest first; of those that have ended the last five."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._last = 0

    def append(self, run: Run) -> None:
        """Add a run."""
        ended = [number for number, each in self._runs.items() if not each.running]
        for number in ended[: max(0, len(ended) - _MAX_ENDED + 1)]:
            del self._runs[number]
        self._last += 1
        self._runs[self._last] = run

    def __getitem__(self, number: int) -> Run:
        return self._runs[number]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __repr__(self) -> str:
        lines = [f"{number}: {run.status()}" for number, run in self._runs.items()]
        return "\n".join(lines) or "no runs in the background"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"
