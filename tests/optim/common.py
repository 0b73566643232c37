"""What the optimizer's tests share: awkward numbers, torch's answer, bit equality."""

from __future__ import annotations

import os

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatrain_nb.optim.config import AdamWConfig

F32 = NDArray[np.float32]

# Without the compiler a kernel does some 20 000 elements per second.
INTERPRETED = os.environ.get("NUMBA_DISABLE_JIT") == "1"
MAX_NUMEL = 40 if INTERPRETED else 3000
MAX_EXAMPLES = 15 if INTERPRETED else 100

CONFIGS = {
    "default": AdamWConfig(),
    "decay": AdamWConfig(lr=3e-2, weight_decay=0.1),
    "no decay": AdamWConfig(lr=1e-2, weight_decay=0.0),
    "llm": AdamWConfig(lr=3e-4, beta2=0.95, eps=1e-6, weight_decay=0.1),
    "small beta1": AdamWConfig(lr=1e-2, beta1=0.3),
    "beta1 one half": AdamWConfig(lr=1e-2, beta1=0.5, beta2=0.5),
    "no momentum": AdamWConfig(lr=1e-2, beta1=0.0, beta2=0.0),
    "maximize": AdamWConfig(lr=1e-2, maximize=True),
    "zeros": AdamWConfig(lr=0.0, eps=0.0, weight_decay=0.0),
    "adam": AdamWConfig(lr=1e-2, weight_decay=0.1, decoupled=False),
    "adam no decay": AdamWConfig(lr=1e-2, weight_decay=0.0, decoupled=False),
    "adam up": AdamWConfig(weight_decay=0.1, decoupled=False, maximize=True),
    "adam small beta1": AdamWConfig(beta1=0.3, weight_decay=0.1, decoupled=False),
}


def configs() -> st.SearchStrategy[AdamWConfig]:
    """Any hyper-parameters that torch takes."""
    return st.builds(
        AdamWConfig,
        lr=st.floats(0, 1),
        beta1=st.floats(0, 0.9999),
        beta2=st.floats(0, 0.99999),
        eps=st.floats(0, 1e-3),
        weight_decay=st.floats(0, 1),
        decoupled=st.booleans(),
        maximize=st.booleans(),
    )


def numbers(rng: np.random.Generator, size: int) -> F32:
    """Normal numbers over many magnitudes, among them denormals and both zeros."""
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-4, 2, size)
    kind = rng.integers(0, 12, size)
    values[kind == 0] = 0.0
    values[kind == 1] = -0.0
    values[kind == 2] *= 1e-42
    values[kind == 3] *= 1e-20
    return values.astype(np.float32)


def state(rng: np.random.Generator, size: int) -> tuple[F32, F32, F32]:
    """A parameter and moments as training might have left them."""
    return numbers(rng, size), numbers(rng, size), np.square(numbers(rng, size))


def by_torch(
    param: F32,
    exp_avg: F32,
    exp_avg_sq: F32,
    grad: F32,
    *,
    config: AdamWConfig,
    step: int,
    grad_scale: float = 1.0,
) -> tuple[F32, F32, F32]:
    """The answer of torch.optim's fused AdamW or Adam for one step."""
    parameter = torch.nn.Parameter(torch.from_numpy(param.copy()))
    parameter.grad = torch.from_numpy(grad.copy()).mul_(grad_scale)
    kind = torch.optim.AdamW if config.decoupled else torch.optim.Adam
    optimizer = kind(
        [parameter],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        maximize=config.maximize,
        fused=True,
    )
    moments = [torch.from_numpy(exp_avg.copy()), torch.from_numpy(exp_avg_sq.copy())]
    optimizer.state[parameter] = {
        "step": torch.tensor(step - 1.0),
        "exp_avg": moments[0],
        "exp_avg_sq": moments[1],
    }
    optimizer.step()
    return parameter.detach().numpy(), moments[0].numpy(), moments[1].numpy()


def assert_same_bits(ours: tuple[F32, ...], theirs: tuple[F32, ...]) -> None:
    """Equal to the bit; a NaN equals any NaN."""
    for name, x, y in zip(
        ("param", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True
    ):
        same = (x.view(np.int32) == y.view(np.int32)) | (np.isnan(x) & np.isnan(y))
        bad = np.flatnonzero(~same)
        found = f"{x[bad[:3]]} instead of {y[bad[:3]]}"
        assert not bad.size, f"{name} differs at {bad[:9]} of {x.size}: {found}"
