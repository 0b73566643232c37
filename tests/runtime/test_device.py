"""The twin of an accelerator gives the CPU's numbers, within its own budget."""

from __future__ import annotations

import copy
from pathlib import Path  # noqa: TC003
from typing import Any

import numpy as np
import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime import session as session_module
from megatrain_nb.runtime.device import HostDevice, SlotDevice, open_device
from tests.runtime.common import (
    TinyLM,
    differing,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
)


def trained(directory: Path, model: Any, *, window: bool, disk: bool) -> Any:
    with opened(directory, disk=disk):
        _, optimizer = mt.wrap(model, lr=1e-2, max_grad_norm=0.5)
        for step in range(3):
            (window_step if window else plain_step)(model, optimizer, step)
        return snapshot(model, optimizer)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(max_bytes: int | None = None) -> SlotDevice:
        device = SlotDevice(torch.device("cpu"), max_bytes=max_bytes)
        monkeypatch.setattr(session_module, "open_device", lambda *_, **__: device)
        return device

    return use


@pytest.mark.parametrize("disk", [True, False])
@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_twin_trains_bit_equal(
    tmp_path: Path,
    window: bool,
    disk: bool,
    tied: bool,
    twin: Any,
) -> None:
    model = seeded(lambda: TinyLM(tied=tied))
    expected = trained(tmp_path, copy.deepcopy(model), window=window, disk=disk)
    device = twin()
    found = trained(tmp_path, copy.deepcopy(model), window=window, disk=disk)
    assert differing(expected, found) == []
    assert device.used_bytes() == 0


def test_the_device_budget_is_kept(tmp_path: Path, twin: Any) -> None:
    device = twin(20_480)
    peaks = []

    class Watch(mt.Callback):
        def on_span(self, span: Any) -> None:
            peaks.append(device.used_bytes())

    model = seeded(TinyLM)
    with opened(tmp_path) as session:
        session.callbacks.append(Watch())
        _, optimizer = mt.wrap(model)
        window_step(model, optimizer, 0)
        session.callbacks.clear()
    assert 0 < max(peaks) <= 20_480


def test_too_small_a_device_budget(tmp_path: Path, twin: Any) -> None:
    twin(5_000)
    model = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(model)
        with pytest.raises(mt.BudgetError, match="max_vram_gb"):
            window_step(model, optimizer, 0)


def test_slots_are_copies_and_are_reused() -> None:
    device = SlotDevice(torch.device("cpu"), max_bytes=800)
    host = np.arange(100, dtype=np.float32)
    first = device.onload(host)
    host[:] = 0
    assert first[99] == 99
    address = first.data_ptr()
    device.release(first)
    second = device.onload(host)
    assert (second.data_ptr(), device.used_bytes()) == (address, 400)
    device.onload(host)
    with pytest.raises(mt.MegatrainError, match="max_vram_gb"):
        device.onload(host)
    device.release(second)
    device.onload(np.zeros(50, np.float32))  # a free slot of another size makes room
    assert device.used_bytes() == 600
    device.close()
    assert device.used_bytes() == 0


def test_slots_of_halves() -> None:
    device = SlotDevice(torch.device("cpu"), max_bytes=800)
    halves = device.onload(np.full(100, 0x3F80, np.uint16))
    assert halves.dtype == torch.bfloat16
    assert (float(halves[99]), device.used_bytes()) == (1.0, 200)
    device.release(halves)
    floats = device.onload(np.zeros(100, np.float32))  # not the free slot of halves
    assert (floats.dtype, device.used_bytes()) == (torch.float32, 600)
    assert device.onload(np.zeros(100, np.uint16)).data_ptr() == halves.data_ptr()
    device.close()


def test_which_device_is_opened() -> None:
    assert isinstance(open_device("cpu", max_vram_bytes=None), HostDevice)
    assert isinstance(open_device(torch.device("cpu"), max_vram_bytes=1), HostDevice)
