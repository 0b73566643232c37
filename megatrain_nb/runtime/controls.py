"""What a person asks for while training runs; the training thread obeys between two steps."""

from __future__ import annotations

import math
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_S = 0.1


class Controls:
    """Requests to the training of one session; every method may be called from any thread.

    Attributes
    ----------
    save_dir
        Where `save` writes when it is not told: a folder ``step-000012`` in here.
    was_stopped
        Whether `stop` was called since whoever waits for the training set this to False.
    usual_logging_steps
        Steps between two log lines where nothing is asked for; None where nobody writes any.

    Notes
    -----
    Only the training thread calls `obey`, where a step is complete and the next has not begun: so whatever is
    asked for, the model is as after a whole step.
    """

    def __init__(self) -> None:
        self.save_dir = Path("megatrain-saved")
        self.was_stopped = False
        self.usual_logging_steps: int | None = None
        self._changed = threading.Condition()
        self._paused = False
        self._stopping = False
        self._pausing_now = False
        self._saves: deque[Path | None] = deque()
        self._said = ""
        self._lr_factor = 1.0
        self._logging_steps: int | None = None

    @property
    def paused(self) -> bool:
        """Whether training waits, or will after the step in progress."""
        return self._paused

    @property
    def waiting(self) -> bool:
        """Whether training stands still now, because it was paused."""
        return self._pausing_now

    @property
    def stopping(self) -> bool:
        """Whether training ends after the step in progress."""
        return self._stopping

    @property
    def said(self) -> str:
        """What the last request led to, in a sentence; empty if there was none."""
        return self._said

    def forget_said(self) -> None:
        """Say nothing of an earlier run any more."""
        self._said = ""

    @property
    def lr_factor(self) -> float:
        """Every learning rate is multiplied by this."""
        return self._lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        given: object = factor
        usable = isinstance(given, int | float) and not isinstance(given, bool)
        if not usable or not math.isfinite(factor) or factor < 0:
            msg = f"lr_factor={factor!r} is not usable; give a finite number >= 0, 1 for the rates as they are"
            raise ArgumentError(msg)
        self._lr_factor = float(factor)

    @property
    def logging_steps(self) -> int | None:
        """Steps between two log lines of `Trainer`; None leaves it as TrainingArguments say."""
        return self._logging_steps

    @logging_steps.setter
    def logging_steps(self, steps: int | None) -> None:
        given: object = steps
        if given is not None and (not isinstance(given, int) or given < 1):
            msg = f"logging_steps={steps!r} is not usable; give a whole number >= 1"
            raise ArgumentError(msg)
        self._logging_steps = steps

    def pause(self) -> None:
        """Let training wait after the step in progress, until `resume` or `stop`."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Let a paused training go on."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def stop(self) -> None:
        """End training after the step in progress; `Trainer.train` returns as if that had been the last one."""
        with self._changed:
            self._stopping = self.was_stopped = True
            self._paused = False
            self._changed.notify_all()

    def save(self, directory: str | Path | None = None) -> None:
        """Export the model when the step in progress is complete; `said` tells where it is, or what failed."""
        with self._changed:
            self._saves.append(None if directory is None else Path(directory))
            self._said = "saving after this step"
            self._changed.notify_all()

    def reset(self) -> None:
        """Forget a stop, a pause and saves that nobody obeyed: the training they were meant for is over."""
        with self._changed:
            self._paused = self._stopping = False
            if self._saves:
                self._saves.clear()
                self._said = "not saved: no training runs"
            self._changed.notify_all()

    def obey(
        self, step: int, export: Callable[[Path], None], interrupted: threading.Event
    ) -> None:
        """Save what is to be saved, and wait while paused.

        Parameters
        ----------
        step
            The last complete step.
        export
            Writes the model into a folder.
        interrupted
            Ends a pause as well.
        """
        self._save_all(step, export)
        with self._changed:
            self._pausing_now = self._paused
        try:
            while self._paused and not interrupted.is_set():
                with self._changed:
                    self._changed.wait(_LOOK_S)
                self._save_all(step, export)
        finally:
            self._pausing_now = False

    def _save_all(self, step: int, export: Callable[[Path], None]) -> None:
        while True:
            with self._changed:
                if not self._saves:
                    return
                directory = self._saves.popleft() or self.save_dir / f"step-{step:06d}"
                self._said = f"saving to {directory}"
            try:
                export(directory)
            except Exception as error:  # a full disk must not cost the training
                said = f"not saved: {error}"
            else:
                said = f"saved step {step} to {directory}"
            with self._changed:
                self._said = said
