"""Sessions: opened badly, twice, interrupted, broken, closed, abandoned."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime import heap
from megatrain_nb.runtime.current import current_session, set_current
from megatrain_nb.runtime.piece import What
from megatrain_nb.store.tilefile import TileFile
from tests.runtime.common import (
    TinyLM,
    batch,
    differing,
    loss_of,
    micro_batches,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# -- opening ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_ram_gb": -1}, "max_ram_gb=-1"),
        ({"max_ram_gb": 0}, "max_ram_gb=0"),
        ({"max_ram_gb": "many"}, "max_ram_gb='many'"),
        ({"max_ram_gb": True}, "max_ram_gb=True"),
        ({"max_disk_gb": float("nan")}, "max_disk_gb=nan"),
        ({"max_vram_gb": [1]}, r"max_vram_gb=\[1\]"),
        ({"optimizer_compression": "5bit"}, "optimizer_compression='5bit'.*False.*8bit"),
        ({"optimizer_compression": {"head": 3}}, r"optimizer_compression\['head'\]=3"),
        ({"optimizer_compression": {3: "4bit"}}, "3 is not a pattern"),
        ({"optimizer_compression": None}, "optimizer_compression=None"),
        ({"optimizer_compression": 0}, "optimizer_compression=0"),
        ({"weight_compression": "4bit"}, "weight_compression='4bit'.*False.*lossless"),
        ({"weight_compression": True}, "weight_compression=True"),
        ({"device": "mps"}, "device='mps'.*'cpu' or 'cuda'"),
    ],
)  # fmt: skip
def test_bad_arguments(tmp_path: Path, arguments: Any, match: str) -> None:
    with pytest.raises(mt.ArgumentError, match=match):
        mt.init(tmp_path, **arguments)
    assert mt.current_session() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(mt.ArgumentError, match="no CUDA device here"):
        mt.init(tmp_path, device="cuda")


@pytest.mark.parametrize(
    "arguments",
    [{"device": "gpu"}, {"device": 3.5}, {"offload_dir": 123}, {"offload_dir": None}],
)
def test_bad_arguments_of_another_type(tmp_path: Path, arguments: Any) -> None:
    with pytest.raises(mt.ArgumentError):
        mt.init(**({"offload_dir": tmp_path} | arguments))


def test_an_empty_directory_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mt.ArgumentError):
        mt.init("").close()


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for bad in (file, file / "below"):
        with pytest.raises(mt.ArgumentError, match="choose another"):
            mt.init(bad)
    assert mt.current_session() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(mt.ArgumentError):
        mt.init(tmp_path)


def test_a_second_init_closes_the_first(tmp_path: Path) -> None:
    first = mt.init(tmp_path)
    model, _ = wrapped(seeded(TinyLM))
    with mt.init(tmp_path) as second:
        assert first.closed
        assert mt.current_session() is second
        with pytest.raises(mt.SessionError, match="session was closed"):
            model(batch(0))
    assert mt.current_session() is None
    assert list(tmp_path.iterdir()) == []


def test_a_second_init_that_fails_leaves_the_first(tmp_path: Path) -> None:
    with mt.init(tmp_path / "a") as first:
        with pytest.raises(mt.ArgumentError):
            mt.init(tmp_path / "b", device="mps")
        assert not first.closed


def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    with opened(tmp_path):
        found = run_python(tmp_path, "mt.init(sys.argv[1])", check=False)
    assert "SessionError" in found
    assert str(os.getpid()) in found


# -- budgets --------------------------------------------------------------------------------


def test_too_little_ram_is_an_error_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    model = seeded(TinyLM)
    before = snapshot(model)
    with opened(tmp_path, max_ram_gb=1e-5) as session:
        with pytest.raises(mt.BudgetError, match="Raise max_ram_gb to at least"):
            mt.wrap(model)
        assert session.pool.mapped_bytes == session.store.used_bytes == 0
        assert session.status().models == ()
    assert differing(before, snapshot(model)) == []
    assert type(model.head.weight) is torch.nn.Parameter


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_the_minimum_that_the_error_names_works(tmp_path: Path, layers: int) -> None:
    def make() -> Any:
        return seeded(lambda: TinyLM(num_layers=layers))

    with opened(tmp_path, max_ram_gb=1e-5), pytest.raises(mt.BudgetError) as error:
        mt.wrap(make())
    named = re.search(r"at least ([\d.]+ \w+)", str(error.value))
    assert named is not None
    with opened(tmp_path, max_ram_gb=named[1]) as session:
        model, optimizer = wrapped(make())
        for step in range(2):
            window_step(model, optimizer, step)
            plain_step(model, optimizer, step)
        assert session.pool.peak_bytes <= session.max_ram_bytes


def test_reading_parameters_at_the_minimum(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    before = snapshot(model)
    with opened(tmp_path, max_ram_gb="160 kB") as session:
        mt.wrap(model)
        assert differing(before, snapshot(model)) == []
        loss_of(model, batch(0)).backward()
        assert differing(before, snapshot(model)) == []
        assert session.pool.peak_bytes <= session.max_ram_bytes


def test_too_little_disk_is_an_error_before_training(tmp_path: Path) -> None:
    with opened(tmp_path, max_disk_gb="20 kB"), pytest.raises(mt.BudgetError, match="max_disk_gb"):  # fmt: skip
        mt.wrap(seeded(TinyLM))


def test_disk_for_the_whole_state_is_checked_before_training(tmp_path: Path) -> None:
    with opened(tmp_path, max_disk_gb="70 kB"):
        try:
            model, optimizer = wrapped(seeded(TinyLM))
        except mt.BudgetError:
            return
        try:
            window_step(model, optimizer, 0)
        except mt.MegatrainError as error:
            raise AssertionError(error) from error


def test_two_models_share_the_budget(tmp_path: Path) -> None:
    def make() -> Any:
        return seeded(lambda: TinyLM(num_layers=12))

    with opened(tmp_path, disk=False, max_ram_gb="700 kB"):
        try:
            models = [mt.wrap(make()), mt.wrap(make())]
        except mt.BudgetError:
            return
        for step in range(2):
            for model, optimizer in models:
                try:
                    window_step(model, optimizer, step)
                except mt.BudgetError as error:
                    raise AssertionError(error) from error


# -- closing ----------------------------------------------------------------------------------


def test_five_sessions_leave_nothing(tmp_path: Path) -> None:
    def once() -> tuple[int, int]:
        with opened(tmp_path) as session:
            model, optimizer = wrapped(seeded(TinyLM))
            window_step(model, optimizer, 0)
        session.close()
        session.close()
        assert session.pool.mapped_bytes == 0
        assert list(tmp_path.iterdir()) == []
        return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208

    once()
    assert len({once() for _ in range(5)}) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: model(batch(0)),
        lambda model, optimizer: optimizer.step(),
        lambda model, optimizer: window_step(model, optimizer, 1),
        lambda model, optimizer: model.head.weight.sum(),
        lambda model, optimizer: model.state_dict()["head.weight"].sum(),
        lambda model, optimizer: optimizer.state[model.head.weight]["exp_avg"].sum(),
        lambda model, optimizer: mt.unwrap(model),
        lambda model, optimizer: mt.wrap(model),
        lambda model, optimizer: torch.nn.init.zeros_(model.head.weight),
    ],
)
def test_use_after_close(tmp_path: Path, use: Callable[[Any, Any], Any]) -> None:
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
    with pytest.raises(mt.SessionError, match=r"mt\.(init|unwrap)"):
        use(model, optimizer)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: window_step(model, optimizer, 1),
    ],
    ids=["zero_grad", "train_step"],
)
def test_use_after_close_with_pending_gradients(tmp_path: Path, use: Any) -> None:
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        loss_of(model, batch(0)).backward()
    try:
        use(model, optimizer)
    except mt.SessionError:
        return


def test_an_exception_inside_with_closes(tmp_path: Path) -> None:
    def fails() -> None:
        with opened(tmp_path):
            mt.wrap(seeded(TinyLM))
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    assert mt.current_session() is None
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_nobody_holds_is_given_back(tmp_path: Path) -> None:
    with opened(tmp_path, disk=False) as session:
        for _ in range(2):
            model, optimizer = wrapped(seeded(TinyLM))
            window_step(model, optimizer, 0)
            del model, optimizer
            session.models.check_in()  # as the next model that moves in does
            assert session.pool.in_use_bytes == session.store.used_bytes == 0


HEAD = """
import sys, os
sys.path.insert(0, os.getcwd())
import megatrain_nb as mt
from tests.runtime.common import *
def start():
    session = mt.init(sys.argv[1], max_ram_gb=0.1)
    session.max_resident_bytes = 0
    model, optimizer = wrapped(TinyLM())
    return session, model, optimizer
