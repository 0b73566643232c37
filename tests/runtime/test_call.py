"""Blocks that do more than map tensors to tensors: the same gradients as plain PyTorch, or an error."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megatrain_nb as mt
from tests.runtime.common import (
    WIDTH,
    Layer,
    TinyLM,
    backward_both,
    batch,
    both_ways,
    bug,
    loss_of,
    opened,
    seeded,
    true_or_refused,
    window_step,
    wrong_gradients,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class WeightsOut(TinyLM):
    """A position table whose module returns a view of its weights."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(20, WIDTH))

        def forward(self, count: int) -> Tensor:
            return self.rows[:count]

    def __init__(self) -> None:
        super().__init__()
        self.table = self.Table()

    def forward(self, ids: Tensor) -> Tensor:
        positions, x = self.table(ids.shape[1]), self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x + positions))
        return logits


class Appends(TinyLM):
    """Layers that put a loss term into a list they are given, as several mixtures of experts do."""

    class Part(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            y = super().forward(x)
            rest[0].append(y.pow(2).mean())
            return y

    def __init__(self) -> None:
        super().__init__(self.Part)

    def forward(self, ids: Tensor) -> Tensor:
        x, terms = self.embed(ids), list[Tensor]()
        for layer in self.layers:
            x = layer(x, terms)
        self.term = sum(terms) if terms else torch.zeros(())
        logits: Tensor = self.head(self.norm(x))
        return logits


def with_term(model: Any, ids: Tensor) -> Any:
    return loss_of(model, ids) + model.term


class ChangesInputLater(TinyLM):
    """The model changes a tensor in place that an earlier block took; plain autograd does not mind here."""

    class Part(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(x) + x * rest[0].clone()

    def __init__(self) -> None:
        super().__init__(self.Part)

    def forward(self, ids: Tensor) -> Tensor:
        x, scale = self.embed(ids), torch.ones(1)
        for layer in self.layers:
            x = layer(x, scale)
            scale.add_(1)
        logits: Tensor = self.head(self.norm(x))
        return logits


class SharedInside(TinyLM):
    """A module that is a block of its own, used inside other blocks as well."""

    class Part(Layer):
        def __init__(self, shared: Any) -> None:
            super().__init__()
            self.shared = shared
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *_: Any) -> Any:
            shared = self.shared[0] if isinstance(self.shared, list) else self.shared
            return self.last(shared(super().forward(x)))

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        del self.layers
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            self.Part(self.shared if registered else [self.shared]) for _ in range(3)
        )


@both_ways
def test_a_block_that_returns_its_own_weights(tmp_path: Path, window: bool) -> None:
    true_or_refused(WeightsOut, tmp_path, window=window)


def test_a_block_that_returns_its_own_weights_without_gradients(tmp_path: Path) -> None:
    plain = seeded(WeightsOut)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path), torch.no_grad():
        mt.wrap(streamed)
        assert torch.equal(streamed(batch(0)), plain(batch(0)))


@both_ways
def test_a_block_that_appends_to_a_list_it_is_given(
    tmp_path: Path, window: bool
) -> None:
    true_or_refused(Appends, tmp_path, window=window, loss=with_term)


@both_ways
def test_an_input_that_changes_in_place_after_the_block(
    tmp_path: Path, window: bool
) -> None:
    true_or_refused(ChangesInputLater, tmp_path, window=window)


@both_ways
@pytest.mark.parametrize("registered", [False, True])
def test_a_block_called_inside_another_one(
    tmp_path: Path, window: bool, registered: bool
) -> None:
    true_or_refused(
        lambda: SharedInside(registered=registered), tmp_path, window=window
    )


class StashesWeights(TinyLM):
    """A loss term of parameters only: its graph saves no tensor."""

    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            self.term = self.up.bias.sum()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(self.Part)

    @property
    def term(self) -> Any:
        return sum(layer.term for layer in self.layers)


