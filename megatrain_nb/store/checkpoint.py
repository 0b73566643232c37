"""A checkpoint is a pinned manifest: the tiles on disk that were the model at one moment.

[Note: a checkpoint is a folder] ``checkpoints/000007`` in the offload directory holds the manifest, and in a
few small files what does not live in tiles (`state.json`, `tensors.safetensors`). Tiles are never written
over, so nothing is copied: as long as the manifest is pinned, its tiles stay in the data file, and tiles
that did not change since are shared. The folder is written under another name, synced, and renamed; so it is
there wholly or not at all. Numbers are never used twice, so a checkpoint replaces nothing: the one that it
takes the place of is removed after it. `checksums` covers every file; the manifest has a checksum for each
tile. What is read here is data from anywhere: never code, no path in it is followed, and what its files say of
themselves may take so much of RAM as the caller allows, which is reckoned before anything is read or parsed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_hexdigest

from megatrain_nb.errors import StoreError
from megatrain_nb.store.infile import read_regular
from megatrain_nb.store.manifest import Manifest, format_tiles, parse_tiles
from megatrain_nb.store.parsing import parse_json, parsed_bytes
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER_NAME = "checkpoints"
_VERSION = 1
_MANIFEST, _STATE, _TENSORS = "manifest.json", "state.json", "tensors.safetensors"
_CHECKSUMS = "checksums"
PROBE_NAME = re.compile(r"\.megatrain-probe-\d+")
FILE_NAMES = frozenset((_MANIFEST, _STATE, _TENSORS, _CHECKSUMS))
# What the manifests may take of RAM where no session gives a budget: enough for 200,000 tiles.
_MOST_BYTES = 2**30
_MAX_CHECKSUMS_BYTES = 4096
_MAX_ENTRIES = 100_000
_MAX_NAME = 1000
_MAX_STEP = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a person knows a checkpoint by.

    Attributes
    ----------
    name
        Its name; one checkpoint has it.
    step
        Optimizer steps done.
    num_steps
        Steps of the whole run, or None where nobody said.
    time
        When it was taken.
    """

    name: str
    step: int
    num_steps: int | None
    time: datetime

    def __str__(self) -> str:
        steps = f" of {self.num_steps}" if self.num_steps else ""
        when = self.time.astimezone().strftime("%Y-%m-%d %H:%M")
        return f"{self.name!r}, step {self.step}{steps}, saved {when}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint that is there.

    Attributes
    ----------
    label, folder, manifest
        What it is called, where its files are, and its tiles.
    """

    label: Label
    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Its name; one checkpoint has it."""
        return self.label.name

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.label.step

    @property
    def time(self) -> datetime:
        """When it was taken."""
        return self.label.time

    @property
    def num_bytes(self) -> int:
        """Bytes of its tiles; those that did not change since are shared with the model."""
        return self.manifest.extent_bytes

    @property
    def number(self) -> int:
        """Counts the checkpoints of a directory."""
        return int(self.folder.name)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.label}, {format_bytes(self.num_bytes)}>"

    def read(self, *, most_bytes: int) -> tuple[bytes, bytes]:
        """Return what was written beside the manifest: the state, and the tensors' file.

        Raises
        ------
        StoreError
            A file is missing or damaged, or both are longer than ``most_bytes`` together.
        """
        files = _read_files(self.folder, (_STATE, _TENSORS), most_bytes)
        return files[_STATE], files[_TENSORS]


def write_checkpoint(
    directory: Path,
    number: int,
    label: Label,
    manifest: Manifest,
    *,
    state: bytes,
    tensors: bytes,
) -> Checkpoint:
    """Write a checkpoint's folder; a crash leaves all of it or nothing.

    Parameters
    ----------
    directory
        The offload directory.
    number
        Larger than that of any checkpoint there.
    manifest
        Pinned, its tiles synced.
    state
        A JSON text.
    tensors
        A safetensors file.

    Raises
    ------
    StoreError
        The files could not be written; nothing of them is left.
    """
    parent = directory / FOLDER_NAME
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        sync_directory(directory)
        folder = parent / f"{number:06d}"
        files = _files(label, manifest, state=state, tensors=tensors)
        write_folder(parent / f".new-{number:06d}", files, then=folder)
    except OSError as error:
        msg = (
            f"cannot write checkpoint {label.name!r} in {parent}: {error.strerror}; the "
            "checkpoints that were there are whole"
        )
        raise StoreError(msg) from error
    return Checkpoint(label=label, folder=folder, manifest=manifest)


def write_folder(temporary: Path, files: Mapping[str, bytes], *, then: Path) -> None:
    """Write files into a new folder, sync it, and give it its name."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(mode=0o700)
        for name, data in files.items():
            _write_file(temporary / name, data)
        sync_directory(temporary)
        temporary.rename(then)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(then.parent)


def delete_checkpoint(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint's folder; its tiles may be unpinned afterwards.

    Raises
    ------
    StoreError
        It is still there.
    """
    folder = checkpoint.folder
    gone = folder.parent / f".gone-{folder.name}"
    try:
        folder.rename(gone)
        sync_directory(folder.parent)
    except OSError as error:
        msg = f"cannot delete checkpoint {checkpoint.name!r} in {folder}: {error.strerror}"
        raise StoreError(msg) from error
    shutil.rmtree(gone, ignore_errors=True)
    _remove_empty(folder.parent)