"""


def run_python(directory: Path, code: str, *, check: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code), str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_end_of_the_interpreter_leaves_no_files(tmp_path: Path) -> None:
    run_python(tmp_path, "kept = start()")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_reclaimed(tmp_path: Path) -> None:
    run_python(tmp_path, "start(); os.kill(os.getpid(), 9)", check=False)
    assert (tmp_path / "tiles.bin").exists()
    with opened(tmp_path) as session:
        assert any("dead process" in note for note in session.notes)
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_deletes_nothing(tmp_path: Path) -> None:
    found = run_python(
        tmp_path,
        """
        import warnings; warnings.simplefilter("ignore")
        session, model, _ = start()
        pid = os.fork()
        if not pid:
            sys.exit(0)
        os.waitpid(pid, 0)
        print("files", sorted(os.listdir(sys.argv[1])))
        """,
        check=False,
    )
    assert "files ['owner.lock', 'tiles.bin']" in found


# -- status ---------------------------------------------------------------------------------------


def test_ram_is_the_pool_and_what_else_the_process_takes(tmp_path: Path) -> None:
    # What earlier tests left must not be given back meanwhile, as if this session took less.
    gc.collect()
    heap.trim()
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        before = session.tiers()["ram"]
        assert before.own_bytes is not None
        # 64 MiB that a model allocates inside and frees before anybody looks.
        model.register_forward_pre_hook(lambda *_: torch.ones(16 << 20).sum() and None)
        window_step(model, optimizer, 0)
        window_step(model, optimizer, 1)
        after = session.tiers()["ram"]
        assert after.own_bytes is not None
        assert after.peak_bytes >= before.used_bytes + 60_000_000
        assert after.used_bytes <= after.peak_bytes - 50_000_000
        assert after.used_bytes - after.own_bytes == session.pool.mapped_bytes
        held = torch.ones(16 << 20)
        now = session.tiers()["ram"]
        assert now.own_bytes is not None
        assert now.own_bytes >= after.own_bytes + 60_000_000
        assert held.sum() == len(held)
        assert "the model's own tensors and all else" in str(session.status())


def test_the_peak_of_ram_begins_when_the_first_model_has_moved_in(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as session:
        taken = torch.ones(16 << 20)
        assert session.tiers()["ram"].peak_bytes >= 60_000_000
        del taken
        model, _ = wrapped(seeded(TinyLM))
        assert session.tiers()["ram"].peak_bytes <= 40_000_000
        taken = torch.ones(16 << 20)
        del taken
        second, _ = wrapped(seeded(TinyLM))  # it hides nothing of what was before
        assert session.tiers()["ram"].peak_bytes >= 60_000_000
        assert model is not second


def test_status_before_and_after_steps(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        assert "no GPU" in str(session.status())
        model, optimizer = wrapped(seeded(TinyLM))
        assert session.status().last_step is None
        result = window_step(model, optimizer, 0)
        status = session.status()
        assert status.last_step == result
        assert status.models[0].num_steps == 1
        assert status.tiers["disk"].used_bytes > 0
        for text in (str(status), status._repr_html_(), session._repr_html_()):
            assert "TinyLM" in text
            assert "step 1" in text
            assert "nan" not in text
        assert result.seconds.keys() == {"compute", "wait", "update", "other"}
        assert result.written_bytes > 0


def test_status_from_another_thread_during_training(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                str(session.status())
            except BaseException as error:
                errors.append(error)

    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        thread = threading.Thread(target=watch)
        thread.start()
        for step in range(8):
            window_step(model, optimizer, step)
        done.set()
        thread.join()
    assert errors == []


# -- interrupts and errors ---------------------------------------------------------------------------


class StopsAt(mt.Callback):
    def __init__(self, session: mt.Session, kind: str, name: str) -> None:
        self.session, self.kind, self.name = session, kind, name

    def on_span(self, span: Any) -> None:
        if (span.kind, span.name) == (self.kind, self.name):
            self.session.stop()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("FORWARD", "layers.1"), ("FORWARD", "head"), ("BACKWARD", "layers.1")],
)
def test_stop_in_the_middle_of_a_window(tmp_path: Path, kind: str, name: str) -> None:
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        before = snapshot(model, optimizer)
        session.callbacks.append(StopsAt(session, kind, name))
        with pytest.raises(KeyboardInterrupt):
            window_step(model, optimizer, 1)
        assert differing(before, snapshot(model, optimizer)) == []
        assert model.head.weight.grad is None
        session.callbacks.clear()
        session.clear_stop()
        window_step(model, optimizer, 1)
        after = snapshot(model, optimizer)
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(2):
            window_step(model, optimizer, step)
        assert differing(after, snapshot(model, optimizer)) == []


def test_a_stop_stops_once(tmp_path: Path) -> None:
    stopped = 0
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        session.stop()
        for _ in range(2):
            try:
                window_step(model, optimizer, 0)
            except KeyboardInterrupt:
                stopped += 1
    assert stopped == 1


def test_an_error_in_the_second_micro_batch(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss_fn(model: Any, each: Any) -> Any:
        calls.append(1)
        loss = loss_of(model, each["ids"])
        if each["ids"] is window[1]["ids"]:
            msg = "mine"
            raise ValueError(msg)
        return loss

    window = micro_batches(1)
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        before, used = snapshot(model, optimizer), session.pool.in_use_bytes
        with pytest.raises(ValueError, match="mine"):
            mt.train_step(model, optimizer, window, loss_fn=loss_fn)
        assert differing(before, snapshot(model, optimizer)) == []
        assert session.pool.in_use_bytes == used
        window_step(model, optimizer, 1)


def interrupt_often(
    directory: Path, seed: int, count: int, step_seconds: float = 0.02
) -> list[str]:
    """Send SIGINT at random moments of steps; return what is wrong afterwards."""
    draw, wrong = random.Random(seed), list[str]()
    with opened(directory):
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        before = snapshot(model, optimizer)
        for index in range(count):
            steps = optimizer.state[model.head.weight]["step"].item()
            wait_s = draw.random() * step_seconds
            timer = threading.Timer(wait_s, os.kill, (os.getpid(), signal.SIGINT))
            try:
                try:
                    timer.start()
                    window_step(model, optimizer, index)
                finally:
                    timer.join()
                    time.sleep(0.001)
            except KeyboardInterrupt:
                pass
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")
                return wrong
            after = snapshot(model, optimizer)
            taken = optimizer.state[model.head.weight]["step"].item() - steps
            changed = differing(before, after)
            if taken not in (0, 1) or len(changed) != taken * len(after):
                wrong.append(f"{taken} steps, {len(changed)} of {len(after)} changed")
            before = after
        left = [p for p in model._megatrain.pager._pieces.values() if p.users]
        if len(left) > 1:  # the last one read may be held
            wrong.append(f"in use for ever: {', '.join(map(str, left))}")
        try:
            window_step(model, optimizer, 0)
        except mt.MegatrainError as error:
            wrong.append(f"the next step fails: {error}")
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_interrupts_at_random_moments(tmp_path: Path, seed: int) -> None:
    assert interrupt_often(tmp_path, seed, 20) == []


class InterruptsIn(mt.Callback):
    def on_span(self, span: Any) -> None:
        if span.kind == "STEP":
            os.kill(os.getpid(), signal.SIGINT)


def state_after(tmp_path: Path, steps: int) -> dict[str, torch.Tensor]:
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(steps):
            window_step(model, optimizer, step)
        return snapshot(model, optimizer)


def test_an_interrupt_during_the_update(tmp_path: Path) -> None:
    expected = state_after(tmp_path, steps=2)
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        session.callbacks.append(InterruptsIn())
        window_step(model, optimizer, 0)
        with pytest.raises(KeyboardInterrupt):  # the update of step 0, in step 1
            window_step(model, optimizer, 1)
        session.callbacks.clear()
        window_step(model, optimizer, 1)
        assert differing(expected, snapshot(model, optimizer)) == []


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kind", ["FORWARD", "BACKWARD", "STEP"])
def test_an_io_error_is_one_clear_error(
    tmp_path: Path, operation: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is either as after the last whole step, or says that it must not be used."""
    armed = threading.Event()
    original = getattr(TileFile, operation)

    def fails(self: TileFile, offset: int, data: Any) -> None:
        if armed.is_set():
            armed.clear()
            msg = "injected: tiles.bin, offset 0, EIO"
            raise mt.StoreError(msg)
        original(self, offset, data)

    class Arms(mt.Callback):
        def on_span(self, span: Any) -> None:
            if span.kind == kind and not fired:
                fired.append(span)
                armed.set()

    fired: list[Any] = []
    expected = state_after(tmp_path, steps=2)
    monkeypatch.setattr(TileFile, operation, fails)
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(2):
            window_step(model, optimizer, step)
        session.callbacks.append(Arms())
        start = time.perf_counter()
        with pytest.raises(mt.StoreError, match="injected"):
            window_step(model, optimizer, 2)
        assert time.perf_counter() - start < 10
        assert not armed.is_set()
        try:
            assert differing(expected, snapshot(model, optimizer)) == []
            window_step(model, optimizer, 2)
        except mt.StoreError as error:
            assert "must not be used" in str(error)  # noqa: PT017


