"""What is folded is what happened: hits, late reads and misses that were made, bytes that were moved."""

from __future__ import annotations

import threading
import time
import tracemalloc
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatrain_nb.notebook.chart import figure_fields
from megatrain_nb.notebook.layers import disk
from megatrain_nb.notebook.render import page
from megatrain_nb.notebook.snapshot import Snapshot, fill
from megatrain_nb.plan.history import History, StepRow
from megatrain_nb.plan.layout import Layout, PieceLayout
from megatrain_nb.plan.model import pack_params
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime.callbacks import StepResult
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.recorder import MAX_EVALUATIONS, MAX_SPANS, Recorder
from megatrain_nb.runtime.recording import follow
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool
from megatrain_nb.units import format_bytes
from tests.notebook.test_pictures import make_layout
from tests.notebook.test_render import text_of
from tests.runtime.common import (
    TinyLM,
    batch,
    loss_of,
    opened,
    seeded,
    window_step,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from megatrain_nb.store.base import IoRecord

PIECE = 4096 * 4
DELAY_S = 0.15
NUM_PACKS = 4


class SlowStore(DiskStore):
    """A read is told to be done so much later than it is."""

    delay_s = 0.0

    def get_into(self, key: str, out: Any, **of: Any) -> Future[None]:
        read = super().get_into(key, out, **of)
        if not self.delay_s:
            return read
        late: Future[None] = Future()
        delay = self.delay_s

        def finish(_: Future[None]) -> None:
            threading.Timer(delay, late.set_result, [None]).start()

        read.add_done_callback(finish)
        return late


class Setting:
    """A pager whose spans and transfers a recorder hears."""

    def __init__(self, directory: Path) -> None:
        packs = tuple(
            pack_params(index, f"layer{index}", [("w", (4096,))])
            for index in range(NUM_PACKS)
        )
        self.recorder = Recorder()
        self.store = SlowStore(directory, direct=False, on_io=self._on_io)
        self.pager = Pager(
            packs,
            prefix="0/",
            pool=HostPool(16 * PIECE),
            store=self.store,
            on_span=self.recorder.on_span,
            tile_numel=2048,
        )
        names = tuple(pack.name for pack in packs)
        self.recorder.on_layout(
            Layout(
                model="0",
                name="Toy",
                blocks=names,
                pack_names=names,
                block_of_pack=tuple(range(NUM_PACKS)),
                pieces=tuple(self.pager.layout()),
            )
        )

    def _on_io(self, record: IoRecord) -> None:
        self.recorder.on_span(
            Span(
                kind=record.op,
                name=record.key,
                start_s=record.start_s,
                end_s=record.end_s,
                num_bytes=record.nbytes,
                lane="disk",
            )
        )

    def row(self) -> StepRow:
        self.recorder.on_step_end(
            StepResult(step=1, loss=1.0, grad_norm=1.0, tokens=1, seconds={"other": 1})
        )
        return self.recorder.rows()[-1]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    setting = Setting(tmp_path)
    for pack in range(NUM_PACKS):
        setting.pager.need(pack, What.WEIGHTS)[:] = pack
        setting.pager.drop(pack, What.WEIGHTS, dirty=True)
    setting.pager.barrier()
    setting.row()  # what was written so far belongs to no test
    setting.recorder.totals.update(dict.fromkeys(setting.recorder.totals, 0))
    yield setting
    setting.store.close()


def test_injected_hits_late_reads_and_misses(setting: Setting) -> None:
    pager = setting.pager
    assert pager.fetch(0, What.WEIGHTS)
    while not pager.piece(0, What.WEIGHTS).landed:
        time.sleep(0.001)
    pager.need(0, What.WEIGHTS)  # in time
    setting.store.delay_s = DELAY_S
    assert pager.fetch(1, What.WEIGHTS)
    pager.need(1, What.WEIGHTS)  # late
    pager.need(2, What.WEIGHTS)  # nobody had asked for it
    pager.need(2, What.WEIGHTS)  # it is there
    with pager.opened(3, What.WEIGHTS):
        pass  # a look at a parameter is not foreseen

    row = setting.row()
    assert row.hits.tolist() == [1, 0, 0, 0]
    assert row.late.tolist() == [0, 1, 0, 0]
    assert row.misses.tolist() == [0, 0, 1, 0]
    assert row.stall_s[0] == row.stall_s[3] == 0
    for block in (1, 2):
        assert 0.9 * DELAY_S < row.stall_s[block] < DELAY_S + 1.0
    totals = setting.recorder.totals
    assert (totals["hit"], totals["late"], totals["miss"]) == (1, 1, 1)
    assert totals["read_bytes"] == NUM_PACKS * PIECE
    assert totals["written_bytes"] == 0
    assert sum(each[1] for each in setting.recorder.bandwidth()) * 0.5 == 4 * PIECE

    # And that is what is drawn.
    snap = fill(Snapshot(state="training"), setting.recorder)
    shown = text_of(page(snap))
    assert "33.3% in time" in shown
    assert "in time 1 late 1 missed 1" in shown
    assert f"{format_bytes(4 * PIECE)} read and 0 B written so far" in shown
    traces = {trace["name"]: trace for trace in figure_fields(snap)["data"]}
    waited = np.array(traces["waiting"]["z"])[:, -1]
    assert waited == pytest.approx(1e3 * row.stall_s, abs=1e-3)


def test_injected_tiles_of_an_update(setting: Setting) -> None:
    """Those that nobody keeps: in time, late, and not read ahead."""
    pager = setting.pager
    for pack, missed in ((0, False), (1, False), (2, True)):
        if pack:
            setting.store.delay_s = DELAY_S
        piece = pager.piece(pack, What.WEIGHTS)
        read = pager.read_tile(piece, 0, pager.tile_numel, patient=True)
        assert read is not None
        slab, reading = read
        while not pack and reading is not None and not reading.done():
            time.sleep(0.001)
        pager.wait_for_tile(piece, 0, reading, missed=missed)
        pager.pool.give(slab)
    row = setting.row()
    assert row.hits.tolist() == [1, 0, 0, 0]
    assert row.late.tolist() == [0, 1, 0, 0]
    assert row.misses.tolist() == [0, 0, 1, 0]
    assert row.stall_s[0] == 0
    assert min(row.stall_s[1:3]) > 0.9 * DELAY_S
    assert setting.recorder.totals["read_bytes"] == 3 * PIECE / 2


def test_seconds_of_known_spans_add_up() -> None:
    """To the microsecond, for each layer; and so drawn, in ms."""
    recorder = Recorder()
    recorder.on_layout(make_layout())
    for block, outcome, milliseconds in (
        (0, "hit", 0.0), (1, "late", 120.0), (1, "miss", 3.5), (3, "late", 40.25),
    ):  # fmt: skip
        recorder.on_span(
            Span(
                kind="NEED", name=f"0/weights/{block}", start_s=5.0, end_s=5.0 + milliseconds / 1e3, outcome=outcome,
            )
        )  # fmt: skip
    for step in (1, 2):  # of the second one nothing is told
        recorder.on_step_end(
            StepResult(
                step=step, loss=1.0, grad_norm=1.0, tokens=1, seconds={"other": 1}
            )
        )
    first, second = recorder.rows()
    expected = [0, 0.1235, 0, 0.04025]
    assert first.stall_s == pytest.approx(expected, abs=1e-6)
    assert not second.stall_s.any()
    assert recorder.totals["stall_s"] == pytest.approx(0.16375, abs=1e-6)
    snap = fill(Snapshot(state="done"), recorder)
    traces = {trace["name"]: trace for trace in figure_fields(snap)["data"]}
    waited = np.array(traces["waiting"]["z"])
    assert waited[:, 0] == pytest.approx([0, 123.5, 0, 40.25], abs=1e-3)
    assert not waited[:, 1].any()


def test_residency_and_what_is_on_its_way(setting: Setting) -> None:
    pager, recorder = setting.pager, setting.recorder
    assert recorder.now().in_ram.sum() == 0
    setting.store.delay_s = DELAY_S
    assert pager.fetch(0, What.WEIGHTS)
    pager.need(0, What.WEIGHTS)[:] = 7
    now = recorder.now()
    assert now.in_ram[0].tolist() == [PIECE, 0, 0, 0]
    assert now.arriving.sum() == now.leaving.sum() == 0
    time.sleep(0.1)
    row = setting.row()
    assert 0 < row.in_ram[0, 0] <= 1
    assert row.in_ram[0, 1:].sum() == row.in_ram[1:].sum() == 0
    time.sleep(0.05)
    assert setting.row().in_ram[0, 0] == pytest.approx(1.0, abs=1e-3)
    pager.drop(0, What.WEIGHTS, dirty=True)
    pager.barrier()
    now = recorder.now()
    assert now.in_ram.sum() == now.arriving.sum() == now.leaving.sum() == 0
    assert recorder.totals["written_bytes"] == PIECE


def test_what_passed_over_a_link_adds_up() -> None:
    """Two copies to the device and one back; its first block was there for half of the step."""
    clock = [100.0]
    recorder = Recorder(clock=lambda: clock[0])
    recorder.on_layout(replace(make_layout(resident=0), in_place=False))
    names = make_layout().pack_names
    for kind, pack, end_s, num_bytes in (
        ("ONLOAD", 0, 101.0, 1000),
        ("ONLOAD", 1, 102.0, 1000),
        ("UNLOAD", 0, 103.0, 0),
        ("OFFLOAD", 1, 103.5, 500),
    ):
        seconds = 0.25 if num_bytes else 0.0
        recorder.on_span(
            Span(kind=kind, name=names[pack], start_s=end_s - seconds, end_s=end_s, num_bytes=num_bytes)
        )  # fmt: skip
    clock[0] = 104.0
    assert recorder.now().on_device.tolist() == [False, True, False, False]
    for step in (1, 2):
        recorder.on_step_end(
            StepResult(
                step=step, loss=1.0, grad_norm=1.0, tokens=1, seconds={"other": 4}
            )
        )
    first, second = recorder.rows()
    assert (first.link_bytes, first.link_s) == (2500, 0.75)
    assert (second.link_bytes, second.link_s) == (0, 0)
    assert first.on_device == pytest.approx([0.5, 0.5, 0, 0])
    assert sum(each[3] for each in recorder.bandwidth()) * 0.5 == 2500
    snap = fill(Snapshot(state="training"), recorder)
    snap.totals["read_bytes"] = 1
    assert f"link {format_bytes(2500 / 0.75)}/s" in text_of(disk(snap))


def test_the_last_step_is_drawn_from_its_own_spans() -> None:
    clock = [0.0]
    recorder = Recorder(clock=lambda: clock[0])
    recorder.on_layout(make_layout())
    for step in (1, 2, 3):
        recorder.on_span(
            Span(kind="BACKWARD", name="model.layers.2", start_s=clock[0] + 0.25, end_s=clock[0] + step / 4 + 0.25)
        )  # fmt: skip
        clock[0] += 2.0
        recorder.on_step_end(StepResult(step=step, loss=1.0, grad_norm=1.0, tokens=1))
    assert recorder.last_step() == [("BACKWARD", 2, 0.25, 1.0)]


def moment(kind: str, key: str, num_bytes: int) -> Span:
    now = time.perf_counter()
    return Span(kind=kind, name=key, start_s=now, end_s=now, num_bytes=num_bytes)


def test_what_arrives_or_leaves_is_in_no_tier() -> None:
    """Tile by tile: only when all of a piece has landed it is in RAM, and not while it is written."""
    recorder = Recorder()
    recorder.on_layout(make_layout(resident=0))
    seen = []
    for kind, key, num_bytes in (
        ("ENTER", "0/weights/2", 1000),
        ("READ", "0/weights/2/0", 600),
        ("READ", "0/weights/2/1", 400),
        ("LEAVE", "0/weights/2", 1000),
        ("WRITE", "0/weights/2/0", 600),
        ("WRITE", "0/weights/2/1", 400),
    ):
        recorder.on_span(moment(kind, key, num_bytes))
        now = recorder.now()
        parts = (now.in_ram, now.arriving, now.leaving)
        assert not any(part[1:].any() or part[0, [0, 1, 3]].any() for part in parts)
        seen.append(tuple(int(part[0, 2]) for part in parts))
    assert seen == [
        (0, 1000, 0),
        (0, 1000, 0),
        (1000, 0, 0),
        (0, 0, 1000),
        (0, 0, 400),
        (0, 0, 0),
    ]


@pytest.mark.parametrize("resident", [0, 9000])
def test_a_whole_run_adds_up(tmp_path: Path, resident: int) -> None:
    with opened(tmp_path) as session:
        session.max_resident_bytes = resident
        model, optimizer = wrapped(seeded(TinyLM), lr=1e-3)
        recorder = Recorder()
        follow(session, recorder)
        results = [window_step(model, optimizer, step) for step in range(5)]
        rows = recorder.rows()
        pager = next(iter(session.models)).pager
        there = sum(piece.num_bytes for piece in pager.layout() if piece.in_ram)
        now = recorder.now()
        assert now.in_ram.sum() + now.arriving.sum() >= there
        pager.barrier()
        assert recorder.now().leaving.sum() == 0

    spans = recorder.last_spans()  # nothing is under way any more
    reads = [span for span in spans if span.kind == "READ"]
    assert sum(span.num_bytes for span in reads) == recorder.totals["read_bytes"]
    for row, result in zip(rows, results, strict=True):
        assert row.read_bytes == result.read_bytes
        assert row.written_bytes == result.written_bytes
        assert row.seconds == result.seconds
        assert np.all((row.in_ram >= 0) & (row.in_ram <= 1))
    # Once the order is known a step moves what the plan says; what is under way at its end counts in the next.
    assert recorder.layout is not None
    read, written = recorder.layout.planned_bytes
    assert sum(row.read_bytes for row in rows[2:]) == pytest.approx(3 * read, rel=0.2)
    moved = sum(row.written_bytes for row in rows[2:])
    assert moved == pytest.approx(3 * written, rel=0.2)
    needs = [span for span in spans if span.kind == "NEED"]
    assert {span.outcome for span in needs} <= {"hit", "late", "miss"}
    counted = sum(recorder.totals[name] for name in ("hit", "late", "miss"))
    assert counted == len(needs) > 0
    whole = np.array(recorder.layout.num_bytes(resident=True))
    assert whole.sum() <= resident


def test_two_sessions_one_after_the_other(tmp_path: Path) -> None:
    """The same model again: nothing of the first session's memory counts for the second."""
    totals = []
    for turn in range(2):
        with opened(tmp_path / str(turn)) as session:
            session.max_resident_bytes = 9000
            model, optimizer = wrapped(seeded(TinyLM), lr=1e-3)
            recorder = Recorder()
            follow(session, recorder)
            for step in range(3):
                window_step(model, optimizer, step)
            pager = next(iter(session.models)).pager
            there = sum(piece.num_bytes for piece in pager.layout() if piece.in_ram)
            now = recorder.now()
            assert now.in_ram.sum() + now.arriving.sum() == there
            assert [row.step for row in recorder.rows()] == [1, 2, 3]
            totals.append(recorder.totals["hit"] + recorder.totals["miss"])
    assert totals[1] > 0


def test_two_hundred_layers_and_many_steps_in_bounded_memory() -> None:
    """What 10,000 steps leave is what 6,000 leave; `History` is tried with 100,000 below."""
    layers = 200
    names = tuple(f"layer{index}" for index in range(layers))
    recorder = Recorder()
    recorder.on_layout(
        Layout(
            model="0", name="Deep", blocks=names, pack_names=names, block_of_pack=tuple(range(layers)),
            pieces=tuple(PieceLayout(f"0/weights/{i}", PIECE, False, False) for i in range(layers)),
        )
    )  # fmt: skip
    begin = recorder.begin_s

    def run(first: int, last: int) -> int:
        for step in range(first, last):
            now, key = begin + step, f"0/weights/{step % layers}"
            for kind, num_bytes, outcome in (
                ("ENTER", PIECE, ""), ("NEED", PIECE, "late"), ("LEAVE", 0, ""),
            ):  # fmt: skip
                recorder.on_span(
                    Span(
                        kind=kind, name=key, start_s=now, end_s=now + 0.5, num_bytes=num_bytes, outcome=outcome,
                    )
                )  # fmt: skip
            recorder.on_span(
                Span(kind="READ", name=f"{key}/0", start_s=now, end_s=now + 0.5, num_bytes=PIECE)
            )  # fmt: skip
            recorder.on_step_end(
                StepResult(step=step, loss=1.0, grad_norm=1.0, tokens=1, seconds={"other": 1})
            )  # fmt: skip
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(1, 6001)  # 4 spans a step: the list of spans is full
        before = tracemalloc.get_traced_memory()[0]
        after = run(6001, 10_001)
    finally:
        tracemalloc.stop()
    assert recorder.totals["late"] == 10_000
    assert sum(row.count for row in recorder.rows()) == 10_000
    assert (
        after - before < 1_000_000
    )  # a row of 200 layers takes 6 kB: 24 MB if all were kept
    assert recorder.now().in_ram.sum() == recorder.now().arriving.sum() == 0


def test_another_models_spans_count_nowhere(setting: Setting) -> None:
    span = Span(kind="NEED", name="7/weights/0", start_s=0, end_s=1, outcome="miss")
    setting.recorder.on_span(span)
    assert setting.recorder.totals["miss"] == 0


def test_a_long_run_stays_bounded() -> None:
    history = History()
    for step in range(1, 100_001):
        row = StepRow(step=step, loss=1.0, tokens=3, hits=np.ones(2, np.float32))
        row.late = row.misses = row.stall_s = row.compute_s = np.zeros(2, np.float32)
        row.in_ram = np.ones((3, 2), np.float32)
        row.seconds = {"compute": 1.0}
        history.append(row)
    rows = list(history)
    assert len(rows) <= 192
    assert sum(row.count for row in rows) == 100_000
    assert sum(row.tokens for row in rows) == 300_000
    assert sum(row.hits.sum() for row in rows) == 200_000
    assert all(row.in_ram == pytest.approx(1.0) for row in rows)
    assert [row.step for row in rows] == sorted(row.step for row in rows)
    assert all(row.count == 1 for row in rows[-64:])


def test_spans_and_bins_stay_bounded() -> None:
    recorder = Recorder()
    for index in range(MAX_SPANS + 100):
        start = recorder.begin_s + index
        recorder.on_span(
            Span(kind="READ", name="x/weights/0/0", start_s=start, end_s=start + 1)
        )
    assert len(recorder.last_spans()) == MAX_SPANS
    assert len(recorder.bandwidth()) == 120


def test_what_one_step_or_many_trainings_tell_stays_bounded() -> None:
    recorder = Recorder()
    for training in range(300):
        recorder.on_train_begin(1)
        for step in range(300 if training == 299 else 1):
            recorder.on_evaluate(step, {"eval_loss": 1.0})
        result = StepResult(step=training, loss=1.0, grad_norm=1.0, tokens=1)
        recorder.on_step_end(result)
    assert len(recorder.evaluations) == MAX_EVALUATIONS
    assert len(recorder.earlier) == 8
    for _ in range(30_000):
        for kind in ("READ", "WRITE"):
            recorder.on_span(moment(kind, "0/weights/0/0", 1))
    assert len(recorder._reads) == len(recorder._writes) == 20_000


def test_gradients_of_the_step_before_are_not_read_again(tmp_path: Path) -> None:
    """transformers' Trainer drops them with ``model.zero_grad``, which forgets them one by one."""
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM), lr=1e-3)
        recorder = Recorder()
        follow(session, recorder)
        for step in range(4):
            loss = loss_of(model, batch(step))
            loss.backward()
            optimizer.step()
            model.zero_grad()
    spans = recorder.last_spans()
    began = max(
        i for i, s in enumerate(spans) if (s.kind, s.outcome) == ("BEGIN", "BACKWARD")
    )
    first = max(i for i, s in enumerate(spans[:began]) if s.outcome == "FORWARD")
    backward = [s for s in spans[first:began] if s.kind == "READ"]
    assert not [s.name for s in backward if "/grads/" in s.name]
