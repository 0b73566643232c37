from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatrain_nb import jit

INTERPRETED = os.environ.get("NUMBA_DISABLE_JIT") == "1"
compiled_only = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")

SOURCE = """
from megatrain_nb.jit import kernel

@kernel
def inner(x):
    return x * x

@kernel
def square_sum(x):
    total = x[0] * 0
    for value in x:
        total += inner(value)
    return total
"""

Load = Callable[[], ModuleType]


@pytest.fixture(name="load")
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import the module above as a new process would, with a cache of its own."""
    monkeypatch.setenv("MEGATRAIN_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source.py"
    source.write_text(SOURCE)

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location("megatrain_nb.fake", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(name="told")
def hook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(jit, "on_compile", [told.append])
    return told


def run(module: ModuleType) -> Any:
    import numpy as np  # noqa: PLC0415

    return module.square_sum(np.arange(4.0))


@compiled_only
def test_compiles_once_and_says_so(
    load: Load, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megatrain_nb")
    assert run(load()) == 14
    assert told == [
        "Compiling the square_sum kernel for this machine (once; then it is kept)"
    ]
    assert caplog.messages == told
    assert list((tmp_path / "cache").rglob("*.nbc"))
    assert run(load()) == 14
    assert len(told) == 1


@compiled_only
def test_other_types_of_the_same_kernel_are_not_told_again(
    load: Load, told: list[str]
) -> None:
    import numpy as np  # noqa: PLC0415

    module = load()
    assert run(module) == 14
    assert module.square_sum(np.arange(4, dtype=np.int32)) == 14
    assert len(module.square_sum.signatures) == 2
    assert len(told) == 1


@compiled_only
@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04\x95"])
def test_a_corrupt_cache_is_rebuilt(
    load: Load, told: list[str], tmp_path: Path, content: bytes
) -> None:
    run(load())
    for file in (tmp_path / "cache").rglob("*.nb*"):
        file.write_bytes(content)
    assert run(load()) == 14
    assert len(told) == 2
    assert run(load()) == 14
    assert len(told) == 2


@compiled_only
def test_a_cache_that_cannot_be_written_costs_only_time(
    load: Load, told: list[str], tmp_path: Path
) -> None:
    first = load()
    blocked = tmp_path / "cache"
    for directory in blocked.iterdir():
        directory.rmdir()
        directory.write_text("a file where numba wants a directory")
    assert run(first) == 14
    assert len(told) == 1


@compiled_only
def test_an_unusable_cache_directory_falls_back(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRAIN_CACHE_DIR", str(tmp_path / "file"))
    module = load()
    assert run(module) == 14
    assert str(tmp_path / "file") not in module.square_sum.stats.cache_path


IN_A_CHILD = """
import sys
import numpy as np
from megatrain_nb import jit
from megatrain_nb.optim.kernels import all_finite

here, told = [], []
jit.on_compile.append(told.append)
listen = jit._numba("core.event")

class Here(listen.Listener):
    def on_start(self, event):
        here.append(event)
    def on_end(self, event):
        pass

listen.register("numba:compile", Here())
for command in sys.argv[1:]:
    jit._CHILD = command
assert all_finite(np.zeros(4, np.float32))
assert not all_finite(np.array([1.0, np.nan], np.float32))
assert len(told) == 1, told
print(len(here) > 0)
"""


def in_new_process(tmp_path: Path, *arguments: str, **more: str) -> str:
    """Return what a process says that starts with an empty cache: whether it compiled anything itself."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD, *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"MEGATRAIN_CACHE_DIR": str(tmp_path / "cache")} | more,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@compiled_only
def test_a_child_compiles(tmp_path: Path) -> None:
    """What it takes leaves with it: LLVM keeps hundreds of megabytes."""
    assert in_new_process(tmp_path) == "False"
    assert list((tmp_path / "cache").rglob("*.nbc"))


@compiled_only
@pytest.mark.parametrize("command", ["raise ValueError", "import os; os._exit(0)"])
def test_a_child_that_fails_costs_only_time(tmp_path: Path, command: str) -> None:
    assert in_new_process(tmp_path, command) == "True"


@compiled_only
def test_a_child_compiles_itself(tmp_path: Path) -> None:
    assert in_new_process(tmp_path, MEGATRAIN_COMPILES="1") == "True"


@compiled_only
def test_an_interpreter_that_cannot_start_another(
    monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    module = load()
    monkeypatch.setitem(sys.modules, "megatrain_nb.fake", module)
    for executable in ("", str(Path(__file__).parent / "nothing")):
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setattr(jit, "_alone", threading.Event())
        kernel = module.square_sum.py_func
        assert jit._compiled_elsewhere(kernel, None, lambda: None) is None


@compiled_only
def test_an_edit_of_another_kernels_file_compiles_again(
    load: Load, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(load())
    monkeypatch.setattr(jit, "_source_digest", lambda: "edited")
    run(load())
    assert len(told) == 2


@compiled_only
def test_numbas_own_setting_is_left_alone(load: Load) -> None:
    config: Any = importlib.import_module("numba").config
    before = config.CACHE_DIR
    load()
    assert before == config.CACHE_DIR


@compiled_only
def test_kernels_round_as_written(load: Load) -> None:
    options = load().square_sum.targetoptions
    assert options["nogil"]
    assert not options["fastmath"]
    assert options["error_model"] == "numpy"


def test_a_failing_hook_is_logged_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    monkeypatch.setattr(jit, "on_compile", [lambda text: 1 / 0, told.append])
    jit.compiling("AdamW kernel")
    assert len(told) == 1
    assert "AdamW kernel" in told[0]
    assert "failed" in caplog.text


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's own case")
def test_interpreted_functions_come_back(load: Load) -> None:
    assert run(load()) == 14
    assert type(load().square_sum).__name__ == "function"


def test_numba_is_imported_late() -> None:
    program = (
        "import sys, megatrain_nb, megatrain_nb.jit, megatrain_nb.optim.adamw;"
        "sys.exit('numba' in sys.modules)"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
