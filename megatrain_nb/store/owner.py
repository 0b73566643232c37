"""One process per offload directory, and what a dead one left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from megatrain_nb.errors import SessionError, StoreError
from megatrain_nb.store.checkpoint import read_checkpoints, sweep, sync_directory
from megatrain_nb.store.disk import DATA_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_NAME = "owner.lock"
_NOTE_BYTES = (
    512  # one write of a fixed length: a reader finds the old note or the new one
)


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
    left_at_step
        The step that the dead process had noted last, or None.

    Raises
    ------
    SessionError
        Another process, or another session of this one, owns the directory.

    Notes
    -----
    The lock is the kernel's (``flock``), so it cannot outlive its process; the file
    only says who owns it. A forked child owns nothing: it would keep the lock beyond its
    parent's death, as a data loader's workers live on for seconds when their parent is killed.
    """

    took_over: bool
    left_at_step: int | None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / LOCK_NAME
        self._fd = self._acquire()
        self._before = os.pread(self._fd, 4096, 0)
        self.took_over = bool(self._before)
        step = _read_owner(self._fd).get("step")
        self.left_at_step = step if type(step) is int else None
        self._owner: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        _held.add(self)
        try:
            self._write_note()
        except OSError as error:
            # A full disk has to be cleaned up, too: whoever looks finds it locked, and not by whom.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.let_go()
                msg = f"cannot write {self.path}: {error.strerror}; choose another directory"
                raise StoreError(msg) from error

    def _write_note(self) -> None:
        # Never empty in between: an empty file would not say that somebody died here.
        os.pwrite(self._fd, json.dumps(self._owner).encode().ljust(_NOTE_BYTES), 0)
        os.ftruncate(self._fd, _NOTE_BYTES)
        # On the disk before any tile is: after a power cut it says whose these are.
        os.fsync(self._fd)
        sync_directory(self.directory)

    def note_step(self, step: int) -> None:
        """Note how far the work is, for whoever takes over if this process dies."""
        text = json.dumps(self._owner | {"step": step})
        if self._fd >= 0:
            with suppress(OSError):  # only told; no training ends for it
                os.pwrite(self._fd, text.encode().ljust(_NOTE_BYTES), 0)

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

    def abandon(self) -> None:
        """Give the directory free as a dead process would: the lock file stays, with what it said before."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._before, 0)
            os.close(fd)

    def let_go(self) -> None:
        """Close the file and change nothing: this is a forked child, and the lock is its parent's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _acquire(self) -> int:
        while True:
            fd = _open_lock(self.path)
            try:
                _flock(fd, fcntl.LOCK_EX, self.directory)
                if _is_file(fd, self.path):
                    return fd
            except SessionError:
                os.close(fd)
                raise
            except OSError as error:
                os.close(fd)
                msg = (
                    f"cannot lock {self.path}: {error.strerror}; choose a directory on a "
                    "local disk"
                )
                raise StoreError(msg) from error
            os.close(fd)


_held: WeakSet[OwnerLock] = WeakSet()


def _let_go_of_all() -> None:
    for lock in list(_held):
        lock.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def reclaim(directory: Path) -> int:
    """Delete what a dead owner left and no checkpoint pins; return the bytes that became free.

    Deletes nothing but this package's own regular files. Call it while holding the
    `OwnerLock`, before a store is opened. Where there are checkpoints the data file
    stays; a store that is opened with them takes the rest of it for free space.

    Raises
    ------
    SessionError
        Another process owns the directory.
    StoreError
        A checkpoint cannot be read.
    """
    _check_not_owned_by_other(directory)
    sweep(directory)
    if read_checkpoints(directory):
        return 0
    path = directory / DATA_NAME
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            path.unlink()
            return status.st_blocks * 512
    return 0


@contextmanager
def kept_still(directory: Path) -> Iterator[None]:
    """Let nobody train in a directory while it is read: own it, or share its lock where nothing can be written.

    Raises
    ------
    SessionError
        Another process, or a session of this one, owns the directory.
    """
    if os.access(directory, os.W_OK):
        lock = OwnerLock(directory)
        try:
            yield
        finally:
            lock.abandon() if lock.took_over else lock.release()
        return
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # nobody has been here, or it is not for us to read
        yield
        return
    try:
        _flock(fd, fcntl.LOCK_SH, directory)
        yield
    finally:
        os.close(fd)


def _flock(fd: int, how: int, directory: Path) -> None:
    """Lock at once; raise SessionError that says who owns the directory where another does."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SessionError(_why_owned(directory, _read_owner(fd))) from None


def _open_lock(path: Path) -> int:
    """Open the lock file, made if it is missing; in a directory from elsewhere it may be a link or anything else."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            msg = f"{path} is a link, which may lead out of the directory; delete it"
        else:
            msg = f"cannot open {path}: {error.strerror}; it has to be possible to write in the directory that holds it"
        raise StoreError(msg) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        msg = f"{path} is not a regular file; delete it"
        raise StoreError(msg)
    return fd


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _read_owner(fd: int) -> dict[str, Any]:
    """Return what the lock file says; it may be half written at this moment."""
    with suppress(ValueError, RecursionError):
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
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(directory / LOCK_NAME, flags)
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
