"""What happened, as data: one Span for each thing the runtime did.

[Note: hit, late, miss] Each time the training thread needs a piece, or a tile of an update, that has to come
from disk, a NEED span says how it was found:

- ``hit``: it was read ahead, and all of it had landed;
- ``late``: it was read ahead, but the disk was still at it: the span lasts as long as the thread waited;
- ``miss``: nobody had begun to read it: the span lasts from then until it was there.

What is in RAM already, because it stays there or was just used, is not needed from disk and counts nowhere.
Neither does a look at a parameter or an export: nothing predicts those.
"""

from __future__ import annotations

from dataclasses import dataclass

HIT, LATE, MISS = OUTCOMES = ("hit", "late", "miss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of the runtime, with its time on one clock.

    Attributes
    ----------
    kind
        ``READ``, ``WRITE``, ``ONLOAD``, ``FORWARD``, ``BACKWARD``, ``OFFLOAD``, ``STEP`` or ``WAIT``; ``NEED``
        (see the note above). Moments, which last no time: ``BEGIN`` (a block begins to compute), ``ENTER`` (a
        piece has RAM from now on, ``num_bytes`` of it are still to be read), ``LEAVE`` (it has none any more,
        ``num_bytes`` are on their way to the disk), ``UNLOAD`` (a pack's weights leave the device).
    name
        The block, tile or cause it belongs to, as the model names it; for ``READ``, ``WRITE``, ``NEED``,
        ``ENTER`` and ``LEAVE`` the store's key: model/piece/pack, and /tile for a part of it.
    start_s, end_s
        ``time.perf_counter()`` seconds.
    num_bytes
        Bytes moved; 0 where nothing moves.
    lane
        Who did it: ``compute``, ``disk``, ``update``, ``link`` (copies to a device and from it). A ``WAIT`` on the
        link's lane is a device that stands still until a copy is there; every other one is the host's.
    outcome
        Of a NEED: ``hit``, ``late`` or ``miss``; of a BEGIN: ``FORWARD`` or ``BACKWARD``; else empty.
    """

    kind: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    lane: str = "compute"
    outcome: str = ""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s
