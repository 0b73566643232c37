from __future__ import annotations

import base64
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from megatrain_nb.notebook.pictures import BLUE, ORANGE, RED, curves
from megatrain_nb.notebook.render import page, text_line
from megatrain_nb.notebook.snapshot import Snapshot
from megatrain_nb.plan.history import StepRow
from megatrain_nb.runtime.status import TierStatus

SECONDS = {"compute": 2.0, "wait": 1.0, "update": 0.5, "other": 0.25, "new": 0.25}
FULL = Snapshot(
    state="training",
    num_done=37,
    total_steps=200,
    elapsed_s=148.0,
    rows=[
        StepRow(
            step=step,
            count=count,
            end_s=4.0 * step,
            loss=loss,
            grad_norm=0.9,
            tokens=4936 * count,
            seconds={cause: s * count for cause, s in SECONDS.items()},
        )
        for step, count, loss in ((1, 1, 5.5), (20, 19, 3.0), (37, 17, 2.3456))
    ],
    tiers={
        "ram": TierStatus(
            used_bytes=5 * 10**8,
            peak_bytes=7 * 10**8,
            limit_bytes=8 * 10**8,
            own_bytes=2 * 10**8,
        ),
        "disk": TierStatus(used_bytes=10**9, peak_bytes=2 * 10**9, limit_bytes=None),
    },
)
STATES = ["waiting", "training", "stopping", "done", "interrupted", "failed"]


