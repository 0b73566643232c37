"""Where the seconds of a step go, by cause: one rule for what is measured and for what is simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.plan.simulate import Simulated

CAUSES = ("compute", "wait", "link", "update", "other")


def seconds_by_cause(spent: Mapping[str, float], *, in_place: bool) -> dict[str, float]:
    """Return the wall seconds of a step by cause; their sum is its wall time.

    Parameters
    ----------
    spent
        Seconds of the step: ``now``, all of it; ``wait``, the host for the disk; ``update``, the host at optimizer
        work; ``compute``, the blocks; ``stall``, a device for copies.
    in_place
        The host computes; else the device does while the host waits and updates, and only what these leave of
        the time is the computing's own, and after it the copies'.

    Returns
    -------
    dict of str to float
        ``compute``, ``wait`` (for the disk), ``link`` (copies to a device that are not hidden; not in place),
        ``update`` (optimizer) and ``other`` (Python, data).

    Examples
    --------
    >>> seconds_by_cause(
    ...     {"now": 5.0, "wait": 1.0, "update": 1.0, "compute": 2.5, "stall": 0.0},
    ...     in_place=True,
    ... )
    {'compute': 2.5, 'wait': 1.0, 'update': 1.0, 'other': 0.5}
    """
    left = spent["now"] - spent["wait"] - spent["update"]
    compute = spent["compute"]
    if in_place:
        rest = {"compute": compute, "wait": spent["wait"]}
    else:
        compute = max(0.0, min(compute, left))
        link = max(0.0, min(spent["stall"], left - compute))
        rest = {"compute": compute, "wait": spent["wait"], "link": link}
        left -= link
    return {**rest, "update": spent["update"], "other": max(0.0, left - compute)}


def planned_seconds(step: Simulated, *, in_place: bool) -> dict[str, float]:
    """Return the seconds of a simulated step by cause, as `seconds_by_cause` does of a measured one.

    A ``WAIT`` on the link's lane is the device's, every other one the host's.
    """
    spent = {"now": step.seconds, "wait": 0.0, "stall": 0.0}
    spent |= {"compute": step.busy_s["compute"], "update": step.busy_s["update"]}
    for span in step.spans:
        if span.kind == "WAIT":
            spent["stall" if span.lane == "link" else "wait"] += span.seconds
    return seconds_by_cause(spent, in_place=in_place)
