from __future__ import annotations

import ast
import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest
from plotly.graph_objects import Figure

import megatrain_nb as mt
from megatrain_nb.notebook import explore as explore_module
from megatrain_nb.notebook import forecast
from megatrain_nb.notebook.complete import candidates_for
from megatrain_nb.notebook.explore import Explorer
from megatrain_nb.notebook.lines import magic_line, python_lines
from megatrain_nb.notebook.magics import _COMMANDS, MegatrainMagics
from megatrain_nb.notebook.parser import COMMANDS, parse_line
from megatrain_nb.runtime.forecast import cache_path
from megatrain_nb.units import parse_size

if TYPE_CHECKING:
    from pathlib import Path


class Screen:
    """Stands for a display handle; keeps what it was given last."""

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self.times = 0

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown = bundle
        self.times += 1


@pytest.fixture
def explorer() -> Explorer:
    found = Explorer("llama-3.2-1b", "rtx-4090", seq_len=1024, accumulation=4)
    found._make_controls()
    found._handle = Screen()
    return found


def test_each_control_changes_the_plan(explorer: Explorer) -> None:
    changes: dict[str, Any] = {
        "model": "qwen3-8b",
        "dtype": "bfloat16",
        "moments": "4bit",
        "weights": "lossless",
        "seq_len": 4096,
        "batch": 4,
        "accumulation": 16,
        "ram": 30.0,
        "vram": 12.0,
        "disk": 1000.0,
        "read": 3.0,
        "write": 1.0,
        "link": 12.0,
        "machine": "h100",
    }
    assert changes.keys() == explorer._controls.keys()
    for times, (name, value) in enumerate(changes.items(), start=1):
        before = explorer.plan
        explorer._controls[name].value = value
        assert explorer.plan is not before, name
        assert explorer._handle.times == times
        assert explorer._handle.shown["text/plain"] == str(explorer.plan)
    assert explorer.plan.machine.vram_bytes == 80 * 10**9
    assert explorer.plan.choices.bf16
    assert explorer.redraw_seconds > 0


def test_a_machine_without_a_device_has_no_device_controls(explorer: Explorer) -> None:
    assert not explorer._controls["vram"].disabled
    explorer._controls["machine"].value = "cpu-server"
    assert explorer._controls["vram"].disabled
    assert explorer.plan.machine.in_place


def test_the_lines_do_what_is_shown(explorer: Explorer) -> None:
    explorer._controls["ram"].value = 24.0
    explorer._controls["dtype"].value = "bfloat16"
    explorer._controls["moments"].value = "2bit"
    line = magic_line(explorer.plan)
    args = parse_line(line.removeprefix("%megatrain "))
    assert args.command == "init"
    assert parse_size(args.max_ram) == explorer.plan.choices.max_ram_bytes
    assert args.max_vram is explorer.plan.choices.max_vram_bytes is None
    code = python_lines(explorer.plan)
    ast.parse(code)
    assert f'max_ram_gb="{args.max_ram}"' in code
    assert "torch.bfloat16" in code
    assert args.compress == "2bit"
    assert 'optimizer_compression="2bit"' in code
    assert line in explorer._copy.widget.text


def test_what_is_packed_and_what_goes_by_pattern_is_in_the_lines() -> None:
    rules = {"model.layers.0": False, "*": "4bit"}
    found = Explorer("llama-3.2-1b", "rtx-4090", optimizer_compression=rules)
    found._make_controls()
    found._handle = Screen()
    assert found.plan.choices.compression.by_pattern
    code = python_lines(found.plan)
    ast.parse(code)
    assert f"optimizer_compression={rules!r}" in code
    assert "--compress" not in magic_line(found.plan).splitlines()[0]
    given = found.plan.choices.compression
    found._controls["moments"].value = "lossless"
    found._controls["weights"].value = "lossless"
    args = parse_line(magic_line(found.plan).removeprefix("%megatrain "))
    assert (args.compress, args.compress_weights) == ("lossless", "lossless")
    assert 'weight_compression="lossless"' in python_lines(found.plan)
    assert found.plan.choices.packed == {"moments", "weights"}
    found._controls["moments"].value = str(given)
    assert found.plan.choices.compression == given


def test_this_machine_is_the_one_that_was_probed_for_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "offload"
    machines = {
        directory: mt.estimate("gpt2", "h100").machine.changed(name="with the disk"),
        None: mt.estimate("gpt2", "h100").machine.changed(name="without"),
    }
    for where, machine in machines.items():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        path = cache_path(where)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(machine.to_json())
    assert Explorer("gpt2").plan.machine.name == "without"
    monkeypatch.setattr(explore_module, "session_directory", lambda: directory)
    assert Explorer("gpt2").plan.machine.name == "with the disk"


