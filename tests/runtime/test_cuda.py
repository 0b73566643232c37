"""The CUDA code against a stand-in for torch.cuda that runs everything in order on the CPU.

What the stand-in has, torch.cuda has: names and arguments are compared. Whether CUDA does what is expected of it
is for tests/gpu to find out.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime import cuda, init, session
from megatrain_nb.runtime.slots import SlotDevice
from tests.runtime.common import (
    TinyLM,
    differing,
    opened,
    seeded,
    snapshot,
    window_step,
)

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
REAL = torch.cuda
MIB = 1 << 20


class _Event:
    """An event that has come as soon as it is recorded; it knows what its stream had done by then."""

    now = 0.0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing = enable_timing
        self.at_ms = -1.0

    def record(self, stream: Any = None) -> None:
        assert stream is not None
        _Event.now += 0.25
        self.at_ms = _Event.now

    def query(self) -> bool:
        return self.at_ms >= 0

    def synchronize(self) -> None:
        assert self.at_ms >= 0

    def elapsed_time(self, end_event: _Event) -> float:
        assert self.timing
        assert end_event.timing
        return end_event.at_ms - self.at_ms


class _Stream:
    def __init__(self, device: Any = None) -> None:
        assert device is not None
        self.waited: list[Any] = []

    def wait_event(self, event: _Event) -> None:
        assert event.query()
        self.waited.append(event)

    def synchronize(self) -> None:
        pass


class Cudart:
    """Page-locks until it is full, and then holds an error that the next kernel would report."""

    def __init__(self, most: int = 100) -> None:
        self.locked: set[int] = set()
        self.most = most
        self.error = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if len(self.locked) >= self.most:
            self.error = True
            return 2
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.locked:
            self.error = True
            return 1
        self.locked.remove(address)
        return 0


class Cuda:
    """What the package uses of torch.cuda, on a device of 4 MiB."""

    Event = _Event
    Stream = _Stream

    def __init__(self) -> None:
        self.current = _Stream(CPU)
        self.rt = Cudart()
        self.fraction = 0.75
        self.allocated = 0
        self.peak = 3 * MIB

    def current_stream(self, device: Any = None) -> _Stream:
        return self.current

    def stream(self, stream: _Stream) -> Any:
        return nullcontext()

    def device(self, device: Any) -> Any:
        return nullcontext()

    def cudart(self) -> Cudart:
        return self.rt

    def synchronize(self, device: Any = None) -> None:
        if self.rt.error:
            self.rt.error = False
            msg = "CUDA error: out of memory"
            raise RuntimeError(msg)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2 * MIB, 4 * MIB

    def memory_reserved(self, device: Any = None) -> int:
        return MIB

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = 0

    def empty_cache(self) -> None:
        pass

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self.fraction

    def set_per_process_memory_fraction(
        self, fraction: float, device: Any = None
    ) -> None:
        self.fraction = fraction


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return take_the_place_of_cuda(monkeypatch)


def take_the_place_of_cuda(patch: pytest.MonkeyPatch) -> Cuda:
    """Only for what runtime/cuda.py calls: torch's own modules go on with theirs."""
    stand_in = Cuda()
    names = ("no_grad", "zeros", "nan")
    shim = SimpleNamespace(
        cuda=stand_in, **{name: getattr(torch, name) for name in names}
    )
    patch.setattr("megatrain_nb.runtime.cuda.torch", shim)
    return stand_in


def test_the_stand_in_has_nothing_that_torch_has_not() -> None:
    names = [name for name in vars(Cuda) if not name.startswith("_")]
    assert [name for name in names if not hasattr(REAL, name)] == []
    for name in names:
        mine, theirs = getattr(Cuda, name), getattr(REAL, name)
        if inspect.isclass(mine):
            methods = [x for x in vars(mine) if not x.startswith("_") and x != "now"]
            assert [x for x in methods if not hasattr(theirs, x)] == []
            expected = set(inspect.signature(theirs.__new__).parameters)
        else:
            expected = set(inspect.signature(theirs).parameters)
        given = set(inspect.signature(mine).parameters) - {"self"}
        assert given <= expected, name


