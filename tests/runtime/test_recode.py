"""Moments from one codec to another: by hand, and chosen while a model is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.codec import base
from megatrain_nb.codec.base import Key
from megatrain_nb.runtime import adamstate, chooser
from megatrain_nb.runtime.piece import What
from megatrain_nb.store.disk import DiskStore
from tests.codec.common import QUANTISED, encoded
from tests.runtime.common import differing, plain_step, snapshot, window_step
from tests.runtime.plain import TILE_NUMEL, opened
from tests.runtime.test_codecs import WideLM, codecs_of, codes, start, state_of, train

if TYPE_CHECKING:
    from pathlib import Path

UP = "layers.0.up.weight"


def moments_of(model: Any, optimizer: Any) -> dict[str, Any]:
    found = snapshot(model, optimizer)
    return {key: found[key] for key in found if ":exp_avg" in key}


@pytest.mark.parametrize("place", ["ram", "disk", "mixed"])
@pytest.mark.parametrize("name", QUANTISED)
def test_to_a_codec_and_back(tmp_path: Path, name: str, place: str) -> None:
    """fp32 to bits rounds as the codec does; bits to fp32 and back changes nothing."""
    with opened(tmp_path, place) as session:
        model, optimizer = start(WideLM)
        train(model, optimizer, 3, "window")
        exact = moments_of(model, optimizer)
        mt.recompress(model, name)
        assert codecs_of(model)[UP] == name
        m, v = (
            exact[f"{UP}:{key}"].view(-1).numpy() for key in ("exp_avg", "exp_avg_sq")
        )
        key = Key(0, 3, adamstate.seed_of(0, UP))
        assert codes(model)[UP] == encoded(base.get(name), m, v, key).tobytes()
        before, rounded = codes(model), moments_of(model, optimizer)
        mt.recompress(optimizer, False)
        assert set(codecs_of(model).values()) == {"raw"}
        assert differing(rounded, moments_of(model, optimizer)) == []
        mt.recompress(model, name)
        assert codes(model) == before
        for key_ in exact:
            if ".bias" in key_ or "norm" in key_:
                assert torch.equal(exact[key_], rounded[key_])
        train(model, optimizer, 1, "window")
        optimizer.finish()
        model._megatrain.executor.rest()
        if place == "disk":
            assert session.pool.in_use_bytes == 0
        keys = session.store.keys()
        assert not any("exp_avg" in k and "/1/" in k for k in keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_as_if_it_had_always_been_so(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    found = []
    for index, (first, place) in enumerate([("4bit", "disk"), (False, "ram")]):
        with opened(tmp_path / str(index), place, compression=first) as _:
            model, optimizer = start(WideLM, dtype=dtype)
            mt.recompress(model, "4bit")
            train(model, optimizer, 3, "window")
            found.append((snapshot(model, optimizer), codes(model)))
    assert differing(found[0][0], found[1][0]) == []
    assert found[0][1] == found[1][1]


def test_while_an_update_is_due(tmp_path: Path) -> None:
    found = []
    for index in (0, 1):
        with opened(tmp_path / str(index), "disk", compression="8bit") as _:
            model, optimizer = start(WideLM)
            train(model, optimizer, 2, "window")
            if index:
                optimizer.finish()
            mt.recompress(model, "2bit")
            train(model, optimizer, 2, "window")
            found.append((snapshot(model, optimizer), codes(model)))
    assert differing(found[0][0], found[1][0]) == []
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("to", ["8bit", False])
@pytest.mark.parametrize("at", [4, 5])
def test_what_cannot_be_converted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any, at: int
) -> None:
    with opened(tmp_path, "disk", compression="4bit") as session:
        model, optimizer = start(WideLM)
        train(model, optimizer, 2, "window")
        before = codes(model)
        with pytest.raises(mt.ArgumentError, match=r"codec='5bit'.*4bit"):
            mt.recompress(model, "5bit")
        with pytest.raises(mt.ModelError, match="not in a session"):
            mt.recompress(torch.nn.Linear(2, 2), "4bit")
        monkeypatch.setattr(session.store, "_max_bytes", 20_000)
        with pytest.raises(mt.BudgetError, match="max_disk_gb"):
            mt.recompress(model, False)
        monkeypatch.undo()
        assert codes(model) == before
        put, left = DiskStore.put, [at]

        def failing(self: Any, key: str, data: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise mt.StoreError("full")
            return put(self, key, data, **kwargs)

        monkeypatch.setattr(DiskStore, "put", failing)
        with pytest.raises(mt.StoreError, match="full"):
            mt.recompress(model, to)
        monkeypatch.undo()
        # A pack is converted or not; which codec it has is known, and the rest may follow.
        assert (
            {"4bit", "raw"} <= set(codecs_of(model).values()) <= {"4bit", "8bit", "raw"}
        )
        now = codes(model)
        kept = [name for name, codec in codecs_of(model).items() if codec == "4bit"]
        assert {name: now[name] for name in kept} == {
            name: before[name] for name in kept
        }
        mt.recompress(model, to)
        assert "4bit" not in codecs_of(model).values()
        train(model, optimizer, 1, "window")
        assert session.pool.in_use_bytes < session.max_ram_bytes


def test_moments_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, "disk") as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, 1, "window")
        param = model.layers[1].down.weight
        with torch.no_grad():
            optimizer.state[param]["exp_avg"][0, 0] = float("nan")
        with pytest.raises(
            mt.ModelError, match=r"layers\.1\.down\.weight cannot be enc"
        ):
            mt.recompress(model, "4bit")
        assert torch.isnan(optimizer.state[param]["exp_avg"][0, 0])


# -- dynamic ----------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks after two, four and eight updates."""
    monkeypatch.setattr(adamstate, "is_looked_at", lambda step: step in (2, 4, 8))


