"""The optimizer steps of one model: how many, how long, and what each came to."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from megatrain_nb.plan.causes import seconds_by_cause
from megatrain_nb.runtime.callbacks import StepResult
from megatrain_nb.runtime.costs import least_seconds, running_totals
from megatrain_nb.runtime.export import save_pretrained

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain_nb.runtime.offload import OffloadedModel


class Steps:
    """The step in progress, and those before.

    Attributes
    ----------
    done
        Steps so far.
    last
        What the last one came to, or None.
    seconds
        Time in ``optimizer.step`` so far, without the kernels' and without waiting.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self.done = 0
        self.last: StepResult | None = None
        self.seconds = 0.0
        self._offloaded = offloaded
        self._since: dict[str, float] | None = None
        self._losses: list[Tensor] = []
        self._tokens = 0

    @property
    def in_progress(self) -> bool:
        """Whether a forward or backward of a step runs, or gradients of one are pending."""
        executor = self._offloaded.executor
        running = executor.window is not None or executor.inside is not None
        return running or (self._since is not None and bool(executor.norms))

    def begin(self, *, stops: bool = True) -> None:
        """Let a step's clock run, unless it does already; before it does, do what a person asked for.

        Without ``stops`` the caller ends the training itself where that was asked for.
        """
        if self._since is None:
            self.obey_controls()
            controls = self._offloaded.session.controls
            if stops and controls.stopping:
                controls.reset()
                raise KeyboardInterrupt
            self._offloaded.memory.begin()
            self._since = running_totals(self._offloaded.session)

    def obey_controls(self) -> None:
        """Save, or wait, if a person asked for it; between two steps."""
        session = self._offloaded.session
        session.controls.obey(
            self.done,
            partial(save_pretrained, self._offloaded.model),
            session.stop_event,
        )

    def note_loss(self, loss: Tensor, tokens: int) -> None:
        """Note a loss of the step in progress, and the valid tokens behind it."""
        self._losses.append(loss.detach())
        self._tokens += tokens

    def forget(self) -> None:
        """Start over: the step that was begun will not end."""
        self._since = None
        self._losses.clear()
        self._tokens = 0

    def finish(self, grad_norm: float) -> None:
        """Make the step's result and tell the session; then plan again if memory says so."""
        session = self._offloaded.session
        self._offloaded.executor.end_step()
        since, now = self._since, running_totals(session)
        assert since is not None
        spent = {key: now[key] - since[key] for key in now}
        losses = self._losses
        self.last = StepResult(
            step=self.done,
            loss=float(sum(losses)) / len(losses) if losses else math.nan,
            grad_norm=grad_norm,
            tokens=self._tokens,
            seconds=seconds_by_cause(spent, in_place=session.device.in_place),
            read_bytes=int(spent["read"]),
            written_bytes=int(spent["written"]),
            onloaded_bytes=int(spent["onloaded"]),
            offloaded_bytes=int(spent["offloaded"]),
            link_seconds=spent["link"],
            least_seconds=least_seconds(
                spent, session.device, disk_rate=session.store.rate.best
            ),
            lr=self._learning_rate(),
        )
        self.forget()
        session.note_step(self.last)
        self._offloaded.memory.end_step(self.last.least_seconds)

    def _learning_rate(self) -> float:
        optimizer = self._offloaded.optimizer
        if optimizer is None:
            return math.nan
        factor = self._offloaded.session.controls.lr_factor
        return float(optimizer.param_groups[0]["lr"]) * factor
