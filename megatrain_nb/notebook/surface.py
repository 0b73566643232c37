"""Where a view is drawn: a widget with buttons, HTML that is updated in place, or lines of text."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from megatrain_nb.errors import ArgumentError
from megatrain_nb.notebook.buttons import NO_ANSWER, Subshells, why_no_buttons

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from megatrain_nb.notebook.panel import Panel
    from megatrain_nb.notebook.snapshot import Snapshot
    from megatrain_nb.notebook.view import Watch

MODES = ("auto", "widget", "html", "text", "none")
_PERIOD_S = 0.25
_TEXT_PERIOD_S, _TEXT_SHARE, _MAX_TEXT_PERIOD_S = 10.0, 0.02, 60.0
_LINE_PERIOD_S = 1.0
_PATIENCE_S = 10.0  # a frontend takes less than one to answer
_FIRST_ASK_S = 1.0  # twice as long before each further one


def check_mode(wanted: str | None, *, name: str) -> str:
    """Return one of `MODES`: as wanted, else MEGATRAIN_DISPLAY, else ``auto``.

    Raises
    ------
    ArgumentError
        Another word; ``name`` says whose.
    """
    mode = wanted or os.environ.get("MEGATRAIN_DISPLAY") or "auto"
    if mode not in MODES:
        name = name if wanted else "MEGATRAIN_DISPLAY"
        msg = f"{name}={mode!r} is not known; use one of: {', '.join(MODES)}"
        raise ArgumentError(msg)
    return mode


def current_shell() -> InteractiveShell | None:
    """Return the shell that runs this code, or None; a script need not import IPython to be asked."""
    module = sys.modules.get("IPython")
    shell: InteractiveShell | None = module.get_ipython() if module else None
    return shell


def has_kernel(shell: InteractiveShell | None) -> bool:
    """Whether a shell is a notebook's."""
    return hasattr(shell, "kernel")


def display_mode(shell: InteractiveShell, wanted: str | None = None) -> str:
    """Return how to show a run: as `check_mode` says, else what the shell can.

    Returns
    -------
    str
        ``widget``, ``html``, ``text`` or ``none``; ``unattended`` in a kernel where nobody looks on.
    """
    mode = check_mode(wanted, name="--display")
    if mode != "auto":
        return mode
    if not has_kernel(shell):
        return "text"
    # What executes notebooks by itself (nbclient, papermill, nbval) says that it answers no input().
    kernel: Any = getattr(shell, "kernel", None)
    if not getattr(kernel, "_allow_stdin", True):
        return "unattended"
    # Jupyter Server names the notebook; others may have no way back from a widget.
    if "JPY_SESSION_NAME" in os.environ and importlib.util.find_spec("ipywidgets"):
        return "widget"
    return "html"


def open_surface(
    mode: str, watch: Watch, *, awaited: bool, returns: bool
) -> Callable[[], Surface] | None:
    """Return what opens the place to draw on; None draws nothing.

    Parameters
    ----------
    mode
        From `display_mode`.
    watch
        Whom the buttons ask.
    awaited, returns
        The cell awaits its code; it returns at once.
    """
    if mode == "none":
        return None
    if mode == "text":
        return LineSurface if sys.stdout.isatty() else TextSurface
    if mode == "unattended":
        return UnattendedSurface
    _render()  # now: later the cell's own imports compete for the interpreter
    if mode == "html":
        return HtmlSurface
    hint = "" if returns else why_no_buttons(awaited=awaited)
    subshells = Subshells(current_shell())
    if hint and not subshells.possible:
        return lambda: HtmlSurface(hint)
    importlib.import_module("megatrain_nb.notebook.panel")
    return lambda: WidgetSurface(watch, subshells, hint=hint, reserve_chart=returns)


class Surface(Protocol):
    """Something to draw on; ``period_s`` is the shortest time between two drawings."""

    period_s: float

    def show(self, snap: Snapshot) -> None:
        """Draw a moment."""

    def finish(self, snap: Snapshot) -> None:
        """Draw the end: what stays when there is no kernel any more."""

    def clear(self) -> None:
        """Take away what is drawn."""


class TextSurface:
    """A line now and then: every ten seconds at first, every minute in a run of hours."""

    period_s = _PERIOD_S

    def show(self, snap: Snapshot) -> None:
        """Print a line, once a step is done or training takes long to do one."""
        if snap.state == "waiting":
            return
        if not snap.num_done and snap.elapsed_s < _TEXT_PERIOD_S:
            return
        self._print(_render().text_line(snap))
        share_s = min(_TEXT_SHARE * snap.elapsed_s, _MAX_TEXT_PERIOD_S)
        self.period_s = max(_TEXT_PERIOD_S, share_s)

    def finish(self, snap: Snapshot) -> None:
        """Print the last line."""
        self._print(_render().text_line(snap))

    def clear(self) -> None:
        """Do nothing: what is printed stays."""

    def _print(self, line: str) -> None:
        print(line, flush=True)


