"""Files written past the page cache: the very bytes, whole or an error."""

from __future__ import annotations

import errno
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatrain_nb.store.host import map_pages
from megatrain_nb.store.outfile import FileWriter

if TYPE_CHECKING:
    from pathlib import Path

PIECE = 8192


def pieces(count: int = 3) -> list[Any]:
    found = [np.frombuffer(map_pages(PIECE), np.uint8) for _ in range(count)]
    for each in found:
        each.fill(0xFF)
    return found


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_any_length_in_any_portions(tmp_path: Path, direct: bool, count: int) -> None:
    dice = random.Random(0)
    lengths = [0, 1, 4095, 4096, 4097, PIECE, PIECE + 1, 10 * PIECE, 100_001]
    with FileWriter(pieces(count), direct=direct) as writer:
        for turn, length in enumerate(lengths):
            data = dice.randbytes(length)
            path = tmp_path / str(turn)
            with writer.opened(path):
                start = 0
                while start < length:
                    stop = min(length, start + dice.choice([1, 7, 4096, 30_000]))
                    writer.write(data[start:stop])
                    start = stop
            assert path.read_bytes() == data


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.pwrite

    def short(fd: int, data: memoryview, offset: int) -> int:
        return original(fd, data[:5000] if len(data) > 5000 else data, offset)

    data = random.Random(0).randbytes(5 * PIECE + 3)
    for direct in (True, False):
        with monkeypatch.context() as patch:
            # A short direct write ends where it likes; what counts of it is whole pages.
            patch.setattr(os, "pwrite", short if not direct else _short_pages(original))
            with FileWriter(pieces(), direct=direct) as writer:
                path = tmp_path / str(direct)
                with writer.opened(path):
                    writer.write(data)
        assert path.read_bytes() == data


def _short_pages(original: Any) -> Any:
    def short(fd: int, data: memoryview, offset: int) -> int:
        if len(data) <= 4096:
            return int(original(fd, data, offset))
        return int(original(fd, data[:4096], offset)) + 904  # not counted

    return short


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, no thread writes any more, and the next file is written as if nothing had been."""
    original = os.pwrite
    left = [3]

    def full(fd: int, data: memoryview, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data, offset)

    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with FileWriter(pieces(), direct=True) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with (
                pytest.raises(OSError, match="No space left"),
                writer.opened(tmp_path / "a"),
            ):
                writer.write(b"x" * 20 * PIECE)
        assert len(writer._free) == 3
        with writer.opened(tmp_path / "b"):
            writer.write(b"y" * 3 * PIECE)
        with pytest.raises(FileExistsError), writer.opened(tmp_path / "b"):
            pass
    assert (tmp_path / "b").read_bytes() == b"y" * 3 * PIECE
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_disk_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with (
        FileWriter(pieces(), direct=True) as writer,
        pytest.raises(OSError, match="nothing was written"),
        writer.opened(tmp_path / "a"),
    ):
        writer.write(b"x")
