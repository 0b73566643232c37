from __future__ import annotations

from typing import Any

import pytest

import megatrain_nb as mt
from megatrain_nb.codec.choice import parse_storage
from megatrain_nb.codec.names import MOMENTS, WEIGHTS
from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan import catalogue
from megatrain_nb.plan.memory import Residency
from megatrain_nb.plan.model import pack_params
from megatrain_nb.plan.packing import IO_THREADS, PACKING_BYTES, OnDisk
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.store.packing import STAGING_BYTES

BOTH: dict[str, Any] = {
    "optimizer_compression": "lossless",
    "weight_compression": "lossless",
}


def test_packing_takes_the_memory_that_the_store_takes() -> None:
    assert PACKING_BYTES == IO_THREADS * STAGING_BYTES


def test_gradients_and_lower_halves_are_as_they_are() -> None:
    pack = pack_params(0, "up", [("w", (1024, 1024))], split=True)
    packed = OnDisk(frozenset({WEIGHTS, MOMENTS}))
    assert packed.num_bytes("grads", pack) == pack.grad_bytes
    halves = pack.states_bytes - pack.moments_bytes
    assert packed.num_bytes("states", pack) == pytest.approx(
        halves + pack.moments_bytes / 1.21, abs=1
    )
    assert packed.num_bytes("weights", pack) == pytest.approx(
        pack.weight_bytes / 1.49, abs=1
    )
    assert OnDisk().num_bytes("states", pack) == pack.states_bytes
    assert OnDisk().pack_seconds("states", pack) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_moves_what_its_traffic_counts(dtype: str) -> None:
    options: dict[str, Any] = {"max_ram_gb": 8, "dtype": dtype, "seq_len": 128}
    plain = mt.estimate("llama-3.2-1b", "cpu-desktop", **options)
    packed = mt.estimate("llama-3.2-1b", "cpu-desktop", **options, **BOTH)
    spec = packed.spec
    order = range(len(spec.blocks))
    counted = step_traffic(spec, packed.residency, order, packed.choices.on_disk)
    first = spec.packs_of(0)[0]  # tied: its gradient goes and comes back once more
    more = 0 if first.index in packed.residency.grads else first.grad_bytes
    assert packed.moved_bytes["disk to ram"] == counted.read_bytes + more
    assert packed.moved_bytes["ram to disk"] == counted.written_bytes + more
    assert counted.packing_cpu_s > 0
    moved = [sum(plan.moved_bytes.values()) for plan in (plain, packed)]
    assert 0.75 * moved[0] < moved[1] < 0.95 * moved[0]


def test_room_on_the_disk_is_planned_as_if_nothing_packed() -> None:
    options: dict[str, Any] = {"max_ram_gb": 8, "seq_len": 128}
    packed = mt.estimate("llama-3.2-1b", "cpu-desktop", **options, **BOTH)
    assert packed.disk_bytes >= packed.residency.disk_bytes
    named = {item.name: item.num_bytes for item in packed.ram}
    assert named["windows for packing"] == PACKING_BYTES
    assert "moments lossless, weights lossless on disk" in str(packed)


def test_a_fast_disk_waits_for_packing() -> None:
    fast = catalogue.machine("h100-4nvme").changed(
        read_bytes_per_s=1e12, write_bytes_per_s=1e12, mixed_bytes_per_s=1e12
    )
    packed = mt.estimate("qwen3-8b", fast, max_ram_gb=40, **BOTH)
    cost = sum(
        packed.choices.on_disk.pack_seconds("states", pack)
        for pack in packed.spec.packs
        if pack.index not in packed.residency.states
    )
    assert packed.simulated.busy_s["disk"] >= cost / IO_THREADS


def test_what_mt_init_takes_is_taken() -> None:
    rules: dict[str, bool | str] = {"model.layers.0": False, "*": "4bit"}
    plan = mt.estimate("gpt2", "cpu-laptop", optimizer_compression=rules)
    assert plan.choices.compression.asked("h.0") == "4bit"
    assert plan.choices.compression.asked("model.layers.0.w") == "raw"
    refused: list[Any] = [
        {"optimizer_compression": {"*": "lossless"}},
        {"weight_compression": "4bit"},
    ]
    for wrong in refused:
        with pytest.raises(ArgumentError, match="compression"):
            mt.estimate("gpt2", "cpu-laptop", **wrong)
    assert parse_storage(False, False)[1] == frozenset()


def test_what_stays_in_ram_moves_nothing_however_it_is_packed() -> None:
    spec = catalogue.model("gpt2").spec()
    every = frozenset(range(len(spec.packs)))
    residency = Residency(weights=every, grads=every, states=every)
    on_disk = OnDisk(frozenset({WEIGHTS, MOMENTS}))
    found = step_traffic(spec, residency, range(len(spec.blocks)), on_disk)
    assert (found.moved_bytes, found.packing_cpu_s) == (0, 0.0)
