"""What is predicted, on traces that were recorded (tests/runtime/traces.py) and on arbitrary ones."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan import predict
from megatrain_nb.plan.predict import Phase, Predictor, Use
from tests.plan import replay

# Every program, but for those whose order is a matter of chance.
PLAIN = ("loop", "accumulated", "albert", "t5", "mixtral")
EVALUATED = ("evaluated", "trainer")
CHANCE = ("skips", "layerdrop", "dropped_evaluated")
OTHERS = ("exits", "experts")

uses = st.builds(Use, st.integers(0, 4), st.sampled_from(Phase))


def after_steps(trace: list[Use | None], steps: int) -> int:
    """How many uses there are before so many steps are complete."""
    found = 0
    for use in trace:
        if steps == 0:
            break
        found += use is not None
        steps -= use is None
    return found


def share(found: list[bool]) -> float:
    return sum(found) / len(found)


def test_every_recording_is_looked_at() -> None:
    names = {path.stem for path in replay.TRACES.glob("*.txt")}
    assert names == {*PLAIN, *EVALUATED, *CHANCE, *OTHERS}


@pytest.mark.parametrize("name", [*PLAIN, *EVALUATED, *CHANCE, *OTHERS])
def test_recordings_are_text(name: str) -> None:
    trace = replay.load(name)
    assert replay.from_text(replay.to_text(trace)) == trace
    assert trace.count(None) >= 6


@pytest.mark.parametrize("name", PLAIN)
def test_plain_loops_are_foretold_from_the_third_step(name: str) -> None:
    trace = replay.load(name)
    found = replay.prefetched(replay.uses_of(trace))
    assert all(found[after_steps(trace, 2) :])


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_in_between(name: str) -> None:
    trace = replay.load(name)
    assert any(use is not None and use.phase is Phase.EVALUATE for use in trace)
    found = replay.prefetched(replay.uses_of(trace))
    assert share(found[after_steps(trace, 2) :]) >= 0.97


@pytest.mark.parametrize("name", [*CHANCE, *OTHERS])
def test_chance(name: str) -> None:
    """With the future known every block could be read ahead, so the share of hits is one of all uses."""
    trace = replay.load(name)
    found = replay.prefetched(replay.uses_of(trace))
    assert share(found[after_steps(trace, 2) :]) >= 0.95


@pytest.mark.parametrize("percent", [25, 50, 75])
@pytest.mark.parametrize("name", [*PLAIN, *EVALUATED, *CHANCE, *OTHERS])
def test_what_is_kept_is_what_is_needed_soonest(name: str, percent: int) -> None:
    """Without reading ahead. Which layers are skipped next nobody can know, so there hits are lost."""
    trace = replay.load(name)
    known = replay.uses_of(trace)
    slots = max(2, replay.num_blocks(known) * percent // 100)
    begin = after_steps(trace, 2)
    best = sum(replay.clairvoyant_hits(known, slots)[begin:])
    ours = sum(replay.predicted_hits(known, slots)[begin:])
    recent = sum(replay.recent_hits(known, slots)[begin:])
    assert best >= ours >= recent * (1 if name in (*PLAIN, *EVALUATED) else 0.97)
    assert ours >= (0.99 if name in (*PLAIN, *EVALUATED) else 0.85) * best


@pytest.mark.parametrize("name", [*EVALUATED, *CHANCE])
def test_the_same_uses_give_the_same_predictions(name: str) -> None:
    known = replay.uses_of(replay.load(name))
    first, second = (Predictor(range(replay.num_blocks(known))) for _ in range(2))
    for block, phase in known:
        assert first.note(block, phase) == second.note(block, phase)
        assert first.instead() == second.instead()
        # Asking does not change what is learned.
        assert [*islice(first.ahead(), 3)] == [*islice(first.ahead(), 3)]


def test_before_anything_is_known() -> None:
    predictor = Predictor([2, 0, 1])
    assert predictor.now is None
    assert predictor.instead() == ()
    assert [str(use) for use in islice(predictor.ahead(), 7)] == [
        "2:FORWARD", "0:FORWARD", "1:FORWARD", "1:BACKWARD", "0:BACKWARD", "2:BACKWARD", "2:FORWARD",
    ]  # fmt: skip
    predictor.note(2, Phase.EVALUATE)
    assert [str(use) for use in islice(predictor.ahead(), 4)] == [
        "0:EVALUATE", "1:EVALUATE", "2:EVALUATE", "0:EVALUATE",
    ]  # fmt: skip


def test_without_blocks() -> None:
    assert [*Predictor([]).ahead()] == []


def test_a_backward_is_its_forward_reversed() -> None:
    predictor = Predictor(range(6))
    for step in ([0, 1, 3, 5], [0, 2, 3, 4, 5], [0, 4, 2, 5]):
        for block in step:
            predictor.note(block, Phase.FORWARD)
        for block in reversed(step):
            assert predictor.to_come[0] == block
            predictor.note(block, Phase.BACKWARD)
        assert predictor.to_come == []


def test_a_forward_that_turns() -> None:
    predictor = Predictor(range(3))
    for _ in range(2):
        predictor.note(0, Phase.FORWARD)
        predictor.note(1, Phase.FORWARD)
        predictor.note(2, Phase.TURN)
        assert predictor.to_come == [1, 0]
        assert next(predictor.ahead()) == Use(1, Phase.BACKWARD)
        predictor.note(1, Phase.BACKWARD)
        predictor.note(0, Phase.BACKWARD)
    predictor.note(0, Phase.FORWARD)
    predictor.forget_open()
    assert predictor.to_come == []


def test_the_fifth_step_is_followed_by_evaluation() -> None:
    """What follows depends on more than a whole step before."""
    predictor = Predictor(range(4))
    step = [Use(i, Phase.FORWARD) for i in range(4)]
    step += [Use(i, Phase.BACKWARD) for i in (3, 2, 1, 0)]
    known = (step * 5 + [Use(i, Phase.EVALUATE) for i in range(4)]) * 6
    found = [predictor.note(*use) for use in known]
    assert all(found[-2 * 44 :])


@given(st.lists(uses, max_size=200), st.integers(1, 5))
def test_any_order(known: list[Use], blocks: int) -> None:
    predictor = Predictor(range(blocks))
    expected = next(predictor.ahead())
    for block, phase in known:
        assert predictor.note(block, phase) == (expected == (block, phase))
        assert predictor.now == (block, phase)
        path = [*islice(predictor.ahead(), 5)]
        assert path[0].block not in predictor.instead()
        for use in path[: len(predictor.to_come)]:
            if use.phase is not Phase.BACKWARD:
                break
        expected = path[0]
        if expected.phase is Phase.BACKWARD and predictor.to_come:
            assert expected.block == predictor.to_come[0]
        if not predictor.to_come:
            assert expected.phase is not Phase.BACKWARD


@given(st.lists(st.integers(0, 3), max_size=300))
def test_places_are_where_it_was_like_now(known: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "_MEMORY", 64)
        history = predict._History()
        for count, use in enumerate(known, 1):
            history.append(use)
            before = known[:count]
            newest = [i for i in range(count - 1) if before[i] == use]
            places = history.now.places
            assert {place for place in newest[-16:] if place > count - 64} <= {*places}
            for place, length in places.items():
                assert count - 64 <= place < count - 1
                assert 1 <= length <= place + 1
                assert before[place - length + 1 : place + 1] == before[-length:]


def test_memory_is_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "_MEMORY", 64)
        predictor = Predictor(range(5))
        for _ in range(100):  # forwards whose backward never comes
            for block in range(5):
                predictor.note(block, Phase.FORWARD)
        assert len(predictor.to_come) == 4 * 5 + 64
        history = predictor._history
        assert len(history._used) == 64
        assert len(history.now.places) <= 16 + 2 * 8
        assert all(
            use.phase is Phase.FORWARD and b.block == (use.block + 1) % 5
            for use, b in pairwise(islice(predictor.ahead(), 10))
        )
