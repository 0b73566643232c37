"""Find out before training whether a directory can hold tiles, and how."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.store.host import map_pages
from megatrain_nb.store.tilefile import TileFile, free_bytes
from megatrain_nb.units import format_bytes

_PROBE_BYTES = 4 << 20
_MIN_INODES = 8
_BUFFERED = (
    "O_DIRECT is refused here; tiles go through the page cache and are dropped from it "
    "after each transfer, which is slower"
)
_MOUNTINFO = Path("/proc/self/mountinfo")
_FILE_SYSTEM_NOTES = {
    "tmpfs": "this is tmpfs: its files are RAM, so offloading to it saves no memory",
    "ramfs": "this is ramfs: its files are RAM, so offloading to it saves no memory",
    "overlay": "this is a container's writable layer: a mounted volume is usually faster",
    "nfs": "this is a network file system: far slower than a local NVMe disk",
    "nfs4": "this is a network file system: far slower than a local NVMe disk",
    "cifs": "this is a network file system: far slower than a local NVMe disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What a directory can do.

    Attributes
    ----------
    path
        Absolute.
    file_system
        As the kernel names it: ``ext4``, ``xfs``, ``tmpfs``; ``unknown`` where it does
        not say.
    free_bytes
        What an ordinary user can still write.
    direct
        O_DIRECT works, tried with a write and a read.
    direct_note
        What is used, in a sentence.
    created
        The directory did not exist before.
    notes
        What the user should know, one sentence each.
    """

    path: Path
    file_system: str
    free_bytes: int
    direct: bool
    direct_note: str
    created: bool
    notes: tuple[str, ...]


def check_directory(path: str | Path) -> Preflight:
    """Make `path` if it is missing, write and read 4 MiB there, say what was found.

    Raises
    ------
    ArgumentError
        The directory cannot be used: not a directory, not writable, no space, no inodes.
    StoreError
        What was read differs from what was written.
    """
    directory = Path(path).expanduser().absolute()
    created = _make(directory)
    _check_inodes(directory)
    free = free_bytes(directory)
    if free < 2 * _PROBE_BYTES:
        msg = (
            f"{directory} has only {format_bytes(free)} free; choose another directory"
        )
        raise ArgumentError(msg)
    direct = True
    try:
        intact = _probe(directory, direct=True)
    except StoreError:
        direct = False
        try:
            intact = _probe(directory, direct=False)
        except StoreError as error:
            msg = f"{directory} cannot be used: {error}"
            raise ArgumentError(msg) from error
    if not intact:
        msg = f"{directory} is not reliable: a file read back differs from what was written"
        raise StoreError(msg)
    file_system = _file_system(directory)
    note = _FILE_SYSTEM_NOTES.get(file_system)
    return Preflight(
        path=directory,
        file_system=file_system,
        free_bytes=free,
        direct=direct,
        direct_note="O_DIRECT: the page cache stays out of it" if direct else _BUFFERED,
        created=created,
        notes=(note,) if note else (),
    )


def takes_direct(directory: Path) -> bool:
    """Whether files there can bypass the page cache (O_DIRECT), tried with a write and a read of 4 MiB."""
    try:
        return _probe(directory, direct=True)
    except StoreError:
        return False


def _make(directory: Path) -> bool:
    """Make the directory and missing parents, for this user only."""
    try:
        missing = [p for p in (directory, *directory.parents) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=0o700, exist_ok=True)
        is_directory = directory.is_dir()
    except OSError as error:
        msg = f"cannot make {directory}: {error.strerror}; choose another directory"
        raise ArgumentError(msg) from error
    if not is_directory:
        msg = f"{directory} is not a directory; choose another one"
        raise ArgumentError(msg)
    return bool(missing)


def _check_inodes(directory: Path) -> None:
    status = os.statvfs(directory)
    # Some file systems (btrfs) have no fixed number and report 0 in total.
    if status.f_files and status.f_favail < _MIN_INODES:
        msg = (
            f"{directory}: the file system can hold only {status.f_favail} more files "
            f"(inodes), {_MIN_INODES} are needed; delete files or choose another one"
        )
        raise ArgumentError(msg)


def _probe(directory: Path, *, direct: bool) -> bool:
    """Write and read a file; return whether it came back as it was written."""
    path = directory / f".megatrain-probe-{os.getpid()}"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        msg = f"nothing can be written in {directory}: {error.strerror}"
        raise StoreError(msg) from error
    written = np.frombuffer(map_pages(_PROBE_BYTES), np.uint8)
    found = np.frombuffer(map_pages(_PROBE_BYTES), np.uint8)
    written[:] = np.frombuffer(os.urandom(_PROBE_BYTES), np.uint8)
    file: TileFile | None = None
    try:
        file = TileFile(path, direct=direct, create=True)
        file.grow(_PROBE_BYTES, _PROBE_BYTES)
        file.write(0, written)
        file.sync()
        file.read(0, found)
    finally:
        if file is not None:
            file.close()
        path.unlink(missing_ok=True)
    return bool((written == found).all())


def _file_system(directory: Path) -> str:
    """Return the type of the mount that `directory` is on."""
    try:
        lines = _MOUNTINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    best, name = -1, "unknown"
    resolved = directory.resolve()
    for line in lines:
        # 36 35 98:0 /root /mount/point options optional... - type source options
        before, _, after = line.partition(" - ")
        escaped = before.split()[4]  # a space is \040
        mount = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), escaped))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, name = len(mount.parts), after.split()[0]
    return name
