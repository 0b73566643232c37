from __future__ import annotations

import errno
import os
import stat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.store import preflight
from megatrain_nb.store.preflight import check_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def refuse(monkeypatch: pytest.MonkeyPatch, code: int, flag: int) -> None:
    """Let os.open with `flag` fail."""
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & flag:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)


def test_makes_private_directories_and_leaves_nothing_in_them(tmp_path: Path) -> None:
    report = check_directory(tmp_path / "a" / "b")
    assert report.created
    assert report.path == tmp_path / "a" / "b"
    assert report.file_system != "unknown"
    assert report.free_bytes > 0
    for made in (tmp_path / "a", report.path):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert list(report.path.iterdir()) == []
    assert not check_directory(report.path).created


def test_expands_home_and_takes_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_directory("~/tiles").path == tmp_path / "tiles"


def test_refused_direct_io_falls_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.EINVAL, os.O_DIRECT)
    report = check_directory(tmp_path)
    assert not report.direct
    assert "page cache" in report.direct_note
    assert list(tmp_path.iterdir()) == []


def test_direct_io_that_fails_only_at_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwritev, []

    def write(fd: int, buffers: Any, offset: int) -> int:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    assert not check_directory(tmp_path).direct
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/sub"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match="directory"):
        check_directory(f"{tmp_path}/file{below}")


def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EROFS, os.O_CREAT)
    with pytest.raises(ArgumentError, match="Read-only file system"):
        check_directory(tmp_path)


def test_a_failing_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ArgumentError, match="Input/output error"):
        check_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lying_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(StoreError, match="differs from what was written"):
        check_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("favail", "bavail", "word"), [(3, 10**9, "inodes"), (10**6, 10, "free")]
)
def test_no_inodes_or_no_space(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    favail: int,
    bavail: int,
    word: str,
) -> None:
    status = SimpleNamespace(
        f_files=10**7, f_favail=favail, f_bavail=bavail, f_frsize=4096
    )
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    with pytest.raises(ArgumentError, match=word):
        check_directory(tmp_path)


MOUNTS = """\
31 30 0:6 / /mnt/big\\040disk/in rw - nfs4 server:/x rw
22 1 253:0 / / rw shared:1 - ext4 /dev/vda rw
30 22 0:5 / /mnt/big\\040disk rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/mnt/big disk/tiles", "tmpfs"),
        ("/mnt/big disk/in/x", "nfs4"),
        ("/mnt/big disk/inner", "tmpfs"),
        ("/elsewhere", "ext4"),
    ],
)
def test_file_system_is_that_of_the_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    monkeypatch.setattr(preflight, "_MOUNTINFO", table)
    as_path: Callable[[str], Path] = type(tmp_path)
    assert preflight._file_system(as_path(path)) == kind


def test_tmpfs_is_called_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_file_system", lambda directory: "tmpfs")
    assert "RAM" in check_directory(tmp_path).notes[0]
