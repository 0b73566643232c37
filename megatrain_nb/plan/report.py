"""A plan as text and as HTML that a saved notebook keeps: tables and coloured boxes, no script."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from megatrain_nb.codec.names import LOSSLESS, WEIGHTS
from megatrain_nb.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatrain_nb.plan.plan import Item, Plan

# Okabe and Ito's palette, in mid tones that a light and a dark page both carry.
COLOURS = {
    "weights": "#3b8fd4",
    "gradients": "#1fa37a",
    "Adam's moments": "#e69f00",
    "buffers for what streams": "#56b4e9",
    "slots for weights and gradients": "#56b4e9",
    "inputs of the blocks": "#cc79a7",
    "gradients and moments that live there": "#e69f00",
    "one block's activations": "#d55e00",
    "activations": "#d55e00",
    "activations that are kept": "#a0522d",
    "logits": "#b8860b",
    "holes between those": "#c8a08a",
    "room to write new versions": "#56b4e9",
    "windows for packing": "#7a6fb0",
    "Python and torch": "#8c8c8c",
}
OTHER = "#707a8a"
TIERS = {"vram": "device memory", "ram": "RAM", "disk": "disk"}
LANES = {
    "compute": ("compute", "#3b8fd4"),
    "update": ("AdamW", "#1fa37a"),
    "link": ("link", "#cc79a7"),
    "disk": ("disk", "#e69f00"),
}
BOUNDS = {
    "compute": "computing",
    "disk": "the disk",
    "link": "the link to the device",
    "memory": "host memory",
}
TRACK = "rgba(128,128,128,.2)"
FONT = "var(--jp-ui-font-family, system-ui, sans-serif)"
# Each by itself: in a notebook that is not trusted JupyterLab drops a variable, and all that is said together with it.
TEXT = f"font-size:13px;line-height:1.45;font-family:{FONT};font-variant-numeric:tabular-nums"


def colour(name: str) -> str:
    """Return the colour of an item."""
    return COLOURS.get(name, "#3b8fd4" if name.startswith("weights") else OTHER)


def tiers_of(plan: Plan) -> dict[str, tuple[Item, ...]]:
    """Return the items of each tier that the plan uses."""
    found = {"vram": plan.vram, "ram": plan.ram, "disk": plan.disk}
    return {name: items for name, items in found.items() if items or name == "disk"}


def title(plan: Plan) -> str:
    """Return what the plan is of, in one line."""
    choices, window = plan.choices, plan.choices.window
    dtype = "bf16 with an fp32 master" if choices.bf16 else "fp32"
    if choices.moments:
        dtype += f", moments {choices.moments}"
    if WEIGHTS in choices.packed:
        dtype += f", weights {LOSSLESS} on disk"
    return (
        f"{plan.shape.name} ({format_count(plan.shape.num_params)} parameters, {dtype}) on {plan.machine.name}, "
        f"{window.batch} x {window.seq_len} tokens x {window.accumulation}"
    )


def verdict(plan: Plan) -> str:
    """Return whether it fits, in one line."""
    if not plan.fits:
        return "does not fit"
    if not plan.offloads:
        return "fits without offload: nothing is read or written"
    if plan.fits_plainly:
        return "fits, and would on the device alone: plain PyTorch needs no offload"
    return "fits"


def rows(plan: Plan, *, advice: bool = True) -> list[tuple[str, str]]:
    """Return label and text of every line; ``advice`` makes more plans."""
    found = [("verdict", verdict(plan))]
    found += [("", problem) for problem in plan.problems]
    limits = plan.limits
    for tier, items in tiers_of(plan).items():
        total = sum(item.num_bytes for item in items)
        parts = _listed(items)
        found.append(
            (
                TIERS[tier],
                f"{format_bytes(total)} of {format_bytes(limits[tier])}"
                + (f": {parts}" if parts else ""),
            )
        )
    if plan.tail:
        found.append(("on the device", tail_text(plan, saves=advice)))
    found += _time_rows(plan)
    if advice:
        found += [("to do", text) for text in plan.advice]
    assumed = plan.machine.assumed
    if assumed:
        whole = len(assumed) > 10
        found.append(
            (
                "assumed",
                "all of the machine's figures: what its makers publish"
                if whole
                else ", ".join(sorted(assumed)),
            )
        )
    return found


def _time_rows(plan: Plan) -> list[tuple[str, str]]:
    moved = {way: size for way, size in plan.moved_bytes.items() if size}
    found = [
        (
            "a step",
            f"{format_seconds(plan.step_seconds)}, {format_count(plan.tokens_per_second)} tokens/s; a billion tokens "
            f"in {span_text(1e9 / plan.tokens_per_second)}",
        ),
        (
            "its bound",
            f"{BOUNDS[plan.bound_by]}: {needs_text(plan)}",
        ),
    ]
    if moved:
        found.append(
            (
                "it moves",
                ", ".join(f"{way} {format_bytes(size)}" for way, size in moved.items()),
            )
        )
    if plan.written_bytes_per_step:
        years = plan.drive_years
        life = (
            f"; the drives' warranted writes last {span_text(years * 31_557_600)}"
            if math.isfinite(years)
            else ""
        )
        found.append(
            ("it writes", f"{format_bytes(plan.written_bytes_per_day)} a day{life}")
        )
    total, parts = plan.conventional_bytes, _listed(plan.conventional)
    found.append(
        ("all in one memory", f"{format_bytes(total)} conventionally: {parts}")
    )
    return found


def tail_text(plan: Plan, *, saves: bool) -> str:
    """Return which blocks live on the device; with ``saves``, which makes another plan, what that saves."""
    blocks = plan.spec.blocks
    there = [block for block in blocks if plan.tail.issuperset(block.packs)]
    text = (
        f"{len(there)} of {len(blocks)} blocks live there, the last ones first: {format_bytes(plan.tail_bytes)} of "
        "weights, gradients and moments; AdamW runs there"
    )
    less = {way: size for way, size in plan.tail_saves.items() if size} if saves else {}
    listed = ", ".join(f"{way} {format_bytes(size)}" for way, size in less.items())
    return f"{text}. A step moves less for it: {listed}" if listed else text


def needs_text(plan: Plan) -> str:
    """Return the least time that a step takes on each resource."""
    return ", ".join(
        f"{BOUNDS[name]} needs {format_seconds(seconds)}"
        for name, seconds in plan.least_seconds.items()
    )


def _listed(items: Iterable[Item]) -> str:
    return ", ".join(f"{item.name} {format_bytes(item.num_bytes)}" for item in items)


def span_text(seconds: float) -> str:
    """Return a long time as a person would say it.

    Examples
    --------
    >>> span_text(90_000), span_text(10**7), span_text(10**9)
    ('25.0 h', '116 days', '31.7 years')
    """
    for unit, size in (("years", 31_557_600), ("days", 86400), ("h", 3600)):
        if seconds >= (2 if unit != "h" else 1) * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.1f} {unit}"
    return format_seconds(seconds)


def as_text(plan: Plan, *, advice: bool = True) -> str:
    """Return the plan as lines of text."""
    lines = rows(plan, advice=advice)
    width = max(len(label) for label, _ in lines)
    return "\n".join(
        [title(plan), *(f"{label:<{width}}  {text}" for label, text in lines)]
    )


def as_html(plan: Plan) -> str:
    """Return the plan as bars and a table."""
    return (
        f'<div style="max-width:980px;{TEXT}">'
        f'<div style="font-size:15px;font-weight:600;margin:4px 0 8px">{escape(title(plan))}</div>'
        f"{bars_html(plan)}"
        f'<table style="margin-top:10px;border-collapse:collapse">{rows_html(plan)}</table></div>'
    )


def rows_html(plan: Plan, *, advice: bool = True) -> str:
    """Return the lines of `rows` as those of a table."""
    return "".join(
        '<tr><th style="text-align:left;padding:2px 12px 2px 0;white-space:nowrap;vertical-align:top">'
        f'{escape(label)}</th><td style="text-align:left;padding:2px 0">{escape(text)}</td></tr>'
        for label, text in rows(plan, advice=advice)
    )


def segments_html(items: Iterable[Item], whole: int) -> str:
    """Return the items side by side, as wide as their share of ``whole`` bytes."""
    return "".join(
        f'<div title="{escape(item.name)}: {format_bytes(item.num_bytes)}" '
        f'style="width:{item.num_bytes / whole:.3%};background-color:{colour(item.name)}"></div>'
        for item in items
    )


def bars_html(plan: Plan) -> str:
    """Return one bar for each tier, with its limit as a line."""
    rows = "".join(
        _bar_html(TIERS[tier], items, plan.limits[tier])
        for tier, items in tiers_of(plan).items()
    )
    names = dict.fromkeys(
        item.name
        for items in tiers_of(plan).values()
        for item in items
        if item.num_bytes
    )
    legend = "".join(
        '<span style="display:inline-block;margin-right:14px"><span style="display:inline-block;width:10px;'
        f'height:10px;margin-right:5px;border-radius:2px;background-color:{colour(name)}"></span>'
        f"{escape(name)}</span>"
        for name in names
    )
    return f'{rows}<div style="margin-top:6px;line-height:1.7">{legend}</div>'


def _bar_html(name: str, items: tuple[Item, ...], limit: int) -> str:
    total = sum(item.num_bytes for item in items)
    whole = max(total, limit, 1)
    over = total > limit
    mark = "#d55e00" if over else "currentColor"
    return (
        '<div style="display:flex;justify-content:space-between;margin-top:6px">'
        f"<span>{escape(name)}</span><span><b>{format_bytes(total)}</b> of {format_bytes(limit)}"
        f"{' (too much)' if over else ''}</span></div>"
        f'<div style="position:relative;display:flex;height:16px;background-color:{TRACK};border-radius:3px;'
        f'overflow:hidden">{segments_html(items, whole)}<div style="position:absolute;left:calc({limit / whole:.3%} - 2px);top:0;width:2px;'
        f'height:16px;background-color:{mark}"></div></div>'
    )
