"""Blocks that run again for backward: as far as their graph needs, and refused where they compute otherwise."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from megatrain_nb.errors import ModelError
from megatrain_nb.runtime import kept
from tests.runtime.common import (
    WIDTH,
    Layer,
    TinyLM,
    both_ways,
    opened,
    seeded,
    wrapped,
)
from tests.runtime.test_kept import gradients

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def compare(make: Callable[[], Any], directory: Path, *, window: bool) -> Any:
    """Compare the gradients of two steps that keep no activations with plain PyTorch's, bit for bit.

    Returns the model that streamed.
    """
    plain = seeded(make)
    model = copy.deepcopy(plain)
    unchanged = torch.optim.AdamW(plain.parameters(), lr=0.0)
    expected = gradients(plain, unchanged, window=False)
    with opened(directory) as session:
        session.max_kept_bytes = 0
        model, optimizer = wrapped(model, lr=0.0)
        for _ in range(2):
            found = gradients(model, optimizer, window=window)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
        assert model._megatrain.executor.keeping.peak_bytes == 0
    return model


class Counted(nn.Linear):
    """A linear map that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x)


class Wide(Layer):
    """Its last product is a linear map that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.down = Counted(2 * WIDTH, WIDTH)
        self.products = 0

    def forward(self, x: Tensor, *_: Any) -> Any:
        inner = torch.tanh(self.up(self.norm(x)))
        result = self.down(inner)
        self.products += 1  # where the second run ends, it does not come here
        return x + result


@both_ways
def test_what_comes_after_the_last_saved_tensor_does_not_run_again(
    tmp_path: Path, window: bool
) -> None:
    Counted.calls = 0
    model = compare(lambda: TinyLM(Wide), tmp_path, window=window)
    forwards = 2 * 2 * 3  # steps, micro-batches, layers
    # The last product begins in the second run, for what it saves, and does not end.
    assert Counted.calls - 2 * 3 == 2 * forwards  # 2 * 3: those of plain PyTorch
    assert [layer.products for layer in model.layers] == [forwards // 3] * 3


class Swallows(Layer):
    """Goes on after any exception, another way."""

    def forward(self, x: Tensor, *_: Any) -> Any:
        try:
            return super().forward(x)
        except Exception:
            return x * self.down(torch.tanh(self.up(self.norm(x)))).sin().exp()


class OwnHook(Layer):
    """A hook of its own on a tensor inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor, *_: Any) -> Any:
        inner = torch.tanh(self.up(self.norm(x)))
        if inner.requires_grad:
            inner.register_hook(lambda grad: self.seen.append(float(grad.sum())))
        return x + self.down(inner)


class Nested(Layer):
    """torch's checkpointing inside a block."""

    def forward(self, x: Tensor, *_: Any) -> Any:
        inner: Any = checkpoint.checkpoint(
            lambda y: torch.tanh(self.up(y)), self.norm(x), use_reentrant=False
        )
        return x + self.down(inner)


class Dropout(Layer):
    """Random numbers before and after the last saved tensor, and a view that is saved."""

    def forward(self, x: Tensor, *_: Any) -> Any:
        inner = functional.dropout(torch.tanh(self.up(self.norm(x))), 0.3)
        return functional.dropout(x + self.down(inner).view(x.shape), 0.1)


class Keyed(Layer):
    """Outputs in a dict, of which the model uses one."""

    def forward(self, x: Tensor, *_: Any) -> Any:
        inner = torch.tanh(self.up(self.norm(x)))
        return {"hidden": x + self.down(inner), "unused": inner.exp().sin()}


class Keys(TinyLM):
    def __init__(self) -> None:
        super().__init__(Keyed)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)["hidden"]
        logits: Tensor = self.head(self.norm(x))
        return logits


class Frozen(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        for param in self.layers[1].parameters():
            param.requires_grad_(False)
        self.embed.weight.requires_grad_(False)


@both_ways
@pytest.mark.parametrize(
    "make",
    [
        lambda: TinyLM(Swallows),
        lambda: TinyLM(Nested),
        lambda: TinyLM(lambda: nn.Sequential(Layer(), Layer())),
        Keys,
        Frozen,
    ],
    ids=["swallows", "nested", "sequential", "keys", "frozen"],
)
def test_gradients(make: Callable[[], Any], tmp_path: Path, window: bool) -> None:
    compare(make, tmp_path, window=window)


def test_random_numbers(tmp_path: Path) -> None:
    """In a plain loop all draw from one stream, as in plain PyTorch: gradients are equal only if masks are."""
    plain = seeded(lambda: TinyLM(Dropout))
    model = copy.deepcopy(plain)
    unchanged = torch.optim.AdamW(plain.parameters(), lr=0.0)
    torch.manual_seed(1)
    expected = gradients(plain, unchanged, window=False)
    with opened(tmp_path) as session:
        session.max_kept_bytes = 0
        model, optimizer = wrapped(model, lr=0.0)
        torch.manual_seed(1)
        found = gradients(model, optimizer, window=False)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@both_ways
def test_a_hook_inside_a_block_sees_each_gradient_once(
    tmp_path: Path, window: bool
) -> None:
    model = compare(lambda: TinyLM(OwnHook), tmp_path, window=window)
    for layer in model.layers:
        first, second = layer.seen[:2], layer.seen[2:]
        assert len(second) == 2  # micro-batches
        assert sorted(first) == sorted(second)


class Other(Layer):
    """Computes otherwise every second time, in a way that the graph shows."""

    kind = "dtype"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, *_: Any) -> Any:
        self.calls += 1
        odd = self.calls % 2
        inner = self.up(self.norm(x))
        if Other.kind == "fewer":
            inner = torch.tanh(inner) if odd else inner * 2
        elif Other.kind == "shape":
            inner = torch.tanh(inner if odd else inner[:, None])[:, :].view(inner.shape)
        else:
            inner = torch.tanh(inner if odd else inner.double()).float()
        return x + self.down(inner)


@both_ways
@pytest.mark.parametrize("kind", ["fewer", "shape", "dtype"])
def test_a_block_that_computes_otherwise_is_refused(
    kind: str, tmp_path: Path, window: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Other, "kind", kind)
    with opened(tmp_path) as session:
        session.max_kept_bytes = 0
        model, optimizer = wrapped(seeded(lambda: TinyLM(Other)), lr=0.0)
        with pytest.raises(ModelError, match=r"layers\.2 computes otherwise"):
            gradients(model, optimizer, window=window, count=1)


@pytest.mark.parametrize("broken", ["order", "version"])
def test_a_place_that_is_filled_wrongly_shows(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tooth for the comparison above."""
    fill = kept.Saved.fill

    def other(self: Any, tensor: Tensor) -> bool:
        filled = fill(self, tensor.clone())
        if broken == "order":
            assert self.tensor is not None
            self.tensor = self.tensor.flip(0)
        else:
            self.version -= 1
        return filled

    monkeypatch.setattr(kept.Saved, "fill", other)
    with pytest.raises((AssertionError, ModelError)):
        compare(TinyLM, tmp_path, window=True)
