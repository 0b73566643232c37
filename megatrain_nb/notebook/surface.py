"""Where a view is drawn: a widget with buttons, HTML that is updated in place, or lines of text."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.error import UsageError
from IPython.display import display

from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from megatrain_nb.notebook.progress import Snapshot
    from megatrain_nb.notebook.view import Watch
    from megatrain_nb.runtime.controls import Controls

MODES = ("auto", "widget", "html", "text", "none")
_PERIOD_S = 0.25
_TEXT_PERIOD_S = 10.0
NO_BUTTONS = (
    "buttons cannot answer while this cell runs; the kernel's interrupt stops it, "
    "and %%megatrain train --background has buttons"
)


def display_mode(shell: InteractiveShell, wanted: str | None = None) -> str:
    """Return ``widget``, ``html``, ``text`` or ``none``: as wanted, else MEGATRAIN_DISPLAY, else what the shell can.

    Raises
    ------
    UsageError
        Another word.
    """
    mode = wanted or os.environ.get("MEGATRAIN_DISPLAY", "auto")
    if mode not in MODES:
        name = "--display" if wanted else "MEGATRAIN_DISPLAY"
        msg = f"{name}={mode!r} is not known; use one of: {', '.join(MODES)}"
        raise UsageError(msg)
    if mode != "auto":
        return mode
    if not hasattr(shell, "kernel"):
        return "text"
    # Jupyter Server names the notebook; nbclient and papermill do not, and have nobody who clicks.
    if "JPY_SESSION_NAME" in os.environ and importlib.util.find_spec("ipywidgets"):
        return "widget"
    return "html"


def kernel_awaits() -> bool:
    """Whether messages of widgets are handled while a cell awaits: ipykernel 7 and later do."""
    module = importlib.import_module("ipykernel")
    return int(module.version_info[0]) >= 7


class Surface(Protocol):
    """Something to draw on; ``period_s`` is the shortest time between two drawings."""

    period_s: float

    def show(self, snap: Snapshot) -> None:
        """Draw a moment."""

    def finish(self, snap: Snapshot) -> None:
        """Draw the end: what stays when there is no kernel any more."""


class TextSurface:
    """A line now and then."""

    period_s = _TEXT_PERIOD_S

    def show(self, snap: Snapshot) -> None:
        """Print a line."""
        print(_render().text_line(snap), flush=True)

    finish = show


class HtmlSurface:
    """One display that is updated; at the end the chart of the run follows."""

    period_s = _PERIOD_S

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._chart: DisplayHandle | None = None

    def show(self, snap: Snapshot) -> None:
        """Draw in place of the last drawing."""
        self._handle = _put(self._handle, _page(snap))

    def finish(self, snap: Snapshot) -> None:
        """Draw the summary; the chart comes below, for frontends that draw it."""
        self._handle = _put(self._handle, _page(snap))
        chart = importlib.import_module("megatrain_nb.notebook.chart")
        bundle = chart.bundle(snap)
        if bundle:
            self._chart = _put(self._chart, bundle)


class WidgetSurface(HtmlSurface):
    """The same below buttons; the widgets are gone when the run is."""

    def __init__(self, watch: Watch, *, reserve_chart: bool) -> None:
        super().__init__()
        self._panel: _Panel | None = _Panel(watch)
        self._handle = display(self._panel.box, display_id=True)
        if reserve_chart:  # a cell that has returned gets no new output
            empty = {"text/html": "<div></div>", "text/plain": ""}
            self._chart = _put(None, empty)

    def show(self, snap: Snapshot) -> None:
        """Draw below the buttons."""
        if self._panel is not None:
            self._panel.show(_render().page(snap), snap.state)

    def finish(self, snap: Snapshot) -> None:
        """Replace the widgets by the summary."""
        super().finish(snap)
        if self._panel is not None:
            self._panel.close()
            self._panel = None


class _Panel:
    """Buttons, fields and the picture.

    What a click calls only notes a request: it may come on any thread.
    """

    def __init__(self, watch: Watch) -> None:
        widgets = importlib.import_module("ipywidgets")
        self._watch = watch
        wide = {"width": "auto"}
        self.pause = widgets.Button(description="Pause", icon="pause", layout=wide)
        self.stop = widgets.Button(description="Stop", icon="stop", layout=wide)
        self.save = widgets.Button(
            description="Save model now", icon="save", layout=wide
        )
        self.pause.tooltip = "Wait after the step in progress"
        self.stop.tooltip = "End after the step in progress; the model stays whole"
        self.save.tooltip = "Export the model when the step in progress is complete"
        field = {"width": "150px", "margin": "2px 2px 2px 14px"}
        self.logging = widgets.BoundedIntText(
            description="Log every", min=0, max=10**9, layout=field
        )
        self.logging.tooltip = "Steps between two log lines; 0 leaves it as it is"
        self.rate = widgets.BoundedFloatText(
            value=1.0, description="LR factor", min=0.0, max=1e6, step=0.1, layout=field
        )
        self.rate.tooltip = "Factor on the learning rate, from the next step on"
        for each in (self.logging, self.rate):
            each.style.description_width = "68px"
        self.picture = widgets.HTML()
        self.row = widgets.HBox(
            [self.pause, self.stop, self.save, self.logging, self.rate],
            layout={"flex_flow": "row wrap"},
        )
        self.box = widgets.VBox([self.row, self.picture])
        self.pause.on_click(lambda _: self._ask(_toggle))
        self.stop.on_click(lambda _: self._ask(lambda controls: controls.stop()))
        self.save.on_click(lambda _: self._ask(lambda controls: controls.save()))
        self.logging.observe(self._set_logging, "value")
        self.rate.observe(self._set_rate, "value")

    def show(self, html: str, state: str) -> None:
        controls = self._watch.controls
        paused = controls is not None and controls.paused
        self._set(self.pause, "description", "Resume" if paused else "Pause")
        self._set(self.pause, "icon", "play" if paused else "pause")
        stopping = state in ("finishing", "stopping")
        self._set(self.stop, "description", "Stopping" if stopping else "Stop")
        self._set(self.stop, "disabled", stopping)
        self.picture.value = html

    def close(self) -> None:
        for widget in (*self.row.children, self.picture, self.row, self.box):
            for part in ("style", "layout"):
                with contextlib.suppress(AttributeError):
                    getattr(widget, part).close()
            widget.close()

    @staticmethod
    def _set(widget: Any, name: str, value: object) -> None:
        if getattr(widget, name) != value:
            setattr(widget, name, value)

    def _ask(self, request: Callable[[Controls], None]) -> None:
        controls = self._watch.controls
        if controls is None:
            return
        try:
            request(controls)
            self._watch.note = ""
        except ArgumentError as error:
            self._watch.note = str(error)

    def _set_logging(self, change: Any) -> None:
        steps = int(change["new"]) or None
        self._ask(lambda controls: setattr(controls, "logging_steps", steps))

    def _set_rate(self, change: Any) -> None:
        factor = float(change["new"])
        self._ask(lambda controls: setattr(controls, "lr_factor", factor))


def _toggle(controls: Controls) -> None:
    if controls.paused:
        controls.resume()
    else:
        controls.pause()


def _put(handle: DisplayHandle | None, bundle: dict[str, Any]) -> DisplayHandle | None:
    """Draw in place of what the handle shows, or in a new place; return the handle of it."""
    if handle is None:
        handle = display(bundle, raw=True, display_id=True)
    else:
        handle.update(bundle, raw=True)
    return handle


def _page(snap: Snapshot) -> dict[str, Any]:
    render = _render()
    return {"text/html": render.page(snap), "text/plain": render.text_line(snap)}


def _render() -> Any:
    # Loading the extension must not import numpy.
    return importlib.import_module("megatrain_nb.notebook.render")
