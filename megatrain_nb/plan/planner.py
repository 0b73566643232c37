"""The plan of a training run: where every byte is, how long a step takes, and what bounds it.

Everything that the runtime decides by arithmetic is decided here by the same functions: `plan_residency`,
`choose_kept`, `prefers_kept`, `cut_logits`, `make_schedule`. What the runtime measures (the model's own tensors,
seconds) is computed from the model's shape and the machine's figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatrain_nb.codec.choice import Compression
from megatrain_nb.errors import BudgetError
from megatrain_nb.plan.activation import (
    Window,
    block_work,
    border_bytes,
    kept_bytes,
    largest_kept_bytes,
    logits_bytes,
)
from megatrain_nb.plan.device import plan_device, slot_bytes
from megatrain_nb.plan.keep import choose_kept, prefers_kept
from megatrain_nb.plan.logits import whole_logits_bytes
from megatrain_nb.plan.memory import (
    Residency,
    disk_need_bytes,
    plan_residency,
    streaming_bytes,
    working_bytes,
)
from megatrain_nb.plan.reserve import settled, with_margin
from megatrain_nb.plan.simulate import BlockTimes, Simulated, Simulation
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatrain_nb.plan.logits import Chunking
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.plan.shape import Part, Shape
    from megatrain_nb.plan.timeline import Span

# What torch takes beside the tensors: buffers of the matrix library, threads, holes in the heap. Measured on small
# models (docs/forecast.md); more where it computes in bf16, whose operations make fp32 copies.
_OWN_BYTES, _OWN_BF16_BYTES = 80_000_000, 90_000_000

# Runs of the same model differ by so much; a session sets aside what it has seen, a plan names the most.
_SPREAD_BYTES = 36_000_000

# Freed memory between tensors that are kept waits in the heap: half of them, where they are small and few; of more
# and larger ones the system takes it back (`megatrain_nb.runtime.heap`). Measured, as above.
_HOLES_SHARE, _HOLES_BYTES = 0.55, 6.8e3
_CONTEXT_BYTES = 500_000_000

# Tensors of 2 MiB and more lie in huge pages, and what is learned of their sum is a little old.
_ROUNDING_BYTES = 16_000_000

# While a block is in backward: what it keeps, gradients of it, and what the operation in progress makes.
_BACKWARD_SHARE = 1.4

# On a CPU: what a call costs however few tokens it has (Python, torch's dispatch). Measured, as above.
_FORWARD_CALL_S, _BACKWARD_CALL_S = 1.5e-3, 3.5e-3


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a tier: what it is, and how large."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a person decides about a run.

    Attributes
    ----------
    window
        The tokens of one step.
    bf16
        Compute in bf16 with an fp32 master; else in fp32.
    compression
        How Adam's moments are stored.
    max_ram_bytes, max_vram_bytes, max_disk_bytes
        Budgets; None for what the machine has.
    trainable
        Parts of names; a parameter is trained whose name has one of them. Empty for all.
    """

    window: Window
    bf16: bool = False
    compression: Compression = field(default_factory=Compression)
    max_ram_bytes: int | None = None
    max_vram_bytes: int | None = None
    max_disk_bytes: int | None = None
    trainable: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A forecast; displays as a table, `figure` draws it.

    Attributes
    ----------
    shape, machine, choices
        What it is a plan of.
    residency
        Which packs stay in RAM, as the runtime decides it.
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
    def simulated(self) -> Simulated:
        """One step in the middle of training, on the machine's figures."""
        spec, residency, machine = self._spec, self.residency, self.machine
        order = range(len(spec.blocks))
        moved = 0
        if residency.disk_bytes:
            traffic = step_traffic(spec, residency, order)
            moved = traffic.moved_bytes
        times = self._work.times(self.kept, moved)
        simulation = Simulation(
            spec, residency, order, times, machine, self.trained, self.stay
        )
        return simulation.run()

    @cached_property
    def least_seconds(self) -> dict[str, float]:
        """By resource (``compute``, ``disk``, ``link``, ``memory``) the least time that a step takes there."""
        times = self._work.times(self.kept, 0)
        return _least(self.machine, times, self.simulated, self._spec, self.trained)

    @property
    def _spec(self) -> ModelSpec:
        return spec_of(self.shape, self.choices)

    @cached_property
    def _work(self) -> _Work:
        return _Work(self.shape, self.machine, self.choices)

    @property
    def fits(self) -> bool:
        """Whether it can run within all budgets."""
        return not self.problems

    @property
    def offloads(self) -> bool:
        """Whether anything goes to the disk, or to a device; else plain PyTorch does the same."""
        return bool(self.residency.disk_bytes) or not self.machine.in_place

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
            "ram": (choices.max_ram_bytes or machine.ram_bytes)
            + machine.framework_bytes
            + _ROUNDING_BYTES,
            "disk": min(
                choices.max_disk_bytes or machine.disk_bytes, machine.disk_bytes
            ),
        }
        if not machine.in_place:
            found["vram"] = min(
                choices.max_vram_bytes or machine.vram_bytes, machine.vram_bytes
            )
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

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """The cheapest changes that make it fit; where it fits, what would make it faster."""
        from megatrain_nb.plan.advice import advise  # noqa: PLC0415 - it makes plans

        return advise(self)

    def changed(self, **changes: object) -> Plan:
        """Return the plan with other choices."""
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


