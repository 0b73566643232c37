"""What the images show is what the arrays say: pixels are decoded again."""

from __future__ import annotations

import base64
import itertools
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
    BACKWARD,
    BLUE,
    FORWARD,
    GAP,
    GREEN,
    GREY,
    LEAVES,
    ORANGE,
    PASSES,
    PINK,
    RED,
    SKY,
    STAYS,
    band_heights,
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


def test_strip_has_a_band_for_each_kind_of_bytes() -> None:
    layout, now = make_layout(resident=0), make_now(computing=(2, "BACKWARD"))
    now.in_ram[0, 0] = now.arriving[1, 1] = 1000
    now.leaving[2, 3] = 2000
    pixels = pixels_of(strip(layout, now))
    wide = pixels.shape[1] // 4
    tops = np.cumsum([0, *(height + GAP for height in band_heights(layout).values())])
    cells = pixels[tops[:4]][:, wide // 2 :: wide]
    assert cells.tolist() == [
        [0, 0, BACKWARD, 0],
        [PASSES, ON_DISK, ON_DISK, ON_DISK],
        [ON_DISK, ARRIVES, ON_DISK, ON_DISK],
        [ON_DISK, ON_DISK, ON_DISK, LEAVES],
    ]


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


def test_maps_have_the_first_layer_on_top() -> None:
    snap = full_snapshot()
    ram, wait = (
        pixels_of(parse(html).images[0]["src"] or "")
        for html in maps(snap.layout, snap.rows)
    )
    high = ram.shape[0] // 4
    assert ram[::high, 0].tolist() == [32, 22, 11, 0]  # of 32 levels
    assert wait[::high, 0].tolist() == [0, 32, 0, 0]


def test_maps_show_the_last_steps_each_as_one() -> None:
    """Rows that stand for several steps show their mean."""
    rows = make_rows(100)
    for row in rows:
        row.count, row.stall_s = 5, 5 * row.stall_s
    layout = make_layout()
    _, right = maps(layout, rows)
    assert "step 37<" in right  # the last 64
    assert "at most 200 ms in a step" in right
    snap = replace(full_snapshot(), rows=rows)
    assert "Waited 200 ms a step" in text_of(slowest(layout, rows))
    heats = [t for t in figure_fields(snap)["data"] if t["type"] == "heatmap"]
    waited = np.array(heats[1]["z"])
    assert waited.shape == (4, 64)
    assert np.allclose(waited[1], 200.0)


def test_the_disks_curves_are_read_and_written() -> None:
    (drawn,) = parse(disk(full_snapshot())).images
    svg = base64.b64decode((drawn["src"] or "").partition("base64,")[2]).decode()
    lines = re.findall(r'<polyline points="([^"]*)" fill="none" stroke="([^"]*)"', svg)
    places = {
        colour: [float(pair.split(",")[1]) for pair in line.split()]
        for line, colour in lines
    }
    # 1 and 2 GB/s read, half of that written; 2 GB/s is at the top, 5 of 80 pixels below the edge.
    assert places == {BLUE: [40.0, 5.0], ORANGE: [57.5, 40.0]}


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


def test_the_share_of_the_bound_is_that_of_the_busiest() -> None:
    shown = text_of(page(full_snapshot()))  # of 1 s: 0.8 s of computing, 0.5 s of disk
    told = "80% of what compute allows (least time a step: compute 800 ms, disk 500 ms)"
    assert told in shown


# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009),
# table 1, the last row: linear RGB as it is seen.
SEEN_AS = {
    "all cones": np.eye(3),
    "no red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def lab_of(colour: str, seen: Any) -> Any:
    """Return CIE L*a*b* of an sRGB colour, as someone sees it."""
    value = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_xyz = [
        [0.4124, 0.3576, 0.1805],
        [0.2126, 0.7152, 0.0722],
        [0.0193, 0.1192, 0.9505],
    ]
    xyz = np.array(to_xyz) @ np.clip(seen @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN_AS)
def test_no_two_colours_look_the_same(seen: str) -> None:
    """An eye tells apart what differs by 2.3; here it is more than three times that for each pair."""
    every = (BLUE, SKY, ORANGE, PINK, GREEN, RED, GREY)
    places = [lab_of(colour, np.array(SEEN_AS[seen])) for colour in every]
    apart = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(places, 2)]
    assert min(apart) > 8


@pytest.mark.parametrize("blocks", [4, 200])
def test_whole_page_is_safe_told_and_small(blocks: int) -> None:
    html = page(replace(full_snapshot(blocks, count=64), tiers=FULL.tiers))
    tags = parse(html)
    assert tags.seen <= {"div", "span", "b", "table", "tbody", "tr", "td", "img"}
    assert html.isascii()
    assert len(html) < 80_000
    assert all(image["alt"] for image in tags.images)
    assert len(tags.pictures) >= 5  # bars: steps, causes, reads, two tiers
    assert all(each["aria-label"] for each in tags.pictures)
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
