"""What a run tells, and the views of it: any number, opened and closed at any time."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import SessionError
from megatrain_nb.notebook.progress import Progress, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain_nb.notebook.surface import Surface
    from megatrain_nb.runtime.controls import Controls
    from megatrain_nb.runtime.recorder import Recorder
    from megatrain_nb.runtime.session import Session
    from megatrain_nb.runtime.status import TierStatus

_PERIOD_S = 0.25
_MAX_PERIOD_S = 2.0
_MAX_SHARE = 0.01  # of the time, for drawing
ENDED = ("done", "stopped", "interrupted", "failed")


class Watch:
    """Listens to the sessions of one run, and says what is known at a moment.

    Attributes
    ----------
    progress, recorder
        What the sessions told: steps and times; layers and bytes. No recorder before the first session.
    state
        See `Snapshot`.
    note
        A sentence for the view, beside what `Controls` say.

    Notes
    -----
    `follow` and ``state`` belong to whoever waits for the run; `snapshot` and `controls` to any thread.
    """

    def __init__(self, *, shown: bool) -> None:
        self.progress = Progress()
        self.recorder: Recorder | None = None
        self.state = "waiting"
        self.note = ""
        self._shown = shown
        self._session: Session | None = None
        self._tiers: dict[str, TierStatus] = {}
        self._said = ""

    def follow(self, session: Session | None) -> None:
        """Listen to this session from now on (None: to the one before, no more)."""
        if session is self._session:
            return
        recording = importlib.import_module("megatrain_nb.runtime.recording")
        if self._session is not None:
            self._session.shown = False
            if self.progress in self._session.callbacks:
                self._session.callbacks.remove(self.progress)
            if self.recorder is not None:
                recording.unfollow(self._session, self.recorder)
            self._said = self._session.controls.said
        self._session = session
        if session is not None:
            session.controls.was_stopped = False
            session.callbacks.append(self.progress)
            session.shown = self._shown
            if self.recorder is None:
                module = importlib.import_module("megatrain_nb.runtime.recorder")
                self.recorder = module.Recorder()
            recording.follow(session, self.recorder)

    @property
    def controls(self) -> Controls | None:
        """Those of the session that is followed."""
        return self._session.controls if self._session is not None else None

    @property
    def began(self) -> bool:
        """Whether something trains or has trained."""
        trains = self.recorder is not None and self.recorder.trains
        return self.progress.began or trains

    def snapshot(self) -> Snapshot:
        """Return what is known now."""
        self._read_tiers()
        snap = self.progress.snapshot(self._state(), self._tiers)
        controls = self.controls
        said = [self.note, controls.said if controls is not None else self._said]
        snap.said = "; ".join(part for part in said if part)
        fill(snap, self.recorder)
        return snap

    def _state(self) -> str:
        controls = self.controls
        if self.state == "waiting" and self.began:
            self.state = "training"
        if self.state != "training" or controls is None:
            return self.state
        if controls.stopping:
            return "finishing"
        return "paused" if controls.waiting else "training"

    def _read_tiers(self) -> None:
        session = self._session
        if session is None or session.closed:
            return
        with contextlib.suppress(SessionError):  # closed meanwhile: the last ones stay
            self._tiers = session.tiers()


def fill(snap: Snapshot, recorder: Recorder | None) -> None:
    """Add to a snapshot what a recorder knows."""
    if recorder is None:
        return
    snap.layout = recorder.layout
    snap.now = recorder.now()
    snap.rows = recorder.rows()
    snap.bandwidth = recorder.bandwidth()
    snap.totals = dict(recorder.totals)
    if snap.state in (*ENDED, "recorded"):
        snap.last_step = recorder.last_step()


class View:
    """One picture of a run, on one surface."""

    def __init__(self, watch: Watch, open_surface: Callable[[], Surface]) -> None:
        self._watch = watch
        self._open = open_surface
        self._surface: Surface | None = None
        self._broken = False
        self._next_s = 0.0
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Draw if the last drawing is old enough."""
        if time.perf_counter() >= self._next_s and self._watch.began:
            self._draw(last=False)

    def finish(self) -> None:
        """Draw the end, in place of what was live."""
        if self._watch.began:
            self._draw(last=True)

    def _draw(self, *, last: bool) -> None:
        with self._lock:
            if self._broken:
                return
            try:
                first = self._surface is None
                if self._surface is None:
                    self._surface = self._open()
                begin = time.thread_time()
                snap = self._watch.snapshot()
                if last:
                    self._surface.finish(snap)
                else:
                    self._surface.show(snap)
            except Exception as error:
                self._broken = True
                print(f"progress is no longer shown: {error!r}", file=sys.stderr)
                return
            # Drawing must not cost what it shows: a picture that takes long comes less often. The first one
            # imports what the others use.
            took = 0.0 if first else time.thread_time() - begin
            slow = min(took / _MAX_SHARE, _MAX_PERIOD_S)
            self._next_s = time.perf_counter() + max(self._surface.period_s, slow)


class Tick:
    """Refreshes views on a thread of its own, for a run that no cell waits for."""

    def __init__(self, each: Callable[[], bool], at_end: Callable[[], Any]) -> None:
        self._each = each
        self._at_end = at_end
        self._thread = threading.Thread(
            target=self._run, name="megatrain-view", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        while self._each():
            time.sleep(_PERIOD_S / 2)
        self._at_end()

    def join(self, timeout: float | None) -> bool:
        """Wait for the end; return whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()
