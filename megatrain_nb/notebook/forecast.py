"""Pictures of a plan: HTML that a saved notebook keeps, and a plotly figure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from megatrain_nb.notebook.causes import cause_bars, cause_legend
from megatrain_nb.notebook.parts import image
from megatrain_nb.notebook.pictures import png
from megatrain_nb.plan.report import (
    BOUNDS,
    LANES,
    OTHER,
    TEXT,
    TIERS,
    TRACK,
    bars_html,
    colour,
    needs_text,
    rows_html,
    segments_html,
    tiers_of,
    title,
    verdict,
)
from megatrain_nb.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plotly.graph_objects import Figure

    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.plan import Plan
    from megatrain_nb.plan.timeline import Span

_COLUMNS, _LEVELS = 200, 10
_IDLE = (128, 128, 128, 51)
_HEAD = "font-size:11px;letter-spacing:.03em;opacity:.72;margin:12px 0 4px"
_STAYS = {
    4: "#1fa37a",
    3: "#3b8fd4",
    2: "#7fb2e0",
    1: "#c3a25a",
    0: "rgba(128,128,128,.35)",
}
_STAYS_TEXT = {
    4: "lives on the device, AdamW included",
    3: "weights, gradients and moments stay in RAM",
    2: "weights and gradients stay",
    1: "weights stay",
    0: "streams",
}


def plan_html(plan: Plan, *, advice: bool = True) -> str:
    """Return everything about a plan: verdict, tiers, layers, a step's timeline, and the table; ``advice`` costs time."""
    colour = "#1fa37a" if plan.fits else "#d55e00"
    bound = BOUNDS[plan.bound_by]
    return (
        f'<div style="max-width:980px;{TEXT}">'
        f'<div style="font-size:15px;font-weight:600;margin:4px 0">{escape(title(plan))}</div>'
        f'<div><span style="display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:6px;'
        f'background-color:{colour}"></span><b>{escape(verdict(plan))}</b> &middot; '
        f"{format_seconds(plan.step_seconds)} a step &middot; {format_count(plan.tokens_per_second)} tokens/s "
        f"&middot; bound by {bound}</div>"
        f'<div style="{_HEAD}">Where every byte is, at the peak (the line is the limit)</div>{bars_html(plan)}'
        f'<div style="{_HEAD}">Layers, first to last: what stays in RAM</div>{strip_html(plan)}'
        f'<div style="{_HEAD}">One step, {format_seconds(plan.step_seconds)}</div>{timeline_html(plan)}'
        f'<div style="{_HEAD}">Where its seconds go</div>{cause_bars(plan.seconds)}{cause_legend(plan.seconds)}'
        f'<div style="{_HEAD}">The same training, all in one memory</div>{conventional_html(plan)}'
        f"{_table(plan, advice=advice)}</div>"
    )


def strip_html(plan: Plan) -> str:
    """Return one cell for each block: how much of it stays in RAM, and whether it keeps its activations."""
    spec, stays = plan.spec, plan.residency
    cells, seen = [], {}
    for block in spec.blocks:
        packs = set(block.packs)
        level = sum(
            packs <= each for each in (stays.weights, stays.grads, stays.states)
        )
        if packs <= plan.tail:
            level = 4
        seen[level] = _STAYS_TEXT[level]
        kept = ", keeps its activations" if block.index in plan.kept else ""
        size = spec.block_bytes(block.index)
        border = ";border-bottom:3px solid #a0522d" if kept else ""
        cells.append(
            f'<div title="{escape(block.name)}: {format_bytes(size)} of weights; {_STAYS_TEXT[level]}{kept}" '
            f'style="flex:1 1 4px;width:100%;min-width:2px;height:20px;margin-right:1px;box-sizing:border-box;'
            f'background-color:{_STAYS[level]}{border}"></div>'
        )
    if plan.kept:
        seen[-1] = "keeps its activations (line below)"
    legend = "".join(
        _key(_STAYS.get(level, "#a0522d"), text)
        for level, text in sorted(seen.items(), reverse=True)
    )
    return (
        f'<div style="display:flex">{"".join(cells)}</div>'
        f'<div style="margin-top:4px;line-height:1.7">{legend}</div>'
    )