def test_what_to_change_comes_when_no_slider_moves(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explore_module, "_REST_S", 0.01)
    screen = explorer._handle

    async def move() -> list[Any]:
        explorer._controls["accumulation"].value = 8
        explorer._controls["accumulation"].value = 2
        first = [screen.times, "to do" in screen.shown["text/plain"]]
        assert "advice" not in explorer.plan.__dict__  # not even thought of
        await asyncio.sleep(0.2)
        return [*first, screen.times, "to do" in screen.shown["text/plain"]]

    assert asyncio.run(move()) == [2, False, 3, True]
    assert "to do" in screen.shown["text/html"]


def test_what_was_not_moved_stays_assumed(explorer: Explorer) -> None:
    explorer._controls["seq_len"].value = 2048
    assert explorer.plan.machine.assumed >= {"read_bytes_per_s", "ram_bytes"}
    explorer._controls["read"].value = 3.0
    assert "read_bytes_per_s" not in explorer.plan.machine.assumed
    assert "onload_bytes_per_s" in explorer.plan.machine.assumed


def test_any_size_is_parsed_back() -> None:
    for size in (24 * 10**9, 24_000_000_001, 51_200_000_000, 123_456_789):
        plan = mt.estimate("gpt2", "cpu-desktop", max_ram_gb=size / 1e9)
        args = parse_line(magic_line(plan).removeprefix("%megatrain "))
        assert parse_size(args.max_ram) == plan.choices.max_ram_bytes


def test_the_picture_stays_in_a_notebook_that_is_not_trusted(
    explorer: Explorer,
) -> None:
    html = forecast.plan_html(explorer.plan)
    assert not re.search(r"<(script|svg|style|button|iframe)", html)
    for word in ("fits", "compute", "disk", "all in one memory", "Bound by"):
        assert word in html
    assert html.count("model.layers.") == 16  # a cell for each layer


def test_a_picture_is_light() -> None:
    """A slider moves it: an image for each lane, no box for each of its columns."""
    plan = mt.estimate("llama-3.1-8b", "rtx-4090")
    timeline = forecast.timeline_html(plan)
    lanes = [lane for lane, busy in plan.simulated.busy_s.items() if busy]
    assert timeline.count("<img") == len(lanes) == 4
    for told in ("compute ", "disk ", "link ", "AdamW "):
        assert f'<img alt="{told}' in timeline
    html = forecast.plan_html(plan, advice=False)
    assert html.count("<div") < 150
    assert len(html) < 30_000


def test_the_strip_says_what_stays() -> None:
    plan = mt.estimate("llama-3.2-1b", "cpu-desktop", max_ram_gb=10, seq_len=128)
    strip = forecast.strip_html(plan)
    resident = plan.residency
    assert strip.count("weights stay") >= bool(resident.weights - resident.grads)
    assert strip.count('title="') == len(plan.shape.spec().blocks)


def test_what_lives_on_the_device_is_shown() -> None:
    plan = mt.estimate("llama-3.1-8b", "rtx-4090", dtype="bfloat16")
    assert plan.tail
    there = sum(plan.tail.issuperset(block.packs) for block in plan.spec.blocks)
    strip = forecast.strip_html(plan)
    # One for each block, and one in the legend.
    assert strip.count("lives on the device") == there + 1
    assert "gradients and moments that live there" in forecast.plan_html(plan)
    saves = plan.tail_saves
    assert saves["disk to ram"] > 0 < saves["device to ram"]
    assert f"{there} of {len(plan.spec.blocks)} blocks live there" in str(plan)


def test_a_figure_has_tiers_and_lanes() -> None:
    plan = mt.estimate("llama-3.2-1b", "rtx-4090", seq_len=512, max_ram_gb=12)
    figure = plan.figure()
    assert isinstance(figure, Figure)
    names = {trace.name for trace in figure.data}
    assert {"compute", "disk", "link", "Python and torch"} <= names
    bars = [trace for trace in figure.data if trace.type == "bar"]
    device = sum(trace.x[0] for trace in bars if trace.y[0] == "device memory")
    assert device == pytest.approx(
        100 * plan.peak_vram_bytes / plan.limits["vram"], rel=1e-6
    )


def test_what_does_not_fit_is_shown_as_well() -> None:
    plan = mt.estimate("llama-3.1-405b", "rtx-3060")
    html = forecast.plan_html(plan)
    assert "does not fit" in html
    assert "(too much)" in html


def test_the_magics_take_names() -> None:
    args = parse_line("explore qwen3-8b h100")
    assert (args.model, args.machine) == ("qwen3-8b", "h100")
    assert parse_line("explore").model is None
    assert parse_line("probe --refresh").refresh
    assert not parse_line("probe").refresh
    assert candidates_for("explore qwen3-8")[1] == ["qwen3-8b"]
    assert "h100" in candidates_for("explore qwen3-8b ")[1]


def test_a_machine_shows_itself() -> None:
    machine = mt.estimate("gpt2", "rtx-4090").machine
    html = machine._repr_mimebundle_()["text/html"]
    for word in ("disk, read", "link to the device", "assumed"):
        assert word in html


def test_every_command_is_carried_out() -> None:
    known = {
        command: getattr(MegatrainMagics, name) for command, name in _COMMANDS.items()
    }
    assert known.keys() == COMMANDS.keys()
