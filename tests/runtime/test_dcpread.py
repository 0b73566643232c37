"""A DCP folder from anywhere is data: nothing of it runs, and what is odd is refused.

``pytest tests/runtime/test_dcpread.py --cases 10000`` tries more.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata

from megatrain_nb.errors import ArgumentError, MegatrainError, StoreError
from megatrain_nb.runtime.dcpread import Folder
from tests.store.test_fuzz import cut, flip, insert

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

dcp: Any = checkpoint
CONTENTS = {
    "w": torch.arange(600, dtype=torch.float32).reshape(20, 30),
    "h": torch.arange(8, dtype=torch.bfloat16),
    "n": torch.tensor(7),
}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    state = CONTENTS | {"groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["w"]}]}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.save(state, checkpoint_id=tmp_path / "sound")
    return tmp_path / "sound"


def change(folder: Path, make: Callable[[Any], object]) -> None:
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    found = make(metadata)
    path.write_bytes(pickle.dumps(metadata if found is None else found))


def test_sound_is_read(sound: Path) -> None:
    found = Folder(sound)
    for key, value in CONTENTS.items():
        assert found.tensors[key] == (tuple(value.shape), value.dtype)
        into = torch.empty_like(value)
        found.read_into(key, into)
        assert torch.equal(into, value)
    wide = torch.empty(8, dtype=torch.float64)
    found.read_into("h", wide)
    assert torch.equal(wide, CONTENTS["h"].double())
    assert found.read_object("groups.0.lr") == 0.5
    assert found.read_object("groups.0.betas") == (0.9, 0.99)
    assert found.read_object("groups.0.params") == ["w"]


class Runs:
    """What a hostile pickle is made of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_code_of_a_pickle_runs(sound: Path, protocol: int) -> None:
    ran = sound.parent / "ran"
    content = pickle.dumps(Runs(ran), protocol)
    (sound / ".metadata").write_bytes(content)
    with pytest.raises(StoreError, match=r"does not belong into it|does not need"):
        Folder(sound)
    assert not ran.exists()
    pickle.loads(content)
    assert ran.exists()


@pytest.mark.parametrize("where", ["metadata", "planner_data", "key", "fqn", "size"])
def test_no_code_runs_from_inside_the_metadata(sound: Path, where: str) -> None:
    ran = sound.parent / "ran"

    def put(metadata: Any) -> None:
        hostile: Any = Runs(ran)
        if where == "planner_data":
            metadata.planner_data = hostile
        elif where == "metadata":
            metadata.extra = hostile
        elif where == "key":
            metadata.state_dict_metadata["x"] = hostile
        elif where == "fqn":
            object.__setattr__(next(iter(metadata.storage_data)), "fqn", hostile)
        else:
            metadata.state_dict_metadata["w"].size = hostile

    change(sound, put)
    with pytest.raises(StoreError, match="which does not belong into it"):
        Folder(sound)
    assert not ran.exists()


def test_a_pickle_changes_no_class_of_ours_or_torchs(sound: Path) -> None:
    """BUILD may set attributes of what is on the stack, a class as well: only a stand-in's."""
    name = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    state = b"N}\x8c\x06hacked\x88s\x86b."  # (None, {"hacked": True}) into the class
    (sound / ".metadata").write_bytes(b"\x80\x04" + name + state)
    with pytest.raises(StoreError):
        Folder(sound)
    assert not hasattr(Metadata, "hacked")


def first_place(metadata: Any) -> Any:
    return next(each for key, each in metadata.storage_data.items() if key.fqn == "w")


def changed_place(name: str, value: Any) -> Callable[[Any], None]:
    def put(metadata: Any) -> None:
        setattr(first_place(metadata), name, value)

    return put


