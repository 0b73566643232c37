"""A recording gives back what was written, refuses what it is not, and becomes a trace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import megatrain_nb as mt
from megatrain_nb.plan.history import StepRow
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime.callbacks import StepResult
from megatrain_nb.runtime.recorder import Recorder
from megatrain_nb.runtime.recording import load
from tests.notebook.test_pictures import make_layout
from tests.runtime.common import TinyLM, opened, seeded, window_step, wrapped

if TYPE_CHECKING:
    from pathlib import Path


def recorded(
    directory: Path, *, spans: bool = False, steps: int = 3
) -> tuple[Path, Any]:
    path = directory / "run.jsonl"
    with opened(directory / "offload"):
        model, optimizer = wrapped(seeded(TinyLM), lr=1e-3)
        with mt.record(path, spans=spans) as recording:
            for step in range(steps):
                window_step(model, optimizer, step)
    return path, recording.recorder


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    path, recorder = recorded(tmp_path)
    found = load(path)
    assert found.recorder.layout == recorder.layout
    assert set(found.tiers) == {"ram", "disk"}
    for row, other in zip(recorder.rows(), found.recorder.rows(), strict=True):
        assert (row.step, row.loss, row.read_bytes, row.seconds) == (
            other.step,
            other.loss,
            other.read_bytes,
            other.seconds,
        )
        for name in ("hits", "late", "misses"):
            assert np.array_equal(getattr(row, name), getattr(other, name))
        assert np.allclose(row.in_ram, other.in_ram, atol=1e-6)
        assert np.allclose(row.stall_s, other.stall_s, atol=1e-6)


def test_totals_of_a_replay_are_those_of_the_run(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"recording": {"format": 1}}]
    recorder = Recorder(write=lines.append)
    recorder.on_layout(make_layout())
    recorder.on_train_begin(1)

    def need(outcome: str, seconds: float) -> None:
        recorder.on_span(
            Span(kind="NEED", name="0/grads/2", start_s=0, end_s=seconds, outcome=outcome)
        )  # fmt: skip

    need("late", 0.25)
    recorder.on_step_end(
        StepResult(step=1, loss=1.0, grad_norm=1.0, tokens=1, read_bytes=3000)
    )
    need("miss", 0.5)  # paid after the last step
    recorder.on_train_end()
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    whole = load(path)
    assert whole.ended
    assert whole.recorder.totals == recorder.totals
    assert (recorder.totals["late"], recorder.totals["miss"]) == (1, 1)

    path.write_text("\n".join(map(json.dumps, lines[:-1])))
    totals = load(path).recorder.totals
    found = [totals[name] for name in ("hit", "late", "miss", "stall_s", "read_bytes")]
    assert found == [0, 1, 0, 0.25, 3000]


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"step"' in line)
    path.write_text("".join(lines[:last]) + lines[last][:-50])
    found = load(path)
    assert [row.step for row in found.recorder.rows()] == [1, 2]
    assert not found.ended


@pytest.mark.parametrize(
    "text", ["", "{}\n", "hello\n", '{"recording":{"format":9}}\n']
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(mt.ArgumentError, match="recording"):
        load(path)
    with pytest.raises(mt.ArgumentError, match="cannot read"):
        load(tmp_path / "missing.jsonl")


def test_recording_needs_a_session_and_a_place(tmp_path: Path) -> None:
    with pytest.raises(mt.SessionError, match="no session"):
        mt.record(tmp_path / "run.jsonl")
    with opened(tmp_path / "offload"), pytest.raises(mt.ArgumentError, match="cannot"):
        mt.record(tmp_path)


def test_trace_holds_the_spans_without_overlap(tmp_path: Path) -> None:
    path, recorder = recorded(tmp_path, spans=True)
    found = load(path)
    assert len(found.recorder.spans) == len(recorder.spans)
    trace = json.loads(mt.export_trace(tmp_path / "trace.json", path).read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    reads = [event for event in events if event["cat"] == "READ"]
    kinds = [span.kind for span in recorder.spans]
    assert len(reads) == kinds.count("READ")
    assert sum(event["args"]["bytes"] for event in reads) == sum(
        span.num_bytes for span in recorder.spans if span.kind == "READ"
    )
    seconds = sum(span.seconds for span in recorder.spans if span.kind == "READ")
    assert sum(e["dur"] for e in reads) == pytest.approx(1e6 * seconds, rel=1e-2)
    begin, end = recorder.spans[0].start_s, recorder.spans[-1].end_s
    last = max(event["ts"] + event["dur"] for event in events)
    assert last == pytest.approx(1e6 * (end - begin), rel=0.1)  # microseconds
    assert "weights of layers.0, tile 0" in {e["name"].split(" ", 1)[1] for e in reads}
    lanes: dict[int, float] = {}
    for event in events:
        assert event["ts"] >= lanes.get(event["tid"], 0.0) - 1e-3
        lanes[event["tid"]] = event["ts"] + event["dur"]
    named = {e["tid"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert named == set(lanes)


def test_a_trace_needs_spans(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path)
    with pytest.raises(mt.ArgumentError, match="spans=True"):
        mt.export_trace(tmp_path / "trace.json", path)
    with opened(tmp_path / "b"), pytest.raises(mt.SessionError, match="followed"):
        mt.export_trace(tmp_path / "trace.json")


def test_a_row_goes_through_json() -> None:
    row = StepRow(step=7, hits=np.array([0, 2], np.float32), seconds={"wait": 0.5})
    row.late = row.misses = row.stall_s = row.compute_s = np.zeros(2, np.float32)
    row.in_ram = np.zeros((3, 2), np.float32)
    other = StepRow.from_json(json.loads(json.dumps(row.to_json())))
    assert other.step == 7
    assert other.hits.tolist() == [0, 2]
    assert other.in_ram.shape == (3, 2)
    assert other.seconds == {"wait": 0.5}
