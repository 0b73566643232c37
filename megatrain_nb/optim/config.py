"""Hyper-parameters of one parameter group, and the numbers one step needs of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatrain_nb.errors import ArgumentError


class Scalars(NamedTuple):
    """What the kernel needs at one step, computed in float64, rounded to float32."""

    grad_scale: np.float32
    """Clip coefficient; negative to maximize."""
    decay: np.float32
    """Factor on the parameter, 1 - lr * weight_decay, or 1."""
    l2: np.float32
    """Share of the parameter added to the gradient (not decoupled), or 0."""
    coupled: bool
    """Whether `l2` applies."""
    lerp: np.float32
    """1 - beta1, or -beta1 where the average is taken from the gradient's end."""
    lerp_tail: np.float32
    """The same, but -0.0 where `lerp` is 0.0, which is beta1=0: signs of zeros."""
    from_grad: bool
    """Whether 1 - beta1 >= 0.5: the average starts from the gradient."""
    beta2: np.float32
    one_minus_beta2: np.float32
    minus_step_size: np.float32
    """-lr / (1 - beta1**step)."""
    bias_correction2_sqrt: np.float32
    eps: np.float32


# What an update computes with has to be an fp32 number.
_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig:
    """Hyper-parameters of AdamW, or of Adam with ``decoupled=False``.

    Parameters
    ----------
    lr, beta1, beta2, eps, weight_decay
        As in torch.optim.AdamW, whose ranges and defaults these are.
    decoupled
        False puts the weight decay into the gradient, as torch.optim.Adam does.
    maximize
        Ascend instead of descend.

    Raises
    ------
    ArgumentError
        A number outside its range.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True
    maximize: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value <= _MOST):
                msg = f"{name}={value!r} is not usable; give a finite number >= 0 (at most {_MOST:.3g})"
                raise ArgumentError(msg)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < 1):
                msg = f"{name}={value!r} is not usable; give a number in [0, 1)"
                raise ArgumentError(msg)
        # The largest numbers that an update makes of them, in any step.
        if max(self.lr / (1 - self.beta1), self.lr * self.weight_decay) > _MOST:
            msg = (
                f"lr={self.lr!r} is not usable with beta1={self.beta1!r} and weight_decay={self.weight_decay!r}: the "
                "update's numbers would not be fp32; give a smaller one"
            )
            raise ArgumentError(msg)

    def scalars(self, step: int, grad_scale: float = 1.0) -> Scalars:
        """Return the kernel's numbers for the step-th update.

        Parameters
        ----------
        step
            1 for the first update.
        grad_scale
            Factor on the gradient: the clip coefficient, 1.0 for none.

        Raises
        ------
        ArgumentError
            A step below 1.
        """
        if step < 1:
            msg = f"step={step!r} is not usable; the first update is step 1"
            raise ArgumentError(msg)
        # In float64, in torch's order; torch keeps its step counter in float32.
        count = float(np.float32(step))
        bias_correction1 = 1 - self.beta1**count
        bias_correction2 = 1 - self.beta2**count
        lerp = np.float32(1 - self.beta1)
        from_grad = bool(lerp >= np.float32(0.5))
        coupled = not self.decoupled and self.weight_decay != 0
        decay = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        return Scalars(
            grad_scale=np.float32(-grad_scale if self.maximize else grad_scale),
            decay=np.float32(decay),
            l2=np.float32(self.weight_decay if coupled else 0.0),
            coupled=coupled,
            lerp=lerp - np.float32(1) if from_grad else lerp,
            lerp_tail=-(np.float32(1) - lerp) if from_grad else lerp,
            from_grad=from_grad,
            beta2=np.float32(self.beta2),
            one_minus_beta2=np.float32(1 - self.beta2),
            minus_step_size=np.float32(-(self.lr / bias_correction1)),
            bias_correction2_sqrt=np.float32(math.sqrt(bias_correction2)),
            eps=np.float32(self.eps),
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
