"""A recording as the picture that its run left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain_nb.notebook import chart, render
from megatrain_nb.notebook.snapshot import KEPT, RECORDED, Snapshot, fill
from megatrain_nb.runtime.recording import Replayed, kept, load

if TYPE_CHECKING:
    from pathlib import Path


class Replay:
    """What a recording holds; displays as the summary and the chart of the run.

    Attributes
    ----------
    snapshot
        Its numbers.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

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


def replay(path: str | Path | None = None) -> Replay:
    """Return a run from the file that `record` wrote; in a notebook it displays as the run's summary.

    Parameters
    ----------
    path
        The file. None takes what the open session keeps of its last training, if a view or a recording followed it: for
        a page that was loaded again while a cell ran, and did not get what the cell drew at its end.

    Raises
    ------
    ArgumentError
        There is no such file, or it is not a recording.
    SessionError
        No file is given, and no session is open, or nobody has followed it.
    """
    if path is None:
        return Replay(_snapshot(kept(), KEPT))
    snap = _snapshot(load(path), RECORDED)
    snap.now = None  # nothing is anywhere now
    return Replay(snap)


def _snapshot(found: Replayed, state: str) -> Snapshot:
    snap = fill(Snapshot(state=state, tiers=found.tiers), found.recorder)
    snap.elapsed_s = snap.rows[-1].end_s if snap.rows else 0.0
    if not found.ended:
        snap.said = "the recording was cut off, or training went on when it was read"
    return snap
