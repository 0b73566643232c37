from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megatrain_nb.errors import SessionError, StoreError
from megatrain_nb.store.checkpoint import Label, write_checkpoint
from megatrain_nb.store.cleanup import cleanup
from megatrain_nb.store.manifest import Manifest
from megatrain_nb.store.owner import OwnerLock, reclaim

HOLD = """
import sys
from pathlib import Path
from megatrain_nb.store.owner import OwnerLock
lock = OwnerLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


# As a data loader's worker does, which looks every few seconds whether its parent lives.
HOLD_WITH_A_WORKER = """
import os, sys, time
from pathlib import Path
from megatrain_nb.store.owner import OwnerLock
lock = OwnerLock(Path(sys.argv[1]))
worker = os.fork()
if not worker:
    lock.release()  # of no effect: the directory is the parent's
    time.sleep(120)
    os._exit(0)
print(worker, flush=True)
sys.stdin.read()
"""


def test_owned_once_then_free_again(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path)
    assert not lock.took_over
    owner = json.loads(lock.path.read_text())
    assert owner["pid"] == os.getpid()
    with pytest.raises(SessionError, match="another session of this process since 2"):
        OwnerLock(tmp_path)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    OwnerLock(tmp_path).release()


def test_another_process_is_named_and_its_death_frees_the_directory(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SessionError, match=f"process {other.pid} on "):
            OwnerLock(tmp_path)
        with pytest.raises(SessionError, match=f"process {other.pid} on "):
            reclaim(tmp_path)
        other.kill()
    assert (tmp_path / "owner.lock").exists()
    lock = OwnerLock(tmp_path)
    assert lock.took_over
    lock.release()


def test_the_lock_is_on_the_disk_before_any_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut it says whose tiles these are: without it they would be in the way for good."""
    synced = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        size = os.fstat(fd).st_size
        synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), size))

    monkeypatch.setattr(os, "fsync", fsync)
    lock = OwnerLock(tmp_path)
    file, folder = synced
    assert file == (str(lock.path), lock.path.stat().st_size)
    assert folder[0] == str(tmp_path)
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_lock_that_cannot_say_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A full disk has to be cleaned up; one that fails is named."""
    (tmp_path / "checkpoints" / ".new-000001").mkdir(parents=True)

    def pwrite(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        if code == errno.EIO:
            with pytest.raises(StoreError, match=r"cannot write .*owner\.lock: Input"):
                OwnerLock(tmp_path)
            return
        lock = OwnerLock(tmp_path)
        lock.note_step(3)
        with pytest.raises(SessionError, match="belongs to process unknown"):
            OwnerLock(tmp_path)
        lock.release()
        cleanup(tmp_path, remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_lives_on_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_WITH_A_WORKER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        try:
            time.sleep(0.2)  # the worker has begun
            assert (tmp_path / "owner.lock").exists()
            with pytest.raises(SessionError, match=f"process {owner.pid} on "):
                OwnerLock(tmp_path)
            owner.kill()
            owner.wait()
            os.kill(worker, 0)
            lock = OwnerLock(tmp_path)
            assert lock.took_over
            lock.release()
        finally:
            os.kill(worker, signal.SIGKILL)


def test_release_leaves_the_lock_of_a_successor_alone(tmp_path: Path) -> None:
    first = OwnerLock(tmp_path)
    first.path.unlink()  # somebody cleaned up by hand
    second = OwnerLock(tmp_path)
    first.release()
    assert second.path.exists()
    with pytest.raises(SessionError):
        OwnerLock(tmp_path)
    second.release()


def test_reclaim_deletes_our_files_only(tmp_path: Path) -> None:
    (tmp_path / "tiles.bin").write_bytes(bytes(8192))
    (tmp_path / "thesis.tex").write_text("keep me")
    lock = OwnerLock(tmp_path)
    assert reclaim(tmp_path) >= 8192
    assert sorted(p.name for p in tmp_path.iterdir()) == ["owner.lock", "thesis.tex"]
    assert reclaim(tmp_path) == 0
    lock.release()
    assert reclaim(tmp_path) == 0


def test_reclaim_leaves_checkpoints_and_what_they_pin(tmp_path: Path) -> None:
    (tmp_path / "tiles.bin").write_bytes(bytes(8192))
    label = Label(name="a", step=1, num_steps=None, time=datetime.now(UTC))
    write_checkpoint(tmp_path, 1, label, Manifest({}), state=b"{}", tensors=b"")
    (tmp_path / "checkpoints" / ".new-000002").mkdir()
    assert reclaim(tmp_path) == 0
    assert (tmp_path / "tiles.bin").exists()
    assert [x.name for x in (tmp_path / "checkpoints").iterdir()] == ["000001"]


def test_a_dead_owner_says_how_far_it_was(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path)
    assert lock.left_at_step is None
    for step in (9, 10):
        lock.note_step(step)
    with pytest.raises(SessionError, match="another session of this process"):
        OwnerLock(tmp_path)
    os.close(lock._fd)
    after = OwnerLock(tmp_path)
    assert (after.took_over, after.left_at_step) == (True, 10)
    after.release()
    after.note_step(11)
    assert list(tmp_path.iterdir()) == []


def test_reclaim_does_not_follow_or_delete_links(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(bytes(10))
    (tmp_path / "tiles.bin").symlink_to(target)
    assert reclaim(tmp_path) == 0
    assert (tmp_path / "tiles.bin").is_symlink()
    assert target.exists()


@pytest.mark.parametrize("what", ["link", "dangling link", "pipe"])
def test_a_lock_that_is_not_a_file_of_ours(tmp_path: Path, what: str) -> None:
    """In a folder from elsewhere: nothing outside of it is written, made, or waited for."""
    outside, inside = tmp_path / "mine.txt", tmp_path / "folder"
    inside.mkdir()
    if what == "pipe":
        os.mkfifo(inside / "owner.lock")
    else:
        (inside / "owner.lock").symlink_to(outside)
    if what != "dangling link":
        outside.write_text("mine")
    with pytest.raises(StoreError, match=r"owner\.lock is (a link|not a regular file)"):
        OwnerLock(inside)
    assert outside.exists() == (what != "dangling link")
    assert what == "dangling link" or outside.read_text() == "mine"


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        OwnerLock(tmp_path / "missing")


def test_a_half_written_lock_still_gives_a_clear_error(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path)
    lock.path.write_text('{"pid": 1')
    with pytest.raises(SessionError, match="process unknown on unknown"):
        OwnerLock(tmp_path)
    lock.release()
