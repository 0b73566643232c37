"""What a session has spent so far, and the least that a step takes on each resource."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.runtime.device import Device
    from megatrain_nb.runtime.session import Session


def running_totals(session: Session) -> dict[str, float]:
    """Return seconds by cause and bytes moved so far; the difference of two is what was spent between them."""
    device, store, models = session.device, session.store, tuple(session.models)
    return {
        "now": time.perf_counter(),
        "compute": device.compute_seconds
        + sum(model.executor.compute_seconds for model in models),
        "wait": sum(model.pager.wait_seconds for model in models),
        "update": sum(model.steps.seconds + model.updates.seconds for model in models),
        "read": float(store.read_bytes),
        "written": float(store.written_bytes),
        "onloaded": float(device.onloaded.num_bytes),
        "offloaded": float(device.offloaded.num_bytes),
        "link": device.onloaded.seconds + device.offloaded.seconds,
        "stall": device.stall_seconds,
    }


def least_seconds(
    spent: Mapping[str, float], device: Device, *, disk_rate: float
) -> dict[str, float]:
    """Return by resource the least time that what a step did takes there.

    Parameters
    ----------
    spent
        What `running_totals` counted in the step.
    device
        Where it computed; it knows how fast its link is.
    disk_rate
        The fastest that the disk has shown, in bytes per second; 0.0 where that is not known.
    """
    least = {"compute": spent["compute"]}
    if device.in_place:  # the kernels run on the same cores
        least["compute"] += spent["update"]
    else:
        least["update"] = spent["update"]
        if device.onloaded.best and device.offloaded.best:
            least["link"] = max(
                spent["onloaded"] / device.onloaded.best,
                spent["offloaded"] / device.offloaded.best,
            )
    if disk_rate:
        least["disk"] = (spent["read"] + spent["written"]) / disk_rate
    return least
