"""The twin of an accelerator gives the CPU's numbers, within its own budget, and shows every wait that is missing."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime import init
from megatrain_nb.runtime.device import HostDevice, open_device
from megatrain_nb.runtime.executor import Executor
from megatrain_nb.runtime.lanes import BlockingLanes, ThreadLanes
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import Piece, What
from megatrain_nb.runtime.share import DeviceShare
from megatrain_nb.runtime.slots import SlotDevice
from tests.runtime.common import (
    TinyLM,
    batch,
    differing,
    loss_of,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)
from tests.runtime.plain import (
    Case,
    assert_equal,
    assert_shows,
    copies_out_do_not_wait,
    counted,
    late_twin,
    plain_trace_of,
    streamed_trace,
)
from tests.runtime.plain import opened as opened_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CPU = torch.device("cpu")

# A block of the tiny model has 2048 weights: two slots for weights and two for gradients.
STREAMED_BYTES = 4 * 8192


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SlotDevice]]:
    """Here all updates are the host's; test_tail.py is about the device's."""
    monkeypatch.setattr(DeviceShare, "updates", False)
    made: list[SlotDevice] = []

    def use(max_bytes: int | None = None, **kwargs: Any) -> SlotDevice:
        device = (
            SlotDevice(CPU, max_bytes=max_bytes, **kwargs)
            if kwargs
            else late_twin(max_bytes)
        )
        made.append(device)
        monkeypatch.setattr(init, "open_device", lambda *_, **__: device)
        return device

    yield use
    for device in made:
        device.close()


def trained(
    directory: Path, model: Any, *, window: bool, disk: bool, steps: int = 3
) -> dict[str, torch.Tensor]:
    """What three steps make of a model, with an evaluation in between."""
    with opened(directory, disk=disk):
        _, optimizer = mt.wrap(model, lr=1e-2, max_grad_norm=0.5)
        losses = []
        for step in range(steps):
            (window_step if window else plain_step)(model, optimizer, step)
            with torch.no_grad():
                losses.append(loss_of(model, batch(step)))
        return snapshot(model, optimizer) | {"losses": torch.stack(losses)}


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "ram"])
@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("max_bytes", [None, 10**6], ids=["streams", "stays"])
def test_the_twin_trains_bit_equal(
    tmp_path: Path, *, window: bool, disk: bool, tied: bool, max_bytes: Any, twin: Any
) -> None:
    model = seeded(lambda: TinyLM(tied=tied))
    expected = trained(tmp_path, copy.deepcopy(model), window=window, disk=disk)
    device = twin(max_bytes)
    found = trained(tmp_path, copy.deepcopy(model), window=window, disk=disk)
    assert differing(expected, found) == []
    assert device.used_bytes() == 0


def test_blocking_copies_train_bit_equal(tmp_path: Path, twin: Any) -> None:
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), window=True, disk=True)
    twin(lanes=BlockingLanes(), poison=True)
    found = trained(tmp_path, copy.deepcopy(model), window=True, disk=True)
    assert differing(expected, found) == []


# -- what is missing shows ----------------------------------------------------------------------------------


def weights_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotDevice, "ready", lambda _, slot: slot.flat)


def slots_are_filled_while_they_are_used(patch: pytest.MonkeyPatch) -> None:
    copy_in = ThreadLanes.copy_in
    patch.setattr(
        ThreadLanes, "copy_in", lambda self, to, host, _: copy_in(self, to, host, None)
    )


def slabs_of_gradients_leave_too_early(patch: pytest.MonkeyPatch) -> None:
    lend = Pager.lend

    def given(self: Any, pack: int, what: What, until: Any) -> None:
        if what is not What.GRADS:
            lend(self, pack, what, until)

    patch.setattr(Pager, "lend", given)


def lent_pieces_are_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Piece, "lent", property(lambda _: False))
    patch.setattr(Pager, "_end_lease", lambda *_: None)


def lent_pieces_are_needed_at_once(patch: pytest.MonkeyPatch) -> None:
    def forget(_: Any, piece: Piece) -> None:
        piece.lease = None

    patch.setattr(Pager, "_end_lease", forget)


def weights_that_stay_become_old(patch: pytest.MonkeyPatch) -> None:
    settle = Executor._settle_unneeded
    patch.setattr(
        Executor,
        "_settle_unneeded",
        lambda self, keep, **_: settle(self, keep, stale=False),
    )


TEETH: dict[Callable[[pytest.MonkeyPatch], None], dict[str, Any]] = {
    weights_are_not_waited_for: {},
    slots_are_filled_while_they_are_used: {},
    copies_out_do_not_wait: {},
    slabs_of_gradients_leave_too_early: {},
    lent_pieces_are_settled: {},
    lent_pieces_are_needed_at_once: {"disk": False, "window": False},
    weights_that_stay_become_old: {"max_bytes": 10**6},
}


@pytest.mark.parametrize("broken", TEETH, ids=lambda broken: str(broken.__name__))
def test_a_missing_wait_shows(
    broken: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    twin: Any,
) -> None:
    given = {"disk": True, "window": True, "max_bytes": None} | TEETH[broken]
    max_bytes = given.pop("max_bytes")
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), **given)
    slow = {"lanes": ThreadLanes(most_delay_s=0.03, late=True), "poison": True}
    twin(max_bytes, **slow)
    broken(monkeypatch)
    assert_shows(lambda: trained(tmp_path, copy.deepcopy(model), **given), expected)


# -- what it does -------------------------------------------------------------------------------------------


class Watch(mt.Callback):
    """Keeps all spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def on_span(self, span: Any) -> None:
        self.spans.append(span)

    def of(self, *kinds: str) -> list[Any]:
        return [span for span in self.spans if span.kind in kinds]


