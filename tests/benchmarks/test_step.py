"""Step time over plain PyTorch, side by side in one run."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
STEPS = 5
CASES = {
    "planned, max_ram_gb=0.8": ([], ["0.8"], 1.3),
    "weights, gradients and moments all on disk": ([], ["0.8", "disk"], 1.3),
    "all in RAM, activations kept": (["--no-checkpointing"], ["4"], 1.03),
    "small micro-batches together": (
        ["--window", "1x64x8"],
        ["0.8", "disk", "fuse", "--window", "1x64x8"],
        0.75,
    ),
}


class Worker:
    """A process that takes one step for each line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.work", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def step(self) -> dict[str, Any]:
        """Take one step and return what it says of it."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let the process end."""
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.mark.parametrize("case", CASES)
def test_step_time(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--benchmark-enable"):
        pytest.skip("benchmarks run with --benchmark-enable (make bench)")
    plain_arguments, arguments, bound = CASES[case]
    ours = Worker("offload", str(tmp_path / "offload"), *arguments)
    plain = Worker("plain", *plain_arguments)
    try:
        for worker in (plain, ours):
            for _ in range(2):  # the second one is the first that keeps activations
                worker.step()
        pairs = [(plain.step(), ours.step()) for _ in range(STEPS)]
    finally:
        ours.close()
        plain.close()
    seconds = [
        statistics.median(pair[side]["seconds"] for pair in pairs) for side in (0, 1)
    ]
    window = arguments[-1] if "--window" in arguments else "2x256x2"
    without = "--no-checkpointing" in plain_arguments
    side = ("without" if without else "with") + " gradient checkpointing"
    ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in pairs)
    last = pairs[-1][1]
    causes = {
        cause: statistics.median(b["causes"][cause] for _, b in pairs)
        for cause in last["causes"]
    }
    print(
        f"\n{case}: 120 M Llama, {window} (micro-batch x tokens x accumulation), fp32"
        f"\n  {datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; medians of {STEPS} steps, alternating"
        f"\n  plain PyTorch {side:<29}{seconds[0]:.2f} s, peak {pairs[-1][0]['peak_bytes'] / 1e9:.2f} GB"
        f"\n  through the session                        {seconds[1]:.2f} s, peak {last['peak_bytes'] / 1e9:.2f} GB"
        f"\n  ratio {ratio:.2f} (at most {bound}); by cause: "
        + ", ".join(f"{cause} {value:.2f} s" for cause, value in causes.items())
        + f"\n  moved per step: {last['read_bytes'] / 1e9:.2f} GB read, {last['written_bytes'] / 1e9:.2f} GB written"
    )
    assert all(a["loss"] == pytest.approx(b["loss"], abs=1e-5) for a, b in pairs)
    assert ratio <= bound
