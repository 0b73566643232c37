"""The power fails at every point of a step and a checkpoint: what was whole is found whole.

[Note: the model of a disk] What a program does to files is a list of operations. An operation is safe once its
file, or the folder whose entry it changes, was synced after it. When the power fails, any of the others may have
happened or not, in any order, and a write may have happened in part. So for each prefix of the list, several
such outcomes are built as real folders, and opened as the next process would.
"""

from __future__ import annotations

import random
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_nb.store import checkpoint as module
from megatrain_nb.store.base import wait
from megatrain_nb.store.checkpoint import (
    Checkpoint,
    Label,
    delete_checkpoint,
    read_checkpoints,
    write_checkpoint,
)
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.owner import OwnerLock, reclaim
from megatrain_nb.store.tilefile import TileFile
from tests.store.conformance import noise, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

KEYS = [f"0/weights/0/{index}" for index in range(4)]
SIZE = 9000

# What may have happened of what was not synced: all (the process died, the power did not fail), nothing, or some.
OUTCOMES = ["all", "none", "some 0", "some 1", "some 2", "torn"]


@dataclass(frozen=True)
class Op:
    """One operation on a path below the offload directory; ``sync`` is what makes it safe."""

    kind: str
    path: Path
    sync: Path
    data: Any = None


class Disk:
    """Writes down what is done to one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ops: list[Op] = []
        self.marks: dict[str, int] = {}

    def note(self, kind: str, path: Path, data: Any = None) -> None:
        if not path.is_relative_to(self.directory):
            return
        inside = kind in ("data", "size", "fsync")
        self.ops.append(Op(kind, path, path if inside else path.parent, data))

    def mark(self, name: str) -> None:
        self.marks[name] = len(self.ops)

    @contextmanager
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note every call that changes a file or folder."""
        with monkeypatch.context() as patch:
            self._wrap(patch, TileFile, "write", self._tile_written)
            self._wrap(patch, TileFile, "sync", lambda f: self.note("fsync", f.path))
            for name in ("grow", "shrink"):
                self._wrap(
                    patch,
                    TileFile,
                    name,
                    lambda f, *_: self.note("size", f.path, f.size_bytes),
                )
            self._wrap(patch, module, "_write_file", self._file_written)
            self._wrap(
                patch, module, "sync_directory", lambda p: self.note("syncdir", p / "x")
            )
            path = type(self.directory)
            self._wrap(patch, path, "mkdir", lambda p, *_, **__: self.note("mkdir", p))
            self._wrap(patch, path, "rmdir", lambda p: self.note("rmtree", p))
            self._wrap(patch, path, "rename", lambda p, to: self.note("rename", p, to))
            self._wrap(
                patch,
                module.shutil,  # type: ignore[attr-defined]
                "rmtree",
                lambda p, **_: self.note("rmtree", p),
            )
            yield

    @staticmethod
    def _wrap(
        patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None]
    ) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            note(*args, **kwargs)
            return found

        patch.setattr(owner, name, call)

    def _tile_written(self, file: TileFile, offset: int, data: Any) -> None:
        pages = np.zeros(-(-data.nbytes // 4096) * 4096, np.uint8)
        pages[: data.nbytes] = data.reshape(-1)
        self.note("data", file.path, (offset, pages.tobytes()))

    def _file_written(self, path: Path, data: bytes) -> None:
        self.note("create", path)
        self.note("data", path, (0, data))
        self.note("fsync", path)

    def after(self, count: int, outcome: str) -> list[Op]:
        """What is on the disk when the power fails after so many operations."""
        dice = random.Random(f"{count} {outcome}")
        done = self.ops[:count]
        synced: set[tuple[str, Path]] = set()
        safe: list[bool] = []
        for op in reversed(done):
            safe.append((op.kind, op.sync) in synced or ("", op.sync) in synced)
            if op.kind in ("fsync", "syncdir"):
                synced.add(("", op.sync))
        found = []
        for op, is_safe in zip(done, reversed(safe), strict=True):
            if (
                is_safe
                or outcome == "all"
                or (outcome.startswith("some") and dice.random() < 0.5)
            ):
                found.append(op)
            elif outcome == "torn" and op.kind == "data" and op.data[1]:
                offset, data = op.data
                half = data[: dice.randrange(len(data))]
                found.append(Op("data", op.path, op.sync, (offset, half)))
            elif outcome == "torn" and dice.random() < 0.8:
                found.append(op)
        return found

    def build(self, ops: list[Op], before: Path, target: Path) -> None:
        """Do operations to a copy of the directory; those that cannot happen without others do not."""
        shutil.copytree(before, target)
        for op in ops:
            path = target / op.path.relative_to(self.directory)
            if not path.parent.is_dir():
                continue
            if op.kind == "mkdir":
                path.mkdir(exist_ok=True)
            elif op.kind == "create":
                path.touch()
            elif op.kind == "rmtree":
                shutil.rmtree(path, ignore_errors=True)
            elif op.kind == "rename" and path.exists():
                path.rename(target / op.data.relative_to(self.directory))
            elif op.kind == "size" and path.exists():
                with path.open("r+b") as file:
                    file.truncate(op.data)
            elif op.kind == "data" and path.exists():
                with path.open("r+b") as file:
                    file.seek(op.data[0])
                    file.write(op.data[1])


def step(store: DiskStore, seed: int) -> dict[str, bytes]:
    """Write every tile anew, and return what they are."""
    contents = {}
    for index, key in enumerate(KEYS):
        data = noise(SIZE, 10 * seed + index)
        put(store, key, data)
        contents[key] = data.tobytes()
    return contents


def take(store: DiskStore, number: int, name: str) -> Checkpoint:
    manifest = store.pin()
    store.sync()
    time = datetime(2026, 11, 30, tzinfo=UTC)
    return write_checkpoint(
        store.directory,
        number,
        Label(name=name, step=number, num_steps=None, time=time),
        manifest,
        state=name.encode(),
        tensors=name.encode(),
    )


def recovered(directory: Path, contents: dict[str, dict[str, bytes]]) -> list[str]:
    """Open a directory as the next process does; check every byte that it finds; return the names."""
    lock = OwnerLock(directory)
    try:
        reclaim(directory)
        found = read_checkpoints(directory)
        store = DiskStore(
            directory, direct=False, pinned=[each.manifest for each in found]
        )
        try:
            for each in found:
                name = each.name.encode()
                assert each.read(most_bytes=1000) == (name, name)
                assert each.manifest.tiles.keys() == contents[each.name].keys()
                for key, data in contents[each.name].items():
                    out = np.empty(len(data), np.uint8)
                    wait(store.get_into(key, out, of=each.manifest), what=key)
                    assert out.tobytes() == data, (each.name, key)
            put(store, "new", noise(50_000))  # and there is room to go on
        finally:
            store.close()
    finally:
        lock.release()
    return [each.name for each in found]


def test_every_prefix_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, before = tmp_path / "live", tmp_path / "before"
    live.mkdir()
    store = DiskStore(live, direct=False)
    contents = {"one": step(store, 1)}
    first = take(store, 1, "one")
    shutil.copytree(live, before)
    disk = Disk(live)
    with disk.watched(monkeypatch):
        contents["two"] = step(store, 2)
        second = take(store, 2, "two")
        disk.mark("two is there")
        step(store, 3)
        delete_checkpoint(first)
        store.unpin(first.manifest)
        disk.mark("one is gone")
        step(store, 4)  # in the space that the first one had
        delete_checkpoint(second)
    store.close()
    kinds = {op.kind for op in disk.ops}
    assert kinds >= {"data", "fsync", "size", "mkdir", "create", "rename", "syncdir"}
    assert len(disk.ops) > 40
    seen = set()
    for count in range(len(disk.ops) - 3):
        for outcome in OUTCOMES:
            target = tmp_path / "now"
            disk.build(disk.after(count, outcome), before, target)
            names = recovered(target, contents)
            where = (count, outcome, names)
            if count < disk.marks["two is there"]:
                assert "one" in names, where
            elif count <= disk.marks["one is gone"] + 8:
                assert "two" in names, where
            seen.add(tuple(names))
            shutil.rmtree(target)
    assert seen >= {("one",), ("one", "two"), ("two",)}


def test_the_disk_has_teeth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the syncs, the same test finds checkpoints that are not whole."""
    live, before = tmp_path / "live", tmp_path / "before"
    live.mkdir()
    store = DiskStore(live, direct=False)
    contents = {"one": step(store, 1)}
    take(store, 1, "one")
    shutil.copytree(live, before)
    disk = Disk(live)
    with disk.watched(monkeypatch):
        contents["two"] = step(store, 2)
        take(store, 2, "two")
    store.close()
    disk.ops = [
        op
        for op in disk.ops
        if not (op.kind == "fsync" and op.path.name == "tiles.bin")
    ]
    failures = 0
    for outcome in OUTCOMES:
        disk.build(disk.after(len(disk.ops), outcome), before, tmp_path / "now")
        try:
            recovered(tmp_path / "now", contents)
        except Exception:
            failures += 1
        shutil.rmtree(tmp_path / "now")
    assert failures >= 3
