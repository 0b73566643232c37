"""The runtime reads ahead what is predicted; what is predicted wrongly costs time only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from megatrain_nb.plan.timeline import HIT, LATE, MISS
from megatrain_nb.runtime.executor import Executor
from megatrain_nb.runtime.pager import Pager
from tests.plan import replay
from tests.runtime import traces

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", traces.PROGRAMS)
def test_recordings_are_what_happens(name: str, tmp_path: Path) -> None:
    with traces.recorded() as found:
        traces.PROGRAMS[name](tmp_path)
    assert found == replay.load(name)


@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        *((name, 1.0) for name in traces.PLAIN),
        ("evaluated", 0.97),
        ("trainer", 0.97),
        ("skips", 0.95),
        ("layerdrop", 0.95),
        ("dropped and evaluated", 0.95),
        ("exits", 0.95),
        ("experts", 0.95),
    ],
)
def test_what_is_needed_was_read_ahead(
    name: str, at_least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step on; late counts as read ahead: how fast the disk is, nobody predicts here."""
    steps = 0
    outcomes: Counter[str] = Counter()
    turn_over, tell = Executor.turn_over, Pager._tell_need

    def turn_over_too(self: Executor) -> None:
        nonlocal steps
        steps += 1
        turn_over(self)

    def tell_too(self: Pager, *args: Any) -> None:
        if steps >= 2:
            outcomes[args[-1]] += 1
        tell(self, *args)

    monkeypatch.setattr(Executor, "turn_over", turn_over_too)
    monkeypatch.setattr(Pager, "_tell_need", tell_too)
    traces.PROGRAMS[name](tmp_path)
    assert steps >= 6
    assert outcomes[HIT] + outcomes[LATE] > 100
    assert 1 - outcomes[MISS] / outcomes.total() >= at_least