def spec_of(shape: Shape, choices: Choices) -> ModelSpec:
    """Return blocks and packs of a model as a run has them."""
    return shape.spec(split=choices.bf16, compression=choices.compression)


def make_plan(shape: Shape, machine: Machine, choices: Choices) -> Plan:
    """Return the forecast of a run; it refuses nothing: what does not fit is in ``problems``."""
    spec = spec_of(shape, choices)
    limit = choices.max_ram_bytes or machine.ram_bytes
    problems: list[str] = []
    own, chunking = _own_tensors(shape, machine, choices, spec, limit)
    work = _Work(shape, machine, choices)
    residency, kept = _residency(work, spec, limit, sum(own.values()), problems)
    vram: tuple[Item, ...] = ()
    stay: frozenset[int] = frozenset()
    if not machine.in_place:
        vram, stay, kept, chunking = _vram(work, shape, choices, spec)
    need = disk_need_bytes(spec, residency)
    disk = (
        Item("weights, gradients, moments", residency.disk_bytes),
        Item("room to write new versions", need - residency.disk_bytes),
    )
    plan = Plan(
        shape=shape,
        machine=machine,
        choices=choices,
        residency=residency,
        kept=kept,
        stay=stay,
        chunking=chunking,
        ram=_ram_items(spec, work, residency, own, kept, limit),
        vram=vram,
        disk=disk if need else (),
        problems=(),
        trained=_trained(spec, choices.trainable),
    )
    takes = {"vram": plan.peak_vram_bytes, "disk": plan.disk_bytes}
    names = {"vram": "device memory", "disk": "disk"}
    problems += [
        f"{names[tier]}: {format_bytes(takes[tier])} are needed, {format_bytes(have)} are there"
        for tier, have in plan.limits.items()
        if takes.get(tier, 0) > have
    ]
    return replace(plan, problems=tuple(problems))


class _Work:
    """What a model computes on a machine, block by block."""

    def __init__(self, shape: Shape, machine: Machine, choices: Choices) -> None:
        self._shape, self.machine, self._choices = shape, machine, choices
        self._parts = [part for _, part in shape.blocks()]
        self._by_part = {id(part): self._measure(part) for part in shape.parts}

    def kept_by_block(self) -> dict[int, int]:
        """Return what the calls of each block keep in one window."""
        window, bf16 = self._choices.window, self._choices.bf16
        sizes = {
            id(part): window.accumulation
            * kept_bytes(self._shape, part, window, bf16=bf16)
            for part in self._shape.parts
        }
        return {
            index: sizes[id(part)]
            for index, part in enumerate(self._parts)
            if part.kind != "head"
        }

    def kept(self, blocks: frozenset[int]) -> int:
        """Return what these blocks keep."""
        return sum(
            size for block, size in self.kept_by_block().items() if block in blocks
        )

    def times(self, kept: frozenset[int], io_bytes: int) -> list[BlockTimes]:
        """Return seconds by block; ``io_bytes`` cost the cores time that they do not compute in."""
        last = len(self._parts) - 1
        found = []
        for index, part in enumerate(self._parts):
            forward, backward = self._by_part[id(part)]
            again = 0.0 if index in kept or index == last else forward
            found.append(BlockTimes(forward, again, backward))
        if not self.machine.in_place or not io_bytes:
            return found
        lost = io_bytes * self.machine.io_cpu_s_per_byte / self.machine.cores
        factor = 1 + lost / _total_s(found)
        return [
            BlockTimes(t.forward_s * factor, t.again_s * factor, t.backward_s * factor)
            for t in found
        ]

    def _measure(self, part: Part) -> tuple[float, float]:
        """Return the seconds of forward and of backward for a whole window."""
        choices, machine = self._choices, self.machine
        window, count = choices.window, choices.window.accumulation
        work = block_work(self._shape, part, window)
        products = work.flops / machine.flops_per_s(work.rows, bf16=choices.bf16)
        forward, backward = products, 2 * products
        if machine.in_place:
            rest = work.moved_bytes / machine.memory_bytes_per_s
            forward += rest + _FORWARD_CALL_S
            # A gradient is made in fresh memory; the first micro-batch's is copied to where the update reads it, others
            # are added; its norm is one more pass.
            numel = part.numel + (
                self._shape.dims.vocabulary * self._shape.dims.hidden
                if part.kind == "head" and not part.params
                else 0
            )
            landed = numel * (16 * count + 4 * (count - 1) + 4) / count
            backward += 2 * rest + landed / machine.memory_bytes_per_s
            backward += _BACKWARD_CALL_S
        return forward * count, backward * count


