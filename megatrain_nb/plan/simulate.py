"""Let a schedule run on a machine that is only numbers: when each thing would happen.

The schedule is that of `megatrain_nb.plan.schedule`, which the runtime obeys; what each action does is what
the runtime does (docs/architecture.md, "One optimizer step"). The result is a list of spans, as a real run
gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_nb.plan.disk import SimulatedDisk, Transfer
from megatrain_nb.plan.inram import WHOLE, InRam, Share
from megatrain_nb.plan.memory import streaming_bytes, written_bytes
from megatrain_nb.plan.model import TILE_NUMEL
from megatrain_nb.plan.packing import AS_THEY_ARE, IO_THREADS
from megatrain_nb.plan.schedule import Action, Kind, make_schedule
from megatrain_nb.plan.timeline import Span
from megatrain_nb.plan.traffic import NUM_FIRST, early_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from megatrain_nb.plan.disk import Job
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import ModelSpec, PackSpec
    from megatrain_nb.plan.packing import OnDisk


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds that a block computes for a whole window; ``again_s`` for what backward computes again."""

    forward_s: float
    again_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.forward_s + self.again_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One step in the middle of training.

    Attributes
    ----------
    spans
        What happens when, from 0.
    seconds
        How long it takes.
    read_bytes, written_bytes
        Moved between disk and RAM.
    onload_bytes, offload_bytes
        Moved between RAM and device.
    busy_s
        By lane: ``compute``, ``disk``, ``update``, ``link``.
    """

    spans: tuple[Span, ...]
    seconds: float
    read_bytes: int
    written_bytes: int
    onload_bytes: int
    offload_bytes: int
    busy_s: dict[str, float]


class Simulation:
    """One model's steps on one machine.

    Parameters
    ----------
    spec, residency
        The model, what stays in RAM, and what lives on a device.
    order
        Block indices in the order in which forward passes them.
    times
        By block.
    machine
        Its rates.
    trained
        Packs that are trained.
    stay
        Packs whose weights stay on a device until they change.
    on_disk
        What pieces take on the disk; left out, as if nothing were packed.
    lent
        Bytes that what a block keeps takes of the room for what streams, by block.
    """

    def __init__(  # noqa: PLR0913 - what was decided
        self,
        spec: ModelSpec,
        residency: Residency,
        order: Sequence[int],
        times: Sequence[BlockTimes],
        machine: Machine,
        trained: frozenset[int],
        stay: frozenset[int] = frozenset(),
        *,
        on_disk: OnDisk = AS_THEY_ARE,
        lent: Mapping[int, int] | None = None,
    ) -> None:
        self._spec = spec
        self._residency = residency
        self._order = list(order)
        self._times = times
        self._machine = machine
        self._elsewhere = residency.elsewhere
        self._trained = trained
        self._stay = stay
        self._on_disk = on_disk
        self._spans: list[Span] = []
        self._disk = SimulatedDisk(machine, self._spans, written_bytes(spec))
        # Where there is less room than streaming would use, it has to wait for it.
        working = residency.working_bytes
        self._room = working if 0 < working < streaming_bytes(spec) else math.inf
        self._lent, self._held = lent or {}, dict[int, int]()
        self._state = InRam()
        self._now = 0.0  # the training thread
        self._device = self._onload = self._offload = 0.0
        self._linked = {"ONLOAD": 0, "OFFLOAD": 0}
        self._first = self._packs(self._order[:NUM_FIRST])
        self._early = early_gradients(spec, residency, self._order)
        self._last = self._packs(self._order[-1 - NUM_FIRST : -1])

    def run(self) -> Simulated:
        """Return the last of some steps: those before fill the pipeline, which takes longer with little room."""
        for _ in range(1 if self._room == math.inf else 2):
            self._step()
        begin, before = max(self._now, self._device), dict(self._disk.moved)
        linked = dict(self._linked)
        self._step()
        end = max(self._now, self._device)
        spans = tuple(
            Span(
                kind=span.kind,
                name=span.name,
                start_s=max(span.start_s, begin) - begin,
                end_s=min(span.end_s, end) - begin,
                num_bytes=span.num_bytes,
                lane=span.lane,
            )
            for span in self._spans
            if span.end_s > begin and span.start_s < end
        )
        busy = dict.fromkeys(("compute", "update", "disk", "link"), 0.0)
        for span in spans:
            if span.kind != "WAIT":
                busy[span.lane] += span.seconds
        return Simulated(
            spans=spans,
            seconds=end - begin,
            read_bytes=self._disk.moved["READ"] - before["READ"],
            written_bytes=self._disk.moved["WRITE"] - before["WRITE"],
            onload_bytes=self._linked["ONLOAD"] - linked["ONLOAD"],
            offload_bytes=self._linked["OFFLOAD"] - linked["OFFLOAD"],
            busy_s=busy,
        )

    # -- one step -------------------------------------------------------------------------------------

    def _step(self) -> None:
        order = self._order
        self._pass(order, Kind.FORWARD, soon=self._last)
        self._pass(order[-2::-1], Kind.BACKWARD, soon=self._first)
        self._now = max(self._now, self._device)
        if not self._machine.in_place:
            self._state.on_device.clear()  # the device's copies are old now
        self._state.due = set(self._trained - self._elsewhere)
        for pack in sorted(self._trained & self._elsewhere):
            spec, start = self._spec.packs[pack], self._device
            self._device += self._machine.device_update_seconds(spec)
            self._note("STEP", spec.name, start, self._device, lane="compute")

    def _pass(self, order: Sequence[int], kind: Kind, *, soon: frozenset[int]) -> None:
        blocks = self._spec.blocks
        ahead: list[int] = []
        for action in make_schedule(self._spec, order, kind):
            packs = blocks[action.block].packs
            if action.kind is Kind.READ:
                ahead.append(action.block)
                self._read(packs)
            elif action.kind is kind:
                ahead.remove(action.block)
                self._compute(action, turning=action.block == self._order[-1])
                if self._room < math.inf:  # writes have landed meanwhile
                    for block in ahead:
                        self._read(blocks[block].packs)
            else:
                needed = self._packs(ahead)
                # The last block of a forward leaves as backward begins, which ends with the first ones.
                turned = action.block == self._order[-1]
                keep = self._first if turned else soon
                self._free((p for p in packs if p not in needed), keep)

    def _read(self, packs: Iterable[int]) -> None:
        for pack in self._here(packs):
            if pack in self._state.on_device:
                continue  # up to date
            if pack not in self._state.loaded:
                if self._free_bytes() < self._weight_bytes(pack):
                    continue  # later, when it has to be there
                self._fetch(pack)
            if pack in self._state.due:
                self._read_for_update(pack)

    def _fetch(self, pack: int) -> None:
        self._state.loaded.add(pack)
        if pack not in self._residency.weights:
            self._state.reading[pack] = self._get("weights", pack)

    def _read_for_update(
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
        if not num_bytes or self._room == math.inf:
            return 1.0
        tile = min(1.0, TILE_NUMEL / self._spec.packs[pack].numel)
        return min(1.0, start + tile * (self._free_bytes() // (tile * num_bytes)))

    def _update(self, pack: int) -> None:
        """Do an update that is due, part by part as they fit."""
        state, spec, done = self._state, self._spec.packs[pack], 0.0
        while done < 1:
            self._read_for_update(pack, start=done)
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
            start, done = self._now, share.stop
            self._now += self._machine.update_seconds(spec) * (done - share.start)
            self._note("STEP", spec.name, start, self._now, lane="update")
            if pack not in self._residency.states:
                self._put("states", pack, share=share)
        state.for_update.pop(pack)
        state.due.remove(pack)
        state.grads.discard(pack)
        state.dirty.add(pack)

    def _compute(self, action: Action, *, turning: bool) -> None:
        block = self._spec.blocks[action.block]
        backward = turning or action.kind is Kind.BACKWARD
        early = action.block in self._order[:NUM_FIRST]
        packs = self._here(block.packs)
        for pack in packs:
            self._load(pack)
        if action.kind is Kind.BACKWARD and early:
            for pack in packs:  # a step follows, and the next forward
                self._read_for_update(pack, grads=False)
        if backward:
            self._need_gradients(packs)
            trained = self._trained - self._residency.grads
            grads = (self._spec.packs[p].grad_bytes for p in packs if p in trained)
            self._make_room(sum(grads))
        else:
            self._lend(action.block)
        times = self._times[action.block]
        forward = action.kind is Kind.FORWARD
        seconds = times.forward_s if forward else times.again_s
        if backward:
            seconds += times.backward_s
        start = max(self._now, self._device)
        if not self._machine.in_place:
            begin, start = start, max(start, self._onload)
            self._note("WAIT", block.name, begin, start, lane="link")
        self._device = start + seconds
        # Where the device is another one than the host, the host goes on as soon as it has begun.
        self._now = self._device if self._machine.in_place else start
        self._note(str(action.kind), block.name, start, self._device, lane="compute")
        if backward:
            self._room += self._held.pop(action.block, 0)
            self._take_gradients(packs, last=early)

    def _lend(self, block: int) -> None:
        """Leave room to what a block is about to keep."""
        if self._room < math.inf and (num_bytes := self._lent.get(block, 0)):
            self._make_room(num_bytes)
            self._room -= num_bytes
            self._held[block] = num_bytes

    def _load(self, pack: int) -> None:
        """Let a pack's weights be there, and new."""
        state, spec = self._state, self._spec.packs[pack]
        if pack in state.on_device:
            return
        if pack not in state.loaded:
            self._make_room(self._weight_bytes(pack))
            self._fetch(pack)
        if (job := state.reading.pop(pack, None)) is not None:
            self._wait(job)
        if pack in state.due:
            self._update(pack)
        if not self._machine.in_place:
            state.on_device.add(pack)
            self._onload = self._link(
                "ONLOAD",
                spec.name,
                spec.weight_bytes,
                max(self._onload, self._now),
                self._machine.onload_bytes_per_s,
            )

    def _need_gradients(self, packs: Iterable[int]) -> None:
        """Bring a gradient back that another block has begun (tied weights) and that left."""
        for pack in packs:
            if pack in self._trained and self._disk.has_written(
                ("grads", pack, WHOLE.start)
            ):
                self._wait(self._get("grads", pack))

    def _take_gradients(self, packs: Iterable[int], *, last: bool) -> None:
        """Let gradients leave; those of the ``last`` blocks of a backward are needed first."""
        for pack in packs:
            if pack not in self._trained:
                continue
            spec = self._spec.packs[pack]
            at_s = self._now
            if not self._machine.in_place:
                at_s = self._offload = self._link(
                    "OFFLOAD",
                    spec.name,
                    spec.grad_bytes,
                    max(self._offload, self._device),
                    self._machine.offload_bytes_per_s,
                )
            if pack in self._residency.grads:
                continue
            if last and pack in self._early:
                self._state.grads.add(pack)
            else:
                self._put("grads", pack, at_s)

    def _free(self, packs: Iterable[int], soon: frozenset[int]) -> None:
        state = self._state
        for pack in packs:
            if pack not in self._stay:
                state.on_device.discard(pack)
            if pack in soon or pack not in state.loaded:
                continue
            state.loaded.discard(pack)
            if pack in self._residency.weights:
                continue
            if pack in state.dirty:
                state.dirty.discard(pack)
                self._put("weights", pack)

    # -- small things -----------------------------------------------------------------------------------

    def _packs(self, blocks: Iterable[int]) -> frozenset[int]:
        return frozenset(self._spec.pack_indices(blocks))

    def _here(self, packs: Iterable[int]) -> list[int]:
        """Return those that do not live on the device."""
        return [pack for pack in packs if pack not in self._elsewhere]

    def _wait(self, job: Job) -> None:
        self._wait_until(self._disk.finish(job), job.what.name)

    def _weight_bytes(self, pack: int) -> int:
        """Return the room that a pack's weights need beside what stays."""
        stays = pack in self._residency.weights
        return 0 if stays else self._spec.packs[pack].weight_bytes

    def _free_bytes(self) -> float:
        """Return the room that is left now."""
        if self._room == math.inf:
            return self._room
        taken = self._state.num_bytes(self._spec.packs, self._residency)
        return self._room - taken - self._disk.waiting_bytes(self._now)

    def _make_room(self, num_bytes: int) -> None:
        """Wait for writes until there is so much room."""
        while self._free_bytes() < num_bytes and self._wait_for_a_write():
            pass

    def _wait_for_a_write(self) -> bool:
        end = self._disk.finish_a_write()
        if end is not None:
            self._wait_until(end, "room, while something is written")
        return end is not None

    def _get(self, piece: str, pack: int, share: Share = WHOLE) -> Job:
        """Start to read ``weights``, ``grads`` or ``states`` of a pack."""
        what = self._transfer(piece, pack, self._on_disk.unpack_seconds, share)
        job, free_s = self._disk.get((piece, pack, share.start), what, self._now)
        self._wait_until(free_s, f"{what.name} to be written")
        return job

    def _put(
        self, piece: str, pack: int, at_s: float = 0.0, *, share: Share = WHOLE
    ) -> None:
        what = self._transfer(piece, pack, self._on_disk.pack_seconds, share)
        free_s = self._disk.put((piece, pack, share.start), what, max(at_s, self._now))
        self._wait_until(free_s, f"room, while {what.name} is written")

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

    def _wait_until(self, end: float, name: str) -> None:
        if end > self._now:
            self._note("WAIT", name, self._now, end, lane="compute")
            self._now = end

    def _link(
        self, kind: str, name: str, num_bytes: int, start: float, rate: float
    ) -> float:
        end = start + num_bytes / rate
        self._linked[kind] += num_bytes
        self._note(kind, name, start, end, lane="link", num_bytes=num_bytes)
        return end

    def _note(
        self,
        kind: str,
        name: str,
        start: float,
        end: float,
        *,
        lane: str,
        num_bytes: int = 0,
    ) -> None:
        if end > start:
            self._spans.append(
                Span(
                    kind=kind,
                    name=name,
                    start_s=start,
                    end_s=end,
                    num_bytes=num_bytes,
                    lane=lane,
                )
            )
