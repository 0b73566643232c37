"""Larger and larger models in the same memory: seconds per parameter stay, and so does the peak."""

from __future__ import annotations

import shutil
from statistics import median
from typing import TYPE_CHECKING

import pytest

from tests.runtime.common import report_of_module

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 512
MAX_RAM_GB, LEAST_RAM_GB = 6.0, 1.0
# Hidden size, layers, steps. One width, so that the matrix library is as fast in all of them and only the runtime is compared.
SIZES = {"0.1": (1280, 5, 10), "0.5": (1280, 24, 6), "2": (1280, 101, 4)}
LEARNING = 2  # steps that come before: the plan learns in them, and the first one reads no moments


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("benchmarking")
def test_growth(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 45e9:
        pytest.skip("needs 45 GB of free disk")
    rates = {}
    for name, (hidden, layers, steps) in SIZES.items():
        # In proportion, so that the same part of each is on disk; but what streams needs as much for few layers as for many.
        max_ram_gb = max(LEAST_RAM_GB, MAX_RAM_GB * float(name) / 2)
        numbers = hidden, layers, max_ram_gb, TOKENS, steps
        report = report_of_module("tests.benchmarks.grow", tmp_path / name, *numbers)
        last = report["steps"][LEARNING:]
        seconds = median(step["seconds"] for step in last)
        rates[name] = seconds / report["num_params"] / TOKENS
        print(
            f"\n{report['num_params'] / 1e9:.2f} G parameters, {report['state_bytes'] / 1e9:.1f} GB of state, "
            f"max_ram_gb={max_ram_gb:.2g}, {TOKENS} tokens: made in {report['making_seconds']:.0f} s, "
            f"{seconds:.1f} s per step ({1e12 * rates[name]:.1f} ps per parameter and token), "
            f"{median(step['share_of_bound'] for step in last):.0%} of the bound ({last[-1]['bound']})"
            f"\n  peak {report['peak_bytes'] / 1e9:.2f} GB, disk {report['disk_bytes'] / 1e9:.1f} GB, "
            f"losses {', '.join(format(step['loss'], '.3f') for step in report['steps'])}"
        )
        assert report["peak_bytes"] <= 1.05e9 * max_ram_gb
        assert report["steps"][-1]["loss"] < report["steps"][0]["loss"]
    assert max(rates.values()) <= 1.1 * min(rates.values())