def test_a_failed_write_of_weights_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TileFile.write
    armed = [False]

    def fails(self: TileFile, offset: int, data: Any) -> None:
        if armed[0]:
            armed[0] = False
            msg = "injected"
            raise mt.StoreError(msg)
        original(self, offset, data)

    monkeypatch.setattr(TileFile, "write", fails)
    with opened(tmp_path), torch.no_grad():
        model, _ = wrapped(seeded(TinyLM))
        model.head.weight.sum()
        armed[0] = True
        model.layers[1].up.weight.mul_(2)
        expected = 2 * seeded(TinyLM).layers[1].up.weight
        model.head.weight.sum()  # the changed piece leaves RAM
        told = 0
        for _ in range(3):
            try:
                assert torch.equal(model.layers[1].up.weight, expected)
            except mt.MegatrainError:
                told += 1
        assert told in (0, 3)


class Broken(mt.Callback):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_span(self, span: Any) -> None:
        if span.kind == self.kind:
            msg = "my callback"
            raise RuntimeError(msg)


def test_a_callback_that_raises_reaches_the_caller(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        session.callbacks.append(Broken("FORWARD"))
        with pytest.raises(RuntimeError, match="my callback"):
            window_step(model, optimizer, 0)
        session.callbacks.clear()
        window_step(model, optimizer, 0)


def test_a_callback_that_raises_on_an_io_thread_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not pass for a fault of the disk, which would end the model."""
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        session.callbacks.append(Broken("WRITE"))
        window_step(model, optimizer, 0)
        window_step(model, optimizer, 0)
    assert "my callback" in caplog.text


def test_an_error_while_closing_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        msg = "injected"
        raise RuntimeError(msg)

    session = mt.init(tmp_path, max_ram_gb=0.1)
    session.max_resident_bytes = 0
    try:
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        monkeypatch.setattr(TileFile, "read", fails)
        pager = model._megatrain.pager
        pager.fetch(0, What.WEIGHTS)
        for future in pager.piece(0, What.WEIGHTS).loading:
            assert isinstance(future.exception(10), RuntimeError)
        try:
            session.close()
        except RuntimeError:
            session.close()
        assert list(tmp_path.iterdir()) == []
        assert mt.current_session() is None
    finally:
        session.store.close()
        session.threads.close()
        session.pool.close()
        session._lock.release()
        set_current(None)


def test_no_session(tmp_path: Path) -> None:
    assert current_session() is None
    for use in (lambda: mt.wrap(TinyLM()), lambda: mt.from_config(None)):
        with pytest.raises(mt.SessionError, match=r"mt\.init"):
            use()


@pytest.mark.parametrize(
    ("asked", "warned"), [("2bit", ["2bit"]), (True, ["dynamic"]), ("4bit", [])]
)
def test_what_is_experimental_is_noted(
    asked: Any, warned: list[str], tmp_path: Path
) -> None:
    with mt.init(tmp_path, max_ram_gb=0.1, optimizer_compression=asked) as session:
        notes = [note for note in session.notes if "experimental" in note]
        assert [note.split('"')[1] for note in notes] == warned
