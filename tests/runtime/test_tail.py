"""Packs that live on the device give the host's numbers, move nothing, and are never read from an old copy."""

from __future__ import annotations

import copy
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatrain_nb as mt
from megatrain_nb.codec.split import Split, split
from megatrain_nb.optim.adamw import Segment, UpdateThreads, update
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.runtime import init
from megatrain_nb.runtime import tail as tail_module
from megatrain_nb.runtime.halves import join_halves, split_halves
from megatrain_nb.runtime.lanes import BlockingLanes, ThreadLanes
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.share import DeviceShare
from megatrain_nb.runtime.slots import SlotDevice
from megatrain_nb.runtime.tail import Tail, adamw_on_device
from tests.optim import common
from tests.runtime.common import (
    Layer,
    TinyLM,
    batch,
    differing,
    loss_of,
    micro_batches,
    opened,
    plain_step,
    seeded,
    set_tile_numel,
    snapshot,
    window_step,
    wrapped,
)
from tests.runtime.plain import (
    assert_shows,
    copies_out_do_not_wait,
    gradients,
    late_twin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from megatrain_nb.runtime.executor import Executor

# Slots take 49 kB, all weights 37 kB, gradients and moments 111 kB.
SOME, ALL = 150_000, 10**6

DTYPES = [torch.float32, torch.bfloat16]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}


@contextmanager
def on(
    directory: Path, device: SlotDevice | None, **kwargs: Any
) -> Iterator[mt.Session]:
    """A session that computes on a device, or on the host."""
    with pytest.MonkeyPatch.context() as patch:
        if device is not None:
            patch.setattr(init, "open_device", lambda *_, **__: device)
        with opened(directory, **kwargs) as session:
            yield session


def executor_of(model: Any) -> Executor:
    found: Executor = model._megatrain.executor
    return found


def tail_of(model: Any) -> list[int]:
    return list(executor_of(model).tail)


Change = dict[int, "Callable[[Any, Any, mt.Session], object]"]


def trained(
    directory: Path,
    model: Any,
    device: SlotDevice | None,
    *,
    window: bool = True,
    disk: bool = True,
    steps: int = 5,
    before: Change | None = None,
    dtype: torch.dtype | None = None,
    max_vram: int = ALL,
) -> dict[str, torch.Tensor]:
    """What some steps make of a model, with an evaluation after each; on a device its tail is there in the end.

    ``before`` says what is done before a step, and where a tail has to be again.
    """
    with on(directory, device, disk=disk) as session:
        _, optimizer = wrapped(model, **SETTINGS, dtype=dtype)
        losses = []
        for step in range(steps):
            if before is not None and step in before:
                before[step](model, optimizer, session)
            (window_step if window else plain_step)(model, optimizer, step)
            with torch.no_grad():
                losses.append(loss_of(model, batch(step)))
        if device is not None:
            assert tail_of(model)
            count = len(model._megatrain.layers.spec.packs)
            assert (len(tail_of(model)) == count) == (max_vram == ALL)
            assert device.peak_bytes <= max_vram
        found = snapshot(model, optimizer) | {"losses": torch.stack(losses)}
    if device is not None:
        assert device.used_bytes() == 0
        device.close()
    return found


def assert_as_on_the_host(directory: Path, make: Any = TinyLM, **kwargs: Any) -> None:
    model = seeded(make)
    host = {k: v for k, v in kwargs.items() if k != "max_vram"}
    expected = trained(directory, copy.deepcopy(model), None, **host)
    device = late_twin(kwargs.get("max_vram", ALL))
    found = trained(directory, copy.deepcopy(model), device, **kwargs)
    assert differing(expected, found) == []


# -- the formula --------------------------------------------------------------------------------------------