def dynamic_run(
    path: Path,
    place: str,
    *,
    steps: int = 9,
    tile_numel: int = TILE_NUMEL,
    barrier: bool = False,
    loop: bool = False,
    dtype: Any = None,
) -> tuple[Any, Any, list[dict[str, str]]]:
    seen: list[dict[str, str]] = []
    with opened(path, place, tile_numel=tile_numel, compression=True) as _:
        model, optimizer = start(WideLM, dtype=dtype)
        for step in range(steps):
            (plain_step if loop else window_step)(model, optimizer, step)
            if barrier:
                optimizer.finish()
            seen.append(codecs_of(model))
        return snapshot(model, optimizer), codes(model), seen


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_is_the_same_wherever_it_lies(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    first = dynamic_run(tmp_path / "disk", "disk", dtype=dtype)
    assert first[2][0][UP] == "4bit"
    assert first[2][-1] != first[2][0]
    assert {c for n, c in first[2][-1].items() if n.startswith(("embed", "head"))} == {
        "8bit"
    }
    body = {
        c for n, c in first[2][-1].items() if "up.weight" in n or "down.weight" in n
    }
    assert body <= {"2bit", "3bit", "4bit"}
    for index, (place, tile, barrier) in enumerate(
        [("ram", TILE_NUMEL, False), ("mixed", 2048, True), ("disk", 4 * 2**20, True)]
    ):
        other = dynamic_run(
            tmp_path / str(index),
            place,
            tile_numel=tile,
            barrier=barrier,
            dtype=dtype,
        )
        assert differing(first[0], other[0]) == []
        assert first[1] == other[1]
        assert first[2][-1] == other[2][-1]
    if (
        dtype == torch.float32
    ):  # bf16 gradients of a tied or shared sum may differ in a loop
        other = dynamic_run(tmp_path / "loop", "disk", loop=True)
        assert differing(first[0], other[0]) == []
        assert first[1:] == other[1:]


@pytest.mark.usefixtures("soon")
def test_dynamic_measures_what_an_update_makes(tmp_path: Path) -> None:
    """The look's moments are those that fp32 states would have after that update."""
    seen: dict[str, Any] = {}
    measure = chooser.Chooser._measure

    def note(self: Any, segment: Any, sample: Any) -> None:
        seen[segment.name] = {
            k: (m.copy(), v.copy()) for k, (m, v) in sample.blocks.items()
        }
        measure(self, segment, sample)

    with (
        pytest.MonkeyPatch.context() as patch,
        opened(tmp_path, "disk", compression="dynamic") as _,
    ):
        patch.setattr(chooser.Chooser, "_measure", note)
        model, optimizer = start(WideLM)
        window_step(model, optimizer, 0)
        state = optimizer.state[model.layers[0].up.weight]
        m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
        grads: list[torch.Tensor] = []
        hook = optimizer.register_step_pre_hook(
            lambda *_: grads.append(model.layers[0].up.weight.grad.clone())
        )
        window_step(model, optimizer, 1)
        hook.remove()
        optimizer.finish()
        scale = min(1.0, 0.5 / (float(optimizer.last_grad_norm) + 1e-6))
        g = grads[0] * scale
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g  # betas of its group
        assert seen[UP].keys() == set(chooser.sampled_blocks(m.numel()))
        for block, (a, b) in seen[UP].items():
            place = slice(block * 128, block * 128 + 128)
            np.testing.assert_allclose(a, m.view(-1)[place], rtol=1e-4, atol=1e-8)
            np.testing.assert_allclose(b, v.view(-1)[place], rtol=1e-4)


@pytest.mark.usefixtures("soon")
def test_dynamic_resumes_from_a_state_dict(tmp_path: Path) -> None:
    with opened(tmp_path / "a", "disk", compression="dynamic") as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, 3, "window")
        optimizer.finish()
        state = state_of(optimizer)
        weights, before = snapshot(model), codes(model)
        assert {"2bit", "3bit"} & set(state["moment_codecs"].values())
    with opened(tmp_path / "b", "ram", compression="dynamic") as _:
        model, optimizer = start(WideLM)
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(weights[key])
        assert codes(model) == before


@pytest.mark.usefixtures("soon")
def test_dynamic_stays_within_the_plan(tmp_path: Path) -> None:
    with opened(tmp_path, "disk", compression="dynamic") as session:
        model, optimizer = start(WideLM)
        start_bytes = model._megatrain.layers.spec.moments_bytes
        train(model, optimizer, 4, "window")
        optimizer.finish()
        spec = model._megatrain.layers.spec
        assert spec.moments_bytes < start_bytes
        assert model._megatrain.memory.residency.disk_bytes == spec.state_bytes
        labels = {
            model._megatrain.pager.piece(pack.index, What.ENCODED).label
            for pack in spec.packs
            if pack.encoded
        }
        stored = {key.split("/")[1] for key in session.store.keys() if "encoded" in key}  # noqa: SIM118
        assert stored == labels
        assert "chosen by error" in str(session.status())
