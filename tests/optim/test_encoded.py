"""Decode, AdamW, encode in one kernel: the bytes of the three, one after another."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_nb.codec import base
from megatrain_nb.codec.base import BLOCK, Codec, Key
from megatrain_nb.codec.quantised.block_kernels import make_counter
from megatrain_nb.codec.split import Split, join, split
from megatrain_nb.errors import ArgumentError, ModelError, SessionError
from megatrain_nb.optim import adamw, encoded, kernels
from megatrain_nb.optim.adamw import UpdateThreads
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.optim.encoded import EncodedSegment
from tests import naive
from tests.codec.common import QUANTISED, decoded, moments, quantised
from tests.codec.common import encoded as encode
from tests.optim import common
from tests.optim.common import F32, INTERPRETED

# Starred arguments are beyond what mypy follows.
update: Any = encoded.update_encoded
MAX_BLOCKS = 1 if INTERPRETED else 9


def twin(
    param: F32, data: Any, grad: F32, segment: EncodedSegment, grad_scale: float = 1.0
) -> tuple[F32, Any]:
    """The new parameter and the new bytes."""
    x = segment.config.scalars(segment.step, grad_scale)
    m, v = decoded(segment.codec, data, param.size)
    with np.errstate(all="ignore"):
        g = grad * x.grad_scale
        if x.coupled:
            g = naive.fma(param, x.l2, g)
        m = naive.fma(x.lerp, g - m, g if x.from_grad else m)
        v = naive.fma(x.one_minus_beta2 * g, g, v * x.beta2)
        correction = np.float32(1) / x.bias_correction2_sqrt
        denom = naive.fma(np.sqrt(v), correction, x.eps)
        param = naive.fma(param, x.decay, x.minus_step_size * m / denom)
    key = Key(segment.first, segment.step, segment.seed)
    return param, encode(segment.codec, m, v, key)


def work(seed: int, size: int, codec: Codec) -> tuple[F32, Any, F32]:
    """Parameter, encoded moments and gradient."""
    rng = np.random.default_rng(seed)
    m, v = moments(rng, size, rng.uniform(0, 4))
    grad = (2 * np.sqrt(v) * rng.standard_normal(size)).astype(np.float32)
    param = rng.normal(0, 0.02, size).astype(np.float32)
    return param, encode(codec, m, v, Key(0, 1, seed)), grad


def halved(param: F32) -> Split:
    halves = Split(np.zeros(param.size, np.uint16), np.zeros(param.size, np.uint16))
    with np.errstate(all="ignore"):
        split(param, halves)
    return halves


@pytest.mark.parametrize("name", QUANTISED)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, MAX_BLOCKS * BLOCK + 1),
    config=st.sampled_from(list(common.CONFIGS.values())),
    step=st.integers(2, 10**6),
    first=st.integers(0, 2**40).map(lambda block: block * BLOCK % 2**47),
)
@settings(max_examples=5 if INTERPRETED else 60, deadline=None)
def test_bytes_of_decode_adamw_encode(
    name: str, seed: int, size: int, config: AdamWConfig, step: int, first: int
) -> None:
    codec = quantised(name)
    param, data, grad = work(seed, size, codec)
    segment = EncodedSegment(0, size, codec, data, config, step, seed, first)
    new_param, new_data = twin(param, data, grad, segment, 0.37)
    halves = halved(param)
    other = EncodedSegment(0, size, codec, data.copy(), config, step, seed, first)
    with np.errstate(all="ignore"), UpdateThreads(1) as one:
        update(param, grad, [segment], grad_scale=0.37, threads=one)
        update(halves, grad, [other], grad_scale=0.37, threads=one)
        back = np.zeros_like(param)
        join(halves, back)
    assert np.array_equal(data, new_data)
    assert np.array_equal(other.encoded, new_data)
    assert np.array_equal(param.view(np.int32), new_param.view(np.int32))
    assert np.array_equal(back.view(np.int32), new_param.view(np.int32))


@pytest.mark.parametrize("name", base.names())
def test_threads_chunks_and_cuts_leave_no_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, config = base.get(name), common.CONFIGS["decay"]
    size, cut = (BLOCK + 3, BLOCK) if INTERPRETED else (40 * BLOCK + 3, 7 * BLOCK)
    param, _, grad = work(3, size, codec)
    m, v = moments(np.random.default_rng(4), size)
    results = []
    for num_threads, chunk, parts in (
        (1, adamw.CHUNK, [(0, size)]),
        (1 if INTERPRETED else 3, BLOCK, [(0, size)]),
        (1 if INTERPRETED else 2, 3 * BLOCK, [(cut, size), (0, cut)]),
    ):
        monkeypatch.setattr(adamw, "CHUNK", chunk)
        p = param.copy()
        segments = [
            EncodedSegment(
                *(a, b, codec, encode(codec, m[a:b], v[a:b], Key(a, 1, 5))),
                *(config, 2, 5, a),
            )
            for a, b in parts
        ]
        with np.errstate(all="ignore"), UpdateThreads(num_threads) as threads:
            update(p, grad, segments, threads=threads)
        segments.sort(key=lambda segment: segment.start)
        both = [decoded(codec, s.encoded, s.stop - s.start) for s in segments]
        results.append((p, *(np.concatenate(x) for x in zip(*both, strict=True))))
    for other in results[1:]:
        # fp32's tail is another arithmetic, and its place is the parameter's end.
        common.assert_same_bits(results[0], other)


def test_raw_is_adamw_itself() -> None:
    size, codec = 40, base.get("raw")
    rng = np.random.default_rng(0)
    (param, m, v), grad = common.state(rng, size), common.numbers(rng, size)
    data, config = encode(codec, m, v), common.CONFIGS["decay"]
    want = common.by_torch(param, m, v, grad, config=config, step=3)
    segment = EncodedSegment(0, size, codec, data, config, 3)
    with np.errstate(all="ignore"), UpdateThreads(1) as one:
        update(param, grad, [segment], threads=one)
    common.assert_same_bits((param, *decoded(codec, data, size)), want)


def test_raw_may_be_cut_anywhere() -> None:
    """A small parameter of an encoded pack: no blocks, no rounding; only 8 elements that torch takes together."""
    size, codec = 40, base.get("raw")
    rng = np.random.default_rng(0)
    (param, m, v), grad = common.state(rng, size), common.numbers(rng, size)
    want = common.by_torch(param, m, v, grad, config=AdamWConfig(), step=3)
    data = encode(codec, m[:16], v[:16]), encode(codec, m[16:], v[16:])
    segments = [
        EncodedSegment(0, 16, codec, data[0], AdamWConfig(), 3),
        EncodedSegment(16, size, codec, data[1], AdamWConfig(), 3, first=16),
    ]
    with np.errstate(all="ignore"), UpdateThreads(1) as one:
        update(param, grad, segments, threads=one)
    found = [decoded(codec, x, n) for x, n in zip(data, (16, 24), strict=True)]
    got = [np.concatenate(both) for both in zip(*found, strict=True)]
    common.assert_same_bits((param, *got), want)


def test_bf16_gradients_as_the_fp32_ones_they_are() -> None:
    codec, size = quantised("4bit"), BLOCK + 5
    param, data, grad = work(0, size, codec)
    bits = halved(grad).hi
    exact = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    segment = EncodedSegment(0, size, codec, data, AdamWConfig(), 2)
    new_param, new_data = twin(param, data, exact, segment)
    with np.errstate(all="ignore"), UpdateThreads(1) as one:
        update(param, bits, [segment], threads=one)
    assert np.array_equal(data, new_data)
    assert np.array_equal(param, new_param)


def test_odd_parameters_keep_their_bits() -> None:
    codec, size = quantised("4bit"), 3 * BLOCK
    param, data, _ = work(0, size, codec)
    odd = [0x7F800001, 0x7F80C000, 0xFF80C000, 0x7FFFFFFF, 0xFFC00000, 0x7F800000]
    odd += [0x7F7FFFFF, 0x80000000, 0x00000001, 0x3F808000]
    param.view(np.uint32)[3 : 3 + len(odd)] = odd
    param.view(np.uint32)[BLOCK + 3] = 0x80000000  # no block but the first is slow
    still = AdamWConfig(lr=0.0, weight_decay=0.0)
    halves, other = halved(param), data.copy()
    segments = [EncodedSegment(0, size, codec, x, still, 2) for x in (data, other)]
    grad = np.zeros(size, np.float32)
    with np.errstate(all="ignore"), UpdateThreads(1) as one:
        update(param, grad, segments[:1], threads=one)
        update(halves, grad, segments[1:], threads=one)
        back = np.zeros_like(param)
        join(halves, back)
    assert np.array_equal(data, other)
    assert np.array_equal(back.view(np.int32), param.view(np.int32))


def test_elements_in_no_segment_stay() -> None:
    codec, size = quantised("4bit"), BLOCK
    param, data, grad = work(0, size, codec)
    many, grads = np.ones(size + 20, np.float32), np.full(size + 20, np.nan, np.float32)
    many[7:-13], grads[7:-13] = param, grad
    segment = EncodedSegment(7, 7 + size, codec, data, AdamWConfig(), 2)
    new_param, new_data = twin(param, data, grad, segment)
    with np.errstate(all="ignore"), UpdateThreads(1) as one:
        update(many, grads, [segment], threads=one)
    assert np.array_equal(many[7:-13], new_param)
    assert np.array_equal(data, new_data)
    assert (many[:7] == 1).all()
    assert (many[-13:] == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, bf16: bool) -> None:
    codec, size = quantised("4bit"), 2 * BLOCK
    param, data, grad = work(0, size, codec)
    grad[BLOCK + 9] = bad
    before = param.copy(), data.copy()
    segments = [
        EncodedSegment(
            *(k * BLOCK, (k + 1) * BLOCK, codec, data[k * 131 : (k + 1) * 131]),
            *(AdamWConfig(), 2),
            name=f"layer.{k}",
        )
        for k in range(2)
    ]
    given_grad = halved(grad).hi if bf16 else grad
    with (
        np.errstate(all="ignore"),
        UpdateThreads(1) as one,
        pytest.raises(ModelError, match=r"gradient of layer\.1 is not finite"),
    ):
        update(param, given_grad, segments, threads=one)
    assert np.array_equal(param, before[0])
    assert np.array_equal(data, before[1])


def test_a_gradient_of_1e30_stays_in_its_block() -> None:
    for name in QUANTISED:
        codec, size = quantised(name), 2 * BLOCK
        param, data, grad = work(0, size, codec)
        grad[5] = 1e30
        segment = EncodedSegment(0, size, codec, data, AdamWConfig(), 2)
        with np.errstate(all="ignore"), UpdateThreads(1) as one:
            update(param, grad, [segment], threads=one)
        m, v = decoded(codec, data, size)
        assert np.isfinite(param).all()
        assert np.isfinite(m).all()
        assert np.isfinite(v).all()
        assert (v > 0).all()
        assert abs(m[BLOCK:]).max() < 1


ODD = {"zeros": 0.0, "the smallest number": 1e-45, "denormals": 1e-39, "1e30": 1e30}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_odd_gradients_from_the_first_step_on(name: str, value: float) -> None:
    """The twin's bytes and numbers, and nothing but finite ones."""
    codec, size = quantised(name), BLOCK
    param = work(0, size, codec)[0]
    before, data = param.copy(), np.empty(codec.encoded_bytes(size), np.uint8)
    codec.blank(data)
    blank = data.copy()
    grad = np.full(size, value, np.float32)
    grad[1:] *= value != 1e30  # an outlier is one of its block
    still = AdamWConfig(weight_decay=0.0)
    for step in (1, 2, 3):
        segment = EncodedSegment(0, size, codec, data, still, step)
        new_param, new_data = twin(param, data, grad, segment)
        with np.errstate(all="ignore"), UpdateThreads(1) as one:
            update(param, grad, [segment], threads=one)
        assert np.array_equal(data, new_data)
        assert np.array_equal(param.view(np.int32), new_param.view(np.int32))
        assert np.isfinite(param).all()
    assert np.isfinite(decoded(codec, data, size)).all()
    if value == 0:
        assert np.array_equal(param, before)
        assert np.array_equal(data, blank)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "short": (
        {"encoded": np.zeros(9, np.uint8)},
        ArgumentError,
        r"state of w is .*\(9,\)",
    ),
    "first": ({"first": 64}, ArgumentError, "first=64 .*multiple of 128"),
    "step": ({"step": 0}, ArgumentError, "step=0"),
    "stop": ({"stop": BLOCK + 1}, ArgumentError, "0:129 is not within"),
    "codec": ({"codec": "4bit"}, ArgumentError, "'4bit' has no kernel"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_segments_change_nothing(kind: str) -> None:
    changes, error, what = BAD[kind]
    codec = quantised("4bit")
    param, data, grad = work(0, BLOCK, codec)
    good: dict[str, Any] = {
        "start": 0,
        "stop": BLOCK,
        "codec": codec,
        "encoded": data,
        "config": AdamWConfig(),
        "step": 2,
        "name": "w",
    }
    before = param.copy()
    with UpdateThreads(1) as one, pytest.raises(error, match=what):
        update(param, grad, [EncodedSegment(**{**good, **changes})], threads=one)
    assert np.array_equal(param, before)


def test_bad_scale_and_closed_threads_change_nothing() -> None:
    codec = quantised("4bit")
    param, data, grad = work(0, BLOCK, codec)
    before = param.copy()
    segment = EncodedSegment(0, BLOCK, codec, data, AdamWConfig(), 2)
    one = UpdateThreads(1)
    with pytest.raises(ArgumentError, match="grad_scale=nan"):
        update(param, grad, [segment], grad_scale=float("nan"), threads=one)
    one.close()
    with pytest.raises(SessionError, match="closed"):
        update(param, grad, [segment], threads=one)
    assert np.array_equal(param, before)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize("halves", [False, True])
def test_warm_up_leaves_nothing_to_compile(halves: bool) -> None:
    encoded.warm_up("4bit", split=halves)
    kernel: Any = kernels.adamw_encoded
    known = len(kernel.signatures)
    codec = quantised("4bit")
    param, data, grad = work(0, 300, codec)
    segment = EncodedSegment(0, 300, codec, data, AdamWConfig(), 2)
    with UpdateThreads(1) as one:
        update(halved(param) if halves else param, grad, [segment], threads=one)
    assert len(kernel.signatures) == known


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("halves", [False, True])
def test_vectorised(name: str, halves: bool) -> None:
    import numba  # noqa: PLC0415

    codec, kernel = quantised(name), kernels.adamw_encoded
    # A fresh compilation: what the cache returns cannot be inspected.
    fresh = numba.njit(nogil=True, error_model="numpy")(kernel.py_func)  # type: ignore[attr-defined]
    param, data, grad = work(0, BLOCK, codec)
    master = halved(param) if halves else param
    counter = make_counter(Key(0, 1, 0))
    fresh(master, codec.planes(data), grad, AdamWConfig().scalars(2), counter)
    (asm,) = fresh.inspect_asm().values()
    vectors = r"%[yz]mm" if re.search(r"%[xyz]mm", asm) else r"\bv\d+\.4s"
    for instruction in ("sqrt", "div"):
        assert re.search(rf"\w*{instruction}\w*\s.*{vectors}", asm), instruction
    assert len(re.findall(vectors, asm)) > 300
    # Integers of 64 bits: products and conversions that halve the width.
    assert not re.search(r"vpmullq|vcvtu?qq2p|vcvttp[sd]2u?qq", asm)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize("name", QUANTISED)
def test_no_references_are_counted_between_blocks(name: str) -> None:
    """A count is atomic: 20 cycles, and more where two threads hold the same array."""
    import numba  # noqa: PLC0415

    codec, kernel = quantised(name), kernels._update_blocks
    fresh = numba.njit(nogil=True, error_model="numpy")(kernel.py_func)  # type: ignore[attr-defined]
    param, data, grad = work(0, BLOCK, codec)
    rows = param.reshape(-1, BLOCK), codec.planes(data), grad.reshape(-1, BLOCK)
    counter = make_counter(Key(0, 1, 0))
    fresh(*rows, 0, BLOCK, AdamWConfig().scalars(2), counter)
    (asm,) = fresh.inspect_asm().values()
    body = asm[: asm.index(".cfi_endproc")]
    assert len(re.findall("NRT_incref", body)) == 0


@pytest.mark.parametrize("name", QUANTISED)
def test_a_nan_of_v_changes_no_code_beside_it(name: str) -> None:
    codec = quantised(name)
    param, data, grad = work(0, BLOCK, codec)
    param[::3] = np.array([0xFFC00000], np.uint32).view(np.float32)
    config = AdamWConfig(weight_decay=0.1, decoupled=False)
    segment = EncodedSegment(0, BLOCK, codec, data, config, 2)
    _, new_data = twin(param, data, grad, segment, 1.0)
    with np.errstate(all="ignore"), UpdateThreads(1) as one:
        update(param, grad, [segment], threads=one)
    got, want = codec.planes(data), codec.planes(new_data)
    assert np.array_equal(got.v, want.v)
    assert np.array_equal(got.top, want.top)
