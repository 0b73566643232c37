"""Streamed training gives plain PyTorch's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.models import ARCHITECTURES, covering
from tests.runtime.plain import (
    Case,
    assert_equal,
    assert_equal_but_tied,
    opened,
    plain_trace_of,
    streamed_trace,
    tied_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FACTORS: dict[str, tuple[Any, ...]] = {
    "accumulation": (1, 3),
    "clipping": (False, True),
    "tied": (False, True),
    "dropout": (0.0, 0.1),
    "place": ("ram", "disk", "mixed"),
    "path": ("window", "loop"),
    "device": ("host", "slots"),
}

# Every architecture meets every combination of the values of any three factors.
CASES = [
    Case(name, **row)
    for seed, name in enumerate(ARCHITECTURES)
    for row in covering(3, seed, FACTORS)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_plain_pytorch(case: Case, tmp_path: Path) -> None:
    with opened(tmp_path, case.place, case.device) as session:
        ours = streamed_trace(case, session)
    plain = plain_trace_of(case)
    if case.tied and case.accumulation > 1:
        assert_equal_but_tied(ours, plain, tied_name(case.name), case)
    else:
        assert_equal(ours, plain)
