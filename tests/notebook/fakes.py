"""A session that trains nothing, in place of the runtime's (and of torch's import)."""

from __future__ import annotations

import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import ArgumentError, SessionError
from megatrain_nb.runtime.callbacks import Callback, StepResult
from megatrain_nb.runtime.controls import Controls
from megatrain_nb.runtime.current import set_current
from megatrain_nb.runtime.status import TierStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = "megatrain_nb.runtime.init"


@dataclass(frozen=True)
class FakeStatus:
    tiers: dict[str, TierStatus]

    def __repr__(self) -> str:
        return "status: RAM 0.5 GB"

    def _repr_html_(self) -> str:
        return "<b>status</b>"


@dataclass(frozen=True)
class FakeCheckpoint:
    label: str


class FakeSession:
    """Counts steps; stops where the runtime would."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.callbacks: list[Callback] = []
        self.shown = False
        self.closed = False
        self.num_stops = 0
        self.step = 0
        self.saved: list[Any] = []
        self.held = [FakeCheckpoint("'step-4', step 4 of 9")]
        self.shown_while_training: bool | None = None
        self.stop_event = threading.Event()
        self.controls = Controls()
        self.recorder: object = None
        self.preflight = types.SimpleNamespace(path=Path("/nvme/run"))

    def stop(self) -> None:
        self.num_stops += 1
        self.stop_event.set()

    def clear_stop(self) -> None:
        self.stop_event.clear()

    def close(self) -> None:
        self.closed = True
        sys.modules[MODULE].current = None  # type: ignore[attr-defined]
        set_current(None)

    def checkpoints(self) -> list[FakeCheckpoint]:
        return list(self.held)

    def resume(self, name: str | None, *, weights_only: bool) -> tuple[Any, bool]:
        if name == "missing":
            msg = "no checkpoint 'missing' in /nvme/run; there: 'step-4'"
            raise ArgumentError(msg)
        return name, weights_only

    def tiers(self) -> dict[str, TierStatus]:
        now = 400_000_000 + 1_000_000 * (self.step % 50)
        return {
            "ram": TierStatus(now, 620_000_000, 800_000_000, 180_000_000),
            "disk": TierStatus(1_430_000_000, 1_913_600_000, None),
        }

    def status(self) -> FakeStatus:
        return FakeStatus(self.tiers())

    def layouts(self) -> list[object]:
        return []

    def __repr__(self) -> str:
        return "<Session fake>"

    def _repr_html_(self) -> str:
        return "<b>session</b>"

    def train(
        self, num_steps: int | None = None, *, seconds: float = 0.01, told: bool = True
    ) -> str:
        if told and num_steps is not None:
            for callback in self.callbacks:
                callback.on_train_begin(num_steps)
        for _ in self._steps(num_steps):
            for _block in range(4):
                time.sleep(seconds / 4)
                if self.stop_event.is_set():
                    raise KeyboardInterrupt
            self.shown_while_training = self.shown
            self.step += 1
            result = step_result(self.step, seconds)
            for callback in self.callbacks:
                callback.on_step_end(result)
            self.controls.obey(self.step, self.saved.append, self.stop_event)
            if self.controls.stopping:
                self.controls.reset()
                break
        for callback in self.callbacks:
            callback.on_train_end()
        return f"trained to step {self.step}"

    def _steps(self, num_steps: int | None) -> Iterator[int]:
        count = 0
        while num_steps is None or count < num_steps:
            yield count
            count += 1


def step_result(step: int, seconds: float = 0.01) -> StepResult:
    shares = {"compute": 0.62, "wait": 0.2, "update": 0.13, "other": 0.05}
    return StepResult(
        step=step,
        loss=2.0 + 3.5 / step**0.5 + 0.05 * (step * 7 % 5),
        grad_norm=1.0 + 1.0 / step,
        tokens=512,
        seconds={cause: share * seconds for cause, share in shares.items()},
    )


def fake_module() -> types.ModuleType:
    """Return a stand-in for ``megatrain_nb.runtime.init``."""
    module: Any = types.ModuleType(MODULE)
    module.current = None

    def init(offload_dir: Any, **options: Any) -> FakeSession:
        if str(offload_dir) == "/taken":
            msg = "another process owns\n/taken; close it there"
            raise SessionError(msg)
        if options.get("device") == "abacus":
            msg = "device='abacus' is not known"
            raise ArgumentError(msg)
        if module.current is not None:
            module.current.close()
        session = FakeSession(offload_dir=offload_dir, **options)
        module.current = session
        set_current(session)  # type: ignore[arg-type]
        return session

    module.init = init
    module.Session = FakeSession
    made: types.ModuleType = module
    return made


def install() -> types.ModuleType:
    """Put the stand-in where the package looks; what a test kernel runs first."""
    sys.modules[MODULE] = fake_module()
    return sys.modules[MODULE]
