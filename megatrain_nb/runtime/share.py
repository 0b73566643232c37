"""One model's share of a device with memory of its own: what stays there, and how much is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_nb.plan.device import (
    DevicePlan,
    plan_device,
    slot_bytes,
    tail_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain_nb.runtime.device import Device
    from megatrain_nb.runtime.executor import Executor


class DeviceShare:
    """Plans what stays on the device, once a step has shown what else is there.

    Activations are where blocks compute. Those of the device's twin are in RAM, and planned there.
    """

    def __init__(self, executor: Executor, device: Device) -> None:
        self._executor = executor
        self._device = device
        self._other_bytes: int | None = None
        self._keep_first = True
        self._tail_first = False

    @property
    def holds_activations(self) -> bool:
        """Whether activations are in the device's own memory."""
        return self._device.torch_device.type != "cpu"

    @property
    def updates(self) -> bool:
        """Whether AdamW may run there: torch's fused one has the host's formula."""
        return self._device.torch_device.type in ("cpu", "cuda")

    def plan(
        self,
        wanted_keep_bytes: int,
        others: Sequence[Executor],
        *,
        max_tail_bytes: int | None,
    ) -> None:
        """Decide what stays, and make it so; before a step has run, nothing does.

        Parameters
        ----------
        wanted_keep_bytes
            What activations would take if all of a window's were kept, as far as that is allowed.
        others
            The session's other models, whose slots are in use. Where there are some, no pack lives on the device: models
            take turns, and each needs the slots.
        max_tail_bytes
            Gradients and moments may take this much; None for all there is room for.
        """
        device, executor = self._device, self._executor
        if device.in_place or device.limit_bytes is None or self._other_bytes is None:
            return
        plan = DevicePlan()
        if not device.exhausted:
            plan = plan_device(
                executor.layers.spec,
                executor.expected_order(),
                limit_bytes=device.limit_bytes,
                other_bytes=self._other_bytes + sum(x.device_bytes for x in others),
                wanted_keep_bytes=wanted_keep_bytes if self.holds_activations else 0,
                keep_first=self._keep_first,
                tail_first=self._tail_first,
                max_tail_bytes=0 if others or not self.updates else max_tail_bytes,
            )
        executor.stay = plan.stay
        executor.tail.plan(plan.tail)
        if self.holds_activations:
            executor.keeping.limit_bytes = plan.keep_bytes

    def learn(self, least_seconds: Mapping[str, float]) -> None:
        """Note at the end of a step what torch counted on the device, and what bound the step."""
        kept = self._executor.keeping.restart_peak() if self.holds_activations else 0
        # What is kept and what else is there need not peak together: so this only grows.
        other = max(0, self._device.other_peak_bytes() - kept)
        self._other_bytes = max(self._other_bytes or 0, other)
        link = least_seconds.get("link", 0.0)
        self._keep_first = link <= least_seconds.get("compute", 0.0)
        # Once and for all: with the tail on the device something else binds, and it must not for that reason leave.
        binds = max(least_seconds, key=lambda resource: least_seconds[resource])
        self._tail_first |= binds in ("disk", "update")

    def room_bytes(self, ram_bytes: int) -> int:
        """Return what is there for the model's own tensors where blocks compute; ``ram_bytes`` if that is RAM."""
        limit = self._device.limit_bytes
        if limit is None or not self.holds_activations:
            return ram_bytes
        spec, executor = self._executor.layers.spec, self._executor
        stays = sum(spec.packs[pack].weight_bytes for pack in executor.stay)
        stays += tail_bytes(spec, executor.tail.planned)
        taken = slot_bytes(spec) + stays + executor.keeping.limit_bytes
        return max(0, limit - taken)
