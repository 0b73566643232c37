"""Folders of checkpoints: whole or not there, never trusted, moved from disk to disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tracemalloc
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from megatrain_nb.errors import (
    ArgumentError,
    BudgetError,
    ChecksumError,
    SessionError,
    StoreError,
)
from megatrain_nb.store import checkpoint
from megatrain_nb.store.checkpoint import (
    Checkpoint,
    Label,
    delete_checkpoint,
    read_checkpoints,
    sweep,
    write_checkpoint,
)
from megatrain_nb.store.disk import DATA_NAME, DiskStore
from megatrain_nb.store.owner import LOCK_NAME, OwnerLock
from megatrain_nb.store.parsing import parsed_bytes
from megatrain_nb.store.portable import export_checkpoint, import_checkpoint
from megatrain_nb.store.preflight import check_directory
from tests.store.conformance import get, noise, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
FILES = ["checksums", "manifest.json", "state.json", "tensors.safetensors"]


def label(name: str = "a", step: int = 3) -> Label:
    time = datetime(2026, 11, 30, 14, 2, tzinfo=UTC)
    return Label(name=name, step=step, num_steps=9, time=time)


def take(store: DiskStore, number: int = 1, name: str = "a") -> Checkpoint:
    store.sync()
    return write_checkpoint(
        store.directory,
        number,
        label(name),
        store.pin(),
        state=b'{"lr": 0.1}',
        tensors=b"some tensors",
    )


@pytest.fixture
def taken(tmp_path: Path) -> Checkpoint:
    """A directory with one checkpoint of two tiles; nobody owns it."""
    store = DiskStore(tmp_path)
    put(store, "0/weights/0/0", noise(9000, 1))
    put(store, "0/weights/0/1", noise(50, 2))
    found = take(store)
    store.close()
    return found


def test_what_is_written_is_read(tmp_path: Path, taken: Checkpoint) -> None:
    (found,) = read_checkpoints(tmp_path)
    assert found.label == taken.label
    assert found.manifest.tiles == taken.manifest.tiles
    assert found.read(most_bytes=100) == (b'{"lr": 0.1}', b"some tensors")
    assert (found.name, found.step, found.num_bytes) == ("a", 3, 4 * 4096)
    assert "'a', step 3 of 9, saved 2026-11-30" in repr(found)
    assert sorted(path.name for path in found.folder.iterdir()) == FILES
    for path in (found.folder, found.folder.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in found.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_oldest_comes_first_and_the_last_one_takes_the_folder_along(
    tmp_path: Path,
) -> None:
    store = DiskStore(tmp_path)
    put(store, "t", noise(10))
    numbers = [2, 10, 1_000_000]
    for number in numbers:
        take(store, number, f"n{number}")
    found = read_checkpoints(tmp_path)
    assert [each.number for each in found] == numbers
    for each in found:
        delete_checkpoint(each)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tiles.bin"]


@pytest.mark.parametrize("call", ["mkdir", "write", "fsync", "rename"])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = DiskStore(tmp_path)
    put(store, "t", noise(10))
    first = take(store, 1)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    where: dict[str, tuple[Any, str]] = {
        "mkdir": (type(tmp_path), "mkdir"),
        "write": (os, "fdopen"),
        "fsync": (os, "fsync"),
        "rename": (type(tmp_path), "rename"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*where[call], fails)
        with pytest.raises(StoreError, match="No space left"):
            take(store, 2, "b")
    (found,) = read_checkpoints(tmp_path)
    assert found.manifest.tiles == first.manifest.tiles
    assert [path.name for path in found.folder.parent.iterdir()] == ["000001"]
    store.close()


def test_what_a_crash_left_is_swept(tmp_path: Path, taken: Checkpoint) -> None:
    parent = taken.folder.parent
    for name in (".new-000002", ".gone-000001", "notes", "1"):
        (parent / name).mkdir()
        (parent / name / "file").write_text("x")
    assert [each.name for each in read_checkpoints(tmp_path)] == ["a"]
    sweep(tmp_path)
    assert sorted(path.name for path in parent.iterdir()) == ["000001", "1", "notes"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "link", "folder"])
def test_damage_is_named(
    tmp_path: Path, taken: Checkpoint, name: str, damage: str
) -> None:
    path = taken.folder / name
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    why = rf"\({name} is missing\)" if damage == "missing" else ""
    with pytest.raises(StoreError, match=f"000001 cannot be read {why}"):
        [found.read(most_bytes=100) for found in read_checkpoints(tmp_path)]


def tile_of(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["tiles"]["0/weights/0/0"]
    return found


def make_checksum_fit(path: Path) -> None:
    """Note the checksum that a file of a checkpoint has now."""
    sums = path.with_name("checksums")
    lines = [x for x in sums.read_text().splitlines() if not x.endswith(path.name)]
    lines.append(f"{xxh3_64_hexdigest(path.read_bytes())} {path.name}")
    sums.write_text("\n".join(lines))


def rewritten(taken: Checkpoint, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and make its checksum fit."""
    path = taken.folder / "manifest.json"
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))
    make_checksum_fit(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: [],
        lambda c: c.update(version=2),
        lambda c: c.pop("tiles"),
        lambda c: c.update(tiles=[]),
        lambda c: c.update(name=7),
        lambda c: c.update(name=""),
        lambda c: c.update(step=-1),
        lambda c: c.update(step=True),
        lambda c: c.update(num_steps=1e3),
        lambda c: c.update(time="yesterday"),
        lambda c: c.update(time="y" * 5000),
        lambda c: c["tiles"].update({"x": {}}),
        lambda c: tile_of(c).update(parts=[]),
        lambda c: tile_of(c).update(parts=[[-4096, 12288]]),
        lambda c: tile_of(c).update(parts=[[1, 12288]]),
        lambda c: tile_of(c).update(parts=[[2**70, 12288]]),
        lambda c: tile_of(c).update(parts=[[0, 12287]]),
        lambda c: tile_of(c).update(parts=[[0, 8192]]),
        lambda c: tile_of(c).update(parts=[[0, 16384]]),
        lambda c: tile_of(c).update(parts=[[0, 12288], [16384, 0]]),
        lambda c: tile_of(c).update(parts=[[0, 16384], [16384, -4096]]),
        lambda c: tile_of(c).update(parts=[0, 12288]),
        lambda c: tile_of(c).update(parts=[[0, 4096.0], [4096, 8192]]),
        lambda c: tile_of(c).update(parts=[[0, True], [0, 12288]]),
        lambda c: tile_of(c).update(parts=[[0, 12288, 1]]),
        lambda c: tile_of(c).update(parts={"0": 12288}),
        lambda c: tile_of(c).update(offset=0),
        lambda c: tile_of(c).update(packed_bytes=9001),
        lambda c: tile_of(c).update(packed_bytes=8999),
        lambda c: tile_of(c).update(packed_bytes=-1),
        lambda c: tile_of(c).update(nbytes=2**50),
        lambda c: tile_of(c).update(nbytes="9"),
        lambda c: tile_of(c).update(codec=None),
        lambda c: tile_of(c).update(checksum=2**64),
        lambda c: tile_of(c).update(codec="lossless32", nbytes=18_001),
        lambda c: tile_of(c).pop("packed_bytes"),
    ],
)
def test_a_manifest_from_elsewhere_is_data(
    tmp_path: Path, taken: Checkpoint, change: Callable[[dict[str, Any]], Any]
) -> None:
    rewritten(taken, change)
    with pytest.raises(StoreError, match="000001 cannot be read") as raised:
        read_checkpoints(tmp_path)
    assert len(str(raised.value)) < 1500


