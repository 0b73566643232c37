"""The runtime reads ahead what is predicted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from megatrain_nb.plan.predict import Phase, Use
from megatrain_nb.plan.timeline import MISS
from megatrain_nb.runtime.executor import Executor
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import What
from tests.plan import replay
from tests.runtime import traces
from tests.runtime.common import TinyLM, opened, plain_step, seeded, wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain_nb.runtime.layers import Block

# So many of the uses of blocks were foreseen, at least.
READ_AHEAD = {
    **dict.fromkeys(traces.PLAIN, 1.0),
    **dict.fromkeys(("evaluated", "trainer"), 0.97),
    **dict.fromkeys(("skips", "layerdrop", "dropped_evaluated"), 0.95),
    **dict.fromkeys(("exits", "experts"), 0.95),
}


@pytest.mark.parametrize("name", traces.PROGRAMS)
def test_what_is_needed_was_read_ahead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step on: before a block is called, and before an update or a backward asks for more.

    How long the disk takes nobody predicts here, so what is late was read ahead as well.
    """
    foreseen: list[bool] = []
    outcomes: Counter[str] = Counter()
    with traces.recorded() as found:
        advance, tell = Executor._advance, Pager._tell_need

        def advance_too(
            self: Executor, block: Block, *args: Any, **kwargs: Any
        ) -> None:
            if found.count(None) >= 2:
                pieces = [
                    self.pager.piece(pack, What.WEIGHTS) for pack in block.spec.packs
                ]
                foreseen.append(all(piece.slab is not None for piece in pieces))
            advance(self, block, *args, **kwargs)

        def tell_too(self: Pager, *args: Any) -> None:
            outcomes[args[-1]] += found.count(None) >= 2
            tell(self, *args)

        monkeypatch.setattr(Executor, "_advance", advance_too)
        monkeypatch.setattr(Pager, "_tell_need", tell_too)
        traces.PROGRAMS[name](tmp_path)
    assert len(foreseen) > 60
    assert sum(foreseen) / len(foreseen) >= READ_AHEAD[name]
    assert outcomes.total() > 100
    assert 1 - outcomes[MISS] / outcomes.total() >= READ_AHEAD[name]

    recording = replay.load(name)
    if name == "experts":  # where a token goes depends on the last bits
        found, recording = first_step(found), first_step(recording)
    assert found == recording


def first_step(trace: list[Use | None]) -> list[Use | None]:
    return trace[: trace.index(None)]


def test_what_leaves_is_what_is_needed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third step of a plain loop: embedding, three layers, norm, head."""
    leave: dict[tuple[Use, What], list[int]] = {}
    note = Executor._note

    def look_too(self: Executor, action: Any) -> None:
        note(self, action)
        now = self._predictor.now
        assert now is not None
        for what in (What.WEIGHTS, What.GRADS):
            left = [self.pager.piece(pack, what) for pack in range(6)]
            order = leave[now, what] = []
            while left:
                last = self._needed_last(left)
                left.remove(last)
                order.append(last.pack.index)

    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM), lr=1e-3)
        for step in range(2):
            plain_step(model, optimizer, step, count=1)
        monkeypatch.setattr(Executor, "_note", look_too)
        plain_step(model, optimizer, 2, count=1)

    forward, backward = Use(2, Phase.FORWARD), Use(2, Phase.BACKWARD)
    # 2 now, then 3 4 5 forward, 5 4 3 2 1 0 backward.
    assert leave[forward, What.WEIGHTS] == [0, 1, 5, 4, 3, 2]
    # What the update of 2 to 5 needs of gradients comes with their forward; those of 0 and 1 are new ones.
    assert leave[forward, What.GRADS] == [0, 1, 5, 4, 3, 2]
    # 2 now, then 1 0 backward, 0 1 2 3 4 5 forward.
    assert leave[backward, What.WEIGHTS] == [5, 4, 3, 0, 1, 2]
    # Without a step nothing needs a gradient before the next backward.
    assert leave[backward, What.GRADS] == [3, 4, 5, 0, 1, 2]
