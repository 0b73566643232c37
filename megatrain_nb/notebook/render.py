"""A Snapshot as HTML and as one line of text; pure.

Only divs, tables and ``<img>``: what JupyterLab keeps in a notebook it does not trust. The same page is drawn
live, when all is done, and from a recording. Text takes the page's colour; fills are mid tones that a light and a
dark page both carry.
"""

from __future__ import annotations

import html as _html
import math
from typing import TYPE_CHECKING

from megatrain_nb.notebook.causes import cause_bars, cause_legend
from megatrain_nb.notebook.layers import disk, layer_strip, maps, prefetch
from megatrain_nb.notebook.parts import (
    MUTED,
    bar,
    between,
    card,
    columns,
    image,
    legend,
    number,
    table,
    title,
)
from megatrain_nb.notebook.pictures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    curves,
    svg_address,
)
from megatrain_nb.notebook.snapshot import ENDED, PAST
from megatrain_nb.plan.report import TEXT
from megatrain_nb.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from megatrain_nb.notebook.snapshot import Snapshot
    from megatrain_nb.runtime.status import TierStatus

_TIERS = {"device": "Device", "ram": "RAM", "disk": "Disk"}
_STATES = {
    "waiting": ("starting", GREY),
    "training": ("training", BLUE),
    "paused": ("paused; nothing computes", ORANGE),
    "finishing": ("stopping after this step", ORANGE),
    "stopping": ("stopping at the next block; interrupt again to break off", ORANGE),
    "done": ("done", GREEN),
    "stopped": ("stopped, as asked; the last step is whole", ORANGE),
    "recorded": ("from a recording", GREY),
    "kept": ("the last training of the open session", GREY),
    "interrupted": ("interrupted", ORANGE),
    "failed": ("failed", RED),
}
_EDGE = "rgba(128,128,128,.35)"
_CODE_FONT = "var(--jp-code-font-family, monospace)"
_MAX_CODE = 90
# How much of its colour a part of a bar has: what the pool does not hold, and what was there at the peak.
_OWN, _PEAK = "99", "44"
_MAX_METRICS = 4


def text_line(snap: Snapshot) -> str:
    """Return one line, for terminals, logs and screen readers."""
    parts = []
    if snap.step:
        parts += [
            f"loss {number(snap.loss)}",
            f"gradient norm {number(snap.grad_norm)}",
        ]
        if snap.tokens_per_s:
            parts.append(f"{format_count(snap.tokens_per_s)} tokens/s")
        parts.append(f"{format_seconds(_step_s(snap))} per step")
    parts.append(f"{_clock(snap.elapsed_s)} elapsed")
    left_s = snap.left_s
    if left_s is not None and snap.state == "training":
        parts.append(f"about {_clock(left_s)} left")
    parts += [
        f"{_tier_name(n, t)} {format_bytes(t.used_bytes)} ({_peak_text(t, _planned(snap, n))})"
        for n, t in snap.tiers.items()
    ]
    state = "" if snap.state == "training" else f" ({_STATES[snap.state][0]})"
    if snap.state == "waiting" and snap.doing:
        state = f" (starting; {snap.doing})"
    return f"{_position(snap)}{state}: {', '.join(parts)}"


def page(snap: Snapshot) -> str:
    """Return the whole view as HTML."""
    body = [_head(snap)]
    if snap.layout is not None and snap.now is not None:
        body.append(card(layer_strip(snap.layout, snap.now)))
    if snap.rows:
        body.append(columns(_loss(snap), _figures(snap)))
    lower = [_step_time(snap), prefetch(snap.layout, snap.rows, snap.totals)]
    body.append(columns(*lower))
    body.append(columns(*maps(snap.layout, snap.rows)))
    body.append(columns(disk(snap), _memory(snap)))
    body += [
        f'<div style="margin-top:10px;{MUTED}">{said}</div>'
        for said in (_html.escape(snap.said), _earlier(snap))
        if said
    ]
    return (
        f'<div style="max-width:1180px;box-sizing:border-box;margin:6px 3px;'
        f"padding:12px 16px 14px;border:1px solid {_EDGE};border-radius:8px;"
        f'{TEXT}">{"".join(body)}</div>'
    )


