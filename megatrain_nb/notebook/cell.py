"""How a ``%%megatrain`` cell waits for its body, shows its progress and is interrupted.

[Note: interrupt] A first interrupt asks the session to stop: training ends at the next block
border, with the model as after the last whole step. Where no session is open, and on a second
interrupt, KeyboardInterrupt is raised in the body's thread wherever it is.
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
from megatrain_nb.notebook.view import View, current_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain_nb.notebook.body import Body

POLL_S = 0.05
STOP_WAIT_S = 30.0


class Interrupted(Exception):  # noqa: N818 - shown to the user as this one word
    """A cell was interrupted; the message says where, and is all that is shown."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


class Run:
    """One ``%%megatrain`` cell: its body, its view, and how the cell waits for it."""

    def __init__(self, body: Body, view: View) -> None:
        self._body = body
        self._view = view
        self._num_signals = 0
        self._num_handled = 0
        self._stop_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether the body still runs."""
        return self._body.running

    def wait(self) -> object:
        """Run the body and return the value of its last expression; blocks."""
        with self._signals():
            self._start()
            while self._waiting():
                self._body.wait(POLL_S)
        return self._result()

    async def wait_async(self) -> object:
        """Run the body and return the value of its last expression; the loop goes on."""
        with self._signals():
            self._start()
            while self._waiting():
                try:
                    await asyncio.sleep(POLL_S)
                except asyncio.CancelledError:
                    self._num_signals += 1
        return self._result()

    def _start(self) -> None:
        self._view.follow(current_session())
        self._body.start()

    def _waiting(self) -> bool:
        """Do what is due; return whether there is still something to wait for."""
        self._view.follow(current_session())
        if self._num_signals > self._num_handled:
            self._interrupt(again=self._num_handled > 0)
            self._num_handled = self._num_signals
        self._view.refresh()
        overdue = self._stop_s is not None and time.monotonic() > self._stop_s
        return self._body.running and not overdue

    def _interrupt(self, *, again: bool) -> None:
        session = current_session()
        if again or session is None:
            self._body.break_off()
        else:
            self._body.stop(session)
        self._stop_s = time.monotonic() + STOP_WAIT_S
        self._view.state = "stopping"

    def _result(self) -> object:
        error = self._body.error
        if self._stop_s is not None and (
            error is None or isinstance(error, KeyboardInterrupt)
        ):
            self._view.finish("interrupted")
            raise Interrupted(self._told()) from None
        self._view.finish("done" if error is None else "failed")
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
        step = self._view.progress.step
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
