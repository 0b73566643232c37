"""Which blocks come next: learned while they come, from the order in which they came before.

Where the schedule is known nobody needs to guess. In a plain loop it is not: there is evaluation in between,
layers are skipped at random, one is used twice, a model exits early. So every use of a block is noted, and what
followed earlier, wherever the last uses were the same, says what follows now.

[Note: places and orders] A *place* is an earlier moment with the same use as now; its *length* is how many uses
up to it are the same as up to now. Each place votes for the use that came after it. Long places know most of what
a program does (after every fifth step comes evaluation); short ones are many, and right about chance (a layer
is skipped one time in five). The places of at least 1, 2, 4, 8, ... uses form one *order* each, with an opinion of
its own: what most of its places vote for. For each use it is counted which orders were right when not all places
agreed; the best one is followed, the longest among equals. This is prediction by partial matching
(Cleary and Witten 1984, doi:10.1109/TCOM.1984.1096090) with contexts of any length (Cleary, Teahan and Witten 1995,
doi:10.1109/DCC.1995.515495); that the record of each order decides is the idea of tournament branch predictors
(McFarling 1993, "Combining branch predictors").

Of a backward only that it comes, and when it ends, is learned: its blocks are those of the forward, reversed.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PHASES = 4
# How many uses are remembered: some hundred steps of a large model.
_MEMORY = 1 << 15
# How many places are compared: the newest, and the longest.
_NEWEST, _LONGEST = 16, 8
# Lengths are told apart up to 2 ** 15.
_ORDERS = 16
# How much one more opinion counts in an order's record.
_LEARNING = 1 / 16
# What an order's record begins with.
_UNPROVEN = 0.9
_NO_RECORD = [_UNPROVEN] * _ORDERS
# An order with this record is not doubted; where one is, what came lately with this share may come as well.
_SURE, _LIKELY = 0.97, 0.04


class Phase(IntEnum):
    """What a block is used for."""

    FORWARD = 0  # its backward is still to come
    BACKWARD = 1
    EVALUATE = 2  # a forward without gradients
    TURN = 3  # a forward that goes over into its backward

    def __str__(self) -> str:
        return self.name


class Use(NamedTuple):
    """One use of a block."""

    block: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.block}:{self.phase}"


def _use(number: int) -> Use:
    return Use(number // _PHASES, Phase(number % _PHASES))


class _Moment:
    """A moment at which something was used, or may be."""

    __slots__ = ("opinions", "places", "use", "votes")

    def __init__(
        self, use: int, places: dict[int, int], votes: list[tuple[int, int]]
    ) -> None:
        self.use = use
        self.places = places  # an earlier moment like this one: its length
        self.votes = votes  # of each place, its length and what was used after it
        self.opinions = _opinions(votes)


def _opinions(votes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the orders, the longest first, with what most of their places vote for; none where all agree."""
    if all(voted == votes[0][1] for _, voted in votes):
        return []
    counts: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    opinion, most, before = -1, 0, -1
    for length, voted in sorted(votes, reverse=True):
        order = min(length.bit_length(), _ORDERS) - 1
        if order != before and before >= 0:
            found.append((before, opinion))
        before = order
        counts[voted] = count = counts.get(voted, 0) + 1
        if count > most:
            opinion, most = voted, count
    found.append((before, opinion))
    return found


class _History:
    """What was used when, as numbers; finds the earlier moments that are like another one."""

    def __init__(self) -> None:
        self._used = [-1] * _MEMORY
        self._count = 0
        self._newest: dict[int, deque[int]] = {}
        self._records: dict[int, list[float]] = {}
        self._followers: dict[int, dict[int, float]] = {}
        self.now = _Moment(-1, {}, [])

    def append(self, use: int) -> None:
        """Note a use; the opinions about it are judged."""
        last, opinions = self.now.use, self.now.opinions
        followers = self._followers.setdefault(last, {})
        for other in followers:
            followers[other] *= 1 - _LEARNING
        followers[use] = followers.get(use, 0.0) + _LEARNING
        if opinions:
            record = self._records.setdefault(last, _NO_RECORD.copy())
            for order, opinion in opinions:
                record[order] += _LEARNING * ((opinion == use) - record[order])
        places = self._advance(self.now.places, use)
        moment, self._count = self._count, self._count + 1
        self._used[moment % _MEMORY] = use
        self._newest.setdefault(use, deque(maxlen=_NEWEST)).append(moment)
        self.now = self._moment(use, places)

    def follow(self, moment: _Moment, use: int) -> _Moment:
        """Return the moment after another one, if it is a ``use``."""
        return self._moment(use, self._advance(moment.places, use))

    def after(self, moment: _Moment, *, without: int = -1) -> list[int]:
        """Return what may be used after a moment, the expected use first; more than one only where there is doubt.

        ``without`` is a phase that is known not to follow.
        """
        votes, opinions = moment.votes, moment.opinions
        if without >= 0 and any(voted % _PHASES == without for _, voted in votes):
            votes = [vote for vote in votes if vote[1] % _PHASES != without]
            opinions = _opinions(votes)
        if not opinions:
            return [votes[0][1]] if votes else []
        record = self._records.get(moment.use, _NO_RECORD)
        best, expected = max(
            ((record[order], opinion) for order, opinion in opinions),
            key=lambda pair: pair[0],
        )
        if best >= _SURE:
            return [expected]
        likely = [
            (-share, other)
            for other, share in self._followers.get(moment.use, {}).items()
            if share >= _LIKELY and other != expected and other % _PHASES != without
        ]
        return [expected, *(other for _, other in sorted(likely))]

    def _moment(self, use: int, places: dict[int, int]) -> _Moment:
        used, last = self._used, self._count - 1
        votes = [
            (length, used[(place + 1) % _MEMORY])
            for place, length in places.items()
            if place < last
        ]
        return _Moment(use, places, votes)

    def _advance(self, places: dict[int, int], use: int) -> dict[int, int]:
        """Return the places of the moment after one with ``places``, if it is a ``use``."""
        used, last = self._used, self._count - 1
        oldest = self._count - _MEMORY + 1
        found = {
            place + 1: length + 1
            for place, length in places.items()
            if used[(place + 1) % _MEMORY] == use and oldest <= place < last
        }
        if len(found) > 2 * _LONGEST:
            by_length = sorted(found, key=lambda place: (found[place], place))
            found = {place: found[place] for place in by_length[-_LONGEST:]}
        for place in self._newest.get(use, ()):
            if place >= oldest and place not in found:
                found[place] = 1
        return found


