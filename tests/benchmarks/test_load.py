"""A checkpoint larger than max_ram_gb in and out again: the peak in RAM, and the rate beside that of the disk."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from megatrain_nb.store.host import map_pages
from tests.benchmarks.load import forget
from tests.runtime.common import report_of_module

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, LAYERS = 1536, 41  # 1.2 G parameters
MAX_RAM_GB = 1.5
PIECE_BYTES = 16 << 20

run = partial(report_of_module, "tests.benchmarks.load")


def copy_rate(folder: Path, to: Path) -> float:
    """Read a folder's shards and write them elsewhere, O_DIRECT, one piece after the other: bytes per second, both ways."""
    forget(folder)
    data = map_pages(PIECE_BYTES)
    target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    moved, pieces, start = 0, 0, time.perf_counter()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            source = os.open(path, os.O_RDONLY)
            for offset in range(0, os.fstat(source).st_size, PIECE_BYTES):
                moved += os.preadv(source, [data], offset)
                os.pwrite(target, data, pieces * PIECE_BYTES)
                pieces += 1
            os.close(source)
        os.fsync(target)
    finally:
        os.close(target)
        to.unlink()
    return 2 * moved / (time.perf_counter() - start)


@pytest.mark.slow
@pytest.mark.usefixtures("benchmarking")
@pytest.mark.parametrize("way", ["ours", "plain"])
def test_load_and_save(way: str, tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 25e9:
        pytest.skip("needs 25 GB of free disk")
    folder = tmp_path / "checkpoint"
    num_params = run("make", folder, HIDDEN, LAYERS, "float32")["num_params"]
    num_bytes = 4 * num_params
    rates = [copy_rate(folder, tmp_path / "copy")]
    report = run("move", way, folder, tmp_path, MAX_RAM_GB)
    rates.append(copy_rate(folder, tmp_path / "copy"))
    load_rate = 2 * num_bytes / report["load_seconds"]
    save_rate = 2 * num_bytes / report["save_seconds"]
    print(
        f"\n{num_params / 1e9:.2f} G parameters, fp32, max_ram_gb={MAX_RAM_GB:g}, {way}"
        f"\n  load {report['load_seconds']:.0f} s, {load_rate / 1e9:.2f} GB/s read and written, peak "
        f"{report['load_peak_bytes'] / 1e9:.2f} GB"
        f"\n  save {report['save_seconds']:.0f} s, {save_rate / 1e9:.2f} GB/s, peak {report['save_peak_bytes'] / 1e9:.2f} GB"
        f"\n  a plain copy of the checkpoint before and after: {rates[0] / 1e9:.2f} and {rates[1] / 1e9:.2f} GB/s"
    )
    allowed = 1.05e9 * MAX_RAM_GB + report["block_bytes"]
    assert report["load_peak_bytes"] <= allowed
    assert report["save_peak_bytes"] <= allowed
