"""What a user may ask for Adam's moments; a file of its own, since a notebook completes it without numpy."""

from __future__ import annotations

RAW = "raw"
"""fp32, as it is stored; a user says False."""

DYNAMIC = "dynamic"
"""Codecs that are chosen while a model is trained; a user may say True."""

NAMES = ("8bit", "4bit", "3bit", "2bit", DYNAMIC)
"""What a user may ask for by name."""

WEIGHTS, MOMENTS = "weights", "moments"
"""What may be packed on disk, bit for bit."""

LOSSLESS = "lossless"
"""What a user may ask for by name for the whole model: packed on disk, bit for bit."""