class Predictor:
    """Says which blocks come next.

    Parameters
    ----------
    blocks
        Block indices in the order in which they are expected before anything is known.

    Notes
    -----
    The same uses give the same predictions, on every machine.

    Examples
    --------
    >>> predictor = Predictor([0, 1, 2])
    >>> for step in range(2):
    ...     for block in (0, 1, 2):
    ...         known = predictor.note(block, Phase.FORWARD)
    ...     for block in (2, 1, 0):
    ...         known = predictor.note(block, Phase.BACKWARD)
    >>> [str(use) for use, _ in zip(predictor.ahead(), range(4))]
    ['0:FORWARD', '1:FORWARD', '2:FORWARD', '2:BACKWARD']
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self._next = dict(pairwise(blocks))
        self._first = blocks[0] if blocks else 0
        self._most_open = 4 * len(blocks) + 64 if blocks else 0
        self._history = _History()
        self._open: list[int] = []
        self._found = self._after(self._history.now, self._open)

    @property
    def now(self) -> Use | None:
        """What was noted last."""
        use = self._history.now.use
        return _use(use) if use >= 0 else None

    @property
    def to_come(self) -> list[int]:
        """The blocks whose backward is still to come, the next one first."""
        return self._open[::-1]

    def note(self, block: int, phase: Phase) -> bool:
        """Note that a block is used now, and return whether that was expected."""
        use = _PHASES * block + phase
        expected = use == self._found[0]
        self._history.append(use)
        if phase is Phase.FORWARD:
            self._open.append(block)
            del self._open[: -self._most_open]
        elif phase is Phase.BACKWARD and block in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(block) :]
        self._found = self._after(self._history.now, self._open)
        return expected

    def forget_open(self) -> None:
        """Note that no backward comes any more of what ran forward until now."""
        self._open.clear()
        self._found = self._after(self._history.now, self._open)

    def ahead(self) -> Iterator[Use]:
        """Yield the uses that are expected to come, one after the other, without end if there are blocks.

        What is noted meanwhile may be what was yielded; after anything else ask again.
        """
        moment, still_open = self._history.now, self._open.copy()
        while self._most_open:
            use = self._after(moment, still_open)[0]
            block, phase = _use(use)
            if phase is Phase.BACKWARD and still_open:
                still_open.pop()
            elif phase is Phase.FORWARD:
                still_open.append(block)
                del still_open[: -self._most_open]
            yield Use(block, phase)
            moment = self._history.follow(moment, use)

    def instead(self) -> tuple[int, ...]:
        """Return the blocks that may come next instead of the expected one; none where there is no doubt."""
        expected, *others = self._found
        blocks = dict.fromkeys(other // _PHASES for other in others)
        return tuple(block for block in blocks if block != expected // _PHASES)

    def _after(self, moment: _Moment, still_open: list[int]) -> list[int]:
        """Return what may follow a moment, the expected use first; at least one."""
        without = -1 if still_open else int(Phase.BACKWARD)
        found = self._history.after(moment, without=without)
        if not found:
            found = [self._unseen(moment.use, still_open)]
        if found[0] % _PHASES == Phase.BACKWARD and still_open:
            return [_PHASES * still_open[-1] + Phase.BACKWARD]
        return found

    def _unseen(self, use: int, still_open: list[int]) -> int:
        """Return what follows a use after which nothing was seen yet: the next block; backward after the last."""
        if use < 0:
            return _PHASES * self._first + Phase.FORWARD
        block, phase = divmod(use, _PHASES)
        following = self._next.get(block, -1)
        if phase in (Phase.FORWARD, Phase.EVALUATE) and following >= 0:
            return _PHASES * following + phase
        if phase != Phase.EVALUATE and still_open:
            return _PHASES * still_open[-1] + Phase.BACKWARD
        again = Phase.EVALUATE if phase == Phase.EVALUATE else Phase.FORWARD
        return _PHASES * self._first + again
