"""Random damage to a directory from elsewhere: our own error, or the right data; nothing else happens.

``pytest tests/store/test_fuzz.py --cases 10000`` tries more.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatrain_nb.codec.lossless import chunks
from megatrain_nb.errors import MegatrainError
from megatrain_nb.store.base import wait
from megatrain_nb.store.checkpoint import read_checkpoints
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool
from megatrain_nb.store.owner import OwnerLock
from megatrain_nb.store.packing import STAGING_BYTES
from tests.codec.floats import smooth
from tests.store.conformance import noise, put
from tests.store.test_checkpoint import make_checksum_fit, take

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST_BYTES = 100_000
PACKED = "0/exp_avg/1/0"
CONTENTS = {
    "0/weights/0/0": noise(9000, 1),
    "0/encoded-0123abcd/12/3": noise(50, 2),
    PACKED: smooth(15_000).view(np.uint8),
}
ODD: list[Any] = [
    None, True, -1, 0, 1, 4096, 2**31, 2**62, 2**64, 2**200, 1e308, float("nan"), "", "x", "../../escape",
    "/etc/passwd", "\x00", "a" * 5000, [], {}, [[]], {"a": {}}, [0] * 50,
]  # fmt: skip


def open_store(directory: Path, **options: Any) -> DiskStore:
    pool = HostPool(2 * STAGING_BYTES)
    return DiskStore(directory, direct=False, num_threads=2, staging=pool, **options)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints that share their tiles, one of them packed, and the lock of a dead owner."""
    directory = tmp_path_factory.mktemp("sound") / "run"
    directory.mkdir()
    chunks.warm_up()
    store = open_store(directory)
    for key, data in CONTENTS.items():
        codec = "lossless32" if key == PACKED else "raw"
        wait(store.put(key, data, codec=codec), what="put", timeout_s=20)
    assert store.pin().packed
    take(store, 1, "a")
    take(store, 2, "b")
    store.close()
    (directory / "owner.lock").write_text('{"pid": 1, "host": "h", "step": 5}')
    return directory


def flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 3, 50))):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def insert(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.randbytes(dice.choice((1, 8, 4096))) + data[at:]


def nest(data: bytes, dice: random.Random) -> bytes:
    return b"[" * dice.choice((10, 5000, 200_000))


def replace_value(tree: Any, dice: random.Random) -> Any:
    """Put something odd somewhere into a JSON tree."""
    if isinstance(tree, dict) and tree and dice.random() < 0.85:
        key = dice.choice(sorted(tree))
        tree[key] = replace_value(tree[key], dice)
        if dice.random() < 0.1:
            tree[str(dice.choice(ODD))] = tree.pop(key)
        return tree
    if isinstance(tree, int) and not isinstance(tree, bool) and dice.random() < 0.5:
        return tree + dice.choice((-4096, -1, 1, 4096, 2**40))
    return copy.deepcopy(dice.choice(ODD))


def change_json(path: Path, dice: random.Random) -> None:
    """Damage that has a right checksum, as somebody's who means it."""
    content = json.loads(path.read_text())
    for _ in range(dice.choice((1, 1, 2, 5))):
        content = replace_value(content, dice)
    path.write_text(json.dumps(content))
    make_checksum_fit(path)


def become(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


def damage(directory: Path, dice: random.Random) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    path = dice.choice(files)
    kinds: list[Callable[[], object]] = [
        lambda: path.write_bytes(
            dice.choice((flip, cut, insert, nest))(path.read_bytes(), dice)
        ),
        lambda: change_json(
            dice.choice([x for x in files if x.name == "manifest.json"]), dice
        ),
        path.unlink,
        lambda: path.write_bytes(dice.choice(files).read_bytes()),
        lambda: become(path, lambda: path.symlink_to(directory.parent / "outside")),
        lambda: become(path, lambda: os.mkfifo(path)),
        lambda: (
            path.parent.rename(path.parent.with_name("000003"))
            if path.parent != directory
            else None
        ),
    ]
    dice.choices(kinds, weights=(4, 8, 1, 1, 1, 1, 1))[0]()


def opened(directory: Path) -> int:
    """Own it, read everything that there is, and write beside it; return how many tiles were right."""
    OwnerLock(directory).release()
    found = read_checkpoints(directory, most_bytes=MOST_BYTES)
    if not found:
        return 0
    store = open_store(directory, pinned=[each.manifest for each in found])
    right = 0
    try:
        put(store, "new", noise(20_000))
        for each in found:
            for key, tile in each.manifest.tiles.items():
                assert tile.nbytes < 2**24
                out = np.empty(tile.nbytes, np.uint8)
                wait(store.get_into(key, out, of=each.manifest), what=key)
                if key in CONTENTS and tile.nbytes == CONTENTS[key].nbytes:
                    right += np.array_equal(out, CONTENTS[key])
            each.read(most_bytes=MOST_BYTES)
    finally:
        store.close()
    return right


def outcome_of(directory: Path) -> tuple[str, str]:
    try:
        return "read", f"{opened(directory)} tiles"
    except MegatrainError as error:
        return "refused", str(error)
    except Exception as error:  # whatever else it is, it is a fault
        return type(error).__name__, repr(error)


def test_random_damage(
    tmp_path: Path, sound: Path, pytestconfig: pytest.Config
) -> None:
    # A link to it instead of the tiles would do as well, were it followed.
    outside = tmp_path / "outside"
    outside.write_bytes((sound / "tiles.bin").read_bytes() + bytes(2**16))
    content = outside.read_bytes()
    outcomes = {"refused": 0, "read": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(pytestconfig.getoption("--cases")):
        dice = random.Random(case)
        directory = tmp_path / "run"
        shutil.copytree(sound, directory)
        damage(directory, dice)
        outcome, text = outcome_of(directory)
        assert outcome in outcomes, (case, outcome, text)
        assert 0 < len(text) < 3000, (case, text)
        outcomes[outcome] += 1
        assert outside.read_bytes() == content
        assert {x.name for x in tmp_path.iterdir()} == {"outside", "run"}, case
        shutil.rmtree(directory)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200_000  # kB
    assert min(outcomes.values()) > sum(outcomes.values()) // 50, outcomes


def test_sound_is_sound(tmp_path: Path, sound: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    assert opened(tmp_path / "run") == 2 * len(CONTENTS)
