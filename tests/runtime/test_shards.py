"""Weights from elsewhere with random damage: our own error, or what safetensors and torch read; nothing else happens.

``pytest tests/runtime/test_shards.py --cases 10000`` tries more.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import struct
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import megatrain_nb as mt
from megatrain_nb.errors import MegatrainError, StoreError
from megatrain_nb.runtime.lazy import node_of, value
from megatrain_nb.runtime.leaves import DTYPES
from megatrain_nb.runtime.rss import resident_bytes
from megatrain_nb.runtime.shards import open_checkpoint
from tests.runtime.models import auto_class, make_model
from tests.runtime.plain import opened, parameters
from tests.store.test_fuzz import ODD, cut, flip, insert, replace_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    State = dict[str, Tensor]

# What opening may take of RAM.
MOST_BYTES = 20 * 10**6
FORMS = ("one", "shards", "bin")
ENTRY = '"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
INDEX = "model.safetensors.index.json"


def contents() -> State:
    torch.manual_seed(0)
    found = {
        "embed": torch.randn(7, 6),
        "up": torch.randn(6, 7),
        "half": torch.randn(12).bfloat16(),
        "fp16": torch.randn(3, 4).half(),
        "double": torch.randn(2, 3).double(),
        "count": torch.tensor(5),
        "mask": torch.tensor([[True], [False]]),
        "none": torch.empty(0, 9),
        "ids": torch.arange(8, dtype=torch.int32).view(2, 2, 2),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "bytes": torch.arange(11, dtype=torch.uint8),
    }
    return {f"layer.{key}": x for key, x in found.items()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in each form."""
    directory = tmp_path_factory.mktemp("sound")
    state = contents()
    names = sorted(state)
    for form in FORMS:
        (directory / form).mkdir()
    safetensors.torch.save_file(state, directory / "one" / "model.safetensors", {"format": "pt"})  # fmt: skip
    weight_map: dict[str, str] = {}
    for index in range(3):
        file = f"model-{index + 1:05d}-of-00003.safetensors"
        part = {key: state[key] for key in names[index::3]}
        safetensors.torch.save_file(part, directory / "shards" / file)
        weight_map |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (directory / "shards" / INDEX).write_text(text)
    torch.save(state, directory / "bin" / "pytorch_model.bin")
    return directory


def read(folder: Path) -> State:
    """All that there is, read by this package."""
    found = open_checkpoint(folder, most_bytes=MOST_BYTES)
    return {key: value(node_of(tensor)) for key, tensor in found.items()}  # type: ignore[arg-type]


def reference(folder: Path) -> State:
    """The same by the libraries that made it."""
    if (folder / "pytorch_model.bin").exists():
        state: State = torch.load(folder / "pytorch_model.bin", weights_only=True)
        return state
    if (folder / "model.safetensors").exists():
        return safetensors.torch.load((folder / "model.safetensors").read_bytes())
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    found: State = {}
    for name in dict.fromkeys(weight_map.values()):
        shard = safetensors.torch.load((folder / name).read_bytes())
        found |= {k: x for k, x in shard.items() if weight_map.get(k, name) == name}
    return found


def same(one: State, other: State) -> bool:
    def bits(tensor: Tensor) -> Any:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        if tensor.dtype == torch.bool:  # each byte but zero is true
            data = data != 0
        return tuple(tensor.shape), tensor.dtype, data.tolist()

    return one.keys() == other.keys() and all(
        bits(tensor) == bits(other[key]) for key, tensor in one.items()
    )


# -- damage -----------------------------------------------------------------------------------------------


