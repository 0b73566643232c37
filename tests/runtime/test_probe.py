from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from megatrain_nb.runtime import probe

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain_nb.plan.machine import Machine


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return probe.measure(tmp_path_factory.mktemp("disk"))


@pytest.mark.slow
def test_it_measures_what_it_says(machine: Machine) -> None:
    measured = {label for label, _, known in machine.rows() if known == "measured"}
    assert {"fp32 matrix products", "disk, read", "AdamW on the host"} <= measured
    assert 1e9 < machine.fp32_rates[-1][1] < 1e15
    assert machine.fp32_rates == tuple(sorted(machine.fp32_rates))
    assert 1e7 < machine.read_bytes_per_s < 1e12
    assert 1e8 < machine.memory_bytes_per_s < 1e13
    assert machine.framework_bytes > 1e8
    assert 1e-12 < machine.io_lost_s_per_byte < 1e-7
    assert "io_lost_s_per_byte" not in machine.assumed


@pytest.mark.slow
def test_nothing_is_left_on_the_disk_and_it_is_quick(tmp_path: Path) -> None:
    start = time.process_time()
    probe.measure(tmp_path)
    assert (
        time.process_time() - start < 60
    )  # of all cores; 20 s on the clock of a quiet machine
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_what_cannot_be_measured_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> dict[str, object]:
        raise OSError("no disk")

    monkeypatch.setattr(probe, "_disk", fail)
    monkeypatch.setattr(probe, "_compute", fail)
    found = probe.measure(tmp_path)
    assert {"read_bytes_per_s", "fp32_rates"} <= found.assumed
    assert "memory_bytes_per_s" not in found.assumed
    assert probe.measure(None).assumed >= {"read_bytes_per_s", "disk_bytes"}


@pytest.mark.slow
def test_it_shows_itself(machine: Machine) -> None:
    bundle = machine._repr_mimebundle_()
    assert "measured" in bundle["text/plain"]
    assert "GB/s" in bundle["text/html"]
