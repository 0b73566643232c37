"""Bytes that one optimizer step moves between disk and RAM, from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_nb.plan.packing import AS_THEY_ARE
from megatrain_nb.plan.schedule import Kind, make_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import ModelSpec, PackSpec
    from megatrain_nb.plan.packing import OnDisk

# The blocks that a pass begins with stay in RAM from the pass before: weights, and gradients for a forward.
NUM_FIRST = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read from disk and written to it, and the processor time of packing and unpacking them."""

    read_bytes: int
    written_bytes: int
    packing_cpu_s: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Both together."""
        return self.read_bytes + self.written_bytes


def step_traffic(
    spec: ModelSpec,
    residency: Residency,
    order: Sequence[int],
    on_disk: OnDisk = AS_THEY_ARE,
    *,
    stay: frozenset[int] = frozenset(),
) -> Traffic:
    """Return what a step in the middle of training moves, its update included.

    Parameters
    ----------
    spec
        The model; all of its packs are trained.
    residency
        What stays in RAM.
    order
        Block indices in the order in which forward passes them; backward goes the other way, and the last
        block turns while it is loaded.
    on_disk
        What pieces take on the disk; left out, as if nothing were packed: the most that it can be.
    stay
        Packs whose weights stay on a device from forward to backward.
    """
    first = set(spec.pack_indices(order[:NUM_FIRST]))
    last = set(spec.pack_indices(order[-1 - NUM_FIRST :]))
    every = set(spec.pack_indices(order)) - residency.elsewhere
    # Backward computes with what stayed on the device, so that RAM need not have it when the next forward begins.
    stay |= residency.elsewhere
    loads = [
        *_loads(spec, order, Kind.FORWARD, loaded=first - stay, stay=stay),
        *_loads(
            spec, list(order)[-2::-1], Kind.BACKWARD, loaded=last | stay, stay=stay
        ),
    ]
    loads = [pack for pack in loads if pack not in residency.elsewhere]
    early = early_gradients(spec, residency, order)
    read = {
        "weights": _streamed(spec, loads, residency.weights),
        "grads": _streamed(spec, every - early, residency.grads),
        "states": _streamed(spec, every, residency.states),
    }
    written = read | {"weights": _streamed(spec, every, residency.weights)}
    return Traffic(
        _sum_bytes(on_disk, read),
        _sum_bytes(on_disk, written),
        _sum_seconds(on_disk.unpack_seconds, read)
        + _sum_seconds(on_disk.pack_seconds, written),
    )


def link_traffic(
    spec: ModelSpec,
    order: Sequence[int],
    *,
    stay: frozenset[int] = frozenset(),
    elsewhere: frozenset[int] = frozenset(),
    trained: frozenset[int] | None = None,
) -> tuple[int, int]:
    """Return the bytes that a step copies to a device with memory of its own, and back.

    Parameters
    ----------
    spec, order
        As for `step_traffic`.
    stay
        Packs whose weights stay on the device from forward to backward.
    elsewhere
        Packs that live on the device.
    trained
        Packs that are trained; left out, all of them.
    """
    there = set(elsewhere)
    copied: list[int] = []
    for blocks, kind in ((order, Kind.FORWARD), (order[-2::-1], Kind.BACKWARD)):
        ahead: list[int] = []
        for action in make_schedule(spec, blocks, kind):
            packs = spec.blocks[action.block].packs
            if action.kind is Kind.READ:
                ahead.append(action.block)
            elif action.kind is kind:
                ahead.remove(action.block)
                copied += [pack for pack in packs if pack not in there]
                there.update(packs)
            else:
                needed = spec.pack_indices(ahead)
                there -= set(packs) - stay - elsewhere - set(needed)
    every = set(spec.pack_indices(order)) - elsewhere
    back = every if trained is None else every & trained
    return (
        sum(spec.packs[pack].weight_bytes for pack in copied),
        sum(spec.packs[pack].grad_bytes for pack in back),
    )


def early_gradients(
    spec: ModelSpec, residency: Residency, order: Sequence[int]
) -> frozenset[int]:
    """Return the packs whose gradients wait in RAM for the update that the next forward begins with.

    Those of the first blocks, as far as there is room beside all that the first blocks need: else the last of them
    leave. A plan without room for what streams says nothing of it, and they stay.
    """
    early = [
        pack
        for pack in spec.pack_indices(order[:NUM_FIRST])
        if pack not in residency.elsewhere
    ]
    stays = {
        "weights": residency.weights,
        "grads": residency.grads,
        "states": residency.states,
    }
    needed = sum(
        spec.packs[pack].num_bytes(piece)
        for pack in early
        for piece, resident in stays.items()
        if pack not in resident
    )
    while early and needed > residency.working_bytes > 0:
        pack = early.pop()
        needed -= sum(  # without its gradient an update cannot begin, and nothing is read for it
            spec.packs[pack].num_bytes(piece)
            for piece in ("grads", "states")
            if pack not in stays[piece]
        )
    return frozenset(early)


def _streamed(
    spec: ModelSpec, packs: Iterable[int], resident: frozenset[int]
) -> list[PackSpec]:
    return [spec.packs[pack] for pack in packs if pack not in resident]


def _sum_bytes(on_disk: OnDisk, moved: Mapping[str, list[PackSpec]]) -> int:
    return sum(
        on_disk.num_bytes(piece, pack)
        for piece, packs in moved.items()
        for pack in packs
    )


def _sum_seconds(
    cost: Callable[[str, PackSpec], float], moved: Mapping[str, list[PackSpec]]
) -> float:
    return sum(cost(piece, pack) for piece, packs in moved.items() for pack in packs)


def _loads(
    spec: ModelSpec,
    order: Sequence[int],
    kind: Kind,
    *,
    loaded: set[int],
    stay: frozenset[int],
) -> list[int]:
    """Return the packs that a pass reads, in order; those in ``loaded`` are there already, those in ``stay`` stay."""
    loaded = set(loaded)
    reads: list[int] = []
    ahead: list[int] = []
    for action in make_schedule(spec, order, kind):
        packs = spec.blocks[action.block].packs
        if action.kind is Kind.READ:
            ahead.append(action.block)
            reads += [pack for pack in packs if pack not in loaded]
            loaded.update(packs)
        elif action.kind is kind:
            ahead.remove(action.block)
        else:
            loaded -= set(packs) - set(spec.pack_indices(ahead)) - stay
    return reads
