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

[Note: division]
A CPU has one unit for roots and divisions, and it is what binds this kernel. All elements
are divided by the same c, so that division can be made of fmas, rounded as a division
is. With z the float nearest to 1 / c and y the one nearest to 1 / c - z,

    q  = fma(a, z, a * y)       one of the two floats next to a / c
    q' = fma(fma(-q, c, a), z, q)

The first is what Brisebarre, Muller and Raina show (2004, IEEE Transactions on Computers
53); its remainder a - q c is a float, and Markstein's theorem (1990, IBM Journal of
Research and Development 34) then says that q' is a / c rounded to nearest. That holds where
nothing underflows or is infinite: a root is at least 2**-75 or 0, c is at most 1, and an
infinity is put in at the end.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import types
from numba.core import codegen
from numba.extending import intrinsic, overload
from numpy import float32 as f4
from numpy import uint32 as u4

from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.kernels import (
    FIRST_ODD_NAN,
    INFINITY,
    is_split,
    join_finite,
    load,
    put,
    row,
    rows,
    store,
    to_bits,
    to_float,
    window,
)
from megatrain_nb.codec.quantised.block_kernels import (
    FACTORS_U4,
    GROUP,
    M_TOP,
    hash_of,
    largest_of,
    magnitude,
    make_block,
    make_scratch,
    max_of,
    scratch_of,
)
from megatrain_nb.codec.quantised.blocks import LANES as HASHES
from megatrain_nb.codec.quantised.kernels import (
    begin_decode,
    begin_encode,
    begin_measure,
    begin_rest,
    cut_levels,
    decode,
    encode,
    encode_rest,
    finish,
    level_of,
    measure,
    put_levels,
    size_of,
)
from megatrain_nb.jit import SPLICED, inlined, kernel, spliced

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


class Inverse(NamedTuple):
    """What divides by one number without a division."""

    divisor: np.float32
    upper: np.float32
    """1 / divisor."""
    lower: np.float32
    """What `upper` lacks of it."""


@inlined
def inverse_of(divisor: np.float32) -> Inverse:
    """Return what `quotient` divides by."""
    upper = f4(f4(1) / divisor)
    return Inverse(divisor, upper, f4(fma(f4(-upper), divisor, f4(1)) / divisor))


@inlined
def quotient(a: np.float32, by: Inverse) -> np.float32:
    """Return ``a / by.divisor``, see [Note: division]."""
    if not _FMA:
        return f4(a / by.divisor)
    near = fma(a, by.upper, f4(a * by.lower))
    exact = fma(fma(f4(-near), by.divisor, a), by.upper, near)
    return exact if a < f4(np.inf) else a


@inlined
def _second_half(
    p: np.float32, m: np.float32, v: np.float32, correction: Inverse, scalars: Scalars
) -> np.float32:
    """Return the new parameter."""
    denom = f4(quotient(np.sqrt(v), correction) + scalars.eps)
    return np.float32(p + f4(f4(scalars.minus_step_size * m) / denom))


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
    correction, lerp = inverse_of(scalars.bias_correction2_sqrt), scalars.lerp
    for i in range(body):
        p, m, g = _first_half(load(master, i), exp_avg[i], load(grad, i), lerp, scalars)
        v = fma(scalars.one_minus_beta2 * g, g, exp_avg_sq[i] * scalars.beta2)
        store(master, i, _second_half(p, m, v, correction, scalars))
        exp_avg[i], exp_avg_sq[i] = m, v
    lerp = scalars.lerp_tail
    for i in range(body, size):
        p, m, g = _first_half(load(master, i), exp_avg[i], load(grad, i), lerp, scalars)
        v = fma(exp_avg_sq[i], scalars.beta2, scalars.one_minus_beta2 * g * g)
        store(master, i, _second_half(p, m, v, correction, scalars))
        exp_avg[i], exp_avg_sq[i] = m, v


