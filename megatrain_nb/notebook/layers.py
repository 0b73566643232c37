"""The parts of the view that look at layers and at the disk; pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.notebook.parts import (
    MUTED,
    bar,
    between,
    image,
    legend,
    title,
)
from megatrain_nb.notebook.pictures import (
    BLUE,
    GAP,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    band_heights,
    curves,
    heat,
    strip,
    svg_address,
)
from megatrain_nb.notebook.snapshot import NUM_RECENT
from megatrain_nb.plan.timeline import HIT, LATE, MISS
from megatrain_nb.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

    from megatrain_nb.notebook.snapshot import Snapshot
    from megatrain_nb.plan.history import StepRow
    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.runtime.residency import Now

_ON_DISK = "rgba(128,128,128,.35)"
_MAP_STEPS = 64
_MAX_SLOW = 3


def layer_strip(layout: Layout, now: Now) -> str:
    """Return where the bytes of each layer are at this moment."""
    whole = np.array(layout.num_bytes(), float)
    doing = "nothing computes now"
    if now.computing is not None:
        block, kind = now.computing
        doing = f"{kind.lower()} of {_name(layout, block)}"
    in_ram = now.in_ram.sum() / max(whole.sum(), 1.0)
    told = (
        f"{len(layout.blocks)} blocks, first to last; {doing}; {in_ram:.0%} of weights, "
        f"gradients and states in RAM, {format_bytes(now.arriving.sum())} arriving, "
        f"{format_bytes(now.leaving.sum())} leaving"
    )
    heights = band_heights(layout)
    labels = "".join(
        f'<div style="height:{height}px;line-height:{height}px;margin-bottom:{GAP}px;'
        f'font-size:11px;{MUTED}">{"" if name == "now" else name}</div>'
        for name, height in heights.items()
    )
    height = sum(heights.values()) + GAP * (len(heights) - 1)
    colours = (
        (GREEN, "computes, forward"),
        (RED, "backward"),
        (BLUE, "stays in RAM"),
        (SKY, "in RAM, passing"),
        (ORANGE, "arriving from disk"),
        (PINK, "leaving to disk"),
        (_ON_DISK, "on disk"),
    )
    return (
        f"{title('Where every layer is', doing)}"
        f'<div style="display:flex;gap:8px"><div style="flex:none;width:52px;'
        f'padding-top:3px">{labels}</div><div style="flex:1 1 auto;min-width:0;width:100%">'
        f"{image(strip(layout, now), told, height=height)}"
        f"{between(_name(layout, 0), _name(layout, -1))}</div></div>"
        f"{legend(colours, small=True)}"
    )


def maps(layout: Layout | None, rows: Sequence[StepRow]) -> tuple[str, str]:
    """Return two heat maps over the last steps: weights in RAM, and waiting, by layer."""
    shown = map_rows(rows)
    if layout is None or not shown:
        return "", ""
    first, last = shown[0].step, shown[-1].step
    ends = between(f"step {first}", f"step {last}; the first layer on top")
    ram = share_in_ram(layout, shown)
    told = f"Bytes in RAM over steps {first} to {last}: {ram.mean():.0%} on average"
    left = (
        title("In RAM, share of a layer's bytes", f"{ram.mean():.0%} on average")
        + image(heat(ram, BLUE, top=1.0), told, height=110, sharp=True)
        + ends
    )
    stall = np.stack([row.stall_s / row.count for row in shown], axis=1)
    most = float(stall.max())
    told = f"Waiting for layers over steps {first} to {last}: at most {format_seconds(most)}"
    right = (
        title("Waiting for a layer", f"at most {format_seconds(most)} in a step")
        + image(
            heat(np.sqrt(stall), ORANGE, top=most**0.5), told, height=110, sharp=True
        )
        + ends
    )
    return left, right


def share_in_ram(layout: Layout, rows: Sequence[StepRow]) -> NDArray[np.float32]:
    """Return the share of each block's weights, gradients and states that was in RAM, by block and row."""
    whole = np.array(layout.num_bytes(), np.float64)
    weights = whole / np.maximum(whole.sum(axis=0), 1.0)
    in_ram = np.array([row.in_ram for row in rows])
    shares: NDArray[np.float32] = np.einsum("rgb,gb->br", in_ram, weights)
    return shares.astype(np.float32)


