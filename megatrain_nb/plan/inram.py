"""What a simulated step has in RAM of what streams, at each moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_nb.plan.disk import Job
    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import PackSpec


@dataclass(slots=True)
class Share:
    """What an update uses of a pack, from one share of it (0 to 1) to another, and the reads of that by piece."""

    start: float
    stop: float
    jobs: dict[str, Job] = field(default_factory=dict)

    def of(self, whole: int) -> int:
        """Return this share of a number of bytes; shares that follow each other add up to it."""
        return round(self.stop * whole) - round(self.start * whole)


WHOLE = Share(0.0, 1.0)


@dataclass(slots=True)
class InRam:
    """Packs by where they are while a step goes on.

    Attributes
    ----------
    loaded, reading
        Packs whose weights are in RAM; those of them that are being read.
    dirty
        Newer in RAM than on disk.
    due, for_update
        Packs that have an update due, and what has been read for it.
    grads
        Packs whose gradient waits in RAM for the update.
    """

    loaded: set[int] = field(default_factory=set)
    reading: dict[int, Job] = field(default_factory=dict)
    dirty: set[int] = field(default_factory=set)
    due: set[int] = field(default_factory=set)
    for_update: dict[int, list[Share]] = field(default_factory=dict)
    grads: set[int] = field(default_factory=set)

    def num_bytes(self, packs: Sequence[PackSpec], residency: Residency) -> int:
        """Return the bytes of all this that does not stay in RAM anyway."""
        shares = (share for found in self.for_update.values() for share in found)
        return (
            sum(packs[p].weight_bytes for p in self.loaded - residency.weights)
            + sum(packs[p].grad_bytes for p in self.grads - residency.grads)
            + sum(job.what.ram_bytes for each in shares for job in each.jobs.values())
        )
