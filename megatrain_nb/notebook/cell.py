"""How a ``%%megatrain`` cell waits for its body, shows its progress and is interrupted; and how it need not wait.

[Note: interrupt] A first interrupt asks the session to stop: training ends at the next block
border, with the model as after the last whole step. Where no session is open, and on a second
interrupt, KeyboardInterrupt is raised in the body's thread wherever it is. The Stop button lets the
step in progress end first, and the cell ends without an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from megatrain_nb.errors import SessionError
from megatrain_nb.notebook.view import Tick, View, Watch, conclude
from megatrain_nb.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from megatrain_nb.notebook.body import Body
    from megatrain_nb.notebook.snapshot import Snapshot
    from megatrain_nb.notebook.surface import Surface
    from megatrain_nb.runtime.controls import Controls

POLL_S = 0.05
STOP_WAIT_S = 30.0


class Interrupted(Exception):  # noqa: N818 - shown to the user as this one word
    """A cell was interrupted; the message says where, and is all that is shown."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


class Run:
    """One ``%%megatrain`` cell: its body, its views, and how it is waited for.

    Attributes
    ----------
    in_background
        Whether the cell returns at once.
    """

    def __init__(
        self,
        body: Body,
        watch: Watch,
        open_surface: Callable[[], Surface] | None,
        *,
        in_background: bool,
    ) -> None:
        self.in_background = in_background
        self._body = body
        self._watch = watch
        self._open_surface = open_surface
        self._views = [View(watch, open_surface)] if open_surface else []
        self._tick: Tick | None = None
        self._num_signals = 0
        self._num_handled = 0
        self._stop_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether the body still runs."""
        return self._body.running

    # -- a cell that waits ----------------------------------------------------------------------------

    def finish(self) -> object:
        """Run the body and return the value of its last expression; blocks."""
        with self._signals():
            self._start()
            while self._waiting():
                self._body.wait(POLL_S)
        return self._result()

    async def finish_async(self) -> object:
        """Run the body and return the value of its last expression; the loop goes on."""
        with self._signals():
            self._start()
            while self._waiting():
                try:
                    await asyncio.sleep(POLL_S)
                except asyncio.CancelledError:
                    self._num_signals += 1
        return self._result()

    # -- a cell that does not wait ------------------------------------------------------------------------

    def start(self) -> None:
        """Let the body run in the background."""
        self._start()
        self._tick = Tick(self._waiting, lambda: self._end(self._body.error))

    def wait(self, timeout: float | None = None) -> object:
        """Wait for the end; an interrupt ends the waiting, not the run.

        Parameters
        ----------
        timeout
            In seconds; None waits as long as it takes.

        Returns
        -------
        object
            The value of the cell's last expression; None as well where ``timeout`` came first.

        Raises
        ------
        Exception
            What ended the body.
        """
        assert self._tick is not None
        if not self._tick.join(timeout):
            return None
        if self._watch.state == "failed":
            self._body.reraise()
        return self._body.value

    def status(self) -> Snapshot:
        """Return the run's numbers at this moment; they print as one line."""
        return self._watch.snapshot()

    def stop(self) -> None:
        """End after the step in progress."""
        self._controls().stop()

    def pause(self) -> None:
        """Wait after the step in progress."""
        self._controls().pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._controls().resume()

    def save(self, directory: str | Path | None = None) -> None:
        """Export the model when the step in progress is complete."""
        self._controls().save(directory)

    def view(self) -> None:
        """Show one more view of the run in this cell."""
        if self._open_surface is None:
            return
        view = View(self._watch, self._open_surface)
        if self.running:
            self._views.append(view)
            view.refresh()
        else:
            view.finish()

    def __repr__(self) -> str:
        return f"<Run {self.status()}>"

    def _controls(self) -> Controls:
        controls = self._watch.controls
        if controls is None or not self.running:
            msg = "this run has ended" if not self.running else "no session is open yet"
            raise SessionError(msg)
        return controls

    # -- inside ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._watch.follow(current_session())
        self._body.start()

    def _waiting(self) -> bool:
        """Do what is due; return whether there is still something to wait for."""
        self._watch.follow(current_session())
        if self._num_signals > self._num_handled:
            self._interrupt(again=self._num_handled > 0)
            self._num_handled = self._num_signals
        for view in list(self._views):
            view.refresh()
        overdue = self._stop_s is not None and time.monotonic() > self._stop_s
        return self._body.running and not overdue

    def _interrupt(self, *, again: bool) -> None:
        session = current_session()
        if again or session is None:
            self._body.break_off()
        else:
            self._body.stop(session)
        self._stop_s = time.monotonic() + STOP_WAIT_S
        self._watch.state = "stopping"

    def _end(self, error: BaseException | None) -> None:
        """Note how the body ended, draw it in every view, and let go of the session."""
        asked = self._stop_s is not None
        conclude(self._watch, self._views, error, interrupted=asked)
        self._views.clear()

    def _result(self) -> object:
        error = self._body.error
        self._end(error)
        if self._watch.state == "interrupted":
            raise Interrupted(self._told()) from None
        if self._watch.state == "stopped" and error is not None:
            return None
        if isinstance(error, SessionError) and current_session() is None:
            raise UsageError(" ".join(str(error).split())) from None
        self._body.reraise()
        return self._body.value

    def _told(self) -> str:
        if self._body.running:
            return (
                f"but the cell's code still runs, {STOP_WAIT_S:.0f} s later; it stops at the "
                "next block of a model; if that never comes, restart the kernel"
            )
        step = self._watch.step
        if self._num_handled > 1:
            return (
                f"broken off after step {step}; the step in progress may be half done"
            )
        if step:
            return f"after step {step}: the model is as after step {step}"
        return "before the first step was complete"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Count SIGINT instead of raising; ipykernel's own way counts only the first."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(*_: object) -> None:
            self._num_signals += 1

        before = signal.signal(signal.SIGINT, count)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