def timeline_html(plan: Plan) -> str:
    """Return one row for each lane, as an image; a column is as strong as the lane is busy in it."""
    out = []
    for lane, (name, tone) in LANES.items():
        if plan.simulated.busy_s[lane] <= 0:
            continue
        told = f"{name} {plan.simulated.busy_s[lane] / plan.step_seconds:.0%}"
        drawn = image(
            _lane(_shares(plan, lane), tone), f"{told} busy", sharp=True, height=14
        )
        out.append(
            f'<div style="display:flex;align-items:center"><div style="width:130px">{told}</div>'
            f'<div style="flex:1;width:100%">{drawn}</div></div>'
        )
    return (
        f"{''.join(out)}"
        f'<div style="margin-top:4px">Bound by <b>{BOUNDS[plan.bound_by]}</b>: {needs_text(plan)}.</div>'
    )


def _lane(shares: list[float], tone: str) -> str:
    """Return an image of one row of pixels, the stronger the more time is filled; grey where none is."""
    rgb = bytes.fromhex(tone[1:])
    steps = [level / _LEVELS for level in range(1, _LEVELS + 1)]
    palette = [_IDLE, *((*rgb, round(255 * (0.12 + 0.88 * step))) for step in steps)]
    return png(np.rint(np.array([shares]) * _LEVELS).astype(np.uint8), palette)


def conventional_html(plan: Plan) -> str:
    """Return two bars: what one memory would need to hold, and what the device needs here."""
    theirs = plan.conventional
    ours = plan.vram or plan.ram
    total = plan.conventional_bytes
    here = sum(item.num_bytes for item in ours)
    where = "device memory, here" if plan.vram else "RAM, here"
    whole = max(total, here)
    out = []
    for name, items, size in (
        ("all in one memory", theirs, total),
        (where, ours, here),
    ):
        out.append(
            f'<div style="display:flex;align-items:center;margin-top:3px"><div style="width:230px">{name}: '
            f"<b>{format_bytes(size)}</b></div>"
            f'<div style="flex:1;width:100%;display:flex;height:14px">{segments_html(items, whole)}</div></div>'
        )
    return "".join(out)


def machine_html(machine: Machine) -> str:
    """Return a machine as a small picture (rates on a logarithmic scale) and a table."""
    rates = [
        (name, rate)
        for name, rate in (
            ("host memory", machine.memory_bytes_per_s),
            ("link to the device", machine.onload_bytes_per_s),
            ("link from the device", machine.offload_bytes_per_s),
            ("disk, read", machine.read_bytes_per_s),
            ("disk, written", machine.write_bytes_per_s),
            ("disk, both at once", machine.mixed_bytes_per_s),
        )
        if rate
    ]
    most = max(rate for _, rate in rates)
    bars = "".join(
        f'<div style="display:flex;align-items:center;margin-top:3px"><div style="width:160px">{name}</div>'
        f'<div style="flex:1;width:100%;background-color:{TRACK};height:12px"><div style="width:{rate / most:.2%};height:12px;'
        f'background-color:#3b8fd4"></div></div><div style="width:90px;text-align:right">{rate / 1e9:.3g} GB/s</div></div>'
        for name, rate in rates
    )
    cells = "".join(
        f'<tr><th style="text-align:left;padding:2px 12px 2px 0">{escape(label)}</th>'
        f'<td style="text-align:left;padding:2px 12px 2px 0">{escape(text)}</td>'
        f'<td style="text-align:left;opacity:.72">{known}</td></tr>'
        for label, text, known in machine.rows()
    )
    return (
        f'<div style="max-width:720px;{TEXT}">'
        f'<div style="font-size:15px;font-weight:600;margin:4px 0">{escape(machine.name)}</div>{bars}'
        f'<table style="margin-top:10px;border-collapse:collapse">{cells}</table></div>'
    )