def cuda_device(max_bytes: int | None = None) -> SlotDevice:
    """A device as open_device makes it, but for where its tensors are."""
    vram = cuda.Vram(CPU, max_bytes)
    return SlotDevice(
        CPU, max_bytes=max_bytes, lanes=cuda.CudaLanes(CPU), vram=vram, poison=True
    )


def test_training_with_streams_and_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(TinyLM)

    def trained(one: Any, path: Path) -> Any:
        with opened(path) as opened_session:
            _, optimizer = mt.wrap(one, lr=1e-2, max_grad_norm=0.5)
            results = [window_step(one, optimizer, step) for step in range(3)]
            status = opened_session.status()
            return snapshot(one, optimizer), results, status

    expected, *_ = trained(copy.deepcopy(model), tmp_path / "plain")
    with monkeypatch.context() as patch:
        stand_in = take_the_place_of_cuda(patch)
        device = cuda_device(MIB)
        locks = cuda.PinnedPages(CPU)
        patch.setattr(init, "open_device", lambda *_, **__: device)
        patch.setattr(session, "pinned_pages", lambda _: locks)
        found, results, status = trained(copy.deepcopy(model), tmp_path / "cuda")
        assert stand_in.rt.locked == set()  # all were unlocked
        assert stand_in.fraction == 0.75
    assert differing(expected, found) == []
    assert status.pinned_bytes > 0
    assert "page-locked" in str(status)
    assert results[-1].link_seconds > 0
    assert results[-1].onloaded_bytes > 0
    assert device.used_bytes() == 0


def test_copies_wait_for_computing_and_computing_for_copies(fake: Cuda) -> None:
    lanes: Any = cuda.CudaLanes(CPU)
    slot, host = torch.zeros(8), np.ones(8, np.float32)
    computed = lanes.computed(slot)
    copied = lanes.copy_in(slot, host, computed)
    assert lanes._in.waited == [computed.end]
    lanes.compute_waits(copied)
    assert fake.current.waited == [copied.end]
    host[:] = 0
    leaving = lanes.copy_out(host, slot, lanes.computed(slot))
    assert (len(lanes._out.waited), host.sum()) == (1, 8)
    begin_s, end_s = leaving.times()
    assert end_s - begin_s == pytest.approx(0.25e-3)
    lanes.end_step()
    moment = lanes.begin()
    later = lanes.since(moment)
    assert later.times()[1] - later.times()[0] == pytest.approx(0.25e-3)
    lanes.close()


def test_page_locks_that_fail_are_told_once(fake: Cuda) -> None:
    fake.rt.most = 1
    locks = cuda.PinnedPages(CPU)
    assert locks.register(4096, 4096)
    assert not locks.register(8192, 4096)
    assert "page-locked" in locks.problem
    assert not fake.rt.error  # no later kernel reports it
    assert not locks.register(12288, 4096)
    locks.unregister(4096)
    locks.unregister(999)
    assert (fake.rt.locked, fake.rt.error) == (set(), False)


def test_the_limit_of_device_memory(fake: Cuda) -> None:
    vram = cuda.Vram(CPU, MIB)
    assert (vram.limit_bytes, fake.fraction) == (MIB, 0.25)
    assert (vram.restart_peak(), vram.restart_peak()) == (3 * MIB, 0)
    vram.close()
    vram.close()
    assert fake.fraction == 0.75
    assert cuda.Vram(CPU, None).limit_bytes == round(0.95 * 2 * MIB) + MIB
    assert fake.fraction == 0.75
    fake.allocated = 2 * MIB
    with pytest.raises(mt.BudgetError, match="in use"):
        cuda.Vram(CPU, MIB)
