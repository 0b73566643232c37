"""How a plan is made: what stays where, which blocks keep their activations, and what each tier holds.

Everything that the runtime decides by arithmetic is decided here by the same functions: `plan_residency`,
`choose_kept`, `prefers_kept`, `cut_logits`, `plan_device`. What the runtime measures (the model's own tensors,
seconds) is computed from the model's shape and the machine's figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain_nb.errors import BudgetError
from megatrain_nb.plan.activation import border_bytes, logits_bytes
from megatrain_nb.plan.choices import spec_of
from megatrain_nb.plan.device import plan_device, slot_bytes
from megatrain_nb.plan.keep import choose_kept, prefers_kept
from megatrain_nb.plan.memory import (
    Residency,
    disk_need_bytes,
    plan_residency,
    streaming_bytes,
    working_bytes,
)
from megatrain_nb.plan.own import (
    ROUNDING_BYTES,
    SPREAD_BYTES,
    OwnTensors,
    backward_bytes,
    holes_bytes,
    kept_by_block,
    own_tensors,
    set_aside,
)
from megatrain_nb.plan.plan import Item, Plan
from megatrain_nb.plan.reserve import settled, with_margin
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.plan.work import ModelWork, total_s
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.plan.choices import Choices
    from megatrain_nb.plan.logits import Chunking
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.plan.shape import Shape

_CONTEXT_BYTES = 500_000_000
_TIERS = {"vram": "device memory", "disk": "disk"}


def make_plan(shape: Shape, machine: Machine, choices: Choices) -> Plan:
    """Return the forecast of a run; it refuses nothing: what does not fit is in ``problems``."""
    return _Planner(shape, machine, choices).plan()


class _Planner:
    """One model on one machine, and what its plan needs more than once."""

    def __init__(self, shape: Shape, machine: Machine, choices: Choices) -> None:
        self._shape, self._machine, self._choices = shape, machine, choices
        self._spec = spec_of(shape, choices)
        self._order = range(len(self._spec.blocks))
        self._limit = choices.max_ram_bytes or machine.ram_bytes
        self._working = working_bytes(self._spec)
        self._streaming = self._working + choices.packing_bytes
        self._room = self._limit - self._streaming
        self._keepable = kept_by_block(shape, choices)
        self._compute_s = total_s(ModelWork(shape, machine, choices).times(frozenset()))
        self._problems: list[str] = []

    def plan(self) -> Plan:
        """Return the plan."""
        own = own_tensors(
            self._shape,
            self._choices,
            room_bytes=self._room,
            in_place=self._machine.in_place,
        )
        residency, kept = self._stays_in_ram(own)
        chunking, stay = own.chunking, frozenset[int]()
        vram: tuple[Item, ...] = ()
        if not self._machine.in_place:
            vram, stay, kept, chunking = self._on_device()
        need = disk_need_bytes(self._spec, residency)
        plan = Plan(
            shape=self._shape,
            machine=self._machine,
            choices=self._choices,
            residency=residency,
            kept=kept,
            stay=stay,
            chunking=chunking,
            ram=self._ram_items(residency, own, kept),
            vram=vram,
            disk=_disk_items(residency, need),
            problems=(),
            trained=_trained(self._spec, self._choices.trainable),
        )
        return replace(plan, problems=(*self._problems, *_too_large(plan)))

    def _stays_in_ram(self, own: OwnTensors) -> tuple[Residency, frozenset[int]]:
        """Decide what stays in RAM, as a session does in its first step, and which blocks keep their activations."""
        room = max(self._room, 0)
        sizes = self._keepable if self._machine.in_place else {}
        wanted = with_margin(sum(sizes.values()))
        holes = holes_bytes(wanted)
        if own.num_bytes > room:
            self._problems.append(
                f"RAM: the model's own tensors take {format_bytes(own.num_bytes)}, and {format_bytes(room)} are left of "
                f"{format_bytes(self._limit)} beside what streams ({format_bytes(self._streaming)})"
            )
        reserved = set_aside(own)
        if not self._machine.in_place:  # there a session guesses first, and learns
            reserved = settled(self._limit, own.num_bytes)

        def plan(share: float) -> Residency:
            return plan_residency(
                self._spec,
                limit_bytes=self._limit,
                activation_bytes=min(reserved, room),
                keep_bytes=wanted + holes,
                keep_share=share,
                packing_bytes=self._choices.packing_bytes,
            )

        try:
            residency = plan(0.0)
        except BudgetError as error:
            if not self._problems:
                self._problems.append(f"RAM: {error}")
            return self._too_little_ram(reserved), frozenset()
        if wanted and self._prefers_kept(residency):
            residency = plan(1.0)
        # What keeping costs beside its bytes is set aside with them.
        kept = choose_kept(sizes, self._order, limit_bytes=residency.keep_bytes - holes)
        return residency, kept

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

    def _prefers_kept(self, residency: Residency) -> bool:
        if not residency.disk_bytes:
            return False
        machine, on_disk = self._machine, self._choices.on_disk
        traffic = step_traffic(self._spec, residency, self._order, on_disk)
        best = max(
            machine.read_bytes_per_s,
            machine.write_bytes_per_s,
            machine.mixed_bytes_per_s,
        )
        least = {"compute": self._compute_s, "disk": traffic.moved_bytes / best}
        return prefers_kept(least, now=False)

    def _on_device(
        self,
    ) -> tuple[tuple[Item, ...], frozenset[int], frozenset[int], Chunking | None]:
        """Return what the device holds at its peak, which packs stay there, and which blocks keep activations."""
        machine, shape, spec = self._machine, self._shape, self._spec
        window, bf16 = self._choices.window, self._choices.bf16
        limit = self._choices.limit_bytes("vram", machine)
        slots = slot_bytes(spec)
        logits, chunking = logits_bytes(shape, window, room_bytes=max(0, limit - slots))
        items = [
            Item("slots for weights and gradients", slots),
            Item("inputs of the blocks", border_bytes(shape, window, bf16=bf16)),
            Item("one block's activations", backward_bytes(shape, window, bf16=bf16)),
            Item("logits", logits),
            Item("the driver's own", _CONTEXT_BYTES),
        ]
        plan = plan_device(
            spec,
            self._order,
            limit_bytes=limit,
            other_bytes=sum(item.num_bytes for item in items[1:]),
            wanted_keep_bytes=with_margin(sum(self._keepable.values())),
            keep_first=2 * spec.weight_bytes
            <= self._compute_s * machine.onload_bytes_per_s,
        )
        kept = choose_kept(self._keepable, self._order, limit_bytes=plan.keep_bytes)
        stays = sum(spec.packs[pack].weight_bytes for pack in plan.stay)
        items += [
            Item("weights that stay", stays),
            Item("activations that are kept", _sum_of(self._keepable, kept)),
        ]
        return tuple(i for i in items if i.num_bytes), plan.stay, kept, chunking

    def _ram_items(
        self, residency: Residency, own: OwnTensors, blocks: frozenset[int]
    ) -> tuple[Item, ...]:
        packs, machine = self._spec.packs, self._machine
        kept = _sum_of(self._keepable, blocks) if machine.in_place else 0
        beside = {
            **own.items,
            "activations that are kept": kept,
            "holes between those": holes_bytes(kept),
            "what runs differ by": SPREAD_BYTES,
            "windows for packing": self._choices.packing_bytes,
        }
        # Where something streams, slabs of all sizes wait for reuse until the pool's share is used up.
        buffers = residency.working_bytes
        if residency.disk_bytes:
            aside = residency.activation_bytes + residency.keep_bytes
            left = self._limit - aside - self._choices.packing_bytes
            buffers = max(self._working, left - residency.resident_bytes)
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