class LineSurface(TextSurface):
    """One line of a terminal, written over."""

    def __init__(self) -> None:
        tqdm = importlib.import_module("tqdm")  # transformers needs it
        self._line = tqdm.tqdm(bar_format="{desc}", file=sys.stdout, dynamic_ncols=True)

    def show(self, snap: Snapshot) -> None:
        """Write over the line."""
        super().show(snap)
        self.period_s = _LINE_PERIOD_S

    def finish(self, snap: Snapshot) -> None:
        """Write the last line, and leave it."""
        super().finish(snap)
        self._line.close()

    def clear(self) -> None:
        """Leave the line."""
        self._line.close()

    def _print(self, line: str) -> None:
        self._line.set_description_str(line)


class HtmlSurface:
    """One display that is updated; at the end the chart of the run follows.

    Parameters
    ----------
    hint
        A sentence that is shown while the run is live.
    """

    period_s = _PERIOD_S

    def __init__(self, hint: str = "") -> None:
        self._hint = hint
        self._handle: DisplayHandle | None = None
        self._chart: DisplayHandle | None = None

    def show(self, snap: Snapshot) -> None:
        """Draw in place of the last drawing."""
        snap.said = "; ".join(part for part in (snap.said, self._hint) if part)
        self._handle = _put(self._handle, _page(snap))

    def finish(self, snap: Snapshot) -> None:
        """Draw the summary; the chart comes below, for frontends that draw it."""
        self._handle = _put(self._handle, _page(snap))
        chart = importlib.import_module("megatrain_nb.notebook.chart")
        bundle = chart.bundle(snap)
        if bundle:
            self._chart = _put(self._chart, bundle)

    def clear(self) -> None:
        """Draw nothing in place of the last drawing."""
        self._handle = _put(self._handle, {"text/html": "", "text/plain": ""})


class UnattendedSurface(TextSurface):
    """Lines for a log while it runs; the notebook that is kept gets the summary and the chart."""

    def finish(self, snap: Snapshot) -> None:
        """Draw the end as `HtmlSurface` does."""
        HtmlSurface().finish(snap)


class WidgetSurface(HtmlSurface):
    """The same below buttons; the widgets are gone when the run is.

    Buttons are grey until the frontend has answered `Panel.ask`. Where it does not in time (it may know no widgets), the
    widgets go, and it is said why.

    Parameters
    ----------
    watch
        Whom the buttons ask.
    subshells
        What may read clicks, see `megatrain_nb.notebook.buttons`.
    hint
        Why buttons do not answer unless a subshell reads clicks; empty where the kernel's main thread does.
    reserve_chart
        Make room for the chart at once.
    """

    def __init__(
        self,
        watch: Watch,
        subshells: Subshells,
        *,
        hint: str = "",
        reserve_chart: bool = False,
    ) -> None:
        super().__init__(hint or NO_ANSWER)
        module = importlib.import_module("megatrain_nb.notebook.panel")
        self._subshells = subshells
        self._busy = bool(hint)
        self._context = subshells.context()
        self._patience_ends_s = time.perf_counter() + _PATIENCE_S
        self._next_ask_s, self._ask_after_s = 0.0, _FIRST_ASK_S
        panel: Panel = self._context.run(module.Panel, watch)
        self._panel: Panel | None = panel
        self._handle = _display(panel.box)
        if reserve_chart:  # a cell that has returned gets no new output
            empty = {"text/html": "<div></div>", "text/plain": ""}
            self._chart = _put(None, empty)

    def show(self, snap: Snapshot) -> None:
        """Draw below the buttons; without them, and without widgets, where nothing has answered in time."""
        self._ask()
        if self._panel is None:
            super().show(snap)
            return
        html = _render().page(snap)
        self._context.run(self._panel.show, html, snap.state)

    def _ask(self) -> None:
        """Ask the frontend until it has answered; give its widgets up when it has not for long."""
        panel, now_s = self._panel, time.perf_counter()
        if panel is None or panel.answered:
            return
        if now_s > self._patience_ends_s:
            self._close()
            return
        # Before a subshell is there, an answer would wait for the cell as a click would.
        readable = not self._busy or self._subshells.there()
        if readable and now_s >= self._next_ask_s:
            self._context.run(panel.ask)
            self._next_ask_s = now_s + self._ask_after_s
            self._ask_after_s *= 2

    def finish(self, snap: Snapshot) -> None:
        """Replace the widgets by the summary."""
        super().finish(snap)
        self._close()

    def clear(self) -> None:
        """Replace the widgets by nothing."""
        super().clear()
        self._close()

    def _close(self) -> None:
        if self._panel is not None:
            self._context.run(self._panel.close)
            self._panel = None


def _put(handle: DisplayHandle | None, bundle: dict[str, Any]) -> DisplayHandle | None:
    """Draw in place of what the handle shows, or in a new place; return the handle of it."""
    if handle is None:
        handle = _display(bundle, raw=True)
    else:
        handle.update(bundle, raw=True)
    return handle


def _display(what: object, **options: bool) -> DisplayHandle | None:
    # A script that trains must not pay for importing IPython.
    display = importlib.import_module("IPython.display").display
    handle: DisplayHandle | None = display(what, display_id=True, **options)
    return handle


def _page(snap: Snapshot) -> dict[str, Any]:
    render = _render()
    return {"text/html": render.page(snap), "text/plain": render.text_line(snap)}


def _render() -> Any:
    # Loading the extension must not import numpy.
    return importlib.import_module("megatrain_nb.notebook.render")