def test_copies_run_beside_computing(
    tmp_path: Path, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next block's weights are on their way before a block computes; nobody waits for gradients that leave."""
    twin(lanes=ThreadLanes())
    watch = Watch()
    happened: list[str] = []

    def noted(name: str, letter: str) -> None:
        original = getattr(SlotDevice, name)

        def note(self: Any, *args: Any, **kwargs: Any) -> Any:
            happened.append(letter)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(SlotDevice, name, note)

    noted("onload", "c")
    noted("ready", "r")
    model = seeded(lambda: TinyLM(num_layers=6))
    with opened(tmp_path, disk=False) as session:
        session.max_kept_bytes = 0
        _, optimizer = wrapped(model)
        window_step(model, optimizer, 0)
        optimizer.finish()
        session.callbacks.append(watch)
        hooks = [
            layer.up.register_forward_pre_hook(lambda *_: happened.append("w"))
            for layer in model.layers
        ]
        happened.clear()
        window_step(model, optimizer, 1)
        for hook in hooks:
            hook.remove()
        session.callbacks.clear()
    # Ready, a copy for the next block, and only then the first of three micro-batches: forward and backward.
    assert "".join(happened).count("rcwww") == 12
    assert {span.lane for span in watch.of("ONLOAD", "OFFLOAD")} == {"link"}
    assert len(watch.of("OFFLOAD")) == len(model._megatrain.layers.spec.packs)


def test_the_link_is_counted(tmp_path: Path, twin: Any) -> None:
    twin()
    model = seeded(lambda: TinyLM(num_layers=2))
    with opened(tmp_path) as session:
        _, optimizer = mt.wrap(model)
        results = [window_step(model, optimizer, step) for step in range(2)]
        spec = model._megatrain.layers.spec
        text = str(session.status())
    # Forward, and backward but for the last block, whose backward begins while it is loaded.
    last = spec.block_bytes(len(spec.blocks) - 1)
    assert results[1].onloaded_bytes == 2 * spec.weight_bytes - last
    assert results[1].offloaded_bytes == spec.weight_bytes
    assert 0 < results[1].link_seconds < results[1].total_seconds
    assert results[1].least_seconds["update"] == results[1].seconds["update"]
    assert "its copies" in text


def test_waiting_for_copies_is_a_cause_of_its_own(tmp_path: Path, twin: Any) -> None:
    seconds = []
    for turn, delay_s in enumerate((0.0, 0.05)):
        twin(lanes=ThreadLanes(most_delay_s=delay_s, seed=1))
        with opened(tmp_path / str(turn)):
            model, optimizer = mt.wrap(seeded(lambda: TinyLM(num_layers=3)))
            result = [window_step(model, optimizer, step) for step in range(2)][-1]
        assert result.total_seconds == pytest.approx(sum(result.seconds.values()))
        seconds.append(result.seconds["link"])
    # Each copy comes up to 50 ms late, and what it does not hide behind is waited for.
    assert seconds[0] < 0.05
    assert seconds[1] > 0.05


def test_what_bounds_a_step_on_a_slow_link(tmp_path: Path, twin: Any) -> None:
    device = twin()
    device.onloaded.best = device.offloaded.best = 1e3  # bytes per second
    with opened(tmp_path):
        model = seeded(TinyLM)
        _, optimizer = mt.wrap(model)
        result = window_step(model, optimizer, 0)
        assert result.bound == "link"
        expected = max(result.onloaded_bytes, result.offloaded_bytes) / 1e3
        assert result.least_seconds["link"] == pytest.approx(expected)
        assert result.total_seconds == pytest.approx(sum(result.seconds.values()))


def test_the_device_budget_is_kept(tmp_path: Path, twin: Any) -> None:
    device = twin(20_480)
    peaks = []

    class Peak(mt.Callback):
        def on_span(self, span: Any) -> None:
            peaks.append(device.used_bytes())

    model = seeded(TinyLM)
    with opened(tmp_path) as session:
        session.callbacks.append(Peak())
        _, optimizer = mt.wrap(model)
        window_step(model, optimizer, 0)
        session.callbacks.clear()
    assert 0 < max(peaks) <= 20_480


def test_weights_stay_where_the_device_has_room(tmp_path: Path, twin: Any) -> None:
    model = seeded(TinyLM)
    seen = []
    for max_bytes in (STREAMED_BYTES, 60_000, 10**6):
        device = twin(max_bytes)
        with opened(tmp_path):
            mine = copy.deepcopy(model)
            _, optimizer = mt.wrap(mine)
            results = [window_step(mine, optimizer, step) for step in range(3)]
            stay = mine._megatrain.executor.stay
            seen.append((len(stay), results[-1].onloaded_bytes))
            packs = mine._megatrain.layers.spec.packs
            assert device.peak_bytes <= max_bytes
    whole = sum(pack.weight_bytes for pack in packs)
    assert seen[0][0] == 0
    assert 0 < seen[1][0] < len(packs)
    assert seen[0][1] > seen[1][1] > whole
    # Each block's weights cross once: they stay until the update changes them.
    assert seen[2] == (len(packs), whole)


def test_a_loop_finds_the_weights_that_stayed(tmp_path: Path, twin: Any) -> None:
    device = twin(10**6)
    model = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(model)
        window_step(model, optimizer, 0)
        before = device.onloaded.num_bytes
        plain_step(model, optimizer, 1, 3)
        moved = device.onloaded.num_bytes - before
        spec = model._megatrain.layers.spec
    # Weights once; the gradients of the first two micro-batches come back to be added to.
    assert moved == spec.weight_bytes + 2 * spec.weight_bytes


@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
def test_activations_are_kept_in_the_device_s_memory(
    tmp_path: Path, twin: Any, monkeypatch: pytest.MonkeyPatch, window: bool
) -> None:
    """As on a GPU: what is kept counts there, and not in RAM."""
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), window=window, disk=True)
    monkeypatch.setattr(DeviceShare, "holds_activations", True)
    twin(10**7)
    again = []
    with opened(tmp_path) as session, counted() as count:
        _, optimizer = mt.wrap(model, lr=1e-2, max_grad_norm=0.5)
        for step in range(3):
            (window_step if window else plain_step)(model, optimizer, step)
            again.append(count[0])
        record = model._megatrain
        assert record.memory.residency.keep_bytes == 0
        assert record.executor.keeping.limit_bytes > 0
        found = snapshot(model, optimizer)
        session.max_kept_bytes = 0
        record.memory.plan_device()
        assert record.executor.keeping.limit_bytes == 0
    assert {key for key in differing(expected, found) if key != "losses"} == set()
    assert (
        again[2] == again[0] > 0
    )  # the first step learns; then nothing is computed again


