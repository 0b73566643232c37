"""The memory-budget explorer: move a slider, see where every byte would be and how fast a step would go.

The picture is an ordinary HTML output that each change replaces, so that a saved notebook keeps the last one;
only the controls are widgets.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatrain_nb.codec.choice import parse_storage
from megatrain_nb.codec.names import LOSSLESS, NAMES, WEIGHTS
from megatrain_nb.notebook.copylines import CopyLines
from megatrain_nb.notebook.forecast import plan_html
from megatrain_nb.notebook.lines import magic_line, python_lines
from megatrain_nb.notebook.surface import current_shell, has_kernel
from megatrain_nb.plan import catalogue
from megatrain_nb.plan.planner import make_plan
from megatrain_nb.plan.report import as_text
from megatrain_nb.runtime.forecast import (
    estimate,
    find_machine,
    find_shape,
    read_cache,
    session_directory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from megatrain_nb.codec.choice import Compression
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.plan import Plan
    from megatrain_nb.plan.shape import Shape

_THIS = "this machine"
_GIVEN = "the given one"
_LENGTHS = [2**power for power in range(6, 18)]
_COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
# The sliders for a machine's figures, and which they show.
_FIGURES = {
    "ram": "ram_bytes",
    "vram": "vram_bytes",
    "disk": "disk_bytes",
    "read": "read_bytes_per_s",
    "write": "write_bytes_per_s",
    "link": "onload_bytes_per_s",
}
_TOKENS = ("batch", "seq_len", "accumulation")
_LEFT = 8  # controls in the left column: what is trained, and how
_FP32, _PLAIN = "fp32", "as they are"
_REST_S = 0.2
_DISK_DIR = "/nvme/scratch"


def explore(what: Any = None, machine: Any = None, **choices: Any) -> Explorer:
    """Open the explorer.

    Parameters
    ----------
    what
        As for `estimate`; left out: a model of 8 billion parameters.
    machine
        As for `estimate`; left out: this one if it was probed, else one from the catalogue.
    **choices
        ``seq_len``, ``batch``, ``accumulation``, ``dtype``, ``optimizer_compression``, ``weight_compression``,
        ``max_ram_gb``, ``max_vram_gb``, ``max_disk_gb``: where the controls begin.

    Returns
    -------
    Explorer
        Displays as controls and a picture; ``explorer.plan`` is the plan that it shows.
    """
    return Explorer(what, machine, **choices)


class Explorer:
    """Controls, and the plan that follows from them.

    Attributes
    ----------
    plan
        What is shown now.
    redraw_seconds
        How long the last change took, from the control to the picture being sent.
    """

    def __init__(self, what: Any = None, machine: Any = None, **choices: Any) -> None:
        self._shapes: dict[str, Shape] = {}
        self._machines: dict[str, Machine] = {}
        model, named = self._take_model(what), self._take_machine(machine)
        self.plan: Plan = estimate(self._shape(model), self._machine(named), **choices)
        self.redraw_seconds = 0.0
        self._given = self.plan.choices
        self._moments = self._given.moments or _FP32
        self._weights = LOSSLESS if WEIGHTS in self._given.packed else _PLAIN
        self._model, self._named = model, named
        self._handle: Any = None
        self._controls: dict[str, Any] = {}
        self._filling = False
        self._later: asyncio.TimerHandle | None = None
        self._moved: dict[str, Any] = {}

    # -- what is chosen -----------------------------------------------------------------------------------

    def _take_model(self, what: Any) -> str:
        if what is None:
            return "llama-3.1-8b"
        shape = find_shape(what)
        if isinstance(what, str) and shape.name in catalogue.models():
            return shape.name
        self._shapes[shape.name] = shape
        return shape.name

    def _take_machine(self, machine: Any) -> str:
        if machine is None:
            found = read_cache(session_directory()) or read_cache(None)
            if found is None:
                return "rtx-4090"
            self._machines[_THIS] = found
            return _THIS
        found = find_machine(machine)
        if isinstance(machine, str):
            return found.name
        self._machines[_GIVEN] = found
        return _GIVEN

    def _shape(self, name: str) -> Shape:
        return self._shapes.get(name) or catalogue.model(name)

    def _machine(self, name: str) -> Machine:
        return self._machines.get(name) or catalogue.machine(name)

    # -- what is shown -------------------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        from IPython.display import display  # noqa: PLC0415

        if has_kernel(current_shell()):
            display(self._make_controls())
        self._handle = display(self._bundle(), raw=True, display_id=True)

    def __repr__(self) -> str:
        return as_text(self.plan)

    def _bundle(self, *, advice: bool = True) -> dict[str, str]:
        return {
            "text/html": plan_html(self.plan, advice=advice),
            "text/plain": as_text(self.plan, advice=advice),
        }

    def _make_controls(self) -> Any:
        import ipywidgets as widgets  # noqa: PLC0415 - slow to import

        window, choices = self.plan.choices.window, self.plan.choices
        machine = self.plan.machine
        wide = widgets.Layout(width="410px")
        style = {"description_width": "130px"}

        def choose(name: str, options: Any, value: Any, kind: Any = None) -> Any:
            make = kind or widgets.Dropdown
            return make(
                description=name,
                options=options,
                value=value,
                layout=wide,
                style=style,
            )

        def size(name: str, num_bytes: float, unit: str = "GB") -> Any:
            return widgets.FloatLogSlider(
                description=f"{name}, {unit}",
                value=_on_slider(num_bytes),
                base=10,
                min=-1,
                max=4.5,
                step=0.02,
                readout_format=".4g",
                layout=wide,
                style=style,
            )

        slider = widgets.SelectionSlider
        models = [*self._shapes, *catalogue.models()]
        machines = [*self._machines, *catalogue.machines()]
        controls = {
            "model": choose("model", models, self._model),
            "machine": choose("machine", machines, self._named),
            "dtype": choose(
                "dtype",
                ["float32", "bfloat16"],
                "bfloat16" if choices.bf16 else "float32",
            ),
            "moments": choose(
                "Adam's moments",
                list(dict.fromkeys([_FP32, LOSSLESS, *NAMES, self._moments])),
                self._moments,
            ),
            "weights": choose("weights on disk", [_PLAIN, LOSSLESS], self._weights),
            "seq_len": choose(
                "tokens in a row",
                _with(_LENGTHS, window.seq_len),
                window.seq_len,
                slider,
            ),
            "batch": choose(
                "rows at once", _with(_COUNTS, window.batch), window.batch, slider
            ),
            "accumulation": choose(
                "micro-batches",
                _with(_COUNTS, window.accumulation),
                window.accumulation,
                slider,
            ),
            "ram": size("RAM", choices.max_ram_bytes or machine.ram_bytes),
            "vram": size("device memory", choices.max_vram_bytes or machine.vram_bytes),
            "disk": size("disk", choices.max_disk_bytes or machine.disk_bytes),
            "read": size("disk read", machine.read_bytes_per_s, "GB/s"),
            "write": size("disk write", machine.write_bytes_per_s, "GB/s"),
            "link": size("link", machine.onload_bytes_per_s, "GB/s"),
        }
        self._controls = controls
        for name, control in controls.items():
            control.observe(self._listener(name), names="value")
        self._show_device(machine)
        self._copy = CopyLines(self._lines())
        left = widgets.VBox([controls[n] for n in list(controls)[:_LEFT]])
        right = widgets.VBox([controls[n] for n in list(controls)[_LEFT:]])
        grid = widgets.HBox([left, right], layout=widgets.Layout(flex_flow="row wrap"))
        return widgets.VBox([grid, self._copy.widget])

    def _listener(self, name: str) -> Callable[[Any], None]:
        def changed(_: Any) -> None:
            if not self._filling:
                self._change(name)

        return changed

    def _change(self, name: str) -> None:
        start = time.perf_counter()
        if name == "machine":
            self._given = replace(
                self._given,
                max_ram_bytes=None,
                max_vram_bytes=None,
                max_disk_bytes=None,
            )
            self._named = self._controls["machine"].value
            for size in _FIGURES:
                self._moved.pop(size, None)
            self._fill(self._machine(self._named))
        else:
            self._moved[name] = self._controls[name].value
        self.plan = self._planned()
        self._draw()
        self.redraw_seconds = time.perf_counter() - start

    def _draw(self) -> None:
        """Show the plan at once; what to change costs more plans, and comes when no slider moves."""
        if self._later is not None:
            self._later.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nobody would come back to it
            self._show()
        else:
            self._show(advice=False)
            self._later = loop.call_later(_REST_S, self._show)
        self._copy.show(self._lines())

    def _show(self, *, advice: bool = True) -> None:
        if self._handle is not None:
            self._handle.update(self._bundle(advice=advice), raw=True)

    def _planned(self) -> Plan:
        """Return the plan with what was moved; a slider that was not stands near its value, not at it."""
        moved, base = self._moved, self._machine(self._named)
        window = replace(
            self._given.window,
            **{name: moved[name] for name in _TOKENS if name in moved},
        )
        choices = replace(self._given, window=window)
        if "dtype" in moved:
            choices = replace(choices, bf16=moved["dtype"] == "bfloat16")
        compression, packed = self._storage()
        choices = replace(choices, compression=compression, packed=packed)
        budgets = {
            f"max_{name}_bytes": round(moved[name] * 1e9)
            for name in ("ram", "vram", "disk")
            if name in moved
        }
        shape = self._shape(moved.get("model", self._model))
        return make_plan(shape, machine_with(base, moved), replace(choices, **budgets))

    def _storage(self) -> tuple[Compression, frozenset[str]]:
        """Return in which codecs moments are, and what is packed on disk."""
        moments = self._moved.get("moments", self._moments)
        asked: object = False if moments == _FP32 else moments
        if moments == self._moments and self._given.compression:
            asked = self._given.compression  # by pattern, maybe
        weights = self._moved.get("weights", self._weights)
        return parse_storage(asked, weights == LOSSLESS and LOSSLESS)

    def _fill(self, machine: Machine) -> None:
        """Let the sliders show another machine's figures."""
        self._filling = True
        try:
            for name, field in _FIGURES.items():
                self._controls[name].value = _on_slider(getattr(machine, field))
        finally:
            self._filling = False
        self._show_device(machine)

    def _show_device(self, machine: Machine) -> None:
        for name in ("vram", "link"):
            self._controls[name].disabled = machine.in_place

    def _lines(self) -> str:
        directory = _session_directory()
        return f"{magic_line(self.plan, directory)}\n\n{python_lines(self.plan, directory)}"


