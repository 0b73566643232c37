"""A run in a file: JSON lines while it goes, read back for a picture, and the trace format of browsers.

Each line is an object with one key that says what it is: ``recording`` (the first line: the format), ``layout``,
``begin``, ``step`` (the sums of one step), ``evaluate``, ``span`` (if asked for), ``end``. Times are in seconds from the start
of the recording.
"""

from __future__ import annotations

import json
import threading
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from megatrain_nb.errors import ArgumentError, SessionError
from megatrain_nb.plan.history import StepRow
from megatrain_nb.plan.layout import Layout
from megatrain_nb.plan.timeline import HIT, Span
from megatrain_nb.runtime.current import require_session
from megatrain_nb.runtime.recorder import Recorder
from megatrain_nb.runtime.status import TierStatus

if TYPE_CHECKING:
    from megatrain_nb.runtime.session import Session

_FORMAT = 1
# What has no lane here is a moment: it lasts no time.
_LANES = {
    "FORWARD": "compute",
    "BACKWARD": "compute",
    "NEED": "waiting for a piece",
    "WAIT": "waiting",
    "STEP": "update",
    "READ": "disk: read",
    "WRITE": "disk: write",
    "ONLOAD": "link: to the device",
    "OFFLOAD": "link: from the device",
}


class Recording:
    """A file that a session's steps are written to; a context manager.

    Attributes
    ----------
    path
        The file.
    recorder
        What folds the spans.
    """

    def __init__(self, path: Path, session: Session, *, spans: bool) -> None:
        self.path = path
        self._session = session
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = path.open("w", encoding="utf-8")
        except OSError as error:
            msg = f"cannot write a recording to {path}: {error.strerror}; choose another file"
            raise ArgumentError(msg) from error
        self._write({"recording": {"format": _FORMAT}})
        self.recorder = Recorder(
            write=self._write, with_spans=spans, tiers=lambda: tier_bytes(session)
        )
        follow(session, self.recorder)

    def close(self) -> None:
        """Stop recording; a second call does nothing."""
        unfollow(self._session, self.recorder)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"))
        with self._lock:
            if self._file is None:
                return
            self._file.write(f"{text}\n")
            if "span" not in line:
                self._file.flush()  # so that what is there can be read after a crash


def record(path: str | Path, *, spans: bool = False) -> Recording:
    """Write what the open session does to a file, until it is closed.

    Parameters
    ----------
    path
        Of the JSON lines; an old file is replaced.
    spans
        Write every span as well, for `export_trace`: some hundred bytes for each read and each block.

    Raises
    ------
    SessionError
        No session is open.
    ArgumentError
        The file cannot be written.
    """
    return Recording(Path(path).expanduser(), require_session(), spans=spans)


def follow(session: Session, recorder: Recorder) -> None:
    """Let a recorder hear of a session from now on."""
    session.callbacks.append(recorder)
    session.recorder = recorder
    for layout in session.layouts():
        recorder.on_layout(layout)


def unfollow(session: Session, recorder: Recorder) -> None:
    """Let it hear no more; what it has folded stays the session's last record."""
    if recorder in session.callbacks:
        session.callbacks.remove(recorder)


def tier_bytes(session: Session) -> dict[str, tuple[int | None, ...]]:
    """Return bytes by tier: now, peak, limit, and those of now that the pool does not hold."""
    return {name: astuple(tier) for name, tier in session.tiers().items()}


class Replayed:
    """What a recording holds.

    Attributes
    ----------
    recorder
        With its layout, history, totals, and spans if they were recorded.
    tiers
        At the last step: bytes by tier.
    ended
        Whether training came to its end; else the file was cut off.
    """

    def __init__(self) -> None:
        self.recorder = Recorder(clock=lambda: 0.0)
        self.tiers: dict[str, TierStatus] = {}
        self.ended = False


def kept() -> Replayed:
    """Return what the open session keeps of its last training.

    Raises
    ------
    SessionError
        No session is open, or nobody has followed it.
    """
    found = Replayed()
    found.recorder, found.tiers = _current_recorder(), require_session().tiers()
    found.ended = True
    return found


