"""One model's memory: what of it stays in RAM and on the device, and what is set aside for its own tensors.

The plan is made when the model comes, and again where a step shows that its own tensors take something else.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import BudgetError
from megatrain_nb.plan.keep import prefers_kept
from megatrain_nb.plan.layout import Layout, make_layout
from megatrain_nb.plan.memory import (
    Residency,
    disk_need_bytes,
    plan_residency,
    working_bytes,
)
from megatrain_nb.plan.own import SPREAD_BYTES, holes_bytes, keepable_bytes
from megatrain_nb.plan.reserve import (
    GRAIN_BYTES,
    NEARLY_FULL,
    first_guess,
    still_fits,
    with_margin,
)
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.runtime import heap
from megatrain_nb.runtime.foresee import Foresight
from megatrain_nb.runtime.inforce import expected_peaks, expected_seconds, forecast_of
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.runtime.offload import OffloadedModel

# A budget holds to within so much of it. A shortage beyond that is said, and again once it has grown by a quarter.
_OVER, _GROWN = 0.05, 1.25

logger = logging.getLogger("megatrain_nb")


class ModelMemory:
    """What is planned for one model, and what was learned for the next plan.

    Attributes
    ----------
    residency
        The plan in force.
    reserved_bytes
        RAM that is set aside for the model's own tensors, in bytes.
    foresight
        Looks at what the model is called with.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self.residency = Residency()
        self.reserved_bytes = first_guess(offloaded.session.max_ram_bytes)
        self._offloaded = offloaded
        self._session = offloaded.session
        self._keep_wanted = self._keep_beside = self._spread_bytes = 0
        self.foresight = Foresight()
        self._peak = self._warned_bytes = self._collected_bytes = 0
        self._keep_first = self._keep_by_plan = False
        self._room = 0
        self._least_seconds: Mapping[str, float] = {}
        self._told: tuple[object, ...] | None = None
        self._planned: dict[str, float] = {}

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, limit_bytes: int) -> None:
        """Decide what stays in RAM, and make it so.

        Parameters
        ----------
        limit_bytes
            This model's share of the session's RAM.

        Raises
        ------
        BudgetError
            The share does not even hold what streams, or the disk not what does not stay.
        """
        offloaded = self._offloaded
        spec = offloaded.layers.spec
        room = self._beside_streaming(spec, limit_bytes)
        self._room = max(room, 0)
        self.plan_device()
        residency = self._plan_residency(spec, limit_bytes)
        before = self.residency
        if not (residency.states <= before.states and residency.grads <= before.grads):
            # Tiles read ahead of a piece that is to stay would be newer than the whole that is read for it.
            offloaded.updates.rest()
        offloaded.pager.apply(residency)
        offloaded.pager.barrier()
        self.residency = residency
        if not offloaded.share.holds_activations:
            keeping = offloaded.executor.keeping
            keeping.limit_bytes = self._keepable_of(residency)
            keeping.lent_bytes = residency.lent_bytes

    def plan_device(self) -> None:
        """Decide what stays on a device with memory of its own, and make it so."""
        offloaded = self._offloaded
        offloaded.share.plan(
            self._keep_allowed(),
            [x.executor for x in self._session.models if x is not offloaded],
            max_tail_bytes=self._session.max_tail_bytes,
        )

    def check(self, spec: ModelSpec) -> None:
        """Raise BudgetError if the model would not fit with these packs."""
        self._plan_residency(spec, self._session.models.share_bytes())

    def layout(self) -> Layout:
        """Return the model's blocks, and what of them stays in RAM."""
        offloaded = self._offloaded
        spec, pager = offloaded.layers.spec, offloaded.pager
        order, stay = offloaded.executor.expected_order(), offloaded.executor.stay
        traffic = step_traffic(spec, self.residency, order, stay=stay)
        return make_layout(
            spec,
            pager.layout(),
            model=pager.prefix.rstrip("/"),
            name=offloaded.name,
            in_place=self._session.device.in_place,
            planned_bytes=(traffic.read_bytes, traffic.written_bytes),
            planned_seconds=self._planned_seconds(),
            planned_peaks=expected_peaks(offloaded),
        )

    def tell(self) -> None:
        """As a window begins: tell who listens of a plan that is another one than was told last."""
        if self._session.callbacks and self._told != self._planned_for():
            layout = self.layout()
            for callback in self._session.callbacks:
                callback.on_layout(layout)

    def _planned_for(self) -> tuple[object, ...]:
        """Return what decides how long a step should take."""
        executor = self._offloaded.executor
        order = executor.expected_order()
        kept = frozenset(block for block in order if executor.keeping.wants(block))
        return self.residency, self.foresight.window, order, kept, executor.stay

    def _planned_seconds(self) -> dict[str, float]:
        decides = self._planned_for()
        if decides != self._told or not self._planned:
            self._told = decides
            self._planned = expected_seconds(self._offloaded)
        return self._planned

    def room_bytes(self) -> int:
        """Return what the budgets have for the model's own tensors where its blocks compute, in bytes."""
        return self._offloaded.share.room_bytes(self._room)

    def _plan_residency(self, spec: ModelSpec, limit_bytes: int) -> Residency:
        room = self._beside_streaming(spec, limit_bytes)
        keep = self._keepable_bytes()
        residency = plan_residency(
            spec,
            limit_bytes=limit_bytes,
            activation_bytes=max(0, min(self.reserved_bytes, room)),
            keep_bytes=keep + max(holes_bytes(keep), self._keep_beside),
            keep_share=self._keep_share(),
            resident_bytes=self._session.max_resident_bytes,
            packing_bytes=self._session.models.packing_share_bytes(),
            tile_numel=self._offloaded.pager.tile_numel,
            elsewhere=frozenset(self._offloaded.executor.tail),
        )
        self._check_disk(spec, residency)
        return residency

    def _beside_streaming(self, spec: ModelSpec, limit_bytes: int) -> int:
        """Return what a share of the RAM leaves when nothing is resident; less than 0 where it is too small."""
        working = working_bytes(spec, tile_numel=self._offloaded.pager.tile_numel)
        return limit_bytes - working - self._session.models.packing_share_bytes()

    def _keep_share(self) -> float:
        given = self._session.keep_share
        return float(self._keep_first) if given is None else given

    def _keepable_bytes(self) -> int:
        """Return what activations would take if all of a window's were kept, within what the session allows."""
        return 0 if self._offloaded.share.holds_activations else self._keep_allowed()

    def _keepable_of(self, residency: Residency) -> int:
        """Return what activations may take of what a plan sets aside for them."""
        aside = residency.keep_bytes
        keepable = keepable_bytes(aside, self._keepable_bytes())
        return max(0, min(keepable, aside - self._keep_beside))

    def _keep_allowed(self) -> int:
        allowed = self._session.max_kept_bytes
        return self._keep_wanted if allowed is None else min(self._keep_wanted, allowed)

    def _check_disk(self, spec: ModelSpec, residency: Residency) -> None:
        """Copy on write needs room for the tiles that are written while their old versions are there."""
        needed = disk_need_bytes(spec, residency)
        allowed = self._session.models.disk_room_bytes(self._offloaded)
        if needed > allowed:
            pinned = self._session.store.pinned_bytes()
            beside = (
                f" beside the checkpoints' {format_bytes(pinned)}" if pinned else ""
            )
            msg = (
                f"max_disk_gb or the free space allow {format_bytes(max(allowed, 0))} on disk{beside}, and this model "
                f"needs {format_bytes(1.005 * needed)} there; raise max_disk_gb, free some space, or raise max_ram_gb"
            )
            raise BudgetError(msg)

    # -- learning -------------------------------------------------------------------------------------

    @property
    def plans_by_shape(self) -> bool:
        """Whether the model's shape may tell what to set aside: blocks compute in RAM, and nothing was asked for."""
        session = self._session
        asked = (session.max_resident_bytes, session.max_kept_bytes, session.keep_share)
        return session.device.in_place and asked == (None, None, None)

    def foresee(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], accumulation: int
    ) -> None:
        """Plan for a window that is larger than any before, before it runs.

        Parameters
        ----------
        args, kwargs
            What the model is called with for one micro-batch.
        accumulation
            Micro-batches of the window.
        """
        given = args, kwargs
        if not self.plans_by_shape:
            self.foresight.note(given, accumulation)
            return
        found = self.foresight.look(
            self._offloaded.model,
            self._offloaded.layers,
            given,
            accumulation=accumulation,
            room_bytes=self._room,
        )
        if found is None or found.reserved > self._room:
            return  # without room everything streams, whatever is set aside
        if found.reserved > self.reserved_bytes or self._spread_bytes == 0:
            plan = forecast_of(self._offloaded)
            if plan is not None:
                self._keep_first = plan.residency.keep_bytes > 0
                self._keep_by_plan = True
            self.reserved_bytes, kept = found
            self._keep_wanted = max(self._keep_wanted, kept)
            share = self._session.models.share_bytes()
            self._spread_bytes = min(3 * SPREAD_BYTES, share // 5)
            self._session.models.plan()

    def relieve(self) -> None:
        """At a block's border: give back what is free before the budget is full; set more aside if more is taken."""
        reserved, taken = self.reserved_bytes, self._taken()
        if taken > (reserved if reserved <= self._room else NEARLY_FULL * self._room):
            heap.trim()
            taken = self._taken()
        if taken > reserved:
            self.learn()

    def begin(self) -> None:
        """Count from here: what the process took at most before a step, or a forward alone, is not the model's."""
        taken = self._taken()
        if taken > max(self.reserved_bytes, _GROWN * self._collected_bytes):
            gc.collect()  # another model that nobody holds may lie in a cycle, as after a Trainer
            heap.trim()
            self._collected_bytes = taken
        self._session.other_peak_bytes()

    def _taken(self) -> int:
        """Return what is taken now of what is set aside for the model's own tensors, but for what is kept, in bytes."""
        residency, lent = self.residency, self._session.pool.aside_bytes
        kept = residency.keep_bytes - residency.lent_bytes + lent
        return self._session.other_bytes() - kept

    def learn(self) -> None:
        """Compare what is set aside with what the kernel counted, and plan again where it matters."""
        keeping = self._offloaded.executor.keeping
        first = self._keep_first
        if not self._keep_by_plan:
            first = prefers_kept(self._least_seconds, now=first)
        # Of the whole step so far, also where a border in it was looked at before.
        self._peak = peak = max(self._peak, self._session.other_peak_bytes())
        self._warn_if_short()
        measured = with_margin(peak)
        if peak <= self.reserved_bytes:  # it holds that, if without a margin
            measured = min(measured, self.reserved_bytes)
        in_ram = not self._offloaded.share.holds_activations
        kept = keeping.peak_bytes if in_ram else 0
        changed = first != self._keep_first
        if kept:
            # What else was taken is what keeping costs beside its bytes (freed memory waits in the heap). It only
            # grows, and only keeping gives way to it: so the plan comes to rest.
            residency = self.residency
            free = residency.keep_bytes - residency.lent_bytes - kept
            beside = max(free, residency.keep_bytes - keeping.limit_bytes)
            if peak - kept - self.reserved_bytes > beside + GRAIN_BYTES:
                self._keep_beside = measured - kept - self.reserved_bytes
                changed = True
            measured = self.reserved_bytes
        if keeping.wanted_bytes > self._keep_wanted:
            self._keep_wanted = with_margin(keeping.wanted_bytes)
            changed |= in_ram
        fits = still_fits(
            self.reserved_bytes, measured, spread_bytes=self._spread_bytes
        )
        if changed or not fits:
            self.reserved_bytes = self.reserved_bytes if fits else max(measured, 0)
            self._keep_first = first
            self._session.models.plan()
            logger.info(
                "set aside %s for activations; %s resident",
                format_bytes(self.reserved_bytes + self.residency.keep_bytes),
                format_bytes(self.residency.resident_bytes),
            )

    def _warn_if_short(self) -> None:
        """Say that the process takes more than the budget has room for; again only where that has grown."""
        room = self._room + self.residency.lent_bytes
        allowed = room + round(_OVER * self._session.max_ram_bytes)
        if self._peak <= max(allowed, _GROWN * self._warned_bytes):
            return
        self._warned_bytes = self._peak
        logger.warning(
            "%s: beside what streams the process took %s, and max_ram_gb leaves %s for that; shorten the sequence or the "
            "micro-batch, free what else the process holds, or raise max_ram_gb",
            self._offloaded.name,
            format_bytes(self._peak),
            format_bytes(room),
        )

    def end_step(self, least_seconds: Mapping[str, float]) -> None:
        """Learn what a step took, and plan again where it matters.

        Parameters
        ----------
        least_seconds
            By resource the least time that the step takes there, see `megatrain_nb.runtime.costs`.
        """
        self._least_seconds = least_seconds
        if not self._session.device.in_place:
            self._offloaded.share.learn(least_seconds)
        self.learn()
        self._peak = 0
        if not self._offloaded.share.holds_activations:
            self._offloaded.executor.keeping.restart_peak()
        self.plan_device()
        if self.residency.elsewhere != frozenset(self._offloaded.executor.tail):
            self._session.models.plan()