def map_rows(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the last rows of the model at hand."""
    if not rows:
        return []
    blocks = len(rows[-1].hits)
    return [row for row in rows[-_MAP_STEPS:] if len(row.hits) == blocks and blocks]


def prefetch(
    layout: Layout | None, rows: Sequence[StepRow], totals: dict[str, float]
) -> str:
    """Return whether what was needed had been read in time."""
    counts = [
        (totals.get(outcome, 0), name, colour)
        for outcome, name, colour in (
            (HIT, "in time", BLUE),
            (LATE, "late", ORANGE),
            (MISS, "missed", RED),
        )
    ]
    total = sum(count for count, _, _ in counts)
    if layout is None or not total:
        return ""
    parts = [(count / total, colour) for count, _, colour in counts]
    told = ", ".join(f"{int(count)} {name}" for count, name, _ in counts)
    explained = [(c, f"{name} <b>{int(count):,}</b>") for count, name, c in counts]
    return (
        f"{title('Reads that were needed', f'{counts[0][0] / total:.1%} in time')}"
        f"{bar(parts, height=14, title=told)}{legend(explained)}{slowest(layout, rows)}"
    )


def slowest(layout: Layout, rows: Sequence[StepRow]) -> str:
    """Name the layers that the last steps waited for most."""
    recent = map_rows(rows)[-NUM_RECENT:]
    if not recent:
        return ""
    stall = np.sum([row.stall_s for row in recent], axis=0)
    stall = stall / sum(row.count for row in recent)
    order = np.argsort(stall)[::-1][:_MAX_SLOW]
    named = ", ".join(
        f"{_name(layout, block)} {format_seconds(stall[block])}"
        for block in order
        if stall[block] > 0
    )
    told = f"most for {named}" if named else "for no layer"
    return (
        f'<div style="margin-top:4px">Waited <b>{format_seconds(stall.sum())}</b> a step '
        f'<span style="{MUTED}">{told}</span></div>'
    )


def disk(snap: Snapshot) -> str:
    """Return what the disk moved in the last minute, beside the best that it has shown and what a probe measured."""
    totals = snap.totals
    if not totals.get("read_bytes", 0) + totals.get("written_bytes", 0):
        return ""
    recent = snap.rows[-NUM_RECENT:]
    best = best_rate(recent)
    total = (
        f"{format_bytes(totals['read_bytes'])} read and "
        f"{format_bytes(totals['written_bytes'])} written so far"
    )
    return (
        f"{title('Disk, the last minute', f'best seen {_rate(best)}' if best else '')}"
        f"{_bandwidth(snap.bandwidth, best)}"
        f"{legend(_rates(recent, snap.probed))}"
        f"{_planned(snap.layout, recent)}"
        f'<div style="{MUTED}">{total}</div>'
    )


def _rates(
    rows: Sequence[StepRow], probed: tuple[float, float] | None
) -> list[tuple[str, str]]:
    """Return colour and text of each direction: bytes/s of these steps, and while the disk was at it."""
    wall = sum(row.wall_s for row in rows)
    if not wall:
        return []
    lines: list[tuple[str, str]] = []
    for index, (colour, name, moved, busy) in enumerate(
        (
            (BLUE, "read", "read_bytes", "read_busy_s"),
            (ORANGE, "written", "written_bytes", "write_busy_s"),
        )
    ):
        num_bytes = sum(getattr(row, moved) for row in rows)
        busy_s = sum(getattr(row, busy) for row in rows)
        rate = f"<b>{_rate(num_bytes / wall)}</b>"
        beside = f"{_rate(num_bytes / busy_s)} while busy" if busy_s else "idle"
        if probed is not None:
            beside += f", probe {_rate(probed[index])}"
        lines.append((colour, f'{name} {rate} <span style="{MUTED}">{beside}</span>'))
    link_s = sum(row.link_s for row in rows)
    if link_s:
        rate = _rate(sum(row.link_bytes for row in rows) / link_s)
        lines.append((GREEN, f"link <b>{rate}</b>"))
    return lines


def _planned(layout: Layout | None, rows: Sequence[StepRow]) -> str:
    """Return the bytes of a step beside those of the plan."""
    count = sum(row.count for row in rows)
    if layout is None or not count or not any(layout.planned_bytes):
        return ""
    moved = (
        sum(row.read_bytes for row in rows) / count,
        sum(row.written_bytes for row in rows) / count,
    )
    each = ", ".join(
        f'<b>{format_bytes(got)}</b> {name} <span style="{MUTED}">'
        f"(plan {format_bytes(planned)})</span>"
        for name, got, planned in zip(
            ("read", "written"), moved, layout.planned_bytes, strict=True
        )
    )
    return f"<div>A step: {each}</div>"


def best_rate(rows: Sequence[StepRow]) -> float:
    """Return the fastest that the disk has been seen to move bytes, in bytes/s; 0 if unknown."""
    for row in reversed(rows):
        least = row.least_seconds.get("disk", 0.0)
        if least > 0:
            return (row.read_bytes + row.written_bytes) / least
    return 0.0


def _bandwidth(
    bandwidth: Sequence[tuple[float, float, float, float]], best: float
) -> str:
    if len(bandwidth) < 2:
        return ""
    lines: list[tuple[str, Any]] = [
        (colour, [(each[0], each[lane]) for each in bandwidth])
        for colour, lane in ((BLUE, 1), (ORANGE, 2), (GREEN, 3))
        if any(each[lane] for each in bandwidth)
    ]
    most = max(max(each[1:]) for each in bandwidth)
    told = f"Disk over the last minute: at most {_rate(most)}"
    if not lines:
        return ""
    drawn = curves(lines, low=0.0, high=max(best, most), mark=best or None)
    return image(svg_address(drawn), told, height=56)


def _name(layout: Layout, block: int) -> str:
    """Return a block's name for HTML: it is the model's, or comes from a file."""
    return escape(layout.blocks[block])


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"
