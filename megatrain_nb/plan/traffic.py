"""Bytes that one optimizer step moves between disk and RAM, from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_nb.plan.schedule import Kind, make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import ModelSpec, PackSpec

# The blocks that a pass begins with stay in RAM from the pass before: weights, and gradients for a forward.
NUM_FIRST = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read from disk and written to it; where tiles are packed, the most that it can be."""

    read_bytes: int
    written_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Both together."""
        return self.read_bytes + self.written_bytes


def step_traffic(
    spec: ModelSpec,
    residency: Residency,
    order: Sequence[int],
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
    stay
        Packs whose weights stay on a device from forward to backward.
    """
    first = {pack for block in order[:NUM_FIRST] for pack in spec.blocks[block].packs}
    last = {p for b in order[-1 - NUM_FIRST :] for p in spec.blocks[b].packs}
    every = {pack for block in order for pack in spec.blocks[block].packs}
    every -= residency.elsewhere
    again = _loads(spec, list(order)[-2::-1], Kind.BACKWARD, loaded=last)
    loads = [
        *_loads(spec, order, Kind.FORWARD, loaded=first),
        *(pack for pack in again if pack not in stay),
    ]
    loads = [pack for pack in loads if pack not in residency.elsewhere]

    def streamed(packs: Iterable[int], resident: frozenset[int]) -> Iterator[PackSpec]:
        return (spec.packs[pack] for pack in packs if pack not in resident)

    weights = sum(pack.weight_bytes for pack in streamed(loads, residency.weights))
    updated = sum(pack.weight_bytes for pack in streamed(every, residency.weights))
    grads = sum(pack.grad_bytes for pack in streamed(every - first, residency.grads))
    states = sum(pack.states_bytes for pack in streamed(every, residency.states))
    return Traffic(weights + grads + states, updated + grads + states)


def _loads(
    spec: ModelSpec, order: Sequence[int], kind: Kind, *, loaded: set[int]
) -> list[int]:
    """Return the packs that a pass reads, in order; those in ``loaded`` are there already."""
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
            needed = {pack for block in ahead for pack in spec.blocks[block].packs}
            loaded -= set(packs) - needed
    return reads
