"""A dozen random ``kill -9``; `tests.runtime.kills` tries more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.common import report_of_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    report = report_of_module(
        "tests.runtime.kills", tmp_path, "--kills", 12, timeout=580
    )
    assert report["kills"] == 12
