"""Small images from arrays: the strip of layers, heat maps, curves; pure, and cheap enough for four a second.

An ``<img>`` survives in a notebook that is not trusted, where inline SVG does not. A PNG with a palette and
transparency costs some kilobytes, however many layers there are, and lies on a light and a dark page alike.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain_nb.plan.layout import GROUPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.runtime.residency import Now

# Okabe and Ito's colours in mid tones, which colour-blind readers tell apart.
BLUE, SKY, ORANGE, PINK, GREEN, RED, GREY = (
    "#3b8fd4", "#8cc8ef", "#e69f00", "#c774a4", "#1fa37a", "#d55e00", "#8c8c8c",
)  # fmt: skip

STAYS, PASSES, ARRIVES, LEAVES, FORWARD, BACKWARD = range(2, 8)
_STRIP = [
    (0, 0, 0, 0),
    (128, 128, 128, 56),  # on disk
    *((*bytes.fromhex(c[1:]), 255) for c in (BLUE, SKY, ORANGE, PINK, GREEN, RED)),
]
_STRIP_WIDTH, _MAP_WIDTH, _MAP_HEIGHT = 1120, 560, 150
_LEVELS = 32
GAP = 3  # pixels between two bands of the strip
Pixels = NDArray[np.uint8]


def png(pixels: Pixels, palette: Sequence[tuple[int, ...]]) -> str:
    """Return an image as a ``data:`` address.

    Parameters
    ----------
    pixels : uint8, shape (height, width)
        Indices into the palette.
    palette
        Red, green, blue and opacity of each index, 0 to 255.

    References
    ----------
    W3C, Portable Network Graphics (third edition), sections 11.2 and 11.3.
    """
    height, width = pixels.shape
    rows = np.zeros((height, width + 1), np.uint8)  # the first byte of a row: no filter
    rows[:, 1:] = pixels
    colours = bytes(value for colour in palette for value in colour[:3])
    opacity = bytes(colour[3] for colour in palette)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours),
        (b"tRNS", opacity),
        (b"IDAT", zlib.compress(rows.tobytes(), 1)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body))
        for tag, body in chunks
    )  # fmt: skip
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def strip_cells(layout: Layout, now: Now, group: int, height: int) -> Pixels:
    """Return one row of the strip: each block a column that is filled from below.

    Parameters
    ----------
    layout, now
        The blocks, and where their bytes are.
    group
        0 weights, 1 gradients, 2 states.
    height
        Pixels.

    Returns
    -------
    uint8, shape (height, blocks)
        `STAYS`, `PASSES`, `ARRIVES`, `LEAVES`, or 1 for what is on disk only. What has bytes at all gets a pixel.
    """
    whole = np.maximum(np.array(layout.num_bytes()[group], np.float64), 1.0)
    planned = np.array(layout.num_bytes(resident=True)[group], np.float64)
    stays = np.minimum(now.in_ram[group], planned)
    parts = (stays, now.in_ram[group] - stays, now.arriving[group], now.leaving[group])
    tops = np.cumsum([np.ceil(part / whole * height - 1e-6) for part in parts], axis=0)
    level = np.arange(height)[::-1, None]
    cells = np.full((height, len(whole)), 1, np.uint8)
    for kind, top in zip((LEAVES, ARRIVES, PASSES, STAYS), tops[::-1], strict=True):
        cells[level < top] = kind
    return cells


def band_heights(layout: Layout) -> dict[str, int]:
    """Return the bands of the strip from the top: names and heights in pixels; `GAP` lies between two."""
    device = {} if layout.in_place else {"device": 12}
    return {"now": 7, **device, **dict(zip(GROUPS, (26, 14, 14), strict=True))}


def strip(layout: Layout, now: Now) -> str:
    """Return the strip of all layers, first to last: what computes, and the three kinds of bytes below."""
    blocks = len(layout.blocks)
    heights = band_heights(layout)
    marks = np.zeros((heights["now"], blocks), np.uint8)
    if now.computing is not None:
        block, kind = now.computing
        marks[:, block] = FORWARD if kind == "FORWARD" else BACKWARD
    gap = np.zeros((GAP, blocks), np.uint8)
    bands = [marks, gap]
    if not layout.in_place:
        device = np.where(now.on_device, FORWARD, 1).astype(np.uint8)
        bands += [np.repeat(device[None], heights["device"], axis=0), gap]
    for group, name in enumerate(GROUPS):
        bands += [strip_cells(layout, now, group, heights[name]), gap]
    cells = np.concatenate(bands[:-1])
    width = max(1, _STRIP_WIDTH // max(blocks, 1))
    pixels = np.repeat(cells, width, axis=1)
    if width >= 6:
        pixels[:, width - 2 :: width] = pixels[:, width - 1 :: width] = 0
    return png(pixels, _STRIP)


def heat(values: NDArray[np.float32], colour: str, *, top: float) -> str:
    """Return a heat map: opacity grows with the value, up to ``top``.

    Parameters
    ----------
    values : float32, shape (blocks, steps)
        One row for each block, the first on top.
    colour
        ``#rrggbb``.
    top
        The value that is fully opaque.
    """
    red, green, blue = bytes.fromhex(colour[1:])
    palette = [
        (128, 128, 128, 28),
        *((red, green, blue, 255 * i // _LEVELS) for i in range(1, _LEVELS + 1)),
    ]
    share = np.clip(values / max(top, 1e-12), 0, 1)
    levels = np.ceil(share * _LEVELS - 1e-6).astype(np.uint8)
    blocks, steps = levels.shape
    high = max(1, _MAP_HEIGHT // max(blocks, 1))
    wide = max(1, _MAP_WIDTH // max(steps, 1))
    return png(np.repeat(np.repeat(levels, high, axis=0), wide, axis=1), palette)


def curves(
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    low: float | None = None,
    high: float | None = None,
    mark: float | None = None,
    fill: bool = True,
) -> str:
    """Return curves over one x axis as the text of an SVG file.

    Parameters
    ----------
    lines
        Colour and points of each; points in the order of x.
    low, high
        Range of y; None takes the points'.
    mark
        A dashed line at this y.
    fill
        Fill the area below the first curve.
    """
    width, height, pad = 600, 80, 5
    every = [point for _, points in lines for point in points]
    x0, x1 = min(x for x, _ in every), max(x for x, _ in every)
    bottom = min(y for _, y in every) if low is None else low
    top = max(y for _, y in every) if high is None else high
    x_span, y_span = (x1 - x0) or 1.0, (top - bottom) or 1.0

    x_scale, y_scale = width / x_span, (height - 2 * pad) / y_span

    def place(points: Sequence[tuple[float, float]]) -> str:
        placed = [
            number
            for x, y in points
            for number in ((x - x0) * x_scale, pad + (top - y) * y_scale)
        ]
        # One format for all of them: this is drawn four times a second.
        return " ".join(["%.1f,%.1f"] * len(points)) % tuple(placed)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'preserveAspectRatio="none">'
    ]
    for index, (colour, points) in enumerate(lines):
        if not points:
            continue
        line = place(points)
        if fill and index == 0:
            left, right = (place([points[i]]).split(",")[0] for i in (0, -1))
            parts.append(
                f'<polygon points="{left},{height} {line} {right},{height}" '
                f'fill="{colour}" fill-opacity=".14"/>'
            )
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" '
            'stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'
        )
    if mark is not None:
        y = place([(x0, mark)]).split(",")[1]
        parts.append(
            f'<line x1="0" x2="{width}" y1="{y}" y2="{y}" stroke="{GREY}" '
            'stroke-dasharray="4 4" vector-effect="non-scaling-stroke"/>'
        )
    return "".join([*parts, "</svg>"])


def svg_address(text: str) -> str:
    """Return an SVG file as a ``data:`` address."""
    return f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}"
