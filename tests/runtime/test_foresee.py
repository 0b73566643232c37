"""A session decides, before its first window runs, what a forecast said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.plan import catalogue
from megatrain_nb.runtime.foresee import Foresight
from megatrain_nb.runtime.layers import cut
from megatrain_nb.runtime.memory import ModelMemory
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.shape import draft
from tests.runtime.models import make_config

if TYPE_CHECKING:
    from pathlib import Path

RAM_GB = 0.22


def batches(batch: int, length: int, count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 61, (count, batch, length))
    return [{"input_ids": x, "labels": x} for x in ids]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stays_is_what_the_forecast_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    config = make_config(
        "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=8
    )
    # With so slow a disk nothing is preferred to what saves traffic: so does a session in its first step.
    slow = catalogue.machine("cpu-desktop").changed(
        read_bytes_per_s=1e6, write_bytes_per_s=1e6, mixed_bytes_per_s=1e6
    )
    plan = mt.estimate(
        config,
        slow,
        seq_len=16,
        batch=2,
        accumulation=2,
        dtype=dtype,
        max_ram_gb=RAM_GB,
    )
    assert 0 < plan.residency.resident_bytes < plan.spec.state_bytes
    told: list[Any] = []
    foresee = ModelMemory.foresee

    def watched(memory: ModelMemory, *given: Any) -> None:
        foresee(memory, *given)
        told.append(memory.residency)

    monkeypatch.setattr(ModelMemory, "foresee", watched)
    with mt.init(tmp_path / "o", max_ram_gb=RAM_GB):
        made = mt.from_config(config, seed=0, dtype=dtype)
        model, optimizer = mt.wrap(made, lr=1e-3)
        offloaded = offloaded_model(model)
        assert offloaded is not None
        before = offloaded.memory.residency
        mt.train_step(model, optimizer, batches(2, 16, 2))
    assert before.activation_bytes != plan.residency.activation_bytes
    assert told == [plan.residency] * 2  # one for each micro-batch


def test_only_a_larger_window_is_news() -> None:
    config = make_config("llama")
    model = draft(config)
    layers, foresight = cut(model), Foresight()

    def look(batch: int, length: int, count: int) -> Any:
        given = ((), {"input_ids": torch.zeros(batch, length, dtype=torch.long)})
        return foresight.look(model, layers, given, accumulation=count)

    assert look(1, 16, 2)
    first = foresight.tell(layers, 10**9)
    assert first.reserved > 0
    assert look(2, 16, 1) is look(1, 8, 2) is False
    assert look(4, 64, 2)
    more = foresight.tell(layers, 10**9)
    assert more.reserved > first.reserved
    assert more.kept > first.kept
    nobody_knows = ((), {"pixels": torch.zeros(1, 3, 8, 8)})
    assert not foresight.look(model, layers, nobody_knows, accumulation=99)


def test_what_was_asked_for_is_left_alone(tmp_path: Path) -> None:
    with mt.init(tmp_path / "o", max_ram_gb=RAM_GB) as session:
        model, optimizer = mt.wrap(mt.from_config(make_config("llama"), seed=0))
        offloaded = offloaded_model(model)
        assert offloaded is not None
        before = offloaded.memory.plans_by_shape
        session.max_resident_bytes = 0
        after = offloaded.memory.plans_by_shape
        assert (before, after) == (True, False)
        session.models.plan()
        mt.train_step(model, optimizer, batches(1, 16, 1))
        assert offloaded.memory.residency.resident_bytes == 0