def plan_figure(plan: Plan) -> Figure:
    """Return bars by tier with limits, and the timeline of a step, as a plotly figure."""
    from plotly.graph_objects import Bar, Scatter  # noqa: PLC0415 - slow to import
    from plotly.subplots import make_subplots  # noqa: PLC0415

    figure: Figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[0.5, 0.5],
        vertical_spacing=0.2,
        subplot_titles=("Bytes at the peak, share of the limit", "One step"),
    )
    limits, named = plan.limits, set()
    for tier, items in tiers_of(plan).items():
        for item in items:
            figure.add_trace(
                Bar(
                    y=[TIERS[tier]],
                    x=[100 * item.num_bytes / limits[tier]],
                    orientation="h",
                    name=item.name,
                    legendgroup=item.name,
                    showlegend=item.name not in named,
                    marker_color=colour(item.name),
                    hovertemplate=f"{item.name}<br>{format_bytes(item.num_bytes)} of {format_bytes(limits[tier])}"
                    "<extra></extra>",
                ),
                row=1,
                col=1,
            )
            named.add(item.name)
    figure.add_vline(x=100, line_width=2, line_color="#d55e00", row=1, col=1)
    step = plan.step_seconds
    for lane, (name, tone) in LANES.items():
        if plan.simulated.busy_s[lane] <= 0:
            continue
        shares = _shares(plan, lane)
        figure.add_trace(
            Scatter(
                x=[step * (i + 0.5) / _COLUMNS for i in range(_COLUMNS)],
                y=[100 * share for share in shares],
                name=name,
                line={"color": tone, "shape": "hvh", "width": 1.5},
                hovertemplate=f"{name}: %{{y:.0f}} % busy at %{{x:.3g}} s<extra></extra>",
            ),
            row=2,
            col=1,
        )
    figure.update_xaxes(title_text="% of the limit", row=1, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    figure.update_yaxes(title_text="% busy", range=[0, 105], row=2, col=1)
    figure.update_layout(
        barmode="stack",
        title={"text": f"{title(plan)}: {verdict(plan)}", "font": {"size": 14}},
        height=560,
        # Both a light and a dark page show through.
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(128,128,128,.08)",
        font={"color": OTHER},
        margin={"t": 80, "b": 40},
    )
    return figure


def _table(plan: Plan, *, advice: bool) -> str:
    lines = rows_html(plan, advice=advice)
    return f'<table style="margin-top:12px;border-collapse:collapse">{lines}</table>'


def _shares(plan: Plan, lane: str) -> list[float]:
    """Return how busy a lane is in each column of the timeline."""
    return busy_shares(
        (span for span in plan.spans if span.lane == lane and span.kind != "WAIT"),
        plan.step_seconds,
    )


def busy_shares(
    spans: Iterable[Span], seconds: float, columns: int = _COLUMNS
) -> list[float]:
    """Return the share of each column of time that spans fill.

    Examples
    --------
    >>> from megatrain_nb.plan.timeline import Span
    >>> busy_shares([Span(kind="READ", name="a", start_s=0.5, end_s=2.0)], 4.0, 4)
    [0.5, 1.0, 0.0, 0.0]
    """
    width = seconds / columns
    found = [0.0] * columns
    for span in spans:
        first = max(0, int(span.start_s / width))
        last = min(columns - 1, int(span.end_s / width))
        for column in range(first, last + 1):
            begin, end = column * width, (column + 1) * width
            found[column] += max(0.0, min(end, span.end_s) - max(begin, span.start_s))
    return [min(1.0, filled / width) for filled in found]


def _key(colour: str, text: str) -> str:
    return (
        '<span style="display:inline-block;margin-right:14px"><span style="display:inline-block;width:10px;height:10px;'
        f'margin-right:5px;background-color:{colour}"></span>{escape(text)}</span>'
    )
