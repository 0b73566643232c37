"""Buttons, runs in the background, replays; and that nothing is left afterwards."""

from __future__ import annotations

import gc
import html
import json
import threading
import time
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import megatrain_nb as mt
from megatrain_nb.notebook import chart, trainer
from megatrain_nb.notebook.buttons import NO_ANSWER, Subshells, why_no_buttons
from megatrain_nb.notebook.snapshot import Snapshot
from megatrain_nb.notebook.surface import (
    HtmlSurface,
    TextSurface,
    WidgetSurface,
    display_mode,
    open_surface,
)
from megatrain_nb.notebook.view import View, Watch
from megatrain_nb.runtime.callbacks import StepResult
from megatrain_nb.runtime.recorder import Recorder
from tests.notebook.test_magics import INIT, run, text_displays
from tests.notebook.test_pictures import full_snapshot, make_layout

if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from pathlib import Path


def until(found: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def widgets_alive() -> int:
    ipywidgets = pytest.importorskip("ipywidgets")
    return len(ipywidgets.widgets.widget._instances)


@pytest.fixture
def watch(shell: Any, fake: types.ModuleType) -> Watch:
    run(shell, f"s = %megatrain {INIT}")
    watch = Watch(shown=True)
    watch.follow(fake.current)
    return watch


def test_buttons_ask_and_fields_are_checked(watch: Watch) -> None:
    surface = WidgetSurface(watch, Subshells(None))
    panel: Any = surface._panel
    controls: Any = watch.controls
    panel.pause.click()
    assert controls.paused
    surface.show(watch.snapshot())
    assert panel.pause.description == "Resume"
    panel.pause.click()
    assert not controls.paused
    panel.save.click()
    assert controls.said == "saving after this step"
    panel.rate.value = 0.5
    assert controls.lr_factor == 0.5
    panel.logging.value = 7
    assert controls.logging_steps == 7
    panel.logging.value = 0
    assert controls.logging_steps is None
    panel.stop.click()
    assert controls.stopping
    watch.state = "training"
    frontend_draws(panel)
    surface.show(watch.snapshot())
    assert panel.stop.disabled
    assert not panel.pause.disabled
    surface.finish(watch.snapshot())
    watch.follow(None)


def test_fields_show_what_is_in_force(watch: Watch) -> None:
    surface = WidgetSurface(watch, Subshells(None))
    panel: Any = surface._panel
    controls: Any = watch.controls
    controls.lr_factor = 0.25  # of an earlier training, or from another cell
    surface.show(watch.snapshot())
    assert panel.rate.value == 0.25
    assert panel.logging.layout.display == "none"  # nobody logs in a plain loop
    controls.usual_logging_steps = 500
    surface.show(watch.snapshot())
    assert panel.logging.layout.display is None
    seen = []
    for asked in (None, 5, 500):  # None: shown, and not asked for
        if asked:
            panel.logging.value = asked
        surface.show(watch.snapshot())
        seen.append((panel.logging.value, controls.logging_steps))
    assert seen == [(500, None), (5, 5), (500, None)]
    surface.clear()
    watch.follow(None)


def test_twenty_runs_leave_nothing(
    shell: Any, fake: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "widget")
    run(shell, f"s = %megatrain {INIT}")

    def once(number: int) -> None:
        how = "train --background"
        assert run(shell, f"%%megatrain {how}\ns.train(3)").success
        runs = shell.run_line_magic("megatrain", "runs")
        runs[number].wait()

    once(1)
    gc.collect()
    threads, widgets = set(threading.enumerate()), widgets_alive()
    for number in range(2, 21):
        once(number)
    gc.collect()
    assert widgets_alive() == widgets
    until(lambda: set(threading.enumerate()) <= threads)
    assert fake.current.callbacks == []
    assert not fake.current.shown
    assert len(shell.run_line_magic("megatrain", "runs")) <= 6


def test_background_returns_a_run_at_once(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    result = run(shell, "%%megatrain train --background\ns.train()")
    job, session = result.result, shell.user_ns["s"]
    # Steps take 12 ms: less than a second of training, however slow the machine is.
    assert session.step < 80
    assert job.running
    until(lambda: job.status().num_done >= 2)
    assert repr(job).startswith("<Run Step ")
    job.pause()
    until(lambda: session.controls.waiting)
    paused_at = session.step
    assert job.status().state == "paused"
    time.sleep(0.2)
    assert session.step == paused_at
    job.save("somewhere")
    until(lambda: bool(session.saved))
    before = len(shell.display_pub.outputs)
    job.view()  # opened in the middle: it begins with what is known
    assert len(shell.display_pub.outputs) > before
    assert not run(shell, "%%megatrain\n1").success  # one at a time
    job.stop()
    assert job.wait() == f"trained to step {session.step}"
    assert job.status().state == "stopped"
    assert text_displays(shell)[-1].startswith(
        f"Step {session.step} (stopped, as asked"
    )
    with pytest.raises(mt.SessionError, match="has ended"):
        job.stop()
    before = len(shell.display_pub.outputs)
    job.view()
    assert len(shell.display_pub.outputs) == before + 1


def test_several_views_follow_one_run(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    job = run(shell, "%%megatrain train --background\ns.train()").result
    until(lambda: job.status().num_done >= 2)
    job.view()
    job.view()
    before = len(shell.display_pub.outputs)
    time.sleep(0.8)
    drawn = shell.display_pub.outputs[before:]
    ids = [output["transient"]["display_id"] for output in drawn]
    assert len(set(ids)) == 3
    assert all(ids.count(each) >= 2 for each in set(ids))
    job.stop()
    job.wait()
    last = {
        output["transient"]["display_id"]: output["data"]["text/plain"]
        for output in shell.display_pub.outputs
    }
    assert len(set(last.values())) == 1  # all end with the same summary


def test_a_second_session_begins_anew(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    first = run(shell, "%%megatrain train --background\ns.train(30)").result
    first.wait()
    recorder = shell.user_ns["s"].recorder
    run(shell, f"s = %megatrain {INIT}")
    second = run(shell, "%%megatrain train --background\ns.train(4)").result
    second.wait()
    assert len(recorder.rows()) == 30
    assert [row.step for row in shell.user_ns["s"].recorder.rows()] == [1, 2, 3, 4]
    assert first.status().num_done == 30
    assert str(second.status()).startswith("Step 4 of 4 (done)")
    before = first.status().elapsed_s
    assert first.status().elapsed_s == before  # its time stands still


def test_a_second_session_in_the_same_cell_begins_anew(
    shell: Any, watch: Watch, fake: types.ModuleType
) -> None:
    """A plain loop says of no step which training it belongs to."""
    first = fake.current
    first.train(3, told=False)
    assert watch.snapshot().num_done == 3
    run(shell, f"s = %megatrain {INIT}")
    watch.follow(fake.current)
    assert first.callbacks == []
    assert watch.snapshot().rows == []
    fake.current.train(2, told=False)
    snap = watch.snapshot()
    assert (snap.num_done, [row.step for row in snap.rows]) == (2, [1, 2])
    watch.follow(None)


def test_what_was_said_of_an_earlier_run_is_not_said_again(
    watch: Watch, fake: types.ModuleType
) -> None:
    fake.current.controls.save("out")
    assert watch.snapshot().said == "saving after this step"
    watch.follow(None)
    assert watch.snapshot().said == "saving after this step"
    another = Watch(shown=True)
    another.follow(fake.current)
    assert another.snapshot().said == ""
    another.follow(None)


@pytest.mark.parametrize(
    ("assumed", "probed"), [((), (3e9, 1e9)), (("read_bytes_per_s",), None)]
)
def test_what_was_probed_of_the_disk_is_known(
    shell: Any,
    fake: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    assumed: tuple[str, ...],
    probed: Any,
) -> None:
    """Read and written apart; what is only assumed is no measurement."""
    asked: list[Path] = []
    machine = SimpleNamespace(
        assumed=assumed, read_bytes_per_s=3e9, write_bytes_per_s=1e9
    )

    def read_cache(path: Path) -> Any:
        asked.append(path)
        return machine

    monkeypatch.setattr("megatrain_nb.runtime.forecast.read_cache", read_cache)
    run(shell, f"s = %megatrain {INIT}")
    watch = Watch(shown=True)
    watch.follow(fake.current)
    assert watch.snapshot().probed == probed
    assert asked == [fake.current.preflight.path]
    watch.follow(None)


def test_buttons_wait_for_a_session(shell: Any, fake: types.ModuleType) -> None:
    watch = Watch(shown=True)
    surface = WidgetSurface(watch, Subshells(None))
    panel: Any = surface._panel
    surface.show(watch.snapshot())
    frontend_draws(panel)
    surface.show(watch.snapshot())
    assert panel.pause.disabled
    assert panel.rate.disabled
    run(shell, f"s = %megatrain {INIT}")
    watch.follow(fake.current)
    surface.show(watch.snapshot())
    assert not panel.pause.disabled
    assert not panel.stop.disabled
    surface.clear()
    assert surface._panel is None
    watch.follow(None)


def test_why_there_are_no_buttons(
    shell: Any, fake: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ipykernel = pytest.importorskip("ipykernel")
    assert why_no_buttons(awaited=True) == ""
    assert "%%megatrain train on the cell's first line" in why_no_buttons(awaited=False)
    monkeypatch.setattr(ipykernel, "version_info", (6, 31, 0))
    monkeypatch.setattr(ipykernel, "__version__", "6.31.0")
    assert "ipykernel 6.31.0 answers only after" in why_no_buttons(awaited=True)
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "widget")
    run(shell, f"s = %megatrain {INIT}")
    assert run(shell, "%%megatrain\ns.train(60)").success  # this shell does not await
    pages = [output["data"]["text/html"] for output in shell.display_pub.outputs]
    assert "no buttons here" in pages[0]
    assert "no buttons here" not in pages[-1]  # it is over: nothing to press


def make_kernel(subshells: list[str], **more: Any) -> Any:
    manager = SimpleNamespace(list_subshell=lambda: subshells)
    channel = SimpleNamespace(manager=manager)
    return SimpleNamespace(kernel=SimpleNamespace(shell_channel_thread=channel, **more))


def test_widgets_are_drawn_for_no_request() -> None:
    request: ContextVar[dict[str, str]] = ContextVar("request")
    request.set({"header": "of the busy cell"})
    subshells = Subshells(make_kernel(["1"], _shell_parent=request))
    assert subshells.possible
    assert subshells.there()
    assert subshells.context().run(request.get) == {}
    assert request.get() == {"header": "of the busy cell"}
    assert not Subshells(make_kernel([], _shell_parent=request)).there()
    assert not Subshells(make_kernel(["1"])).possible  # another ipykernel
    other: Any = SimpleNamespace(kernel=SimpleNamespace(shell_channel_thread=None))
    assert not Subshells(other).possible  # ipykernel 6
    assert not Subshells(None).possible


def test_buttons_are_grey_until_a_click_would_be_read(
    watch: Watch, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: ContextVar[dict[str, str]] = ContextVar("request")
    made: list[str] = []
    subshells = Subshells(make_kernel(made, _shell_parent=request))
    surface = WidgetSurface(watch, subshells, hint="no buttons here: why")
    panel: Any = surface._panel
    surface.show(watch.snapshot())
    assert panel.stop.disabled
    assert panel.pause.disabled
    assert not panel._unseen.children  # the answer would wait for the cell
    made.append("1")
    surface.show(watch.snapshot())
    assert panel._unseen.children
    assert panel.stop.disabled  # a subshell alone proves nothing
    before = widgets_alive()
    for _ in range(4):
        monkeypatch.setattr(surface, "_next_ask_s", 0.0)
        surface.show(watch.snapshot())
    assert widgets_alive() == before
    frontend_draws(panel)
    surface.show(watch.snapshot())
    assert not panel.stop.disabled
    assert not panel.pause.disabled
    monkeypatch.setattr(surface, "_patience_ends_s", 0.0)
    surface.show(watch.snapshot())
    assert surface._panel is panel
    surface.finish(watch.snapshot())
    assert "no buttons" not in shell.display_pub.outputs[-1]["data"]["text/html"]
    watch.follow(None)


@pytest.mark.parametrize("hint", ["", "no buttons here: why"])
def test_where_nothing_answers_there_are_no_widgets(
    watch: Watch, shell: Any, monkeypatch: pytest.MonkeyPatch, hint: str
) -> None:
    before = widgets_alive()
    surface = WidgetSurface(watch, Subshells(shell), hint=hint)
    surface.show(watch.snapshot())
    assert widgets_alive() > before
    monkeypatch.setattr(surface, "_patience_ends_s", 0.0)
    surface.show(watch.snapshot())
    assert widgets_alive() == before
    shown = shell.display_pub.outputs[-1]["data"]["text/html"]
    assert html.escape(hint or NO_ANSWER) in shown
    surface.finish(watch.snapshot())
    assert "no buttons" not in shell.display_pub.outputs[-1]["data"]["text/html"]
    watch.follow(None)


def frontend_draws(panel: Any) -> None:
    """Do what a frontend does once it has drawn the widget that is not seen."""
    panel._asking.set_state({"_view_count": 1})


@pytest.mark.parametrize(
    ("error", "interrupted", "stopped", "state"),
    [
        (None, False, False, "done"),
        (None, False, True, "stopped"),
        (KeyboardInterrupt(), False, True, "stopped"),  # a plain loop, on Stop
        (KeyboardInterrupt(), False, False, "interrupted"),  # session.stop()
        (KeyboardInterrupt(), True, False, "interrupted"),
        (KeyboardInterrupt(), True, True, "interrupted"),
        (None, True, False, "interrupted"),
        (ValueError("no"), True, True, "failed"),
        (ValueError("no"), False, False, "failed"),
    ],
)
def test_how_a_run_ended(
    watch: Watch, error: Any, interrupted: bool, stopped: bool, state: str
) -> None:
    assert watch.controls is not None
    if stopped:
        watch.controls.stop()
    watch.controls.pause()
    watch.end(error, interrupted=interrupted)
    assert watch.state == watch.snapshot().state == state
    assert watch.snapshot().said == ("ValueError: no" if state == "failed" else "")
    assert not watch.controls.stopping
    assert not watch.controls.paused  # the next training starts at once
    watch.follow(None)


def test_a_view_is_drawn_four_times_a_second_at_most(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [time.perf_counter()]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.thread_time", lambda: 0.0)
    drawn = []
    surface = SimpleNamespace(
        period_s=HtmlSurface.period_s, show=lambda _: drawn.append(clock[0])
    )
    view = View(watch, lambda: cast("Any", surface))
    clock[0] += 1.0
    for _ in range(1000):
        view.refresh()
        clock[0] += 0.01
    assert 36 <= len(drawn) <= 40  # in ten seconds
    assert min(np.diff(drawn)) > 0.249
    watch.follow(None)


def test_a_picture_that_takes_long_comes_less_often(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten milliseconds of CPU each: one a second, so that drawing takes a hundredth of the time."""
    clock, cpu = [time.perf_counter()], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.thread_time", lambda: cpu[0])
    drawn = []

    def show(_: Snapshot) -> None:
        drawn.append(clock[0])
        cpu[0] += 0.01

    surface = SimpleNamespace(period_s=HtmlSurface.period_s, show=show)
    view = View(watch, lambda: cast("Any", surface))
    clock[0] += 1.0
    for _ in range(1000):
        view.refresh()
        clock[0] += 0.01
    assert min(np.diff(drawn)[1:]) > 0.99  # but for the first one, which imports
    assert 10 <= len(drawn) <= 11
    watch.follow(None)


def test_the_first_picture_comes_half_a_second_after_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    drawn = []
    surface = SimpleNamespace(
        period_s=HtmlSurface.period_s, show=lambda _: drawn.append(clock[0])
    )
    view = View(Watch(shown=True), lambda: cast("Any", surface))
    while not drawn:
        view.refresh()
        clock[0] += 0.05
        assert clock[0] < 1
    assert drawn[0] > 0.3  # a cell that trains nothing shows nothing


def test_text_comes_at_sensible_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    surface = TextSurface()
    surface.show(Snapshot(doing="line 2: x"))
    surface.show(Snapshot(state="training", elapsed_s=1.0))
    assert capsys.readouterr().out == ""  # nothing trains, or there is nothing to tell
    surface.show(Snapshot(state="training", elapsed_s=11.0))
    assert "Step 0: 11 s elapsed" in capsys.readouterr().out
    periods = []
    for elapsed_s in (1.0, 1000.0, 100_000.0):
        surface.show(Snapshot(state="training", elapsed_s=elapsed_s, num_done=1))
        periods.append(surface.period_s)
    assert periods == [10.0, 20.0, 60.0]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_terminal_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    opened = open_surface("text", Watch(shown=True), awaited=False, returns=False)
    assert opened is not None
    surface = opened()
    for state in ("waiting", "training", "training", "done"):
        (surface.finish if state == "done" else surface.show)(Snapshot(state=state))
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    assert shown.rstrip().endswith("Step 0 (done): 0 s elapsed")


def test_an_error_in_the_background_is_told_and_raised_by_wait(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    body = "s.train(2)\n1 / 0"
    job = run(shell, f"%%megatrain train --background\n{body}").result
    with pytest.raises(ZeroDivisionError):
        job.wait()
    assert job.status().state == "failed"
    assert "division by zero" in shell.display_pub.outputs[-1]["data"]["text/html"]


def test_stop_ends_a_cell_without_an_error(
    shell: Any, fake: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"s = %megatrain {INIT}")
    threading.Timer(0.3, fake.current.controls.stop).start()
    result = run(shell, "%%megatrain\ns.train()")
    assert result.success
    assert "(stopped, as asked" in capsys.readouterr().out
    assert not fake.current.controls.stopping
    assert run(shell, "%%megatrain\ns.train(2)").success


def test_display_is_chosen_by_option_before_the_environment(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    assert run(shell, "%%megatrain train --display none\ns.train(5);").success
    assert shell.display_pub.outputs == []
    assert display_mode(shell) == "html"
    assert not run(shell, "%%megatrain train --dispaly none\n1").success
    assert "did you mean '--display'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("display", "quiet", "mode"),
    [
        (None, False, "html"),
        (None, True, "none"),  # TrainingArguments(disable_tqdm=True)
        ("auto", True, "none"),
        ("html", True, "html"),  # what is asked for counts more
        ("none", False, "none"),
    ],
)
def test_a_plain_cell_is_quiet_where_that_is_asked_for(
    shell: Any,
    monkeypatch: pytest.MonkeyPatch,
    display: str | None,
    quiet: bool,
    mode: str,
) -> None:
    monkeypatch.delenv("MEGATRAIN_DISPLAY", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    for module in ("trainer", "surface"):
        monkeypatch.setattr(f"megatrain_nb.notebook.{module}.has_kernel", bool)
    assert trainer._mode(display, quiet=quiet) == mode


def test_replay_shows_the_page_and_the_chart(
    shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"recording": {"format": 1}}]
    recorder = Recorder(write=lines.append)
    recorder.on_layout(make_layout())
    recorder.on_train_begin(3)
    for step in (1, 2, 3):
        recorder.on_step_end(
            StepResult(
                step=step,
                loss=4.0 - step,
                grad_norm=1,
                tokens=5,
                seconds={"compute": 1.0},
            )
        )
    recorder.on_train_end()
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))

    assert run(shell, f"%megatrain replay {path}").success
    first, second = (output["data"] for output in shell.display_pub.outputs)
    assert first["text/plain"].startswith("Step 3 of 3 (from a recording): loss 1.000")
    assert second[chart.MIME]["data"][0]["y"] == [3.0, 2.0, 1.0]
    assert not run(shell, f"%megatrain replay {tmp_path}/none").success
    assert "cannot read a recording" in capsys.readouterr().err


def test_replay_without_a_file_shows_what_the_session_keeps(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(shell, "%megatrain replay").success
    assert "no session is open" in capsys.readouterr().err
    run(shell, f"s = %megatrain {INIT}")
    assert not run(shell, "%megatrain replay").success
    assert "nobody has followed this session" in capsys.readouterr().err
    assert run(shell, "%%megatrain train --display html\ns.train(3);").success
    shell.display_pub.outputs.clear()
    assert run(shell, "%megatrain replay").success
    shown = shell.display_pub.outputs[0]["data"]["text/plain"]
    assert shown.startswith("Step 3 of 3 (the last training of the open session): loss")


def test_the_chart_is_a_plotly_figure() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    figure = go.Figure(chart.figure_fields(full_snapshot()))
    assert len(figure.data) >= 10
    bundle = chart.bundle(full_snapshot())
    assert set(bundle) == {chart.MIME, "text/html", "text/plain"}
    for loaded in ("<script", "http", "src="):
        assert loaded not in json.dumps(bundle)
