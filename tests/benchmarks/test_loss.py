"""The study of the codecs' losses does what it says; its results take hours."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megatrain_nb.codec.dynamic import role_of
from tests.benchmarks import loss
from tests.benchmarks.loss import METHODS, Results, Run, draw, read_text, table, train

if TYPE_CHECKING:
    from pathlib import Path

TINY = Run(
    method="fp32",
    seed=0,
    rate=1e-3,
    steps=3,
    batch=2,
    context=16,
    width=64,
    depth=1,
)


@pytest.fixture(scope="module")
def text() -> tuple[torch.Tensor, torch.Tensor]:
    return read_text()


def test_all_methods_train_and_equal_runs_are_equal(
    text: tuple[torch.Tensor, torch.Tensor],
) -> None:
    found = {method: train(replace(TINY, method=method), text) for method in METHODS}
    others = [found[method]["loss"] for method in METHODS if method[-3:] == "bit"]
    assert len({found["fp32"]["loss"], *others}) == 5
    again = train(TINY, text)
    assert again["loss"] == found["fp32"]["loss"]
    bits = {method: result["bits"] for method, result in found.items()}
    assert bits["fp32"] == bits["perturbed"] == 64
    assert bits["2bit"] < bits["3bit"] < bits["4bit"] < bits["8bit"] < 64
    assert bits["2bit"] <= bits["dynamic"] <= bits["4bit"]
    for method in METHODS:
        assert abs(found[method]["loss"] / found["fp32"]["loss"] - 1) < 0.01


def test_a_step_is_that_of_torch(text: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The baseline is plain PyTorch: AdamW, clipping, decay of matrices only."""
    torch.manual_seed(0)
    model = loss.Decoder(TINY.width, TINY.depth, TINY.context)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if is_small(p)], "weight_decay": 0},
        {"params": [p for p in model.parameters() if not is_small(p)]},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1, betas=(0.9, TINY.beta2))
    random = torch.Generator().manual_seed(0)
    for step in range(1, TINY.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = TINY.rate * loss.schedule(step, TINY.steps)
        optimizer.zero_grad()
        model(draw(text[0], TINY.batch, TINY.context, random)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [model(draw(text[1], 32, TINY.context, random)) for _ in range(16)]
    expected = float(torch.stack(losses).mean())
    assert train(TINY, text)["loss"] == pytest.approx(expected, rel=1e-6)


def is_small(param: torch.Tensor) -> bool:
    return loss.small(role_of(tuple(param.shape)))


def test_the_perturbation_is_small(text: tuple[torch.Tensor, torch.Tensor]) -> None:
    some = replace(TINY, steps=12)
    one, other = (train(replace(some, method=m), text) for m in METHODS[:2])
    assert one != other
    assert abs(one["loss"] / other["loss"] - 1) < 1e-4


def test_it_goes_on_where_it_stopped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: tuple[torch.Tensor, torch.Tensor],
) -> None:
    path, trained = tmp_path / "results.jsonl", list[Run]()

    def fake(run: Run, _text: object) -> dict[str, float]:
        trained.append(run)
        return {"loss": 2.0 + run.seed + (run.method == "4bit") / 100, "bits": 8.0}

    monkeypatch.setattr(loss, "train", fake)
    runs = [replace(TINY, seed=seed) for seed in (0, 1)]
    first = Results(path)
    for run in [*runs, runs[0]]:
        first.get(run, text)
    assert trained == runs
    again = Results(path)
    for run in runs:
        again.get(run, text)
        again.get(replace(run, method="4bit"), text)
    assert trained == [*runs, *(replace(run, method="4bit") for run in runs)]
    assert len(path.read_text().splitlines()) == len(trained)
    assert "when" in json.loads(path.read_text().splitlines()[0])
    lines = table(again.finished(), {(TINY.beta2, TINY.steps): TINY.rate})
    rows = [line for line in lines.splitlines() if "`4bit`" in line]
    # Differences of 0.5 % and 0.333 %; t is 6.314 for two seeds.
    assert len(rows) == 1
    assert "| 2 | 2.5100 | 2.5000 | +0.42 % | +0.94 % |" in rows[0]


@pytest.mark.parametrize("best", [2.5e-4, 2e-3, 8e-3])
def test_the_rate_is_that_of_the_best_baseline(
    best: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: tuple[torch.Tensor, torch.Tensor],
) -> None:
    monkeypatch.setattr(
        loss,
        "train",
        lambda run, _text: {"loss": abs(math.log(run.rate / best)), "bits": 64.0},
    )
    results = Results(tmp_path / "results.jsonl")
    assert loss.tuned_rate(results, TINY, (1e-3, 2e-3, 4e-3), text) == best
    rates = [run.rate for run in results.finished()]
    assert min(rates) < best < max(rates)