def load(path: str | Path) -> Replayed:
    """Read a recording; a last line that was cut off is left out.

    Raises
    ------
    ArgumentError
        There is no such file, or it is not a recording.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read a recording from {path}: {error}"
        raise ArgumentError(msg) from error
    found = Replayed()
    for number, line in enumerate(lines, 1):
        try:
            ((kind, fields),) = json.loads(line).items()
            _take(found, number, kind, fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if 1 < number == len(lines):
                break
            msg = f"{path}, line {number}: not a recording of this version ({error})"
            raise ArgumentError(msg) from error
    if not lines:
        msg = f"{path} is empty: not a recording"
        raise ArgumentError(msg)
    return found


def _take(found: Replayed, number: int, kind: str, fields: dict[str, Any]) -> None:
    recorder = found.recorder
    if number == 1 and (kind, fields.get("format")) != ("recording", _FORMAT):
        msg = f"it begins with {kind} {fields.get('format', '')}"
        raise ValueError(msg)
    if kind == "layout":
        recorder.on_layout(Layout.from_json(fields))
    elif kind == "begin":
        found.ended = False
        recorder.on_train_begin(fields["total_steps"])
    elif kind == "evaluate":
        recorder.on_evaluate(fields["step"], fields["metrics"])
    elif kind == "span":
        recorder.spans.append(Span(**fields))
    elif kind == "end":
        found.ended = True
        recorder.on_train_end()
        recorder.totals.update(fields["totals"])
    elif kind == "step":
        tiers = fields.pop("tiers", {})
        found.tiers = {name: TierStatus(*each) for name, each in tiers.items()}
        row = StepRow.from_json(fields)
        recorder.add(row)
        for name, values in (
            ("hit", row.hits), ("late", row.late), ("miss", row.misses), ("stall_s", row.stall_s),
        ):  # fmt: skip
            recorder.totals[name] += float(values.sum())
        recorder.totals["read_bytes"] += row.read_bytes
        recorder.totals["written_bytes"] += row.written_bytes


def export_trace(path: str | Path, source: Recorder | str | Path | None = None) -> Path:
    """Write spans in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    Parameters
    ----------
    path
        The JSON file to write.
    source
        A recording that was made with ``spans=True``, or a Recorder; None takes what the open session keeps:
        the last 20,000 spans, if a view or a recording follows it.

    Raises
    ------
    SessionError
        No source, and no session that someone follows.
    ArgumentError
        The source has no spans, or the file cannot be written.
    """
    if source is None:
        source = _current_recorder()
    recorder = source if isinstance(source, Recorder) else load(source).recorder
    spans = recorder.last_spans()
    if not spans:
        msg = "there are no spans: record with mt.record(path, spans=True), or export while the session is open"
        raise ArgumentError(msg)
    target = Path(path).expanduser()
    trace = {"traceEvents": _events(spans, recorder.layout), "displayTimeUnit": "ms"}
    try:
        target.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        msg = f"cannot write a trace to {target}: {error.strerror}; choose another file"
        raise ArgumentError(msg) from error
    return target


def _current_recorder() -> Recorder:
    recorder = require_session().recorder
    if recorder is None:
        msg = "nobody has followed this session: train in a %%megatrain cell, or record with mt.record(path)"
        raise SessionError(msg)
    return recorder


def _events(spans: list[Span], layout: Layout | None) -> list[dict[str, Any]]:
    """Return one event for each span; spans of one lane that overlap go to rows of their own."""
    begin = min(span.start_s for span in spans)
    rows: dict[str, list[float]] = {}
    numbers: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        lane = _LANES.get(span.kind)
        if lane is None:
            continue
        if span.kind == "NEED" and span.outcome == HIT:
            continue
        row = _free_row(rows.setdefault(lane, []), span)
        number = numbers.setdefault((lane, row), len(numbers) + 1)
        events.append(
            {
                "name": f"{span.kind} {readable(span.name, layout)}",
                "cat": span.kind,
                "ph": "X",
                "ts": (span.start_s - begin) * 1e6,
                "dur": span.seconds * 1e6,
                "pid": 1,
                "tid": number,
                "args": {"bytes": span.num_bytes, "outcome": span.outcome},
            }
        )
    names = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 1,
            "tid": number,
            "args": {"name": lane if row == 0 else f"{lane} ({row + 1})"},
        }
        for (lane, row), number in numbers.items()
    ]
    return names + events


def _free_row(ends: list[float], span: Span) -> int:
    for row, end in enumerate(ends):
        if end <= span.start_s:
            ends[row] = span.end_s
            return row
    ends.append(span.end_s)
    return len(ends) - 1


def readable(name: str, layout: Layout | None) -> str:
    """Return a store's key as a person says it; any other name as it is.

    Examples
    --------
    >>> readable("0/weights/3/1", None), readable("model.layers.3", None)
    ('weights of pack 3, tile 1', 'model.layers.3')
    """
    parts = name.split("/")
    if len(parts) not in (3, 4) or not parts[2].isdigit():
        return name
    pack = int(parts[2])
    known = layout is not None and pack < len(layout.pack_names)
    where = layout.pack_names[pack] if layout and known else f"pack {pack}"
    tile = f", tile {parts[3]}" if len(parts) == 4 else ""
    return f"{parts[1]} of {where}{tile}"
