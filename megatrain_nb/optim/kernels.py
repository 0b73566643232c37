"""The AdamW kernel; importing this imports numba.

[Note: torch's rounding]
Bit for bit the numbers of torch.optim.AdamW(fused=True) and Adam(fused=True) on an
x86 CPU, which rounds as follows (found by experiment, torch 2.13; fma rounds once):

    grad' = fma(param, weight_decay, grad)            Adam only
    param' = param * (1 - lr * weight_decay)          AdamW only
    exp_avg' = fma(1 - beta1, grad' - exp_avg, exp_avg)
               fma(-beta1, grad' - exp_avg, grad')    where 1 - beta1 >= 0.5
    exp_avg_sq' = fma((1 - beta2) * grad', grad', exp_avg_sq * beta2)
                  fma(exp_avg_sq, beta2, (1 - beta2) * grad' * grad')    in the tail
    param'' = param' + (-step_size * exp_avg') / (sqrt(exp_avg_sq') / c + eps)

with scalars rounded from float64 to float32 first. The tail is the last numel % 8
elements of a tensor (8 floats are one AVX2 register; torch has no AVX-512 build of
this kernel). An array cut at multiples of 8 therefore gives the same bits as the
whole. Where the CPU has no fma, torch multiplies and adds, and so does this. Not
tried on other architectures: there the last bit may differ, as it does when
ATEN_CPU_CAPABILITY=default forbids torch the fma that the CPU has.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.core import codegen
from numba.extending import intrinsic, overload

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import INFINITY, load, store, window
from megatrain_nb.codec.quantised.block_kernels import (
    begin_params,
    end_params,
    magnitude,
    make_scratch,
    put_noise,
)
from megatrain_nb.codec.quantised.blocks import HALF
from megatrain_nb.codec.quantised.kernels import (
    begin_decode,
    begin_encode,
    decode,
    encode,
    end_encode,
    level_of,
)
from megatrain_nb.jit import inlined, kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain_nb.codec.kernels import U16, Floats
    from megatrain_nb.codec.quantised.block_kernels import Counter, Scratch
    from megatrain_nb.codec.quantised.blocks import Planes
    from megatrain_nb.codec.split import Split
    from megatrain_nb.optim.config import Scalars

    Array = NDArray[np.float32]

LANES = 8
"""Floats in one of torch's vectors: what follows the last full one is the tail."""

