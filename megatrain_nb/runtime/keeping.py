"""Which calls keep their activations from forward to backward, and the bytes that all of them hold.

[Note: where the bytes come from] What is kept grows while a forward passes the blocks, and is freed by the backward.
What streams needs most in the forward, where updates are done. So part of what is kept is borrowed from the
pool for what streams, from just before a call on (`HostPool.set_aside`), and given back when the pool needs it
after the backward: freed tensors wait in the heap, which has to be trimmed first. If the pool
needs it before, the call whose backward comes last gives its tensors up, and computes them again.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from megatrain_nb.plan.keep import choose_kept
from megatrain_nb.runtime import heap
from megatrain_nb.runtime.kept import COUNTABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatrain_nb.runtime.kept import Kept
    from megatrain_nb.runtime.layers import Block

logger = logging.getLogger("megatrain_nb")


class Lender(Protocol):
    """Has memory that activations may take for a while."""

    def set_aside(self, num_bytes: int) -> bool:
        """Leave so much to them; False if there is not enough."""

    def take_back(self, num_bytes: int) -> None:
        """Have so much of it again."""


class Lease:
    """What one call may keep, from before it runs.

    Attributes
    ----------
    num_bytes
        How much.
    lent_bytes
        How much of that is borrowed.
    """

    def __init__(self, keeping: Keeping, num_bytes: int, lent_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.lent_bytes = lent_bytes
        self._keeping = keeping
        self._kept: weakref.ref[Kept] | None = None

    @property
    def used(self) -> bool:
        """Whether a graph holds it."""
        return self._kept is not None

    def hand_to(self, kept: Kept) -> None:
        """Let a graph have it until that is let go or emptied."""
        self._kept = weakref.ref(kept)
        kept.on_release(self.end)

    def empty(self) -> bool:
        """Take the tensors from the graph; False if it has none, or if they are in use."""
        kept = self._kept() if self._kept is not None else None
        if kept is None or kept.in_use or kept.is_empty():
            return False
        kept.empty()
        return True

    def end(self) -> None:
        """Give all back."""
        self._keeping.end(self)


class Keeping:
    """Decides which calls keep their activations, and counts.

    Attributes
    ----------
    limit_bytes
        What all calls may keep together.
    lent_bytes
        How much of that the pool lends.
    held_bytes, peak_bytes
        What they keep now, and the most since `restart_peak`.
    """

    def __init__(self, lender: Lender) -> None:
        self.limit_bytes = 0
        self.lent_bytes = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self._lender = lender
        self._borrowed_bytes = 0
        self._leases: dict[Lease, None] = {}  # the first one's backward comes last
        self._seen: dict[int, int] = {}
        self._num_bytes: dict[int, int] = {}
        self._call_bytes: dict[int, int] = {}
        self._chosen: frozenset[int] = frozenset()
        self._refused: set[int] = set()

    @property
    def wanted_bytes(self) -> int:
        """What keeping every call of a window would take, as far as it is known."""
        return sum((self._num_bytes | self._seen).values())

    @property
    def chosen(self) -> frozenset[int]:
        """The blocks whose calls should keep their activations."""
        return self._chosen

    def choose(self, order: Sequence[int]) -> None:
        """Choose anew, at the start of a forward that passes the blocks of ``order``."""
        self._num_bytes.update(self._seen)
        self._seen.clear()
        self._chosen = choose_kept(
            self._num_bytes, order, limit_bytes=self.limit_bytes - self.held_bytes
        )

    def wants(self, block: int) -> bool:
        """Whether calls of this block should keep their activations."""
        return block in self._chosen

    def refuses(self, block: int) -> bool:
        """Whether no graph of this block may outlive its forward."""
        return not COUNTABLE or block in self._refused

    def learn(self, block: Block, num_bytes: int) -> None:
        """Note what a call of the block keeps, or would keep."""
        index = block.spec.index
        if index not in self._refused:
            self._seen[index] = self._seen.get(index, 0) + num_bytes
            self._call_bytes[index] = max(self._call_bytes.get(index, 0), num_bytes)

    def refuse(self, block: Block) -> None:
        """Never let a graph of this block outlive its forward."""
        logger.info(
            "%s computes all of it again in backward: an operation in it holds a weight beyond autograd's knowledge",
            block.name,
        )
        for known in (self._num_bytes, self._seen):
            known.pop(block.spec.index, None)
        self._refused.add(block.spec.index)
        self._chosen -= {block.spec.index}

    @contextmanager
    def lease(self, block: int) -> Iterator[Lease | None]:
        """Set aside what a call of this block is about to keep; None if it is to keep nothing, or there is no room.

        What no graph was given has its bytes given back at the end.
        """
        lease = (
            self._lease(self._call_bytes.get(block, 0)) if self.wants(block) else None
        )
        try:
            yield lease
        finally:
            if lease is not None and not lease.used:
                lease.end()

    def end(self, lease: Lease) -> None:
        """Have a lease's bytes back."""
        del self._leases[lease]
        self.held_bytes -= lease.num_bytes

    def give_back(self) -> bool:
        """Give back what was borrowed and is free; False if there is nothing."""
        free = self._borrowed_bytes - sum(x.lent_bytes for x in [*self._leases])
        if free <= 0:
            return False
        heap.trim()
        self._borrowed_bytes -= free
        self._lender.take_back(free)
        return True

    def give_up(self) -> bool:
        """Free what the call keeps whose backward comes last; False if none keeps anything that was lent."""
        gave = any(lease.empty() for lease in [*self._leases] if lease.lent_bytes)
        return gave and self.give_back()

    def close(self) -> None:
        """Give back all that was borrowed; graphs that somebody still holds can be used no more."""
        self._lender.take_back(self._borrowed_bytes)
        self._borrowed_bytes = 0

    def restart_peak(self) -> int:
        """Return the peak, and let it start again from now."""
        peak, self.peak_bytes = self.peak_bytes, self.held_bytes
        return peak

    def _lease(self, num_bytes: int) -> Lease | None:
        held = self.held_bytes + num_bytes
        if held > max(self.limit_bytes, 0) and num_bytes:
            return None
        lent = sum(lease.lent_bytes for lease in [*self._leases])
        lent_bytes = max(0, held - (self.limit_bytes - self.lent_bytes) - lent)
        missing = max(0, lent + lent_bytes - self._borrowed_bytes)
        if missing and not self._lender.set_aside(missing):
            return None
        self._borrowed_bytes += missing
        lease = Lease(self, num_bytes, lent_bytes)
        self._leases[lease] = None
        self.held_bytes = held
        self.peak_bytes = max(self.peak_bytes, held)
        return lease
