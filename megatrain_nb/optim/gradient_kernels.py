"""Kernels for gradients; importing this imports numba."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_nb.codec.kernels import load
from megatrain_nb.jit import kernel

if TYPE_CHECKING:
    from megatrain_nb.codec.kernels import F32, U16


@kernel
def widen(total: F32, grad: U16) -> None:
    """Write bf16 numbers as fp32; both arrays of one length."""
    for i in range(total.size):
        total[i] = load(grad, i)


@kernel
def add(total: F32, grad: U16) -> None:
    """Add bf16 numbers to fp32 ones; both arrays of one length."""
    for i in range(total.size):
        total[i] += load(grad, i)