def two_chunks(offset: int) -> Callable[[Any], None]:
    """The same half twice, or a part beyond the end: as many elements as the tensor has."""

    def put(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["w"]
        half = type(tensor.chunks[0])(torch.Size([offset, 0]), torch.Size([10, 30]))
        tensor.chunks = [half, half]

    return put


ODD: dict[str, Callable[[Any], object]] = {
    "a path upwards": changed_place("relative_path", "../outside"),
    "an absolute path": changed_place("relative_path", "/etc/passwd"),
    "a path that is a number": changed_place("relative_path", 3),
    "a file that is not there": changed_place("relative_path", "missing"),
    "an offset beyond the end": changed_place("offset", 2**40),
    "a negative offset": changed_place("offset", -4),
    "a length beyond the end": changed_place("length", 2**40),
    "a length of True": changed_place("length", True),
    "less than the tensor": changed_place("length", 100),
    "a transformation": changed_place("transform_descriptors", ["stream.zstd"]),
    "a chunk twice": two_chunks(0),
    "a chunk outside": two_chunks(15),
    "no chunk": lambda m: m.state_dict_metadata["w"].chunks.clear(),
    "a huge shape": lambda m: setattr(
        m.state_dict_metadata["w"], "size", torch.Size([2**40, 2**40])
    ),
    "a shape that is a list": lambda m: setattr(
        m.state_dict_metadata["w"], "size", [20, 30]
    ),
    "an unknown dtype": lambda m: setattr(
        m.state_dict_metadata["w"].properties, "dtype", torch.complex64
    ),
    "not metadata": lambda _: {"w": 1},
    "no places": lambda m: setattr(m, "storage_data", None),
    "a place less": lambda m: m.storage_data.pop(next(iter(m.storage_data))) and None,
}


@pytest.mark.parametrize("what", ODD)
def test_odd_metadata_is_refused(sound: Path, what: str) -> None:
    (sound.parent / "outside").write_bytes(b"x" * 10_000)
    change(sound, ODD[what])
    with pytest.raises(StoreError, match="cannot be read as a torch") as found:
        Folder(sound)
    assert len(str(found.value)) < 2000


def test_a_file_that_is_missing_or_cut_is_named(sound: Path) -> None:
    (file, *_) = sorted(sound.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(StoreError, match=f"{file.name} is cut short, or"):
        Folder(sound)
    file.unlink()
    with pytest.raises(StoreError, match=f"{file.name} is missing; bring"):
        Folder(sound)


def test_links_are_not_followed(sound: Path) -> None:
    [data] = sound.glob("*.distcp")
    data.rename(sound.parent / "elsewhere")
    data.symlink_to(sound.parent / "elsewhere")
    with pytest.raises(StoreError, match="not a regular file"):
        Folder(sound)
    link = sound.parent / "link"
    link.symlink_to(sound)
    with pytest.raises(ArgumentError, match="is not a folder"):
        Folder(link)
    (sound / ".metadata").rename(sound.parent / "m")
    (sound / ".metadata").symlink_to(sound.parent / "m")
    with pytest.raises(StoreError):
        Folder(sound)


def test_a_chunk_that_unpacks_to_more_is_refused(sound: Path) -> None:
    [data] = sound.glob("*.distcp")
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    size = data.stat().st_size

    def put(metadata: Any) -> None:
        first_place(metadata).offset = 0
        first_place(metadata).length = size
        metadata.storage_data = {
            key: each for key, each in metadata.storage_data.items() if key.fqn == "w"
        }
        metadata.state_dict_metadata = {"w": metadata.state_dict_metadata["w"]}

    change(sound, put)
    with pytest.raises(StoreError, match="compressed archive"):
        Folder(sound).read_into("w", torch.empty(20, 30))


def outcome_of(folder: Path) -> tuple[str, str]:
    try:
        found = Folder(folder)
        right = 0
        for key, (shape, dtype) in found.tensors.items():
            into = torch.zeros(shape, dtype=dtype)
            found.read_into(key, into)
            right += key in CONTENTS
        for key in found.objects:
            found.read_object(key)
    except MegatrainError as error:
        return "refused", str(error)
    except Exception as error:  # whatever else it is, it is a fault
        return type(error).__name__, repr(error)
    return "read", f"{right} tensors"


@pytest.mark.filterwarnings("ignore")  # damaged chunks make torch warn of many things
def test_random_damage(
    tmp_path: Path, sound: Path, pytestconfig: pytest.Config
) -> None:
    outcomes = {"refused": 0, "read": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = sorted(x.name for x in sound.iterdir())
    for case in range(pytestconfig.getoption("--cases")):
        dice = random.Random(case)
        folder = tmp_path / "now"
        shutil.copytree(sound, folder)
        path = folder / dice.choice(names)
        path.write_bytes(dice.choice((flip, cut, insert))(path.read_bytes(), dice))
        outcome, text = outcome_of(folder)
        assert outcome in outcomes, (case, outcome, text)
        assert 0 < len(text) < 3000, (case, text)
        outcomes[outcome] += 1
        assert {x.name for x in tmp_path.iterdir()} == {"sound", "now"}, case
        shutil.rmtree(folder)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200_000  # kB
    assert min(outcomes.values()) > 0, outcomes
