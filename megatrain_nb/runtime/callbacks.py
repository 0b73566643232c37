"""The only way out of the runtime: what it did, told to whoever listens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.plan.timeline import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step, as numbers.

    Attributes
    ----------
    step
        1 for the first optimizer step of the session's model.
    loss
        The window's loss, normalised by its valid tokens. In a plain loop the mean of the losses that the
        model returned since the last step; NaN if it returned none.
    grad_norm
        Total 2-norm of the gradients before clipping.
    tokens
        Valid tokens of the window (label not -100); 0 if unknown.
    seconds
        Wall seconds by cause: ``compute``, ``wait`` (for disk), ``update`` (optimizer), ``other``;
        their sum is the step's wall time.
        On a device with memory of its own ``compute`` is what waiting and update do not hide of its computing, and
        ``link`` what of the time that it waited for copies is left besides.
    read_bytes, written_bytes
        Bytes moved between RAM and disk in this step.
    onloaded_bytes, offloaded_bytes
        Bytes copied from RAM to a device with memory of its own, and back.
    link_seconds
        Time that these copies took, both directions together; they run beside each other and beside computing.
    least_seconds
        By resource, the least time that what the step did takes there: ``compute`` is the time that blocks
        and update kernels took, ``disk`` the bytes moved over the fastest rate that this disk has shown. On a
        device with memory of its own the kernels are ``update``, on the host, and ``link`` is the time of the
        copies in the busier direction, at the fastest rate that it has shown.
    lr
        Learning rate of the first parameter group in this step, with the factor of `Controls`; NaN if unknown.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    onloaded_bytes: int = 0
    offloaded_bytes: int = 0
    link_seconds: float = 0.0
    least_seconds: dict[str, float] = field(default_factory=dict)
    lr: float = math.nan

    @property
    def bound(self) -> str:
        """The resource that bounds the step: the one that needs the most time; empty if unknown."""
        least = self.least_seconds
        return max(least, key=least.__getitem__) if least else ""

    @property
    def share_of_bound(self) -> float:
        """Time that the bounding resource needs, as a share of the step's; 1.0 if nothing else is seen."""
        total = self.total_seconds
        return self.least_seconds[self.bound] / total if self.bound and total else 0.0

    @property
    def total_seconds(self) -> float:
        """Wall seconds of the whole step."""
        return sum(self.seconds.values())


class Callback:
    """Base class of listeners; every method does nothing until it is overridden.

    Notes
    -----
    ``on_span`` is called from the training thread and from I/O threads, often: keep it short and
    thread-safe. The others are called from the training thread. Register with
    ``session.callbacks.append(...)``.
    """

    def on_train_begin(self, total_steps: int | None) -> None:
        """Hear that training starts, and how many steps are to come; None where it is not known (a plain loop)."""

    def on_layout(self, layout: Layout) -> None:
        """Hear which blocks a model has and what of it stays in RAM, whenever that is planned anew."""

    def on_span(self, span: Span) -> None:
        """Hear that the runtime finished one action."""

    def on_step_end(self, result: StepResult) -> None:
        """Hear that an optimizer step is complete and consistent."""

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Hear what an evaluation after this step of the training found, by name."""

    def on_train_end(self) -> None:
        """Hear that training ended, was interrupted or failed."""
