"""What stays on a device: within the budget, by value, and the tail where there is room."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan.device import DevicePlan, plan_device, slot_bytes, tail_bytes
from megatrain_nb.plan.memory import Residency, plan_residency
from megatrain_nb.plan.traffic import Traffic, step_traffic
from tests.plan.test_memory import make_spec, specs

if TYPE_CHECKING:
    from megatrain_nb.plan.model import ModelSpec

SPEC = make_spec([1024] * 6)
PACK = SPEC.packs[0].weight_bytes
ORDER = range(6)


def plan(room: int, spec: ModelSpec = SPEC, **changes: Any) -> DevicePlan:
    """Plan with so many bytes beside what streams."""
    given = {"wanted_keep_bytes": 0, "keep_first": True, "max_tail_bytes": None}
    limit = -int(-(slot_bytes(spec) + room) / 0.9 // 1)
    order = range(len(spec.blocks))
    return plan_device(
        spec, order, limit_bytes=limit, other_bytes=0, **(given | changes)
    )


def taken(spec: ModelSpec, made: DevicePlan) -> int:
    stays = sum(spec.packs[pack].weight_bytes for pack in made.stay)
    return stays + made.keep_bytes + tail_bytes(spec, made.tail)


def test_weights_come_first_and_then_the_tail() -> None:
    assert plan(6 * PACK).tail == frozenset()
    assert plan(6 * PACK + 3 * PACK).tail == {5}
    assert plan(6 * PACK + 7 * PACK).tail == {4, 5}
    assert plan(6 * 4 * PACK).tail == frozenset(ORDER)
    assert plan(6 * 4 * PACK, max_tail_bytes=0).tail == frozenset()
    assert plan(6 * 4 * PACK, max_tail_bytes=7 * PACK).tail == {4, 5}


def test_the_tail_first_where_disk_or_update_bind() -> None:
    made = plan(9 * PACK, tail_first=True, wanted_keep_bytes=PACK)
    assert made.tail == made.stay == {4, 5}  # four each, the rest is kept
    assert made.keep_bytes == PACK
    made = plan(9 * PACK, tail_first=True, keep_first=False)
    assert made.tail == {4, 5}
    assert made.stay == {3, 4, 5}


def test_activations_come_before_the_tail_as_long_as_the_tail_is_last() -> None:
    for keep_first in (True, False):
        made = plan(9 * PACK, wanted_keep_bytes=2 * PACK, keep_first=keep_first)
        assert (len(made.stay), made.keep_bytes) == (6, 2 * PACK)
        assert made.tail == frozenset()


def test_only_packs_with_fp32_moments() -> None:
    sizes = [8192] * 3
    encoded, spec = make_spec(sizes, codec="4bit"), make_spec(sizes)
    assert plan(10**7, encoded).stay == {0, 1, 2}
    assert plan(10**7, encoded).tail == frozenset()
    mixed = replace(spec, packs=(spec.packs[0], encoded.packs[1], spec.packs[2]))
    assert plan(10**7, mixed).tail == {0, 2}


def test_a_master_takes_as_much_as_fp32() -> None:
    spec = make_spec([8192] * 3, split=True)
    room = 16 * 8192 * 3
    assert plan(room, spec).tail == {0, 1, 2}
    assert plan(room - 100, spec).tail == {1, 2}


@given(
    spec=specs,
    room=st.integers(0, 10**6),
    wanted=st.integers(0, 10**5),
    keep_first=st.booleans(),
    tail_first=st.booleans(),
)
def test_within_the_budget_and_among_what_stays(
    spec: ModelSpec, room: int, wanted: int, keep_first: bool, tail_first: bool
) -> None:
    changes: Any = {
        "wanted_keep_bytes": wanted,
        "keep_first": keep_first,
        "tail_first": tail_first,
    }
    made = plan(room, spec, **changes)
    assert taken(spec, made) <= room + 2
    assert made.tail <= made.stay
    # Last, it takes what is left and changes nothing else.
    if not tail_first:
        without = plan(room, spec, **changes, max_tail_bytes=0)
        assert (without.stay, without.keep_bytes) == (made.stay, made.keep_bytes)


# -- what follows for RAM and disk ----------------------------------------------------------------------------


def test_what_lives_elsewhere_leaves_the_ram_to_others() -> None:
    def weights(elsewhere: frozenset[int]) -> Residency:
        return plan_residency(
            SPEC, limit_bytes=16 * PACK, activation_bytes=0, elsewhere=elsewhere
        )

    here = weights(frozenset())
    there = weights(frozenset({4, 5}))
    assert here.weights == {2, 3, 4, 5}
    assert there.weights == {0, 1, 2, 3}
    assert there.resident_bytes == here.resident_bytes
    assert there.disk_bytes == here.disk_bytes  # room to come back to


def test_what_lives_elsewhere_does_not_move() -> None:
    whole = step_traffic(SPEC, Residency(), ORDER)
    some = step_traffic(SPEC, Residency(elsewhere=frozenset({5})), ORDER)
    # Weights are read once in forward, where the last block turns, and written; gradient and moments both ways.
    assert whole.read_bytes - some.read_bytes == (1 + 1 + 2) * PACK
    assert whole.written_bytes - some.written_bytes == (1 + 1 + 2) * PACK
    nothing = step_traffic(SPEC, Residency(elsewhere=frozenset(ORDER)), ORDER)
    assert nothing == Traffic(0, 0)


def test_weights_that_stay_on_the_device_are_not_read_again() -> None:
    whole = step_traffic(SPEC, Residency(), ORDER)
    stays = step_traffic(SPEC, Residency(), ORDER, stay=frozenset(ORDER))
    assert whole.written_bytes == stays.written_bytes
    # Backward reads blocks 2, 1 and 0: those before it are there from forward's end. Where they stay on the device it
    # reads none of them, so that the next forward's update has to read 0 and 1.
    assert whole.read_bytes - stays.read_bytes == PACK
