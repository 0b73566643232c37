"""What the runtime's tests share: one matrix thread, and the worst differences at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.runtime.plain import report

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a pool of threads, and lose much where others want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = report()
    if lines:
        terminalreporter.write_sep("-", "largest differences from plain PyTorch")
        for line in lines:
            terminalreporter.write_line(line)