class StashesActivations(StashesWeights):
    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            y = super().forward(x)
            self.term = y.pow(2).mean()
            return y

    def __init__(self) -> None:
        TinyLM.__init__(self, self.Part)


@both_ways
def test_a_parameter_that_escapes_through_an_attribute(
    tmp_path: Path, window: bool
) -> None:
    true_or_refused(StashesWeights, tmp_path, window=window, loss=with_term)


@both_ways
def test_an_activation_that_escapes_raises_and_names_the_block(
    tmp_path: Path, window: bool
) -> None:
    with pytest.raises(mt.ModelError, match=r"inside layers\.2 is used outside"):
        backward_both(StashesActivations, tmp_path, window=window, loss=with_term)


@both_ways
def test_a_forward_hook_that_stashes_an_inner_tensor_raises(
    tmp_path: Path, window: bool
) -> None:
    kept: dict[int, Tensor] = {}

    def stash(model: Any) -> None:
        model.layers[1].up.register_forward_hook(
            lambda _module, _args, output: kept.update({id(model): output})
        )

    with pytest.raises(mt.ModelError, match=r"layers\.1"):
        backward_both(
            TinyLM,
            tmp_path,
            window=window,
            before_wrap=stash,
            loss=lambda model, ids: loss_of(model, ids) + kept[id(model)].pow(2).mean(),
        )


