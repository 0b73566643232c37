from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatrain_nb.codec.lossless import chunks
from megatrain_nb.codec.lossless.chunks import (
    CHUNK_NUMEL,
    DamagedError,
    Packer,
    most_bytes,
    name_of,
    packed_bytes,
)
from megatrain_nb.errors import ArgumentError
from tests.codec.floats import Bits, smooth
from tests.optim.common import INTERPRETED, MAX_EXAMPLES

U8 = NDArray[np.uint8]

GOLDEN = Path(__file__).with_name("golden_lossless.json")
PLAIN, SIGNED, POSITIVE = range(3)
PACKER = Packer(np.zeros(CHUNK_NUMEL, np.uint8))
GUARD = 64

# Zeros, the smallest and largest denormal, the smallest normal, one, the largest, infinity,
# a quiet NaN, NaNs with payloads, a signalling NaN.
CLASSES_32 = (0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FD5A5A5, 0x7F800001)  # fmt: skip
CLASSES_16 = (0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FD5, 0x7F81)


def pack(bits: Bits | U8, item_bytes: int | None = None) -> U8:
    """Pack, and check that nothing is written behind what may be."""
    values = bits.view(np.uint8)
    item_bytes = item_bytes or bits.dtype.itemsize
    room = np.full(most_bytes(values.size) + GUARD, 0xA5, np.uint8)
    size = PACKER.pack(values, item_bytes, room[:-GUARD])
    assert (room[-GUARD:] == 0xA5).all()
    assert size % 16 == 0
    assert packed_bytes(room[:16]) == size
    return room[:size].copy()


def unpack(packed: U8, item_bytes: int, num_bytes: int) -> U8:
    out = np.full(num_bytes + GUARD, 0xA5, np.uint8)
    done = PACKER.unpack(packed, item_bytes, out[:num_bytes])
    assert (out[num_bytes:] == 0xA5).all()
    return out[:done]


def comes_back(bits: Bits | U8, item_bytes: int | None = None) -> U8:
    item_bytes = item_bytes or bits.dtype.itemsize
    packed = pack(bits, item_bytes)
    back = unpack(packed, item_bytes, bits.nbytes)
    assert np.array_equal(back, bits.view(np.uint8))
    return packed


def planes_by_numpy(bits: Bits) -> tuple[int, bytes, bytes]:
    """Return kind, planes and exponents as [Note: chunk] says, in plain numpy."""
    if bits.dtype == np.uint16:
        low = ((bits << 1 | bits >> 15) & 0xFF).astype(np.uint8)
        return SIGNED, low.tobytes(), (bits >> 7 & 0xFF).astype(np.uint8).tobytes()
    wide = bits.astype(np.uint64)
    middle = (wide >> 15 & 0xFF).astype(np.uint8).tobytes()
    exponents = (wide >> 23 & 0xFF).astype(np.uint8).tobytes()
    if wide.size % 16 or (wide >> 31).any():
        words = (wide << 1 | wide >> 31) & 0xFFFF
        return SIGNED, words.astype(np.uint16).tobytes() + middle, exponents
    groups = (wide & 0x7FFF).reshape(16, -1)
    last = groups[15] >> np.arange(15, dtype=np.uint64)[:, None] & 1
    words = groups[:15] | last << 15
    return POSITIVE, words.astype(np.uint16).tobytes() + middle, exponents


# ----------------------------------------------------------------- every bit


@pytest.mark.parametrize("item_bytes", [4, 2])
@pytest.mark.parametrize("negative", [False, True])
def test_every_class_of_float_comes_back(item_bytes: int, negative: bool) -> None:
    classes = CLASSES_32 if item_bytes == 4 else CLASSES_16
    sign = 1 << (8 * item_bytes - 1) if negative else 0
    for count in (16, 1000, 1024):
        bits = smooth(count, item_bytes, signed=False)
        bits[: len(classes)] = [value | sign for value in classes]
        packed = comes_back(bits)
        if count > 16:
            positive = item_bytes == 4 and count % 16 == 0 and not negative
            assert packed[0] == (POSITIVE if positive else SIGNED)


@pytest.mark.parametrize("start", range(0, 2**16, 2**15))
def test_every_bf16_comes_back(start: int) -> None:
    bits = np.repeat(np.arange(start, start + 2**15, dtype=np.uint16), 2)
    assert comes_back(bits)[0] == SIGNED


@given(
    st.sampled_from([np.uint32, np.uint16]),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64),
    st.integers(0, 40),
    st.booleans(),
)
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_any_pattern_comes_back(
    dtype: Any, values: list[int], repeats: int, positive: bool
) -> None:
    bits = np.array(values * (repeats + 1), np.uint64)
    if positive:
        bits &= 0x7FFF7FFF
    comes_back(bits.astype(dtype))


@given(st.binary(min_size=1, max_size=300), st.sampled_from([4, 2]))
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_any_bytes_come_back(data: bytes, item_bytes: int) -> None:
    comes_back(np.frombuffer(data, np.uint8).copy(), item_bytes)


@given(st.sampled_from([4, 2]), st.integers(1, 3000), st.booleans())
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_planes_are_those_of_numpy(item_bytes: int, count: int, signed: bool) -> None:
    bits = smooth(count, item_bytes, signed=signed)
    packed = pack(bits)
    kind, planes, exponents = planes_by_numpy(bits)
    if packed[0] == PLAIN:
        assert count < 1000
        return
    assert packed[0] == kind
    frame = packed[16 + len(planes) :].tobytes()
    assert packed[16 : 16 + len(planes)].tobytes() == planes
    (length,) = struct.unpack_from("<I", packed.data, 8)
    assert zstandard.ZstdDecompressor().decompress(frame[:length]) == exponents