@given(
    size=st.integers(1, common.MAX_NUMEL),
    config=st.one_of(st.sampled_from([*common.CONFIGS.values()]), common.configs()),
    step=st.integers(1, 10_000),
    scale=st.sampled_from([1.0, 0.3, 1e-3]),
    chunk=st.sampled_from([8, 64, 1 << 20]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=common.MAX_EXAMPLES, deadline=None)
def test_the_formula_on_a_cpu_is_the_kernel_s(
    size: int, config: Any, step: int, scale: float, chunk: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    state, grad = common.state(rng, size), common.numbers(rng, size)
    cut = min(size, 16)
    segments = [
        Segment(start, stop, config, step)
        for start, stop in ((0, cut), (cut, size))
        if stop > start
    ]
    tensors = [torch.from_numpy(x.copy()) for x in (*state, grad)]
    param, *moments, gradient = tensors
    with UpdateThreads(1) as threads:
        update(*state, grad, segments, grad_scale=scale, threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "CHUNK", chunk)
        adamw_on_device(param, moments, gradient, segments, grad_scale=scale)
    for mine, theirs in zip(tensors, (*state, grad), strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs)


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 0.3]))
@settings(max_examples=common.MAX_EXAMPLES // 5, deadline=None)
def test_the_formula_on_halves_is_the_kernel_s(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, common.MAX_NUMEL))
    (master, *moments), grad = common.state(rng, size), common.numbers(rng, size)
    halves = Split(np.empty(size, np.uint16), np.empty(size, np.uint16))
    split(master, halves)
    hi, lo = (as_halves(x.copy()) for x in halves)
    mine = [torch.from_numpy(x.copy()) for x in moments]
    segments = [Segment(0, size, common.CONFIGS["decay"], 3)]
    with UpdateThreads(1) as threads:
        first, second = moments
        update(halves, first, second, grad, segments, grad_scale=scale, threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "CHUNK", 256)
        adamw_on_device(
            hi, mine, torch.from_numpy(grad), segments, grad_scale=scale, low=lo
        )
    for tensor, array in zip((hi, lo), halves, strict=True):
        assert torch.equal(tensor.view(torch.int16), as_halves(array).view(torch.int16))
    for tensor, moment in zip(mine, moments, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), moment)