@both_ways
def test_hooks_inside_and_on_blocks_see_the_true_values(
    tmp_path: Path, window: bool
) -> None:
    """Backward hooks run once; forward hooks inside a block run again when it is run again."""
    seen: dict[int, dict[str, list[Tensor]]] = {}

    def log(model: Any) -> None:
        mine = seen[len(seen)] = {"on": [], "in": [], "back": []}
        model.layers[1].register_forward_hook(
            lambda _m, _a, y: mine["on"].append(y.detach().clone())
        )
        model.layers[1].up.register_forward_hook(
            lambda _m, _a, y: mine["in"].append(y.detach().clone())
        )
        model.layers[1].register_full_backward_hook(
            lambda _m, _i, grads: mine["back"].append(grads[0].clone())
        )
        model.layers[1].up.register_full_backward_hook(
            lambda _m, _i, grads: mine["back"].append(grads[0].clone())
        )

    assert backward_both(TinyLM, tmp_path, window=window, before_wrap=log) == []
    plain, streamed = seen.values()
    assert torch.equal(torch.stack(plain["on"]), torch.stack(streamed["on"]))
    assert torch.equal(plain["in"][0], streamed["in"][0])
    assert torch.equal(plain["in"][0], streamed["in"][-1])
    assert len(plain["back"]) == len(streamed["back"]) == 2
    for mine, theirs in zip(streamed["back"], plain["back"], strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(
    "kind", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_gradient_hooks_of_parameters_work_or_are_refused(
    tmp_path: Path, where: str, kind: str
) -> None:
    def halve(tensor: Tensor) -> Any:
        if kind == "register_hook":
            return tensor * 0.5
        assert tensor.grad is not None
        tensor.grad.mul_(0.5)
        return None

    plain = seeded(TinyLM)
    streamed = copy.deepcopy(plain)
    getattr(plain.layers[1].up.weight, kind)(halve)
    loss_of(plain, batch(0)).backward()
    with opened(tmp_path):
        try:
            if where == "before":
                getattr(streamed.layers[1].up.weight, kind)(halve)
            mt.wrap(streamed)
            if where == "after":
                getattr(streamed.layers[1].up.weight, kind)(halve)
        except mt.MegatrainError:
            return
        loss_of(streamed, batch(0)).backward()
        assert wrong_gradients(plain, streamed) == []


class Counts(TinyLM):
    """Layers with a buffer that every forward changes."""

    class Part(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

    def __init__(self) -> None:
        super().__init__(self.Part)


@both_ways
def test_buffers_change_once_a_step(tmp_path: Path, window: bool) -> None:
    plain = seeded(Counts)
    streamed = copy.deepcopy(plain)
    loss_of(plain, batch(0)).backward()
    with opened(tmp_path):
        _, optimizer = mt.wrap(streamed)
        try:
            if window:
                window_step(streamed, optimizer, 0, count=1)
            else:
                loss_of(streamed, batch(0)).backward()
        except mt.ModelError:
            return
        for (name, mine), theirs in zip(
            streamed.named_buffers(), plain.buffers(), strict=True
        ):
            assert torch.equal(mine, theirs), name


class Drops(TinyLM):
    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            return functional.dropout(super().forward(x), 0.5, self.training)

    def __init__(self) -> None:
        super().__init__(self.Part)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_dropout_draws_the_same_mask_again(tmp_path: Path, mode: str) -> None:
    """In the second case the model is switched between forward and backward."""
    plain = seeded(Drops)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path):
        mt.wrap(streamed)
        for model in (plain, streamed):
            torch.manual_seed(3)
            loss = loss_of(model, batch(0))
            model.train(mode == "train")
            try:
                loss.backward()
            except mt.ModelError:
                return
        assert wrong_gradients(plain, streamed) == []


@dataclass
class Boxed:
    h: Tensor


@dataclass(slots=True)
class Slotted:
    h: Tensor


@both_ways
@pytest.mark.parametrize("box", [Boxed, Slotted])
def test_blocks_that_return_dataclasses(tmp_path: Path, window: bool, box: Any) -> None:
    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            return box(super().forward(x))

    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__(Part)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x).h
            logits: Tensor = self.head(self.norm(x))
            return logits

    with pytest.raises(mt.ModelError, match=r"layers\.\d"):
        backward_both(Model, tmp_path, window=window)


@both_ways
def test_nested_results_and_arguments(tmp_path: Path, window: bool) -> None:
    class Part(Layer):
        def forward(self, x: Any, *_: Any) -> Any:
            y = super().forward(x["x"][0]) * x["scale"]
            return {"x": (y, "text", None), "scale": x["scale"]}

    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__(Part)

        def forward(self, ids: Tensor) -> Tensor:
            x: Any = {"x": (self.embed(ids),), "scale": 0.5}
            for layer in self.layers:
                x = layer(x)
                assert x["x"][1:] == ("text", None)
            logits: Tensor = self.head(self.norm(x["x"][0]))
            return logits

    assert backward_both(Model, tmp_path, window=window, count=2) == []


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(False, id="loop"),
        pytest.param(
            True,
            id="window",
            marks=pytest.mark.xfail(
                strict=True,
                raises=RuntimeError,
                reason="torch's own error, which names no block: opaque arguments are not looked into",
            ),
        ),
    ],
)
def test_an_argument_that_hides_a_tensor(tmp_path: Path, window: bool) -> None:
    class Part(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(x) + rest[0].h

    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__(Part)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            box = SimpleNamespace(h=x * 2)
            for layer in self.layers:
                x = layer(x, box)
            logits: Tensor = self.head(self.norm(x))
            return logits

    true_or_refused(Model, tmp_path, window=window)


@both_ways
def test_a_block_that_changes_its_input_in_place_is_refused(
    tmp_path: Path, window: bool
) -> None:
    class Part(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            rest[0].add_(1)
            return super().forward(x)

    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__(Part)

        def forward(self, ids: Tensor) -> Tensor:
            x, count = self.embed(ids), torch.zeros(())
            for layer in self.layers:
                x = layer(x, count)
            logits: Tensor = self.head(self.norm(x))
            return logits

    with pytest.raises(mt.ModelError, match=r"layers\.0 changes its inputs in place"):
        backward_both(Model, tmp_path, window=window)


class InPlaceBetween(TinyLM):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
            x += 1
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
def test_a_block_output_that_the_model_changes_in_place(
    tmp_path: Path, window: bool, request: pytest.FixtureRequest
) -> None:
    if window:
        reason = (
            "border tensors are leaves: torch refuses, and its error names no block"
        )
        request.applymarker(
            pytest.mark.xfail(strict=True, raises=RuntimeError, reason=reason)
        )
    true_or_refused(InPlaceBetween, tmp_path, window=window)


class FromEmbeddings(TinyLM):
    def forward(self, ids: Tensor | None, x: Any = None) -> Tensor:
        x = x if ids is None else self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_autograd_grad_leaves_parameters_alone(tmp_path: Path) -> None:
    model = seeded(FromEmbeddings)
    with opened(tmp_path):
        mt.wrap(model)
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        try:
            torch.autograd.grad(model(None, x).sum(), x)
        except mt.ModelError:
            return
        assert model.head.weight.grad is None


def test_second_derivatives_are_right_or_refused(tmp_path: Path) -> None:
    plain = seeded(FromEmbeddings)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path):
        mt.wrap(streamed)
        for model in (plain, streamed):
            x = seeded(lambda: torch.randn(2, 8, WIDTH)).requires_grad_()
            loss = model(None, x).pow(2).mean()
            try:
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                (loss + slope.pow(2).sum()).backward()
            except (mt.ModelError, RuntimeError):
                assert model is streamed
                return
        assert wrong_gradients(plain, streamed) == []


@bug(reason="the parameters are not in autograd's graph: no gradient, no error")
def test_backward_with_inputs_is_right_or_refused(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path):
        mt.wrap(model)
        try:
            loss_of(model, batch(0)).backward(inputs=list(model.parameters()))
        except (mt.ModelError, RuntimeError):
            return
        assert model.head.weight.grad is not None


@both_ways
@pytest.mark.parametrize(
    "use", ["functional", "transposed", "matmul-t", "rows", "unsqueezed", "viewed"]
)
def test_a_weight_used_outside_its_module(
    tmp_path: Path, window: bool, use: str
) -> None:
    class Model(TinyLM):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            x, w = self.norm(x), self.embed.weight
            uses: dict[str, Callable[[], Tensor]] = {
                "functional": lambda: functional.linear(x, w),
                "transposed": lambda: x @ w.T,
                "matmul-t": lambda: x @ w.t(),
                "rows": lambda: self.head(x + w[: x.shape[1]]),
                "unsqueezed": lambda: self.head(x + w.unsqueeze(0)[:, : x.shape[1]]),
                "viewed": lambda: functional.linear(x, w.view(-1, WIDTH)),
            }
            return uses[use]()

    true_or_refused(Model, tmp_path, window=window)


def test_frozen_and_unused_parameters(tmp_path: Path) -> None:
    def freeze(model: Any) -> None:
        model.layers[1].requires_grad_(requires_grad=False)
        model.embed.requires_grad_(requires_grad=False)
        model.spare = nn.Linear(3, 3)

    for window in (False, True):
        wrong = backward_both(
            TinyLM, tmp_path, window=window, count=3, before_wrap=freeze
        )
        assert wrong == []


def test_requires_grad_may_be_switched_between_steps(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path):
        mt.wrap(streamed)
        for frozen in ("layers.0", "layers.2", "head"):
            for model in (plain, streamed):
                model.zero_grad()
                model.requires_grad_(requires_grad=True)
                model.get_submodule(frozen).requires_grad_(requires_grad=False)
                loss_of(model, batch(0)).backward()
            assert wrong_gradients(plain, streamed) == []
            assert streamed.get_submodule(frozen).state_dict()


def test_autocast_of_the_forward_is_used_again(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path):
        mt.wrap(streamed)
        for model in (plain, streamed):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, batch(0))
            loss.backward()
        for (name, a), b in zip(
            plain.named_parameters(), streamed.parameters(), strict=True
        ):
            assert torch.equal(a.grad, b.grad), name


def test_weights_that_change_between_forward_and_backward_raise(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path):
        mt.wrap(model)
        loss = loss_of(model, batch(0))
        with torch.no_grad():
            model.layers[0].up.weight.mul_(2)
        with pytest.raises(mt.ModelError, match="changed between forward and backward"):
            loss.backward()
