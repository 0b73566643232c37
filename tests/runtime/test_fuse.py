"""Micro-batches that pass a block together: the same gradients but for rounding, or one by one with a note."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import megatrain_nb as mt
from megatrain_nb.runtime.fuse import FusedCall, Fusing
from tests.runtime.common import (
    WIDTH,
    Layer,
    TinyLM,
    gradients_in,
    micro_batches,
    opened,
    seeded,
    window_step,
    wrapped,
)
from tests.runtime.models import EVERY, make_batch, make_model
from tests.runtime.plain import opened as opened_place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# float32 sums of some hundred terms in another order: some units in the last place of the largest gradient.
TOLERANCE = 2e-5


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name of the block and number of micro-batches of each fused call."""
    found: list[tuple[str, int]] = []
    run = FusedCall.run

    def running(self: FusedCall, *args: Any, **kwargs: Any) -> None:
        found.append((self.block.name, len(self.members)))
        run(self, *args, **kwargs)

    monkeypatch.setattr(FusedCall, "run", running)
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        worst = float((found[name] - value).abs().max())
        assert worst <= TOLERANCE * max(float(value.abs().max()), 1e-3), name


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("keep", [False, True])
@EVERY
def test_gradients_are_those_of_one_by_one(
    tmp_path: Path, name: str, rows: int, keep: bool, fused: list[tuple[str, int]]
) -> None:
    windows = [
        [make_batch(name, 10 * step + index, rows=rows) for index in range(3)]
        for step in range(2)
    ]
    traces = []
    for fuse in (False, True):
        with opened_place(tmp_path / str(fuse), "disk") as session:
            session.keep_share, session.max_kept_bytes = 1.0, None if keep else 0
            model, optimizer = wrapped(
                make_model(name), lr=0.0, fuse_micro_batches=fuse
            )
            assert not fused
            traces.append(
                [
                    gradients_in(
                        model,
                        optimizer,
                        partial(mt.train_step, model, optimizer, window),
                    )
                    for window in windows
                ]
            )
            assert model._megatrain.executor.keeping.held_bytes == 0
    for found, expected in zip(traces[1], traces[0], strict=True):
        assert_close(found, expected)
    layers = {block for block, count in fused if count == 3}
    assert len(layers) >= 2, (layers, session.notes)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_in_bf16(tmp_path: Path, name: str, fused: list[tuple[str, int]]) -> None:
    """A group's gradient is rounded to bf16 once; one by one they are rounded each, then added."""
    window = [make_batch(name, index) for index in range(3)]
    traces = []
    for fuse in (False, True):
        with opened_place(tmp_path / str(fuse), "disk", tile_numel=2048):
            model, optimizer = wrapped(
                make_model(name), lr=0.0, fuse_micro_batches=fuse, dtype=torch.bfloat16
            )
            step = partial(mt.train_step, model, optimizer, window)
            traces.append(gradients_in(model, optimizer, step))
    for key, expected in traces[0].items():
        assert traces[1][key].dtype == torch.float32
        worst = float((traces[1][key] - expected).abs().max())
        assert worst <= 2**-5 * max(float(expected.abs().max()), 1e-3), key
    assert len({block for block, count in fused if count == 3}) >= 2


def tiny(
    directory: Path, make: Callable[[], Any], **kwargs: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[str, ...]]:
    """Gradients of plain PyTorch, of fused micro-batches, and the notes."""
    plain = seeded(make)
    streamed = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0)

    def step() -> None:
        for each in micro_batches(0):
            logits = plain(each["ids"][:, :-1], **kwargs)
            targets = each["ids"][:, 1:].flatten()
            (functional.cross_entropy(logits.flatten(0, 1), targets) / 3).backward()
        optimizer.step()

    expected = gradients_in(plain, optimizer, step)
    with opened(directory) as session:
        model, optimizer = wrapped(streamed, lr=0.0, fuse_micro_batches=True)
        found = gradients_in(
            model, optimizer, lambda: window_step(model, optimizer, 0, count=3)
        )
        return expected, found, session.notes


class OverTheBatch(TinyLM):
    """Rows of a batch see each other."""

    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            y = super().forward(x)
            return y - y.mean(0, keepdim=True)

    def __init__(self) -> None:
        super().__init__(self.Part)


