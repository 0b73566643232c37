"""Budgets with models of odd shapes: what the error names as the least works, and the kernel counts no more."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megatrain_nb as mt
from tests.runtime.common import differing, opened, report_of, seeded, snapshot, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Odd(nn.Module):
    """An embedding, layers and a head of any proportions."""

    # Cross-entropy goes in chunks where there is little room, and then rounds otherwise.
    cross_entropy = False

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        *,
        tied: bool = False,
        frozen: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        if self.cross_entropy:
            return functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
        loss: Tensor = logits.logsumexp(-1).mean() - logits[..., 0].mean()
        return loss


class Alone(nn.Module):
    """One block is all there is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.only = nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.one_hot(
            ids % self.only.in_features, self.only.in_features
        ).float()
        loss: Tensor = self.only(x).square().mean()
        return loss


SHAPES: dict[str, Callable[[int], nn.Module]] = {
    "huge_embedding": lambda n: Odd(4000 * n, 16, 2),
    "huge_tied": lambda n: Odd(4000 * n, 16, 2, tied=True),
    "many_tiny": lambda n: Odd(64, 8 * n, 60),
    "one_layer": lambda n: Odd(64, 64 * n, 1),
    "alone": lambda n: Alone(96 * n),
    "frozen": lambda n: Odd(64, 64 * n, 6, frozen=4),
    "all_layers_frozen": lambda n: Odd(64, 64 * n, 3, frozen=3),
}


def ids_of(step: int, rows: int = 1) -> Tensor:
    return torch.randint(
        0, 64, (rows, 8), generator=torch.Generator().manual_seed(step)
    )


def train(model: Any, optimizer: Any, step: int) -> None:
    mt.train_step(model, optimizer, [{"ids": ids_of(step)}, {"ids": ids_of(step + 1)}],
                  loss_fn=lambda model, batch: model(**batch) / 2)  # fmt: skip
    with torch.no_grad():
        model(ids_of(9))
    model(ids_of(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_least_that_the_error_names_works(tmp_path: Path, shape: str) -> None:
    def make() -> Any:
        return seeded(lambda: SHAPES[shape](1))

    states = {}
    with opened(tmp_path, max_ram_gb=1e-5), pytest.raises(mt.BudgetError) as error:
        mt.wrap(make())
    named = re.search(r"at least ([\d.]+ \w+)", str(error.value))
    assert named is not None, error.value
    for room in (named[1], "50 MB"):
        with opened(tmp_path, disk=room == named[1], max_ram_gb=room) as session:
            model, optimizer = wrapped(make(), max_grad_norm=1.0)
            for step in range(3):
                train(model, optimizer, step)
            states[room] = snapshot(model, optimizer)
            optimizer.finish()
            assert session.pool.peak_bytes <= session.max_ram_bytes
    first, second = states.values()
    assert differing(first, second) == []


PROCESS = """
import json, sys, warnings
import torch
torch.set_num_threads(1)
from megatrain_nb.runtime import heap, rss
from megatrain_nb.runtime.warmup import load_code
from tests.runtime.test_shapes import *
import megatrain_nb as mt
load_code()
small = SHAPES[sys.argv[3]](1)
functional.cross_entropy(torch.zeros(2, 4, requires_grad=True), torch.zeros(2, dtype=torch.long)).backward()
shape, n, budget = sys.argv[3], int(sys.argv[4]), float(sys.argv[2])
base = rss.resident_bytes()
Odd.cross_entropy = True
model = SHAPES[shape](n)
total = sum(p.numel() * 4 for p in model.parameters())
session = mt.init(sys.argv[1], max_ram_gb=budget)
session._other.base_bytes = base  # the model that is still in RAM counts
model, optimizer = mt.wrap(model, max_grad_norm=1.0)
heap.trim()
meter = rss.PeakMeter()
peaks = []
for step in range(4):
    train(model, optimizer, step)
    peaks.append(meter.read() - base)
    meter.restart()
optimizer.finish()
peaks.append(meter.read() - base)
print(json.dumps({"total": total, "peaks": peaks, "pool": session.pool.peak_bytes}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "size", "budget_gb"),
    [
        ("huge_embedding", 150, 0.36),
        ("huge_tied", 300, 0.36),
        ("many_tiny", 80, 0.15),
        ("one_layer", 48, 0.24),
        ("alone", 40, 0.3),
        ("frozen", 32, 0.24),
    ],
)
def test_the_kernel_counts_no_more_than_the_budget(
    tmp_path: Path, shape: str, size: int, budget_gb: float
) -> None:
    report = report_of(PROCESS, tmp_path, budget_gb, shape, size, timeout=300)
    print(shape, report)
    assert max(report["peaks"]) <= budget_gb * 1e9 * 1.05, report
