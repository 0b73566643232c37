"""The GPU's benchmark runs on the twin, so that it is not broken when a GPU is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from megatrain_nb.plan.timeline import Span
from tests.benchmarks import gpu

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_whole_script_on_the_twin(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--quick", "--device", "twin"]) == 0
    said = capsys.readouterr().out
    assert said.count("beside computing") == 6
    assert said.count("of plain PyTorch with checkpointing") == 6
    assert 2 <= said.count("of which 0 B are trained there") <= 4
    assert (
        "the losses differ by 0.0e+00 at most" in said
    )  # the twin's arithmetic is the CPU's
    assert "bfloat16" in said
    assert "to the device" in said


def test_it_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    plain = gpu.plain
    monkeypatch.setattr(
        gpu, "plain", lambda *a, **k: lambda window: 1.001 * plain(*a, **k)(window)
    )
    bench = gpu.Bench("twin", said.append)
    bench.parity()
    assert bench.wrong
    assert "WRONG" in said[0]


def test_what_there_is_no_time_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gpu, "LAST_BEGIN_S", 0.0)
    bench = gpu.Bench("twin", said.append)
    bench.speed(gpu.TINY, torch.float32)
    assert said[1:] == ["plain PyTorch with checkpointing: left out, no time left"]


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().out


def test_overlap() -> None:
    def span(kind: str, lane: str, start_s: float, end_s: float) -> Span:
        return Span(kind=kind, name="", start_s=start_s, end_s=end_s, lane=lane)

    computing = [
        span("FORWARD", "compute", 0, 4),
        span("BACKWARD", "compute", 3, 6),
        span("WAIT", "compute", 6, 9),
    ]
    copies = [span("ONLOAD", "link", 2, 5), span("OFFLOAD", "link", 5, 7)]
    assert gpu.overlap(computing + copies) == pytest.approx(4 / 5)
    assert gpu.overlap(computing) == 0.0