def _head(snap: Snapshot) -> str:
    label, colour = _STATES[snap.state]
    if snap.state == "waiting" and snap.doing:
        line, _, code = snap.doing.partition(": ")
        label = (
            f'{line}: <span style="font-family:{_CODE_FONT}">'
            f"{_html.escape(code[:_MAX_CODE])}</span>"
        )
    times = f"{_clock(snap.elapsed_s)} elapsed"
    left_s = snap.left_s
    if left_s is not None and snap.state in ("training", "stopping"):
        times += f" &middot; about {_clock(left_s)} left"
    dot = (
        f'<span style="display:inline-block;width:9px;height:9px;border-radius:5px;'
        f'margin-right:6px;background-color:{colour}"></span>'
    )
    done = ""
    if snap.total_steps:
        share = min(snap.num_done / snap.total_steps, 1.0)
        done = bar([(share, colour)], height=6, title=f"{share:.0%} of the steps")
    return (
        f'<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 0">'
        f'<span style="font-size:17px;font-weight:600;margin-right:14px">{_position(snap)}</span>'
        f'<span style="margin-right:14px">{dot}{label}</span>'
        f'<span style="margin-left:auto;{MUTED}">{times}</span></div>'
        f'<div style="margin-top:7px">{done}</div>'
    )


def _loss(snap: Snapshot) -> str:
    head = (
        f'{title("Loss")}<div style="font-size:22px;font-weight:600;line-height:1.2">'
        f"{number(snap.loss)}</div>"
    )
    losses = snap.losses
    if len(losses) < 2:
        return head
    (x0, y0), (x1, y1) = losses[0], losses[-1]
    found = [(step, each.get("eval_loss", math.nan)) for step, each in snap.evaluations]
    evaluated = [(x, y) for x, y in found if math.isfinite(y)]
    source = svg_address(curves([(BLUE, losses), (ORANGE, evaluated)]))
    told = f"Loss from {y0:.3g} at step {x0} to {y1:.3g} at step {x1}"
    lowest = number(min(y for _, y in losses))
    ends = between(f"step {x0}: {number(y0)}", f"lowest {lowest}", f"step {x1}")
    return f"{head}{image(source, told, height=64)}{ends}"


def _figures(snap: Snapshot) -> str:
    speed = f"{format_count(snap.tokens_per_s)} tokens/s" if snap.tokens_per_s else "-"
    rows = [
        ("Speed", speed, ""),
        ("Time per step", format_seconds(_step_s(snap)), ""),
        (
            "Gradient norm",
            number(snap.grad_norm),
            _small_curve(snap, "grad_norm", "Gradient norm"),
        ),
    ]
    if snap.rows and math.isfinite(snap.rows[-1].lr):
        rate = number(snap.rows[-1].lr)
        rows.append(("Learning rate", rate, _small_curve(snap, "lr", "Learning rate")))
    for name, value, step in snap.evaluated[:_MAX_METRICS]:
        label = f"Evaluation, {_html.escape(name)}"
        rows.append((label, number(value), f"at step {step}"))
    if snap.step != snap.num_done:
        rows.append(("Step of this model", str(snap.step), ""))
    cells = "".join(
        f'<tr style="background:none"><td style="text-align:left;padding:2px 12px 2px 0;white-space:nowrap;'
        f'{MUTED}">{name}</td><td style="padding:2px 0;width:45%">{curve}</td>'
        f'<td style="text-align:right;padding:2px 0 2px 10px;white-space:nowrap;'
        f'font-weight:600">{value}</td></tr>'
        for name, value, curve in rows
    )
    return title("Last steps") + table(cells)


def _small_curve(snap: Snapshot, name: str, told: str) -> str:
    points = [
        (float(row.step), float(getattr(row, name)))
        for row in snap.rows
        if math.isfinite(getattr(row, name))
    ]
    if len(points) < 2:
        return ""
    source = svg_address(curves([(GREY, points)], fill=False))
    told = f"{told} from {number(points[0][1])} to {number(points[-1][1])}"
    return image(source, told, height=18)


def _step_time(snap: Snapshot) -> str:
    took = snap.seconds
    total = sum(took.values())
    if total <= 0:
        return ""
    planned = snap.layout.planned_seconds if snap.layout is not None else {}
    plan = sum(planned.values())
    value = f"{format_seconds(total)}, plan {format_seconds(plan)}" if plan else ""
    return (
        f"{title('Where a step&#39;s time goes', value)}{cause_bars(took, planned)}"
        f"{cause_legend(took, planned)}{_bound(snap)}{_no_plan(snap)}"
    )


def _no_plan(snap: Snapshot) -> str:
    """Say how a plan could stand beside what is measured, where this machine was never measured."""
    if snap.layout is None or snap.probed is not None or snap.state in ENDED:
        return ""
    if snap.layout.planned_seconds or snap.state in PAST:
        return ""
    command = f'<span style="font-family:{_CODE_FONT}">%megatrain probe</span>'
    return (
        f'<div style="margin-top:4px;{MUTED}">What it should take stands here once {command} '
        "has measured this machine.</div>"
    )


