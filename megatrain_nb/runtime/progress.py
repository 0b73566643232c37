"""The bar that a person sees while a model's bytes move."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def byte_bar(total: int, what: str) -> tqdm[Any]:
    """Return a bar over bytes, to be used in ``with``; what takes less than 2 s shows none."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, delay=2, leave=False)
