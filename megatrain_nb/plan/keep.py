"""Which blocks keep their activations from forward to backward, instead of computing them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# Below the first share of the computing time the disk has time left, above the second it has none. What lies
# between leaves things as they are: keeping shortens the computing, and must not for that reason end.
_DISK_IS_HIDDEN, _DISK_BINDS = 0.6, 0.95


def prefers_kept(least_seconds: Mapping[str, float], *, now: bool) -> bool:
    """Return whether RAM is worth more for activations than for weights and states.

    Activations that are kept save computing, weights and states that stay save traffic: so what binds the
    step decides.

    Parameters
    ----------
    least_seconds
        By resource, ``compute`` and ``disk``, the least time that the last step's work takes there.
    now
        What was preferred in that step.

    Examples
    --------
    >>> prefers_kept({"compute": 4.0, "disk": 1.0}, now=False)
    True
    """
    if "disk" not in least_seconds or not least_seconds.get("compute"):
        return now
    share = least_seconds["disk"] / least_seconds["compute"]
    return share < (_DISK_BINDS if now else _DISK_IS_HIDDEN)


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
