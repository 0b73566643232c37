"""How much RAM is set aside for the model's own tensors: guessed first, then learned from what the kernel counts."""

from __future__ import annotations

# Until the first blocks have run, a quarter of the budget is set aside for what the model allocates.
_FIRST_GUESS = 0.25
_MARGIN = 1.05
_KEPT_SHARE = 0.8
# A process grows by a few pages now and then, whatever it does: no reason for another plan.
GRAIN_BYTES = 64 << 10


# Freed memory waits in the heap. Where the room does not hold it, it is given back from this share of the room on, at each
# border: inside, a block takes more. That costs page faults.
NEARLY_FULL = 0.95

# What glibc maps by itself in a session: a hundredth of the budget, within what glibc takes.
_LARGE_SHARE = 0.01
_LEAST_LARGE_BYTES, _MOST_LARGE_BYTES = 16 << 20, 32 << 20


def large_bytes(budget_bytes: int) -> int:
    """Return the size from which memory goes back to the system as soon as it is freed, and comes back empty.

    Examples
    --------
    >>> large_bytes(10**9) >> 20, large_bytes(10**11) >> 20
    (16, 32)
    """
    size = max(round(_LARGE_SHARE * budget_bytes), _LEAST_LARGE_BYTES)
    return min(size, _MOST_LARGE_BYTES)


def first_guess(budget_bytes: int) -> int:
    """Return what is set aside before anything was measured, in bytes.

    Examples
    --------
    >>> first_guess(8_000_000_000)
    2000000000
    """
    return round(budget_bytes * _FIRST_GUESS)


def with_margin(peak_bytes: float) -> int:
    """Return a little more than was measured, so that a window that is hardly larger changes nothing.

    Examples
    --------
    >>> with_margin(1000)
    1050
    """
    return round(_MARGIN * peak_bytes)


def still_fits(
    reserved_bytes: int, measured_bytes: int, *, spread_bytes: int = 0
) -> bool:
    """Whether what is set aside holds what was measured, and is not much too large.

    Parameters
    ----------
    reserved_bytes, measured_bytes
        What is set aside, and what was measured.
    spread_bytes
        What runs differ by: so much less is not worth another plan.

    Examples
    --------
    >>> still_fits(1000, 900), still_fits(1000, 1100), still_fits(1000, 700)
    (True, False, False)
    >>> still_fits(1000, 700, spread_bytes=400)
    True
    """
    least = reserved_bytes - max((1 - _KEPT_SHARE) * reserved_bytes, spread_bytes)
    return least <= measured_bytes <= reserved_bytes


def settled(budget_bytes: int, peak_bytes: float) -> int:
    """Return what is set aside once a session has learned that so much is taken, in bytes.

    Examples
    --------
    >>> settled(4000, 900), settled(4000, 100)
    (1000, 105)
    """
    guess, measured = first_guess(budget_bytes), with_margin(peak_bytes)
    return guess if still_fits(guess, measured) else measured