class Norms(TinyLM):
    class Part(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def __init__(self) -> None:
        super().__init__(self.Part)


class Counts(TinyLM):
    class Part(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, *_: Any) -> Any:
            buffer: Any = self.calls
            buffer.add_(1)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(self.Part)


class Means(TinyLM):
    """A second output that is no batch."""

    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            y = super().forward(x)
            return y, y.mean()

    def __init__(self) -> None:
        super().__init__(self.Part)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, mean = layer(x)
            x = x * (1 + mean)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Sees(TinyLM):
    """A table without batch dimension, that the micro-batches give differently."""

    class Part(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(x) * rest[0]

    def __init__(self) -> None:
        super().__init__(self.Part)

    def forward(self, ids: Tensor) -> Tensor:
        x, table = self.embed(ids), torch.full((WIDTH,), 1 + float(ids[0, 0]) / 10)
        for layer in self.layers:
            x = layer(x, table)
        logits: Tensor = self.head(self.norm(x))
        return logits


class SizeOfBatch(TinyLM):
    """A table whose first dimension happens to be the batch's size."""

    class Part(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(x) * rest[0].sum(0)

    def __init__(self) -> None:
        super().__init__(self.Part)

    def forward(self, ids: Tensor) -> Tensor:
        x, table = self.embed(ids), torch.full((2, WIDTH), 0.5)
        for layer in self.layers:
            x = layer(x, table)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Own(TinyLM):
    """Random numbers by another way than dropout."""

    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            return super().forward(x) + 0 * torch.rand(())

    def __init__(self) -> None:
        super().__init__(self.Part)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (OverTheBatch, "outputs differ by more than"),
        (Norms, "normalises over the batch"),
        (Counts, "changes its buffers"),
        (Means, "an output of shape"),
        (Sees, "differs between micro-batches"),
        (SizeOfBatch, "outputs differ by more than"),
        (Own, "draws random numbers"),
    ],
)
def test_what_does_not_fit_runs_one_by_one_and_says_so_once(
    tmp_path: Path, make: Any, why: str, fused: list[tuple[str, int]]
) -> None:
    expected, found, notes = tiny(tmp_path, make)
    assert_close(found, expected)
    assert not [block for block, _ in fused if block.startswith("layers")]
    about = [note for note in notes if "fuse_micro_batches" in note]
    assert len(about) == 1
    assert "layers.0" in about[0]
    assert why in about[0]


def test_a_tensor_kept_on_a_module_is_still_noticed(tmp_path: Path) -> None:
    class Part(Layer):
        def forward(self, x: Tensor, *_: Any) -> Any:
            y = super().forward(x)
            self.term = y.detach().pow(2).mean()
            return y

    with pytest.raises(mt.ModelError, match=r"keeps a tensor of its micro-batch"):
        tiny(tmp_path, lambda: TinyLM(Part))


def test_micro_batches_of_other_shapes_run_one_by_one(
    tmp_path: Path, fused: list[tuple[str, int]]
) -> None:
    window = [make_batch("llama", index, width=9 + index) for index in range(3)]
    with opened(tmp_path) as session:
        model, optimizer = wrapped(make_model("llama"), fuse_micro_batches=True)
        mt.train_step(model, optimizer, window)
        assert not fused
        assert any("different shapes" in note for note in session.notes)


def test_dropout_draws_one_mask_for_all(
    tmp_path: Path, fused: list[tuple[str, int]]
) -> None:
    """The same in backward: otherwise the gradient would not be the slope of the loss."""

    class Drops(TinyLM):
        class Part(Layer):
            def forward(self, x: Tensor, *_: Any) -> Any:
                return functional.dropout(super().forward(x), 0.5, self.training)

        def __init__(self) -> None:
            super().__init__(self.Part)

    def loss_at(shift: float) -> tuple[float, Tensor]:
        model = seeded(Drops)
        with torch.no_grad():
            model.layers[0].up.bias[3] += shift
        torch.manual_seed(5)
        with opened(tmp_path):
            model, optimizer = wrapped(model, lr=0.0, fuse_micro_batches=True)
            found: list[float] = []

            def step() -> None:
                found.append(window_step(model, optimizer, 0).loss)

            grads = gradients_in(model, optimizer, step)
        return found[0], grads["layers.0.up.bias"][3]

    _, slope = loss_at(0.0)
    rise = (loss_at(0.05)[0] - loss_at(-0.05)[0]) / 0.1
    assert ("layers.0", 3) in fused
    assert float(slope) == pytest.approx(rise, rel=0.02, abs=1e-4)


def test_a_group_is_as_large_as_helps(
    tmp_path: Path, fused: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain_nb.runtime.fuse.MAX_TOKENS", 40)  # 16 tokens each
    expected, found, _ = tiny(tmp_path, TinyLM)
    assert_close(found, expected)
    assert {count for _, count in fused} == {2}


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_setting_is_true_or_false(tmp_path: Path, value: Any) -> None:
    with opened(tmp_path), pytest.raises(mt.ArgumentError, match="fuse_micro_batches="):
        mt.wrap(seeded(TinyLM), fuse_micro_batches=value)


def test_the_trainer_takes_the_setting(
    tmp_path: Path, fused: list[tuple[str, int]]
) -> None:
    data = [
        {key: value[0] for key, value in make_batch("llama", seed, rows=1).items()}
        for seed in range(4)
    ]
    args = transformers.TrainingArguments(
        str(tmp_path / "out"),
        save_strategy="no",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=1,
        report_to="none",
        use_cpu=True,
    )
    with opened(tmp_path / "offload"):
        trainer = mt.Trainer(
            make_model("llama"), args, train_dataset=data, fuse_micro_batches=True
        )
        trainer.train()
    assert {count for _, count in fused} == {4}


def test_models_that_do_not_ask_for_it_do_not_fuse(
    tmp_path: Path, fused: list[tuple[str, int]]
) -> None:
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        window_step(model, optimizer, 0)
        assert model._megatrain.fusing is None
    assert not fused
    assert Fusing(print)._note is print
