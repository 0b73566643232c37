"""Benchmarks run only where they are asked for."""

from __future__ import annotations

import pytest


@pytest.fixture
def benchmarking(request: pytest.FixtureRequest) -> None:
    """Skip unless ``--benchmark-enable`` is given; for what times without the fixture ``benchmark``."""
    if not request.config.getoption("--benchmark-enable"):
        pytest.skip("benchmarks run with --benchmark-enable (make bench)")
