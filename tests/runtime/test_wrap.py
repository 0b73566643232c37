"""Moving in and out."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import megatrain_nb as mt
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
    wrong_gradients,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("disk", [False, True])
def test_there_and_back(tmp_path: Path, tied: bool, disk: bool) -> None:
    model = seeded(lambda: TinyLM(tied=tied))
    before = snapshot(model)
    with opened(tmp_path, disk=disk) as session:
        _, optimizer = mt.wrap(model)
        assert differing(before, snapshot(model)) == []
        window_step(model, optimizer, 0)
        after = snapshot(model)
        back: Any = mt.unwrap(model)
        assert id(back) == id(model)
        assert session.pool.in_use_bytes == session.store.used_bytes == 0
        assert differing(after, snapshot(model)) == []
        assert (model.head.weight is model.embed.weight) is tied
        assert all(type(param) is nn.Parameter for param in model.parameters())
        assert "forward" not in vars(model.layers[0])
        with pytest.raises(mt.ModelError, match="not in a session"):
            mt.unwrap(model)
        with pytest.raises(mt.SessionError, match="unwrapped"):
            optimizer.step()
    copied = copy.deepcopy(model)
    theirs = torch.optim.AdamW(copied.parameters())
    plain_step(copied, theirs, 0)


def test_wrapped_again_it_trains_on(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with opened(tmp_path):
        for step in range(2):
            _, optimizer = mt.wrap(model)
            window_step(model, optimizer, step)
            mt.unwrap(model)
    plain_step(plain, theirs, 0)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    plain_step(plain, theirs, 1)
    for name, value in snapshot(plain).items():
        torch.testing.assert_close(model.get_parameter(name), nn.Parameter(value))


def test_whoever_holds_a_parameter_sees_it_move(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    held, values = model.head.weight, model.head.weight.detach().clone()
    with opened(tmp_path):
        mt.wrap(model)
        assert held is model.head.weight
        assert torch.equal(held, values)
        with torch.no_grad():
            held.mul_(2)
        mt.unwrap(model)
    assert torch.equal(held, 2 * values)


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = TinyLM()
    with (
        opened(tmp_path),
        pytest.raises(mt.ModelError, match=r"meta device.*mt\.from_config"),
    ):
        mt.wrap(model)


def test_what_is_no_model(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(mt.MegatrainError):
        mt.wrap("model")  # type: ignore[arg-type]


def test_data_parallel_around_it(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path):
        mt.wrap(streamed)
        loss_of(plain, batch(0)).backward()
        around: Any = nn.DataParallel(streamed)
        loss_of(around, batch(0)).backward()
        assert wrong_gradients(plain, streamed) == []


def test_parameters_of_modules_around_the_blocks(tmp_path: Path) -> None:
    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids) * self.scale
            for layer in self.layers:
                x = layer(x) * self.scale
            return self.head(self.norm(x))

    plain = seeded(Model)
    models = [copy.deepcopy(plain) for _ in range(2)]
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        plain_step(plain, theirs, step)
    for model, take in zip(models, (plain_step, window_step), strict=True):
        with opened(tmp_path):
            _, mine = mt.wrap(model)
            for step in range(3):
                take(model, mine, step)
            for name, value in snapshot(plain).items():
                found = model.get_parameter(name).detach().clone()
                torch.testing.assert_close(found, value)