def test_too_small_a_device_budget(tmp_path: Path, twin: Any) -> None:
    twin(5_000)
    model = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(model)
        with pytest.raises(mt.BudgetError, match="max_vram_gb"):
            window_step(model, optimizer, 0)


@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
def test_a_device_that_is_full(
    tmp_path: Path, twin: Any, monkeypatch: pytest.MonkeyPatch, window: bool
) -> None:
    """The error names the block, what it needs and what is left; afterwards training goes on."""
    step = window_step if window else plain_step
    model = seeded(TinyLM)
    reference = copy.deepcopy(model)
    expected = trained(tmp_path, reference, window=window, disk=True)
    device = twin(10**6)
    with opened(tmp_path):
        _, optimizer = mt.wrap(model, lr=1e-2, max_grad_norm=0.5)
        step(model, optimizer, 0)
        assert model._megatrain.executor.stay
        with monkeypatch.context() as patch:

            def full(*_: Any) -> None:
                msg = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"
                raise torch.OutOfMemoryError(msg)

            patch.setattr(model.layers[1].down, "forward", full)
            with pytest.raises(mt.BudgetError, match=r"layers\.1 needs 20\.00 GiB"):
                step(model, optimizer, 1)
        optimizer.zero_grad()
        step(model, optimizer, 1)
        assert not model._megatrain.executor.stay  # the room is left to the model
        step(model, optimizer, 2)
        found = snapshot(model, optimizer)
    assert {key for key in differing(expected, found) if key != "losses"} == set()
    assert device.exhausted


