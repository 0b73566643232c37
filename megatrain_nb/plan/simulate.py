"""Let a schedule run on a machine that is only numbers: when each thing would happen.

The schedule is that of `megatrain_nb.plan.schedule`, which the runtime obeys; what each action does is what
the runtime does (docs/architecture.md, "One optimizer step"). The result is a list of spans, as a real run
gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_nb.plan.host import SimulatedHost
from megatrain_nb.plan.packing import AS_THEY_ARE
from megatrain_nb.plan.schedule import Action, Kind, make_schedule
from megatrain_nb.plan.timeline import Span
from megatrain_nb.plan.traffic import NUM_FIRST, early_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import ModelSpec
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
        self._lent = lent or {}
        self._host = SimulatedHost(spec, residency, machine, on_disk)
        self._on_device = set[int]()  # packs whose newest weights are there
        self._device = self._onload = self._offload = 0.0
        self._linked = {"ONLOAD": 0, "OFFLOAD": 0}
        self._first = self._packs(self._order[:NUM_FIRST])
        self._early = early_gradients(spec, residency, self._order)
        self._last = self._packs(self._order[-1 - NUM_FIRST : -1])

    def run(self) -> Simulated:
        """Return the last of some steps: those before fill the pipeline, which takes longer with little room."""
        host = self._host
        for _ in range(2 if host.is_short else 1):
            self._step()
        begin, before = self._time, host.moved_bytes
        linked = dict(self._linked)
        self._step()
        end, after = self._time, host.moved_bytes
        spans = tuple(
            Span(
                kind=span.kind,
                name=span.name,
                start_s=max(span.start_s, begin) - begin,
                end_s=min(span.end_s, end) - begin,
                num_bytes=span.num_bytes,
                lane=span.lane,
            )
            for span in host.spans
            if span.end_s > begin and span.start_s < end
        )
        busy = dict.fromkeys(("compute", "update", "disk", "link"), 0.0)
        for span in spans:
            if span.kind != "WAIT":
                busy[span.lane] += span.seconds
        return Simulated(
            spans=spans,
            seconds=end - begin,
            read_bytes=after["READ"] - before["READ"],
            written_bytes=after["WRITE"] - before["WRITE"],
            onload_bytes=self._linked["ONLOAD"] - linked["ONLOAD"],
            offload_bytes=self._linked["OFFLOAD"] - linked["OFFLOAD"],
            busy_s=busy,
        )

    @property
    def _time(self) -> float:
        return max(self._host.now, self._device)

    # -- one step -------------------------------------------------------------------------------------

    def _step(self) -> None:
        order, host = self._order, self._host
        self._pass(order, Kind.FORWARD, soon=self._last)
        self._pass(order[-2::-1], Kind.BACKWARD, soon=self._first)
        host.now = self._time
        if not self._machine.in_place:
            self._on_device.clear()  # the device's copies are old now
        host.owe(self._trained - self._elsewhere)
        for pack in sorted(self._trained & self._elsewhere):
            spec, start = self._spec.packs[pack], self._device
            self._device += self._machine.device_update_seconds(spec)
            host.note("STEP", spec.name, start, self._device, lane="compute")

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
                if self._host.is_short:  # writes have landed meanwhile
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
            if pack not in self._on_device:
                self._host.read_ahead(pack)

    def _compute(self, action: Action, *, turning: bool) -> None:
        block, host = self._spec.blocks[action.block], self._host
        backward = turning or action.kind is Kind.BACKWARD
        early = action.block in self._order[:NUM_FIRST]
        packs = self._here(block.packs)
        for pack in packs:
            self._load(pack)
        if action.kind is Kind.BACKWARD and early:
            for pack in packs:  # a step follows, and the next forward
                host.read_for_update(pack, grads=False)
        trained = [pack for pack in packs if pack in self._trained]
        if backward:
            for pack in trained:
                host.need_gradient(pack)
            lands = (pack for pack in trained if pack not in self._residency.grads)
            host.make_room(sum(self._spec.packs[p].grad_bytes for p in lands))
        else:
            host.lend(action.block, self._lent.get(action.block, 0))
        times = self._times[action.block]
        forward = action.kind is Kind.FORWARD
        seconds = times.forward_s if forward else times.again_s
        if backward:
            seconds += times.backward_s
        start = self._time
        if not self._machine.in_place:
            begin, start = start, max(start, self._onload)
            host.note("WAIT", block.name, begin, start, lane="link")
        self._device = start + seconds
        # Where the device is another one than the host, the host goes on as soon as it has begun.
        host.now = self._device if self._machine.in_place else start
        host.note(str(action.kind), block.name, start, self._device, lane="compute")
        if backward:
            host.take_back(action.block)
            self._take_gradients(trained, last=early)

    def _load(self, pack: int) -> None:
        """Let a pack's weights be where they are used, and new."""
        if pack in self._on_device:
            return
        self._host.load(pack)
        if not self._machine.in_place:
            self._on_device.add(pack)
            spec, rate = self._spec.packs[pack], self._machine.onload_bytes_per_s
            begin = max(self._onload, self._host.now)
            self._onload = self._link(
                "ONLOAD", spec.name, spec.weight_bytes, begin, rate
            )

    def _take_gradients(self, packs: Iterable[int], *, last: bool) -> None:
        """Let gradients leave; those of the ``last`` blocks of a backward are needed first."""
        for pack in packs:
            spec, at_s = self._spec.packs[pack], self._host.now
            if not self._machine.in_place:
                begin = max(self._offload, self._device)
                rate = self._machine.offload_bytes_per_s
                at_s = self._offload = self._link(
                    "OFFLOAD", spec.name, spec.grad_bytes, begin, rate
                )
            self._host.take_gradient(pack, at_s, stays=last and pack in self._early)

    def _free(self, packs: Iterable[int], soon: frozenset[int]) -> None:
        for pack in packs:
            if pack not in self._stay:
                self._on_device.discard(pack)
            if pack not in soon:
                self._host.let_go(pack)

    # -- small things -----------------------------------------------------------------------------------

    def _packs(self, blocks: Iterable[int]) -> frozenset[int]:
        return frozenset(self._spec.pack_indices(blocks))

    def _here(self, packs: Iterable[int]) -> list[int]:
        """Return those that do not live on the device."""
        return [pack for pack in packs if pack not in self._elsewhere]

    def _link(
        self, kind: str, name: str, num_bytes: int, start: float, rate: float
    ) -> float:
        end = start + num_bytes / rate
        self._linked[kind] += num_bytes
        self._host.note(kind, name, start, end, lane="link", num_bytes=num_bytes)
        return end
