"""What a step moves, as arithmetic; the runtime's tests compare it with what was moved."""

from __future__ import annotations

from dataclasses import replace

from megatrain_nb.plan.memory import Residency
from megatrain_nb.plan.model import pack_params
from megatrain_nb.plan.traffic import Traffic, early_gradients, step_traffic
from tests.plan.test_schedule import make_spec

SPEC = make_spec([[0], [1], [2], [3]])
BLOCK = SPEC.packs[0].weight_bytes
ALL = frozenset(range(4))


def test_gradients_of_the_first_blocks_leave_where_there_is_no_room() -> None:
    order = [0, 1, 2, 3]
    needed = (
        2 * (SPEC.packs[0].weight_bytes + SPEC.packs[0].grad_bytes)
        + 2 * SPEC.packs[0].states_bytes
    )
    for working, early in ((needed, {0, 1}), (needed - 1, {0}), (1, set())):
        residency = Residency(working_bytes=working)
        assert early_gradients(SPEC, residency, order) == early
        moved = step_traffic(SPEC, residency, order).moved_bytes
        most = step_traffic(SPEC, Residency(), order).moved_bytes
        assert moved - most == 2 * (2 - len(early)) * SPEC.packs[0].grad_bytes
    resident = Residency(working_bytes=1, grads=frozenset({0, 1, 2, 3}))
    assert step_traffic(SPEC, resident, order).read_bytes > 0


def test_everything_on_disk() -> None:
    # Weights: blocks 2 and 3 forward, 0 backward. Gradients of 2 and 3 leave; all moments.
    assert step_traffic(SPEC, Residency(), [0, 1, 2, 3]) == Traffic(
        read_bytes=(2 + 1 + 2 + 8) * BLOCK, written_bytes=(4 + 2 + 8) * BLOCK
    )


def test_what_stays_does_not_move() -> None:
    assert step_traffic(
        SPEC, Residency(weights=ALL, grads=ALL, states=ALL), [0, 1, 2, 3]
    ) == Traffic(0, 0)
    only_states = Residency(weights=ALL, grads=ALL)
    assert step_traffic(SPEC, only_states, [0, 1, 2, 3]) == Traffic(
        8 * BLOCK, 8 * BLOCK
    )


def test_tied_packs_move_once_each_way() -> None:
    tied = make_spec([[0], [1], [2], [0]])
    traffic = step_traffic(tied, Residency(), [0, 1, 2, 3])
    # Pack 0 is there at the start and leaves before block 3 needs it again.
    assert traffic.written_bytes == (3 + 1 + 6) * BLOCK


def test_halves() -> None:
    """Half the bytes for weights, and the other half goes with the moments."""
    packs = tuple(replace(pack, split=True) for pack in SPEC.packs)
    traffic = step_traffic(replace(SPEC, packs=packs), Residency(), [0, 1, 2, 3])
    assert traffic == Traffic(
        read_bytes=(3 * 2 + 2 * 4 + 4 * 10) * BLOCK // 4,
        written_bytes=(4 * 2 + 2 * 4 + 4 * 10) * BLOCK // 4,
    )


def test_encoded_moments() -> None:
    """131 bytes for 128 elements instead of 1024, filled up to whole pages."""
    packs = tuple(
        pack_params(i, str(i), [("w", (1024, 128))], codecs={"w": "4bit"})
        for i in range(4)
    )
    traffic = step_traffic(replace(SPEC, packs=packs), Residency(), [0, 1, 2, 3])
    moments = -(-1024 * 131 // 4096) * 4096
    assert traffic == Traffic(
        read_bytes=(3 + 2) * 4 * 131072 + 4 * moments,
        written_bytes=(4 + 2) * 4 * 131072 + 4 * moments,
    )


def test_no_blocks() -> None:
    assert step_traffic(SPEC, Residency(), []) == Traffic(0, 0)