def test_tiles_that_are_not_there_are_refused(
    tmp_path: Path, taken: Checkpoint
) -> None:
    rewritten(taken, lambda c: tile_of(c).update(parts=[[2**40, 12288]]))
    found = read_checkpoints(tmp_path)
    with pytest.raises(StoreError, match="its checkpoints name"):
        DiskStore(tmp_path, pinned=[each.manifest for each in found])


@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_tiles_that_are_elsewhere_are_not_written(
    tmp_path: Path, taken: Checkpoint, how: str
) -> None:
    """What no manifest names would count as free space."""
    tiles, outside = tmp_path / "tiles.bin", tmp_path / "outside"
    tiles.rename(outside)
    getattr(tiles, how)(outside)
    before = outside.read_bytes()
    with pytest.raises(StoreError, match=r"is a link|has a second name"):
        DiskStore(tmp_path, pinned=[taken.manifest])
    assert outside.read_bytes() == before


def test_the_folder_of_checkpoints_is_not_a_link(
    tmp_path: Path, taken: Checkpoint
) -> None:
    parent = taken.folder.parent
    parent.rename(tmp_path / "elsewhere")
    parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="not a folder"):
        read_checkpoints(tmp_path)


# ---- from disk to disk ----


def reopened(taken: Checkpoint) -> DiskStore:
    return DiskStore(taken.folder.parents[1], pinned=[taken.manifest])


