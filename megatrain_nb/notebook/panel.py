"""The live view as widgets: buttons, fields and the picture."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain_nb.notebook.view import Watch
    from megatrain_nb.runtime.controls import Controls


class Panel:
    """Buttons, fields and the picture.

    What a click calls only notes a request: it may come on any thread.

    Attributes
    ----------
    answered
        The frontend has answered `ask`: what it sends is read, so a click would be.
    """

    def __init__(self, watch: Watch) -> None:
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
        self.logging.tooltip = "Steps between two log lines; 0 for what was given"
        self.rate = widgets.BoundedFloatText(
            value=1.0, description="LR factor", min=0.0, max=1e6, step=0.1, layout=field
        )
        self.rate.tooltip = "Factor on the learning rate, from the next step on"
        for each in (self.logging, self.rate):
            each.style.description_width = "68px"
        self.logging.layout.display = "none"  # until somebody logs
        self._told: tuple[float, int] = (1.0, 0)
        self.picture = widgets.HTML()
        self.answered = False
        self._asking: widgets.HTML | None = None
        self._unseen = widgets.HBox(layout={"display": "none"})
        self.row = widgets.HBox(
            [self.pause, self.stop, self.save, self.logging, self.rate],
            layout={"flex_flow": "row wrap"},
        )
        self.box = widgets.VBox([self.row, self.picture, self._unseen])
        self.pause.on_click(lambda _: self._ask(_toggle))
        self.stop.on_click(lambda _: self._ask(lambda controls: controls.stop()))
        self.save.on_click(lambda _: self._ask(lambda controls: controls.save()))
        self.logging.observe(self._set_logging, "value")
        self.rate.observe(self._set_rate, "value")

    def ask(self) -> None:
        """Draw something that is not seen: a frontend tells the kernel of its view, as it would tell of a click."""
        before, self._asking = self._asking, widgets.HTML(_view_count=0)
        self._asking.observe(self._hear, "_view_count")
        # A frontend knows a widget as soon as it is made, and may have answered.
        if self._asking._view_count:
            self._hear(None)
        self._unseen.children = (self._asking,)
        if before is not None:
            _close(before)

    def show(self, html: str, state: str) -> None:
        """Draw a page, and say on the buttons what they would do now; grey until the frontend has answered."""
        controls = self._watch.controls
        silent = controls is None or not self.answered
        for each in (self.pause, self.save, self.logging, self.rate):
            self._set(each, "disabled", silent)
        paused = controls is not None and controls.paused
        self._set(self.pause, "description", "Resume" if paused else "Pause")
        self._set(self.pause, "icon", "play" if paused else "pause")
        stopping = state in ("finishing", "stopping")
        self._set(self.stop, "description", "Stopping" if stopping else "Stop")
        self._set(self.stop, "disabled", stopping or silent)
        if controls is not None:
            self._show_fields(controls)
        self.picture.value = html

    def _show_fields(self, controls: Controls) -> None:
        """Show what is in force where that is news: a field that a person has just changed is left alone."""
        usual = controls.usual_logging_steps
        if usual is not None:
            self._set(self.logging.layout, "display", None)
        told = controls.lr_factor, controls.logging_steps or usual or 0
        if told != self._told:
            self._told = told
            self._set(self.rate, "value", told[0])
            self._set(self.logging, "value", told[1])

    def close(self) -> None:
        """Take every widget away, from the kernel as well."""
        shown = (*self.row.children, self.picture, *self._unseen.children)
        for widget in (*shown, self.row, self._unseen, self.box):
            _close(widget)

    def _hear(self, _change: Any) -> None:
        self.answered = True

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
        self._ask(lambda controls: _log_every(controls, int(change["new"])))

    def _set_rate(self, change: Any) -> None:
        factor = float(change["new"])
        self._ask(lambda controls: setattr(controls, "lr_factor", factor))


def _close(widget: Any) -> None:
    for part in ("style", "layout"):
        with contextlib.suppress(AttributeError):
            getattr(widget, part).close()
    widget.close()


def _log_every(controls: Controls, steps: int) -> None:
    usual = steps in (0, controls.usual_logging_steps)
    controls.logging_steps = None if usual else steps


def _toggle(controls: Controls) -> None:
    if controls.paused:
        controls.resume()
    else:
        controls.pause()