def read_checkpoints(
    directory: Path, *, most_bytes: int = _MOST_BYTES
) -> list[Checkpoint]:
    """Return the checkpoints of an offload directory, oldest first.

    Parameters
    ----------
    most_bytes
        What all their manifests may take of RAM.

    Raises
    ------
    StoreError
        One cannot be read, or they take more RAM than they may. Its tiles cannot be told from free space then, so
        nothing may be written here.
    """
    parent = directory / FOLDER_NAME
    found = []
    for name in sorted(_entries(parent), key=lambda name: name.zfill(20)):
        if re.fullmatch(r"\d{6,18}", name):
            checkpoint, taken_bytes = _read_checkpoint(parent / name, most_bytes)
            most_bytes -= taken_bytes
            found.append(checkpoint)
    return found


def sweep(directory: Path) -> None:
    """Delete what a crash left of checkpoints that were being written or deleted, and of probes."""
    for name in _entries(directory):
        if PROBE_NAME.fullmatch(
            name
        ):  # of a process that was killed while it tried the directory
            (directory / name).unlink(missing_ok=True)
    parent = directory / FOLDER_NAME
    for name in _entries(parent):
        if re.fullmatch(r"\.(new|gone)-\d{6,18}", name):
            shutil.rmtree(parent / name, ignore_errors=True)
    _remove_empty(parent)


def sync_directory(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _files(
    label: Label, manifest: Manifest, *, state: bytes, tensors: bytes
) -> dict[str, bytes]:
    head = {
        "version": _VERSION,
        "name": label.name,
        "step": label.step,
        "num_steps": label.num_steps,
        "time": label.time.isoformat(timespec="seconds"),
    }
    content = head | {"tiles": format_tiles(manifest)}
    files = {
        _MANIFEST: json.dumps(content, indent=1).encode(),
        _STATE: state,
        _TENSORS: tensors,
    }
    sums = "".join(
        f"{xxh3_64_hexdigest(data)} {name}\n" for name, data in files.items()
    )
    return files | {_CHECKSUMS: sums.encode()}


def _read_checkpoint(folder: Path, most_bytes: int) -> tuple[Checkpoint, int]:
    """Return a checkpoint, and the RAM that reading it may have taken."""
    # The state is read again where it is used; here it has to be whole.
    text = _read_files(folder, (_MANIFEST, _STATE), most_bytes)[_MANIFEST]
    needed = len(text) + parsed_bytes(text)
    if needed > most_bytes:
        why = (
            f"{_MANIFEST} may take {format_bytes(needed)} of RAM, and {format_bytes(most_bytes)} are allowed: it is damaged, "
            "or max_ram_gb is too small for it"
        )
        raise StoreError(_why_unreadable(folder, why))
    try:
        content = parse_json(text, most_bytes=needed)
        version = content["version"]
        if version != _VERSION:
            msg = f"it has version {str(version)[:20]}, this program reads {_VERSION}"
            raise ValueError(msg)  # noqa: TRY301
        label = _label(content)
        manifest = parse_tiles(content["tiles"])
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise StoreError(_why_unreadable(folder, f"{_MANIFEST}: {error}")) from error
    checkpoint = Checkpoint(label=label, folder=folder, manifest=manifest)
    return checkpoint, needed


def _label(content: dict[str, Any]) -> Label:
    name, step, num_steps = (content[key] for key in ("name", "step", "num_steps"))
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        msg = "its name is not a text"
        raise ValueError(msg)
    for count in (step, 0 if num_steps is None else num_steps):
        if type(count) is not int or not 0 <= count < _MAX_STEP:
            msg = f"it has {str(count)[:80]} steps"
            raise ValueError(msg)
    time = datetime.fromisoformat(content["time"])
    return Label(name=name, step=step, num_steps=num_steps, time=time.astimezone(UTC))


def _read_files(
    folder: Path, names: tuple[str, ...], most_bytes: int
) -> dict[str, bytes]:
    """Return files that are as they were written, and no longer than ``most_bytes`` together."""
    found: dict[str, bytes] = {}
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise StoreError(_why_unreadable(folder, "it is not a folder"))
        lines = read_regular(folder / _CHECKSUMS, _MAX_CHECKSUMS_BYTES).decode()
        pairs = (line.split(" ", 1) for line in lines.splitlines())
        sums = {name: checksum for checksum, name in pairs}
        for name in names:
            found[name] = read_regular(folder / name, most_bytes)
            most_bytes -= len(found[name])
    except FileNotFoundError as error:
        missing = f"{Path(error.filename).name} is missing"
        raise StoreError(_why_unreadable(folder, missing)) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "checksums is damaged"
        raise StoreError(_why_unreadable(folder, str(why))) from error
    for name, data in found.items():
        if sums.get(name) != xxh3_64_hexdigest(data):
            raise StoreError(_why_unreadable(folder, f"{name} is damaged"))
    return found


def _write_file(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _entries(parent: Path) -> list[str]:
    try:
        if not stat.S_ISDIR(parent.lstat().st_mode):
            msg = f"{parent} is not a folder; move it away"
            raise StoreError(msg)
        with os.scandir(parent) as entries:
            found = [each.name for each in islice(entries, _MAX_ENTRIES + 1)]
    except FileNotFoundError:
        return []
    except OSError as error:
        msg = f"cannot read {parent}: {error.strerror}"
        raise StoreError(msg) from error
    if len(found) > _MAX_ENTRIES:
        msg = f"{parent} holds more than {_MAX_ENTRIES} files and folders; move away what is not of a session"
        raise StoreError(msg)
    return found


def _remove_empty(parent: Path) -> None:
    if parent.exists() and not _entries(parent):
        parent.rmdir()


def _why_unreadable(folder: Path, why: str) -> str:
    return (
        f"the checkpoint in {folder} cannot be read ({why[:_MAX_NAME]}). If it is of no use, delete "
        "that folder; the space of its tiles is free then"
    )
