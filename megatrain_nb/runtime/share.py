"""One model's share of a device with memory of its own: what stays there, and how much is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_nb.plan.device import DevicePlan, plan_device, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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

    @property
    def holds_activations(self) -> bool:
        """Whether activations are in the device's own memory."""
        return self._device.torch_device.type != "cpu"

    def plan(self, wanted_keep_bytes: int, others: Iterable[Executor]) -> None:
        """Decide what stays, and make it so; before a step has run, nothing does.

        Parameters
        ----------
        wanted_keep_bytes
            What activations would take if all of a window's were kept, as far as that is allowed.
        others
            The session's other models, whose slots are in use.
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
            )
        executor.stay = plan.stay
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

    def room_bytes(self, ram_bytes: int) -> int:
        """Return what is there for the model's own tensors where blocks compute; ``ram_bytes`` if that is RAM."""
        limit = self._device.limit_bytes
        if limit is None or not self.holds_activations:
            return ram_bytes
        spec, executor = self._executor.layers.spec, self._executor
        stays = sum(spec.packs[pack].weight_bytes for pack in executor.stay)
        taken = slot_bytes(spec) + stays + executor.keeping.limit_bytes
        return max(0, limit - taken)
