"""How models are cut into blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import megatrain_nb as mt
from megatrain_nb.runtime.layers import cut
from tests.runtime.common import (
    Layer,
    TinyLM,
    loss_of,
    opened,
    seeded,
    true_or_refused,
)

if TYPE_CHECKING:
    from pathlib import Path


def names(model: nn.Module) -> list[str]:
    return [block.name for block in cut(model).blocks]


def test_a_tiny_model() -> None:
    assert names(TinyLM()) == ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]  # fmt: skip


def test_tied_weights_are_one_pack_of_two_blocks() -> None:
    model = TinyLM(tied=True)
    layers = cut(model)
    packs = {block.name: block.spec.packs for block in layers.blocks}
    assert packs["embed"] == packs["head"]
    assert layers.spec.num_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(3, 3), ["Linear"]),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), ["0", "2"]),
        (nn.ModuleDict({"a": nn.Linear(3, 3), "b": Layer()}), ["a", "b.norm", "b.up", "b.down"]),
        (nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Linear(16, 3)), ["0", "1"]),
    ],
)  # fmt: skip
def test_other_shapes(model: nn.Module, expected: list[str]) -> None:
    assert names(model) == expected


def test_every_parameter_has_exactly_one_place() -> None:
    model = TinyLM()
    model.scale = nn.Parameter(torch.ones(3))
    layers = cut(model)
    assert set(layers.resident) == {"scale"}
    assert len(layers.homes) + 1 == len(list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_refused_by_name(dtype: torch.dtype) -> None:
    model = TinyLM()
    model.layers[1].to(dtype)
    with pytest.raises(
        mt.ModelError, match=r"layers\.1\.norm\.weight is \w+16|float64"
    ):
        cut(model)


def test_no_parameters() -> None:
    with pytest.raises(mt.ModelError, match="ReLU has no parameters"):
        cut(nn.ReLU())


def test_a_forward_that_the_user_replaced_is_back_after_unwrap(tmp_path: Path) -> None:
    model = seeded(TinyLM)

    def mine(x: Any) -> Any:
        return x

    model.layers[0].forward = mine
    with opened(tmp_path):
        mt.wrap(model)
        loss_of(model, torch.ones(2, 9, dtype=torch.long)).backward()
        mt.unwrap(model)
    assert model.layers[0].forward is mine


class Recurrent(TinyLM):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.rnn(x)[0]

    def __init__(self) -> None:
        super().__init__(self.Part)


class Normed(TinyLM):
    class Part(Layer):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.weight_norm(self.up)

    def __init__(self) -> None:
        super().__init__(self.Part)


class Attending(TinyLM):
    def __init__(self) -> None:
        super().__init__(
            lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        )


class Repeating(TinyLM):
    """One layer, several times, as ALBERT has it."""

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for index in (0, 0, 1, 0, 2, 2):
            x = self.layers[index](x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
@pytest.mark.parametrize("make", [Recurrent, Normed, Attending, Repeating])
def test_models_of_other_kinds(tmp_path: Path, make: Any, window: bool) -> None:
    true_or_refused(make, tmp_path, window=window, count=2)