def as_halves(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


def test_halves_are_those_of_the_codec() -> None:
    """All upper halves with lower ones at which something changes; NaNs and both infinities among them."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = (upper[:, None] | lower).ravel()
    halves = Split(np.empty(bits.size, np.uint16), np.empty(bits.size, np.uint16))
    split(bits.view(np.float32), halves)
    hi, lo = (torch.empty(bits.size, dtype=torch.bfloat16) for _ in range(2))
    split_halves(torch.from_numpy(bits.view(np.float32)), hi, lo)
    for mine, theirs in zip((hi, lo), halves, strict=True):
        np.testing.assert_array_equal(
            mine.view(torch.int16).numpy().view(np.uint16), theirs
        )
    joined = join_halves(hi, lo)
    np.testing.assert_array_equal(
        joined.view(torch.int32).numpy().view(np.uint32), bits
    )


# -- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "ram"])
@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("max_vram", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_training_is_bit_equal(
    tmp_path: Path,
    dtype: torch.dtype,
    *,
    window: bool,
    disk: bool,
    tied: bool,
    max_vram: int,
) -> None:
    assert_as_on_the_host(
        tmp_path,
        lambda: TinyLM(tied=tied),
        window=window,
        disk=disk,
        dtype=dtype,
        max_vram=max_vram,
    )


def test_tiles_and_blocking_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile_numel(monkeypatch, 1024)
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), None)
    device = SlotDevice(
        torch.device("cpu"), max_bytes=ALL, lanes=BlockingLanes(), poison=True
    )
    found = trained(tmp_path, copy.deepcopy(model), device)
    assert differing(expected, found) == []


def frozen() -> Any:
    model = TinyLM()
    model.layers[1].requires_grad_(False)
    model.layers[2].up.requires_grad_(False)
    return model


@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
def test_frozen_parameters_groups_and_rates(tmp_path: Path, window: bool) -> None:
    """Packs of which nothing is trained do not join; others update what is."""
    model = seeded(frozen)

    def run(device: SlotDevice | None) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        trainable = [p for p in mine.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in trainable if p.dim() == 1], "betas": (0.5, 0.9)},
        ]
        theirs = torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1)
        with on(tmp_path, device) as session:
            _, optimizer = wrapped(mine, theirs, max_grad_norm=0.2)
            for step in range(5):
                optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
                session.controls.lr_factor = 0.5 if step == 3 else 1.0
                (window_step if window else plain_step)(mine, optimizer, step)
            if device is not None:
                packs = mine._megatrain.layers.spec.packs
                names = [packs[pack].name for pack in tail_of(mine)]
                assert len(names) == len(packs) - 1
                assert "layers.1" not in names
            return snapshot(mine, optimizer)

    device = late_twin(ALL)
    assert differing(run(None), run(device)) == []
    device.close()


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_a_gradient_that_is_not_finite(tmp_path: Path, nonfinite: str) -> None:
    def spoil(model: Any, optimizer: Any, _: Any) -> None:
        optimizer.nonfinite = nonfinite
        hook = model.layers[1].down.register_forward_hook(
            lambda *args: args[-1] * float("inf")
        )
        before = optimizer.last_grad_norm
        if nonfinite == "skip":
            window_step(model, optimizer, 7)
        else:
            with pytest.raises(mt.ModelError, match="not finite"):
                window_step(model, optimizer, 7)
        assert not torch.equal(before, optimizer.last_grad_norm)
        hook.remove()

    assert_as_on_the_host(tmp_path, before={3: spoil})


# -- who looks, and who writes ------------------------------------------------------------------------------


def reads(model: Any, optimizer: Any, _: Any) -> None:
    there = tail_of(model)
    assert all(torch.isfinite(x).all() for x in snapshot(model, optimizer).values())
    assert tail_of(model) == there  # reading takes nothing away


def writes_weights(model: Any, *_: Any) -> None:
    with torch.no_grad():
        model.layers[2].up.weight.mul_(0.5)
        model.embed.weight[3] = 1.0


def writes_moments(model: Any, optimizer: Any, _: Any) -> None:
    optimizer.state[model.layers[0].down.weight]["exp_avg"].mul_(0.5)
    optimizer.state[model.head.weight]["exp_avg_sq"].add_(1e-4)


def loads_its_state(_: Any, optimizer: Any, __: Any) -> None:
    state = optimizer.state_dict()
    state["state"] = {
        index: {key: value.clone() for key, value in each.items()}
        for index, each in state["state"].items()
    }
    optimizer.load_state_dict(state)


def saves_and_goes_on(_: Any, __: Any, session: mt.Session) -> None:
    session.save_checkpoint("here")


def goes_back(model: Any, optimizer: Any, session: mt.Session) -> None:
    session.save_checkpoint("here")
    window_step(model, optimizer, 50)
    window_step(model, optimizer, 51)
    session.resume("here")


def finishes(_: Any, optimizer: Any, __: Any) -> None:
    optimizer.finish()


def forgets_moments(model: Any, *_: Any) -> None:
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def fails_in_backward(model: Any, optimizer: Any, _: Any) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for layer in (2, 0):
        hook = model.layers[layer].up.register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            window_step(model, optimizer, 60)
        hook.remove()


@pytest.mark.parametrize(
    ("window", "disk", "max_vram", "dtype"),
    [
        (True, True, SOME, None),
        (False, True, ALL, None),
        (True, False, ALL, None),
        (True, True, ALL, torch.bfloat16),
    ],
    ids=["window-disk-some", "loop-disk-all", "window-ram-all", "bf16"],
)
@pytest.mark.parametrize(
    "change",
    [
        reads,
        writes_weights,
        writes_moments,
        loads_its_state,
        saves_and_goes_on,
        goes_back,
        finishes,
        forgets_moments,
        fails_in_backward,
    ],
    ids=lambda change: str(change.__name__),
)
def test_what_is_done_between_steps(
    tmp_path: Path,
    change: Any,
    max_vram: int,
    dtype: torch.dtype | None,
    *,
    window: bool,
    disk: bool,
) -> None:
    assert_as_on_the_host(
        tmp_path,
        before={2: change, 4: change},
        window=window,
        disk=disk,
        dtype=dtype,
        max_vram=max_vram,
    )


def test_a_checkpoint_goes_on_in_another_session(tmp_path: Path) -> None:
    """The host goes on from what was on the device, and the other way round."""
    model = seeded(TinyLM)
    expected = trained(tmp_path / "host", copy.deepcopy(model), None)
    expected.pop("losses")
    for first, then in ((ALL, None), (None, ALL), (SOME, ALL)):
        directory = tmp_path / f"{first}-{then}"
        for steps, room in ((range(3), first), (range(3, 5), then)):
            device = None if room is None else late_twin(room)
            mine = copy.deepcopy(model)
            with on(directory, device) as session:
                _, optimizer = wrapped(mine, **SETTINGS)
                if steps[0]:
                    session.resume()
                for step in steps:
                    window_step(mine, optimizer, step)
                assert bool(tail_of(mine)) == (device is not None)
                found = snapshot(mine, optimizer)
                session.save_checkpoint()
            if device is not None:
                device.close()
        assert differing(expected, found) == []


def test_moments_that_are_encoded_do_not_live_there(tmp_path: Path) -> None:
    model = seeded(lambda: TinyLM(lambda: Layer(64), width=64))
    device = late_twin(10**7)
    with on(tmp_path, device):
        _, optimizer = wrapped(model, lr=1e-2)
        for step in range(3):
            window_step(model, optimizer, step)
        before = len(tail_of(model))
        moments = optimizer.state[model.layers[0].up.weight]["exp_avg"].clone()
        mt.recompress(model, {"layers.*": "8bit"})
        after = optimizer.state[model.layers[0].up.weight]["exp_avg"].clone()
        assert 0 < float((moments - after).abs().max()) < 1e-3
        window_step(model, optimizer, 3)
        window_step(model, optimizer, 4)
        assert before == len(model._megatrain.layers.spec.packs)
        packs = model._megatrain.layers.spec.packs
        encoded = {pack.index for pack in packs if pack.encoded}
        assert encoded
        assert set(tail_of(model)) == {pack.index for pack in packs} - encoded
    device.close()


def looks_and_writes(model: Any, optimizer: Any, step: int) -> dict[str, torch.Tensor]:
    """Between backward and step."""
    backward(model, step)
    seen = gradients(model)
    if step == 4:
        model.layers[1].up.weight.grad.mul_(0.5)
        model.head.weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return seen


def adds_after_a_step(model: Any, optimizer: Any, step: int) -> dict[str, torch.Tensor]:
    """What was clipped is as it was before, and the next gradients are added to it."""
    backward(model, step)
    optimizer.step()
    seen = gradients(model) if step == 3 else {}
    if step != 3:
        optimizer.zero_grad()
    return seen


def sets_to_zero(model: Any, optimizer: Any, step: int) -> dict[str, torch.Tensor]:
    """In place: gradients of zero are gradients, and weight decay and moments go on."""
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=step != 3)
    if step == 3:
        assert not any(grad.any() for grad in gradients(model).values())
        optimizer.step()
    return {}


def backward(model: Any, step: int) -> None:
    for each in micro_batches(step):
        (loss_of(model, each["ids"]) / 3).backward()


@pytest.mark.parametrize("room", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize(
    "do",
    [looks_and_writes, adds_after_a_step, sets_to_zero],
    ids=lambda do: str(do.__name__),
)
def test_gradients_in_a_loop(tmp_path: Path, do: Any, room: int) -> None:
    model = seeded(TinyLM)

    def run(device: SlotDevice | None) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        seen: dict[str, torch.Tensor] = {}
        with on(tmp_path, device):
            _, optimizer = wrapped(mine, lr=1e-2, max_grad_norm=0.1)
            for step in range(7):
                for name, grad in do(mine, optimizer, step).items():
                    seen[f"{step} {name}"] = grad
            assert bool(tail_of(mine)) == (device is not None)
            return snapshot(mine, optimizer) | seen

    device = late_twin(room)
    assert differing(run(None), run(device)) == []
    device.close()


def test_hooks_look_at_a_block_that_computes(tmp_path: Path) -> None:
    model = seeded(TinyLM)

    def run(device: SlotDevice | None) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        seen = {}
        with on(tmp_path, device):
            _, optimizer = wrapped(mine, lr=1e-2)
            watched = mine.layers[1].up.weight
            other = mine.layers[2].up.weight
            for step in range(4):

                def look(*_: Any, step: int = step) -> None:
                    seen[f"{step}"] = watched.detach().clone()
                    seen[f"other {step}"] = other.detach().clone()

                hook = mine.layers[1].down.register_forward_hook(look)
                window_step(mine, optimizer, step)
                hook.remove()
            if device is not None:

                def write(*_: Any) -> None:
                    with torch.no_grad():
                        watched.add_(1)

                hook = mine.layers[1].down.register_forward_hook(write)
                with pytest.raises(mt.ModelError, match=r"layers\.1 cannot be changed"):
                    window_step(mine, optimizer, 4)
                hook.remove()
            return snapshot(mine, optimizer) | seen

    device = late_twin(ALL)
    assert differing(run(None), run(device)) == []
    device.close()


def test_the_model_comes_out_and_is_exported(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), None)
    device = late_twin(ALL)
    with on(tmp_path, device):
        _, optimizer = wrapped(model, **SETTINGS)
        for step in range(5):
            window_step(model, optimizer, step)
        assert tail_of(model)
        mt.save_pretrained(model, tmp_path / "saved")
        plain = mt.unwrap(model)
        left = sum(slot.flat.nbytes for x in device._free.values() for slot in x)
        assert left == device.used_bytes()
    from safetensors.torch import load_file  # noqa: PLC0415

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, param in plain.named_parameters():
        assert torch.equal(param, expected[name]), name
        assert torch.equal(saved[name], expected[name]), name
    device.close()


def test_the_master_is_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    device = late_twin(ALL)
    with on(tmp_path / "store", device):
        model, optimizer = wrapped(seeded(TinyLM), **SETTINGS, dtype=torch.bfloat16)
        for step in range(3):
            window_step(model, optimizer, step)
        assert tail_of(model)
        mt.save_pretrained(model, tmp_path / "saved", dtype=torch.float32)
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        for name, param in model.named_parameters():
            with param._source.master().opened(write=False) as values:
                assert torch.equal(saved[name], values), name
    device.close()


# -- what is missing shows ----------------------------------------------------------------------------------


def moments_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    original = Tail.update

    def hasty(self: Tail, *args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SlotDevice, "ready", lambda _, slot: slot.flat)
            original(self, *args, **kwargs)

    patch.setattr(Tail, "update", hasty)


def slabs_are_used_before_the_copy_came(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pager, "lend", lambda *_: None)


def old_weights_are_taken_for_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tail, "show", lambda *_: None)


TEETH = [
    moments_are_not_waited_for,
    copies_out_do_not_wait,
    slabs_are_used_before_the_copy_came,
    old_weights_are_taken_for_new,
]


@pytest.mark.parametrize("broken", TEETH, ids=lambda broken: str(broken.__name__))
def test_a_missing_wait_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), None)
    lanes = ThreadLanes(most_delay_s=0.03, late=True)
    device = SlotDevice(torch.device("cpu"), max_bytes=ALL, poison=True, lanes=lanes)
    broken(monkeypatch)
    assert_shows(lambda: trained(tmp_path, copy.deepcopy(model), device), expected)


def test_an_old_copy_is_refused(tmp_path: Path) -> None:
    device = late_twin(ALL)
    with on(tmp_path, device):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(3):
            window_step(model, optimizer, step)
        pager, [pack, *_] = model._megatrain.pager, tail_of(model)
        for what in (What.WEIGHTS, What.EXP_AVG, What.EXP_AVG_SQ):
            for use in (
                lambda: pager.need(pack, what),  # noqa: B023
                lambda: pager.fetch(pack, what),  # noqa: B023
                lambda: pager.is_blank(pack, what),  # noqa: B023
                lambda: pager.discard(pack, what),  # noqa: B023
                lambda: pager.opened(pack, what).__enter__(),  # noqa: B023
                pager.unsaved_pieces,
            ):
                with pytest.raises(mt.StoreError, match="is on the device"):
                    use()
        executor_of(model).tail.show_all()
        values = pager.need(pack, What.WEIGHTS)  # now it may be read, and not written
        with pytest.raises(mt.StoreError, match="must not be changed"):
            pager.drop(pack, What.WEIGHTS, dirty=True)
        assert np.isfinite(values).all()
        pager.drop(pack, What.WEIGHTS)
        window_step(model, optimizer, 3)
        with pytest.raises(mt.StoreError, match="must not be used"):
            pager.need(pack, What.WEIGHTS)
    device.close()


# -- memory and traffic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
def test_a_model_that_lives_there_moves_nothing(tmp_path: Path, window: bool) -> None:
    device = late_twin(ALL)
    with on(tmp_path, device) as session:
        model, optimizer = wrapped(seeded(TinyLM), max_grad_norm=0.5)
        for step in range(4):
            (window_step if window else plain_step)(model, optimizer, step)
        for step in (4, 5):
            with torch.no_grad():
                loss_of(model, batch(step))
            (window_step if window else plain_step)(model, optimizer, step)
            result = model._megatrain.steps.last
            assert (result.onloaded_bytes, result.offloaded_bytes) == (0, 0)
            assert (result.read_bytes, result.written_bytes) == (0, 0)
        layout = model._megatrain.memory.layout()
        assert layout.planned_bytes == (0, 0)
        assert all(piece.on_device for piece in layout.pieces)
        status = session.status()
        assert status.models[0].tail[-1] == "head"
        assert status.models[0].tail_bytes == model._megatrain.layers.spec.state_bytes
        assert "AdamW runs there" in str(status)
    device.close()


@pytest.mark.parametrize(
    ("dtype", "room"),
    [(torch.float32, SOME), (torch.bfloat16, 138_700)],
    ids=["fp32", "bf16"],
)
def test_a_step_moves_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, room: int
) -> None:
    """The tail is planned first, and then no weight alone has room; elsewhere what binds a step decides that.

    Weights alone that stay make the reads of the first blocks a matter of timing: not within 2 %.
    """
    decided = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(DeviceShare, "_tail_first", decided, raising=False)
    device = late_twin(room)
    with on(tmp_path, device):
        model, optimizer = wrapped(seeded(TinyLM), dtype=dtype)
        record = model._megatrain
        for step in range(4):
            window_step(model, optimizer, step)
        spec, executor = record.layers.spec, record.executor
        before = executor.stay, tail_of(model)
        results = [window_step(model, optimizer, step) for step in range(4, 44)]
        assert before == (executor.stay, tail_of(model))
        assert executor.stay == set(tail_of(model))
        assert 0 < len(tail_of(model)) < len(spec.packs)
        planned = step_traffic(
            spec, record.memory.residency, executor.expected_order(), stay=executor.stay
        )
        assert record.memory.layout().planned_bytes == (
            planned.read_bytes,
            planned.written_bytes,
        )
        read = sum(result.read_bytes for result in results) / len(results)
        written = sum(result.written_bytes for result in results) / len(results)
        assert read == pytest.approx(planned.read_bytes, rel=0.02)
        assert written == pytest.approx(planned.written_bytes, rel=0.02)
        streamed = [pack for pack in spec.packs if pack.index not in executor.tail]
        once = sum(pack.weight_bytes for pack in streamed)
        grads = sum(pack.grad_bytes for pack in streamed)
        again = sum(p.weight_bytes for p in streamed if p.index not in executor.stay)
        assert results[-1].offloaded_bytes == grads
        assert results[-1].onloaded_bytes == once + again
    device.close()


def test_the_ram_is_left_to_what_streams(tmp_path: Path) -> None:
    device = late_twin(SOME)
    with on(tmp_path, device) as session:
        session.max_resident_bytes = 60_000
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        before = model._megatrain.memory.residency
        for step in range(1, 5):
            window_step(model, optimizer, step)
        residency = model._megatrain.memory.residency
        there = set(tail_of(model))
        assert residency.elsewhere == there
        assert before.weights & there
        assert not residency.weights & there
        assert residency.weights | residency.grads
    device.close()


def by_setting(_: Any, session: Any, __: SlotDevice) -> None:
    session.max_tail_bytes = 0
    session.models.plan()


def by_the_device(_: Any, session: Any, device: SlotDevice) -> None:
    device._max_bytes = 60_000
    session.models.plan()
    device.trim()
    assert device.used_bytes() <= 60_000


def by_another_model(*_: Any) -> None:
    other, its_optimizer = wrapped(seeded(TinyLM, 1), lr=1e-2)
    window_step(other, its_optimizer, 0)


def by_a_full_device(model: Any, *_: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: Any) -> None:
            msg = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"
            raise torch.OutOfMemoryError(msg)

        patch.setattr(model.layers[1].down, "forward", full)
        with pytest.raises(mt.BudgetError, match=r"20\.00 GiB"):
            window_step(model, model._megatrain.optimizer, 3)


@pytest.mark.parametrize(
    "shrink",
    [by_setting, by_the_device, by_another_model, by_a_full_device],
    ids=lambda shrink: str(shrink.__name__),
)
def test_a_plan_that_shrinks(tmp_path: Path, shrink: Any) -> None:
    """The packs leave for RAM and disk, bit for bit, and the memory is free for others."""
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), None, steps=6)
    expected.pop("losses")
    device = late_twin(ALL)
    with on(tmp_path, device) as session:
        _, optimizer = wrapped(model, **SETTINGS)
        for step in range(3):
            window_step(model, optimizer, step)
        assert len(tail_of(model)) == len(model._megatrain.layers.spec.packs)
        shrink(model, session, device)
        assert tail_of(model) == []
        pieces = model._megatrain.pager._pieces.values()
        assert not any(piece.on_device or piece.old for piece in pieces)
        window_step(model, optimizer, 3)
        if shrink is by_another_model:
            gc.collect()  # that one is gone: there is room again
            session.models.check_in()
            session.models.plan()
        session.max_tail_bytes = None
        window_step(model, optimizer, 4)
        window_step(model, optimizer, 5)
        assert bool(tail_of(model)) == (shrink in (by_setting, by_another_model))
        assert differing(expected, snapshot(model, optimizer)) == []
    assert device.used_bytes() == 0
    device.close()


def test_where_the_ram_is_too_small_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late_twin(ALL)
    with on(tmp_path, device) as session:
        model, optimizer = wrapped(seeded(TinyLM), lr=1e-2)
        for step in range(3):
            window_step(model, optimizer, step)
        expected = snapshot(model, optimizer)
        window_step(model, optimizer, 3)
        there = tail_of(model)
        with monkeypatch.context() as patch:

            def no_room(*_: Any, **__: Any) -> Any:
                msg = "no room"
                raise mt.BudgetError(msg)

            patch.setattr(session.pool, "try_take", lambda *_, **__: None)
            patch.setattr(session.pool, "take", no_room)
            with pytest.raises(mt.BudgetError, match="no room"):
                model.head.weight.clone()
            with pytest.raises(mt.BudgetError, match="no room"):
                executor_of(model).tail.leave_all()
        assert tail_of(model) == there
        found = snapshot(model, optimizer)
        assert len(differing(expected, found)) == len(expected)  # all of it is new
        assert all(torch.isfinite(value).all() for value in found.values())
    device.close()


def test_a_pack_that_has_no_room_streams(tmp_path: Path) -> None:
    """The plan said that there is room, and there is not."""
    model = seeded(TinyLM)
    expected = trained(tmp_path, copy.deepcopy(model), None)
    expected.pop("losses")
    device = late_twin(90_000)
    with on(tmp_path, device):
        _, optimizer = wrapped(model, **SETTINGS)
        for step in range(5):
            packs = model._megatrain.layers.spec.packs
            executor_of(model).tail.planned = frozenset(range(len(packs)))
            window_step(model, optimizer, step)
            assert device.peak_bytes <= 90_000
        assert differing(expected, snapshot(model, optimizer)) == []
    device.close()
