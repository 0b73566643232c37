from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatrain_nb.notebook.progress import Progress, Thinned
from tests.notebook.fakes import step_result


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_steps_speed_and_time_left() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.on_train_begin(10)
    assert progress.snapshot("training", {}).left_s is None
    for step in range(1, 5):
        clock.now_s += 3.0  # 2 s in the step, 1 s outside of it
        progress.on_step_end(step_result(step, seconds=2.0))
    snap = progress.snapshot("training", {})
    assert (snap.step, snap.num_done, snap.total_steps) == (4, 4, 10)
    assert snap.tokens_per_s == pytest.approx(512 / 2.0)
    assert snap.left_s == pytest.approx(6 * 3.0)
    assert snap.elapsed_s == 12.0
    assert snap.seconds["wait"] == pytest.approx(0.4)
    assert [step for step, _ in snap.losses] == [1, 2, 3, 4]


def test_one_step_is_enough_for_an_estimate() -> None:
    progress = Progress(Clock())
    progress.on_train_begin(3)
    progress.on_step_end(step_result(1, seconds=2.0))
    assert progress.snapshot("training", {}).left_s == pytest.approx(4.0)


def test_a_plain_loop_has_no_end_in_sight() -> None:
    progress = Progress(Clock())
    progress.on_step_end(step_result(7))
    snap = progress.snapshot("training", {})
    assert progress.began
    assert (snap.step, snap.num_done, snap.total_steps, snap.left_s) == (
        7,
        1,
        None,
        None,
    )


def test_a_second_training_counts_anew() -> None:
    progress = Progress(Clock())
    for step in (1, 2, 3):
        progress.on_step_end(step_result(step))
    progress.on_train_begin(2)
    progress.on_step_end(step_result(4))
    snap = progress.snapshot("training", {})
    assert (snap.step, snap.num_done, snap.total_steps) == (4, 1, 2)
    assert len(snap.losses) == 4


def test_losses_that_are_not_numbers_are_not_drawn() -> None:
    progress = Progress(Clock())
    progress.on_step_end(replace(step_result(1), loss=math.nan))
    snap = progress.snapshot("training", {})
    assert snap.losses == []
    assert math.isnan(snap.loss)


def test_thinned_keeps_shape_and_end() -> None:
    curve = Thinned()
    for step in range(1, 100_001):
        curve.append(step, float(step))
    points = curve.points()
    assert len(points) <= 240
    assert points[-1][0] == 100_000
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert all(y <= x and x - y < 1000 for x, y in points)
