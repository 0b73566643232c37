"""How a plan is made: what stays where, which blocks keep their activations, and what each tier holds.

Everything that the runtime decides by arithmetic is decided here by the same functions: `plan_residency`,
`choose_kept`, `cut_logits`, `plan_device`. What the runtime measures (the model's own tensors,
seconds) is computed from the model's shape and the machine's figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megatrain_nb.errors import BudgetError
from megatrain_nb.plan.activation import (
    border_bytes,
    largest_kept_bytes,
    logits_bytes,
)
from megatrain_nb.plan.choices import spec_of
from megatrain_nb.plan.device import (
    DevicePlan,
    plan_device,
    slot_bytes,
    tail_bytes,
)
from megatrain_nb.plan.keep import choose_kept
from megatrain_nb.plan.memory import (
    Residency,
    disk_need_bytes,
    plan_residency,
    streaming_bytes,
    working_bytes,
)
from megatrain_nb.plan.own import (
    ONE_BLOCK,
    ROUNDING_BYTES,
    SPREAD_BYTES,
    backward_bytes,
    holes_bytes,
    keepable_bytes,
    kept_by_block,
    own_tensors,
    set_aside,
    spread_bytes,
)
from megatrain_nb.plan.plan import Item, Plan
from megatrain_nb.plan.reserve import settled, with_margin
from megatrain_nb.plan.traffic import link_traffic, step_traffic
from megatrain_nb.plan.work import ModelWork, total_s
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain_nb.plan.choices import Choices
    from megatrain_nb.plan.logits import Chunking
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.plan.shape import Shape

_CONTEXT_BYTES = 500_000_000

# Activations are kept where that makes a step shorter by more than what is only a rounding.
_WORTH = 0.98

# A session plans a device again after each step; what binds a step has settled by then.
_STEPS = 4
_TIERS = {"vram": "device memory", "disk": "disk"}


class Decided(NamedTuple):
    """What a run that is under way has decided: what is where, and which blocks keep their activations."""

    residency: Residency
    kept: frozenset[int]
    device: DevicePlan


def make_plan(
    shape: Shape, machine: Machine, choices: Choices, decided: Decided | None = None
) -> Plan:
    """Return the forecast of a run; it refuses nothing: what does not fit is in ``problems``.

    Parameters
    ----------
    shape, machine, choices
        The model, where it is to run, and what a person decides.
    decided
        Of a run that is under way; left out, it is decided as a run would decide it.
    """
    return _Planner(shape, machine, choices).plan(decided)


class _Planner:
    """One model on one machine, and what its plan needs more than once."""

    def __init__(self, shape: Shape, machine: Machine, choices: Choices) -> None:
        self._shape, self._machine, self._choices = shape, machine, choices
        self._spec = spec_of(shape, choices)
        self._order = range(len(self._spec.blocks))
        self._limit = choices.ram_limit_bytes(machine)
        self._working = working_bytes(self._spec)
        self._streaming = self._working + choices.packing_bytes
        self._room = self._limit - self._streaming
        self._keepable = kept_by_block(shape, choices)
        self._trained = _trained(self._spec, choices.trainable)
        self._work = ModelWork(shape, machine, choices)
        self._own = own_tensors(
            shape, choices, room_bytes=self._room, in_place=machine.in_place
        )
        self._problems: list[str] = []

    def plan(self, decided: Decided | None) -> Plan:
        """Return the plan."""
        if decided is not None:
            return self._described(decided)
        residency, kept = self._stays_in_ram(keep_share=0.0)
        if not self._machine.in_place:
            return self._described(self._with_device(residency))
        plan = self._described(Decided(residency, kept, DevicePlan()))
        if not residency.disk_bytes or self._problems or not self._keepable:
            return plan
        residency, kept = self._stays_in_ram(keep_share=1.0)
        if residency == plan.residency:
            return plan
        # RAM for activations saves computing, for weights and states traffic: which of them is faster.
        other = self._described(Decided(residency, kept, DevicePlan()))
        return other if other.step_seconds < _WORTH * plan.step_seconds else plan

    def _described(self, decided: Decided) -> Plan:
        """Return the plan with what is decided, and what follows from it."""
        residency, kept, device = decided
        chunking, vram = self._own.chunking, tuple[Item, ...]()
        if not self._machine.in_place:
            items, chunking = self._beside_slots()
            vram = self._vram_items(items, device, kept)
        need = disk_need_bytes(self._spec, residency)
        plan = Plan(
            shape=self._shape,
            machine=self._machine,
            choices=self._choices,
            residency=residency,
            kept=kept,
            stay=device.stay,
            chunking=chunking,
            ram=self._ram_items(residency, kept),
            vram=vram,
            disk=_disk_items(residency, need),
            problems=(),
            trained=self._trained,
        )
        return replace(plan, problems=(*self._problems, *_too_large(plan)))

    def _stays_in_ram(self, *, keep_share: float) -> tuple[Residency, frozenset[int]]:
        """Decide what stays in RAM, as a session does in its first step, and which blocks keep their activations."""
        own, room = self._own, max(self._room, 0)
        sizes = self._keepable if self._machine.in_place else {}
        wanted = with_margin(sum(sizes.values()))
        if own.num_bytes > room:
            self._problems.append(
                f"RAM: the model's own tensors take {format_bytes(own.num_bytes)}, and {format_bytes(room)} are left of "
                f"{format_bytes(self._limit)} beside what streams ({format_bytes(self._streaming)})"
            )
        reserved = set_aside(own)
        if not self._machine.in_place:  # there a session guesses first, and learns
            reserved = settled(self._limit, own.num_bytes + SPREAD_BYTES)
        try:
            residency = plan_residency(
                self._spec,
                limit_bytes=self._limit,
                activation_bytes=min(reserved, room),
                keep_bytes=wanted + holes_bytes(wanted),
                keep_share=keep_share,
                packing_bytes=self._choices.packing_bytes,
            )
        except BudgetError as error:
            if not self._problems:
                self._problems.append(f"RAM: {error}")
            return self._too_little_ram(reserved), frozenset()
        limit = keepable_bytes(residency.keep_bytes, wanted)
        return residency, choose_kept(sizes, self._order, limit_bytes=limit)

    def _with_device(self, residency: Residency) -> Decided:
        """Return what stays on the device, and what of the rest in RAM."""
        items, _ = self._beside_slots()
        device = self._fill_device(residency, sum(x.num_bytes for x in items[1:]))
        kept = choose_kept(self._keepable, self._order, limit_bytes=device.keep_bytes)
        return Decided(self._beside(device, residency), kept, device)

    def _beside(self, device: DevicePlan, residency: Residency) -> Residency:
        """Return what stays in RAM where some packs live on the device."""
        tail = device.tail & self._trained  # of the others nothing is ever updated
        if not tail or self._problems:
            return residency
        return plan_residency(
            self._spec,
            limit_bytes=self._limit,
            activation_bytes=residency.activation_bytes,
            packing_bytes=self._choices.packing_bytes,
            elsewhere=tail,
        )

    def _too_little_ram(self, reserved: int) -> Residency:
        """Return what would be in RAM where not even streaming fits."""
        spec = self._spec
        streaming = min(streaming_bytes(spec), self._limit)
        return Residency(
            working_bytes=max(self._working, streaming),
            activation_bytes=reserved,
            packing_bytes=self._choices.packing_bytes,
            disk_bytes=spec.state_bytes,
        )

    def _disk_s(self, residency: Residency) -> float:
        """Return the least time on the disk, as a session knows it: by the fastest that it has shown."""
        machine, on_disk = self._machine, self._choices.on_disk
        traffic = step_traffic(self._spec, residency, self._order, on_disk)
        best = max(
            machine.read_bytes_per_s,
            machine.write_bytes_per_s,
            machine.mixed_bytes_per_s,
        )
        return traffic.moved_bytes / best

    def _fill_device(self, residency: Residency, other_bytes: int) -> DevicePlan:
        """Return what stays on the device: planned after each step by what bound it, as a session does."""
        choices = self._choices
        plan, tail_first = DevicePlan(), False
        for _ in range(_STEPS):
            least = self._least_on_device(plan, residency)
            binds = max(least, key=least.__getitem__)
            tail_first |= binds in ("disk", "update")
            before, plan = (
                plan,
                plan_device(
                    self._spec,
                    self._order,
                    limit_bytes=choices.limit_bytes("vram", self._machine),
                    other_bytes=other_bytes,
                    wanted_keep_bytes=with_margin(sum(self._keepable.values())),
                    keep_first=least["link"] <= least["compute"],
                    tail_first=tail_first,
                    max_tail_bytes=choices.max_tail_bytes,
                ),
            )
            if plan == before:
                break
        return plan

    def _least_on_device(
        self, plan: DevicePlan, residency: Residency
    ) -> dict[str, float]:
        """Return the least time of a step by resource, as `megatrain_nb.runtime.costs` measures it."""
        machine, spec = self._machine, self._spec
        beside = self._beside(plan, residency)
        onload, offload = link_traffic(
            spec,
            self._order,
            stay=plan.stay,
            elsewhere=beside.elsewhere,
            trained=self._trained,
        )
        kept = choose_kept(self._keepable, self._order, limit_bytes=plan.keep_bytes)
        updated = self._trained - beside.elsewhere
        return {
            "compute": total_s(self._work.times(kept)),
            "update": sum(machine.update_seconds(spec.packs[p]) for p in updated),
            "link": max(
                onload / machine.onload_bytes_per_s,
                offload / machine.offload_bytes_per_s,
            ),
            "disk": self._disk_s(beside),
        }

    def _beside_slots(self) -> tuple[list[Item], Chunking | None]:
        """Return what the device holds at its peak whatever stays there, slots first, and how logits are cut."""
        shape, window, bf16 = self._shape, self._choices.window, self._choices.bf16
        limit = self._choices.limit_bytes("vram", self._machine)
        slots = slot_bytes(self._spec)
        logits, chunking = logits_bytes(shape, window, room_bytes=max(0, limit - slots))
        items = [
            Item("slots for weights and gradients", slots),
            Item("inputs of the blocks", border_bytes(shape, window, bf16=bf16)),
            Item(ONE_BLOCK, backward_bytes(shape, window, bf16=bf16)),
            Item("logits", logits),
            Item("the driver's own", _CONTEXT_BYTES),
        ]
        return items, chunking

    def _vram_items(
        self, items: Sequence[Item], device: DevicePlan, kept: frozenset[int]
    ) -> tuple[Item, ...]:
        stays = sum(self._spec.packs[pack].weight_bytes for pack in device.stay)
        tail = tail_bytes(self._spec, device.tail)
        found = (
            *items,
            Item("weights that stay", stays),
            Item("gradients and moments that live there", tail),
            Item("activations that are kept", _sum_of(self._keepable, kept)),
        )
        return tuple(item for item in found if item.num_bytes)

    def _ram_items(
        self, residency: Residency, blocks: frozenset[int]
    ) -> tuple[Item, ...]:
        packs, machine = self._spec.packs, self._machine
        kept = _sum_of(self._keepable, blocks) if machine.in_place else 0
        everything = blocks >= self._keepable.keys()
        own = dict(self._own.items)
        if kept and everything:  # that of the block in backward is one of them
            window, bf16 = self._choices.window, self._choices.bf16
            own[ONE_BLOCK] -= largest_kept_bytes(self._shape, window, bf16=bf16)
        beside = {
            **own,
            "activations that are kept": kept,
            "holes between those": holes_bytes(kept) if everything else 0,
            "what runs differ by": spread_bytes(
                self._own, room_bytes=max(self._room, 0)
            ),
            "windows for packing": self._choices.packing_bytes,
        }
        # Where something streams, slabs of all sizes wait for reuse until the pool's share is used up.
        buffers = residency.working_bytes
        if residency.disk_bytes:
            left = self._limit - residency.aside_bytes - self._choices.packing_bytes
            buffers = max(self._working, left - residency.resident_bytes)
            buffers -= min(residency.lent_bytes, kept)
        items = [
            Item("weights", sum(packs[p].weight_bytes for p in residency.weights)),
            Item("gradients", sum(packs[p].grad_bytes for p in residency.grads)),
            Item(
                "Adam's moments", sum(packs[p].states_bytes for p in residency.states)
            ),
            Item("buffers for what streams", buffers),
            *(Item(name, num_bytes) for name, num_bytes in beside.items()),
            Item("Python and torch", machine.framework_bytes + ROUNDING_BYTES),
        ]
        return tuple(item for item in items if item.num_bytes)


def _disk_items(residency: Residency, need: int) -> tuple[Item, ...]:
    if not need:
        return ()
    return (
        Item("weights, gradients, moments", residency.disk_bytes),
        Item("room to write new versions", need - residency.disk_bytes),
    )


def _too_large(plan: Plan) -> list[str]:
    """Return a sentence for each tier but RAM that holds more than it can."""
    takes = {"vram": plan.peak_vram_bytes, "disk": plan.disk_bytes}
    return [
        f"{_TIERS[tier]}: {format_bytes(takes[tier])} are needed, {format_bytes(have)} are there"
        for tier, have in plan.limits.items()
        if takes.get(tier, 0) > have
    ]


def _sum_of(sizes: Mapping[int, int], blocks: frozenset[int]) -> int:
    return sum(size for block, size in sizes.items() if block in blocks)


def _trained(spec: ModelSpec, trainable: tuple[str, ...]) -> frozenset[int]:
    if not trainable:
        return frozenset(range(len(spec.packs)))
    return frozenset(
        pack.index
        for pack in spec.packs
        if any(word in param.name for param in pack.params for word in trainable)
    )
