"""The chart of a run for plotly's renderer, as plain data; pure, and without importing plotly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_nb.notebook.causes import COLOURS, NAMES
from megatrain_nb.notebook.layers import best_rate, map_rows, share_in_ram
from megatrain_nb.notebook.pictures import BLUE, GREEN, GREY, ORANGE, RED, SKY

if TYPE_CHECKING:
    from megatrain_nb.notebook.snapshot import Snapshot

MIME = "application/vnd.plotly.v1+json"
_KINDS = {
    "READ": ("read from disk", ORANGE),
    "FORWARD": ("forward", GREEN),
    "BACKWARD": ("backward", RED),
    "STEP": ("update", BLUE),
    "NEED": ("waiting", GREY),
}
_GRID = "rgba(128,128,128,.25)"
_FALLBACK = (
    '<div style="opacity:.72;font-size:12px">The interactive chart of this run shows in '
    "JupyterLab and in Notebook.</div>"
)


def bundle(snap: Snapshot) -> dict[str, Any]:
    """Return the chart for each kind of frontend; empty where there is too little to draw."""
    figure = figure_fields(snap)
    if not figure:
        return {}
    told = f"Chart of the run: {snap.num_done} steps"
    return {MIME: figure, "text/html": _FALLBACK, "text/plain": told}


def figure_fields(snap: Snapshot) -> dict[str, Any]:
    """Return what ``plotly.graph_objects.Figure`` takes: loss, speed, disk, layers, and the last step.

    Every number is one of `StepRow` or of a span: nothing is smoothed.
    """
    rows = snap.rows
    if len(rows) < 2 or snap.layout is None:
        return {}
    traces: list[dict[str, Any]] = []
    steps = [row.step for row in rows]
    traces.append(_line("loss", steps, [row.loss for row in rows], BLUE, axis=1))
    speed = [row.tokens / row.wall_s if row.wall_s else math.nan for row in rows]
    traces.append(_line("tokens/s", steps, speed, GREEN, axis=2))
    for name, moved, colour in (
        ("read", "read_bytes", BLUE),
        ("written", "written_bytes", ORANGE),
    ):
        rates = [getattr(r, moved) / r.wall_s / 1e9 if r.wall_s else 0.0 for r in rows]
        traces.append(_line(name, steps, rates, colour, axis=3))
    best = best_rate(rows)
    if best:
        traces.append(_level("best seen", steps, best / 1e9, GREY, axis=3))
    traces += _causes(snap)
    plan = sum(snap.layout.planned_seconds.values())
    if plan:
        traces.append(_level("plan", steps, plan, RED, axis=4))
    traces += _maps(snap)
    traces += _timeline(snap)
    return {"data": traces, "layout": _layout(snap)}


def _line(
    name: str, x: list[int], y: list[float], colour: str, *, axis: int
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": [round(v, 6) if math.isfinite(v) else None for v in y],
        "line": {"color": colour, "width": 2},
        "showlegend": False,
        **_axes(axis),
    }


def _level(
    name: str, steps: list[int], value: float, colour: str, *, axis: int
) -> dict[str, Any]:
    line = _line(name, steps, [value] * len(steps), colour, axis=axis)
    return line | {"line": {"color": colour, "dash": "dot", "width": 1.5}}


def _causes(snap: Snapshot) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "name": NAMES[cause],
            "x": [row.step for row in snap.rows],
            "y": [
                round(row.seconds.get(cause, 0.0) / row.count, 6) for row in snap.rows
            ],
            "marker": {"color": colour},
            "showlegend": False,
            "hovertemplate": "step %{x}: %{y:.3s}s",
            **_axes(4),
        }
        for cause, colour in COLOURS.items()
        if any(row.seconds.get(cause) for row in snap.rows)
    ]


def _maps(snap: Snapshot) -> list[dict[str, Any]]:
    shown = map_rows(snap.rows)
    assert snap.layout is not None
    if not shown:
        return []
    ram = share_in_ram(snap.layout, shown)
    wait = np.stack([1e3 * row.stall_s / row.count for row in shown], axis=1)
    return [
        {
            "type": "heatmap",
            "name": name,
            "x": [row.step for row in shown],
            "y": list(snap.layout.blocks),
            "z": np.round(values.astype(float), 3).tolist(),
            "colorscale": [[0, _faint(colour)], [1, colour]],
            "zmin": 0,
            "zmax": top,
            "showscale": False,
            "hovertemplate": hover,
            **_axes(axis),
        }
        for name, values, colour, top, hover, axis in (
            ("in RAM", ram, BLUE, 1.0, "%{y}, step %{x}: %{z:.0%} in RAM", 5),
            ("waiting", wait, ORANGE, max(float(wait.max()), 1e-3), "%{y}, step %{x}: %{z} ms", 6),
        )
    ]  # fmt: skip


def _faint(colour: str) -> str:
    """Return a colour that a light and a dark page show through."""
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgba({red},{green},{blue},.08)"


def _timeline(snap: Snapshot) -> list[dict[str, Any]]:
    assert snap.layout is not None
    blocks = snap.layout.blocks
    traces = []
    for kind, (name, colour) in _KINDS.items():
        x: list[float | None] = []
        y: list[str | None] = []
        for found, block, start_s, end_s in snap.last_step:
            if found == kind:
                x += [round(1e3 * start_s, 3), round(1e3 * end_s, 3), None]
                y += [blocks[block], blocks[block], None]
        if x:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": x,
                    "y": y,
                    "line": {"color": colour, "width": 3 if kind == "READ" else 6},
                    "opacity": 0.9,
                    "showlegend": True,
                    "hovertemplate": f"{name}, %{{y}}: %{{x}} ms",
                    **_axes(7),
                }
            )
    return traces


def _axes(number: int) -> dict[str, str]:
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}


def _layout(snap: Snapshot) -> dict[str, Any]:
    """Place seven small charts: two columns of three, and the last step below."""
    assert snap.layout is not None
    places = {
        1: ("Loss", 0, 0), 2: ("Tokens per second", 1, 0), 3: ("Disk, GB/s", 0, 1),
        4: ("Seconds a step, by cause (dotted: the plan)", 1, 1), 5: ("In RAM, share of a layer's bytes", 0, 2),
        6: ("Waiting for a layer, ms", 1, 2),
    }  # fmt: skip
    layout: dict[str, Any] = {
        "height": 900,
        "margin": {"l": 60, "r": 16, "t": 36, "b": 40},
        "barmode": "stack",
        "bargap": 0.1,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY, "size": 11},
        "hoverlabel": {"font": {"size": 12}},
        "legend": {"orientation": "h", "y": -0.06, "x": 0},
        "annotations": [],
        "colorway": [BLUE, ORANGE, GREEN, RED, SKY],
    }

    def add(number: int, name: str, x: list[float], y: list[float]) -> None:
        axis = {"gridcolor": _GRID, "zeroline": False, "linecolor": _GRID}
        layout[f"xaxis{number}"] = {**axis, "domain": x, "anchor": f"y{number}"}
        layout[f"yaxis{number}"] = {**axis, "domain": y, "anchor": f"x{number}"}
        layout["annotations"].append(
            {
                "text": name,
                "x": x[0],
                "y": y[1],
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 12},
            }
        )

    for number, (name, column, row) in places.items():
        left, top = 0.54 * column, 1 - 0.255 * row
        add(number, name, [left, left + 0.46], [top - 0.19, top])
    layout["yaxis3"]["rangemode"] = "tozero"
    add(7, "The last step, ms, by layer", [0, 1], [0, 0.2])
    blocks = list(snap.layout.blocks)
    order = {"autorange": "reversed", "type": "category", "showticklabels": False}
    for number in (5, 6):
        layout[f"yaxis{number}"].update(order)
        layout[f"xaxis{number}"]["showgrid"] = False  # it would lie on the map
        layout[f"yaxis{number}"].update(showgrid=False, ticks="")
    layout["yaxis7"].update(order, categoryarray=blocks, categoryorder="array")
    return layout
