"""What a training run has told so far: a Callback that gathers it, and a snapshot to draw."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatrain_nb.runtime.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain_nb.plan.history import StepRow
    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.runtime.callbacks import StepResult
    from megatrain_nb.runtime.recorder import Now
    from megatrain_nb.runtime.status import TierStatus

NUM_RECENT = 8  # what is said of the last steps is said of so many
_MAX_POINTS = 240


@dataclass(slots=True, kw_only=True, repr=False)
class Snapshot:
    """One moment of a run, as plain numbers; everything that is drawn comes from here.

    Attributes
    ----------
    state
        ``waiting``, ``training``, ``paused``, ``finishing`` (the step in progress is the last), ``stopping`` (at the
        next block), ``done``, ``stopped``, ``interrupted``, ``failed`` or ``recorded``.
    step
        The last complete optimizer step, as the model counts; 0 before the first.
    num_done, total_steps
        Steps done of the steps that the trainer means to do; None if it did not say.
    loss, grad_norm
        Of the last step; NaN if not known.
    tokens_per_s
        Valid tokens per second over the last steps; 0 if not known.
    seconds
        Mean wall seconds of a step by cause, over the last steps.
    elapsed_s, left_s
        Since the cell started; estimated time to the end, None if not known.
    losses
        ``(step, loss)`` pairs so far, thinned out: finite, at most 240.
    tiers
        Bytes by tier: ``device``, ``ram``, ``disk``.
    layout, now
        The model's blocks, and where their bytes are; None if not known.
    rows
        The steps, oldest first; at most 192 rows.
    bandwidth
        The last minute, see `Recorder.bandwidth`.
    totals
        Hits, late reads, misses, and bytes of the whole run.
    last_step
        Kind, block index, start and end in seconds of each span of the last step; only where a chart is drawn.
    said
        What the last request of a person led to, or what cannot be done here.
    """

    state: str = "waiting"
    step: int = 0
    num_done: int = 0
    total_steps: int | None = None
    loss: float = math.nan
    grad_norm: float = math.nan
    tokens_per_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    left_s: float | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    layout: Layout | None = None
    now: Now | None = None
    rows: list[StepRow] = field(default_factory=list)
    bandwidth: list[tuple[float, float, float, float]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    last_step: list[tuple[str, int, float, float]] = field(default_factory=list)
    said: str = ""

    def __repr__(self) -> str:
        render = importlib.import_module("megatrain_nb.notebook.render")
        return str(render.text_line(self))


class Progress(Callback):
    """Gathers what steps report, in bounded memory.

    Notes
    -----
    The training thread calls the ``on_`` methods, the thread that draws calls the others.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._start_s = clock()
        self._began = False
        self._total: int | None = None
        self._num_done = 0
        self._last: StepResult | None = None
        self._recent: deque[StepResult] = deque(maxlen=NUM_RECENT)
        self._ends_s: deque[float] = deque(maxlen=4 * NUM_RECENT)
        self._losses = Thinned()

    def on_train_begin(self, total_steps: int | None) -> None:
        """Count from here; what an earlier training in this cell reported stays drawn."""
        with self._lock:
            self._began = True
            self._total = total_steps
            self._num_done = 0
            self._recent.clear()
            self._ends_s.clear()

    def on_step_end(self, result: StepResult) -> None:
        """Take in one step."""
        with self._lock:
            self._began = True
            self._num_done += 1
            self._last = result
            self._recent.append(result)
            self._ends_s.append(self._clock())
            if math.isfinite(result.loss):
                self._losses.append(result.step, result.loss)

    @property
    def began(self) -> bool:
        """Whether training has started."""
        return self._began

    @property
    def step(self) -> int:
        """The last complete step, as the model counts; 0 before the first."""
        last = self._last
        return last.step if last else 0

    def snapshot(self, state: str, tiers: dict[str, TierStatus]) -> Snapshot:
        """Return what is known now."""
        with self._lock:
            now_s = self._clock()
            last = self._last
            return Snapshot(
                state=state,
                step=last.step if last else 0,
                num_done=self._num_done,
                total_steps=self._total,
                loss=last.loss if last else math.nan,
                grad_norm=last.grad_norm if last else math.nan,
                tokens_per_s=self._tokens_per_s(),
                seconds=self._mean_seconds(),
                elapsed_s=now_s - self._start_s,
                left_s=self._left_s(),
                losses=self._losses.points(),
                tiers=tiers,
            )

    def _tokens_per_s(self) -> float:
        seconds = sum(result.total_seconds for result in self._recent)
        tokens = sum(result.tokens for result in self._recent)
        return tokens / seconds if seconds > 0 else 0.0

    def _mean_seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for result in self._recent:
            for cause, seconds in result.seconds.items():
                total[cause] = total.get(cause, 0.0) + seconds
        return {cause: seconds / len(self._recent) for cause, seconds in total.items()}

    def _left_s(self) -> float | None:
        if self._total is None or not self._recent:
            return None
        num_left = max(self._total - self._num_done, 0)
        if len(self._ends_s) > 1:  # what passes between two ends counts evaluation, too
            between = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        else:
            between = self._recent[-1].total_seconds
        return num_left * between


class Thinned:
    """A curve of at most 240 points: neighbours are averaged when it grows longer.

    Examples
    --------
    >>> curve = Thinned()
    >>> for step in range(1, 1001):
    ...     curve.append(step, 1.0)
    >>> len(curve.points()) <= 240, curve.points()[-1]
    (True, (1000, 1.0))
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._per_point = 1
        self._pending: list[float] = []
        self._last_x = 0

    def append(self, x: int, y: float) -> None:
        """Add one value."""
        self._pending.append(y)
        self._last_x = x
        if len(self._pending) < self._per_point:
            return
        self._points.append(self._take_pending())
        if len(self._points) >= _MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs]
            self._per_point *= 2

    def points(self) -> list[tuple[int, float]]:
        """Return the curve so far, the newest value included."""
        if not self._pending:
            return list(self._points)
        mean = sum(self._pending) / len(self._pending)
        return [*self._points, (self._last_x, mean)]

    def _take_pending(self) -> tuple[int, float]:
        mean = sum(self._pending) / len(self._pending)
        self._pending.clear()
        return self._last_x, mean
