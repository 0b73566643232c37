"""The steps of a run as rows of numbers, in bounded memory however long the run is."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = NDArray[np.float32]

NUM_RECENT = 64
MAX_OLDER = 128

_MEANS = ("loss", "grad_norm", "lr")
_SUMS = (
    "tokens",
    "read_bytes",
    "written_bytes",
    "read_busy_s",
    "write_busy_s",
    "link_bytes",
    "link_s",
)
_ARRAYS = ("hits", "late", "misses", "stall_s", "compute_s")


@dataclass(slots=True, kw_only=True)
class StepRow:
    """One step, or several neighbours as one.

    Attributes
    ----------
    step
        The last of its steps, as the model counts.
    count
        How many steps it stands for. What follows is their sum, but for loss, norm, rate and shares: their mean.
    end_s
        Seconds from the start of the recording to the end of the last step.
    loss, grad_norm, lr
        Mean of the finite ones; NaN if there is none.
    tokens
        Valid tokens.
    seconds
        Wall seconds by cause; their sum is the wall time.
    least_seconds
        By resource: what the work takes there at least.
    read_bytes, written_bytes, read_busy_s, write_busy_s
        Disk: bytes, and the time in which at least one read (write) was under way.
    link_bytes, link_s
        The link to the device, both ways: bytes, and the time the copies took.
    hits, late, misses : float32, shape (blocks,)
        How often a piece was found so; see the note in plan/timeline.py.
    stall_s : float32, shape (blocks,)
        Seconds that the training thread waited for pieces of the block.
    compute_s : float32, shape (blocks,)
        Seconds in the block's forward and backward.
    in_ram : float32, shape (3, blocks)
        Share of the block's bytes that was in RAM, over the step's time: weights, gradients, states.
    on_device : float32, shape (blocks,)
        Share of the step's time in which the block's weights were on the device; empty without one.
    """

    step: int
    count: int = 1
    end_s: float = 0.0
    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = math.nan
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    least_seconds: dict[str, float] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    read_busy_s: float = 0.0
    write_busy_s: float = 0.0
    link_bytes: int = 0
    link_s: float = 0.0
    hits: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    late: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    misses: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    stall_s: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    compute_s: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    in_ram: Array = field(default_factory=lambda: np.zeros((3, 0), np.float32))
    on_device: Array = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def wall_s(self) -> float:
        """Wall seconds of all its steps."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Return what ``json.dumps`` takes; zeros and NaN are left out."""
        fields: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                if value.any():
                    fields[name] = np.round(value.astype(np.float64), 6).tolist()
            elif isinstance(value, float):
                if value and math.isfinite(value):
                    fields[name] = value
            elif value:
                fields[name] = value
        fields["blocks"] = len(self.hits)
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StepRow:
        """Return the row that ``to_json`` wrote."""
        values = dict(fields)
        blocks = values.pop("blocks", 0)
        for name in _ARRAYS:
            values[name] = np.array(values.get(name, [0] * blocks), np.float32)
        given = values.get("in_ram", [[0] * blocks] * 3)
        values["in_ram"] = np.array(given, np.float32).reshape(3, blocks)
        values["on_device"] = np.array(values.get("on_device", []), np.float32)
        return cls(**values)


def merge(first: StepRow, second: StepRow) -> StepRow:
    """Return one row that stands for both.

    Examples
    --------
    >>> row = merge(StepRow(step=1, loss=4.0), StepRow(step=2, loss=2.0))
    >>> row.step, row.count, row.loss
    (2, 2, 3.0)
    """
    made = StepRow(
        step=second.step, count=first.count + second.count, end_s=second.end_s
    )
    for name in _MEANS:
        setattr(made, name, _mean(name, first, second))
    for name in _SUMS:
        setattr(made, name, getattr(first, name) + getattr(second, name))
    for name in ("seconds", "least_seconds"):
        a, b = getattr(first, name), getattr(second, name)
        setattr(made, name, {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {**a, **b}})
    if (
        first.hits.shape != second.hits.shape
    ):  # another model: its blocks count from here
        for name in (*_ARRAYS, "in_ram", "on_device"):
            setattr(made, name, getattr(second, name))
        return made
    for name in _ARRAYS:
        setattr(made, name, getattr(first, name) + getattr(second, name))
    a_s, b_s = first.wall_s, second.wall_s
    share = a_s / (a_s + b_s) if a_s + b_s > 0 else 0.5
    made.in_ram = share * first.in_ram + (1 - share) * second.in_ram
    if first.on_device.shape == second.on_device.shape:
        made.on_device = share * first.on_device + (1 - share) * second.on_device
    return made


class History:
    """All steps: the last ones one by one, older ones as rows that stand for more and more of them.

    Examples
    --------
    >>> history = History()
    >>> for step in range(1, 10_001):
    ...     history.append(StepRow(step=step))
    >>> rows = list(history)
    >>> len(rows) <= 192, sum(row.count for row in rows), rows[-1].step
    (True, 10000, 10000)
    """

    def __init__(self) -> None:
        self.recent: deque[StepRow] = deque()
        self.older: list[StepRow] = []
        self._per_row = 1

    def append(self, row: StepRow) -> None:
        """Add a step."""
        self.recent.append(row)
        if len(self.recent) > NUM_RECENT:
            self._fold(self.recent.popleft())

    def _fold(self, row: StepRow) -> None:
        if self.older and self.older[-1].count < self._per_row:
            self.older[-1] = merge(self.older[-1], row)
            return
        self.older.append(row)
        if len(self.older) > MAX_OLDER:
            pairs = zip(self.older[::2], self.older[1::2], strict=False)
            rest = self.older[len(self.older) // 2 * 2 :]
            self.older = [merge(a, b) for a, b in pairs] + rest
            self._per_row *= 2

    def __iter__(self) -> Iterator[StepRow]:
        return iter([*self.older, *self.recent])

    def __len__(self) -> int:
        return len(self.older) + len(self.recent)


def _mean(name: str, first: StepRow, second: StepRow) -> float:
    pairs = [(getattr(row, name), row.count) for row in (first, second)]
    finite = [(value, count) for value, count in pairs if math.isfinite(value)]
    weight = sum(count for _, count in finite)
    return sum(v * c for v, c in finite) / weight if weight else math.nan
