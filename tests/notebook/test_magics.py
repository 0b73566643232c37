"""In a shell without kernel: nothing can be awaited, so ``%%megatrain`` waits for its body."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.error import UsageError

from megatrain_nb.errors import SessionError
from megatrain_nb.notebook import cell as cell_module
from megatrain_nb.notebook.cell import Interrupted
from megatrain_nb.notebook.parser import overview

if TYPE_CHECKING:
    import types
    from pathlib import Path

INIT = "init --offload-dir /nvme/run --max-ram 2GB --device cpu"


def run(shell: Any, code: str) -> Any:
    return shell.run_cell(code)


def text_displays(shell: Any) -> list[str]:
    return [output["data"]["text/plain"] for output in shell.display_pub.outputs]


# ---------------------------------------------------------------- %megatrain


def test_init_opens_and_returns_a_session(
    shell: Any, fake: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shell, f"s = %megatrain {INIT}").success
    session = shell.user_ns["s"]
    assert session is fake.current
    assert session.options == {
        "offload_dir": session.options["offload_dir"],
        "max_vram_gb": None,
        "max_ram_gb": "2GB",
        "max_disk_gb": None,
        "optimizer_compression": False,
        "weight_compression": False,
        "device": "cpu",
        "crash_safe": None,
    }
    assert str(session.options["offload_dir"]) == "/nvme/run"
    assert capsys.readouterr().out == ""
    assert run(shell, f"%megatrain {INIT}").result is fake.current
    assert capsys.readouterr().out.count("<Session fake>") == 1
    assert run(shell, f"%megatrain {INIT};").result is None
    assert capsys.readouterr().out == ""


def test_checkpoints_and_resume(
    shell: Any, fake: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("checkpoints", "resume"):
        run(shell, f"%megatrain {line}")
        assert "no session is open" in capsys.readouterr().err
    run(shell, f"%megatrain {INIT};")
    run(shell, "found = %megatrain checkpoints")
    assert [each.label for each in shell.user_ns["found"]] == ["'step-4', step 4 of 9"]
    for line, expected in (
        ("resume", (None, False)),
        ("resume step-4 --weights-only", ("step-4", True)),
    ):
        run(shell, f"found = %megatrain {line}")
        assert shell.user_ns["found"] == expected
    run(shell, "%megatrain resume missing")
    assert "no checkpoint 'missing' in" in capsys.readouterr().err


def test_no_checkpoint_is_a_sentence_and_an_empty_list(
    shell: Any, fake: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"%megatrain {INIT};")
    fake.current.held.clear()
    capsys.readouterr()
    assert run(shell, "%megatrain checkpoints").result == []
    assert "no checkpoint in /nvme/run; " in capsys.readouterr().out
    run(shell, "found = %megatrain checkpoints")
    assert list(shell.user_ns["found"]) == []


def test_resume_remembers_the_directory(
    shell: Any,
    fake: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    run(shell, f"%megatrain init --offload-dir {directory};")
    options = fake.current.options
    fake.current.close()
    run(shell, "s = %megatrain resume")
    assert shell.user_ns["s"] is fake.current
    assert fake.current.options == options
    told = capsys.readouterr().out
    assert "last checkpoint: 'step-4', step 4 of 9. Run the cells" in told
    fake.current.close()
    directory.rmdir()
    run(shell, "%megatrain resume")
    assert "is not there any more; open another" in capsys.readouterr().err
    assert not directory.exists()


def test_clean_looks_at_the_last_directory_and_removes_what_is_named(
    shell: Any,
    fake: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for line in ("clean", "clean --remove"):
        run(shell, f"%megatrain {line}")
        assert "say which directory: %megatrain clean" in capsys.readouterr().err
    left = tmp_path / ".megatrain-probe-12"
    left.write_bytes(bytes(4096))
    run(shell, f"%megatrain init --offload-dir {tmp_path};")
    fake.current.close()
    run(shell, "%megatrain status")
    assert "or the last one again: %megatrain resume" in capsys.readouterr().err
    run(shell, "%megatrain clean --remove")
    assert "say which directory" in capsys.readouterr().err
    run(shell, "%megatrain clean")
    told = capsys.readouterr().out
    assert f"{tmp_path}: {left.name} would be removed, 4.10 kB" in told
    assert left.exists()
    run(shell, f"%megatrain clean --offload-dir {tmp_path} --remove")
    assert f"{left.name} removed, 4.10 kB" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_each_notebook_has_a_directory_of_its_own(
    shell: Any, fake: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two notebooks share what IPython remembers; a third one gets what was asked for last."""
    for notebook in ("a.ipynb", "b.ipynb"):
        (tmp_path / notebook).mkdir()
        monkeypatch.setenv("JPY_SESSION_NAME", notebook)
        run(shell, f"%megatrain init --offload-dir {tmp_path / notebook};")
        fake.current.close()
    for notebook, expected in (("a.ipynb", "a"), ("b.ipynb", "b"), ("c.ipynb", "b")):
        monkeypatch.setenv("JPY_SESSION_NAME", notebook)
        run(shell, "%megatrain resume;")
        found = str(fake.current.options["offload_dir"])
        assert found == str(tmp_path / f"{expected}.ipynb")
        fake.current.close()


