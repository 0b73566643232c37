"""A Snapshot as HTML and as one line of text; pure.

Only divs, tables and an ``<img>``: what JupyterLab keeps in a notebook it does not trust.
Text takes the page's colour; fills are mid tones that a light and a dark page both carry
(Okabe and Ito's palette, which colour-blind readers tell apart).
"""

from __future__ import annotations

import base64
import html as _html
import math
from typing import TYPE_CHECKING

from megatrain_nb.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from megatrain_nb.notebook.progress import Snapshot, TierUse

BLUE, ORANGE, GREEN, GREY, RED = "#3b8fd4", "#e69f00", "#1fa37a", "#8c8c8c", "#d55e00"
_CAUSES = {
    "compute": ("compute", BLUE),
    "wait": ("waiting for disk", ORANGE),
    "update": ("update", GREEN),
    "other": ("other", GREY),
}
_TIERS = {"device": "Device", "ram": "RAM", "disk": "Disk"}
_STATES = {
    "waiting": ("waiting for the first step", GREY),
    "training": ("training", BLUE),
    "stopping": ("stopping at the next block; interrupt again to break off", ORANGE),
    "done": ("done", GREEN),
    "interrupted": ("interrupted", ORANGE),
    "failed": ("failed", RED),
}
_EDGE = "rgba(128,128,128,.35)"
_TRACK = "rgba(128,128,128,.2)"
_MUTED = "opacity:.72"
_FONT = "var(--jp-ui-font-family, system-ui, sans-serif)"
_NUMBERS = "font-variant-numeric:tabular-nums"


def text_line(snap: Snapshot) -> str:
    """Return one line, for terminals, logs and screen readers."""
    parts = []
    if snap.step:
        parts += [
            f"loss {_number(snap.loss)}",
            f"gradient norm {_number(snap.grad_norm)}",
        ]
        if snap.tokens_per_s:
            parts.append(f"{format_count(snap.tokens_per_s)} tokens/s")
        parts.append(f"{format_seconds(_step_s(snap))} per step")
    parts.append(f"{_clock(snap.elapsed_s)} elapsed")
    if snap.left_s is not None and snap.state == "training":
        parts.append(f"about {_clock(snap.left_s)} left")
    parts += [
        f"{_TIERS.get(n, n)} {format_bytes(t.used_bytes)} ({_peak_text(t)})"
        for n, t in snap.tiers.items()
    ]
    state = "" if snap.state == "training" else f" ({_STATES[snap.state][0]})"
    return f"{_position(snap)}{state}: {', '.join(parts)}"


def page(snap: Snapshot) -> str:
    """Return the whole view as HTML."""
    body = [_head(snap)]
    if snap.step:
        body.append(_row(_loss(snap), _figures(snap)))
    lower = [part for part in (_step_time(snap), _memory(snap)) if part]
    if lower:
        body.append(_row(*lower))
    return (
        f'<div style="max-width:980px;box-sizing:border-box;margin:6px 3px;'
        f"padding:12px 16px 14px;border:1px solid {_EDGE};border-radius:8px;"
        f'font:13px/1.45 {_FONT};{_NUMBERS}">{"".join(body)}</div>'
    )


def sparkline(points: list[tuple[int, float]]) -> str:
    """Return a curve as an SVG file, for an ``<img>``."""
    width, height, pad = 600, 80, 5
    x0, x1 = points[0][0], max(points[-1][0], points[0][0] + 1)
    low, high = min(y for _, y in points), max(y for _, y in points)
    span = (high - low) or 1.0
    line = " ".join(
        f"{(x - x0) / (x1 - x0) * width:.1f},"
        f"{pad + (high - y) / span * (height - 2 * pad):.1f}"
        for x, y in points
    )
    right = f"{(points[-1][0] - x0) / (x1 - x0) * width:.1f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'preserveAspectRatio="none"><polygon points="0,{height} {line} {right},{height}"'
        f' fill="{BLUE}" fill-opacity=".14"/><polyline points="{line}" fill="none" '
        f'stroke="{BLUE}" stroke-width="2" stroke-linejoin="round" '
        f'vector-effect="non-scaling-stroke"/></svg>'
    )


def _head(snap: Snapshot) -> str:
    label, colour = _STATES[snap.state]
    times = f"{_clock(snap.elapsed_s)} elapsed"
    if snap.left_s is not None and snap.state in ("training", "stopping"):
        times += f" &middot; about {_clock(snap.left_s)} left"
    dot = (
        f'<span style="display:inline-block;width:9px;height:9px;border-radius:5px;'
        f'margin-right:6px;background-color:{colour}"></span>'
    )
    bar = ""
    if snap.total_steps:
        share = min(snap.num_done / snap.total_steps, 1.0)
        bar = _bar([(share, colour)], height=6, title=f"{share:.0%} of the steps")
    return (
        f'<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 14px">'
        f'<span style="font-size:17px;font-weight:600">{_position(snap)}</span>'
        f"<span>{dot}{label}</span>"
        f'<span style="margin-left:auto;{_MUTED}">{times}</span></div>'
        f'<div style="margin-top:7px">{bar}</div>'
    )


