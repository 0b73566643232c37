"""A disk that is only numbers: what is read and written when, as the store does it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatrain_nb.plan.timeline import Span

if TYPE_CHECKING:
    from megatrain_nb.plan.machine import Machine

Key = tuple[str, int, float]
"""Which kind of piece, of which pack, and from which share of it on."""


class Transfer(NamedTuple):
    """What is to be read or written.

    Attributes
    ----------
    name
        As a picture calls it.
    num_bytes, ram_bytes
        What it takes on the disk, and in RAM.
    least_s
        What packing or unpacking it takes, however fast the disk is.
    """

    name: str
    num_bytes: int
    ram_bytes: int
    least_s: float


@dataclass(slots=True)
class Job:
    """A transfer that waits, or is in progress: the seconds that are left of it if the disk does nothing else."""

    kind: str
    what: Transfer
    ready_s: float
    whole_s: float
    left_s: float
    end_s: float | None = None


class SimulatedDisk:
    """Serves reads before writes, one byte after the other.

    Parameters
    ----------
    machine
        Its rates.
    spans
        What it does is added there.
    room_bytes
        RAM that may wait to be written.
    """

    def __init__(self, machine: Machine, spans: list[Span], room_bytes: int) -> None:
        read, write = machine.read_bytes_per_s, machine.write_bytes_per_s
        self._rates = {"READ": read, "WRITE": write}
        # Both at once may be slower, or faster, than one after the other.
        self._both = machine.mixed_bytes_per_s * (read + write) / (2 * read * write)
        self._queues: dict[str, deque[Job]] = {"READ": deque(), "WRITE": deque()}
        self._now = 0.0
        self._spans = spans
        self._room_bytes = room_bytes
        self._waiting = 0
        self._written: dict[Key, Job] = {}
        self.moved = {"READ": 0, "WRITE": 0}

    def put(self, key: Key, what: Transfer, at_s: float) -> float:
        """Write behind; returns when the caller may go on: what waits must have room."""
        self._written[key] = self._add("WRITE", what, at_s)
        self._waiting += what.ram_bytes
        free_s = 0.0
        while self._waiting > max(self._room_bytes, what.ram_bytes):
            free_s = self.finish(self._queues["WRITE"][0])
        return free_s

    def get(self, key: Key, what: Transfer, at_s: float) -> tuple[Job, float]:
        """Start to read; also when the caller may go on: a write of the same bytes has to land first."""
        before = self._written.pop(key, None)
        free_s = at_s if before is None else max(at_s, self.finish(before))
        return self._add("READ", what, free_s), free_s

    def has_written(self, key: Key) -> bool:
        """Whether these bytes were written and not read since."""
        return key in self._written

    def waiting_bytes(self, at_s: float) -> int:
        """Return the RAM that waits to be written at that time; what is added later may not begin before."""
        while self._step(at_s):
            pass
        return self._waiting

    def finish_a_write(self) -> float | None:
        """Return when the next write is done; None if nothing waits to be written."""
        writes = self._queues["WRITE"]
        return self.finish(writes[0]) if writes else None

    def finish(self, job: Job) -> float:
        """Return when a job is done."""
        while job.end_s is None:
            self._step()
        return job.end_s

    def _add(self, kind: str, what: Transfer, at_s: float) -> Job:
        seconds = max(what.num_bytes / self._rates[kind], what.least_s)
        job = Job(kind, what, at_s, seconds, seconds)
        self._queues[kind].append(job)
        self.moved[kind] += what.num_bytes
        return job

    def _step(self, until_s: float = math.inf) -> bool:
        """Work on the first job until it is done, a read comes, or it is so late; False if there is nothing to do."""
        reads, writes = self._queues["READ"], self._queues["WRITE"]
        heads = [queue[0] for queue in (reads, writes) if queue]
        begin = max(self._now, min((job.ready_s for job in heads), default=math.inf))
        if begin >= until_s:
            return False
        self._now = begin
        job = next(job for job in heads if job.ready_s <= self._now)
        both = len(heads) > 1 and all(head.ready_s <= self._now for head in heads)
        speed = self._both if both else 1.0
        seconds = job.left_s / speed
        if job.kind == "WRITE" and reads:
            seconds = min(seconds, reads[0].ready_s - self._now)
        seconds = min(seconds, until_s - self._now)
        start, self._now = self._now, self._now + seconds
        job.left_s -= speed * seconds
        if job.left_s <= 1e-12 * job.whole_s:
            job.end_s = self._now
            self._queues[job.kind].popleft()
            if job.kind == "WRITE":
                self._waiting -= job.what.ram_bytes
        share = speed * seconds / job.whole_s if job.whole_s else 1.0
        self._spans.append(
            Span(
                kind=job.kind,
                name=job.what.name,
                start_s=start,
                end_s=self._now,
                num_bytes=round(share * job.what.num_bytes),
                lane="disk",
            )
        )
        return True
