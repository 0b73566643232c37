"""The progress view of one cell: attach to sessions, draw now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.display import display

from megatrain_nb.errors import SessionError
from megatrain_nb.notebook import render
from megatrain_nb.notebook.progress import Progress, TierUse

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from megatrain_nb.runtime.session import Session

_MODES = ("auto", "html", "text", "none")
_HTML_PERIOD_S = 0.25
_TEXT_PERIOD_S = 10.0
_CLOCK_PERIOD_S = 1.0  # redraw for the clock alone


def current_session() -> Session | None:
    """Return the open session without importing the runtime (and torch) to ask for it."""
    module = sys.modules.get("megatrain_nb.runtime.session")
    find = getattr(module, "current_session", None)
    session: Session | None = find() if find else None
    return session


def display_mode(shell: InteractiveShell) -> str:
    """Return ``html``, ``text`` or ``none``: MEGATRAIN_DISPLAY, else what the shell can."""
    mode = os.environ.get("MEGATRAIN_DISPLAY", "auto")
    if mode not in _MODES:
        msg = (
            f"MEGATRAIN_DISPLAY={mode!r} is not known; use one of: {', '.join(_MODES)}"
        )
        raise UsageError(msg)
    if mode == "auto":
        return "html" if hasattr(shell, "kernel") else "text"
    return mode


class View:
    """Shows a run while it goes; the only object a live dashboard has to replace.

    Notes
    -----
    Every method is called from the thread that awaits the run, never from the one that trains;
    in between is the Progress, which both may touch.
    """

    def __init__(self, mode: str) -> None:
        self.progress = Progress()
        self.state = "waiting"
        self._mode = mode
        self._session: Session | None = None
        self._tiers: dict[str, TierUse] = {}
        self._handle: DisplayHandle | None = None
        self._drawn_s = 0.0
        self._drawn: tuple[str, int, bool] | None = None

    def follow(self, session: Session | None) -> None:
        """Listen to this session from now on (None: to the one before, no more)."""
        if session is self._session:
            return
        if self._session is not None:
            self._session.shown = False
            if self.progress in self._session.callbacks:
                self._session.callbacks.remove(self.progress)
        self._session = session
        if session is not None:
            session.callbacks.append(self.progress)
            session.shown = self._mode != "none"

    def refresh(self) -> None:
        """Draw if there is something new and the last drawing is old enough."""
        if self.state == "waiting" and self.progress.began:
            self.state = "training"
        if self._mode == "none" or not self.progress.began:
            return
        age_s = time.perf_counter() - self._drawn_s
        news = (self.state, self.progress.step, self.progress.num_done > 0)
        if self._mode == "html":
            due = _HTML_PERIOD_S if news != self._drawn else _CLOCK_PERIOD_S
        else:
            due = _TEXT_PERIOD_S
        if self._drawn is None or age_s >= due:
            self._draw(news)

    def finish(self, state: str) -> None:
        """Draw the end, and let go of the session."""
        self.state = state
        if self._mode != "none" and self.progress.began:
            self._draw((state, self.progress.step, True))
        self.follow(None)

    def _draw(self, news: tuple[str, int, bool]) -> None:
        try:
            self._read_tiers()
            snap = self.progress.snapshot(self.state, self._tiers)
            line = render.text_line(snap)
            if self._mode == "html":
                self._show({"text/html": render.page(snap), "text/plain": line})
            else:
                print(line, flush=True)
        except Exception as error:
            self._mode = "none"
            print(f"progress is no longer shown: {error!r}", file=sys.stderr)
        self._drawn_s, self._drawn = time.perf_counter(), news

    def _show(self, bundle: dict[str, Any]) -> None:
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _read_tiers(self) -> None:
        session = self._session
        if session is None or session.closed:
            return
        with contextlib.suppress(SessionError):  # closed meanwhile: the last ones stay
            self._tiers = {
                name: TierUse(
                    used_bytes=tier.used_bytes,
                    peak_bytes=tier.peak_bytes,
                    limit_bytes=tier.limit_bytes,
                )
                for name, tier in session.status().tiers.items()
            }
