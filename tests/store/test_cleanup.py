"""Only what is ours goes, and only when it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from megatrain_nb.errors import ArgumentError, SessionError, StoreError
from megatrain_nb.store.cleanup import cleanup
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.owner import OwnerLock
from tests.store.conformance import noise, put
from tests.store.test_checkpoint import take

if TYPE_CHECKING:
    from pathlib import Path

LOCK = '{"pid": 1, "host": "h", "since": "2026", "step": 7}'


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a run with a checkpoint leaves, and things that are not ours."""
    store = DiskStore(tmp_path)
    put(store, "0/weights/0/0", noise(9000))
    take(store)
    store.close()
    (tmp_path / "owner.lock").write_text(LOCK)
    (tmp_path / ".megatrain-probe-12").write_bytes(bytes(4096))
    (tmp_path / "thesis.tex").write_text("keep me")
    (tmp_path / "checkpoints" / ".new-000002").mkdir()
    (tmp_path / "checkpoints" / ".new-000002" / "state.json").write_text("{}")
    (tmp_path / "checkpoints" / "000009").mkdir()
    (tmp_path / "checkpoints" / "000009" / "photo.jpg").write_text("keep me")
    (tmp_path / "checkpoints" / "notes").mkdir()
    return tmp_path


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_to_look_changes_nothing(left: Path) -> None:
    (left / "checkpoints" / "000009" / "photo.jpg").unlink()
    (left / "checkpoints" / "000009").rmdir()
    before = names(left)
    found = cleanup(left)
    assert names(left) == before
    assert (left / "owner.lock").read_text() == LOCK
    assert {path.name for path in found.going} == {".new-000002", ".megatrain-probe-12"}
    assert "would be removed" in str(found)
    assert "checkpoint 'a', step 3 of 9" in str(found)
    found = cleanup(left, checkpoints=True)
    assert {path.name for path in found.going} == {
        ".new-000002",
        ".megatrain-probe-12",
        "000001",
        "tiles.bin",
    }
    assert found.num_bytes > (left / "tiles.bin").stat().st_size
    assert names(left) == before


def test_what_is_not_ours_stays(left: Path) -> None:
    with pytest.raises(StoreError, match="000009 cannot be read"):
        cleanup(left, remove=True)
    found = cleanup(left, checkpoints=True, remove=True)
    assert found.removed
    assert names(left) == {
        "thesis.tex",
        "checkpoints",
        "checkpoints/000009",
        "checkpoints/000009/photo.jpg",
        "checkpoints/notes",
    }
    assert str(cleanup(left, checkpoints=True)).endswith(
        "nothing would be removed, 0 B"
    )


def test_checkpoints_stay_unless_asked_for(left: Path) -> None:
    (left / "checkpoints" / "000009" / "photo.jpg").unlink()
    (left / "checkpoints" / "000009").rmdir()
    cleanup(left, remove=True)
    assert names(left) == {
        "thesis.tex",
        "tiles.bin",
        "checkpoints",
        "checkpoints/000001",
        "checkpoints/notes",
        *(f"checkpoints/000001/{x}" for x in ("checksums", "manifest.json")),
        *(f"checkpoints/000001/{x}" for x in ("state.json", "tensors.safetensors")),
    }


def test_a_file_that_is_only_called_so_stays(tmp_path: Path) -> None:
    (tmp_path / "tiles.bin").write_bytes(bytes(4096))
    cleanup(tmp_path, checkpoints=True, remove=True)
    assert names(tmp_path) == {"tiles.bin"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "000001").mkdir(parents=True)
    (elsewhere / "000001" / "state.json").write_text("{}")
    home = tmp_path / "home"
    home.mkdir()
    (home / "owner.lock").write_text(LOCK)
    (home / "checkpoints").symlink_to(elsewhere)
    (home / "tiles.bin").symlink_to(elsewhere / "000001" / "state.json")
    cleanup(home, checkpoints=True, remove=True)
    assert names(elsewhere) == {"000001", "000001/state.json"}
    assert names(home) >= {"checkpoints", "tiles.bin"}


def test_nobody_is_disturbed(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path)
    with pytest.raises(SessionError, match="another session of this process"):
        cleanup(tmp_path)
    lock.release()
    with pytest.raises(ArgumentError, match="not a directory"):
        cleanup(tmp_path / "missing")
