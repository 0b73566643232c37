"""The contract of a codec: Adam's two moments of N elements to bytes, and back.

[Note: codec]
A codec is a value: a name and a version say all. It encodes both moments together, since
one may help to encode the other. It says how many bytes N elements take before there are
any. Its bytes depend on the moments and the `Key` only, not on threads, chunks, machine
or time, so that a run that is resumed goes on bit for bit.

For every codec, with c any bytes that it has made, whatever the keys:

- ``encode(decode(c)) == c``, byte for byte: to store again changes nothing;
- 0 in `exp_avg` stays 0, and `exp_avg` shrinks where gradients are 0;
- `exp_avg_sq` decodes to a positive number, except in `raw`, which keeps its bits.

Only `raw` here gives back what it was given. The quantised ones are lossy, and say so in
docs/codecs.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from megatrain_nb.codec.arrays import check_array
from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]

BLOCK = 128
"""Elements that share a scale. Parts of a parameter are cut at multiples of it."""


class Key(NamedTuple):
    """What rounding depends on beside the number: a counter, no state.

    Attributes
    ----------
    first
        Place of the first element in its parameter, a multiple of `BLOCK`.
    step
        Which update this is.
    seed
        One for each parameter, else two would round alike.
    """

    first: int
    step: int
    seed: int


class Codec(ABC):
    """One way to store `exp_avg` and `exp_avg_sq`, see [Note: codec].

    Attributes
    ----------
    name
        As users write it, and as it is stored.
    version
        Of the format; a change of a byte is a new version.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Return the exact size of ``numel`` encoded elements."""

    def blank(self, out: U8) -> None:
        """Write the moments of a parameter that was never updated: encoded zeros.

        Parameters
        ----------
        out : uint8, shape (encoded_bytes(N),), C-contiguous
            Overwritten, every byte of it. For `raw` zeros; a quantised `exp_avg_sq`
            is the smallest number that there is.

        Examples
        --------
        >>> out = np.empty(131, np.uint8)
        >>> get("4bit").blank(out)
        >>> m, v = np.empty((2, 128), np.float32)
        >>> get("4bit").decode(out, m, v)
        >>> bool(m.any()), float(v.max()) == 2.0**-126
        (False, True)
        """
        check_array("out", out, np.uint8, out.size, writeable=True)
        self._blank(out)

    @abstractmethod
    def _blank(self, out: U8) -> None: ...

    @abstractmethod
    def _encode(self, exp_avg: F32, exp_avg_sq: F32, out: U8, key: Key) -> None: ...

    @abstractmethod
    def _decode(self, encoded: U8, exp_avg: F32, exp_avg_sq: F32) -> None: ...

    def encode(self, exp_avg: F32, exp_avg_sq: F32, out: U8, key: Key) -> None:
        """Write the encoded moments.

        Parameters
        ----------
        exp_avg, exp_avg_sq : float32, shape (N,), C-contiguous
            Only read. Finite, and `exp_avg_sq` not negative.
        out : uint8, shape (encoded_bytes(N),), C-contiguous
            Overwritten, every byte of it.
        key
            Where these elements are and which update this is.

        Raises
        ------
        ArgumentError
            An array of another kind or length, or a key out of range; then nothing
            has been written.
        """
        size = self._check_moments(exp_avg, exp_avg_sq, writeable=False)
        check_array("out", out, np.uint8, self.encoded_bytes(size), writeable=True)
        check_key(key)
        self._encode(exp_avg, exp_avg_sq, out, key)

    def decode(self, encoded: U8, exp_avg: F32, exp_avg_sq: F32) -> None:
        """Write the decoded moments.

        Parameters
        ----------
        encoded : uint8, shape (encoded_bytes(N),), C-contiguous
            From `encode`; only read.
        exp_avg, exp_avg_sq : float32, shape (N,), C-contiguous
            Overwritten.

        Raises
        ------
        ArgumentError
            An array of another kind or length; then nothing has been written.
        """
        size = self._check_moments(exp_avg, exp_avg_sq, writeable=True)
        check_array("encoded", encoded, np.uint8, self.encoded_bytes(size))
        self._decode(encoded, exp_avg, exp_avg_sq)

    def bits_per_param(self, numel: int = BLOCK) -> float:
        """Return the bits for both moments of one parameter, everything counted."""
        return 8 * self.encoded_bytes(numel) / numel

    def to_config(self) -> dict[str, str | int]:
        """Return what `from_config` needs, for JSON."""
        return {"codec": self.name, "version": self.version}

    def __repr__(self) -> str:
        return f"codec {self.name!r}"

    @staticmethod
    def _check_moments(exp_avg: F32, exp_avg_sq: F32, *, writeable: bool) -> int:
        size: int = getattr(exp_avg, "size", 0)
        check_array("exp_avg", exp_avg, np.float32, size, writeable=writeable)
        check_array("exp_avg_sq", exp_avg_sq, np.float32, size, writeable=writeable)
        return size


_registry: dict[str, Codec] = {}


def register(codec: Codec) -> None:
    """Make a codec known by its name."""
    assert codec.name not in _registry, codec.name
    _registry[codec.name] = codec


def names() -> tuple[str, ...]:
    """Return the names of all codecs, most bits first."""
    _load()
    return tuple(_registry)


def get(name: str) -> Codec:
    """Return the codec of a name.

    Raises
    ------
    ArgumentError
        There is none.

    Examples
    --------
    >>> get("4bit").bits_per_param()
    8.1875
    >>> get("raw").encoded_bytes(1000)
    8000
    """
    if name not in _registry:
        _load()
    if name not in _registry:
        msg = f"codec={name!r} is not known; give one of {', '.join(_registry)}"
        raise ArgumentError(msg)
    return _registry[name]


def from_config(config: Mapping[str, object]) -> Codec:
    """Return the codec that `Codec.to_config` describes.

    Raises
    ------
    ArgumentError
        An unknown codec, or a version that this release cannot read.
    """
    codec = get(str(config.get("codec")))
    if codec.to_config() != dict(config):
        msg = (
            f"{dict(config)} is not what this release writes as {codec.name!r}, "
            f"{codec.to_config()}; read it with the release that wrote it"
        )
        raise ArgumentError(msg)
    return codec


def check_key(key: Key) -> None:
    """Raise ArgumentError for a key that no kernel can count with."""
    allowed = {"first": 2**48, "step": 2**32, "seed": 2**32}
    for name, stop in allowed.items():
        value = getattr(key, name)
        if not 0 <= value < stop:
            msg = f"{name}={value!r} is not usable; give 0 <= {name} < {stop}"
            raise ArgumentError(msg)
    if key.first % BLOCK:
        msg = f"first={key.first} is not usable; give a multiple of {BLOCK}"
        raise ArgumentError(msg)


def _load() -> None:
    # Late: each of these imports this file.
    from megatrain_nb.codec import raw  # noqa: PLC0415
    from megatrain_nb.codec.quantised import eight, four, three, two  # noqa: PLC0415

    for module in (raw, eight, four, three, two):
        if module.CODEC.name not in _registry:
            register(module.CODEC)
