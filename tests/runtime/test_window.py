"""The layer-major window, and whether the executor does what the schedule says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import megatrain_nb as mt
from megatrain_nb.plan.schedule import Kind, make_schedule
from megatrain_nb.plan.traffic import NUM_FIRST
from tests.runtime.common import (
    Layer,
    TinyLM,
    backward_both,
    batch,
    differing,
    loss_of,
    micro_batches,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
)

if TYPE_CHECKING:
    from pathlib import Path


class Records(mt.Callback):
    def __init__(self) -> None:
        self.spans: list[Any] = []

    def on_span(self, span: Any) -> None:
        self.spans.append(span)

    def computed(self) -> list[str]:
        return [
            f"{span.name}:{span.kind}"
            for span in self.spans
            if span.kind in ("FORWARD", "BACKWARD")
        ]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
def test_what_happens_is_what_the_schedule_says(
    tmp_path: Path, tied: bool, window: bool
) -> None:
    model = seeded(lambda: TinyLM(tied=tied))
    with opened(tmp_path) as session:
        _, optimizer = mt.wrap(model)
        window_step(model, optimizer, 0)
        session.callbacks.append(records := Records())
        (window_step if window else plain_step)(model, optimizer, 1, count=2)
        spec = model._megatrain.layers.spec
    order = list(range(len(spec.blocks)))
    forward = make_schedule(spec, order, Kind.FORWARD)
    # In a window the last block turns round while it is loaded.
    backward = make_schedule(spec, order[::-1][window:], Kind.BACKWARD)
    expected = [
        f"{spec.blocks[action.block].name}:{action.kind}"
        for action in [*forward, *backward]
        if action.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert records.computed() == expected * (1 if window else 2)
    # What a pass begins with stays from the pass before; everything else is read.
    reads = [span for span in records.spans if span.kind == "READ" and "weights" in span.name]  # fmt: skip
    assert len(reads) >= len(expected) - 2 * (1 + NUM_FIRST)


def test_weights_cross_twice_a_step_whatever_the_accumulation(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    moved = []
    with opened(tmp_path):
        _, optimizer = mt.wrap(model)
        for count in (1, 4):
            for step in range(2):  # the second of them makes the moments
                window_step(model, optimizer, step, count=count)
            results = [
                window_step(model, optimizer, step, count=count) for step in range(30)
            ]
            moved.append(sum(x.read_bytes + x.written_bytes for x in results))
    # What is read early for the next step may count in either.
    assert moved[0] == pytest.approx(moved[1], rel=0.02)


def test_order_of_micro_batches_and_their_random_streams(tmp_path: Path) -> None:
    """The first draws from the caller's stream, and every one from the same again in backward."""

    class Noise(TinyLM):
        class Part(Layer):
            def forward(self, x: Tensor, *_: Any) -> Any:
                return super().forward(x) + torch.randn(x.shape)

        def __init__(self) -> None:
            super().__init__(self.Part)

    def loss(model: Any, ids: Tensor) -> Any:
        torch.manual_seed(int(ids.sum()))  # the same stream in both runs
        return loss_of(model, ids)

    for window in (False, True):
        wrong = backward_both(Noise, tmp_path, window=window, count=3, loss=loss)
        assert wrong == []


def test_a_loss_that_needs_no_block_is_refused(tmp_path: Path) -> None:
    def only_weights(model: Any, _: Any) -> Any:
        return model.head.weight.pow(2).sum()

    model = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(model)
        try:
            mt.train_step(
                model,
                optimizer,
                micro_batches(0, 1),
                loss_fn=only_weights,
            )
        except mt.ModelError:
            return
        assert optimizer.state


def test_state_that_the_model_keeps_on_its_modules(tmp_path: Path) -> None:
    class Model(TinyLM):
        class Part(Layer):
            scale: Any = 1.0

            def forward(self, x: Tensor, *_: Any) -> Any:
                return super().forward(x) * self.scale

        def __init__(self) -> None:
            super().__init__(self.Part)

        def forward(self, ids: Tensor) -> Tensor:
            for layer in self.layers:
                layer.scale = ids.float().mean()
            return super().forward(ids)

    try:
        wrong = backward_both(Model, tmp_path, window=True, count=3)
    except mt.MegatrainError:
        return
    assert wrong == []


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, each: loss_of(model, each["ids"]).detach(),
        lambda model, each: model(each["ids"]),
        lambda model, each: None,
        lambda model, each: 3.0,
    ],
    ids=["detached", "not scalar", "none", "float"],
)
def test_what_is_no_loss(tmp_path: Path, loss_fn: Any) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(model)
        with pytest.raises(
            mt.ModelError, match="micro-batch 0 must give a scalar loss"
        ):
            mt.train_step(model, optimizer, micro_batches(0), loss_fn=loss_fn)
        window_step(model, optimizer, 0)


def test_a_model_called_twice_and_without_gradients_inside_a_loss(
    tmp_path: Path,
) -> None:
    def loss(model: Any, ids: Tensor) -> Any:
        with torch.no_grad():
            target = model(ids).softmax(-1)
        return loss_of(model, ids) + (model(ids) * target).mean()

    for window in (False, True):
        assert backward_both(TinyLM, tmp_path, window=window, count=2, loss=loss) == []


def test_arguments_of_train_step(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(model)
        with pytest.raises(mt.ArgumentError, match="at least one micro-batch"):
            mt.train_step(model, optimizer, [])
        loss_of(model, batch(0)).backward()
        with pytest.raises(mt.ArgumentError, match="gradients are pending"):
            window_step(model, optimizer, 0)
        with pytest.raises(mt.ModelError, match=r"not in a session; call mt\.wrap"):
            mt.train_step(TinyLM(), optimizer, micro_batches(0))


def test_calls_past_the_top_of_the_model_leave_no_trace(tmp_path: Path) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyLM()

    model = seeded(Outer)
    with opened(tmp_path):
        mt.wrap(model)
        for _ in range(50):
            loss_of(model.inner, batch(0)).backward()
        executor = model._megatrain.executor
        length = len(executor._order)
        loss_of(model.inner, batch(0)).backward()
        assert len(executor._order) == length


def test_the_same_window_twice_gives_the_same_bits(tmp_path: Path) -> None:
    found = []
    for disk in (False, True, True):
        model = seeded(TinyLM)
        with opened(tmp_path, disk=disk):
            _, optimizer = mt.wrap(model, max_grad_norm=0.1)
            for step in range(2):
                window_step(model, optimizer, step)
            found.append(snapshot(model, optimizer))
    assert differing(found[0], found[1]) == differing(found[1], found[2]) == []
