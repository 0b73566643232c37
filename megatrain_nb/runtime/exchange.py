"""One folder in place of another in a single step, where the system can do that."""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatrain_nb.store.checkpoint import sync_directory

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def exchanged(new: Path, old: Path, *, beside: Path, drop: set[str]) -> bool:
    """Let the folder ``new`` take the place of ``old``, and delete what ``old`` was.

    Whoever looks sees all of one or all of the other, at each moment. What ``old`` holds and ``new`` does not goes with
    it: files get a second name in ``new`` before.

    Parameters
    ----------
    new
        Complete and synced; it may be inside ``old``.
    beside
        A name on the same disk, outside of ``old``, that ``new`` has for a moment; a crash may leave a folder there.
    drop
        The names in ``old`` that are not to be in the folder afterwards.

    Returns
    -------
    bool
        False where it cannot be done: other folders are inside (those have one name only), it is the working directory
        or a mount point, its owner is another one, or the file system has no such step (renameat2(2), RENAME_EXCHANGE).
        Then nothing has changed.
    """
    seen = set(os.listdir(old))  # noqa: PTH208
    keep = seen - drop - set(os.listdir(new))  # noqa: PTH208
    if not _may_move(old) or any(_is_folder(old / name) for name in seen - drop):
        return False
    try:
        new.rename(beside)
    except OSError:  # the folder that holds it is not ours to change
        return False
    linked = []
    try:
        shutil.copystat(old, beside)
        os.chown(beside, -1, old.stat().st_gid)
        for name in sorted(keep):
            os.link(old / name, beside / name, follow_symlinks=False)
            linked.append(beside / name)
        sync_directory(beside)
        _exchange(beside, old)
    except OSError:
        for path in linked:
            path.unlink()
        beside.rename(new)
        return False
    for name in set(os.listdir(beside)) - seen:  # noqa: PTH208 - made by others at this very moment
        with suppress(OSError):
            (beside / name).rename(old / name)
    sync_directory(old.parent)
    shutil.rmtree(beside, ignore_errors=True)
    return True


def _may_move(folder: Path) -> bool:
    here = folder.stat()
    with suppress(OSError):
        if os.path.samestat(here, Path.cwd().stat()):
            return False
    return here.st_uid == os.geteuid() and not folder.is_mount()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):  # not Linux, or a C library from before 2018
        raise OSError
    paths = os.fsencode(one), os.fsencode(other)
    failed = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)  # fmt: skip
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
