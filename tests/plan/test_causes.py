"""The causes of a step's seconds add up to its time, simulated and measured by one rule."""

from __future__ import annotations

import pytest

from megatrain_nb.plan.causes import planned_seconds, seconds_by_cause
from megatrain_nb.plan.machine import nominal
from megatrain_nb.plan.simulate import BlockTimes, Simulated, Simulation
from tests.plan.test_simulate import BLOCKS, make_machine, make_spec, residency_of, run


def test_what_the_host_leaves_of_a_devices_time_is_computing_then_copies() -> None:
    spent = {"now": 10.0, "wait": 2.0, "update": 3.0, "compute": 4.0, "stall": 0.5}
    found = seconds_by_cause(spent, in_place=False)
    assert found == {
        "compute": 4.0,
        "wait": 2.0,
        "link": 0.5,
        "update": 3.0,
        "other": 0.5,
    }
    # It computed, and waited for copies, while the host waited and updated: no more than is left is its own.
    busy = seconds_by_cause(spent | {"compute": 4.8, "stall": 6.0}, in_place=False)
    assert busy["compute"] == 4.8
    assert busy["link"] == pytest.approx(0.2)
    full = seconds_by_cause(spent | {"compute": 9.0}, in_place=False)
    assert (full["compute"], full["link"], full["other"]) == (5.0, 0.0, 0.0)
    assert sum(full.values()) == sum(busy.values()) == sum(found.values()) == 10.0


@pytest.mark.parametrize("disk", [1e5, 1e7, 2e8, 1e10])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.1])
def test_in_place_the_causes_of_a_simulated_step_are_its_time(
    disk: float, share: float
) -> None:
    machine = make_machine(disk=disk).changed(update_params_per_s=1e9)
    done = run(make_spec(), machine, share=share, seconds=0.01)
    found = planned_seconds(done, in_place=True)
    assert sum(found.values()) == pytest.approx(done.seconds)
    assert found["other"] == pytest.approx(0.0, abs=1e-9)
    assert found["compute"] == done.busy_s["compute"] == pytest.approx(0.31)
    assert found["update"] == done.busy_s["update"] > 0
    assert "link" not in found


def test_a_slow_disk_is_waited_for_and_a_fast_one_is_hidden() -> None:
    slow = planned_seconds(run(make_spec(), make_machine(1e7)), in_place=True)
    assert slow["wait"] > 0.5 * sum(slow.values()) / 2
    fast = planned_seconds(run(make_spec(), make_machine(1e10)), in_place=True)
    assert fast["wait"] < 0.01 * sum(fast.values())


def on_device(link: float, seconds: float) -> Simulated:
    machine = nominal(
        "box", {"ram_gb": 64, "vram_gb": 8, "link_gb_per_s": link}
    ).changed(update_params_per_s=1e12)
    spec = make_spec()
    times = [BlockTimes(seconds, seconds, 2 * seconds)] * BLOCKS
    every = frozenset(range(BLOCKS))
    residency = residency_of(spec, 1.1)
    return Simulation(spec, residency, range(BLOCKS), times, machine, every).run()


def test_on_a_device_a_slow_link_is_waited_for_and_a_fast_one_is_hidden() -> None:
    slow = on_device(link=0.04, seconds=1e-3)
    found = planned_seconds(slow, in_place=False)
    assert sum(found.values()) == pytest.approx(slow.seconds)
    assert found["link"] > 0.8 * slow.seconds
    # A weight of 4 MB in 0.1 s for each block, twice a step; the last block turns while it is loaded.
    copies = (2 * BLOCKS - 1) * 4 * (1 << 20) / 4e7
    assert slow.seconds == pytest.approx(copies, rel=0.1)
    fast = on_device(link=100.0, seconds=1e-2)
    found = planned_seconds(fast, in_place=False)
    assert found["link"] < 0.01 * fast.seconds
    assert found["compute"] == pytest.approx(fast.seconds, rel=0.02)