def test_variables_and_home_are_expanded(
    shell: Any, fake: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/data/ada")
    shell.user_ns.update(where="~/my runs", ram="3GB")
    run(shell, "s = %megatrain init --offload-dir '{where}' --max-ram $ram")
    assert str(fake.current.options["offload_dir"]) == "/data/ada/my runs"
    assert fake.current.options["max_ram_gb"] == "3GB"


def test_compression_is_handed_on(shell: Any, fake: types.ModuleType) -> None:
    assert run(shell, f"s = %megatrain {INIT} --compress 4bit").success
    assert fake.current.options["optimizer_compression"] == "4bit"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("init --offload-dir /taken", "another process owns /taken; close it there"),
        ("init --offload-dir d --device abacus", "device='abacus' is not known"),
        ("init --offload-dir d --max-rma 3", "did you mean '--max-ram'?"),
        ("init --offload-dir d --compress 5bit", "invalid choice: '5bit'"),
        ("status", "no session is open; open one: %megatrain init"),
        ("satus", "did you mean 'status'?"),
    ],
)
def test_errors_are_one_line(
    shell: Any, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    result = run(shell, f"%megatrain {line}")
    assert isinstance(result.error_in_exec, UsageError)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("UsageError: ")
    assert captured.err.count("\n") == 1
    assert told in captured.err


def test_status_returns_the_object(shell: Any, fake: types.ModuleType) -> None:
    run(shell, f"s = %megatrain {INIT}")
    run(shell, "x = %megatrain status")
    assert shell.user_ns["x"] == fake.current.status()


def test_close(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, f"s = %megatrain {INIT}")
    run(shell, "%megatrain close")
    run(shell, "%megatrain close")
    assert shell.user_ns["s"].closed
    assert capsys.readouterr().out == "session closed\nno session is open\n"


@pytest.mark.parametrize("line", ["%megatrain", "%megatrain help", "%megatrain --help"])
def test_help(shell: Any, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run(shell, line).success
    assert capsys.readouterr().out == overview() + "\n"


def test_help_of_a_command(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shell, "%megatrain init --help").success
    assert "--max-vram SIZE" in capsys.readouterr().out


def test_question_mark_shows_the_same_help(shell: Any) -> None:
    bundle = shell.object_inspect_mime("%megatrain")
    assert all(line in bundle["text/plain"] for line in overview().splitlines())


# ---------------------------------------------------------- load and unload


def state_of(shell: Any) -> dict[str, Any]:
    return {
        "magics": {kind: set(m) for kind, m in shell.magics_manager.magics.items()},
        "registry": set(shell.magics_manager.registry),
        "transformers": len(shell.input_transformers_post),
        "cleanup": len(shell.input_transformers_cleanup),
        "matchers": len(shell.Completer.custom_matchers),
        "hooks": {name: len(hooks) for name, hooks in shell.events.callbacks.items()},
    }


def test_unload_leaves_nothing_and_reload_doubles_nothing(bare_shell: Any) -> None:
    manager = bare_shell.extension_manager
    before = state_of(bare_shell)
    manager.load_extension("megatrain_nb")
    loaded = state_of(bare_shell)
    assert loaded != before
    manager.reload_extension("megatrain_nb")
    assert state_of(bare_shell) == loaded
    sys.modules["megatrain_nb"].load_ipython_extension(bare_shell)
    assert state_of(bare_shell) == loaded
    manager.unload_extension("megatrain_nb")
    assert state_of(bare_shell) == before
    sys.modules["megatrain_nb"].unload_ipython_extension(bare_shell)
    assert state_of(bare_shell) == before


def test_loading_imports_neither_torch_nor_numba() -> None:
    code = (
        "import sys, IPython.core.magic as _, IPython.core.completer as _, time\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell(); start = time.perf_counter()\n"
        "shell.run_line_magic('load_ext', 'megatrain_nb')\n"
        "print(time.perf_counter() - start)\n"
        "heavy = {'torch', 'numba', 'numpy', 'ipywidgets', 'plotly'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1.0


# --------------------------------------------------------------- %%megatrain


def test_body_runs_in_the_users_namespace(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["a"] = 20
    result = run(shell, "%%megatrain train\nb = a + 1\nprint('b is', b)\nb * 2")
    assert result.result == 42
    assert shell.user_ns["b"] == 21
    out = capsys.readouterr().out
    assert "b is 21\n" in out
    assert out.count("42") == 1


def test_semicolon_silences(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shell, "%%megatrain\n42;").result is None
    assert capsys.readouterr().out == ""


def test_body_may_use_magics_and_await(shell: Any) -> None:
    body = "import asyncio\nx = %pwd\nawait asyncio.sleep(0)\nx"
    assert run(shell, f"%%megatrain\n{body}").result == os.getcwd()  # noqa: PTH109


def test_an_error_keeps_one_traceback_that_begins_in_the_cell(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(shell, "%%megatrain\nx = 1\n\ndef f():\n    return x / 0\n\nf()")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    out = capsys.readouterr().out
    assert out.count("Traceback (most recent call last)") == 1
    assert "----> 7 f()" in out
    assert "----> 5     return x / 0" in out
    assert "megatrain_nb" not in out


def test_a_syntax_error_shows_the_line_alone(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(shell, "%%megatrain\nx = 1\ny = 2 +* 3")
    assert not result.success
    out = capsys.readouterr().out
    assert "line 3" in out
    assert "y = 2 +* 3" in out
    assert "SyntaxError: invalid syntax" in out
    assert "megatrain_nb" not in out


def test_system_exit_ends_the_cell_only(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="To exit"):
        assert not run(shell, "%%megatrain\nraise SystemExit(3)").success
    assert run(shell, "1 + 1").result == 2


@pytest.mark.parametrize("line", ["now", "status"])
def test_cell_usage_errors(
    shell: Any, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert not run(shell, f"%%megatrain {line}\nx = 1").success
    assert "x" not in shell.user_ns
    assert capsys.readouterr().err.startswith("UsageError: %%megatrain takes 'train'")


@pytest.mark.parametrize("line", ["--help", "train --help", "train -h --background"])
def test_cell_help_runs_nothing(
    shell: Any, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert run(shell, f"%%megatrain {line}\nx = 1").success
    assert "x" not in shell.user_ns
    shown = capsys.readouterr().out
    assert shown.startswith("usage: %%megatrain train ")
    assert "--background" in shown
    assert run(shell, "%megatrain train --help").success
    assert capsys.readouterr().out == shown


def test_an_empty_cell_is_told_under_its_own_name(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(shell, "%%megatrain train").success
    assert capsys.readouterr().err.startswith(
        "UsageError: %%megatrain is a cell magic, but the cell body is empty"
    )


@pytest.mark.parametrize("asked", ["%megatrain init?", "%megatrain  init ??"])
def test_a_question_mark_after_a_command_shows_its_help(
    shell: Any, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    assert run(shell, asked).success
    assert capsys.readouterr().out.startswith("usage: %megatrain init ")


def test_without_a_session_one_line_says_how(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["SessionError"] = SessionError
    run(
        shell,
        "%%megatrain\nraise SessionError('no session is open;\\n%megatrain init')",
    )
    assert (
        capsys.readouterr().err == "UsageError: no session is open; %megatrain init\n"
    )


def test_with_a_session_a_session_error_keeps_its_traceback(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"s = %megatrain {INIT}")
    shell.user_ns["SessionError"] = SessionError
    run(shell, "%%megatrain\nraise SessionError('the model is closed')")
    out = capsys.readouterr().out
    assert "Traceback" in out
    assert "----> 2 raise SessionError" in out


# ------------------------------------------------------------------ the view


def test_html_view_is_one_display_updated_in_place(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    assert run(shell, "%%megatrain\ns.train(60)").success
    session = shell.user_ns["s"]
    assert session.shown_while_training
    assert not session.shown
    assert session.callbacks == []
    outputs = shell.display_pub.outputs
    assert 2 <= len(outputs) <= 5  # 0.6 s at four a second
    assert [output["update"] for output in outputs] == [False] + [True] * (
        len(outputs) - 1
    )
    assert len({output["transient"]["display_id"] for output in outputs}) == 1
    assert text_displays(shell)[-1].startswith("Step 60 of 60 (done): loss ")
    assert "<div" in outputs[-1]["data"]["text/html"]


def test_the_view_follows_a_session_that_the_body_opens(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    body = "import megatrain_nb as mt\ns = mt.init('a')\ns.train(30)\nt = mt.init('b')\nt.train(30)"
    assert run(shell, f"%%megatrain\n{body}").success
    assert shell.user_ns["s"].shown_while_training
    assert shell.user_ns["t"].shown_while_training
    assert not shell.user_ns["s"].shown
    assert not shell.user_ns["t"].shown
    assert text_displays(shell)[-1].startswith("Step 30")


def test_text_view_prints_few_lines(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"s = %megatrain {INIT}")
    run(shell, "%%megatrain\ns.train(20, seconds=0.05);")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[-1].startswith("Step 20 of 20 (done): loss ")
    assert shell.display_pub.outputs == []


def test_no_view(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "none")
    run(shell, f"s = %megatrain {INIT}")
    run(shell, "%%megatrain\ns.train(5);")
    assert capsys.readouterr().out == ""
    assert not shell.user_ns["s"].shown_while_training


def test_a_cell_that_trains_nothing_shows_nothing(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    run(shell, "%%megatrain\nx = 1")
    assert shell.display_pub.outputs == []


def test_a_cell_that_takes_long_to_begin_says_what_it_does(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    run(shell, f"s = %megatrain {INIT}")
    body = "import time\nfor _ in range(10):\n    time.sleep(0.1)\ns.train(3)"
    assert run(shell, f"%%megatrain\n{body}").success
    shown = text_displays(shell)
    begins = "Starting (starting; line 4: time.sleep(0.1)): "
    assert any(text.startswith(begins) for text in shown)
    assert shown[-1].startswith("Step 3 of 3 (done)")


def test_a_view_of_a_cell_that_trained_nothing_goes_away(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "html")
    assert run(shell, "%%megatrain\nimport time\ntime.sleep(0.8)").success
    outputs = shell.display_pub.outputs
    assert len(outputs) > 1
    assert outputs[-1]["update"]
    assert outputs[-1]["data"] == {"text/html": "", "text/plain": ""}


def test_an_unknown_display_is_refused(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRAIN_DISPLAY", "hologram")
    assert not run(shell, "%%megatrain\nx = 1").success
    assert "use one of: auto, widget, html, text, none" in capsys.readouterr().err


def test_an_error_in_the_view_does_not_end_the_training(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"s = %megatrain {INIT}")
    monkeypatch.delattr(shell.user_ns["s"].__class__, "tiers")
    assert run(shell, "%%megatrain\ns.train(20);").success
    assert shell.user_ns["s"].step == 20
    assert "progress is no longer shown" in capsys.readouterr().err


# ------------------------------------------------------------------ interrupt


def interrupt_after(*delays_s: float) -> None:
    for delay in delays_s:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_interrupt_stops_after_a_whole_step(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"s = %megatrain {INIT}")
    shell.user_ns["interrupt_after"] = interrupt_after
    result = run(shell, "%%megatrain\ninterrupt_after(0.5)\ns.train()")
    session = shell.user_ns["s"]
    assert isinstance(result.error_in_exec, Interrupted)
    told = f"Interrupted: after step {session.step}: the model is as after step {session.step}"
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == told
    assert "Traceback" not in out
    assert session.num_stops == 1
    assert not session.stop_event.is_set()
    assert session.callbacks == []
    assert run(shell, "%%megatrain\ns.train(2)").success


def test_interrupt_without_a_session_breaks_off(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_after(0.2)
    body = "import time\nwhile True:\n    time.sleep(0.01)"
    result = run(shell, f"%%megatrain\n{body}")
    assert isinstance(result.error_in_exec, Interrupted)
    assert "before the first step was complete" in capsys.readouterr().out


def test_a_second_interrupt_breaks_off(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"s = %megatrain {INIT}")
    shell.user_ns["interrupt_after"] = interrupt_after
    body = "import time\ns.train(3)\ninterrupt_after(0.1, 0.5)\nwhile True:\n    time.sleep(0.01)"
    result = run(shell, f"%%megatrain\n{body}")
    assert isinstance(result.error_in_exec, Interrupted)
    assert "broken off after step 3" in capsys.readouterr().out
    assert not shell.user_ns["s"].stop_event.is_set()


def test_a_body_that_does_not_stop_is_told(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell_module, "STOP_WAIT_S", 0.2)
    gate = shell.user_ns["gate"] = threading.Event()
    run(shell, f"s = %megatrain {INIT}")
    interrupt_after(0.1)
    result = run(shell, "%%megatrain\ngate.wait()")
    assert isinstance(result.error_in_exec, Interrupted)
    assert "the cell's code still runs" in capsys.readouterr().out
    run(shell, "%%megatrain\n1")
    assert "an earlier %%megatrain cell still runs" in capsys.readouterr().err
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "megatrain-cell":
            thread.join(5)
    assert run(shell, "%%megatrain\n1").result == 1
    assert not shell.user_ns["s"].stop_event.is_set()


def test_an_error_after_an_interrupt_is_shown(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"s = %megatrain {INIT}")
    interrupt_after(0.2)
    body = "try:\n    s.train()\nfinally:\n    1 / 0"
    result = run(shell, f"%%megatrain\n{body}")
    assert isinstance(result.error_in_exec, ZeroDivisionError)


def test_the_signal_handler_is_put_back(shell: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    run(shell, "%%megatrain\n1 / 0")
    assert signal.getsignal(signal.SIGINT) is before