@pytest.mark.parametrize("max_bytes", [None, 10**6])
def test_an_error_or_interrupt_in_the_middle_leaves_all_as_it_was(
    tmp_path: Path, twin: Any, max_bytes: int | None
) -> None:
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), window=True, disk=True)
    device = twin(max_bytes)
    with opened(tmp_path) as session:
        session.max_kept_bytes = 0
        _, optimizer = mt.wrap(model, lr=1e-2, max_grad_norm=0.5)
        window_step(model, optimizer, 0)
        for error in (KeyboardInterrupt, ZeroDivisionError):
            # In a forward, and where a backward computes the fourth time in a block.
            for where, when in ((model.embed, 2), (model.layers[2].up, 4)):
                count = 0

                def stop(*_: Any, error: Any = error, when: int = when) -> None:
                    nonlocal count
                    count += 1
                    if count == when:
                        raise error

                hook = where.register_forward_pre_hook(stop)
                with pytest.raises(error):
                    window_step(model, optimizer, 1)
                hook.remove()
        record = model._megatrain
        assert not any(piece.lent for piece in record.pager._pieces.values())
        window_step(model, optimizer, 1)
        window_step(model, optimizer, 2)
        found = snapshot(model, optimizer)
        record.executor.rest()
        free = sum(len(slots) for slots in device._free.values())
        sizes = [s.flat.nbytes for slots in device._free.values() for s in slots]
        assert (sum(sizes), session.pool.pinned_bytes) == (device.used_bytes(), 0)
        assert free > 0
    assert {key for key in differing(expected, found) if key != "losses"} == set()


def test_slots_come_back_from_a_model_that_goes(tmp_path: Path, twin: Any) -> None:
    device = twin(10**6)
    with opened(tmp_path) as session:
        kept, optimizer = wrapped(seeded(TinyLM))
        other, its_optimizer = wrapped(seeded(TinyLM, 1))
        window_step(other, its_optimizer, 0)
        loss_of(other, batch(0)).backward()  # weights stay on the device
        assert other._megatrain.executor.device_bytes > 0
        del other, its_optimizer
        session.models.check_in()
        slots = [slot for free in device._free.values() for slot in free]
        assert sum(slot.flat.nbytes for slot in slots) == device.used_bytes()
        window_step(kept, optimizer, 0)


def test_nothing_is_left_after_close(tmp_path: Path, twin: Any) -> None:
    before = set(threading.enumerate())
    device = twin()
    model = seeded(TinyLM)
    with opened(tmp_path) as session:
        _, optimizer = mt.wrap(model)
        window_step(model, optimizer, 0)
        assert any("lane-in" in thread.name for thread in threading.enumerate())
    assert (device.used_bytes(), session.pool.mapped_bytes) == (0, 0)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("path", ["window", "loop"])
@pytest.mark.parametrize("keep", [False, True], ids=["again", "keep"])
def test_architectures_with_much_delay(tmp_path: Path, path: str, keep: bool) -> None:
    """Accumulation, clipping, dropout and activations that are kept, as in test_parity, with a small device."""
    case = Case("qwen3", accumulation=3, clipping=True, path=path, keep=keep)
    case = replace(case, dropout=0.1)
    with opened_at(tmp_path, case.place, "slots") as session:
        session.device.close()
        session.device = late_twin(100_000, seed=3)
        assert_equal(streamed_trace(case, session), plain_trace_of(case))


