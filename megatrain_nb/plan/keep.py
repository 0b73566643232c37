"""Which blocks keep their activations from forward to backward, instead of computing them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def choose_kept(
    num_bytes: Mapping[int, int], order: Sequence[int], *, limit_bytes: int
) -> frozenset[int]:
    """Return the blocks whose calls keep their activations.

    Parameters
    ----------
    num_bytes
        What the calls of each block keep in one window, in bytes; a block that is not in it is not known
        yet, and does not keep.
    order
        Block indices in the order in which the forward passes them; a block may come more than once.
    limit_bytes
        What all of them may keep together.

    Notes
    -----
    Everything that is kept is there at once when forward turns into backward, so the sum counts. Among
    blocks that cost the same per byte the last ones come first: backward frees them first, before an
    earlier block needs memory to compute its forward again. A block that keeps no byte of its own (an
    embedding keeps its input, which is there anyway) always keeps.

    Examples
    --------
    >>> sorted(choose_kept({0: 0, 1: 40, 2: 70, 3: 40}, [0, 1, 2, 3], limit_bytes=80))
    [0, 1, 3]
    """
    chosen: set[int] = set()
    left = limit_bytes
    for block in dict.fromkeys(reversed(order)):
        wanted = num_bytes.get(block)
        if wanted is not None and wanted <= max(left, 0):
            chosen.add(block)
            left -= wanted
    return frozenset(chosen)