class Tags(HTMLParser):
    """Collects the tags, and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.pictures: list[dict[str, str | None]] = []  # of divs

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        else:
            self.open.append(tag)
        if ("role", "img") in attrs:
            self.pictures.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    return tags


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_text_line() -> None:
    assert text_line(FULL) == (
        "Step 37 of 200: loss 2.346, gradient norm 0.9000, 1.23 k tokens/s, "
        "4.00 s per step, 2 min 28 s elapsed, about 10 min 52 s left, "
        "RAM 500 MB (peak 700 MB, budget 800 MB), Disk 1.00 GB (peak 2.00 GB, no limit)"
    )


def test_page_tells_everything_with_units() -> None:
    shown = text_of(page(FULL))
    for part in (
        "Step 37 of 200",
        "2 min 28 s elapsed",
        "about 10 min 52 s left",
        "2.346",
        "1.23 k tokens/s",
        "4.00 s",
        "waiting for disk 1.00 s 25%",
        "other (Python, data) 500 ms",  # a cause that is not known here counts as other
        "500 MB peak 700 MB, budget 800 MB",
        "pool 300 MB model&#39;s own tensors and all else 200 MB",
        "1.00 GB peak 2.00 GB, no limit",
    ):
        assert part in shown


@pytest.mark.parametrize("state", STATES)
def test_page_uses_only_what_untrusted_notebooks_keep(state: str) -> None:
    html = page(replace(FULL, state=state))
    tags = parse(html)
    assert tags.seen <= {"div", "span", "b", "table", "tbody", "tr", "td", "img"}
    assert html.isascii()
    assert (tags.images[0]["alt"] or "").startswith("Loss from 5.5 at step 1 to 2.35")


@pytest.mark.parametrize("state", STATES)
def test_page_before_the_first_step(state: str) -> None:
    snap = Snapshot(state=state)
    parse(page(snap))
    begins = "Starting (starting)" if state == "waiting" else "Step 0"
    assert text_line(snap).startswith(begins)


def test_what_the_cell_does_before_it_trains_is_told() -> None:
    snap = Snapshot(doing="line 3: model = make(a < b)", elapsed_s=2.0)
    parse(page(snap))
    assert "Starting line 3: model = make(a &lt; b) 2 s elapsed" in text_of(page(snap))
    assert (
        text_line(snap)
        == "Starting (starting; line 3: model = make(a < b)): 2 s elapsed"
    )


@pytest.mark.parametrize(
    ("peak", "colour"), [(890, BLUE), (910, ORANGE), (985, RED), (1010, RED)]
)
def test_a_tier_near_its_budget_changes_colour(peak: int, colour: str) -> None:
    html = page(replace(FULL, tiers={"ram": TierStatus(500, peak, 1000)}))
    assert f"width:50.00%;height:10px;background-color:{colour}" in html
    assert f"50% now, {peak / 1000:.0%} at the peak" in html


def test_both_parts_of_the_ram_and_its_peak_are_stacked() -> None:
    html = page(replace(FULL, tiers={"ram": TierStatus(500, 800, 1000, 200)}))
    assert re.findall(r"width:([\d.]+)%;height:10px;background-color:([#\w]+)", html) == [
        ("30.00", BLUE),
        ("20.00", f"{BLUE}99"),
        ("30.00", f"{BLUE}44"),
    ]  # fmt: skip
    over = page(replace(FULL, tiers={"ram": TierStatus(1500, 1600, 1000, 700)}))
    shares = re.findall(r"width:([\d.]+)%;height:10px", over)
    assert shares == ["80.00", "20.00"]  # a bar ends at the budget; the numbers do not
    assert "150% now, 160% at the peak" in over


def test_where_the_kernel_does_not_say_the_pool_alone_is_told() -> None:
    snap = replace(FULL, tiers={"ram": TierStatus(500, 800, 1000)})
    shown, said = text_of(page(snap)), "RAM (the pool alone) 500 B"
    assert f"{said} peak 800 B, budget 1.00 kB" in shown
    assert "own tensors" not in shown
    assert f"{said} (peak 800 B, budget 1.00 kB)" in text_line(snap)


def test_evaluations_are_shown() -> None:
    found = {"eval_loss": 3.25, "eval_top_k": 0.5, "eval_runtime": 9.0, "epoch": 1.0}
    snap = replace(FULL, evaluations=[(20, {"eval_loss": 4.0}), (37, found)])
    shown = text_of(page(snap))
    assert "Evaluation, loss at step 37 3.250" in shown
    assert "Evaluation, top k at step 37 0.5000" in shown
    assert "runtime" not in shown
    source = parse(page(snap)).images[0]["src"] or ""
    drawn = base64.b64decode(source.partition("base64,")[2]).decode()
    assert drawn.count("<polyline") == 2


def test_text_takes_the_colour_of_the_page() -> None:
    """Dark or light: no text has a colour of its own, and what is filled shows on both."""
    html = page(FULL)
    styles = re.findall(r'style="([^"]*)"', html)
    said = [part.partition(":") for style in styles for part in style.split(";")]
    assert "color" not in {name.strip() for name, _, _ in said}
    fills = {value for name, _, value in said if name.strip().startswith("background")}
    for fill in fills - {"none"}:
        if fill.startswith("rgba("):
            assert float(fill.rstrip(")").split(",")[-1]) < 0.5
        else:
            channels = bytes.fromhex(fill[1:7])
            assert 60 < sum(channels) / 3 < 220


def test_unknown_numbers_are_a_dash() -> None:
    snap = Snapshot(state="training", num_done=3, rows=[StepRow(step=3)])
    assert math.isnan(snap.loss)
    parse(page(snap))
    assert "loss -, gradient norm -" in text_line(snap)


def test_step_of_the_model_is_shown_where_it_differs() -> None:
    snap = Snapshot(
        state="training", num_done=5, total_steps=20, rows=[StepRow(step=25)]
    )
    assert "Step 5 of 20" in text_of(page(snap))
    assert "Step of this model 25" in text_of(page(snap))


def test_sparkline_is_an_image_within_its_frame() -> None:
    for points in ([(1, 2.0), (5, 1.0), (9, 4.0)], [(1, 3.0), (2, 3.0)], [(4, 1.0)]):
        svg = ET.fromstring(curves([(BLUE, points)]))
        line = svg[1].attrib["points"].split()
        places = [tuple(map(float, pair.split(","))) for pair in line]
        assert len(places) == len(points)
        assert all(0 <= x <= 600 and 0 <= y <= 80 for x, y in places)
    source = parse(page(FULL)).images[0]["src"] or ""
    assert base64.b64decode(source.partition("base64,")[2]).startswith(b"<svg")