# -- slots ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[SlotDevice]:
    device = SlotDevice(CPU, max_bytes=800, poison=True)
    yield device
    device.close()


def settled(device: SlotDevice) -> None:
    for slots in device._free.values():
        for slot in slots:
            assert slot.busy is not None
            slot.busy.wait()


def test_slots_are_copies_and_are_reused(small: SlotDevice) -> None:
    host = np.arange(100, dtype=np.float32)
    first = small.onload(host)
    flat = small.ready(first)
    host[:] = 0
    assert flat[99] == 99
    small.release(first)
    settled(small)
    assert flat.isnan().all()
    second = small.onload(host)
    assert (second.flat.data_ptr(), small.used_bytes()) == (flat.data_ptr(), 400)
    assert not small.ready(second).any()
    small.onload(host)
    assert not small.has_room(100, torch.float32)
    with pytest.raises(mt.MegatrainError, match="max_vram_gb"):
        small.onload(host)
    small.release(second)
    assert small.has_room(50, torch.float32)
    small.onload(np.zeros(50, np.float32))  # a free slot of another size makes room
    assert small.used_bytes() == 600
    small.close()
    assert small.used_bytes() == 0


def test_a_second_slot_is_made_only_while_the_first_is_busy(small: SlotDevice) -> None:
    gate = threading.Event()
    lanes: Any = small.lanes
    host = np.ones(100, np.float32)
    first = small.onload(host)
    small.ready(first)
    lanes._end.give(gate.wait)  # computing goes on
    small.release(first)
    second = small.onload(host)
    used = small.used_bytes()
    gate.set()
    assert (used, second.flat is first.flat) == (800, False)
    settled(small)
    third = small.onload(host)
    assert (small.used_bytes(), third.flat is first.flat) == (800, True)


def test_slots_of_halves(small: SlotDevice) -> None:
    halves = small.onload(np.full(100, 0x3F80, np.uint16))
    flat = small.ready(halves)
    assert flat.dtype == torch.bfloat16
    assert (float(flat[99]), small.used_bytes()) == (1.0, 200)
    small.release(halves)
    floats = small.onload(np.zeros(100, np.float32))  # not the free slot of halves
    assert (floats.flat.dtype, small.used_bytes()) == (torch.float32, 600)
    settled(small)
    assert small.onload(np.zeros(100, np.uint16)).flat.data_ptr() == flat.data_ptr()


def test_gradients_leave_in_one_piece(small: SlotDevice) -> None:
    host = np.arange(100, dtype=np.float32)
    slot = small.open_gradient(host, pending=True)
    slot.flat.add_(1)
    leaving = small.save_gradient(slot, host)
    small.close_gradient(slot)
    leaving.wait()
    assert (host == np.arange(1, 101)).all()
    small.collect()
    assert (small.onloaded.num_bytes, small.offloaded.num_bytes) == (400, 400)


def test_gradients_add_up_only_where_none_leave() -> None:
    device = SlotDevice(CPU, max_bytes=400)
    gate, lanes = threading.Event(), device.lanes
    assert isinstance(lanes, ThreadLanes)
    host, other = np.zeros(100, np.float32), np.zeros(100, np.float32)
    slot = device.open_gradient(host, pending=False)
    slot.flat.fill_(1)
    lanes._out.give(gate.wait)  # the copy has a long way
    device.save_gradient(slot, host)
    device.close_gradient(slot)

    def next_block() -> None:
        device.open_gradient(other, pending=False).flat.fill_(2)

    computing = threading.Thread(target=next_block)
    computing.start()
    computing.join(0.2)
    waits = computing.is_alive()
    gate.set()
    computing.join()
    device.close()
    assert waits
    assert (host == 1).all()


def test_which_device_is_opened() -> None:
    assert isinstance(open_device("cpu", max_vram_bytes=None), HostDevice)
    assert isinstance(open_device(torch.device("cpu"), max_vram_bytes=1), HostDevice)
    with pytest.raises(mt.ArgumentError, match="mps"):
        open_device("mps", max_vram_bytes=None)
