"""Exceptions a caller can act on. Every message says what, how much, and what to do."""

from __future__ import annotations


class MegatrainError(Exception):
    """Base of every exception this package raises on purpose."""


class ArgumentError(MegatrainError, ValueError):
    """An argument that cannot be honoured: what came, what is allowed, what to do."""


class BudgetError(MegatrainError):
    """A memory or disk budget that is too small; nothing was allocated beyond it."""


class StoreError(MegatrainError):
    """The offload directory failed: names the file, the offset, the bytes and the cause."""


class ChecksumError(StoreError):
    """A tile read back differs from the tile written; it is not used."""


class SessionError(MegatrainError):
    """No open session, a closed one, or a directory that another process owns."""


class ModelError(MegatrainError):
    """A model (or a use of it) that would train wrongly if it were let through."""
