"""The plan of a training run: where every byte is, how long a step takes, and what bounds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatrain_nb.plan.activation import border_bytes, largest_kept_bytes
from megatrain_nb.plan.causes import planned_seconds
from megatrain_nb.plan.choices import spec_of
from megatrain_nb.plan.device import tail_bytes
from megatrain_nb.plan.logits import whole_logits_bytes
from megatrain_nb.plan.own import ROUNDING_BYTES
from megatrain_nb.plan.work import ModelWork

if TYPE_CHECKING:
    from megatrain_nb.plan.choices import Choices
    from megatrain_nb.plan.logits import Chunking
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.plan.shape import Shape
    from megatrain_nb.plan.simulate import Simulated
    from megatrain_nb.plan.timeline import Span


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a tier: what it is, and how large."""

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A forecast; displays as a table, `figure` draws it.

    Attributes
    ----------
    shape, machine, choices
        What it is a plan of.
    residency
        Which packs stay in RAM, and which live on a device, as the runtime decides it.
    kept
        Blocks that keep their activations from forward to backward.
    stay
        Packs whose weights stay on a device until they change.
    chunking
        How logits are cut that would not fit; None where they fit.
    ram, vram, disk
        What each tier holds at its peak, item by item.
    problems
        Why it does not fit, one sentence each; empty where it fits.
    trained
        Packs that are trained.
    """

    shape: Shape
    machine: Machine
    choices: Choices
    residency: Residency
    kept: frozenset[int]
    stay: frozenset[int]
    chunking: Chunking | None
    ram: tuple[Item, ...]
    vram: tuple[Item, ...]
    disk: tuple[Item, ...]
    problems: tuple[str, ...]
    trained: frozenset[int]

    @cached_property
    def spec(self) -> ModelSpec:
        """Blocks and packs."""
        return spec_of(self.shape, self.choices)

    @cached_property
    def work(self) -> ModelWork:
        """How long each block computes."""
        return ModelWork(self.shape, self.machine, self.choices)

    @cached_property
    def simulated(self) -> Simulated:
        """One step in the middle of training, on the machine's figures."""
        return self.work.simulate(
            self.spec,
            self.residency,
            range(len(self.spec.blocks)),
            kept=self.kept,
            trained=self.trained,
            stay=self.stay,
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by cause, as a `StepResult` has them: see `plan.causes`."""
        return planned_seconds(self.simulated, in_place=self.machine.in_place)

    @cached_property
    def least_seconds(self) -> dict[str, float]:
        """By resource (``compute``, ``disk``, ``link``, ``memory``) the least time that a step takes there."""
        updated = self.trained - self.tail
        return _least(self.machine, self.simulated, self.spec, updated)

    @property
    def tail(self) -> frozenset[int]:
        """Packs that live on a device: gradients, moments and AdamW as well."""
        return self.residency.elsewhere

    @property
    def tail_bytes(self) -> int:
        """What lives on the device of those, in bytes: weights, gradients and moments."""
        weights = sum(self.spec.packs[pack].weight_bytes for pack in self.tail)
        return weights + tail_bytes(self.spec, self.tail)

    @cached_property
    def tail_saves(self) -> dict[str, int]:
        """Bytes that a step moves less than if no pack lived on the device; ways as in `moved_bytes`."""
        if not self.tail:
            return {}
        now, without = self.moved_bytes, self.changed(max_tail_bytes=0).moved_bytes
        return {way: without[way] - num_bytes for way, num_bytes in now.items()}

    @property
    def fits(self) -> bool:
        """Whether it can run within all budgets."""
        return not self.problems

    @property
    def offloads(self) -> bool:
        """Whether anything goes to the disk, or to a device; else plain PyTorch does the same."""
        return bool(self.residency.disk_bytes) or not self.machine.in_place

    @property
    def fits_plainly(self) -> bool:
        """Whether all of it fits where the blocks compute, so that plain PyTorch can train it."""
        if self.machine.in_place:
            return not self.residency.disk_bytes
        return self.conventional_bytes <= self.limits["vram"]

    @property
    def peak_ram_bytes(self) -> int:
        """Resident memory of the process at its peak, Python and torch included."""
        return sum(item.num_bytes for item in self.ram)

    @property
    def peak_vram_bytes(self) -> int:
        """The device's memory at its peak; 0 where blocks compute in RAM."""
        return sum(item.num_bytes for item in self.vram)

    @property
    def disk_bytes(self) -> int:
        """What the offload directory takes."""
        return sum(item.num_bytes for item in self.disk)

    @property
    def limits(self) -> dict[str, int]:
        """Budget by tier, in bytes; that of RAM counts the process as a whole."""
        choices, machine = self.choices, self.machine
        found = {
            "ram": choices.ram_limit_bytes(machine)
            + machine.framework_bytes
            + ROUNDING_BYTES,
            "disk": choices.limit_bytes("disk", machine),
        }
        if not machine.in_place:
            found["vram"] = choices.limit_bytes("vram", machine)
        return found

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that one step moves, by way: ``disk to ram``, ``ram to disk``, and the same for a device."""
        done = self.simulated
        found = {"disk to ram": done.read_bytes, "ram to disk": done.written_bytes}
        if not self.machine.in_place:
            found |= {
                "ram to device": done.onload_bytes,
                "device to ram": done.offload_bytes,
            }
        return found

    @property
    def step_seconds(self) -> float:
        """How long a step takes, simulated."""
        return self.simulated.seconds

    @property
    def bound_seconds(self) -> float:
        """No schedule could be faster on this machine."""
        return max(self.least_seconds.values())

    @property
    def bound_by(self) -> str:
        """What bounds the step: ``compute``, ``disk``, ``link`` or ``memory``."""
        return max(self.least_seconds, key=self.least_seconds.__getitem__)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that are trained on in a second."""
        return self.choices.window.tokens / self.step_seconds

    @property
    def written_bytes_per_step(self) -> int:
        """What a step writes to the disk."""
        return self.simulated.written_bytes

    @property
    def written_bytes_per_day(self) -> float:
        """What a day of training writes to the disk."""
        return self.written_bytes_per_step / self.step_seconds * 86400

    @property
    def drive_years(self) -> float:
        """Years of training without a pause until the drives' warranted writes are used up; inf if unknown."""
        if not self.written_bytes_per_step or not self.machine.endurance_bytes:
            return math.inf
        return self.machine.endurance_bytes / (self.written_bytes_per_day * 365.25)

    @property
    def spans(self) -> tuple[Span, ...]:
        """One step as it would happen."""
        return self.simulated.spans

    @property
    def conventional(self) -> tuple[Item, ...]:
        """What the same training takes where everything is in one memory, gradient checkpointing included."""
        shape, window, bf16 = self.shape, self.choices.window, self.choices.bf16
        spec = shape.spec(split=bf16)
        one = replace(window, accumulation=1)
        largest = largest_kept_bytes(shape, window, bf16=bf16)
        logits = whole_logits_bytes(
            tokens=window.rows, vocabulary=shape.dims.vocabulary
        )
        return (
            Item("weights", sum(pack.numel for pack in spec.packs) * 4),
            Item("gradients", sum(pack.grad_bytes for pack in spec.packs)),
            Item("Adam's moments", sum(pack.numel for pack in spec.packs) * 8),
            Item("activations", border_bytes(shape, one, bf16=bf16) + largest + logits),
        )

    @property
    def conventional_bytes(self) -> int:
        """What the items of `conventional` take together."""
        return sum(item.num_bytes for item in self.conventional)

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """The cheapest changes that make it fit; where it fits, what would make it faster."""
        from megatrain_nb.plan.advice import advise  # noqa: PLC0415 - it makes plans

        return advise(self)

    def changed(self, **changes: object) -> Plan:
        """Return the plan with other choices."""
        from megatrain_nb.plan.planner import make_plan  # noqa: PLC0415 - it makes plans

        return make_plan(self.shape, self.machine, replace(self.choices, **changes))  # type: ignore[arg-type]

    def __str__(self) -> str:
        from megatrain_nb.plan.report import as_text  # noqa: PLC0415 - it reads plans

        return as_text(self)

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        from megatrain_nb.plan.report import as_html, as_text  # noqa: PLC0415

        return {"text/plain": as_text(self), "text/html": as_html(self)}

    def figure(self) -> object:
        """Return bars by tier and the timeline of a step, as a plotly figure."""
        # By name: pictures are the notebook's, which knows this layer and not the other way round.
        from importlib import import_module  # noqa: PLC0415

        return import_module("megatrain_nb.notebook.forecast").plan_figure(self)


def _least(
    machine: Machine,
    done: Simulated,
    spec: ModelSpec,
    updated: frozenset[int],
) -> dict[str, float]:
    """Return the least seconds by resource: each alone, without a pause; ``updated`` are the packs of the host's AdamW."""
    compute, update = done.busy_s["compute"], done.busy_s["update"]
    found = {"compute": compute + update if machine.in_place else compute}
    if done.read_bytes or done.written_bytes:
        found["disk"] = (
            done.read_bytes / machine.read_bytes_per_s
            + done.written_bytes / machine.write_bytes_per_s
        )
    if not machine.in_place:
        found["link"] = max(
            done.onload_bytes / machine.onload_bytes_per_s,
            done.offload_bytes / machine.offload_bytes_per_s,
        )
        passed = sum(
            2 * spec.packs[p].weight_bytes
            + spec.packs[p].grad_bytes
            + 2 * spec.packs[p].states_bytes
            for p in updated
        )
        moved = (
            done.read_bytes
            + done.written_bytes
            + done.onload_bytes
            + done.offload_bytes
        )
        found["memory"] = max(update, (passed + moved) / machine.memory_bytes_per_s)
    return found
