"""The host of a simulated step: what comes from the disk, waits in RAM, is updated, and goes back.

It does what the pager and the updates do (docs/architecture.md, "One optimizer step"), as far as that takes room or
time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatrain_nb.plan.disk import SimulatedDisk, Transfer
from megatrain_nb.plan.inram import WHOLE, InRam, Share
from megatrain_nb.plan.memory import streaming_bytes, written_bytes
from megatrain_nb.plan.model import TILE_NUMEL
from megatrain_nb.plan.packing import IO_THREADS
from megatrain_nb.plan.timeline import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from megatrain_nb.plan.disk import Job
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import ModelSpec, PackSpec
    from megatrain_nb.plan.packing import OnDisk


class SimulatedHost:
    """RAM with its disk, and the thread that trains.

    Parameters
    ----------
    spec, residency, machine, on_disk
        As for `megatrain_nb.plan.simulate.Simulation`.

    Attributes
    ----------
    now
        The training thread's time, in seconds.
    spans
        What has happened.
    is_short
        There is less room than streaming would use, so that it has to wait for it.
    """

    def __init__(
        self, spec: ModelSpec, residency: Residency, machine: Machine, on_disk: OnDisk
    ) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._spec = spec
        self._residency = residency
        self._machine = machine
        self._on_disk = on_disk
        self._disk = SimulatedDisk(machine, self.spans, written_bytes(spec))
        working = residency.working_bytes
        self.is_short = 0 < working < streaming_bytes(spec)
        self._room = working if self.is_short else math.inf
        self._held = dict[int, int]()
        self._state = InRam()

    @property
    def moved_bytes(self) -> dict[str, int]:
        """By ``READ`` and ``WRITE``, all so far."""
        return dict(self._disk.moved)

    # -- weights ----------------------------------------------------------------------------------------

    def read_ahead(self, pack: int) -> None:
        """Start to read a pack's weights, and what its update uses, as far as there is room."""
        if pack not in self._state.loaded:
            if self._free_bytes() < self._weight_bytes(pack):
                return  # later, when it has to be there
            self._fetch(pack)
        if pack in self._state.due:
            self.read_for_update(pack)

    def load(self, pack: int) -> None:
        """Let a pack's weights be there, and new."""
        state = self._state
        if pack not in state.loaded:
            self.make_room(self._weight_bytes(pack))
            self._fetch(pack)
        if (job := state.reading.pop(pack, None)) is not None:
            self._wait(job)
        if pack in state.due:
            self._update(pack)

    def let_go(self, pack: int) -> None:
        """Free a pack's weights, if they do not stay; what is new is written."""
        state = self._state
        if pack not in state.loaded:
            return
        state.loaded.discard(pack)
        if pack not in self._residency.weights and pack in state.dirty:
            state.dirty.discard(pack)
            self._put("weights", pack)

    def _fetch(self, pack: int) -> None:
        self._state.loaded.add(pack)
        if pack not in self._residency.weights:
            self._state.reading[pack] = self._get("weights", pack)

    # -- updates ----------------------------------------------------------------------------------------

    def owe(self, packs: Iterable[int]) -> None:
        """Let the updates of these be due, each before its weights are used next."""
        self._state.due = set(packs)

    def read_for_update(
        self, pack: int, *, grads: bool = True, start: float = 0.0
    ) -> None:
        """Start to read what the update uses, as far as there is room; before ``start`` all is done."""
        shares = self._state.for_update.setdefault(pack, [])
        spec, pieces = self._spec.packs[pack], self._streamed(pack, grads=grads)
        for share in shares:
            for piece in pieces:
                if piece in share.jobs:
                    continue
                if self._free_bytes() < share.of(spec.num_bytes(piece)):
                    return
                share.jobs[piece] = self._get(piece, pack, share)
        whole = sum(map(spec.num_bytes, pieces))
        start = shares[-1].stop if shares else start
        stop = self._as_far_as_fits(pack, whole, start)
        if stop > start:
            shares.append(Share(start, stop))
            for piece in pieces:
                shares[-1].jobs[piece] = self._get(piece, pack, shares[-1])

    def _streamed(self, pack: int, *, grads: bool = True) -> list[str]:
        """Return the pieces that an update has to read."""
        stays = pack in self._state.grads or pack in self._residency.grads
        found = [] if pack in self._residency.states else ["states"]
        return [*found, "grads"] if grads and not stays else found

    def _as_far_as_fits(self, pack: int, num_bytes: int, start: float) -> float:
        """Return up to which share of a pack whole tiles of what the update uses fit, ``num_bytes`` in all."""
        if not num_bytes or not self.is_short:
            return 1.0
        tile = min(1.0, TILE_NUMEL / self._spec.packs[pack].numel)
        return min(1.0, start + tile * (self._free_bytes() // (tile * num_bytes)))

    def _update(self, pack: int) -> None:
        """Do an update that is due, part by part as they fit."""
        state, spec, done = self._state, self._spec.packs[pack], 0.0
        while done < 1:
            self.read_for_update(pack, start=done)
            shares = state.for_update[pack]
            if not shares:
                if self._wait_for_a_write():
                    continue
                shares.append(Share(done, 1.0))
            share = shares.pop(0)
            for piece in self._streamed(pack):
                if piece not in share.jobs:
                    share.jobs[piece] = self._get(piece, pack, share)
            for job in share.jobs.values():
                self._wait(job)
            start, done = self.now, share.stop
            self.now += self._machine.update_seconds(spec) * (done - share.start)
            self.note("STEP", spec.name, start, self.now, lane="update")
            if pack not in self._residency.states:
                self._put("states", pack, share=share)
        state.for_update.pop(pack)
        state.due.remove(pack)
        state.grads.discard(pack)
        state.dirty.add(pack)

    # -- gradients --------------------------------------------------------------------------------------

    def need_gradient(self, pack: int) -> None:
        """Bring a gradient back that another block has begun (tied weights) and that left."""
        if self._disk.has_written(("grads", pack, WHOLE.start)):
            self._wait(self._get("grads", pack))

    def take_gradient(self, pack: int, at_s: float, *, stays: bool) -> None:
        """Take a gradient that is there from ``at_s`` on; it leaves unless it ``stays`` for the update."""
        if pack in self._residency.grads:
            return
        if stays:
            self._state.grads.add(pack)
        else:
            self._put("grads", pack, at_s)

    # -- room and time ----------------------------------------------------------------------------------

    def lend(self, block: int, num_bytes: int) -> None:
        """Leave room to what a block is about to keep."""
        if self.is_short and num_bytes:
            self.make_room(num_bytes)
            self._room -= num_bytes
            self._held[block] = num_bytes

    def take_back(self, block: int) -> None:
        """Have the room again that was left to a block."""
        self._room += self._held.pop(block, 0)

    def make_room(self, num_bytes: int) -> None:
        """Wait for writes until there is so much room."""
        while self._free_bytes() < num_bytes and self._wait_for_a_write():
            pass

    def wait_until(self, end: float, name: str) -> None:
        """Let the training thread wait, if that time is not there yet."""
        if end > self.now:
            self.note("WAIT", name, self.now, end, lane="compute")
            self.now = end

    def note(
        self,
        kind: str,
        name: str,
        start: float,
        end: float,
        *,
        lane: str,
        num_bytes: int = 0,
    ) -> None:
        """Let something have happened, if it took any time."""
        if end > start:
            self.spans.append(
                Span(
                    kind=kind,
                    name=name,
                    start_s=start,
                    end_s=end,
                    num_bytes=num_bytes,
                    lane=lane,
                )
            )

    def _wait(self, job: Job) -> None:
        self.wait_until(self._disk.finish(job), job.what.name)

    def _weight_bytes(self, pack: int) -> int:
        """Return the room that a pack's weights need beside what stays."""
        stays = pack in self._residency.weights
        return 0 if stays else self._spec.packs[pack].weight_bytes

    def _free_bytes(self) -> float:
        """Return the room that is left now."""
        if not self.is_short:
            return self._room
        taken = self._state.num_bytes(self._spec.packs, self._residency)
        return self._room - taken - self._disk.waiting_bytes(self.now)

    def _wait_for_a_write(self) -> bool:
        end = self._disk.finish_a_write()
        if end is not None:
            self.wait_until(end, "room, while something is written")
        return end is not None

    def _get(self, piece: str, pack: int, share: Share = WHOLE) -> Job:
        """Start to read ``weights``, ``grads`` or ``states`` of a pack."""
        what = self._transfer(piece, pack, self._on_disk.unpack_seconds, share)
        job, free_s = self._disk.get((piece, pack, share.start), what, self.now)
        self.wait_until(free_s, f"{what.name} to be written")
        return job

    def _put(
        self, piece: str, pack: int, at_s: float = 0.0, *, share: Share = WHOLE
    ) -> None:
        what = self._transfer(piece, pack, self._on_disk.pack_seconds, share)
        free_s = self._disk.put((piece, pack, share.start), what, max(at_s, self.now))
        self.wait_until(free_s, f"room, while {what.name} is written")

    def _transfer(
        self,
        piece: str,
        pack: int,
        cost: Callable[[str, PackSpec], float],
        share: Share,
    ) -> Transfer:
        spec = self._spec.packs[pack]
        more = {"weights": "", "grads": " gradient", "states": " states"}
        seconds = cost(piece, spec) / min(IO_THREADS, self._machine.cores)
        return Transfer(
            f"{spec.name}{more[piece]}",
            share.of(self._on_disk.num_bytes(piece, spec)),
            share.of(spec.num_bytes(piece)),
            seconds * (share.stop - share.start),
        )
