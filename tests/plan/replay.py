"""Recorded traces, and what a memory for some of the blocks would have found there."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain_nb.plan.predict import Phase, Predictor, Use

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACES = Path(__file__).parent / "traces"
STEP = "STEP"


def to_text(trace: Sequence[Use | None]) -> str:
    """One line for each pass over the blocks; None is a step of the optimizer."""
    lines: list[list[str]] = []
    before = None
    for use in trace:
        if use is None:
            lines.append([STEP])
            before = None
            continue
        # A new line where the blocks begin anew, for the eye.
        again = before is not None and use.block == 0 and use.phase != Phase.BACKWARD
        if before is None or before.phase is not use.phase or again:
            lines.append([str(use.phase)])
        lines[-1].append(str(use.block))
        before = use
    return "".join(" ".join(line) + "\n" for line in lines)


def from_text(text: str) -> list[Use | None]:
    trace: list[Use | None] = []
    for line in text.splitlines():
        kind, *blocks = line.split()
        if kind == STEP:
            trace.append(None)
        trace += [Use(int(block), Phase[kind]) for block in blocks]
    return trace


def load(name: str) -> list[Use | None]:
    return from_text((TRACES / f"{name}.txt").read_text())


def uses_of(trace: Sequence[Use | None]) -> list[Use]:
    return [use for use in trace if use is not None]


def num_blocks(uses: Sequence[Use]) -> int:
    return 1 + max(use.block for use in uses)


def prefetched(uses: Sequence[Use]) -> list[bool]:
    """Whether each block was there or read ahead: as the runtime does it, with the memory that it has at least.

    While a block computes, the expected one is read, and what may come in its place; what is none of these leaves.
    """
    predictor = Predictor(range(num_blocks(uses)))
    there: set[int] = set()
    found = []
    for block, phase in uses:
        found.append(block in there)
        predictor.note(block, phase)
        expected = next(predictor.ahead()).block
        there = {block, expected, *predictor.instead()}
    return found


def _next_uses(uses: Sequence[Use]) -> list[int]:
    """For each moment, when the same block is used again."""
    last: dict[int, int] = {}
    found = [len(uses)] * len(uses)
    for moment in reversed(range(len(uses))):
        block = uses[moment].block
        found[moment] = last.get(block, len(uses))
        last[block] = moment
    return found


def clairvoyant_hits(uses: Sequence[Use], slots: int) -> list[bool]:
    """Belady's policy: who is needed last leaves, and the future is known."""
    next_use = _next_uses(uses)
    there: dict[int, int] = {}
    found = []
    for moment, (block, _) in enumerate(uses):
        found.append(block in there)
        if block not in there and len(there) == slots:
            del there[max(there, key=lambda each: there[each])]
        there[block] = next_use[moment]
    return found


def recent_hits(uses: Sequence[Use], slots: int) -> list[bool]:
    """Who was not used for longest leaves."""
    there: list[int] = []
    found = []
    for block, _ in uses:
        found.append(block in there)
        if block in there:
            there.remove(block)
        elif len(there) == slots:
            del there[0]
        there.append(block)
    return found


def predicted_hits(uses: Sequence[Use], slots: int) -> list[bool]:
    """Belady's policy on the future that is predicted."""
    count = num_blocks(uses)
    predictor = Predictor(range(count))
    there: set[int] = set()
    found = []
    for block, phase in uses:
        found.append(block in there)
        predictor.note(block, phase)
        if block not in there and len(there) == slots:
            left = there.copy()
            for use in islice(predictor.ahead(), 4 * count):
                if len(left) == 1:
                    break
                left.discard(use.block)
            there.remove(max(left))
        there.add(block)
    return found