def test_out_and_in_again(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, taken: Checkpoint
) -> None:
    source = reopened(taken)
    other = tmp_path_factory.mktemp("other")
    folder = export_checkpoint(taken, source, other / "moved", most_bytes=100)
    source.close()
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "tiles.bin",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["moved"]
    home = tmp_path_factory.mktemp("third")
    target = DiskStore(home)
    put(target, "mine", noise(5000, 7))
    found = import_checkpoint(folder, target, number=4, most_bytes=MIB, name="b")
    assert (found.name, found.step, found.number) == ("b", 3, 4)
    assert found.read(most_bytes=100) == (b'{"lr": 0.1}', b"some tensors")
    assert target.keys() == ["mine"]
    target.restore(found.manifest, {"x": "0/weights/0/0", "y": "0/weights/0/1"})
    assert np.array_equal(get(target, "x"), noise(9000, 1))
    assert np.array_equal(get(target, "y"), noise(50, 2))
    assert [each.name for each in read_checkpoints(home)] == ["b"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "tiles.bin",
    ]
    target.close()


def test_export_refuses_what_exists(tmp_path: Path, taken: Checkpoint) -> None:
    source = reopened(taken)
    with pytest.raises(ArgumentError, match="exists"):
        export_checkpoint(taken, source, tmp_path, most_bytes=100)
    source.close()


def test_a_damaged_tile_is_not_copied(
    tmp_path_factory: pytest.TempPathFactory, taken: Checkpoint
) -> None:
    source = reopened(taken)
    with source.path.open("r+b") as file:
        file.seek(taken.manifest.tiles["0/weights/0/1"].offset)
        file.write(b"zzzz")
        file.flush()
        os.fsync(file.fileno())
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(ChecksumError):
        export_checkpoint(taken, source, other / "moved", most_bytes=100)
    assert list(other.iterdir()) == []
    source.close()
    target = DiskStore(other)
    with pytest.raises(ChecksumError):
        import_checkpoint(source.directory, target, number=1, most_bytes=MIB)
    assert target.used_bytes == 0
    target.close()
    assert list(other.iterdir()) == []


@pytest.fixture
def read_only(
    tmp_path_factory: pytest.TempPathFactory, taken: Checkpoint
) -> Iterator[Path]:
    """Yield the directory of ``taken``, mounted where nothing can be written."""
    place = tmp_path_factory.mktemp("read-only")
    mount = ["mount", "--bind", "-o", "ro", *map(str, (taken.folder.parents[1], place))]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system mounts nothing: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_import_from_where_nothing_can_be_written(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    taken: Checkpoint,
    read_only: Path,
) -> None:
    target = DiskStore(tmp_path_factory.mktemp("target"))
    owner = OwnerLock(taken.folder.parents[1])
    with pytest.raises(SessionError, match="belongs to another session"):
        import_checkpoint(read_only, target, number=1, most_bytes=MIB)
    owner.release()
    with pytest.raises(ArgumentError, match="nothing can be written"):
        check_directory(read_only)
    found = import_checkpoint(read_only, target, number=1, most_bytes=MIB)
    target.restore(found.manifest, {"x": "0/weights/0/0"})
    assert np.array_equal(get(target, "x"), noise(9000, 1))
    target.close()


def test_import_leaves_a_folder_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, taken: Checkpoint
) -> None:
    """Nothing is cut off its file, and a dead process's note stays."""
    directory = taken.folder.parents[1]
    (directory / LOCK_NAME).write_text('{"step": 7}')
    with (directory / DATA_NAME).open("ab") as file:
        file.write(bytes(40960))

    def contents() -> dict[Path, bytes]:
        files = (path for path in directory.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    before = contents()
    target = DiskStore(tmp_path_factory.mktemp("target"))
    import_checkpoint(directory, target, number=1, most_bytes=MIB)
    target.close()
    assert contents() == before


def test_import_checks_room_and_owner(
    tmp_path_factory: pytest.TempPathFactory, taken: Checkpoint
) -> None:
    home = tmp_path_factory.mktemp("other")
    target = DiskStore(home, max_bytes=8192)
    directory = taken.folder.parents[1]
    with pytest.raises(BudgetError, match=r"needs 16\.4 kB"):
        import_checkpoint(directory, target, number=1, most_bytes=MIB)
    lock = OwnerLock(directory)
    with pytest.raises(SessionError, match="belongs to another session"):
        import_checkpoint(directory, target, number=1, most_bytes=MIB)
    lock.release()
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ArgumentError, match="holds 0 checkpoints"):
        import_checkpoint(empty, target, number=1, most_bytes=MIB)
    with pytest.raises(ArgumentError, match="not a folder"):
        import_checkpoint(empty / "missing", target, number=1, most_bytes=MIB)
    shutil.rmtree(empty)
    target.close()


