"""What happened, as data: one Span for each thing the runtime did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of the runtime, with its time on one clock.

    Attributes
    ----------
    kind
        ``READ``, ``WRITE``, ``ONLOAD``, ``FORWARD``, ``BACKWARD``, ``OFFLOAD``, ``STEP`` or ``WAIT``.
    name
        The block, tile or cause it belongs to, as the model names it.
    start_s, end_s
        ``time.perf_counter()`` seconds.
    num_bytes
        Bytes moved; 0 where nothing moves.
    lane
        Who did it: ``compute``, ``disk``, ``update``; ``onload`` and ``offload`` are a device's copies.
    """

    kind: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    lane: str = "compute"

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s