def _bound(snap: Snapshot) -> str:
    """Say how near the last steps came to what the busiest resource allows."""
    recent = snap.recent
    least: dict[str, float] = {}
    for row in recent:
        for resource, seconds in row.least_seconds.items():
            least[resource] = least.get(resource, 0.0) + seconds
    wall = sum(row.wall_s for row in recent)
    if not least or wall <= 0:
        return ""
    count = sum(row.count for row in recent)
    bound = max(least, key=least.__getitem__)
    needs = ", ".join(
        f"{_html.escape(resource)} {format_seconds(seconds / count)}"
        for resource, seconds in least.items()
    )
    return (
        f'<div style="margin-top:4px"><b>{least[bound] / wall:.0%}</b> of what {_html.escape(bound)} '
        f'allows <span style="{MUTED}">(least time a step: {needs})</span></div>'
    )


def _memory(snap: Snapshot) -> str:
    if not snap.tiers:
        return ""
    rows = "".join(
        f'<div style="display:flex;flex-wrap:wrap;justify-content:space-between;'
        f'margin-top:4px"><span style="margin-right:12px">{_html.escape(_tier_name(name, tier))}</span>'
        f"<span>{_tier_html(tier, _planned(snap, name))}</span></div>{_tier_bar(tier)}{_tier_parts(tier)}"
        for name, tier in snap.tiers.items()
    )
    return title("Memory: now, peak, budget") + rows


def _tier_name(name: str, tier: TierStatus) -> str:
    if name == "ram" and tier.own_bytes is None:
        return "RAM (the pool alone)"  # what else is taken nobody says
    return _TIERS.get(name, name)


def _tier_colour(tier: TierStatus) -> str:
    if not tier.limit_bytes:
        return BLUE
    peak = tier.peak_bytes / tier.limit_bytes
    return RED if peak > 0.98 else ORANGE if peak > 0.9 else BLUE


def _tier_bar(tier: TierStatus) -> str:
    whole = tier.limit_bytes or max(tier.peak_bytes, tier.used_bytes, 1)
    now, peak = tier.used_bytes / whole, tier.peak_bytes / whole
    held = (tier.used_bytes - (tier.own_bytes or 0)) / whole
    colour = _tier_colour(tier)
    ends = [min(share, 1.0) for share in (0.0, held, now, max(now, peak))]
    shades = (colour, f"{colour}{_OWN}", f"{colour}{_PEAK}")
    parts = [(b - a, c) for a, b, c in zip(ends, ends[1:], shades, strict=False)]
    told = f"{now:.0%} now, {peak:.0%} at the peak"
    if not tier.limit_bytes:
        told = f"{now:.0%} of the peak now"
    return bar(parts, height=10, title=told)


def _tier_parts(tier: TierStatus) -> str:
    """Say what the parts of a bar are, where it has more than one."""
    if tier.own_bytes is None:
        return ""
    colour, held = _tier_colour(tier), tier.used_bytes - tier.own_bytes
    return legend(
        [
            (colour, f"pool {format_bytes(held)}"),
            (f"{colour}{_OWN}", f"model&#39;s own tensors and all else {format_bytes(tier.own_bytes)}"),
        ],
        small=True,
    )  # fmt: skip


def _planned(snap: Snapshot, tier: str) -> int:
    """Return the peak of a tier by the plan, in bytes; 0 where nobody can tell."""
    return snap.layout.planned_peaks.get(tier, 0) if snap.layout is not None else 0


def _tier_html(tier: TierStatus, planned: int) -> str:
    return (
        f"<b>{format_bytes(tier.used_bytes)}</b> "
        f'<span style="{MUTED}">{_peak_text(tier, planned)}</span>'
    )


def _peak_text(tier: TierStatus, planned: int) -> str:
    plan = f", plan {format_bytes(planned)}" if planned else ""
    limit = (
        f"budget {format_bytes(tier.limit_bytes)}" if tier.limit_bytes else "no limit"
    )
    return f"peak {format_bytes(tier.peak_bytes)}{plan}, {limit}"


def _position(snap: Snapshot) -> str:
    if snap.state == "waiting":
        return "Starting"
    if snap.total_steps:
        return f"Step {snap.num_done} of {snap.total_steps}"
    return f"Step {snap.step}"


def _earlier(snap: Snapshot) -> str:
    if not snap.earlier:
        return ""
    told = "; ".join(
        f"{steps} steps, last loss {number(loss)}" for steps, loss in snap.earlier
    )
    return f"Trained before this: {told}"


def _step_s(snap: Snapshot) -> float:
    return sum(snap.seconds.values())


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else format_seconds(seconds)
