"""One moment of a run, as plain numbers; everything that is drawn comes from here."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain_nb.plan.history import StepRow
    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.runtime.recorder import Recorder
    from megatrain_nb.runtime.residency import Now
    from megatrain_nb.runtime.status import TierStatus

NUM_RECENT = 8  # what is said of the last steps is said of so many rows
_NUM_TIMED = 32  # what passes between their ends tells when the end comes
ENDED = ("done", "stopped", "interrupted", "failed")
RECORDED, KEPT = PAST = ("recorded", "kept")  # in a file, and by the open session


@dataclass(slots=True, kw_only=True, repr=False)
class Snapshot:
    """What is known of a run at a moment.

    Attributes
    ----------
    state
        ``waiting`` (for training to begin), ``training``, ``paused``, ``finishing`` (the step in progress is the last),
        ``stopping`` (at the next block), ``done``, ``stopped``, ``interrupted``, ``failed``, ``recorded`` or ``kept``.
    doing
        What the cell's code does while it is ``waiting``; empty if not known.
    num_done, total_steps
        Steps done of the steps that the trainer means to do; None if it did not say.
    elapsed_s
        Since the cell started.
    tiers
        Bytes by tier: ``device``, ``ram``, ``disk``.
    layout, now
        The model's blocks, and where their bytes are; None if not known.
    rows
        The steps of this training, oldest first; at most 192 rows.
    evaluations
        Step and metrics of its last evaluations.
    bandwidth
        The last minute, see `Recorder.bandwidth`.
    totals
        Hits, late reads, misses, and bytes of this training.
    earlier
        Steps and last loss of trainings before it in the same cell or recording.
    probed
        Bytes/s that `megatrain_nb.probe` measured of this disk, read and written; None if it was not measured.
    last_step
        Kind, block index, start and end in seconds of each span of the last step; only where a chart is drawn.
    said
        What the last request of a person led to, or what cannot be done here.
    """

    state: str = "waiting"
    doing: str = ""
    num_done: int = 0
    total_steps: int | None = None
    elapsed_s: float = 0.0
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    layout: Layout | None = None
    now: Now | None = None
    rows: list[StepRow] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    bandwidth: list[tuple[float, float, float, float]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    earlier: list[tuple[int, float]] = field(default_factory=list)
    probed: tuple[float, float] | None = None
    last_step: list[tuple[str, int, float, float]] = field(default_factory=list)
    said: str = ""

    @property
    def step(self) -> int:
        """The last complete optimizer step, as the model counts; 0 before the first."""
        return self.rows[-1].step if self.rows else 0

    @property
    def loss(self) -> float:
        """Of the last step; NaN if not known."""
        return self.rows[-1].loss if self.rows else math.nan

    @property
    def grad_norm(self) -> float:
        """Of the last step; NaN if not known."""
        return self.rows[-1].grad_norm if self.rows else math.nan

    @property
    def losses(self) -> list[tuple[int, float]]:
        """``(step, loss)`` pairs so far; finite."""
        return [(row.step, row.loss) for row in self.rows if math.isfinite(row.loss)]

    @property
    def evaluated(self) -> list[tuple[str, float, int]]:
        """Name, value and step of what the last evaluation found; without what it says of its own speed."""
        if not self.evaluations:
            return []
        step, metrics = self.evaluations[-1]
        return [
            (name.removeprefix("eval_").replace("_", " "), value, step)
            for name, value in metrics.items()
            if name != "epoch" and not name.endswith(("_runtime", "_per_second"))
        ]

    @property
    def recent(self) -> list[StepRow]:
        """The last eight rows."""
        return self.rows[-NUM_RECENT:]

    @property
    def tokens_per_s(self) -> float:
        """Valid tokens per second over the last steps; 0 if not known."""
        seconds = sum(row.wall_s for row in self.recent)
        tokens = sum(row.tokens for row in self.recent)
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Mean wall seconds of a step by cause, over the last steps."""
        recent = self.recent
        total: dict[str, float] = {}
        for row in recent:
            for cause, seconds in row.seconds.items():
                total[cause] = total.get(cause, 0.0) + seconds
        count = sum(row.count for row in recent)
        return {cause: seconds / count for cause, seconds in total.items()}

    @property
    def left_s(self) -> float | None:
        """Estimated seconds to the end of this training; None if not known."""
        timed = self.rows[-_NUM_TIMED:]
        if self.total_steps is None or not timed or self.state in (*ENDED, *PAST):
            return None
        if len(timed) > 1:  # what passes between two ends counts evaluation, too
            count = sum(row.count for row in timed[1:])
            each = (timed[-1].end_s - timed[0].end_s) / count
        else:
            each = timed[0].wall_s / timed[0].count
        return max(self.total_steps - self.num_done, 0) * each

    def __repr__(self) -> str:
        render = importlib.import_module("megatrain_nb.notebook.render")
        return str(render.text_line(self))


def fill(snap: Snapshot, recorder: Recorder) -> Snapshot:
    """Add to a snapshot what a recorder knows, and return it."""
    snap.total_steps = recorder.total_steps
    snap.num_done = recorder.num_done
    snap.layout = recorder.layout
    snap.now = recorder.now()
    snap.rows = recorder.rows()
    snap.evaluations = list(recorder.evaluations)
    snap.bandwidth = recorder.bandwidth()
    snap.totals = dict(recorder.totals)
    snap.earlier = list(recorder.earlier)
    if snap.state in (*ENDED, *PAST):
        snap.last_step = recorder.last_step()
    return snap