def test_a_whole_chunk_and_memory_that_is_not_aligned() -> None:
    count = 4096 if INTERPRETED else CHUNK_NUMEL
    for signed in (True, False):
        bits = smooth(count, signed=signed)
        packed = comes_back(bits)
        assert packed.size < bits.nbytes * 0.9
        shifted = np.zeros(bits.nbytes + 1, np.uint8)
        shifted[1:] = bits.view(np.uint8)
        assert comes_back(shifted[1:], 4)[0] == PLAIN  # numba takes aligned memory only
        out = np.zeros(bits.nbytes + 1, np.uint8)
        assert PACKER.unpack(packed, 4, out[1:]) == bits.nbytes
        assert np.array_equal(out, shifted)


def test_noise_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    packed = comes_back(noise, 4)
    assert packed[0] == PLAIN
    assert packed.size == most_bytes(4096) == 4096 + 16


# ------------------------------------------------------------------- format


@pytest.mark.parametrize("name", ["signed32", "positive32", "signed16"])
def test_golden_bytes(name: str) -> None:
    packed = np.frombuffer(
        base64.b64decode(json.loads(GOLDEN.read_text())[name]), np.uint8
    )
    item_bytes = int(name[-2:]) // 8
    bits = smooth(1024, item_bytes, signed=name.startswith("signed"))
    back = unpack(packed.copy(), item_bytes, bits.nbytes)
    assert np.array_equal(back, bits.view(np.uint8))
    # What we write now differs at most in the frame, which is zstd's own business.
    kind, planes, _ = planes_by_numpy(bits)
    now = pack(bits)
    assert now[0] == packed[0] == kind
    end = 16 + len(planes)
    assert now[:8].tobytes() == packed[:8].tobytes()
    assert now[12:end].tobytes() == packed[12:end].tobytes()


def test_names() -> None:
    assert [name_of(size) for size in (4, 2)] == ["lossless32", "lossless16"]
    with pytest.raises(ArgumentError, match="exponents"):
        Packer(np.zeros(5, np.uint8))


# ------------------------------------------------------------------- damage


@pytest.mark.parametrize("item_bytes", [4, 2])
@pytest.mark.parametrize("signed", [True, False])
def test_a_chunk_that_is_cut_short(item_bytes: int, signed: bool) -> None:
    bits = smooth(512, item_bytes, signed=signed)
    packed = pack(bits)
    for size in range(0, packed.size, 7):
        with pytest.raises(DamagedError):
            unpack(packed[:size], item_bytes, bits.nbytes)
    with pytest.raises(DamagedError, match="more than expected"):
        unpack(packed, item_bytes, bits.nbytes - 1)
    with pytest.raises(DamagedError, match="other floats"):
        unpack(packed, 6 - item_bytes, 2 * bits.nbytes)


@given(st.data())
@settings(max_examples=3 * MAX_EXAMPLES, deadline=None)
def test_damage_is_an_error_or_other_floats(data: st.DataObject) -> None:
    item_bytes = data.draw(st.sampled_from([4, 2]))
    bits = smooth(512, item_bytes, signed=data.draw(st.booleans()))
    packed = pack(bits)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(0, 15), st.integers(0, packed.size - 1)))
        packed[at] = data.draw(st.integers(0, 255))
    try:
        back = unpack(packed, item_bytes, bits.nbytes)
    except DamagedError:
        return
    assert back.size <= bits.nbytes  # never more: the guard is in unpack()


def test_a_frame_that_says_another_size_gets_no_memory() -> None:
    packed = pack(smooth(512))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))
    start = 16 + 3 * 512
    forged = np.zeros(start + 512, np.uint8)
    forged[:start] = packed[:start]
    forged[start : start + len(bomb[:496])] = np.frombuffer(bomb[:496], np.uint8)
    struct.pack_into("<I", forged.data, 8, min(len(bomb), 496))
    size = packed_bytes(forged)
    assert size is not None
    with pytest.raises(DamagedError, match="not as many"):
        unpack(forged[:size], 4, 2048)


@pytest.mark.parametrize(
    "header",
    [
        (3, 4, 0, 16, 0, 0),
        (1, 3, 0, 16, 0, 0),
        (1, 4, 1, 16, 0, 0),
        (1, 4, 0, 0, 0, 0),
        (1, 4, 0, CHUNK_NUMEL + 1, 0, 0),
        (0, 4, 0, 4 * CHUNK_NUMEL + 1, 0, 0),
        (1, 4, 0, 16, 17, 0),
        (0, 4, 0, 16, 1, 0),
        (2, 4, 0, 17, 0, 0),
        (2, 2, 0, 16, 0, 0),
        (1, 4, 0, 16, 0, 1),
    ],
)
def test_headers_that_nobody_wrote(header: tuple[int, ...]) -> None:
    start = np.frombuffer(struct.pack("<BBHIII", *header), np.uint8)
    with pytest.raises(DamagedError):
        packed_bytes(start)
    assert packed_bytes(start[:15]) is None


def test_warm_up_compiles_all() -> None:
    chunks.warm_up()
