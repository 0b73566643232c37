"""What the images show is what the arrays say: pixels are decoded again."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatrain_nb.notebook.chart import figure_fields
from megatrain_nb.notebook.layers import disk, maps, prefetch, slowest
from megatrain_nb.notebook.pictures import (
    ARRIVES,
    FORWARD,
    LEAVES,
    PASSES,
    STAYS,
    heat,
    png,
    strip,
    strip_cells,
)
from megatrain_nb.notebook.render import page, text_line
from megatrain_nb.notebook.snapshot import Snapshot
from megatrain_nb.plan.history import StepRow
from megatrain_nb.plan.layout import Layout, PieceLayout
from megatrain_nb.runtime.residency import Now
from megatrain_nb.runtime.status import TierStatus
from tests.notebook.test_render import FULL, parse, text_of

ON_DISK = 1


def pixels_of(address: str) -> Any:
    """Decode a PNG as section 9 of its standard says, for images without filters."""
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    place, chunks = 8, {}
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        tag, body = (
            data[place + 4 : place + 8],
            data[place + 8 : place + 8 + size],
        )
        (check,) = struct.unpack(">I", data[place + 8 + size : place + 12 + size])
        assert check == zlib.crc32(tag + body)
        chunks[tag] = body
        place += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    rows = rows.reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def make_layout(blocks: int = 4, *, resident: int = 1) -> Layout:
    names = tuple(f"model.layers.{index}" for index in range(blocks))
    return Layout(
        model="0",
        name="Toy",
        blocks=names,
        pack_names=names,
        block_of_pack=tuple(range(blocks)),
        pieces=tuple(
            PieceLayout(f"0/{what}/{index}", 1000, index < resident, False)
            for index in range(blocks)
            for what in ("weights", "grads", "exp_avg", "exp_avg_sq")
        ),
        planned_bytes=(3000, 2000),
    )


def make_now(blocks: int = 4, computing: Any = None) -> Now:
    zeros = np.zeros((3, blocks))
    return Now(
        in_ram=zeros.copy(),
        arriving=zeros.copy(),
        leaving=zeros.copy(),
        on_device=np.zeros(blocks, bool),
        computing=computing,
    )


def make_rows(count: int = 12, blocks: int = 4) -> list[StepRow]:
    return [
        StepRow(
            step=step,
            end_s=float(step),
            loss=5.0 / step,
            grad_norm=1.0,
            lr=1e-3,
            tokens=100,
            seconds={"compute": 0.8, "wait": 0.2},
            least_seconds={"compute": 0.8, "disk": 0.5},
            read_bytes=3000,
            written_bytes=2000,
            read_busy_s=0.25,
            write_busy_s=0.5,
            hits=np.full(blocks, 3, np.float32),
            late=np.eye(1, blocks, 1, dtype=np.float32)[0],
            misses=np.zeros(blocks, np.float32),
            stall_s=np.eye(1, blocks, 1, dtype=np.float32)[0] * 0.2,
            compute_s=np.full(blocks, 0.2, np.float32),
            in_ram=np.tile(np.linspace(1, 0, blocks, dtype=np.float32), (3, 1)),
        )
        for step in range(1, count + 1)
    ]


def full_snapshot(blocks: int = 4, count: int = 12) -> Snapshot:
    rows = make_rows(count, blocks)
    now = make_now(blocks, (1, "FORWARD"))
    return Snapshot(
        state="done",
        num_done=count,
        total_steps=count,
        layout=make_layout(blocks),
        now=now,
        rows=rows,
        bandwidth=[(0.0, 1e9, 5e8, 0.0), (0.5, 2e9, 1e9, 0.0)],
        totals={
            "hit": 36, "late": 12, "miss": 0, "stall_s": 2.4, "read_bytes": 36_000, "written_bytes": 24_000,
        },
        last_step=[("FORWARD", 1, 0.0, 0.2), ("NEED", 1, 0.2, 0.4)],
    )  # fmt: skip


def test_png_is_the_pixels() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = [(index, 0, 0, 255) for index in range(12)]
    assert np.array_equal(pixels_of(png(pixels, palette)), pixels)


def test_strip_fills_each_block_by_its_bytes() -> None:
    now = make_now()
    now.in_ram[0] = [1000, 500, 0, 0]  # the first one stays, the second passes
    now.arriving[0] = [0, 500, 1000, 0]
    now.leaving[0] = [0, 0, 0, 250]
    cells = strip_cells(make_layout(), now, 0, 8)
    assert cells[:, 0].tolist() == [STAYS] * 8
    assert cells[:, 1].tolist() == [ARRIVES] * 4 + [PASSES] * 4
    assert cells[:, 2].tolist() == [ARRIVES] * 8
    assert cells[:, 3].tolist() == [ON_DISK] * 6 + [LEAVES] * 2


@pytest.mark.parametrize("blocks", [1, 4, 82, 203, 1500])
def test_strip_has_a_column_for_each_block(blocks: int) -> None:
    now = make_now(blocks, (blocks - 1, "FORWARD"))
    pixels = pixels_of(strip(make_layout(blocks), now))
    wide = pixels.shape[1] // blocks
    assert pixels.shape[1] == blocks * wide
    marked = np.flatnonzero(pixels[0] == FORWARD)
    assert marked.min() == (blocks - 1) * wide
    assert len(marked) == (wide - 2 if wide >= 6 else wide)


def test_heat_is_a_cell_for_each_value() -> None:
    values = np.array([[0, 0.5], [1.0, 2.0]], np.float32)
    pixels = pixels_of(heat(values, "#e69f00", top=1.0))
    high, wide = pixels.shape[0] // 2, pixels.shape[1] // 2
    assert pixels[::high, ::wide].tolist() == [[0, 16], [32, 32]]


def test_the_figures_data_is_what_was_measured() -> None:
    snap = full_snapshot()
    assert snap.layout is not None
    traces = {t["name"]: t for t in figure_fields(snap)["data"]}
    assert traces["loss"]["y"] == [round(5.0 / step, 6) for step in range(1, 13)]
    assert traces["read"]["y"] == [3000 / 1e9] * 12
    assert traces["written"]["y"] == [2000 / 1e9] * 12
    assert "" not in traces
    heats = [t for t in figure_fields(snap)["data"] if t["type"] == "heatmap"]
    assert np.allclose(np.array(heats[1]["z"])[1], 200.0)  # ms, of the second layer
    assert np.array(heats[1]["z"])[[0, 2, 3]].sum() == 0
    assert np.array(heats[0]["z"])[:, 0] == pytest.approx(
        [1, 2 / 3, 1 / 3, 0], abs=1e-3
    )
    forward = traces["forward"]
    assert forward["x"] == [0.0, 200.0, None]
    assert forward["y"] == ["model.layers.1", "model.layers.1", None]


def test_counts_and_rates_are_told() -> None:
    snap = full_snapshot()
    shown = text_of(prefetch(snap.layout, snap.rows, snap.totals))
    assert "75.0% in time" in shown
    assert "in time 36 late 12 missed 0" in shown
    assert snap.layout is not None
    assert "Waited 200 ms a step most for model.layers.1 200 ms" in text_of(
        slowest(snap.layout, snap.rows)
    )
    shown = text_of(disk(snap))
    assert "best seen 10.0 kB/s" in shown
    assert "read 3.00 kB/s 12.0 kB/s while busy" in shown
    assert "3.00 kB read (plan 3.00 kB)" in shown
    assert "36.0 kB read and 24.0 kB written so far" in shown
    snap.probed = (4000.0, 3000.0)
    shown = text_of(disk(snap))
    assert "read 3.00 kB/s 12.0 kB/s while busy, probe 4.00 kB/s" in shown
    assert "written 2.00 kB/s 4.00 kB/s while busy, probe 3.00 kB/s" in shown
    left, right = maps(snap.layout, snap.rows)
    assert "step 1" in left
    assert "at most 200 ms in a step" in right


@pytest.mark.parametrize("blocks", [4, 200])
def test_whole_page_is_safe_told_and_small(blocks: int) -> None:
    html = page(full_snapshot(blocks, count=64))
    tags = parse(html)
    assert tags.seen <= {"div", "span", "b", "table", "tbody", "tr", "td", "img"}
    assert html.isascii()
    assert len(html) < 80_000
    assert all(image["alt"] for image in tags.images)
    assert all((image["src"] or "").startswith("data:image/") for image in tags.images)
    assert "http" not in html.replace("http://www.w3.org", "")


def test_names_are_escaped() -> None:
    snap = full_snapshot()
    snap.said = "<script>"
    assert snap.layout is not None
    snap.layout = replace(snap.layout, blocks=("<script>",) * 4)
    snap.rows[-1].least_seconds = {"<script>": 9.0}
    assert "<script>" not in page(snap)


def test_the_plan_stands_beside_what_is_measured() -> None:
    planned = {"compute": 1.5, "wait": 0.25, "update": 0.25, "other": 0.0}
    layout = replace(make_layout(), planned_seconds=planned)
    html = page(replace(FULL, layout=layout))
    parse(html)
    shown = text_of(html)
    assert "4.00 s, plan 2.00 s" in shown
    assert "compute 2.00 s 50% plan 1.50 s" in shown
    assert "waiting for disk 1.00 s 25% plan 250 ms" in shown
    assert "other (Python, data) 500 ms 12% plan 0 " in shown
    assert "link" not in shown
    # Both bars on one scale: the longer one is full.
    widths = re.findall(
        r'aria-label="compute \d+%[^>]*><div style="width:([\d.]+)%', html
    )
    assert widths == ["50.00", "37.50"]
    fields = figure_fields(replace(FULL, layout=layout))
    (level,) = (each for each in fields["data"] if each["name"] == "plan")
    assert level["y"] == [2.0, 2.0, 2.0]
    assert level["yaxis"] == "y4"


def test_where_no_plan_is_known_it_is_said_how_to_get_one() -> None:
    hint = "What it should take stands here once %megatrain probe has measured"
    live = replace(FULL, layout=make_layout())
    assert hint in text_of(page(live))
    parse(page(live))
    for there in (
        replace(live, probed=(1e9, 1e9)),  # measured, and yet nothing can be told
        replace(live, state="done"),  # too late
        replace(live, state="recorded"),
        FULL,  # no model is known yet
    ):
        assert hint not in text_of(page(there))


def test_waiting_for_the_link_is_shown_where_there_is_one() -> None:
    assert "waiting for the link" not in text_of(page(FULL))
    row = StepRow(step=1, seconds={"compute": 1.0, "link": 3.0})
    shown = text_of(page(replace(FULL, rows=[row])))
    assert "waiting for the link 3.00 s 75%" in shown


def test_the_planned_peak_stands_beside_the_measured_one() -> None:
    layout = replace(make_layout(), planned_peaks={"ram": 700})
    tiers = {"ram": TierStatus(500, 800, 1000), "disk": TierStatus(1, 2, None)}
    snap = replace(FULL, layout=layout, tiers=tiers)
    for shown in (text_of(page(snap)), text_line(snap)):
        assert "peak 800 B, plan 700 B, budget 1.00 kB" in shown
        assert "peak 2 B, no limit" in shown