def _own_tensors(
    shape: Shape, machine: Machine, choices: Choices, spec: ModelSpec, limit: int
) -> tuple[dict[str, int], Chunking | None]:
    """Return what the model's own tensors take in RAM while blocks stream, by what they are."""
    window, bf16 = choices.window, choices.bf16
    beside = _OWN_BF16_BYTES if bf16 else _OWN_BYTES
    if not machine.in_place:
        return {"torch's own": beside}, None
    room = max(0, limit - working_bytes(spec))
    logits, chunking = logits_bytes(shape, window, room_bytes=room)
    largest = largest_kept_bytes(shape, window, bf16=bf16)
    gradient = max(
        (math.prod(params) * 4 for part in shape.parts for _, params in part.params),
        default=0,
    )
    block = round(_BACKWARD_SHARE * largest)
    return {
        "inputs of the blocks": border_bytes(shape, window, bf16=bf16),
        "one block's activations": max(block, logits) + gradient,
        "torch's own": beside,
    }, chunking


def _residency(
    work: _Work, spec: ModelSpec, limit: int, own: int, problems: list[str]
) -> tuple[Residency, frozenset[int]]:
    """Decide what stays in RAM, as a session does once it has learned."""
    room = limit - working_bytes(spec)
    reserved = settled(limit, own)
    sizes = work.kept_by_block() if work.machine.in_place else {}
    wanted = with_margin(sum(sizes.values()))
    wanted += _holes(wanted)
    order = range(len(spec.blocks))
    if own > max(room, 0):
        problems.append(
            f"RAM: the model's own tensors take {format_bytes(own)}, and {format_bytes(max(room, 0))} are left "
            f"of {format_bytes(limit)} beside what streams ({format_bytes(working_bytes(spec))})"
        )

    def plan(share: float) -> Residency:
        return plan_residency(
            spec,
            limit_bytes=limit,
            activation_bytes=max(0, min(reserved, room)),
            keep_bytes=wanted,
            keep_share=share,
        )

    try:
        residency = plan(0.0)
    except BudgetError as error:
        if not problems:
            problems.append(f"RAM: {error}")
        working = working_bytes(spec)
        return Residency(
            working_bytes=max(working, min(streaming_bytes(spec), limit)),
            activation_bytes=reserved,
            disk_bytes=spec.state_bytes,
        ), frozenset()
    if residency.disk_bytes and wanted:
        traffic = step_traffic(spec, residency, order)
        machine = work.machine
        best = max(
            machine.read_bytes_per_s,
            machine.write_bytes_per_s,
            machine.mixed_bytes_per_s,
        )
        compute = _total_s(work.times(frozenset(), 0))
        least = {"compute": compute, "disk": traffic.moved_bytes / best}
        if prefers_kept(least, now=False):
            residency = plan(1.0)
    # What keeping costs beside its bytes is set aside with them.
    holes = _holes(sum(sizes.values()))
    kept = choose_kept(sizes, order, limit_bytes=residency.keep_bytes - holes)
    return residency, kept


