"""Activations that are kept: the same gradients, within the budget, and never a weight that left."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import checkpoint

import megatrain_nb as mt
from tests.runtime.common import (
    WIDTH,
    Layer,
    TinyLM,
    batch,
    both_ways,
    gradients_in,
    loss_of,
    micro_batches,
    opened,
    seeded,
    window_step,
    wrapped,
)
from tests.runtime.plain import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def gradients(
    model: Any,
    optimizer: Any,
    *,
    window: bool,
    count: int = 2,
    loss: Callable[[Any, Tensor], Any] = loss_of,
) -> dict[str, Tensor]:
    """The gradients of one step, as the optimizer finds them."""

    def step() -> None:
        if window:
            mt.train_step(
                model,
                optimizer,
                micro_batches(0, count),
                loss_fn=lambda model, batch: loss(model, batch["ids"]),
            )
            return
        for each in micro_batches(0, count):
            loss(model, each["ids"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return gradients_in(model, optimizer, step)


def steps(
    make: Callable[[], Any], directory: Path, *, window: bool, **kwargs: Any
) -> tuple[int, int]:
    """Take three steps that change no weight, and compare all gradients with plain PyTorch's, bit for bit.

    Returns how often a block computed its forward again in the first step, and in the other two together.
    """
    plain = seeded(make)
    streamed = copy.deepcopy(plain)
    expected = gradients(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.0), window=False, **kwargs
    )
    with opened(directory) as session, counted() as again:
        session.keep_share = 1.0
        streamed, optimizer = wrapped(streamed, lr=0.0)
        numbers: list[int] = []
        for _ in range(3):
            found = gradients(streamed, optimizer, window=window, **kwargs)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
            numbers.append(*again)
        assert streamed._megatrain.executor.keeping.held_bytes == 0
    return numbers[0], numbers[2] - numbers[0]


@both_ways
def test_what_is_kept_gives_the_gradients_of_plain_pytorch(
    tmp_path: Path, window: bool
) -> None:
    first, later = steps(TinyLM, tmp_path, window=window)
    assert first > 0
    assert later == 0


class HoldsWeight(torch.autograd.Function):
    """An operation that holds its weight without telling autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.transposed = transposed
        ctx.weight = weight.t() if transposed else weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight = ctx.weight.t() if ctx.transposed else ctx.weight
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1), None


@both_ways
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_that_an_operation_holds_is_noticed(
    tmp_path: Path, window: bool, transposed: bool
) -> None:
    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            apply: Any = HoldsWeight.apply
            return x + self.down(apply(x, self.up.weight, transposed))

    first, later = steps(lambda: TinyLM(Part), tmp_path, window=window)
    assert first > 0
    assert (
        later == 2 * 2 * 3
    )  # two steps of two micro-batches through three such layers


@both_ways
def test_a_saved_tensor_that_changes_later_makes_the_block_compute_again(
    tmp_path: Path, window: bool
) -> None:
    """The block's own attribute is the tensor, and the model changes it between the blocks."""

    class Part(Layer):
        seen: Any

        def forward(self, x: Tensor, *_: Any) -> Any:
            scale = torch.full((WIDTH,), 2.0)
            self.seen = [scale]
            return super().forward(x) * scale

    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__(Part)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
                if self.change:
                    seen: Any = layer.seen
                    seen[0].add_(1)
            logits: Tensor = self.head(self.norm(x))
            return logits

        change = False

    def make() -> Any:
        # Plain PyTorch would refuse this change; the gradients are those of the model without it.
        model = Model()
        model.change = made > 0
        return model

    made = 0
    plain = seeded(make)
    expected = gradients(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.0), window=False
    )
    made = 1
    streamed = seeded(make)
    with opened(tmp_path) as session, counted() as again:
        session.keep_share = 1.0
        streamed, optimizer = wrapped(streamed, lr=0.0)
        for _ in range(2):
            found = gradients(streamed, optimizer, window=window)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        before = again[0]
        gradients(streamed, optimizer, window=window)
        assert again[0] - before == 2 * 3


class Drops(TinyLM):
    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            return functional.dropout(super().forward(x), 0.5, self.training)

    def __init__(self) -> None:
        super().__init__(self.Part)


class Checkpoints(TinyLM):
    """Layers that checkpoint a part of themselves, in either of torch's ways."""

    def __init__(self, *, use_reentrant: bool) -> None:
        class Part(Layer):
            def forward(self, x: Tensor, *_: Any) -> Any:
                run = super().forward
                return checkpoint.checkpoint(run, x, use_reentrant=use_reentrant)

        super().__init__(Part)


class Tables(TinyLM):
    """Weights as views, sliced, stacked, reinterpreted; and one parameter twice."""

    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            up, down = self.up.weight, self.down.weight
            y = torch.tanh(x @ up.t()[:, ::2]) @ up[::2]
            bits = down.view(torch.int32).bitwise_and(-1).view(torch.float32)
            y = y + functional.linear(torch.tanh(self.up(x)), bits * down)
            return y + functional.linear(y, torch.stack([up[0], up[1]])).sum(-1, True)

    def __init__(self) -> None:
        super().__init__(self.Part)