@inlined
def _decode_one(
    params: Any,
    planes: Planes,
    grad: Any,
    b: np.uintp,
    header: Any,
    s: Scratch,
    x: Scalars,
    coupled: bool,
    i: int,
    k: int,
    noise: np.uint32,
) -> tuple[np.uint32, np.uint32]:
    """Put the new moments of element i + 16 k; return the size of m and the level of v."""
    j = HASHES * k + i
    m, v = decode(planes, b, header, i, k)
    g = f4(load(grad, j) * x.grad_scale)
    if coupled:
        g = fma(load(params, j), x.l2, g)
    m = fma(x.lerp, f4(g - m), g if x.from_grad else m)
    v = fma(f4(x.one_minus_beta2 * g), g, f4(v * x.beta2))
    # A parameter that is NaN gets to v where decay is coupled, and nowhere else.
    level = level_of(planes, v, noise, coupled)
    correction = f4(f4(1) / x.bias_correction2_sqrt)
    s.m[j] = m
    s.denom[j] = fma(np.sqrt(v), correction, x.eps)
    return size_of(planes, m), level


@spliced
def _decode_block(
    params: Any,
    planes: Planes,
    grad: Any,
    b: np.uintp,
    s: Scratch,
    x: Scalars,
    counter: Counter,
    coupled: bool,
) -> None:
    """Put the new moments of a block, and what its parameters are divided by."""
    q, header = planes, begin_decode(planes, b)
    number = np.uint32(counter.block + np.uint32(b))
    m_top = np.uint32(0)
    for i in range(HASHES):
        at = hash_of(number, i, counter)
        put(s.hash, i, at)
        n = np.uint32(at * FACTORS_U4[0])
        m_0, v_0 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 0, n)
        n = np.uint32(at * FACTORS_U4[1])
        m_1, v_1 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 1, n)
        n = np.uint32(at * FACTORS_U4[2])
        m_2, v_2 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 2, n)
        n = np.uint32(at * FACTORS_U4[3])
        m_3, v_3 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 3, n)
        n = np.uint32(at * FACTORS_U4[4])
        m_4, v_4 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 4, n)
        n = np.uint32(at * FACTORS_U4[5])
        m_5, v_5 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 5, n)
        n = np.uint32(at * FACTORS_U4[6])
        m_6, v_6 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 6, n)
        n = np.uint32(at * FACTORS_U4[7])
        m_7, v_7 = _decode_one(params, q, grad, b, header, s, x, coupled, i, 7, n)
        m_top = max_of(m_top, largest_of((m_0, m_1, m_2, m_3, m_4, m_5, m_6, m_7)))
        put_levels(planes, s, i, (v_0, v_1, v_2, v_3, v_4, v_5, v_6, v_7))
    put(s.number, M_TOP, m_top)


@spliced
def _cut_block(planes: Planes, s: Scratch, size: int) -> None:
    """Make zeros of what lies behind a parameter's end."""
    for i in range(size, BLOCK):
        put(s.m, i, f4(0))
    cut_levels(planes, s, size)


@inlined
def _param(p: np.float32, s: Scratch, i: int, x: Scalars) -> np.float32:
    return fma(p, x.decay, f4(f4(x.minus_step_size * s.m[i]) / s.denom[i]))


def _update_params(params: Any, s: Scratch, x: Scalars) -> None:
    """Update the parameters of a block, fp32 or a `Split`."""
    for i in range(BLOCK):
        store(params, i, _param(load(params, i), s, i, x))


