"""A recording as the picture that its run left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain_nb.notebook import chart, render
from megatrain_nb.notebook.snapshot import RECORDED, Snapshot, fill
from megatrain_nb.runtime.recording import Replayed, load

if TYPE_CHECKING:
    from pathlib import Path


class Replay:
    """What a recording holds; displays as the summary and the chart of the run.

    Attributes
    ----------
    snapshot
        Its numbers.
    """

    def __init__(self, found: Replayed) -> None:
        self.snapshot = _snapshot(found)

    def figure(self) -> Any:
        """Return the chart as a ``plotly.graph_objects.Figure``."""
        import plotly.graph_objects as go  # noqa: PLC0415 - takes a second

        return go.Figure(chart.figure_fields(self.snapshot))

    def __repr__(self) -> str:
        return render.text_line(self.snapshot)

    def _ipython_display_(self) -> None:
        from IPython.display import display  # noqa: PLC0415 - only where there is one

        page = render.page(self.snapshot)
        display({"text/html": page, "text/plain": repr(self)}, raw=True)
        drawn = chart.bundle(self.snapshot)
        if drawn:
            display(drawn, raw=True)


def replay(path: str | Path) -> Replay:
    """Return a run from the file that `record` wrote; in a notebook it displays as the run's summary.

    Raises
    ------
    ArgumentError
        There is no such file, or it is not a recording.
    """
    return Replay(load(path))


def _snapshot(found: Replayed) -> Snapshot:
    snap = fill(Snapshot(state=RECORDED, tiers=found.tiers), found.recorder)
    snap.elapsed_s = snap.rows[-1].end_s if snap.rows else 0.0
    snap.now = None  # nothing is anywhere now
    if not found.ended:
        snap.said = "the recording was cut off, or training went on when it was read"
    return snap
