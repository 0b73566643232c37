"""Packed on disk or not, training gives the same bits; what the disk moves and holds is less."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime.piece import MOMENTS, What
from tests.runtime.common import (
    Layer,
    TinyLM,
    differing,
    opened,
    plain_step,
    seeded,
    set_tile_numel,
    snapshot,
    window_step,
    wrapped,
)
from tests.store.conformance import flip_bits

if TYPE_CHECKING:
    from pathlib import Path

LOSSLESS: dict[str, Any] = {
    "optimizer_compression": "lossless",
    "weight_compression": "lossless",
}


def wide() -> Any:
    """A model of layers whose tiles have some 270 kB: enough that they pack."""
    return TinyLM(lambda: Layer(inner=2048))


def train(
    directory: Path, *, dtype: torch.dtype | None = None, steps: int = 4, **options: Any
) -> tuple[dict[str, torch.Tensor], tuple[int, int], list[Any]]:
    """Return the final state, the sizes of what is packed, and the results of the steps."""
    resident = options.pop("resident", 0)
    results: list[Any] = []

    class Steps(mt.Callback):
        def on_step_end(self, result: Any) -> None:
            results.append(result)

    with opened(directory, **options) as session:
        session.max_resident_bytes = resident
        session.callbacks.append(Steps())
        model, optimizer = wrapped(seeded(wide), dtype=dtype, lr=1e-2)
        for step in range(steps):
            window_step(model, optimizer, step)
        optimizer.finish()
        state = snapshot(model, optimizer)
        model._megatrain.pager.barrier()
        sizes = session.store.packed_sizes()
        assert str(session.status()).count("bit for bit") == (sizes[0] > 0)
    assert list(directory.iterdir()) == []
    return state, sizes, results


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("resident", [0, 1_200_000, None], ids=["disk", "mixed", "ram"])
def test_bits_are_those_of_training_without_it(
    tmp_path: Path, dtype: torch.dtype | None, resident: int | None
) -> None:
    plain, none, plain_results = train(tmp_path, dtype=dtype, resident=resident)
    assert none == (0, 0)
    packed, sizes, results = train(tmp_path, dtype=dtype, resident=resident, **LOSSLESS)
    assert differing(plain, packed) == []
    moved = [
        (sum(r.read_bytes for r in some), sum(r.written_bytes for r in some))
        for some in (plain_results, results)
    ]
    if resident is None:
        assert moved[0] == moved[1] == (0, 0)
        return
    assert sizes[1] < sizes[0] * 0.95
    assert all(less < more for more, less in zip(*moved, strict=True))


@pytest.mark.parametrize(
    ("option", "kinds"),
    [
        ("optimizer_compression", MOMENTS),
        ("weight_compression", (What.WEIGHTS,)),
    ],
)
def test_what_is_packed(tmp_path: Path, option: str, kinds: tuple[What, ...]) -> None:
    options: dict[str, Any] = {option: "lossless"}
    with opened(tmp_path, **options) as session:
        model, optimizer = wrapped(seeded(wide), lr=1e-2)
        for step in range(2):
            window_step(model, optimizer, step)
        optimizer.finish()
        model._megatrain.pager.barrier()
        found = {key: session.store.codec(key) for key in session.store.keys()}  # noqa: SIM118
        packed = {key for key, codec in found.items() if codec != "raw"}
        assert packed
        for key in found:
            assert (key in packed) == any(f"/{what.value}/" in key for what in kinds)


def test_tiles_of_a_split_pack(tmp_path: Path) -> None:
    """The upper halves pack as bf16; the lower ones are noise, and stay as they are."""
    with opened(tmp_path, **LOSSLESS) as session:
        model, optimizer = wrapped(seeded(wide), dtype=torch.bfloat16, lr=1e-2)
        window_step(model, optimizer, 0)
        optimizer.finish()
        model._megatrain.pager.barrier()
        codecs = {
            key.split("/")[1]: session.store.codec(key)
            for key in session.store.keys()  # noqa: SIM118
        }
        assert codecs["weights"] == "lossless16"
        assert codecs["low"] == "raw"
        assert codecs["exp_avg"] == codecs["exp_avg_sq"] == "lossless32"


def test_packed_weights_beside_quantised_moments(tmp_path: Path) -> None:
    plain, _, _ = train(tmp_path, optimizer_compression="4bit")
    packed, sizes, _ = train(
        tmp_path, optimizer_compression="4bit", weight_compression="lossless"
    )
    assert differing(plain, packed) == []
    assert 0 < sizes[1] < sizes[0] * 0.95


def test_moments_that_are_fp32_again_are_packed(tmp_path: Path) -> None:
    """A session that packs moments packs those that a conversion writes as well."""
    with opened(tmp_path, optimizer_compression="lossless") as session:
        model, optimizer = wrapped(seeded(wide), lr=1e-2)
        window_step(model, optimizer, 0)
        optimizer.finish()
        model._megatrain.pager.barrier()
        sizes = [session.store.packed_sizes()]
        for codec in ("8bit", False):
            mt.recompress(model, codec)
            model._megatrain.pager.barrier()
            sizes.append(session.store.packed_sizes())
        assert sizes[1][0] < sizes[0][0] / 10  # vectors and norms alone stay fp32
        assert sizes[2][0] == sizes[0][0]
        assert sizes[2][1] < sizes[2][0]


def test_it_goes_on_exactly_after_small_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = train(tmp_path)
    set_tile_numel(monkeypatch, 16 * 1024)
    packed, sizes, _ = train(tmp_path, **LOSSLESS)
    assert differing(plain, packed) == []
    assert sizes[1] < sizes[0]


def test_saved_weights_are_the_same(tmp_path: Path) -> None:
    states = []
    nothing: dict[str, Any] = {}
    for options in (nothing, LOSSLESS):
        with opened(tmp_path / "offload", **options):
            model, optimizer = wrapped(seeded(wide), lr=1e-2)
            plain_step(model, optimizer, 0)
            optimizer.finish()
            states.append(mt.unwrap(model).state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


# ------------------------------------------------------------------- budgets


def test_memory_for_packing_is_in_the_plan(tmp_path: Path) -> None:
    with opened(tmp_path, disk=False, **LOSSLESS) as session:
        model, optimizer = wrapped(seeded(wide))
        plain_step(model, optimizer, 0)
        residency = model._megatrain.memory.residency
        assert residency.packing_bytes == session.store.staging_bytes > 0
        used = residency.resident_bytes + residency.working_bytes
        used += residency.activation_bytes + residency.packing_bytes
        assert used <= session.max_ram_bytes
        assert session.pool.in_use_bytes >= session.store.staging_bytes


def test_too_little_memory_for_packing(tmp_path: Path) -> None:
    with pytest.raises(mt.BudgetError, match="packing"):
        mt.init(tmp_path, max_ram_gb="20MB", **LOSSLESS)
    assert mt.current_session() is None
    assert list(tmp_path.iterdir()) == []
    with mt.init(tmp_path, max_ram_gb="20MB"):
        pass


# -------------------------------------------------------------------- faults


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("n", [0, 3, 9, 17, 30])
def test_a_system_call_that_fails_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, n: int
) -> None:
    plain, _, _ = train(tmp_path, steps=4)
    with opened(tmp_path, **LOSSLESS):
        model, optimizer = wrapped(seeded(wide), lr=1e-2)
        for step in range(2):
            window_step(model, optimizer, step)
        real, calls = getattr(os, name), [0]

        def call(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == n + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        def go_on() -> None:
            for step in range(2, 6):
                window_step(model, optimizer, step)
            optimizer.finish()

        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            with pytest.raises(mt.StoreError, match="EIO"):
                go_on()
        # Either it goes on from the last whole step, or it says that it must not be used.
        try:
            optimizer.zero_grad()
            done = model._megatrain.steps.done
            for step in range(done, 4):
                window_step(model, optimizer, step)
            optimizer.finish()
            if done <= 4:
                assert differing(plain, snapshot(model, optimizer)) == []
        except mt.StoreError as error:
            assert "must not be used" in str(error)  # noqa: PT017
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_tile_is_named(tmp_path: Path) -> None:
    with opened(tmp_path, **LOSSLESS) as session:
        model, optimizer = wrapped(seeded(wide), lr=1e-2)
        for step in range(2):
            window_step(model, optimizer, step)
        optimizer.finish()
        record = model._megatrain
        record.pager.barrier()
        record.executor.rest()
        tiles = session.store.pin()
        key, tile = next(
            (key, tile)
            for key, tile in tiles.tiles.items()
            if "/exp_avg_sq/" in key and tile.packed
        )
        session.store.unpin(tiles)
        flip_bits(session.store.path, tile.offset + tile.packed_bytes // 2, 0xFF)
        pack = int(key.split("/")[2])
        with pytest.raises(mt.StoreError, match=rf"{key}.*is damaged"):
            record.pager.need(pack, What.EXP_AVG_SQ)
    assert list(tmp_path.iterdir()) == []
