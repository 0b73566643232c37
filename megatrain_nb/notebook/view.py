"""What a run tells, and the views of it: any number, opened and closed at any time."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import SessionError
from megatrain_nb.notebook.snapshot import Snapshot, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from megatrain_nb.notebook.surface import Surface
    from megatrain_nb.runtime.controls import Controls
    from megatrain_nb.runtime.recorder import Recorder
    from megatrain_nb.runtime.session import Session
    from megatrain_nb.runtime.status import TierStatus

_PERIOD_S = 0.25
_MAX_PERIOD_S = 2.0
_MAX_SHARE = 0.01  # of the time, for drawing
IN_CELL: ContextVar[bool] = ContextVar("in_cell", default=False)
"""Whether the code that runs is a ``%%megatrain`` cell's, which decides itself how it is shown."""

_FIRST_S = 0.4  # a cell that ends sooner, and trains nothing, shows nothing


class Watch:
    """Listens to the sessions of one run, and says what is known at a moment.

    Parameters
    ----------
    shown
        There is a live view: other progress displays keep quiet.
    doing
        Says what the code does that has not begun to train.

    Attributes
    ----------
    recorder
        What the session told; one for each session. None before the first.
    state
        See `Snapshot`.
    note
        A sentence for the view, beside what `Controls` say.

    Notes
    -----
    `follow`, `end` and ``state`` belong to whoever waits for the run; `snapshot` and `controls` to any thread.
    """

    def __init__(self, *, shown: bool, doing: Callable[[], str] = str) -> None:
        self.recorder: Recorder | None = None
        self.state = "waiting"
        self.note = ""
        self._shown = shown
        self._doing = doing
        self._begin_s = time.perf_counter()
        self._end_s: float | None = None
        self._session: Session | None = None
        self._tiers: dict[str, TierStatus] = {}
        self._probed: tuple[float, float] | None = None
        self._said = ""

    def follow(self, session: Session | None) -> None:
        """Listen to this session from now on (None: to the one before, no more)."""
        if session is self._session:
            return
        recording = importlib.import_module("megatrain_nb.runtime.recording")
        if self._session is not None and self.recorder is not None:
            self._session.shown = False
            recording.unfollow(self._session, self.recorder)
            self._said = self._session.controls.said
        self._session = session
        if session is not None:
            session.controls.was_stopped = False
            session.controls.forget_said()
            session.shown = self._shown
            module = importlib.import_module("megatrain_nb.runtime.recorder")
            self.recorder = module.Recorder()
            recording.follow(session, self.recorder)
            self._probed = _probed_disk(session)

    def end(self, error: BaseException | None, *, interrupted: bool) -> None:
        """Note how the run ended; its time stands still, and requests that nobody obeyed are forgotten.

        Parameters
        ----------
        error
            What ended the code; None if nothing did.
        interrupted
            A person interrupted the kernel.
        """
        controls = self.controls
        self._end_s = time.perf_counter()
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.state = "failed"
            self.note = f"{type(error).__name__}: {error}"
        elif interrupted:
            self.state = "interrupted"
        elif controls is not None and controls.was_stopped:
            self.state = "stopped"
        else:
            self.state = "done" if error is None else "interrupted"
        if controls is not None:
            controls.reset()

    @property
    def controls(self) -> Controls | None:
        """Those of the session that is followed."""
        return self._session.controls if self._session is not None else None

    @property
    def began(self) -> bool:
        """Whether something trains or has trained."""
        return self.recorder is not None and self.recorder.trains

    @property
    def step(self) -> int:
        """The last complete step, as the model counts; 0 before the first."""
        return self.recorder.step if self.recorder is not None else 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, up to the end."""
        return (self._end_s or time.perf_counter()) - self._begin_s

    def snapshot(self) -> Snapshot:
        """Return what is known now."""
        self._read_tiers()
        snap = Snapshot(
            state=self._state(),
            elapsed_s=self.elapsed_s,
            tiers=self._tiers,
            probed=self._probed,
        )
        if snap.state == "waiting":
            snap.doing = self._doing()
        controls = self.controls
        said = [self.note, controls.said if controls is not None else self._said]
        snap.said = "; ".join(part for part in said if part)
        return snap if self.recorder is None else fill(snap, self.recorder)

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


def _probed_disk(session: Session) -> tuple[float, float] | None:
    """Return bytes/s, read and written, if this session's disk has been measured."""
    forecast = importlib.import_module("megatrain_nb.runtime.forecast")
    machine = forecast.read_cache(session.preflight.path)
    if machine is None or "read_bytes_per_s" in machine.assumed:
        return None
    return machine.read_bytes_per_s, machine.write_bytes_per_s


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
        if time.perf_counter() < self._next_s:
            return
        if self._watch.began or self._watch.elapsed_s > _FIRST_S:
            self._draw(last=False)

    def finish(self) -> None:
        """Draw the end, in place of what was live; nothing stays of a run that trained nothing."""
        if self._watch.began:
            self._draw(last=True)
        elif self._surface is not None:
            self._surface.clear()

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


def conclude(
    watch: Watch,
    views: Iterable[View],
    error: BaseException | None,
    *,
    interrupted: bool,
) -> None:
    """Note how a run ended (see `Watch.end`), draw it in every view, and let go of the session."""
    watch.end(error, interrupted=interrupted)
    for view in views:
        view.finish()
    watch.follow(None)


class Tick:
    """Refreshes views on a thread of its own: where no cell waits, or the one that waits is busy."""

    def __init__(
        self, each: Callable[[], bool], at_end: Callable[[], Any] = lambda: None
    ) -> None:
        self._each = each
        self._at_end = at_end
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            # The context carries which cell the views belong to.
            target=copy_context().run,
            args=(self._run,),
            name="megatrain-view",
            daemon=True,
        )
        self._thread.start()

    def _run(self) -> None:
        while self._each() and not self._stopped.wait(_PERIOD_S / 2):
            pass
        self._at_end()

    def stop(self) -> None:
        """End before ``each`` says so, and wait for it."""
        self._stopped.set()
        self._thread.join()

    def join(self, timeout: float | None) -> bool:
        """Wait for the end; return whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()
