"""What this package left in a directory, and its removal."""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.store.checkpoint import (
    FILE_NAMES,
    FOLDER_NAME,
    PROBE_NAME,
    read_checkpoints,
)
from megatrain_nb.store.disk import DATA_NAME
from megatrain_nb.store.owner import LOCK_NAME, OwnerLock
from megatrain_nb.units import format_bytes

_OURS = re.compile(r"(\.(new|gone)-)?\d{6,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What is in a directory, and what goes or went.

    Attributes
    ----------
    directory
        Absolute.
    checkpoints
        The checkpoints there, one sentence each.
    going
        Files and folders that go.
    num_bytes
        Bytes that become free.
    removed
        They are gone; otherwise nothing was done.
    """

    directory: Path
    checkpoints: tuple[str, ...]
    going: tuple[Path, ...]
    num_bytes: int
    removed: bool

    def __str__(self) -> str:
        names = ", ".join(str(path.relative_to(self.directory)) for path in self.going)
        done = "removed" if self.removed else "would be removed"
        lines = [
            f"{self.directory}: {names or 'nothing'} {done}, {format_bytes(self.num_bytes)}"
        ]
        lines += [f"  checkpoint {each}" for each in self.checkpoints]
        return "\n".join(lines)

    __repr__ = __str__


def cleanup(
    offload_dir: str | Path, *, checkpoints: bool = False, remove: bool = False
) -> Leftovers:
    """Say what this package left in a directory that nobody uses now, or remove it.

    Parameters
    ----------
    offload_dir
        A directory that was given to ``mt.init``.
    checkpoints
        Checkpoints go as well; otherwise they stay, and what they need.
    remove
        Do it. Otherwise nothing is touched.

    Returns
    -------
    Leftovers
        Prints as a list.

    Raises
    ------
    ArgumentError
        Not a directory.
    SessionError
        A session uses it.
    StoreError
        A checkpoint cannot be read (``checkpoints=True`` removes it), or the disk failed.
    """
    directory = Path(offload_dir).expanduser().absolute()
    if not directory.is_dir():
        msg = f"{directory} is not a directory"
        raise ArgumentError(msg)
    was_owned = (directory / LOCK_NAME).is_file()
    lock = OwnerLock(directory)
    try:
        ours = _checkpoint_folders(directory / FOLDER_NAME)
        held = [] if checkpoints else read_checkpoints(directory)
        kept = {each.folder for each in held}
        going = [path for path in ours if path not in kept]
        going += [x for x in directory.iterdir() if PROBE_NAME.fullmatch(x.name)]
        data = directory / DATA_NAME
        # Only beside a lock or checkpoints of ours is a file of this name taken for ours.
        if not kept and (was_owned or ours) and _is_file(data):
            going.append(data)
        num_bytes = sum(_bytes_of(path) for path in going)
        found = tuple(str(each.label) for each in held)
        if remove:
            for path in going:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            with suppress(OSError):
                (directory / FOLDER_NAME).rmdir()
    except OSError as error:
        msg = f"cannot clean {directory}: {error.strerror}"
        raise StoreError(msg) from error
    finally:
        if was_owned and not remove:
            lock.abandon()
        else:
            lock.release()
    return Leftovers(
        directory=directory,
        checkpoints=found,
        going=tuple(going),
        num_bytes=num_bytes,
        removed=remove,
    )


def _checkpoint_folders(parent: Path) -> list[Path]:
    """Return the folders that are called as ours, with nothing but our files in them."""
    if parent.is_symlink() or not parent.is_dir():
        return []
    return [
        path
        for path in sorted(parent.iterdir())
        if _OURS.fullmatch(path.name)
        and stat.S_ISDIR(path.lstat().st_mode)
        and all(name in FILE_NAMES for name in os.listdir(path))  # noqa: PTH208
        and all(_is_file(inner) for inner in path.iterdir())
    ]


def _is_file(path: Path) -> bool:
    return not path.is_symlink() and path.is_file()


def _bytes_of(path: Path) -> int:
    inner = path.iterdir() if path.is_dir() else [path]
    return sum(each.lstat().st_blocks * 512 for each in inner)
