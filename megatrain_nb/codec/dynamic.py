"""Which codec for which part of a model: the fewest bytes within an error budget.

Not a format: every part is stored by one of the quantised codecs. The budget is on the
error of AdamW's direction, exp_avg / (sqrt(exp_avg_sq) + eps), which both moments share
and which says what the weights would feel; the root mean square over all parameters,
relative to the direction's own.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.codec.base import Key, get
from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain_nb.codec.base import F32, Codec

DEFAULT_BUDGET = 0.4
SMALL_NUMEL = 4096
"""Smaller tensors stay fp32: they cost nothing, and a scale alone can upset them."""
PATIENCE = 0.05
"""A choice is kept while it fits the budget and costs at most this share more."""


class Role(Enum):
    """What a parameter is for, which bounds its codecs; the fewest bits first."""

    BODY = ("2bit", "3bit", "4bit")
    TABLE = ("8bit",)
    """Embeddings and the head: rows without gradients beside rows with large ones."""
    SMALL = ("raw",)
    """Vectors, norms, and everything below `SMALL_NUMEL` elements."""

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that are safe for it."""
        names: tuple[str, ...] = self.value
        return names


def role_of(shape: Sequence[int], *, table: bool = False) -> Role:
    """Return the role of a parameter.

    Parameters
    ----------
    shape
        Its shape.
    table
        Whether it is an embedding or the head.

    Examples
    --------
    >>> role_of((4096, 4096)), role_of((4096,)), role_of((32000, 4096), table=True)
    (<Role.BODY: ('2bit', '3bit', '4bit')>, <Role.SMALL: ('raw',)>, <Role.TABLE: ('8bit',)>)
    """
    if len(shape) < 2 or math.prod(shape) < SMALL_NUMEL:
        return Role.SMALL
    return Role.TABLE if table else Role.BODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the model that gets one codec.

    Attributes
    ----------
    name
        Unique.
    numel
        Parameters.
    role
        Which codecs are allowed.
    errors
        By codec, of every allowed one: what `direction_error` returned lately.
    """

    name: str
    numel: int
    role: Role
    errors: Mapping[str, float]


def direction_error(
    codec: Codec, exp_avg: F32, exp_avg_sq: F32, key: Key, *, eps: float = 1e-8
) -> float:
    """Return the relative error that a codec makes in AdamW's direction.

    Parameters
    ----------
    codec
        Which.
    exp_avg, exp_avg_sq : float32, shape (N,), C-contiguous
        Moments, or a sample of whole blocks of them.
    key
        Of the rounding.
    eps
        Of AdamW.

    Returns
    -------
    float
        Root mean square of the error over that of the direction; 0 where all is zero.
    """
    encoded = np.empty(codec.encoded_bytes(exp_avg.size), np.uint8)
    codec.encode(exp_avg, exp_avg_sq, encoded, key)
    m, v = np.empty_like(exp_avg), np.empty_like(exp_avg_sq)
    codec.decode(encoded, m, v)
    exact = exp_avg.astype(np.float64) / (np.sqrt(exp_avg_sq, dtype=np.float64) + eps)
    new = m / (np.sqrt(v, dtype=np.float64) + eps)
    length = float(np.linalg.norm(exact))
    return float(np.linalg.norm(new - exact)) / length if length else 0.0


def total_error(parts: Sequence[Part], choice: Mapping[str, str]) -> float:
    """Return the root mean square error over all parameters of a choice of codecs."""
    numel = sum(part.numel for part in parts)
    square = sum(part.numel * part.errors[choice[part.name]] ** 2 for part in parts)
    return math.sqrt(square / numel) if numel else 0.0


def total_bytes(parts: Sequence[Part], choice: Mapping[str, str]) -> int:
    """Return the encoded bytes of a choice of codecs."""
    return sum(get(choice[part.name]).encoded_bytes(part.numel) for part in parts)


def choose(
    parts: Sequence[Part],
    *,
    budget: float = DEFAULT_BUDGET,
    previous: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return a codec for each part: the fewest bytes whose error is within the budget.

    Starts from the fewest bits and gives more where a byte removes most of the error,
    until the budget holds or nothing helps. Deterministic.

    Parameters
    ----------
    parts
        With errors measured on the moments of now.
    budget
        On `total_error`.
    previous
        The last choice. It is kept while it fits and is not much larger (`PATIENCE`):
        to change a codec costs a reading and a writing, and noise should not do it.

    Raises
    ------
    ArgumentError
        A budget that is not positive, two parts of one name, an error that is missing
        or not a number from 0 on.

    Examples
    --------
    >>> errors = {"2bit": 0.5, "3bit": 0.3, "4bit": 0.2}
    >>> calm = Part(name="up", numel=10**6, role=Role.BODY, errors=errors)
    >>> wild = Part(
    ...     name="down",
    ...     numel=10**6,
    ...     role=Role.BODY,
    ...     errors={"2bit": 0.9, "3bit": 0.5, "4bit": 0.3},
    ... )
    >>> choose([calm, wild], budget=0.5)
    {'up': '2bit', 'down': '3bit'}
    """
    _check(parts, budget)
    choice = {part.name: part.role.codecs[0] for part in parts}
    heap = [entry for at in range(len(parts)) if (entry := _next(parts, at, choice))]
    heapq.heapify(heap)
    allowed = budget**2 * sum(part.numel for part in parts) * (1 + 1e-12)
    square = sum(p.numel * p.errors[choice[p.name]] ** 2 for p in parts)
    while heap and square > allowed:
        _, at, name = heapq.heappop(heap)
        part = parts[at]
        old = part.errors[choice[part.name]]
        square -= part.numel * (old**2 - part.errors[name] ** 2)
        choice[part.name] = name
        entry = _next(parts, at, choice)
        if entry:
            heapq.heappush(heap, entry)
    if previous is not None and _still_good(parts, previous, choice, budget):
        return {part.name: previous[part.name] for part in parts}
    return choice


