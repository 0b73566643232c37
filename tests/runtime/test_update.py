"""Updates that are due: done when the next forward or a reader needs them, and never twice."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.optim import adamw
from megatrain_nb.plan.model import TILE_NUMEL
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.store.tilefile import TileFile
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

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain_nb.plan.timeline import Span


class Records(mt.Callback):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def on_span(self, span: Span) -> None:
        self.spans.append(span)

    def names(self, *kinds: str) -> list[str]:
        return [span.name for span in self.spans if span.kind in kinds]


def plain_after(steps: int, *, tied: bool = False, **kwargs: Any) -> dict[str, Any]:
    plain = seeded(lambda: TinyLM(tied=tied))
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True, **kwargs)
    for step in range(steps):
        plain_step(plain, optimizer, step)
    return snapshot(plain, optimizer)


def due(model: Any) -> list[int]:
    return list(model._megatrain.updates._due)


def test_a_step_leaves_its_update_to_the_next_forward(tmp_path: Path) -> None:
    records = Records()
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        session.callbacks.append(records)
        window_step(model, optimizer, 0)
        assert records.names("STEP") == []
        assert due(model) == [pack.index for pack in model._megatrain.pager.packs]
        records.spans.clear()
        window_step(model, optimizer, 1)
        done = {}
        for index, span in enumerate(records.spans):
            if span.kind == "FORWARD":
                done["FORWARD", span.name] = index
            elif span.kind == "STEP":
                done["STEP", span.name.rpartition(".")[0]] = index
        names = [name for kind, name in done if kind == "FORWARD"]
        assert len(names) == 6
        for name in names:  # its own update first
            assert done["STEP", name] < done["FORWARD", name]
        # and for nothing else: the last block's update comes after the first block's forward
        assert done["FORWARD", names[0]] < done["STEP", names[-1]]
        assert differing(plain_after(2), snapshot(model, optimizer)) == []
        assert due(model) == []


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_whoever_looks_pays_first(tmp_path: Path, what: str) -> None:
    expected = plain_after(1)
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        before = len(due(model))
        param = model.layers[1].up.weight
        if what == "weight":
            assert torch.equal(param, expected["layers.1.up.weight"])
        else:
            state = optimizer.state[param]["exp_avg_sq"]
            assert torch.equal(state, expected["layers.1.up.weight:exp_avg_sq"])
        assert len(due(model)) == before - 1  # that layer's only
        optimizer.finish()
        assert due(model) == []
        assert differing(expected, snapshot(model, optimizer)) == []


def test_steps_without_a_forward_between_them(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with opened(tmp_path):
        model, mine = wrapped(seeded(TinyLM))
        for each, optimizer in ((plain, theirs), (model, mine)):
            loss_of(each, batch(0)).backward()
            for _ in range(3):
                optimizer.step()  # the same gradients, three times
            loss_of(each, batch(1)).backward()  # added to them
            optimizer.step()
            optimizer.zero_grad()
        assert differing(snapshot(plain, theirs), snapshot(model, mine)) == []
        assert model.head.weight.grad is None


def test_gradients_may_be_read_and_changed_while_their_update_is_due(
    tmp_path: Path,
) -> None:
    plain = seeded(TinyLM)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with opened(tmp_path):
        model, mine = wrapped(seeded(TinyLM))
        for each, optimizer in ((plain, theirs), (model, mine)):
            loss_of(each, batch(0)).backward()
            optimizer.step()
        name = "layers.0.down.weight"
        mine_grad = model.get_parameter(name).grad
        assert torch.equal(mine_grad, plain.get_parameter(name).grad)
        assert len(due(model)) == 6
        for each in (plain, model):
            with torch.no_grad():
                each.get_parameter(name).grad.mul_(3)
        for optimizer in (theirs, mine):
            optimizer.step()
        assert differing(snapshot(plain, theirs), snapshot(model, mine)) == []


def test_a_new_optimizer_finds_the_weights_updated(tmp_path: Path) -> None:
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        _, optimizer = wrapped(model)
        expected = {k: v for k, v in plain_after(1).items() if ":" not in k}
        assert differing(expected, snapshot(model)) == []


def test_two_models_take_turns_in_little_memory(tmp_path: Path) -> None:
    expected = plain_after(4)
    with opened(tmp_path, max_ram_gb="330 kB"):
        pairs = [wrapped(seeded(TinyLM)) for _ in range(2)]
        for step in range(4):
            for model, optimizer in pairs:
                window_step(model, optimizer, step)
        for model, optimizer in pairs:
            assert differing(expected, snapshot(model, optimizer)) == []


def test_a_plan_that_shrinks_while_updates_are_due(tmp_path: Path) -> None:
    expected = plain_after(4)
    with opened(tmp_path, disk=False) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(4):
            session.max_resident_bytes = [None, 30_000, 0, None][step]
            session.models.plan()
            window_step(model, optimizer, step)
        assert differing(expected, snapshot(model, optimizer)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resident", [0, 20_000, 70_000])
def test_a_step_moves_what_the_plan_says(
    tmp_path: Path, resident: int, dtype: torch.dtype
) -> None:
    with opened(tmp_path) as session:
        session.max_resident_bytes = resident
        model, optimizer = wrapped(seeded(TinyLM), dtype=dtype)
        window_step(model, optimizer, 0)
        window_step(model, optimizer, 1)  # from now on there are moments to read
        results = [window_step(model, optimizer, step) for step in range(2, 102)]
        record = model._megatrain
        order = [block.index for block in record.layers.spec.blocks]
        planned = step_traffic(record.layers.spec, record.memory.residency, order)
        # What is read early for the next step may count in either: at most one
        # step's bytes at each end, of a hundred.
        read = sum(result.read_bytes for result in results) / len(results)
        written = sum(result.written_bytes for result in results) / len(results)
        assert read == pytest.approx(planned.read_bytes, rel=0.02)
        assert written == pytest.approx(planned.written_bytes, rel=0.02)
        assert 0 < results[-1].share_of_bound <= 1


def test_tied_weights_are_read_once_a_step(tmp_path: Path) -> None:
    """By the head: they stay from the step before for the embedding, and from the head to the end of backward."""
    records = Records()
    with opened(tmp_path) as session:
        session.max_resident_bytes = 0
        model, optimizer = wrapped(seeded(lambda: TinyLM(tied=True)))
        session.callbacks.append(records)
        for step in range(12):
            window_step(model, optimizer, step)
    read = [name for name in records.names("READ") if name.startswith("0/weights/0/")]
    assert 12 <= len(read) <= 14  # and once before the first


def test_memory_goes_back_after_the_last_step(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        assert session.pool.in_use_bytes > 0  # what the next forward begins with
        optimizer.finish()
        model._megatrain.executor.rest()
        assert session.pool.in_use_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tile", [1024, TILE_NUMEL])
def test_random_delays_change_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
    tile: int,
    dtype: torch.dtype,
) -> None:
    """Every read, write and update takes its own time; the result is that of a run without delays."""
    defaults = Pager.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "tile_numel", tile)
    with opened(tmp_path):
        model, optimizer = wrapped(
            seeded(lambda: TinyLM(tied=tied)), max_grad_norm=0.5, dtype=dtype
        )
        for step in range(25):
            window_step(model, optimizer, step)
        expected = snapshot(model, optimizer)
    chance = random.Random(0)

    def delayed(original: Any) -> Any:
        def later(*args: Any, **kwargs: Any) -> Any:
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.003)
            return original(*args, **kwargs)

        return later

    for name in ("read", "write"):
        monkeypatch.setattr(TileFile, name, delayed(getattr(TileFile, name)))
    monkeypatch.setattr("megatrain_nb.runtime.update.update", delayed(adamw.update))
    with opened(tmp_path, max_ram_gb="180 kB"):
        model, optimizer = wrapped(
            seeded(lambda: TinyLM(tied=tied)), max_grad_norm=0.5, dtype=dtype
        )
        for step in range(25):
            window_step(model, optimizer, step)
        assert differing(expected, snapshot(model, optimizer)) == []