_FEATURES: str = codegen.get_host_cpu_features()  # type: ignore[no-untyped-call]
_X86 = platform.machine() in {"x86_64", "AMD64"}
_FMA = not _X86 or "+fma" in _FEATURES.split(",")


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Return a * b + c, rounded once; the plain twin of the instruction."""
    if not _FMA:
        return a * b + c
    # The product is exact in float64. The sum is rounded to odd, so that rounding
    # it again, to float32, gives what one rounding would have given.
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = product + addend
    if np.isfinite(total):
        shift = total - product
        error = (product - (total - shift)) + (addend - shift)
        if error != 0 and not total.view(np.int64) & 1:
            total = np.nextafter(total, np.copysign(np.inf, error))
    return np.float32(total)


@intrinsic
def _llvm_fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if _FMA:
            return builder.fma(*args)
        return builder.fadd(builder.fmul(args[0], args[1]), args[2])

    return types.float32(a, b, c), generate


@overload(fma, strict=False)
def _compiled_fma(a: Any, b: Any, c: Any) -> Any:
    if (a, b, c) == (types.float32,) * 3:
        return lambda a, b, c: _llvm_fma(a, b, c)  # type: ignore[call-arg]
    return None


@kernel
def _first_half(
    p: np.float32, m: np.float32, g: np.float32, lerp: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    """Return the decayed parameter, the new exp_avg and the gradient to square."""
    g = g * scalars.grad_scale
    if scalars.coupled:
        g = fma(p, scalars.l2, g)
    base = g if scalars.from_grad else m
    return p * scalars.decay, fma(lerp, g - m, base), g


@kernel
def _second_half(
    p: np.float32, m: np.float32, v: np.float32, scalars: Scalars
) -> np.float32:
    """Return the new parameter."""
    denom = np.sqrt(v) / scalars.bias_correction2_sqrt + scalars.eps
    return np.float32(p + scalars.minus_step_size * m / denom)


@kernel
def adamw(
    master: Array | Split,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Floats,
    scalars: Scalars,
) -> None:
    """Update parameters and moments in place, in one pass.

    Parameters
    ----------
    master : float32, shape (N,), C-contiguous, or `Split` of N
        Overwritten. A whole parameter, or a part of one that starts a multiple of
        `LANES` after its start and ends so or at its end. A `Split` ends up as the
        halves of what the float32 array would hold.
    exp_avg, exp_avg_sq : float32, shape (N,), C-contiguous
        Overwritten.
    grad : float32 or uint16 (the bits of bf16), shape (N,), C-contiguous
        Only read.
    scalars
        From ``AdamWConfig.scalars``.
    """
    size = exp_avg.size
    body = size - size % LANES
    lerp = scalars.lerp
    for i in range(body):
        p, m, g = _first_half(load(master, i), exp_avg[i], load(grad, i), lerp, scalars)
        v = fma(scalars.one_minus_beta2 * g, g, exp_avg_sq[i] * scalars.beta2)
        store(master, i, _second_half(p, m, v, scalars))
        exp_avg[i], exp_avg_sq[i] = m, v
    lerp = scalars.lerp_tail
    for i in range(body, size):
        p, m, g = _first_half(load(master, i), exp_avg[i], load(grad, i), lerp, scalars)
        v = fma(exp_avg_sq[i], scalars.beta2, scalars.one_minus_beta2 * g * g)
        store(master, i, _second_half(p, m, v, scalars))
        exp_avg[i], exp_avg_sq[i] = m, v


@inlined
def _moments(
    p: np.float32, m: np.float32, v: np.float32, g: np.float32, x: Scalars
) -> tuple[np.float32, np.float32]:
    _, m, g = _first_half(p, m, g, x.lerp, x)
    return m, fma(x.one_minus_beta2 * g, g, v * x.beta2)


@inlined
def _denom(v: np.float32, correction: np.float32, x: Scalars) -> np.float32:
    return fma(np.sqrt(v), correction, x.eps)


@inlined
def _param(p: np.float32, m: np.float32, denom: np.float32, x: Scalars) -> np.float32:
    return fma(p, x.decay, np.float32(np.float32(x.minus_step_size * m) / denom))


@inlined
def _update_block(
    master: Any,
    planes: Planes,
    grad: Floats,
    b: Any,
    size: int,
    s: Scratch,
    x: Scalars,
    counter: Counter,
) -> None:
    """Update one block.

    Roots are taken in the first pass and divisions made in the second: the CPU has one
    unit for both, and there is other work in each pass to hide them.
    """
    params = begin_params(master, s)
    put_noise(s, np.uint32(counter.block + np.uint32(b)), counter)
    header = begin_decode(planes, b, s)
    correction = np.float32(np.float32(1) / x.bias_correction2_sqrt)
    largest = np.uint32(0)
    for i in range(HALF):
        j = i + HALF
        m_0, m_1, v_0, v_1 = decode(planes, b, s, header, i)
        p_0 = p_1 = np.float32(0)
        if x.coupled:  # else the parameter is not needed yet
            p_0, p_1 = params[i], params[j]
        m_0, v_0 = _moments(p_0, m_0, v_0, load(grad, i), x)
        m_1, v_1 = _moments(p_1, m_1, v_1, load(grad, j), x)
        s.m[i], s.m[j] = m_0, m_1
        s.denom[i] = _denom(v_0, correction, x)
        s.denom[j] = _denom(v_1, correction, x)
        s.v_code[i] = level_of(planes, v_0, s.noise[i])
        s.v_code[j] = level_of(planes, v_1, s.noise[j])
        bits_0, bits_1 = magnitude(m_0), magnitude(m_1)
        bits = bits_0 if bits_0 > bits_1 else bits_1
        largest = bits if bits > largest else largest
    for i in range(size, BLOCK):
        s.m[i], s.v_code[i] = np.float32(0), np.uint32(0)
    state, largest = begin_encode(planes, b, s, largest), np.uint32(0)
    for i in range(HALF):
        j = i + HALF
        params[i] = _param(params[i], s.m[i], s.denom[i], x)
        params[j] = _param(params[j], s.m[j], s.denom[j], x)
        bits = encode(planes, b, s, state, i)
        largest = bits if bits > largest else largest
    end_encode(planes, b, s, largest)
    end_params(master, s)


@kernel
def adamw_encoded(
    master: Array | Split,
    planes: Planes,
    grad: Floats,
    scalars: Scalars,
    counter: Counter,
) -> None:
    """Decode the moments, update, encode them again, block by block.

    The numbers of decoding, `adamw` and encoding, but for the last bit: the division
    by the bias correction is a multiplication here, what can be fused is, and there is
    no tail.

    Parameters
    ----------
    master : float32, shape (N,), C-contiguous, or `Split` of N
        Overwritten.
    planes
        The encoded moments; overwritten.
    grad : float32 or uint16 (the bits of bf16), shape (N,), C-contiguous
        Only read.
    scalars
        From ``AdamWConfig.scalars``.
    counter
        Of the first block.
    """
    s = make_scratch()
    whole = grad.size // BLOCK
    for block in range(whole):
        first = block * BLOCK
        part = window(grad, first, first + BLOCK)
        here = window(master, first, first + BLOCK)
        # Unsigned: a signed place could count from the end, and numba would ask.
        _update_block(here, planes, part, np.uintp(block), BLOCK, s, scalars, counter)
    start = whole * BLOCK
    rest = grad.size - start
    if rest:
        param, part = s.param, s.grad
        for i in range(BLOCK):
            param[i], part[i] = np.float32(0), np.float32(0)
        for i in range(rest):
            param[i], part[i] = load(master, start + i), load(grad, start + i)
        last = np.uintp(whole)
        _update_block(param, planes, part, last, rest, s, scalars, counter)
        for i in range(rest):
            store(master, start + i, param[i])


@kernel
def all_finite(values: Array | U16) -> bool:
    """Return whether no fp32 or bf16 number (uint16) is NaN or infinite."""
    largest = np.uint32(0)
    for i in range(values.size):
        bits = magnitude(load(values, i))
        largest = bits if bits > largest else largest
    return bool(largest < INFINITY)
