"""What a prediction costs, on every recorded trace."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import pytest

from megatrain_nb.plan.predict import Predictor
from tests.plan import replay

MAX_SECONDS = 20e-6


@pytest.mark.usefixtures("benchmarking")
def test_a_prediction_costs_microseconds() -> None:
    print("\ntrace, predictions, median us, 99th of 100 us")
    worst = 0.0
    for path in sorted(replay.TRACES.glob("*.txt")):
        uses = replay.uses_of(replay.load(path.stem))
        predictor = Predictor(range(replay.num_blocks(uses)))
        clock = [time.perf_counter()]
        for block, phase in uses:
            predictor.note(block, phase)
            next(predictor.ahead())
            predictor.instead()
            clock.append(time.perf_counter())
        took = [end - start for start, end in pairwise(clock)]
        median = statistics.median(took)
        rare = statistics.quantiles(took, n=100)[-1]
        print(f"{path.stem}, {len(uses)}, {median * 1e6:.1f}, {rare * 1e6:.1f}")
        worst = max(worst, median)
    assert worst < MAX_SECONDS
