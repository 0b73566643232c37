"""One process per offload directory, and what a dead one left behind."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import SessionError, StoreError
from megatrain_nb.store.disk import DATA_NAME
from megatrain_nb.store.manifest import MANIFEST_NAME, TEMPORARY_NAME

if TYPE_CHECKING:
    from pathlib import Path

LOCK_NAME = "owner.lock"


class OwnerLock:
    """Own a directory until `release`, or until this process ends.

    Parameters
    ----------
    directory
        An existing directory.

    Attributes
    ----------
    took_over
        A dead process had left its lock here; `reclaim` deletes its tiles.

    Raises
    ------
    SessionError
        Another process, or another session of this one, owns the directory.

    Notes
    -----
    The lock is the kernel's (``flock``), so it cannot outlive its process; the file
    only says who owns it. A forked child keeps it as long as the child lives.
    """

    took_over: bool

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / LOCK_NAME
        self._fd = self._acquire()
        self.took_over = bool(os.pread(self._fd, 1, 0))
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        """Give the directory free and delete the lock file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            # Deleted under the lock, and only if it is still ours: whoever waits for it
            # finds a deleted file and starts over (see _acquire).
            if _is_file(fd, self.path):
                self.path.unlink()
        finally:
            os.close(fd)

    def _acquire(self) -> int:
        while True:
            fd = _open_lock(self.path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(fd, self.path):
                    return fd
            except BlockingIOError:
                owner = _read_owner(fd)
                os.close(fd)
                raise SessionError(_why_owned(self.directory, owner)) from None
            except OSError as error:
                os.close(fd)
                msg = (
                    f"cannot lock {self.path}: {error.strerror}; choose a directory on a "
                    "local disk"
                )
                raise StoreError(msg) from error
            os.close(fd)


def reclaim(directory: Path) -> int:
    """Delete the tiles that a dead owner left; return the bytes that became free.

    Deletes nothing but this package's own regular files. Call it while holding the
    `OwnerLock`, before a store is opened.

    Raises
    ------
    SessionError
        Another process owns the directory.
    """
    _check_not_owned_by_other(directory)
    freed = 0
    for name in (DATA_NAME, MANIFEST_NAME, TEMPORARY_NAME):
        path = directory / name
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                path.unlink()
                freed += status.st_blocks * 512
    return freed


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        msg = f"cannot open {path}: {error.strerror}; check it with check_directory()"
        raise StoreError(msg) from error


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _read_owner(fd: int) -> dict[str, Any]:
    """Return what the lock file says; it may be half written at this moment."""
    with suppress(ValueError):
        owner = json.loads(os.pread(fd, 4096, 0))
        if isinstance(owner, dict):
            return owner
    return {}


def _why_owned(directory: Path, owner: dict[str, Any]) -> str:
    pid, host = owner.get("pid", "unknown"), owner.get("host", "unknown")
    since = owner.get("since", "unknown")
    if pid == os.getpid():
        who, what = "another session of this process", "close that session first"
    else:
        who, what = f"process {pid} on {host}", "end that process (or its notebook)"
    return f"{directory} belongs to {who} since {since}: {what}, or choose another directory"


def _check_not_owned_by_other(directory: Path) -> None:
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _read_owner(fd)
        if owner.get("pid") != os.getpid():
            raise SessionError(_why_owned(directory, owner)) from None
    finally:
        os.close(fd)