def test_a_tile_that_no_session_writes_is_not_copied(
    tmp_path_factory: pytest.TempPathFactory, taken: Checkpoint
) -> None:
    """Three tiles are in RAM at a time, of whatever length the folder says."""
    size = 2**30
    place = {"parts": [[0, size]], "nbytes": size, "packed_bytes": size}
    rewritten(taken, lambda content: tile_of(content).update(place))
    directory = taken.folder.parents[1]
    os.truncate(directory / "tiles.bin", 2 * size)
    target = DiskStore(tmp_path_factory.mktemp("other"))
    for most, told in ((MIB, "350 kB"), (2**40, "67.1 MB")):
        with pytest.raises(
            StoreError, match=rf"a tile of 1\.07 GB, and {told} are allowed"
        ):
            import_checkpoint(directory, target, number=1, most_bytes=most)
    target.close()


# ---- no more RAM than allowed ----


def tile_text(index: int) -> str:
    place = f'"parts": [[{4096 * index}, 4096]], "nbytes": 7, "packed_bytes": 7'
    return f'"{index}": {{{place}, "codec": "raw", "checksum": {2**63 + index}, "generation": {index}}}'


def write_text(taken: Checkpoint, name: str, text: str) -> None:
    path = taken.folder / name
    path.write_text(text)
    make_checksum_fit(path)


def add_tiles(taken: Checkpoint, count: int) -> int:
    """Let a manifest have so many tiles, written as short as can be; return what it may take of RAM."""
    path = taken.folder / "manifest.json"
    head = json.loads(path.read_text())
    head["tiles"] = {}
    tiles = ",".join(map(tile_text, range(count))).replace(" ", "")
    text = json.dumps(head).replace('"tiles": {}', f'"tiles": {{{tiles}}}')
    write_text(taken, path.name, text)
    return len(text) + parsed_bytes(text.encode())


def peak_of(directory: Path, most_bytes: int) -> int:
    """Read a directory's checkpoints, with an error or without; return the most RAM that it took."""
    tracemalloc.start()
    try:
        with suppress(StoreError):
            found = read_checkpoints(directory, most_bytes=most_bytes)
            assert found
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("short", [0, 1])
def test_tiles_take_no_more_ram_than_allowed(
    tmp_path: Path, taken: Checkpoint, short: int
) -> None:
    needed = add_tiles(taken, 5000)
    assert peak_of(tmp_path, needed - short) < needed
    if short:
        with pytest.raises(StoreError, match=r"MB of RAM, and .* max_ram_gb"):
            read_checkpoints(tmp_path, most_bytes=needed - short)
    else:
        (found,) = read_checkpoints(tmp_path, most_bytes=needed)
        assert len(found.manifest.tiles) == 5000


def test_many_checkpoints_take_no_more_ram_than_allowed(
    tmp_path: Path, taken: Checkpoint
) -> None:
    needed = add_tiles(taken, 500)
    for number in range(2, 41):
        shutil.copytree(taken.folder, taken.folder.with_name(f"{number:06d}"))
    assert peak_of(tmp_path, 40 * needed) < 40 * needed
    assert len(read_checkpoints(tmp_path, most_bytes=40 * needed)) == 40
    assert peak_of(tmp_path, 3 * needed) < 3 * needed
    with pytest.raises(StoreError, match=r"000040 cannot be read .* max_ram_gb"):
        read_checkpoints(tmp_path, most_bytes=40 * needed - 1)


@pytest.mark.parametrize("name", FILES)
def test_a_long_file_is_not_read(tmp_path: Path, taken: Checkpoint, name: str) -> None:
    os.truncate(taken.folder / name, 2**36)
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match="000001 cannot be read"):
            [x.read(most_bytes=MIB) for x in read_checkpoints(tmp_path, most_bytes=MIB)]
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["[" + "[]," * 10**6 + "0]", json.dumps({"a" * 10**6: 0})])  # fmt: skip
def test_text_that_becomes_much_is_not_parsed(
    tmp_path: Path, taken: Checkpoint, text: str
) -> None:
    write_text(taken, "manifest.json", text)
    assert peak_of(tmp_path, 5 * 10**6) < 5 * 10**6
    with pytest.raises(StoreError, match=r"of RAM, and 5\.00 MB are allowed"):
        read_checkpoints(tmp_path, most_bytes=5 * 10**6)


def test_countless_entries_are_not_listed(
    tmp_path: Path, taken: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_MAX_ENTRIES", 3)
    for name in "abcd":
        (taken.folder.parent / name).touch()
    with pytest.raises(StoreError, match="more than 3 files"):
        read_checkpoints(tmp_path)
