"""The optimizer as people use optimizers: taken over, made twice, scheduled, clipped, saved."""

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
)

if TYPE_CHECKING:
    from pathlib import Path


def groups_of(model: Any) -> list[dict[str, Any]]:
    decay = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() < 2]
    return [
        {"params": decay, "weight_decay": 0.1, "lr": 1e-2},
        {"params": rest, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("disk", [True, False])
def test_an_optimizer_in_the_middle_of_training_is_taken_over(
    tmp_path: Path, kind: Any, disk: bool
) -> None:
    plain = seeded(TinyLM)
    theirs = kind(groups_of(plain), fused=True)
    plain_step(plain, theirs, 0)
    streamed = copy.deepcopy(plain)
    optimizer = kind(groups_of(streamed))
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    with opened(tmp_path, disk=disk):
        streamed, mine = mt.wrap(streamed, optimizer)
        for step in range(1, 4):
            plain_step(plain, theirs, step)
            plain_step(streamed, mine, step)
        found, expected = snapshot(streamed, mine), snapshot(plain, theirs)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)


def test_state_dict_goes_out_and_in(tmp_path: Path) -> None:
    streamed = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(streamed)
        window_step(streamed, optimizer, 0)
        before = snapshot(streamed, optimizer)
        state = optimizer.state_dict()
        kept = {
            key: {name: value.clone() for name, value in values.items()}
            for key, values in state["state"].items()
        }
        window_step(streamed, optimizer, 1)
        optimizer.load_state_dict(
            {"state": kept, "param_groups": state["param_groups"]}
        )
        after = snapshot(streamed, optimizer)
        assert {name for name in differing(before, after) if ":" in name} == set()


def test_a_second_wrap_starts_with_a_fresh_state(tmp_path: Path) -> None:
    streamed = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(streamed)
        window_step(streamed, optimizer, 0)
        _, optimizer = mt.wrap(streamed)
        window_step(streamed, optimizer, 0)
        assert optimizer.state[streamed.head.weight]["step"] == 1


def test_a_scheduler_made_before_wrap_works_or_is_refused(tmp_path: Path) -> None:
    streamed = seeded(TinyLM)
    old = torch.optim.AdamW(streamed.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(old, lambda step: 0.5**step)
    with opened(tmp_path):
        _, optimizer = mt.wrap(streamed, old)
        plain_step(streamed, optimizer, 0)
        try:
            scheduler.step()
        except mt.MegatrainError:
            return
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_made_after_wrap_works(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path):
        _, mine = mt.wrap(streamed, lr=1e-2)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        for model, optimizer in ((plain, theirs), (streamed, mine)):
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=1e-2, total_steps=6
            )
            for step in range(3):
                plain_step(model, optimizer, step)
                scheduler.step()
        for name, value in snapshot(plain).items():
            torch.testing.assert_close(
                streamed.get_parameter(name).detach().clone(),
                value,
                rtol=1e-6,
                atol=1e-8,
            )


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    streamed = copy.deepcopy(plain)
    with opened(tmp_path):
        for model in (plain, streamed):
            params = list(model.parameters())
            pair: list[Any] = [
                torch.optim.AdamW(part, fused=True) for part in (params[:5], params[5:])
            ]
            if model is streamed:
                try:
                    pair = [mt.wrap(model, optimizer)[1] for optimizer in pair]
                except mt.MegatrainError:
                    return
            loss_of(model, batch(0)).backward()
            for optimizer in pair:
                try:
                    optimizer.step()
                except mt.ModelError:
                    return  # one optimizer for each model: the first was replaced
                optimizer.zero_grad()
        for name, value in snapshot(plain).items():
            torch.testing.assert_close(
                streamed.get_parameter(name).detach().clone(), value
            )


def test_a_module_that_is_added_after_wrap(tmp_path: Path) -> None:
    streamed = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(streamed)
        streamed.extra = nn.Linear(16, 16)
        optimizer.add_param_group({"params": list(streamed.extra.parameters())})
        streamed.norm.register_forward_hook(lambda _m, _a, y: streamed.extra(y))
        loss_of(streamed, batch(0)).backward()
        assert streamed.extra.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        assert streamed.extra.weight.grad is None


def test_zero_grad_with_zeros(tmp_path: Path) -> None:
    streamed = seeded(TinyLM)
    with opened(tmp_path):
        _, optimizer = mt.wrap(streamed)
        loss_of(streamed, batch(0)).backward()
        optimizer.zero_grad(set_to_none=False)
        before = snapshot(streamed)
        optimizer.step()
        assert differing(before, snapshot(streamed)) != []


@pytest.mark.parametrize("value", [-1, 0, float("nan"), float("inf"), "1"])
def test_max_grad_norm_must_be_a_positive_number(tmp_path: Path, value: Any) -> None:
    with opened(tmp_path), pytest.raises(mt.ArgumentError, match="max_grad_norm"):
        mt.wrap(seeded(TinyLM), max_grad_norm=value)


def test_hyper_parameters_beside_an_optimizer_are_refused(tmp_path: Path) -> None:
    streamed = seeded(TinyLM)
    optimizer = torch.optim.AdamW(streamed.parameters(), lr=1e-4)
    with opened(tmp_path), pytest.raises(mt.ArgumentError, match="lr"):
        mt.wrap(streamed, optimizer, lr=5.0)


@pytest.mark.parametrize(
    "arguments",
    [{"lr": -1}, {"eps": float("nan")}, {"betas": (0.9, 1.0)}, {"weight_decay": -1}],
)
def test_hyper_parameters_are_checked(tmp_path: Path, arguments: Any) -> None:
    streamed = seeded(TinyLM)
    with opened(tmp_path):
        with pytest.raises(mt.ArgumentError, match="is not usable"):
            mt.wrap(streamed, **arguments)
        _, optimizer = mt.wrap(streamed)
        plain_step(streamed, optimizer, 0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (torch.optim.SGD, "SGD"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "amsgrad"),
        (
            lambda params: torch.optim.AdamW(params, differentiable=True),
            "differentiable",
        ),
        (lambda _: torch.optim.AdamW([nn.Parameter(torch.ones(3))]), "shape"),
    ],
)
def test_optimizers_that_cannot_be_taken_over(
    tmp_path: Path, make: Any, match: str
) -> None:
    streamed = seeded(TinyLM)
    with opened(tmp_path), pytest.raises(mt.ArgumentError, match=match):
        mt.wrap(streamed, make(list(streamed.parameters())))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])
