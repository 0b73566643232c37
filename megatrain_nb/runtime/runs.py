"""The checkpoint folders of ``mt.Trainer``: ``output_dir/checkpoint-12`` refers to a checkpoint of the session.

Weights and moments stay where they are, pinned in the offload directory. The folder holds the Trainer's
state, as transformers writes it, and a small file that names the checkpoint. So listing, rotating and
choosing checkpoints by their folders works as everywhere.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.store.checkpoint import write_folder
from megatrain_nb.store.infile import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable

# What a session's checkpoint holds of the Trainer's loop, by this name.
TRAINER = "trainer"
_POINTER, _STATE = "megatrain.json", "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_MAX_POINTER_BYTES = 2**16


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / f"checkpoint-{step}"


def folders_in(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run that refer to a session's checkpoint, by step."""
    found = [path for path in run.glob("checkpoint-*") if _FOLDER.fullmatch(path.name)]
    mine = [path for path in found if (path / _POINTER).is_file()]
    return sorted(mine, key=step_of)


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint folder is called after."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def write_reference(
    folder: Path, *, name: str, offload_dir: Path, trainer_state: str
) -> None:
    """Make a checkpoint folder; a crash leaves all of it or nothing.

    Raises
    ------
    StoreError
        It cannot be written.
    """
    pointer = {"checkpoint": name, "offload_dir": str(offload_dir)}
    files = {
        _POINTER: json.dumps(pointer, indent=1).encode(),
        _STATE: trainer_state.encode(),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        write_folder(folder.with_name(f".{folder.name}.part"), files, then=folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        msg = f"cannot write {folder}: {error.strerror}; the checkpoint itself is in {offload_dir}"
        raise StoreError(msg) from error


def read_reference(folder: Path) -> dict[str, str]:
    """Return the name of the checkpoint that a folder refers to, and its offload directory.

    Raises
    ------
    ArgumentError
        It is no such folder.
    """
    path = folder / _POINTER
    try:
        content = json.loads(read_regular(path, _MAX_POINTER_BYTES))
        return {key: str(content[key]) for key in ("checkpoint", "offload_dir")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        msg = (
            f"{folder} is not a checkpoint of mt.Trainer ({_POINTER} is missing or damaged). To begin with the weights "
            "of an ordinary folder, load it with from_pretrained and leave resume_from_checkpoint out"
        )
        raise ArgumentError(msg) from error


def to_remove(
    folders: Iterable[Path], new: Path, *, limit: int | None, best: str | None
) -> list[Path]:
    """Return which folders give way, as transformers chooses: never the newest or the best one.

    Parameters
    ----------
    folders
        Oldest first.
    new
        The one that is about to come.
    limit
        ``save_total_limit``.
    best
        ``best_model_checkpoint``.

    Examples
    --------
    >>> old = [Path("checkpoint-1"), Path("checkpoint-2")]
    >>> to_remove(old, Path("checkpoint-3"), limit=2, best="checkpoint-1")
    [PosixPath('checkpoint-2')]
    """
    others = [folder for folder in folders if folder != new]
    if not limit or limit <= 0:
        return []
    protected = {new} | ({Path(best)} if best else set())
    excess = len(others) + 1 - max(limit, len(protected))
    victims = [folder for folder in others if folder not in protected]
    return victims[: max(0, excess)]