@overload(_update_params, strict=False, inline=SPLICED)
def _compiled_update_params(params: Any, s: Any, x: Any) -> Any:
    if not is_split(params):

        def update(params: Any, s: Any, x: Any) -> None:
            for i in range(BLOCK):
                put(params, i, _param(params[i], s, i, x))

        return update

    def update_halves(params: Any, s: Any, x: Any) -> None:
        # The formula alone, and all again where it does not hold: see [Note: split].
        largest = np.uint32(0)
        for i in range(BLOCK):
            bits = join_finite(params.hi[i], params.lo[i])
            put(s.param, i, _param(to_float(bits), s, i, x))
            largest = max_of(largest, magnitude(to_float(bits)))
        if largest >= FIRST_ODD_NAN:
            for i in range(BLOCK):
                put(s.param, i, _param(load(params, i), s, i, x))
        largest = np.uint32(0)
        for i in range(BLOCK):
            bits = to_bits(s.param[i])
            put(params.hi, i, np.uint16(u4(bits + u4(0x8000)) >> u4(16)))
            put(params.lo, i, np.uint16(bits))
            largest = max_of(largest, magnitude(s.param[i]))
        if largest > INFINITY:
            for i in range(BLOCK):
                store(params, i, s.param[i])

    return update_halves


@kernel
def _update_blocks(
    master: Any,
    planes: Planes,
    grad: Any,
    start: int,
    last: int,
    x: Scalars,
    counter: Counter,
) -> None:
    """Update whole blocks, in groups: see [Note: stages].

    Roots are taken in the first stage and divisions made in the second: the CPU has one
    unit for both, and there is other work in each stage to hide them.

    Parameters
    ----------
    master, grad
        A row for each block.
    planes
        Of all blocks.
    start
        Which of them is the first row's.
    last
        How many elements of the last row count.
    x
        Hyper-parameters.
    counter
        Of the first block of `planes`.
    """
    group, count = make_scratch(), len(grad)
    for first in range(0, count, GROUP):
        here = min(GROUP, count - first)
        for k in range(here):
            b, s = np.uintp(start + first + k), scratch_of(group, np.uintp(k))
            at = np.uintp(first + k)
            params, part = row(master, at), row(grad, at)
            if x.coupled:
                _decode_block(params, planes, part, b, s, x, counter, True)
            else:
                _decode_block(params, planes, part, b, s, x, counter, False)
        if last < BLOCK:
            _cut_block(planes, scratch_of(group, np.uintp(here - 1)), last)
        for k in range(here):
            b, s = np.uintp(start + first + k), scratch_of(group, np.uintp(k))
            begin_encode(planes, b, s)
        for k in range(here):
            s = scratch_of(group, np.uintp(k))
            _update_params(row(master, np.uintp(first + k)), s, x)
            encode(planes, np.uintp(start + first + k), s)
        for k in range(here):
            b, s = np.uintp(start + first + k), scratch_of(group, np.uintp(k))
            begin_measure(planes, b, s)
        for k in range(here):
            b, s = np.uintp(start + first + k), scratch_of(group, np.uintp(k))
            measure(planes, b, s)
        for k in range(here):
            b, s = np.uintp(start + first + k), scratch_of(group, np.uintp(k))
            begin_rest(planes, b, s)
        for k in range(here):
            b, s = np.uintp(start + first + k), scratch_of(group, np.uintp(k))
            encode_rest(planes, b, s)
        for k in range(here):
            b, s = np.uintp(start + first + k), scratch_of(group, np.uintp(k))
            finish(planes, b, s)


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
    whole = grad.size // BLOCK
    start = whole * BLOCK
    params, part = rows(window(master, 0, start)), rows(window(grad, 0, start))
    _update_blocks(params, planes, part, 0, BLOCK, scalars, counter)
    rest = grad.size - start
    if rest:
        param, last = make_block(), make_block()
        for i in range(BLOCK):
            param[0, i], last[0, i] = f4(0), f4(0)
        for i in range(rest):
            param[0, i], last[0, i] = load(master, start + i), load(grad, start + i)
        _update_blocks(param, planes, last, whole, rest, scalars, counter)
        for i in range(rest):
            store(master, start + i, param[0, i])


@kernel
def all_finite(values: Array | U16) -> bool:
    """Return whether no fp32 or bf16 number (uint16) is NaN or infinite."""
    largest = np.uint32(0)
    for i in range(values.size):
        bits = magnitude(load(values, i))
        largest = bits if bits > largest else largest
    return bool(largest < INFINITY)