def test_poisoned_memory_does_not_show(
    tmp_path: Path, tied: bool, disk: bool, window: bool
) -> None:
    """What is given back becomes NaN at once, in every session of these tests: nothing reads it."""
    plain = seeded(lambda: TinyLM(tied=tied))
    streamed = copy.deepcopy(plain)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with opened(tmp_path, disk=disk):
        _, mine = mt.wrap(streamed)
        for step in range(3):
            plain_step(plain, theirs, step)
            (window_step if window else plain_step)(streamed, mine, step)
            assert streamed.embed.weight.isfinite().all()
        for name, value in snapshot(plain).items():
            found = streamed.get_parameter(name).detach().clone()
            torch.testing.assert_close(found, value, rtol=0, atol=5e-7)


def poisoned_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids[:, :-1])
    for index, layer in enumerate(model.layers):
        x = layer(x)
        if index == 1:
            x = x * float("inf")
    return torch.as_tensor(model.head(model.norm(x)).mean())


@pytest.mark.parametrize("disk", [True, False])
def test_a_gradient_that_is_not_finite_stops_the_step(
    tmp_path: Path, disk: bool
) -> None:
    with opened(tmp_path, disk=disk):
        model, optimizer = mt.wrap(seeded(TinyLM))
        window_step(model, optimizer, 0)
        before = snapshot(model, optimizer)
        with pytest.raises(
            mt.ModelError, match=r"gradient of \S+ is not finite .* step 2"
        ):
            mt.train_step(
                model,
                optimizer,
                [{"ids": batch(1)}],
                loss_fn=lambda model, each: poisoned_loss(model, each["ids"]),
            )
        assert differing(before, snapshot(model, optimizer)) == []
        window_step(model, optimizer, 1)


def test_a_gradient_that_is_not_finite_may_be_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = seeded(TinyLM)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in (0, 2):
        plain_step(plain, theirs, step)
    with opened(tmp_path):
        model, optimizer = mt.wrap(seeded(TinyLM), nonfinite="skip")
        window_step(model, optimizer, 0)
        result = mt.train_step(
            model,
            optimizer,
            [{"ids": batch(1)}],
            loss_fn=lambda model, each: poisoned_loss(model, each["ids"]),
        )
        assert result.step == 2
        assert "step 2 skipped: the gradient of" in caplog.text
        window_step(model, optimizer, 2)
        assert differing(snapshot(plain, theirs), snapshot(model, optimizer)) == []


def test_nonfinite_is_stop_or_skip(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(mt.ArgumentError, match=r'"stop" or "skip"'):
        mt.wrap(seeded(TinyLM), nonfinite="ignore")