def machine_with(base: Machine, moved: Mapping[str, Any]) -> Machine:
    """Return a machine with the figures that sliders were moved to, in GB and GB/s; a budget may exceed what it has."""
    figures: dict[str, Any] = {}
    if "read" in moved or "write" in moved:
        read = moved["read"] * 1e9 if "read" in moved else base.read_bytes_per_s
        write = moved["write"] * 1e9 if "write" in moved else base.write_bytes_per_s
        # Both at once change as much as each alone does.
        before = 1 / base.read_bytes_per_s + 1 / base.write_bytes_per_s
        mixed = base.mixed_bytes_per_s * before / (1 / read + 1 / write)
        figures |= {
            "read_bytes_per_s": read,
            "write_bytes_per_s": write,
            "mixed_bytes_per_s": mixed,
        }
    if "link" in moved:
        figures |= dict.fromkeys(
            ("onload_bytes_per_s", "offload_bytes_per_s"), moved["link"] * 1e9
        )
    for name in ("ram", "disk") if base.in_place else ("ram", "vram", "disk"):
        size = round(moved.get(name, 0) * 1e9)
        if size > getattr(base, f"{name}_bytes"):
            figures[f"{name}_bytes"] = size
    return base.changed(**figures)


def _with(options: list[int], value: int) -> list[int]:
    return sorted({*options, value})


def _on_slider(num_bytes: float) -> float:
    """Return gigabytes, not less than where a slider begins."""
    return max(num_bytes / 1e9, 0.1)


def _session_directory() -> str:
    found = session_directory()
    return _DISK_DIR if found is None else str(found)
