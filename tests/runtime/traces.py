"""Programs that use a model's blocks in an order that nobody announces, and the traces of their runs.

``python -m tests.runtime.traces`` runs all of them and writes what was used when to tests/plan/traces. Only those in
``SEEN`` were looked at while `megatrain_nb.plan.predict` was made.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

import megatrain_nb as mt
from megatrain_nb.plan.predict import Phase, Predictor, Use
from megatrain_nb.runtime.executor import Executor
from tests.plan.replay import TRACES, to_text
from tests.runtime.common import Layer, TinyLM, loss_of, opened, seeded, wrapped
from tests.runtime.models import make_batch, make_model
from tests.runtime.test_trainer import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS = 6


class Skips(TinyLM):
    """Each layer is left out one time in five."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if torch.rand(()) >= 0.2:
                x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Exits(TinyLM):
    """How many layers a batch passes depends on what is in it; half of them pass all."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        depth = 2 + int(ids.sum()) % (2 * len(self.layers))
        for layer in [*self.layers][:depth]:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Experts(nn.Module):
    """A mixture whose experts are modules of their own: a token goes to one of them."""

    def __init__(self, width: int = 16, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1, keepdim=True)
        out = x
        for index, expert in enumerate(self.experts):
            if (chosen == index).any():
                out = out + (chosen == index) * weight * expert(x)
        return out


def _tiny(make: Callable[[], nn.Module]) -> tuple[Any, Callable[[Any, int], Tensor]]:
    """A model, and its loss on the batch of a number."""

    def loss(model: Any, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 31, (1, 7), generator=generator)
        found: Tensor = loss_of(model, ids)
        return found

    return seeded(make), loss


def _real(name: str, **changes: Any) -> tuple[Any, Callable[[Any, int], Tensor]]:
    """The same for an architecture of transformers."""
    model = make_model(name, **{"num_hidden_layers": LAYERS} | changes)

    def loss(model: Any, index: int) -> Tensor:
        found: Tensor = model(**make_batch(name, index)).loss
        return found

    return model, loss


def loop(
    make: Callable[[], tuple[Any, Callable[[Any, int], Tensor]]],
    directory: Path,
    *,
    steps: int,
    accumulation: int = 1,
    every: int = 0,
    **kwargs: Any,
) -> None:
    """A plain loop; after ``every`` so many steps it evaluates four batches."""
    model, loss = make()
    with opened(directory, **kwargs):
        model, optimizer = wrapped(model, lr=1e-3)
        torch.manual_seed(1)
        for step in range(steps):
            for index in range(accumulation):
                loss(model, accumulation * step + index).backward()
            optimizer.step()
            optimizer.zero_grad()
            if every and step % every == every - 1:
                model.eval()
                with torch.no_grad():
                    for index in range(4):
                        loss(model, 1000 + index)
                model.train()


def trainer(directory: Path, *, steps: int, every: int) -> None:
    """`mt.Trainer`, which evaluates every so many steps."""
    model = make_model("gpt2", num_hidden_layers=LAYERS)
    arguments = transformers.TrainingArguments(
        output_dir=str(directory / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    with opened(directory / "session"):
        mt.Trainer(
            model=model,
            args=arguments,
            train_dataset=Rows("gpt2", 48),
            eval_dataset=Rows("gpt2", 8),
        ).train()


many = partial(TinyLM, num_layers=8)
PROGRAMS: dict[str, Callable[[Path], None]] = {
    "loop": partial(loop, partial(_real, "llama"), steps=6),
    "skips": partial(loop, partial(_tiny, partial(Skips, num_layers=8)), steps=40),
    "accumulated": partial(loop, partial(_real, "qwen3"), steps=6, accumulation=3),
    "evaluated": partial(loop, partial(_real, "gemma2"), steps=24, every=5),
    "trainer": partial(trainer, steps=24, every=5),
    "layerdrop": partial(
        loop, partial(_real, "opt", num_hidden_layers=10, layerdrop=0.2), steps=40
    ),
    "dropped_evaluated": partial(
        loop, partial(_real, "opt", layerdrop=0.2), steps=40, every=5
    ),
    "albert": partial(loop, partial(_real, "albert"), steps=6),
    "t5": partial(loop, partial(_real, "t5", num_layers=3), steps=6),
    "mixtral": partial(loop, partial(_real, "mixtral"), steps=6),
    "exits": partial(loop, partial(_tiny, partial(Exits, num_layers=8)), steps=40),
    "experts": partial(loop, partial(_tiny, partial(TinyLM, Experts)), steps=40),
}
SEEN = ("loop", "skips")
PLAIN = ("loop", "accumulated", "albert", "t5", "mixtral")


@contextmanager
def recorded() -> Iterator[list[Use | None]]:
    """What is used inside ``with``; None is a step of the optimizer."""
    trace: list[Use | None] = []
    note, turn_over = Predictor.note, Executor.turn_over

    def note_too(self: Predictor, block: int, phase: Phase) -> bool:
        trace.append(Use(block, phase))
        return note(self, block, phase)

    def turn_over_too(self: Executor) -> None:
        trace.append(None)
        turn_over(self)

    with (
        mock.patch.object(Predictor, "note", note_too),
        mock.patch.object(Executor, "turn_over", turn_over_too),
    ):
        yield trace


if __name__ == "__main__":
    torch.set_num_threads(1)
    TRACES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PROGRAMS:
        with tempfile.TemporaryDirectory() as directory, recorded() as found:
            PROGRAMS[name](Path(directory))
        (TRACES / f"{name}.txt").write_text(to_text(found))