def _bytes(part: Part, name: str) -> int:
    return get(name).encoded_bytes(part.numel)


def _next(
    parts: Sequence[Part], at: int, choice: Mapping[str, str]
) -> tuple[float, int, str] | None:
    """Return the best codec to change part number ``at`` to, as an entry of a heap; None if nothing helps."""
    part = parts[at]
    now = choice[part.name]
    gain, name = max(
        (
            (_gain(part, now, name), name)
            for name in part.role.codecs
            if _bytes(part, name) > _bytes(part, now)
        ),
        default=(0.0, ""),
    )
    return (-gain, at, name) if gain > 0 else None


def _gain(part: Part, old: str, new: str) -> float:
    """Return the squared error that a byte more removes."""
    removed = part.numel * (part.errors[old] ** 2 - part.errors[new] ** 2)
    return removed / (_bytes(part, new) - _bytes(part, old))


def _still_good(
    parts: Sequence[Part],
    previous: Mapping[str, str],
    choice: Mapping[str, str],
    budget: float,
) -> bool:
    if any(previous.get(part.name) not in part.role.codecs for part in parts):
        return False
    allowed = max(budget, total_error(parts, choice))
    most = total_bytes(parts, choice) * (1 + PATIENCE)
    return (
        total_error(parts, previous) <= allowed and total_bytes(parts, previous) <= most
    )


def _check(parts: Sequence[Part], budget: float) -> None:
    if not budget > 0:
        msg = f"budget={budget!r} is not usable; give a positive number such as 0.4"
        raise ArgumentError(msg)
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            msg = f"two parts are named {part.name!r}; give each a name of its own"
            raise ArgumentError(msg)
        seen.add(part.name)
        for name in part.role.codecs:
            error = part.errors.get(name, math.nan)
            if not 0 <= error < math.inf:
                msg = (
                    f"the error of {name!r} for {part.name!r} is {error!r}; give a "
                    f"finite number >= 0 for each of {', '.join(part.role.codecs)}"
                )
                raise ArgumentError(msg)
