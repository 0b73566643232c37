"""AdamW where the moments are encoded: decoded and encoded again inside the kernel."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_nb.codec.arrays import check_array
from megatrain_nb.codec.base import BLOCK, Codec, Key, check_key, get
from megatrain_nb.codec.names import DYNAMIC
from megatrain_nb.codec.quantised.blocks import BlockCodec
from megatrain_nb.codec.raw import Raw
from megatrain_nb.codec.split import Split
from megatrain_nb.errors import ArgumentError, ModelError
from megatrain_nb.optim.adamw import (
    UpdateThreads,
    check_grad,
    check_master,
    check_segments,
    chunk_of,
    cut,
    part_of,
)
from megatrain_nb.optim.config import AdamWConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatrain_nb.codec.base import U8
    from megatrain_nb.codec.kernels import U16, Floats
    from megatrain_nb.optim.adamw import Work
    from megatrain_nb.optim.kernels import Array


# What the quantised codecs have been tried with.
_COARSE = ("2bit", "3bit", DYNAMIC)
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-10


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """One parameter, or a part of one, and its encoded moments.

    Attributes
    ----------
    start, stop
        Its place in the flat arrays, in elements.
    codec
        What `encoded` is in.
    encoded : uint8, shape (codec.encoded_bytes(stop - start),), C-contiguous
        Overwritten.
    config
        Hyper-parameters.
    step
        Which update this is; the first is 1.
    seed
        Of the rounding; one for each parameter.
    first
        Where in its parameter the segment starts, a multiple of `BLOCK`; for `raw` any.
    name
        For messages.
    """

    start: int
    stop: int
    codec: Codec
    encoded: U8 = field(repr=False)
    config: AdamWConfig
    step: int
    seed: int = 0
    first: int = 0
    name: str = "a parameter"


def update_encoded(
    param: Array | Split,
    grad: Array | U16,
    segments: Sequence[EncodedSegment],
    *,
    grad_scale: float = 1.0,
    finite: bool = False,
    threads: UpdateThreads,
) -> None:
    """Apply AdamW to every segment, in place; elements in no segment stay untouched.

    The bytes do not depend on the number of threads, nor on where a parameter is cut.
    Moments are fp32 for four blocks of 128 elements at a time, on the stack.

    Parameters
    ----------
    param : float32, shape (N,), C-contiguous, or `Split` of N
        Overwritten.
    grad : float32 or uint16 (the bits of bf16), shape (N,), C-contiguous
        Only read.
    segments
        Disjoint, in any order.
    grad_scale
        Factor on every gradient: the clip coefficient, 1.0 for none.
    finite
        Whether it is known that every gradient is finite, by their norm for example.
        Else they are all read once before anything is written.
    threads
        Who does it.

    Raises
    ------
    ArgumentError
        Arrays of another kind or length, segments that overlap or run over, a key or
        a scale out of range. Nothing has been changed.
    ModelError
        A gradient of a quantised segment is NaN or infinite. Nothing has been changed.
    SessionError
        The threads are closed.
    """
    size = check_master(param)
    check_grad(grad, size)
    check_segments(segments, size)
    for segment in segments:
        _check(segment)
    if not math.isfinite(grad_scale):
        msg = f"grad_scale={grad_scale!r} is not usable; give a finite number"
        raise ArgumentError(msg)
    calls: deque[Work] = deque()
    chunk = chunk_of(segments, threads.num_threads)
    for segment in segments:
        scalars = segment.config.scalars(segment.step, grad_scale)
        calls.extend(_calls(segment, chunk, param, grad, scalars))
    if not finite:
        _refuse_infinite(grad, segments, threads)
    threads.run(calls)


def warm_up(codec: str, *, split: bool = False) -> None:
    """Compile the kernels of a codec, so that no step waits for it.

    Parameters
    ----------
    codec
        Its name.
    split
        For parameters that are a `Split`; else for float32.

    Raises
    ------
    ArgumentError
        There is no such codec.
    """
    chosen = get(codec)
    halves = np.zeros((2, BLOCK), np.uint16)
    zeros = np.zeros((2, BLOCK), np.float32)
    encoded = np.zeros(chosen.encoded_bytes(BLOCK), np.uint8)
    segment = EncodedSegment(0, BLOCK, chosen, encoded, AdamWConfig(), 1)
    param = Split(halves[0], halves[1]) if split else zeros[0]
    with UpdateThreads(1) as one:
        update_encoded(param, zeros[1], [segment], threads=one)


def caution_of(codec: str, config: AdamWConfig) -> str:
    """Return what is known to go worse with these settings, or nothing.

    Parameters
    ----------
    codec
        Its name, or ``"dynamic"``, which may give 2 or 3 bits.
    config
        Hyper-parameters of the parameters that have it.

    Examples
    --------
    >>> caution_of("2bit", AdamWConfig(beta2=0.9999))
    '2bit moments have been tried with beta1 up to 0.9 and beta2 up to 0.999, not with 0.9 and 0.9999; more steps are averaged, and more roundings: use 4bit or 8bit'
    >>> caution_of("4bit", AdamWConfig())
    ''
    """
    if codec == "raw":
        return ""
    if codec in _COARSE and (config.beta1 > _BETA1 or config.beta2 > _BETA2):
        return (
            f"{codec} moments have been tried with beta1 up to {_BETA1} and beta2 up to {_BETA2}, not with "
            f"{config.beta1} and {config.beta2}; more steps are averaged, and more roundings: use 4bit or 8bit"
        )
    if config.eps < _EPS:
        return (
            f"eps={config.eps}: quantised moments ({codec}) round small exp_avg_sq, and nothing but eps bounds the "
            f"update where gradients vanish; use {_EPS} or more"
        )
    return ""


def _calls(
    segment: EncodedSegment,
    chunk: int,
    param: Array | Split,
    grad: Floats,
    scalars: Any,
) -> Iterator[Work]:
    """Yield one kernel call for each chunk."""
    from megatrain_nb.codec.quantised.block_kernels import (  # noqa: PLC0415
        make_counter,
    )
    from megatrain_nb.optim import kernels  # noqa: PLC0415

    codec, size = segment.codec, segment.stop - segment.start
    if isinstance(codec, BlockCodec):
        planes = codec.planes(segment.encoded)
    else:
        m, v = segment.encoded.view(np.float32).reshape(2, size)
    for part in cut(0, size, chunk):
        place = slice(segment.start + part.start, segment.start + part.stop)
        master, gradient = part_of(param, place), grad[place]
        if isinstance(codec, BlockCodec):
            some = planes.rows(slice(part.start // BLOCK, -(-part.stop // BLOCK)))
            key = Key(segment.first + part.start, segment.step, segment.seed)
            counter = make_counter(key)
            yield partial(
                kernels.adamw_encoded, master, some, gradient, scalars, counter
            )
        else:
            yield partial(kernels.adamw, master, m[part], v[part], gradient, scalars)


def _refuse_infinite(
    grad: Array | U16, segments: Sequence[EncodedSegment], threads: UpdateThreads
) -> None:
    from megatrain_nb.optim import kernels  # noqa: PLC0415

    bad: set[str] = set()

    def look(segment: EncodedSegment, part: slice) -> None:
        if not kernels.all_finite(grad[part]):
            bad.add(segment.name)

    chunk = chunk_of(segments, threads.num_threads)
    looks: deque[Work] = deque(
        partial(look, segment, part)
        for segment in segments
        if isinstance(segment.codec, BlockCodec)
        for part in cut(segment.start, segment.stop, chunk)
    )
    threads.run(looks)
    if bad:
        msg = (
            f"the gradient of {', '.join(sorted(bad))} is not finite (NaN or infinite); "
            f"nothing has been updated. Skip this step, or look for its cause in the "
            f"loss: a quantised block would spread it to {BLOCK} elements"
        )
        raise ModelError(msg)


def _check(segment: EncodedSegment) -> None:
    if not isinstance(segment.codec, Raw | BlockCodec):
        msg = f"{segment.codec!r} has no kernel; decode, update, and encode"
        raise ArgumentError(msg)
    # fp32 moments have no blocks and are not rounded: they may be cut anywhere.
    first = segment.first if isinstance(segment.codec, BlockCodec) else 0
    check_key(Key(first, segment.step, segment.seed))
    size = segment.codec.encoded_bytes(segment.stop - segment.start)
    name = f"the encoded state of {segment.name}"
    check_array(name, segment.encoded, np.uint8, size, writeable=True)