def _vram(
    work: _Work, shape: Shape, choices: Choices, spec: ModelSpec
) -> tuple[tuple[Item, ...], frozenset[int], frozenset[int], Chunking | None]:
    """Return what the device holds at its peak, which packs stay there, and which blocks keep activations."""
    window, bf16, machine = choices.window, choices.bf16, work.machine
    limit = min(choices.max_vram_bytes or machine.vram_bytes, machine.vram_bytes)
    slots = slot_bytes(spec)
    logits, chunking = logits_bytes(shape, window, room_bytes=max(0, limit - slots))
    largest = largest_kept_bytes(shape, window, bf16=bf16)
    items = [
        Item("slots for weights and gradients", slots),
        Item("inputs of the blocks", border_bytes(shape, window, bf16=bf16)),
        Item("one block's activations", round(_BACKWARD_SHARE * largest)),
        Item("logits", logits),
        Item("the driver's own", _CONTEXT_BYTES),
    ]
    other = sum(item.num_bytes for item in items[1:])
    sizes = work.kept_by_block()
    order = range(len(spec.blocks))
    compute = _total_s(work.times(frozenset(), 0))
    link = 2 * spec.weight_bytes / machine.onload_bytes_per_s
    plan = plan_device(
        spec,
        order,
        limit_bytes=limit,
        other_bytes=other,
        wanted_keep_bytes=with_margin(sum(sizes.values())),
        keep_first=link <= compute,
    )
    kept = choose_kept(sizes, order, limit_bytes=plan.keep_bytes)
    stays = sum(spec.packs[pack].weight_bytes for pack in plan.stay)
    items += [
        Item("weights that stay", stays),
        Item("activations that are kept", work.kept(kept)),
    ]
    return tuple(i for i in items if i.num_bytes), plan.stay, kept, chunking


def _ram_items(
    spec: ModelSpec,
    work: _Work,
    residency: Residency,
    own: dict[str, int],
    blocks: frozenset[int],
    limit: int,
) -> tuple[Item, ...]:
    packs, machine = spec.packs, work.machine
    kept = work.kept(blocks) if machine.in_place else 0
    beside = {
        **own,
        "activations that are kept": kept,
        "holes between those": _holes(kept),
        "what runs differ by": _SPREAD_BYTES,
    }
    # Where something streams, slabs of all sizes wait for reuse until the budget is used up.
    buffers = residency.working_bytes
    if residency.disk_bytes:
        left = limit - residency.resident_bytes - sum(beside.values())
        buffers = max(working_bytes(spec), left)
    items = [
        Item("weights", sum(packs[p].weight_bytes for p in residency.weights)),
        Item("gradients", sum(packs[p].grad_bytes for p in residency.grads)),
        Item("Adam's moments", sum(packs[p].states_bytes for p in residency.states)),
        Item("buffers for what streams", buffers),
        *(Item(name, num_bytes) for name, num_bytes in beside.items()),
        Item("Python and torch", machine.framework_bytes + _ROUNDING_BYTES),
    ]
    return tuple(item for item in items if item.num_bytes)


def _total_s(times: Iterable[BlockTimes]) -> float:
    return sum(each.total_s for each in times)


def _holes(kept: int) -> int:
    return round(min(_HOLES_SHARE * kept, _HOLES_BYTES * math.sqrt(kept)))


def _least(
    machine: Machine,
    times: Sequence[BlockTimes],
    done: Simulated,
    spec: ModelSpec,
    trained: frozenset[int],
) -> dict[str, float]:
    """Return the least seconds by resource: each alone, without a pause."""
    compute = _total_s(times)
    update = done.busy_s["update"]
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
        updated = sum(
            2 * spec.packs[p].weight_bytes
            + spec.packs[p].grad_bytes
            + 2 * spec.packs[p].states_bytes
            for p in trained
        )
        moved = (
            done.read_bytes
            + done.written_bytes
            + done.onload_bytes
            + done.offload_bytes
        )
        found["memory"] = max(update, (updated + moved) / machine.memory_bytes_per_s)
    return found


def _trained(spec: ModelSpec, trainable: tuple[str, ...]) -> frozenset[int]:
    if not trainable:
        return frozenset(range(len(spec.packs)))
    return frozenset(
        pack.index
        for pack in spec.packs
        if any(word in param.name for param in pack.params for word in trainable)
    )
