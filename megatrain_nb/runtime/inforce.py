"""The plan that a session obeys, as the forecast shows one."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain_nb.codec.choice import Compression
from megatrain_nb.codec.names import MOMENTS, WEIGHTS
from megatrain_nb.plan.activation import Window
from megatrain_nb.plan.choices import Choices, spec_of
from megatrain_nb.plan.device import DevicePlan
from megatrain_nb.plan.machine import Machine, nominal
from megatrain_nb.plan.planner import Decided, make_plan
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.forecast import read_cache
from megatrain_nb.runtime.fuse import MAX_TOKENS
from megatrain_nb.runtime.piece import What

if TYPE_CHECKING:
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.plan.plan import Plan
    from megatrain_nb.plan.shape import Shape
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.session import Session

_LINK_GB_PER_S = 12.0
# Without these figures of a probe no seconds are told.
_MEASURED = ("fp32_rates", "read_bytes_per_s", "update_params_per_s")


def plan_in_force(offloaded: OffloadedModel) -> Plan | None:
    """Return the plan of a model in a session, with what was decided there; None before it was called to train."""
    session = offloaded.session
    return _plan_on(_probed(session) or _assumed(session), offloaded)


def _plan_on(machine: Machine, offloaded: OffloadedModel) -> Plan | None:
    executor = offloaded.executor
    run = _run_of(offloaded)
    if run is None:
        return None
    decided = Decided(
        offloaded.memory.residency,
        executor.keeping.chosen,
        DevicePlan(
            executor.stay, executor.keeping.limit_bytes, frozenset(executor.tail)
        ),
    )
    return make_plan(run[0], machine, run[1], decided)


def expected_seconds(offloaded: OffloadedModel) -> dict[str, float]:
    """Return how long a step by that plan should take, by cause (see `plan.causes`); empty where nobody can tell."""
    machine = _probed(offloaded.session)
    if machine is None or machine.assumed.intersection(_MEASURED):
        return {}
    if not _each_once(offloaded):
        return {}
    plan = _plan_on(machine, offloaded)
    return {} if plan is None else plan.seconds


def expected_peaks(offloaded: OffloadedModel) -> dict[str, int]:
    """Return the most that this session should take by that plan, in bytes by tier, its start not counted.

    Empty before the model was called to train, and where other models take of the same budgets.
    """
    alone = len(offloaded.session.models) == 1
    plan = plan_in_force(offloaded) if alone and _each_once(offloaded) else None
    if plan is None:
        return {}
    # A forecast adds what runs differ by; where that is too much, the session gives way, and keeps to its budget.
    ram = plan.peak_ram_bytes - plan.machine.framework_bytes
    peaks = {
        "ram": min(ram, offloaded.session.max_ram_bytes),
        "device": plan.peak_vram_bytes,
        "disk": plan.disk_bytes,
    }
    return {tier: num_bytes for tier, num_bytes in peaks.items() if num_bytes}


def _each_once(offloaded: OffloadedModel) -> bool:
    """Whether no block computes twice: what that takes is not known."""
    order = offloaded.executor.expected_order()
    return sorted(order) == list(range(len(offloaded.layers.spec.blocks)))


def forecast_of(offloaded: OffloadedModel) -> Plan | None:
    """Return what `estimate` says of a model that was called to train; None where this machine was not probed."""
    run, machine = _run_of(offloaded), _probed(offloaded.session)
    if run is None or machine is None:
        return None
    return make_plan(run[0], machine, run[1])


def _run_of(offloaded: OffloadedModel) -> tuple[Shape, Choices] | None:
    """Return the model's shape, and what a person has decided about its training."""
    foresight, spec = offloaded.memory.foresight, offloaded.layers.spec
    if foresight.window is None:
        return None
    shape = foresight.shape(offloaded.model, offloaded.layers)
    choices = _choices(offloaded, foresight.window)
    if spec_of(shape, choices) != spec:
        # Groups may have codecs of their own, and dynamic ones are chosen on the way.
        choices = replace(choices, compression=_codecs(spec))
    return shape, choices


def _choices(offloaded: OffloadedModel, window: Window) -> Choices:
    session, spec = offloaded.session, offloaded.layers.spec
    params = [param for pack in spec.packs for param in pack.params]
    homes = offloaded.layers.homes
    trained = {home.spec.name for param, home in homes.items() if param.requires_grad}
    packed = {WEIGHTS: What.WEIGHTS, MOMENTS: What.EXP_AVG}
    return Choices(
        window=window if offloaded.fusing is None else _fused(window),
        bf16=any(pack.split for pack in spec.packs),
        compression=session.compression,
        packed=frozenset(k for k, what in packed.items() if what in session.packed),
        max_ram_bytes=session.models.share_bytes(),
        max_vram_bytes=session.max_vram_bytes,
        max_disk_bytes=session.max_disk_bytes,
        max_tail_bytes=session.max_tail_bytes,
        trainable=() if len(trained) == len(params) else tuple(sorted(trained)),
    )


def _fused(window: Window) -> Window:
    """Return the window as blocks see it where micro-batches pass them together."""
    together = max(1, MAX_TOKENS // (window.batch * window.seq_len))
    together = min(together, window.accumulation)
    return Window(
        batch=window.batch * together,
        seq_len=window.seq_len,
        accumulation=-(-window.accumulation // together),
    )


def _codecs(spec: ModelSpec) -> Compression:
    """Return what the moments of each parameter are stored in."""
    params = (param for pack in spec.packs for param in pack.params)
    return Compression(tuple((param.name, param.codec) for param in params))


def _probed(session: Session) -> Machine | None:
    """Return this machine, if it was probed with this directory."""
    found = read_cache(session.preflight.path)
    if found is None or found.in_place != session.device.in_place:
        return None
    return found


def _assumed(session: Session) -> Machine:
    """Return this machine with figures that nobody measured."""
    figures: dict[str, object] = {"ram_gb": rss.available_bytes() / 0.8e9}
    if not session.device.in_place:
        figures |= {
            "device": str(session.device.torch_device),
            "vram_gb": (session.device.limit_bytes or session.max_ram_bytes) / 1e9,
            "link_gb_per_s": _LINK_GB_PER_S,
        }
    return nominal(platform.node() or "this machine", figures)
