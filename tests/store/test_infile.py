"""Stretches of files from elsewhere: the very bytes, past the page cache or out of it."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from megatrain_nb.errors import StoreError
from megatrain_nb.store import infile
from megatrain_nb.store.infile import InFile

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 300_001


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """With a small buffer, so that a stretch takes several reads."""
    monkeypatch.setattr(infile, "_BUFFER_BYTES", 32_768)
    monkeypatch.setattr(infile, "_LEAST_BYTES", 5_000)
    monkeypatch.setattr(infile, "_BUFFERS", type(infile._BUFFERS)())
    data = random.Random(0).randbytes(SIZE)
    path = tmp_path / "weights"
    path.write_bytes(data)
    return path, data


def forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("how", ["past the cache", "cached", "no O_DIRECT", "no flags"])
def test_any_stretch(
    file: tuple[Path, bytes], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = file
    direct = []
    original_open, original_read = os.open, os.preadv

    def opens(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            direct.append(name)
            if how == "no O_DIRECT":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original_open(name, flags, *args, **kwargs)

    def reads(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags and how == "no flags":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return original_read(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", reads)
    one, dice = InFile(path), random.Random(1)
    stretches = [(0, SIZE), (SIZE - 5000, SIZE), (4096, 40_960), (1, 2), (7, 7)]
    stretches += [tuple(sorted(dice.sample(range(SIZE + 1), 2))) for _ in range(30)]  # type: ignore[misc]
    for start, stop in stretches:
        if how != "cached":
            forget(path)
        found = bytearray(stop - start)
        one.read_into(memoryview(found), start)
        assert found == data[start:stop]
    assert bool(direct) == (how != "cached")


def test_threads_have_buffers_of_their_own(file: tuple[Path, bytes]) -> None:
    path, data = file
    forget(path)
    one = InFile(path)

    def read(start: int) -> bool:
        found = bytearray(20_000)
        one.read_into(memoryview(found), start)
        return found == data[start : start + 20_000]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(0, SIZE - 20_000, 777)))


@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_ends_too_early(file: tuple[Path, bytes], cached: bool) -> None:
    path, _ = file
    if not cached:
        forget(path)
    with pytest.raises(StoreError, match="ended at byte 300001"):
        InFile(path).read_into(memoryview(bytearray(10_000)), SIZE - 9_999)


@pytest.mark.parametrize("how", ["replaced", "longer", "touched", "gone"])
def test_another_file_than_at_first(file: tuple[Path, bytes], how: str) -> None:
    path, data = file
    one = InFile(path)
    one.read_into(memoryview(bytearray(10)), 0)
    if how == "replaced":
        path.with_name("new").write_bytes(data)
        path.with_name("new").replace(path)
    elif how == "longer":
        with path.open("ab") as stream:
            stream.write(b"x")
    elif how == "touched":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    with pytest.raises(StoreError, match=r"was written anew|No such file"):
        one.read_into(memoryview(bytearray(10)), 0)


def test_nothing_stays_open(file: tuple[Path, bytes]) -> None:
    path, _ = file
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        forget(path)
        InFile(path).read_into(memoryview(bytearray(SIZE)), 0)
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_disk_that_fails(
    file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    for length in (10, SIZE):
        with pytest.raises(StoreError, match=r"at byte 3 failed: Input/output error"):
            InFile(file[0]).read_into(memoryview(bytearray(length)), 3)
