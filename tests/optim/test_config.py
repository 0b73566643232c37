from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from megatrain_nb.errors import ArgumentError
from megatrain_nb.optim.config import AdamWConfig

OUT_OF_RANGE = [
    ("lr", -1e-3),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("beta1", 1.0),
    ("beta1", -0.1),
    ("beta2", 1.0),
    ("beta2", -0.1),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_ranges_are_torchs(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}={value!r} .*give a"):
        AdamWConfig(**{name: value})  # type: ignore[arg-type]
    betas = {"beta1": (value, 0.999), "beta2": (0.9, value)}
    arguments = {"betas": betas[name]} if name in betas else {name: value}
    with pytest.raises(ValueError, match="Invalid"):
        torch.optim.AdamW([torch.zeros(1)], **arguments)


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.1", None, True])
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "beta1", "beta2"])
def test_not_a_number(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        AdamWConfig(**{name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 1e306},
        {"lr": 10**400},
        {"eps": 1e39},
        {"weight_decay": 1e39},
        {"lr": 1e38, "beta1": 0.999},
        {"lr": 1e20, "weight_decay": 1e20},
    ],
)
def test_what_would_be_no_fp32_number_is_refused(given: dict[str, Any]) -> None:
    """Torch makes infinities and then NaN of it."""
    with pytest.raises(ArgumentError, match=r"is not usable.*; give a"):
        AdamWConfig(**given)


def test_the_largest_that_are_allowed_have_numbers() -> None:
    for config in (AdamWConfig(lr=3e37), AdamWConfig(lr=1e-9, weight_decay=3e38)):
        for step in (1, 2, 1000):
            assert all(math.isfinite(x) for x in config.scalars(step))


def test_ends_of_the_ranges_are_allowed() -> None:
    AdamWConfig(lr=0, beta1=0, beta2=0, eps=0, weight_decay=0)


def test_defaults_are_torchs() -> None:
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    config = AdamWConfig()
    assert (config.lr, config.eps) == (defaults["lr"], defaults["eps"])
    assert (config.beta1, config.beta2) == defaults["betas"]
    assert config.weight_decay == defaults["weight_decay"]
    assert config.maximize == defaults["maximize"]


def test_is_a_value() -> None:
    assert AdamWConfig(lr=0.1) == AdamWConfig(lr=0.1)
    assert len({AdamWConfig(), AdamWConfig(), AdamWConfig(lr=0.1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        AdamWConfig().lr = 0.1  # type: ignore[misc]


def test_scalars() -> None:
    scalars = AdamWConfig(lr=0.1, beta1=0.5, beta2=0.75).scalars(2, grad_scale=0.25)
    assert scalars.minus_step_size == np.float32(-0.1 / 0.75)
    assert scalars.bias_correction2_sqrt == np.float32(math.sqrt(0.4375))
    assert scalars.grad_scale == np.float32(0.25)
    assert scalars.decay == np.float32(1 - 0.1 * 0.01)
    assert scalars.from_grad
    assert scalars.lerp == scalars.lerp_tail == np.float32(-0.5)
    assert not scalars.coupled
    for value in scalars:
        assert isinstance(value, np.float32 | bool)


def test_maximize_turns_the_gradient() -> None:
    assert AdamWConfig(maximize=True).scalars(1, 0.5).grad_scale == np.float32(-0.5)


@pytest.mark.parametrize("step", [0, -1])
def test_first_step_is_one(step: int) -> None:
    with pytest.raises(ArgumentError, match=rf"step={step} .*step 1"):
        AdamWConfig().scalars(step)