@both_ways
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        pytest.param(
            lambda: Checkpoints(use_reentrant=False), loss_of, id="checkpoint"
        ),
        pytest.param(lambda: Checkpoints(use_reentrant=True), loss_of, id="reentrant"),
        pytest.param(Tables, loss_of, id="views"),
        pytest.param(lambda: TinyLM(tied=True), loss_of, id="tied"),
    ],
)
def test_blocks_of_several_kinds(
    tmp_path: Path, window: bool, make: Any, loss: Any
) -> None:
    _, later = steps(make, tmp_path, window=window, loss=loss, count=1)
    assert later == 0


def test_dropout_draws_the_mask_once(tmp_path: Path) -> None:
    def loss(model: Any, ids: Tensor) -> Any:
        torch.manual_seed(int(ids.sum()))
        return loss_of(model, ids)

    for window in (False, True):
        _, later = steps(Drops, tmp_path, window=window, loss=loss)
        assert later == 0


def test_autocast(tmp_path: Path) -> None:
    def loss(model: Any, ids: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, ids)

    for window in (False, True):
        _, later = steps(TinyLM, tmp_path, window=window, loss=loss)
        assert later == 0


@both_ways
def test_a_tensor_that_escapes_is_an_error_that_names_the_block(
    tmp_path: Path, window: bool
) -> None:
    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            y = super().forward(x)
            self.term = y.pow(2).mean()
            return y

    def with_terms(model: Any, ids: Tensor) -> Any:
        return loss_of(model, ids) + sum(layer.term for layer in model.layers)

    model = seeded(lambda: TinyLM(Part))
    with opened(tmp_path) as session:
        session.keep_share = 1.0
        model, optimizer = wrapped(model, lr=0.0)
        for _ in range(2):
            gradients(model, optimizer, window=window, count=1)
        with pytest.raises(mt.ModelError, match=r"inside layers\.2 is used outside"):
            gradients(model, optimizer, window=window, count=1, loss=with_terms)


def test_weights_that_change_inside_a_window_raise(tmp_path: Path) -> None:
    def loss(model: Any, ids: Tensor) -> Any:
        value = loss_of(model, ids)
        if change:
            with torch.no_grad():
                model.layers[0].up.weight.mul_(2)
        return value

    change = False
    model = seeded(TinyLM)
    with opened(tmp_path) as session:
        session.keep_share = 1.0
        model, optimizer = wrapped(model, lr=0.0)
        for _ in range(2):
            gradients(model, optimizer, window=True, loss=loss)
        change = True
        with pytest.raises(mt.ModelError, match="changed between forward and backward"):
            gradients(model, optimizer, window=True, loss=loss)


def test_a_graph_that_is_never_used_gives_its_bytes_back(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path) as session:
        session.keep_share = 1.0
        model, optimizer = wrapped(model, lr=0.0)
        gradients(model, optimizer, window=False)
        keeping = model._megatrain.executor.keeping
        loss = loss_of(model, batch(0))
        assert 0 < keeping.held_bytes <= keeping.limit_bytes
        del loss
        assert keeping.held_bytes == 0
        loss = loss_of(model, batch(0))
        loss.backward(retain_graph=True)
        assert keeping.held_bytes == 0
        loss.backward()  # again: computed anew


@pytest.mark.parametrize("max_kept", [0, 5_000, 20_000])
def test_what_is_held_stays_within_the_limit_and_the_plan_comes_to_rest(
    tmp_path: Path, max_kept: int
) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path, disk=False) as session:
        session.max_kept_bytes = max_kept
        model, optimizer = wrapped(model, lr=0.0)
        offloaded = model._megatrain
        keeping, seen = offloaded.executor.keeping, []
        lease = keeping.lease

        @contextmanager
        def leasing(block: int) -> Iterator[Any]:
            with lease(block) as given:
                yield given
            assert keeping.held_bytes <= keeping.limit_bytes <= max_kept

        keeping.lease = leasing
        for step in range(6):
            window_step(model, optimizer, step)
            seen.append((offloaded.memory.residency.keep_bytes, keeping._chosen))
        assert len(set(seen[2:])) == 1, seen
        kept = [index for index in seen[-1][1] if keeping._num_bytes[index]]
        layers = keeping._num_bytes[1]
        assert len(kept) >= min(max_kept // layers, 3)


def test_where_everything_fits_activations_get_what_is_left(tmp_path: Path) -> None:
    model: Any = seeded(TinyLM)
    with opened(tmp_path, disk=False) as session:
        model, optimizer = wrapped(model, lr=0.0)
        window_step(model, optimizer, 0)
        residency = model._megatrain.memory.residency
        assert residency.disk_bytes == 0
        assert (
            residency.keep_bytes >= model._megatrain.executor.keeping.wanted_bytes > 0
        )
        budget = residency.activation_bytes + residency.keep_bytes
        assert session.pool.limit_bytes == session.max_ram_bytes - budget
        with counted() as again:
            window_step(model, optimizer, 1)
        assert again == [0]
