"""Put a finished save in place of the earlier one, so that a crash at any moment leaves one of the two.

Everything is written into a hidden folder inside the target first, and synced. Then files are renamed. What
``from_pretrained`` reads is decided by one name: ``model.safetensors`` if it is there, else the index, which names the
shards. New shards get names that the earlier ones have not; so the weights change with one rename (or with the removal
of ``model.safetensors``, where shards follow one file). Where config or tokenizer change as well, a whole new folder takes
the place of this one in a single step (`megatrain_nb.runtime.exchange`). Where that cannot be done there are several
renames: the earlier save is kept beside meanwhile, as hard links, the folder has no weights under their name until the
last rename, so that nobody reads a mixture, and the next `recover` puts the earlier one back if they did not all happen.
Nothing else in the folder is touched.
"""

from __future__ import annotations

import filecmp
import glob
import os
import re
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain_nb.errors import StoreError
from megatrain_nb.runtime.exchange import exchanged
from megatrain_nb.runtime.shards import SAFE, SAFE_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator

_STAGED = ".megatrain-saving-"
_EARLIER = ".megatrain-earlier"
_WHOLE = "whole"
_SHARD = re.compile(r"model(-b)?-\d{5}-of-\d{5}\.safetensors")


def weight_names(directory: Path, count: int) -> list[str]:
    """Return names for the files of weights: none is one that an index in the folder may refer to."""
    if count == 1:
        return [SAFE]
    for tag in ("", "-b"):
        names = [f"model{tag}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]  # fmt: skip
        if not any((directory / name).exists() for name in names):
            return names
    # Both sets are there only where a crash left one that no index names.
    index = _text(directory / SAFE_INDEX)
    return [name.replace("-b-", "-") for name in names] if names[0] in index else names


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Give a hidden folder in ``directory`` to write a save into; it is gone afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    beside = _beside(directory, "")
    for left in (*directory.glob(f"{_STAGED}*"), *beside.parent.glob(f"{glob.escape(beside.name)}*")):  # fmt: skip
        if not _alive(left.name.rpartition("-")[2]):
            shutil.rmtree(left, ignore_errors=True)
    folder = directory / f"{_STAGED}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, directory: Path) -> None:
    """Move a whole save from a folder inside ``directory`` into it."""
    new = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}  # fmt: skip
    for name in new:
        sync(folder / name)
    weights = {name for name in new if _is_weights(name)}
    old = {path.name for path in directory.iterdir() if _is_weights(path.name)}
    others = {name for name in new - weights
              if not _same(folder / name, directory / name)}  # fmt: skip
    shards = weights - {SAFE, SAFE_INDEX}
    if others and (old or any((directory / name).exists() for name in others)):
        beside = _beside(directory, str(os.getpid()))
        drop = old | {folder.name, _EARLIER}
        if exchanged(folder, directory.resolve(), beside=beside, drop=drop):
            return
        _keep_earlier(directory, old | others)
        for name in old & {SAFE, SAFE_INDEX}:
            (directory / name).unlink()
        sync(directory)
    _move(shards, folder, directory)
    _move(others, folder, directory)
    _move(weights - shards, folder, directory)
    if SAFE not in weights:
        (directory / SAFE).unlink(missing_ok=True)
    sync(directory)
    shutil.rmtree(directory / _EARLIER, ignore_errors=True)
    for name in old - weights:
        (directory / name).unlink(missing_ok=True)


def recover(directory: Path) -> bool:
    """Put an earlier save back that another one was about to replace when it crashed; whether there was one.

    Raises
    ------
    StoreError
        There is a link where no save leaves one: in a folder from elsewhere it may lead anywhere.
    """
    kept = directory / _EARLIER
    whole = (kept / _WHOLE).exists()
    if whole:
        _check_no_link(kept)
        names = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}  # fmt: skip
        names.discard(_WHOLE)
        for name in names:
            _check_no_link(kept / name)
            for parent in Path(name).parents[:-1]:
                _check_no_link(kept / parent)
                _check_no_link(directory / parent)
        for name in sorted(names):
            link = kept / f"{_WHOLE}.{Path(name).name}"
            link.unlink(missing_ok=True)
            os.link(kept / name, link)
            link.replace(directory / name)
        for name in {SAFE, SAFE_INDEX} - names:
            (directory / name).unlink(missing_ok=True)
        sync(directory)
    shutil.rmtree(kept, ignore_errors=True)
    return whole


def _check_no_link(path: Path) -> None:
    if path.is_symlink():
        msg = f"{path} is a link, which no save leaves there; look where it leads, and delete it"
        raise StoreError(msg)


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _beside(directory: Path, tag: str) -> Path:
    """Return a name beside a folder, for the one that is to take its place."""
    target = directory.resolve()
    return target.with_name(f".{target.name}{_STAGED}{tag}")


def _keep_earlier(directory: Path, names: set[str]) -> None:
    """Give the files of the earlier save a second name; it counts once all have one."""
    kept = directory / _EARLIER
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for name in names:
        if (directory / name).is_file():
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link((directory / name).resolve(), kept / name)
            except OSError:  # a file system without hard links
                shutil.copyfile(directory / name, kept / name)
                sync(kept / name)
    sync(kept)
    (kept / _WHOLE).touch()
    sync(kept)
    sync(directory)


def _move(names: set[str], folder: Path, directory: Path) -> None:
    for name in sorted(names):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).replace(directory / name)
    if names:
        sync(directory)


def _is_weights(name: str) -> bool:
    return name in (SAFE, SAFE_INDEX) or _SHARD.fullmatch(name) is not None


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def _alive(pid: str) -> bool:
    if not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return int(pid) != os.getpid()
