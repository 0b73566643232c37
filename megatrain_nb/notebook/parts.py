"""Pieces of HTML that the views share; pure.

[Note: untrusted] In a notebook that is not trusted JupyterLab 4.4 drops ``flex``, ``gap`` and ``justify-content``, and keeps
``display:flex``. So what stretches has a width as well, which ``flex`` overrides, and what would touch has margins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatrain_nb.plan.report import TRACK

if TYPE_CHECKING:
    from collections.abc import Iterable

MUTED = "opacity:.72"


def bar(parts: list[tuple[float, str]], *, height: int, title: str = "") -> str:
    """Return a bar of coloured shares of its width; ``title`` is its text alternative."""
    fills = "".join(
        f'<div style="width:{share:.2%};height:{height}px;background-color:{colour}"></div>'
        for share, colour in parts
        if share > 0
    )
    return (
        f'<div role="img" aria-label="{title}" title="{title}" style="display:flex;'
        f"height:{height}px;border-radius:3px;overflow:hidden;"
        f'background-color:{TRACK}">{fills}</div>'
    )


def image(source: str, told: str, *, height: int, sharp: bool = False) -> str:
    """Return an image as wide as its place; ``told`` is its text alternative. ``sharp`` keeps pixels squares."""
    rendering = ";image-rendering:pixelated" if sharp else ""
    return (
        f'<img alt="{told}" title="{told}" src="{source}" style="display:block;'
        f'width:100%;height:{height}px;margin:3px 0 2px{rendering}">'
    )


def card(body: str) -> str:
    """Return a part of the page that takes its whole width."""
    return f'<div style="margin-top:14px">{body}</div>'


def columns(*parts: str) -> str:
    """Return parts side by side where there is room; empty ones are left out."""
    there = [part for part in parts if part]
    if not there:
        return ""
    style = f"flex:1 1 300px;min-width:0;width:{100 // len(there) - 3}%"
    apart = [f"{style};margin-right:12px"] * (len(there) - 1)  # [Note: untrusted]
    cells = "".join(
        f'<div style="{each}">{part}</div>'
        for each, part in zip([*apart, style], there, strict=True)
    )
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:14px 24px;margin-top:14px">'
        f"{cells}</div>"
    )


def legend(items: Iterable[tuple[str, str]], *, small: bool = False) -> str:
    """Return coloured squares and what they mean."""
    size = ";font-size:12px" if small else ""
    body = "".join(_legend_item(colour, text) for colour, text in items)
    return f'<div style="margin-top:5px;line-height:1.6{size}">{body}</div>'


def key(colour: str, text: str) -> str:
    """Return a coloured square and what it means."""
    return (
        f'<span style="display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px;'
        f'background-color:{colour}"></span>{text}'
    )


def _legend_item(colour: str, text: str) -> str:
    return f'<span style="white-space:nowrap;margin-right:14px">{key(colour, text)}</span> '


def between(*texts: str) -> str:
    """Return small texts along a line, from end to end."""
    *first, last = texts
    spans = "".join(f'<span style="margin-right:10px">{text}</span>' for text in first)
    spans += f"<span>{last}</span>"
    return (
        f'<div style="display:flex;justify-content:space-between;font-size:11px;{MUTED}">'
        f"{spans}</div>"
    )


def table(rows: str) -> str:
    """Return a table of these rows."""
    return (
        f'<table style="width:100%;margin:0;border-collapse:collapse;font-size:13px">'
        f"<tbody>{rows}</tbody></table>"
    )


def title(text: str, value: str = "") -> str:
    """Return a small heading, and a value at its right."""
    right = (
        f'<span style="margin-left:auto;padding-left:10px;white-space:nowrap">{value}</span>'
        if value
        else ""
    )
    return (
        f'<div style="display:flex;font-size:11px;letter-spacing:.03em;'
        f'margin-bottom:4px"><span style="{MUTED}">{text}</span>{right}</div>'
    )


def number(value: float) -> str:
    """Return a number with four digits; a dash for NaN."""
    if math.isnan(value):
        return "-"
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.3e}"
    return f"{value:#.4g}".removesuffix(".")
