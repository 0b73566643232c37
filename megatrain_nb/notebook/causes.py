"""Where a step's seconds go, as bars and legends: of a run that is measured, of a plan, or of both; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_nb.notebook.parts import MUTED, bar, key, legend, table
from megatrain_nb.notebook.pictures import BLUE, GREEN, GREY, ORANGE, PINK
from megatrain_nb.plan.causes import CAUSES
from megatrain_nb.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

COLOURS = dict(zip(CAUSES, (BLUE, ORANGE, PINK, GREEN, GREY), strict=True))
NAMES = {
    "compute": "compute",
    "wait": "waiting for disk",
    "link": "waiting for the link",
    "update": "update not hidden",
    "other": "other (Python, data)",
}

_CELL = "text-align:right;padding:1px 0;white-space:nowrap"
_LEAST_S = 5e-6  # what is less is shown as nothing


def cause_bars(
    measured: Mapping[str, float], planned: Mapping[str, float] | None = None
) -> str:
    """Return a bar of a step's seconds, and where there is a plan a bar of its seconds below, on one scale.

    Parameters
    ----------
    measured, planned
        Seconds by cause, see `megatrain_nb.plan.causes`; a cause that is not known there counts as ``other``.
    """
    took = _known(measured)
    whole = max(sum(took.values()), sum((planned or {}).values()))
    if not planned:
        return _bar(took, whole, height=14)
    return _labelled("measured", _bar(took, whole, height=14)) + _labelled(
        "plan", _bar(_known(planned), whole, height=8)
    )


def cause_legend(
    measured: Mapping[str, float], planned: Mapping[str, float] | None = None
) -> str:
    """Return what the colours mean, with the seconds of each cause and its share, and what was planned.

    A cause that took no time, and was to take none, is left out.
    """
    took, meant = _known(measured), _known(planned or {})
    there = [cause for cause in CAUSES if took[cause] or meant[cause]]
    whole = sum(took.values())
    if not planned:
        return legend(
            (
                COLOURS[cause],
                f"{NAMES[cause]} <b>{_time(took[cause])}</b> "
                f'<span style="{MUTED}">{took[cause] / whole:.0%}</span>',
            )
            for cause in there
        )
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL};text-align:left;width:40%">{key(COLOURS[cause], NAMES[cause])}</td>'
        f'<td style="{_CELL};width:22%"><b>{_time(took[cause])}</b></td>'
        f'<td style="{_CELL};width:12%;{MUTED}">{took[cause] / whole:.0%}</td>'
        f'<td style="{_CELL};width:26%;{MUTED}">plan {_time(meant[cause])}</td></tr>'
        for cause in there
    )
    return f'<div style="margin-top:5px">{table(rows)}</div>'


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= _LEAST_S else "0"


def _known(seconds: Mapping[str, float]) -> dict[str, float]:
    found = dict.fromkeys(CAUSES, 0.0)
    for cause, each in seconds.items():
        found[cause if cause in found else "other"] += each
    return found


def _bar(seconds: Mapping[str, float], whole: float, *, height: int) -> str:
    total = sum(seconds.values()) or 1.0
    told = ", ".join(
        f"{NAMES[cause]} {each / total:.0%}" for cause, each in seconds.items() if each
    )
    parts = [(each / whole, COLOURS[cause]) for cause, each in seconds.items()]
    return bar(parts, height=height, title=told)


def _labelled(name: str, drawn: str) -> str:
    return (
        f'<div style="display:flex;align-items:center;margin-top:3px"><div style="flex:none;width:64px;'
        f'font-size:11px;{MUTED}">{name}</div><div style="flex:1 1 auto;width:100%">{drawn}</div></div>'
    )
