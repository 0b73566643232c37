"""The schedule: the list of actions that the executor obeys, in order.

An action prints as ``12:READ`` and parses back, so a schedule can be read, tested and compared as
text. Which block comes next is known for a backward pass (the reverse of what ran) and predicted for
a forward pass (`megatrain_nb.plan.predict`); a wrong prediction costs a replan, never a wrong number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from megatrain_nb.plan.model import ModelSpec


class Kind(Enum):
    """What an action does; the value is its text."""

    READ = "READ"  # start to bring the block's weights into RAM
    FORWARD = "FORWARD"  # all micro-batches of the window pass through the block
    BACKWARD = "BACKWARD"  # the same, backwards; gradients land in RAM as they appear
    FREE = "FREE"  # the block's weights may leave RAM

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a schedule.

    Examples
    --------
    >>> str(Action(12, Kind.READ)), Action.parse("3:FORWARD")
    ('12:READ', Action(block=3, kind=<Kind.FORWARD: 'FORWARD'>))
    """

    block: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.block}:{self.kind}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as ``text``."""
        block, _, kind = text.partition(":")
        return cls(int(block), Kind(kind))


def to_text(actions: Iterable[Action]) -> str:
    """Return the schedule as one line of text."""
    return " ".join(map(str, actions))


def from_text(text: str) -> list[Action]:
    """Return the schedule that prints as ``text``."""
    return [Action.parse(word) for word in text.split()]


def make_schedule(
    spec: ModelSpec, order: Sequence[int], kind: Kind, *, depth: int = 1
) -> list[Action]:
    """Return the actions that let the blocks of ``order`` compute one after the other: see `each_action`.

    Notes
    -----
    FREE lets go of those packs of a block that no block of the next ``depth`` places needs; so tied weights
    and a block that is used twice in a row stay.

    Examples
    --------
    >>> from megatrain_nb.plan.model import BlockSpec, ModelSpec, PackSpec
    >>> blocks = tuple(BlockSpec(index=i, name=str(i), packs=(i,)) for i in range(3))
    >>> packs = tuple(
    ...     PackSpec(index=i, name=str(i), params=(), numel=2048) for i in range(3)
    ... )
    >>> spec = ModelSpec(blocks=blocks, packs=packs)
    >>> to_text(make_schedule(spec, [0, 1, 2], Kind.FORWARD))
    '0:READ 1:READ 0:FORWARD 0:FREE 2:READ 1:FORWARD 1:FREE 2:FORWARD 2:FREE'
    """
    largest = max((spec.block_bytes(index) for index in order), default=0)
    return list(each_action(spec, order, kind, depth=depth, largest_bytes=largest))


def each_action(
    spec: ModelSpec,
    order: Iterable[int],
    kind: Kind,
    *,
    largest_bytes: int,
    depth: int = 1,
) -> Iterator[Action]:
    """Yield the actions that let the blocks of ``order`` compute one after the other; it may have no end.

    Parameters
    ----------
    spec
        The model.
    order
        Block indices in the order in which they compute.
    kind
        ``Kind.FORWARD`` or ``Kind.BACKWARD``.
    largest_bytes
        Bytes of the largest block.
    depth
        How many blocks of the largest size are read ahead of the one that computes.
    """
    ahead: deque[int] = deque()
    upcoming = iter(order)

    def is_short() -> bool:
        """Whether what is ahead of the next block to compute is less than planned."""
        if len(ahead) <= depth:
            return True
        return sum(map(spec.block_bytes, list(ahead)[1:])) < depth * largest_bytes

    while True:
        while is_short() and (block := next(upcoming, None)) is not None:
            ahead.append(block)
            yield Action(block, Kind.READ)
        if not ahead:
            return
        block = ahead.popleft()
        yield Action(block, kind)
        needed = set(spec.pack_indices(ahead))
        if not needed.issuperset(spec.blocks[block].packs):
            yield Action(block, Kind.FREE)
