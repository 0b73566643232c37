"""Plain numpy twins of the kernels: slow, obvious, the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatrain_nb.optim.config import AdamWConfig

F32 = NDArray[np.float32]


def fma(a: F32 | np.float32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a * b + c, rounded once to float32."""
    # The product of two float32 is exact in float64. The sum is not, so it is rounded
    # to odd first (Boldo and Melquiond, 2008): the neighbour with an odd last bit.
    product = np.asarray(np.asarray(a, np.float64) * np.asarray(b, np.float64))
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    shift = total - product
    error = (product - (total - shift)) + (addend - shift)
    even = total.view(np.int64) % 2 == 0
    inexact = np.isfinite(total) & (error != 0) & even
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where(inexact, odd, total).astype(np.float32)


def adamw(
    param: F32,
    exp_avg: F32,
    exp_avg_sq: F32,
    grad: F32,
    *,
    config: AdamWConfig,
    step: int,
    grad_scale: float = 1.0,
) -> tuple[F32, F32, F32]:
    """The new parameter and moments of one whole parameter."""
    f32 = np.float32
    with np.errstate(all="ignore"):
        grad = grad * f32(grad_scale)
        if config.maximize:
            grad = -grad
        if config.weight_decay and config.decoupled:
            param = param * f32(1 - config.lr * config.weight_decay)
        elif config.weight_decay:
            grad = fma(param, f32(config.weight_decay), grad)
        in_body = np.arange(grad.size) < grad.size // 8 * 8
        weight = f32(1 - config.beta1)
        if weight < f32(0.5):
            exp_avg = fma(weight, grad - exp_avg, exp_avg)
        else:
            weights = np.where(in_body, weight - f32(1), -(f32(1) - weight))
            exp_avg = fma(weights, grad - exp_avg, grad)
        beta2, weight = f32(config.beta2), f32(1 - config.beta2)
        body = fma(weight * grad, grad, exp_avg_sq * beta2)
        tail = fma(exp_avg_sq, beta2, weight * grad * grad)
        exp_avg_sq = np.where(in_body, body, tail)
        correction = f32(np.sqrt(1 - config.beta2**step))
        step_size = f32(config.lr / (1 - config.beta1**step))
        denom = np.sqrt(exp_avg_sq) / correction + f32(config.eps)
        param = (param - step_size * exp_avg / denom).astype(f32)
        return param, exp_avg, exp_avg_sq
