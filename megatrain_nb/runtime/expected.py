"""How long a step of the model at hand should take on this machine, by cause: what a view shows beside the measured.

What stays where is the plan in force, the window is the largest that was seen, the machine's figures are those that
`probe` has measured. Nothing is measured here, and nothing is guessed: where one of them is missing there is no plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_nb.codec.names import MOMENTS, WEIGHTS
from megatrain_nb.plan.activation import Window
from megatrain_nb.plan.causes import planned_seconds
from megatrain_nb.plan.choices import Choices
from megatrain_nb.plan.work import ModelWork
from megatrain_nb.runtime.fuse import MAX_TOKENS
from megatrain_nb.runtime.piece import What

if TYPE_CHECKING:
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.shape import Shape
    from megatrain_nb.runtime.offload import OffloadedModel

_MEASURED = ("fp32_rates", "read_bytes_per_s", "update_params_per_s")


def expected_seconds(
    offloaded: OffloadedModel, shape: Shape, window: Window, machine: Machine | None
) -> dict[str, float]:
    """Return the seconds of a step by cause, see `plan.causes`; empty where they cannot be told.

    Parameters
    ----------
    offloaded
        The model; its plan says what stays where.
    shape
        What `shape_from` says of it.
    window
        The tokens of the step.
    machine
        What was measured; None if nothing was.
    """
    session, executor = offloaded.session, offloaded.executor
    spec, order = offloaded.layers.spec, executor.expected_order()
    if machine is None or machine.assumed.intersection(_MEASURED):
        return {}
    if machine.in_place != session.device.in_place or executor.tail:
        return {}  # the device's twin; or packs that live there: nothing simulates these
    if sorted(order) != list(range(len(spec.blocks))):
        return {}  # a block that computes twice: its time is not known
    packed = {WEIGHTS} if What.WEIGHTS in session.packed else set()
    packed |= {MOMENTS} if What.EXP_AVG in session.packed else set()
    choices = Choices(
        window=window if offloaded.fusing is None else _fused(window),
        bf16=any(pack.split for pack in spec.packs),
        packed=frozenset(packed),
    )
    homes = offloaded.layers.homes.items()
    step = ModelWork(shape, machine, choices).simulate(
        spec,
        offloaded.memory.residency,
        order,
        kept=frozenset(b for b in order if executor.keeping.wants(b)),
        trained=frozenset(h.pack.index for param, h in homes if param.requires_grad),
        stay=executor.stay,
    )
    return planned_seconds(step, in_place=machine.in_place)


def _fused(window: Window) -> Window:
    """Return the window as blocks see it where micro-batches pass them together."""
    together = max(1, MAX_TOKENS // (window.batch * window.seq_len))
    together = min(together, window.accumulation)
    return Window(
        batch=window.batch * together,
        seq_len=window.seq_len,
        accumulation=-(-window.accumulation // together),
    )