def parsed(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def written(path: Path, header: Any, body: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def change_entry(header: Any, dice: random.Random) -> None:
    """Damage that looks right: numbers that are near, types that exist, places of others."""
    names = [key for key in header if key != "__metadata__"]
    entry, other = header[dice.choice(names)], header[dice.choice(names)]
    offsets, shape = entry["data_offsets"], entry["shape"]
    step = dice.choice((-8, -4, -1, 1, 2, 4, 8, 2**31, 2**62))
    match dice.randrange(9):
        case 0:
            entry["data_offsets"] = list(other["data_offsets"])
        case 1:
            entry["data_offsets"], other["data_offsets"] = other["data_offsets"], offsets  # fmt: skip
        case 2:
            offsets[dice.randrange(2)] += step
        case 3:
            entry["data_offsets"] = [x + step for x in offsets]
        case 4:
            entry["dtype"] = dice.choice([*DTYPES, "F8_E8M0", "C64", "f32", "F4"])
        case 5:
            entry["dtype"], other["dtype"] = other["dtype"], entry["dtype"]
        case 6:
            dice.shuffle(shape)
            shape.insert(0, dice.choice((0, 1, 2, 2**40, 2**63 - 1, 2**63, -1)))
        case 7:
            entry["shape"] = [dice.choice((0, 1, 2**32, 2**62))] * dice.choice((1, 3, 64, 70))  # fmt: skip
        case 8:
            entry["shape"] = [0, *shape, 2**62, 2**62]


def change_header(path: Path, dice: random.Random) -> None:
    header, body = parsed(path)
    for _ in range(dice.choice((1, 1, 2, 4))):
        if dice.random() < 0.7:
            change_entry(header, dice)
        else:
            header = replace_value(header, dice)
            break
    written(path, header, body)


def bomb(dice: random.Random) -> bytes:
    """Text that is long, deep, or of very many values."""
    count = dice.choice((10, 2_000, 60_000))
    makes: list[Callable[[], str]] = [
        lambda: "[" * count,
        lambda: '{"a":' * count,
        lambda: '{"a":[' + "[]," * count + "0]}",
        lambda: "{" + ",".join(f'"{i}":{{}}' for i in range(count)) + "}",
        lambda: "{" + ",".join(ENTRY.format(i) for i in range(count)) + "}",
        lambda: '{"%s":{}}' % ("a" * count),
        lambda: '{"a":{"dtype":"%s","shape":[],"data_offsets":[0,0]}}' % ("F" * count),
        lambda: '{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}}' % ("9" * count),
        lambda: '{"a":{"dtype":"U8","shape":[%s0],"data_offsets":[0,0]}}' % ("0," * count),
        lambda: '{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        lambda: " " * count + "{}",
        lambda: '{"__metadata__":{"a":"%s"}}' % ("b" * count),
    ]  # fmt: skip
    text = dice.choice(makes)()
    return text.encode(dice.choice(("utf-8",) * 8 + ("utf-16", "utf-8-sig")))


def change_start(path: Path, dice: random.Random) -> None:
    """Damage to the bytes of a header and its length; there is no checksum for those that follow."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    start = dice.choice((flip, cut, insert))(data[:end], dice)
    path.write_bytes(start + data[end:])


def change_length(path: Path, dice: random.Random) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    new = dice.choice((0, 1, length + dice.randrange(-9, 9), len(data) - 8, len(data), 2**31, 2**63, 2**64 - 1, dice.randrange(2**64)))  # fmt: skip
    path.write_bytes(struct.pack("<Q", new) + data[8:])


def change_index(path: Path, dice: random.Random) -> None:
    content = json.loads(path.read_text())
    weight_map = content["weight_map"]
    keys = sorted(weight_map)
    names = [
        "../outside.safetensors", str(path.parent.parent / "outside.safetensors"), "sub/x.safetensors", "..", ".", "",
        "x" * 250 + ".safetensors", "x" * 5000 + ".safetensors", "\u00e9" * 200 + ".safetensors", "\x00.safetensors", "\ud800.safetensors",
        INDEX, "missing.safetensors", "pipe.safetensors", "folder.safetensors", "..\\outside.safetensors",
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.bin",
    ]  # fmt: skip
    os.mkfifo(path.parent / "pipe.safetensors")
    (path.parent / "folder.safetensors").mkdir()
    if dice.random() < 0.3:
        content = replace_value(content, dice)
    for _ in range(dice.choice((0, 1, 2))):
        weight_map[dice.choice(keys)] = dice.choice((*names, *ODD))
    if dice.random() < 0.2:
        weight_map[dice.choice(("more", "x" * 5000))] = weight_map[dice.choice(keys)]
    if dice.random() < 0.2:
        del weight_map[dice.choice(keys)]
    path.write_text(json.dumps(content))


def change_file(path: Path, dice: random.Random) -> None:
    others = sorted(path.parent.iterdir())

    def in_its_place(make: Callable[[], None]) -> None:
        path.unlink()
        make()

    makes: list[Callable[[], object]] = [
        path.unlink,
        lambda: path.write_bytes(dice.choice(others).read_bytes()),
        lambda: path.write_bytes(cut(path.read_bytes(), dice)),
        lambda: path.write_bytes(path.read_bytes() + dice.randbytes(dice.choice((1, 9)))),
        lambda: in_its_place(lambda: os.mkfifo(path)),
        lambda: in_its_place(path.mkdir),
        lambda: in_its_place(lambda: path.symlink_to(path.name)),
    ]  # fmt: skip
    dice.choice(makes)()


def damage(folder: Path, dice: random.Random) -> None:
    path = dice.choice(sorted(folder.iterdir()))
    if dice.random() < 0.1:
        change_file(path, dice)
    elif path.name == INDEX:
        change_index(path, dice)
    elif path.suffix == ".bin":
        data = path.read_bytes()
        path.write_bytes(dice.choice((flip, cut, insert))(data, dice))
    else:
        kinds: list[Callable[[], object]] = [
            lambda: change_header(path, dice),
            lambda: change_start(path, dice),
            lambda: change_length(path, dice),
            lambda: written(path, bomb(dice), parsed(path)[1]),
        ]
        dice.choices(kinds, weights=(8, 4, 1, 2))[0]()


# -- the tests --------------------------------------------------------------------------------------------


@contextmanager
def only_in(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other file is opened by this package meanwhile."""
    original = os.open

    def opens(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        assert Path(path).parent == folder, path
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return original(path, flags, *args, **kwargs)

    with patch.context() as inside:
        inside.setattr(os, "open", opens)
        yield


@pytest.mark.parametrize("form", FORMS)
def test_sound_is_read(sound: Path, form: str) -> None:
    assert same(read(sound / form), contents())
    assert same(reference(sound / form), contents())


@pytest.mark.parametrize("form", FORMS)
def test_random_damage(
    form: str,
    tmp_path: Path,
    sound: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = contents()
    outside = tmp_path / "outside.safetensors"
    safetensors.torch.save_file({key: torch.zeros_like(x) for key, x in state.items()}, outside)  # fmt: skip
    folder = tmp_path / "model"
    outcomes = {"refused": 0, "read": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(pytestconfig.getoption("--cases")):
        dice = random.Random(case)
        shutil.copytree(sound / form, folder)
        damage(folder, dice)
        with only_in(folder, monkeypatch):
            found, text = attempt(lambda: read(folder))
        if found is None:
            assert 0 < len(text) < 3000, (case, text[:500])
            text.encode()  # a notebook has to show it
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            check(found, folder, case)
        shutil.rmtree(folder)
        assert {x.name for x in tmp_path.iterdir()} == {outside.name}, case
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200_000  # kB
    assert min(outcomes.values()) > sum(outcomes.values()) // 50, outcomes


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives, or None and what our error says; another error is a fault."""
    try:
        return make(), ""
    except MegatrainError as error:
        return None, str(error)


def check(found: State, folder: Path, case: int) -> None:
    """What was read is what the library reads, which reads it."""
    assert same(found, reference(folder)), case


def test_random_damage_on_the_way_into_a_model(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Whatever transformers makes of a header that is right and a model that it does not fit."""
    for form, size in (("one", "1GB"), ("shards", "9KB")):
        make_model("llama").save_pretrained(tmp_path / form, max_shard_size=size)
    outcomes = {"refused": 0, "read": 0}
    folder = tmp_path / "model"
    for case in range(pytestconfig.getoption("--cases") // 15):
        dice = random.Random(case)
        shutil.copytree(tmp_path / dice.choice(("one", "shards")), folder)
        weights = [x for x in folder.iterdir() if ".safetensors" in x.name]
        damage_weights(dice.choice(sorted(weights)), dice)
        with opened(tmp_path / "store", "disk") as session:
            torch.manual_seed(case)
            model, text = attempt(
                lambda: mt.from_pretrained(auto_class("llama"), folder)
            )
            if model is None:
                assert 0 < len(text) < 6000, (case, text[:500])
                assert list(session.models) == []
                assert session.store.used_bytes == 0
                assert session.pool.in_use_bytes == 0
                outcomes["refused"] += 1
            else:
                torch.manual_seed(case)
                plain = auto_class("llama").from_pretrained(folder, dtype=torch.float32)
                assert same(parameters(model), parameters(plain)), case
                outcomes["read"] += 1
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "store")
    assert min(outcomes.values()) > 0, outcomes


def damage_weights(path: Path, dice: random.Random) -> None:
    """Headers that are right, of other shapes, types, names and orders; and some that are not."""
    if path.name == INDEX:
        change_index(path, dice)
        return
    header, body = parsed(path)
    names = sorted(key for key in header if key != "__metadata__")
    one, other = dice.choice(names), dice.choice(names)
    match dice.randrange(6):
        case 0:
            header[one], header[other] = header[other], header[one]
        case 1:
            header[one + dice.choice(("", ".x", "\u00e9", "s"))] = header.pop(one)
        case 2:
            header[one]["shape"].append(1)
        case 3:
            header[one]["shape"].reverse()
        case 4:
            numel = (
                header[one]["data_offsets"][1] - header[one]["data_offsets"][0]
            ) // 2
            header[one] |= {"dtype": dice.choice(("F16", "BF16", "I16")), "shape": [numel]}  # fmt: skip
        case _:
            header = copy.deepcopy(header)
            change_entry(header, dice)
    written(path, header, body)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["sparse", "quantised", "complex", "negated", "meta"])
def test_a_tensor_that_is_not_its_bytes(kind: str, old: bool, tmp_path: Path) -> None:
    """Silently it would be other numbers."""
    x = torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of them old
        makes: dict[str, Callable[[], Tensor]] = {
            "sparse": x.to_sparse,
            "quantised": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            "complex": lambda: x.to(torch.complex64),
            "negated": lambda: torch._neg_view(x),
            "meta": lambda: x.to("meta"),
        }
        torch.save({"x": makes[kind]()}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)  # fmt: skip
        with pytest.raises(StoreError, match=r"cannot be read here|more than tensors"):
            open_checkpoint(tmp_path, most_bytes=MOST_BYTES)


# Headers whose every byte makes as much as it can, and one of a great many tensors, all right.
LARGE: dict[str, Callable[[], str]] = {
    "values": lambda: '{"__metadata__":{"a":[' + "[]," * 8_000_000 + "0]}}",
    "tables": lambda: "{" + '"":{},' * 4_000_000 + '"a":{}}',
    "tensors": lambda: "{" + ",".join(ENTRY.format(i) for i in range(400_000)) + "}",
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_header_is_refused_before_it_is_parsed(
    kind: str, tmp_path: Path
) -> None:
    written(tmp_path / "model.safetensors", LARGE[kind]().encode(), b"")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match=r"may take .* of RAM"):
        open_checkpoint(tmp_path, most_bytes=200 * 10**6)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 150_000  # kB: its text, twice


def test_many_tensors_take_what_was_reckoned(tmp_path: Path) -> None:
    """Also in many files: what those before take counts."""
    weight_map: dict[str, str] = {}
    for file in range(20):
        keys = [f"{file}.{i}" for i in range(1000)]
        name = f"model-{file}.safetensors"
        written(tmp_path / name, f"{{{','.join(ENTRY.format(k) for k in keys)}}}".encode(), b"")  # fmt: skip
        weight_map |= dict.fromkeys(keys, name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    before = resident_bytes()
    found = open_checkpoint(tmp_path, most_bytes=70 * 10**6)
    assert len(found) == 20_000
    assert resident_bytes() - before < 70 * 10**6
    with pytest.raises(StoreError, match=r"model-1\d\.safetensors: .* of RAM"):
        open_checkpoint(tmp_path, most_bytes=50 * 10**6)