def _loss(snap: Snapshot) -> str:
    head = (
        f'{_title("Loss")}<div style="font-size:22px;font-weight:600;line-height:1.2">'
        f"{_number(snap.loss)}</div>"
    )
    if len(snap.losses) < 2:
        return head
    (x0, y0), (x1, y1) = snap.losses[0], snap.losses[-1]
    data = base64.b64encode(sparkline(snap.losses).encode()).decode()
    told = f"Loss from {y0:.3g} at step {x0} to {y1:.3g} at step {x1}"
    ends = (
        f"<span>step {x0}: {_number(y0)}</span>"
        f"<span>lowest {_number(min(y for _, y in snap.losses))}</span>"
        f"<span>step {x1}</span>"
    )
    return (
        f'{head}<img alt="{told}" title="{told}" src="data:image/svg+xml;base64,{data}" '
        f'style="display:block;width:100%;height:64px;margin:4px 0 2px">'
        f'<div style="display:flex;justify-content:space-between;font-size:11px;{_MUTED}">'
        f"{ends}</div>"
    )


def _figures(snap: Snapshot) -> str:
    speed = f"{format_count(snap.tokens_per_s)} tokens/s" if snap.tokens_per_s else "-"
    rows = [
        ("Speed", speed),
        ("Time per step", format_seconds(_step_s(snap))),
        ("Gradient norm", _number(snap.grad_norm)),
    ]
    if snap.step != snap.num_done:
        rows.append(("Step of this model", str(snap.step)))
    cells = "".join(
        f'<tr style="background:none"><td style="text-align:left;padding:2px 12px 2px 0;'
        f'{_MUTED}">{name}</td><td style="text-align:right;padding:2px 0;'
        f'font-weight:600">{value}</td></tr>'
        for name, value in rows
    )
    return _title("Last steps") + _table(cells)


def _step_time(snap: Snapshot) -> str:
    total = sum(snap.seconds.values())
    if total <= 0:
        return ""
    shares: dict[str, float] = dict.fromkeys(_CAUSES, 0.0)
    for cause, seconds in snap.seconds.items():
        shares[cause if cause in _CAUSES else "other"] += seconds
    parts = [(s / total, _CAUSES[c][1]) for c, s in shares.items()]
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><span style="display:'
        f"inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px;"
        f'background-color:{_CAUSES[cause][1]}"></span>{_CAUSES[cause][0]} '
        f"<b>{format_seconds(seconds)}</b> "
        f'<span style="{_MUTED}">{seconds / total:.0%}</span></span>'
        for cause, seconds in shares.items()
    )
    return (
        f"{_title('Where a step&#39;s time goes')}{_bar(parts, height=14)}"
        f'<div style="margin-top:5px;line-height:1.6">{legend}</div>'
    )


def _memory(snap: Snapshot) -> str:
    if not snap.tiers:
        return ""
    rows = "".join(
        f'<div style="display:flex;flex-wrap:wrap;justify-content:space-between;'
        f'gap:0 12px;margin-top:4px"><span>{_TIERS.get(name, _html.escape(name))}</span>'
        f"<span>{_tier_html(tier)}</span></div>{_tier_bar(tier)}"
        for name, tier in snap.tiers.items()
    )
    return _title("Memory: now, peak, budget") + rows


def _tier_bar(tier: TierUse) -> str:
    whole = tier.limit_bytes or max(tier.peak_bytes, tier.used_bytes, 1)
    now, peak = tier.used_bytes / whole, tier.peak_bytes / whole
    colour = RED if peak > 1 else BLUE
    faint = f"{colour}66"
    return _bar(
        [(min(now, 1.0), colour), (max(min(peak, 1.0) - now, 0.0), faint)], height=10
    )


def _tier_html(tier: TierUse) -> str:
    return (
        f"<b>{format_bytes(tier.used_bytes)}</b> "
        f'<span style="{_MUTED}">{_peak_text(tier)}</span>'
    )


def _peak_text(tier: TierUse) -> str:
    limit = (
        f"budget {format_bytes(tier.limit_bytes)}" if tier.limit_bytes else "no limit"
    )
    return f"peak {format_bytes(tier.peak_bytes)}, {limit}"


def _bar(parts: list[tuple[float, str]], *, height: int, title: str = "") -> str:
    fills = "".join(
        f'<div style="width:{share:.2%};height:{height}px;background-color:{colour}"></div>'
        for share, colour in parts
        if share > 0
    )
    return (
        f'<div title="{title}" style="display:flex;height:{height}px;border-radius:3px;'
        f'overflow:hidden;background-color:{_TRACK}">{fills}</div>'
    )


def _row(*parts: str) -> str:
    cells = "".join(
        f'<div style="flex:1 1 300px;min-width:0">{part}</div>' for part in parts
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px 36px;margin-top:12px">{cells}</div>'


def _table(rows: str) -> str:
    return (
        f'<table style="width:100%;margin:0;border-collapse:collapse;font-size:13px">'
        f"<tbody>{rows}</tbody></table>"
    )


def _title(text: str) -> str:
    return (
        f'<div style="font-size:11px;letter-spacing:.03em;margin-bottom:4px;{_MUTED}">'
        f"{text}</div>"
    )


def _position(snap: Snapshot) -> str:
    if snap.total_steps:
        return f"Step {snap.num_done} of {snap.total_steps}"
    return f"Step {snap.step}"


def _step_s(snap: Snapshot) -> float:
    return sum(snap.seconds.values())


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.3e}"
    return f"{value:#.4g}".removesuffix(".")


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else format_seconds(seconds)
