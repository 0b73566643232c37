"""Which parameter's moments get which codec: what a user asks for, and what is safe.

Vectors, norms and small tensors stay fp32; embeddings and the head get 8 bits at least
(see `megatrain_nb.codec.dynamic.Role`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megatrain_nb.codec.base import get
from megatrain_nb.codec.dynamic import Role, role_of
from megatrain_nb.codec.names import (
    DYNAMIC,
    EXPERIMENTAL,
    LOSSLESS,
    MOMENTS,
    NAMES,
    RAW,
    WEIGHTS,
)
from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class Compression:
    """What is asked for, by pattern of names; the first that matches counts.

    Attributes
    ----------
    rules
        Pattern and name: a codec, ``"dynamic"``, or ``"raw"`` for fp32. What no pattern
        matches stays fp32.

    Examples
    --------
    >>> rules = parse_compression({"model.layers.0": False, "*": "4bit"})
    >>> rules.asked("model.layers.0.up.weight"), rules.asked("model.layers.1.up.weight")
    ('raw', '4bit')
    """

    rules: tuple[tuple[str, str], ...] = ()

    def asked(self, name: str) -> str:
        """Return what is asked for a parameter: a pattern matches it or a module it is in."""
        return next((codec for x, codec in self.rules if _matches(x, name)), RAW)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that decide of none of these parameters."""
        rules = [pattern for pattern, _ in self.rules]
        for name in names:
            first = next((x for x in self.rules if _matches(x[0], name)), None)
            if first is not None and first[0] in rules:
                rules.remove(first[0])
        return rules

    def codec_of(self, name: str, shape: Sequence[int], *, table: bool) -> str:
        """Return the codec that a parameter's moments start with.

        Parameters
        ----------
        name, shape
            Of the parameter.
        table
            Whether it is an embedding or the head.
        """
        return safe_codec(self.asked(name), role_of(shape, table=table))

    def codecs(self) -> tuple[str, ...]:
        """Return the codecs that parameters may get."""
        found: dict[str, None] = {}
        for _, asked in self.rules:
            if asked != RAW:
                body = Role.BODY.codecs if asked == DYNAMIC else (asked,)
                found.update(dict.fromkeys((*body, *Role.TABLE.codecs)))
        return tuple(found)

    @property
    def experimental(self) -> tuple[str, ...]:
        """What is asked for somewhere and is experimental."""
        asked = dict.fromkeys(name for _, name in self.rules)
        return tuple(name for name in asked if name in EXPERIMENTAL)

    @property
    def by_pattern(self) -> bool:
        """Whether it is not one for all."""
        return any(pattern != _EVERYTHING for pattern, _ in self.rules)

    def __bool__(self) -> bool:
        return any(codec != RAW for _, codec in self.rules)

    def __str__(self) -> str:
        if len(self.rules) == 1 and self.rules[0][0] == _EVERYTHING:
            return self.rules[0][1]
        return ", ".join(f"{pattern}: {codec}" for pattern, codec in self.rules)


def safe_codec(asked: str, role: Role) -> str:
    """Return the codec that is used where one is asked for.

    Examples
    --------
    >>> safe_codec("2bit", Role.TABLE), safe_codec("2bit", Role.SMALL)
    ('8bit', 'raw')
    """
    if asked == RAW or role is Role.SMALL:
        return RAW
    if role is Role.TABLE:
        return Role.TABLE.codecs[0]
    return role.codecs[-1] if asked == DYNAMIC else asked


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern is of a parameter, or of a module that it is in."""
    words = name.split(".")
    places = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    return any(fnmatchcase(place, pattern) for place in places)


def parse_compression(
    value: object, *, name: str = "optimizer_compression"
) -> Compression:
    """Return what ``optimizer_compression`` says.

    Parameters
    ----------
    value
        False, True (``"dynamic"``), a name of `NAMES`, or a mapping from patterns of
        parameter or module names (``fnmatch``) to these.
    name
        Of the argument, for messages.

    Raises
    ------
    ArgumentError
        Anything else.
    """
    if isinstance(value, Compression):
        return value
    if isinstance(value, Mapping):
        for pattern in value:
            if not isinstance(pattern, str) or not pattern:
                msg = f"{name}: {pattern!r} is not a pattern; give names such as 'model.layers.*'"
                raise ArgumentError(msg)
        return Compression(
            tuple(
                (pattern, parse_name(codec, name=f"{name}[{pattern!r}]"))
                for pattern, codec in value.items()
            )
        )
    asked = parse_name(value, name=name)
    return Compression() if asked == RAW else Compression(((_EVERYTHING, asked),))


def parse_storage(
    moments: object, weights: object
) -> tuple[Compression, frozenset[str]]:
    """Return what ``optimizer_compression`` and ``weight_compression`` say together.

    Parameters
    ----------
    moments
        As for `parse_compression`, or ``"lossless"``.
    weights
        False or ``"lossless"``.

    Returns
    -------
    tuple
        The codecs of moments, and what is packed on disk: ``weights``, ``moments``.

    Raises
    ------
    ArgumentError
        Anything else.

    Examples
    --------
    >>> parse_storage("lossless", False)
    (Compression(rules=()), frozenset({'moments'}))
    """
    if weights is not False and weights != LOSSLESS:
        msg = f'weight_compression={weights!r}: give False or "{LOSSLESS}" (packed on disk, bit for bit)'
        raise ArgumentError(msg)
    lossless = moments == LOSSLESS
    packed = {MOMENTS: lossless, WEIGHTS: weights == LOSSLESS}
    return (
        parse_compression(False if lossless else moments),
        frozenset(kind for kind, is_packed in packed.items() if is_packed),
    )


def parse_name(value: object, *, name: str = "optimizer_compression") -> str:
    """Return the name of what is asked for: a codec, ``"dynamic"``, or ``"raw"`` for fp32.

    Raises
    ------
    ArgumentError
        It is none.

    Examples
    --------
    >>> parse_name(True), parse_name(False), parse_name("4bit")
    ('dynamic', 'raw', '4bit')
    """
    if value is True:
        return DYNAMIC
    if value is False:
        return RAW
    if isinstance(value, str) and value in NAMES:
        if value != DYNAMIC:
            get(value)
        return value
    known = ", ".join(f'"{known}"' for known in NAMES)
    msg = (
        f"{name}={value!r} is not known; give False (fp32 moments), {known}, or True (dynamic). For the whole model "
        f'mt.init also takes "{LOSSLESS}"'
    )
    raise ArgumentError(msg)
