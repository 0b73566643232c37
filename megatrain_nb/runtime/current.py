"""The open session of this process; asking for it imports nothing that a session needs (torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_nb.errors import SessionError

if TYPE_CHECKING:
    from megatrain_nb.runtime.session import Session

_current: Session | None = None


def current_session() -> Session | None:
    """Return the open session, or None."""
    return _current


def require_session() -> Session:
    """Return the open session.

    Raises
    ------
    SessionError
        There is none: says how to open one.
    """
    if _current is None:
        msg = "no session is open; call mt.init(offload_dir=..., max_ram_gb=...) first (in a notebook: %megatrain init)"
        raise SessionError(msg)
    return _current


def set_current(session: Session | None) -> None:
    """Let this be the open session; None: there is none any more."""
    global _current  # noqa: PLW0603
    _current = session
