"""Folds what the runtime tells into numbers that can be drawn at any moment, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_nb.plan.history import History, StepRow
from megatrain_nb.plan.timeline import HIT, LATE, MISS, OUTCOMES
from megatrain_nb.runtime.callbacks import Callback
from megatrain_nb.runtime.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.plan.timeline import Span
    from megatrain_nb.runtime.callbacks import StepResult
    from megatrain_nb.runtime.residency import Now

MAX_SPANS = 20_000
MAX_EVALUATIONS = 200
BIN_S = 0.5
NUM_BINS = 120

_MAX_INTERVALS = 20_000
_MAX_EARLIER = 8


class Recorder(Callback):
    """What happened in a session, folded.

    Parameters
    ----------
    clock
        Gives the time of the spans, in seconds.
    write
        Called with each thing that a recording holds, as a dictionary for JSON; None records nothing.
    with_spans
        Give every span to ``write``, not only the steps' sums.
    tiers
        Returns bytes by tier: now, peak, limit.

    Attributes
    ----------
    layout
        The model that trains; None before the first.
    history
        The steps of this training so far.
    evaluations
        Step and metrics of its last 200 evaluations.
    spans
        The last 20,000 spans.
    totals
        ``hit``, ``late``, ``miss``, ``stall_s``, ``read_bytes`` and ``written_bytes`` of this training, also outside
        of steps.
    trains
        Whether training has begun: someone said so, or a backward did.
    total_steps
        Of this training; None if it did not say.
    num_done
        Steps of this training so far.
    step
        The last complete step, as the model counts, of whichever training; 0 before the first.
    earlier
        Steps and last loss of the last 8 trainings before it.

    Notes
    -----
    *This training* is the one in progress, or the last; a step after the end of one begins another. What two trainings
    did is never added up.

    ``on_span`` takes some microseconds under a lock that nobody holds for long. Any thread may call any method.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        write: Callable[[dict[str, Any]], None] | None = None,
        with_spans: bool = False,
        tiers: Callable[[], dict[str, tuple[int | None, ...]]] | None = None,
    ) -> None:
        self.layout: Layout | None = None
        self.history = History()
        self.evaluations: deque[tuple[int, dict[str, float]]] = deque(
            maxlen=MAX_EVALUATIONS
        )
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.totals = _no_totals()
        self.bins: deque[list[float]] = deque(maxlen=NUM_BINS)
        self.trains = False
        self.total_steps: int | None = None
        self.num_done = self.step = 0
        self.earlier: deque[tuple[int, float]] = deque(maxlen=_MAX_EARLIER)
        self.begin_s = clock()
        self._clock = clock
        self._write = write
        self._with_spans = with_spans
        self._tiers = tiers
        self._lock = threading.RLock()
        self._computing: tuple[int, str] | None = None
        self._is_over = False
        self._notes: dict[str, Callable[[Span], None]] = {
            "READ": self._read,
            "WRITE": self._written,
            "ENTER": self._enter,
            "LEAVE": self._leave,
            "NEED": self._need,
            "BEGIN": self._begin,
            "FORWARD": self._compute,
            "BACKWARD": self._compute,
            "ONLOAD": self._onload,
            "OFFLOAD": self._link,
            "UNLOAD": self._unload,
        }
        self._set_up()

    # -- what the runtime calls -------------------------------------------------------------------------

    def on_layout(self, layout: Layout) -> None:
        """Take a model in, or what is now planned for it."""
        with self._lock:
            before = self.layout
            self.layout = layout
            if before is None or before.what_there_is() != layout.what_there_is():
                self._set_up()
            if self._write is not None:
                self._tell("layout", layout.to_json())

    def on_train_begin(self, total_steps: int | None) -> None:
        """Note that training starts: what is folded from now on is its own."""
        with self._lock:
            self.trains = True
            self._start_training(total_steps)
        self._tell("begin", {"total_steps": total_steps, "t": self._elapsed()})

    def on_span(self, span: Span) -> None:
        """Take a span in."""
        with self._lock:
            self.spans.append(span)
            note = self._notes.get(span.kind)
            if note is not None:
                note(span)
            if self._with_spans:
                self._tell("span", _span_fields(span, self.begin_s))

    def on_step_end(self, result: StepResult) -> None:
        """Close the row of a step."""
        with self._lock:
            row = self._row(result)
            self.add(row)
            if self._write is not None:
                fields = row.to_json()
                if self._tiers is not None:
                    fields["tiers"] = self._tiers()
                self._tell("step", fields)

    def add(self, row: StepRow) -> None:
        """Take a row in that is complete."""
        with self._lock:
            if self._is_over:
                self._start_training(None)
            self.history.append(row)
            self.trains = True
            self.num_done += row.count
            self.step = row.step

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Take the result of an evaluation in."""
        with self._lock:
            self.evaluations.append((step, metrics))
            self._tell("evaluate", {"step": step, "metrics": metrics})

    def on_train_end(self) -> None:
        """Note that nothing computes any more."""
        with self._lock:
            self._computing = None
            self._is_over = True
            for block in range(self._residency.num_blocks):
                self._residency.set_device(block, self._clock(), there=False)
            self._tell("end", {"t": self._elapsed(), "totals": dict(self.totals)})

    # -- what is drawn ------------------------------------------------------------------------------------

    def now(self) -> Now:
        """Return where each block's bytes are at this moment."""
        with self._lock:
            return self._residency.now(self._computing)

    def rows(self) -> list[StepRow]:
        """Return the steps so far, oldest first."""
        with self._lock:
            return list(self.history)

    def bandwidth(self) -> list[tuple[float, float, float, float]]:
        """Return for each half second of the last minute: its start, and bytes/s read, written, over the link."""
        with self._lock:
            bins = [list(each) for each in self.bins]
        return [
            (index * BIN_S, read / BIN_S, written / BIN_S, link / BIN_S)
            for index, read, written, link in bins
        ]

    def last_step(self) -> list[tuple[str, int, float, float]]:
        """Return kind, block, start and end of each span of the last step that belongs to a block.

        Seconds from the step's start; what no time passes in is left out.
        """
        with self._lock:
            rows, spans = list(self.history.recent)[-2:], list(self.spans)
            if len(rows) < 2 or self.layout is None:
                return []
            begin, end = (self.begin_s + row.end_s for row in rows)
            return [
                (span.kind, block, span.start_s - begin, span.end_s - begin)
                for span in spans
                if begin <= span.start_s and span.end_s <= end and span.seconds
                for block in [self._block_of_span(span)]
                if block is not None
            ]

    def _block_of_span(self, span: Span) -> int | None:
        if span.kind in ("READ", "WRITE", "NEED"):
            return self._residency.block_of(span.name)
        if span.kind == "STEP":  # pack and tile
            return self._pack_of.get(span.name.rpartition(".")[0])
        return self._block_of.get(span.name)

    def last_spans(self) -> list[Span]:
        """Return the spans that are still kept, in the order in which they came."""
        with self._lock:
            return list(self.spans)

    # -- inside: spans -----------------------------------------------------------------------------------

    def _set_up(self) -> None:
        layout = self.layout
        self._residency = Residency(layout, self._clock())
        self._block_of: dict[str, int] = {}
        self._pack_of: dict[str, int] = {}
        if layout is not None:
            self._block_of = {name: i for i, name in enumerate(layout.blocks)}
            self._pack_of = dict(
                zip(layout.pack_names, layout.block_of_pack, strict=True)
            )
        self._start_row()

    def _read(self, span: Span) -> None:
        self._reads.append((span.start_s, span.end_s))
        self.totals["read_bytes"] += span.num_bytes
        self._bin(span.end_s, 1, span.num_bytes)
        self._residency.read(span)

    def _written(self, span: Span) -> None:
        self._writes.append((span.start_s, span.end_s))
        self.totals["written_bytes"] += span.num_bytes
        self._bin(span.end_s, 2, span.num_bytes)
        self._residency.written(span)

    def _enter(self, span: Span) -> None:
        self._residency.enter(span)

    def _leave(self, span: Span) -> None:
        self._residency.leave(span)

    def _need(self, span: Span) -> None:
        block = self._residency.block_of(span.name)
        if block is None:
            return
        self.totals[span.outcome] += 1
        self.totals["stall_s"] += span.seconds
        self._counts[span.outcome][block] += 1
        self._stall_s[block] += span.seconds
        self._residency.needed(span)

    def _begin(self, span: Span) -> None:
        block = self._block_of.get(span.name)
        if block is not None:
            self._computing = block, span.outcome
            self.trains = self.trains or span.outcome == "BACKWARD"

    def _compute(self, span: Span) -> None:
        block = self._block_of.get(span.name)
        if block is not None:
            self._compute_s[block] += span.seconds
            self._computing = None

    def _onload(self, span: Span) -> None:
        self._link(span)
        block = self._pack_of.get(span.name)
        if block is not None:
            self._residency.set_device(block, span.end_s, there=True)

    def _unload(self, span: Span) -> None:
        block = self._pack_of.get(span.name)
        if block is not None:
            self._residency.set_device(block, span.end_s, there=False)

    def _link(self, span: Span) -> None:
        if self.layout is None or self.layout.in_place:
            return
        self._link_bytes += span.num_bytes
        self._link_s += span.seconds
        self._bin(span.end_s, 3, span.num_bytes)

    def _bin(self, end_s: float, lane: int, num_bytes: int) -> None:
        index = int((end_s - self.begin_s) / BIN_S)
        if not self.bins or self.bins[-1][0] < index:
            self.bins.append([index, 0, 0, 0])
        self.bins[-1][lane] += num_bytes

    # -- inside: trainings --------------------------------------------------------------------------------

    def _start_training(self, total_steps: int | None) -> None:
        if self.num_done:
            self.earlier.append((self.num_done, self.rows()[-1].loss))
        self.total_steps, self.num_done = total_steps, 0
        self.history = History()
        self.evaluations.clear()
        self.totals = _no_totals()
        self._is_over = False

    # -- inside: rows ------------------------------------------------------------------------------------

    def _start_row(self) -> None:
        blocks = self._residency.num_blocks
        self._counts = {outcome: [0] * blocks for outcome in OUTCOMES}
        self._stall_s, self._compute_s = [0.0] * blocks, [0.0] * blocks
        self._link_bytes, self._link_s = 0, 0.0
        self._reads: deque[tuple[float, float]] = deque(maxlen=_MAX_INTERVALS)
        self._writes: deque[tuple[float, float]] = deque(maxlen=_MAX_INTERVALS)

    def _row(self, result: StepResult) -> StepRow:
        now = self._clock()
        in_ram, on_device = self._residency.take_shares(now)
        row = StepRow(
            step=result.step,
            end_s=now - self.begin_s,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            seconds=dict(result.seconds),
            least_seconds=dict(result.least_seconds),
            read_bytes=result.read_bytes,
            written_bytes=result.written_bytes,
            read_busy_s=busy_s(list(self._reads)),
            write_busy_s=busy_s(list(self._writes)),
            link_bytes=self._link_bytes,
            link_s=self._link_s,
            hits=np.array(self._counts[HIT], np.float32),
            late=np.array(self._counts[LATE], np.float32),
            misses=np.array(self._counts[MISS], np.float32),
            stall_s=np.array(self._stall_s, np.float32),
            compute_s=np.array(self._compute_s, np.float32),
            in_ram=in_ram,
            on_device=on_device,
        )
        self._start_row()
        return row

    def _elapsed(self) -> float:
        return self._clock() - self.begin_s

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        if self._write is not None:
            self._write({kind: fields})


def _no_totals() -> dict[str, float]:
    return dict.fromkeys((*OUTCOMES, "stall_s", "read_bytes", "written_bytes"), 0.0)


def busy_s(intervals: list[tuple[float, float]]) -> float:
    """Return how long at least one of the intervals was open, in seconds.

    Examples
    --------
    >>> busy_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _span_fields(span: Span, begin_s: float) -> dict[str, Any]:
    return {
        "kind": span.kind,
        "name": span.name,
        "start_s": round(span.start_s - begin_s, 7),
        "end_s": round(span.end_s - begin_s, 7),
        "num_bytes": span.num_bytes,
        "lane": span.lane,
        "outcome": span.outcome,
    }
