"""What a user may ask for Adam's moments; a file of its own, since a notebook completes it without numpy."""

from __future__ import annotations

RAW = "raw"
"""fp32, as it is stored; a user says False."""

DYNAMIC = "dynamic"
"""Codecs that are chosen while a model is trained; a user may say True."""

NAMES = ("8bit", "4bit", "3bit", "2bit", DYNAMIC)
"""What a user may ask for by name."""

EXPERIMENTAL = {"3bit": 0.6, "2bit": 1.5, DYNAMIC: 1.3}
"""Names whose loss was over fp32's by more than the project allows (0.5 %), with beta2 0.999 or 0.95: the larger, in
percent; see docs/codecs.md."""


def title(name: str) -> str:
    """Return what a person is shown for a name.

    Examples
    --------
    >>> title("4bit"), title("2bit")
    ('4bit', '2bit (experimental)')
    """
    return f"{name} (experimental)" if name in EXPERIMENTAL else name


WEIGHTS, MOMENTS = "weights", "moments"
"""What may be packed on disk, bit for bit."""

LOSSLESS = "lossless"
"""What a user may ask for by name for the whole model: packed on disk, bit for bit."""
