"""Checkpoints that go straight into the store are what transformers loads, in every form they come in."""

from __future__ import annotations

import copy
import json
import mmap
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

import megatrain_nb as mt
from megatrain_nb.runtime import fill, leaves, mapped, progress, shards
from megatrain_nb.runtime.current import current_session
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.piece import What
from megatrain_nb.store import infile
from tests.runtime.common import TinyLM, differing, seeded, snapshot
from tests.runtime.models import (
    EVERY,
    TIED,
    auto_class,
    make_batch,
    make_config,
    make_model,
    make_window,
)
from tests.runtime.plain import (
    LR,
    assert_equal,
    assert_same,
    buffers,
    loop_trace,
    loss_of,
    opened,
    parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCES = pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of a tiny model comes in several chunks."""
    monkeypatch.setattr(fill, "_CHUNK_BYTES", 200)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def plain_loaded(name: str, folder: Path, dtype: Any = torch.float32) -> Any:
    return auto_class(name).from_pretrained(folder, dtype=dtype)


def check(model: Any, plain: Any, name: str) -> None:
    """The same weights, buffers, ties, settings and logits."""
    assert type(model) is type(plain)
    assert model.training == plain.training
    assert_same(parameters(model), parameters(plain), "loaded weight")
    assert_same(buffers(model), buffers(plain), "buffer")
    assert model.config.to_dict() == plain.config.to_dict()
    if plain.can_generate():
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    batch = make_batch(name, 0)
    plain = copy.deepcopy(plain)  # in memory of its own, not the mapped file
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)


@EVERY
@TIED
@pytest.mark.parametrize("form", ["one", "shards"])
def test_a_checkpoint_is_what_transformers_loads(
    name: str, tied: bool, form: str, tmp_path: Path
) -> None:
    size = {"one": "1GB", "shards": "9KB"}[form]
    make_model(name, tied=tied).save_pretrained(tmp_path / "saved", max_shard_size=size)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (
        form == "shards"
    )
    plain = plain_loaded(name, tmp_path / "saved")
    with opened(tmp_path / "store", "disk"):
        model = mt.from_pretrained(auto_class(name), tmp_path / "saved")
        check(model, plain, name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@SOURCES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_dtypes(name: str, source: str, dtype: str, kind: str, tmp_path: Path) -> None:
    made = make_model(name, tied=True).to(getattr(torch, source))
    folder = tmp_path / "saved"
    made.save_pretrained(folder)
    if kind == "bin":
        as_bin(folder)
    plain = plain_loaded(name, folder, getattr(torch, dtype))
    exact = parameters(plain_loaded(name, folder, torch.float32))
    with opened(tmp_path / "store", "disk"):
        model: Any = mt.from_pretrained(auto_class(name), folder, dtype=dtype)
        offloaded = offloaded_model(model)
        assert offloaded is not None
        for pack in offloaded.layers.spec.packs:
            if pack.split:  # what was bf16 has no lower half, and takes no bytes for it
                assert offloaded.pager.is_blank(pack.index, What.LOW) == (
                    source == "bfloat16"
                )
        check_values(model, plain, exact, dtype)
        assert model.config.dtype == getattr(torch, dtype)


def check_values(model: Any, plain: Any, exact: Any, dtype: str) -> None:
    ours = parameters(model)
    if dtype == "float32":
        assert_same(ours, exact, "loaded weight")
        return
    # A tie is rounded away from zero, see codec/split.py; and the master is the checkpoint's number.
    for key, value in parameters(plain).items():
        assert ours[key].dtype == value.dtype == torch.bfloat16
        assert ((ours[key].float() - exact[key]).abs()
                <= (value.float() - exact[key]).abs()).all()  # fmt: skip
    offloaded = offloaded_model(model)
    assert offloaded is not None
    for param, home in offloaded.layers.homes.items():
        with offloaded.source(param).master().opened(write=False) as values:
            assert torch.equal(values.float(), exact[home.spec.name])


def as_bin(folder: Path, *, old: bool = False) -> None:
    """Turn a saved folder into one of the old kind, in which tied weights come twice."""
    state = load_file(folder / "model.safetensors")
    if "model.embed_tokens.weight" in state:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)  # fmt: skip
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("sharded", [False, True])
@TIED
def test_bin(old: bool, sharded: bool, tied: bool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    make_model("llama", tied=tied).save_pretrained(folder)
    as_bin(folder, old=old)
    if sharded:
        path = folder / "pytorch_model.bin"
        state = torch.load(path, weights_only=True)
        names = sorted(state)
        weight_map: dict[str, str] = {}
        for index, part in enumerate((names[:5], names[5:])):
            file = f"pytorch_model-{index}.bin"
            torch.save({key: state[key] for key in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(index_text)
        path.unlink()
    plain = plain_loaded("llama", folder)
    with opened(tmp_path / "store", "disk"):
        model: Any = mt.from_pretrained(auto_class("llama"), folder)
        check(model, plain, "llama")
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_tensor_that_is_a_view_in_its_bin(saved: Path, tmp_path: Path) -> None:
    """torch.save keeps strides and shared storages."""
    state = load_file(saved / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    state[key] = state[key].T.contiguous().T
    both = torch.cat([state["lm_head.weight"], state["model.embed_tokens.weight"]])
    state["lm_head.weight"], state["model.embed_tokens.weight"] = both.chunk(2)
    torch.save(state, saved / "pytorch_model.bin")
    expected = parameters(plain_loaded("llama", saved))
    (saved / "model.safetensors").unlink()
    with opened(tmp_path / "store", "disk"):
        model = mt.from_pretrained(auto_class("llama"), saved)
        assert_same(parameters(model), expected, "loaded weight")


def test_it_trains_and_saves_as_the_plain_one(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path / "saved")
    plain = copy.deepcopy(plain_loaded("mixtral", tmp_path / "saved")).train()
    windows = [make_window("mixtral", step, 1) for step in range(2)]
    with opened(tmp_path / "store", "disk"):
        model = mt.from_pretrained(auto_class("mixtral"), tmp_path / "saved")
        session = current_session()
        assert session is not None
        assert not any("saved" in note for note in session.notes)
        model, optimizer = mt.wrap(model.train(), lr=LR, weight_decay=0.1)
        plain_optimizer = torch.optim.AdamW(
            plain.parameters(), lr=LR, weight_decay=0.1, fused=True
        )
        ours = loop_trace(model, optimizer, windows, loss_of("mixtral"))
        theirs = loop_trace(plain, plain_optimizer, windows, loss_of("mixtral"))
        assert_equal(ours, theirs)
        mt.save_pretrained(model, tmp_path / "ours")
        plain.save_pretrained(tmp_path / "plain")
    assert_same(
        load_file(tmp_path / "ours" / "model.safetensors"),
        load_file(tmp_path / "plain" / "model.safetensors"),
        "saved weight",
    )


# -- as written with transformers alone -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_from_pretrained_and_wrap(
    saved: Path, dtype: str, tmp_path: Path
) -> None:
    plain = plain_loaded("llama", saved, dtype)
    with opened(tmp_path / "store", "disk"):
        model = plain_loaded("llama", saved, dtype)
        regions = mapped.Mapped()
        assert all(regions.holds(param) for param in model.parameters()) == (
            dtype == "float32"
        )
        model, _ = mt.wrap(model)
        assert_same(parameters(model), parameters(plain), "weight")


def test_what_was_changed_in_a_mapped_file_counts(saved: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "store", "disk"):
        model = plain_loaded("llama", saved)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        mapped.Mapped().let_go(model.lm_head.weight.data)
        expected = parameters(model)
        model, _ = mt.wrap(model)
        assert_same(parameters(model), expected, "weight")


@pytest.mark.parametrize("how", ["as it is", "looked at", "one value", "replaced", "gone"])  # fmt: skip
def test_a_mapped_file_is_read_where_nobody_has_changed_it(
    how: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = leaves.FilePart.read_into

    def read_into(self: Any, values: torch.Tensor, start: int) -> None:
        read.append(self.name)
        original(self, values, start)

    monkeypatch.setattr(leaves.FilePart, "read_into", read_into)
    with opened(tmp_path / "store", "disk"):
        model = plain_loaded("llama", saved)
        names = [name for name, _ in model.named_parameters()]
        pages = {param.data_ptr() // mmap.PAGESIZE for param in model.parameters()}
        assert len(pages) > 5, "one page would hold all"
        changed = model.model.layers[1].mlp.up_proj.weight
        if how == "looked at":
            assert all(bool(param.detach().any()) for param in model.parameters())
        if how == "one value":
            with torch.no_grad():
                changed[-1, -1] += 1
        expected = parameters(model) if how != "as it is" else None
        if how == "replaced":
            other = tmp_path / "other"
            shutil.copy(saved / "model.safetensors", other)
            with other.open("r+b") as file:
                file.seek(-1000, 2)
                file.write(bytes(1000))
            other.replace(saved / "model.safetensors")
        if how == "gone":
            (saved / "model.safetensors").unlink()
        model, _ = mt.wrap(model)
        if expected is None:
            expected = parameters(plain_loaded("llama", saved))
        assert_same(parameters(model), expected, "weight")
    if how in ("as it is", "looked at"):
        assert set(read) == set(names)
    elif how == "one value":
        assert set(read) < set(names)
        assert read
        assert "model.layers.1.mlp.up_proj.weight" not in read
    else:
        assert read == []


# -- models on the meta device, and accelerate's ---------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
@TIED
def test_a_model_on_the_meta_device(name: str, tied: bool, tmp_path: Path) -> None:
    config = make_config(name, tied=tied)
    make_model(name, tied=tied).save_pretrained(tmp_path / "saved")
    plain = plain_loaded(name, tmp_path / "saved")
    with torch.device("meta"):
        model: Any = auto_class(name).from_config(config)
    with opened(tmp_path / "store", "disk"):
        with pytest.raises(mt.ModelError, match=r"mt\.from_pretrained\(model, path\)"):
            mt.wrap(model)
        assert mt.from_pretrained(model, tmp_path / "saved") is model
        assert_same(parameters(model), parameters(plain), "weight")
        assert_same(buffers(model), buffers(plain), "buffer")


@TIED
def test_a_plain_module_on_the_meta_device(tied: bool, tmp_path: Path) -> None:
    source = seeded(lambda: TinyLM(tied=tied))
    source.register_buffer("scale", torch.arange(3.0))
    state = source.state_dict()
    if tied:
        del state["embed.weight"]
    tmp_path.joinpath("saved").mkdir()
    save_file(
        state | {"other": torch.ones(2)}, tmp_path / "saved" / "model.safetensors"
    )
    with torch.device("meta"):
        model = TinyLM(tied=tied)
        model.register_buffer("scale", torch.empty(3))
    with opened(tmp_path / "store", "disk") as session:
        mt.from_pretrained(model, tmp_path / "saved")
        assert differing(snapshot(source), snapshot(model)) == []
        assert torch.equal(model.get_buffer("scale"), torch.arange(3.0))
        assert (model.head.weight is model.embed.weight) == tied
        assert any("other are in the checkpoint" in note for note in session.notes)
        with torch.device("meta"):
            larger = TinyLM(num_layers=4)
        with pytest.raises(mt.ModelError, match=r"has no .*layers\.3"):
            mt.from_pretrained(larger, tmp_path / "saved")


@pytest.mark.parametrize("how", ["from_pretrained", "dispatched", "cpu"])
@TIED
def test_a_model_that_accelerate_keeps_elsewhere(
    how: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import cpu_offload, disk_offload  # noqa: PLC0415

    folder = tmp_path / "saved"
    make_model("llama", tied=tied).save_pretrained(folder)
    plain = plain_loaded("llama", folder)
    if how == "from_pretrained":
        model: Any = auto_class("llama").from_pretrained(
            folder,
            dtype=torch.float32,
            device_map={
                "model.embed_tokens": "cpu",
                "model.layers": "disk",
                "model.norm": "cpu",
                "model.rotary_emb": "cpu",
                "lm_head": "cpu",
            },
            offload_folder=tmp_path / "offload",
        )
    else:
        model = copy.deepcopy(plain)
        if how == "dispatched":
            disk_offload(model, tmp_path / "offload", execution_device="cpu")
        else:
            cpu_offload(model, execution_device="cpu")
    assert any(param.is_meta for param in model.parameters())
    with opened(tmp_path / "store", "disk"):
        before = set(Path("/proc/self/fd").iterdir())
        few = len(before) + 16  # fewer than there are files of accelerate's
        assert how != "dispatched" or len(list((tmp_path / "offload").glob("*.dat"))) > 16  # fmt: skip
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        try:
            model, optimizer = mt.wrap(model)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert set(Path("/proc/self/fd").iterdir()) <= before, "files stay open"
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
        check(model, plain, "llama")
        mt.train_step(model.train(), optimizer, [make_batch("llama", 0)])


# -- what does not match ------------------------------------------------------------------------------------


def changed(folder: Path, **changes: torch.Tensor | None) -> None:
    state = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        state.pop(key, None)
        if value is not None:
            state[key] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_unexpected_weights(saved: Path, tmp_path: Path) -> None:
    changed(saved, **{"lm_head.weight": None, "model.layers.0.what": torch.ones(2)})
    torch.manual_seed(5)
    plain = plain_loaded("llama", saved)
    with opened(tmp_path / "store", "disk") as session:
        torch.manual_seed(5)
        model = mt.from_pretrained(auto_class("llama"), saved)
        assert_same(parameters(model), parameters(plain), "weight")
        assert any("lm_head.weight are not in" in note for note in session.notes)
        assert any("model.layers.0.what are in" in note for note in session.notes)


def test_another_shape(saved: Path, tmp_path: Path) -> None:
    changed(saved, **{"lm_head.weight": torch.ones(62, 16)})
    with opened(tmp_path / "store", "disk") as session:
        with pytest.raises(mt.ModelError, match=r"does not fit LlamaForCausalLM"):
            mt.from_pretrained(auto_class("llama"), saved)
        assert list(session.models) == []
        assert session.store.used_bytes == 0
        mt.from_pretrained(auto_class("llama"), saved, ignore_mismatched_sizes=True)
        assert any("lm_head.weight have another shape" in x for x in session.notes)


def test_a_name_on_the_hub_that_is_in_the_cache(saved: Path, tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--some--model"
    blobs, snapshot_dir = repo / "blobs", repo / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot_dir.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    for path in saved.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot_dir / path.name).symlink_to(Path("../../blobs") / path.name)
    plain = plain_loaded("llama", saved)
    with opened(tmp_path / "store", "disk"):
        model: Any = mt.from_pretrained(
            auto_class("llama"), "some/model", cache_dir=tmp_path / "cache", local_files_only=True
        )  # fmt: skip
        assert_same(parameters(model), parameters(plain), "weight")
        assert model.config.name_or_path == "some/model"
        with pytest.raises(mt.ArgumentError, match="some/other"):
            mt.from_pretrained(
                auto_class("llama"), "some/other", cache_dir=tmp_path / "cache", local_files_only=True
            )  # fmt: skip


def test_refusals(saved: Path, tmp_path: Path) -> None:
    causal = transformers.AutoModelForCausalLM
    with pytest.raises(mt.SessionError, match=r"mt\.init"):
        mt.from_pretrained(causal, saved)
    with opened(tmp_path / "store", "disk"):
        for arguments, match in (
            ({"dtype": torch.float16}, "dtype"),
            ({"device_map": "auto"}, "device_map"),
            ({"state_dict": {}}, "state_dict"),
        ):
            with pytest.raises(mt.ArgumentError, match=match):
                mt.from_pretrained(causal, saved, **arguments)
        with pytest.raises(mt.ArgumentError, match="is a file"):
            mt.from_pretrained(causal, saved / "config.json")
        (tmp_path / "empty").mkdir()
        with pytest.raises(mt.ArgumentError, match=r"holds none of model\.safetensors"):
            mt.from_pretrained(causal, tmp_path / "empty")
        with pytest.raises(mt.ArgumentError, match="auto_class"):
            mt.from_pretrained(object(), saved)
        config = json.loads((saved / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (saved / "config.json").write_text(json.dumps(config))
        with pytest.raises(mt.ModelError, match="quantised"):
            mt.from_pretrained(causal, saved)


# -- damage -----------------------------------------------------------------------------------------------


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def written(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_entry(**changes: Any) -> Callable[[Any, str, bytes], bytes]:
    return lambda header, name, body: written(
        header | {name: header[name] | changes}, body
    )


# Each makes a file of a good one's header, the name of a tensor in it, and its body.
DAMAGES: dict[str, Callable[[Any, str, bytes], bytes]] = {
    "truncated": lambda header, _, body: written(header, body[:-1]),
    "longer": lambda header, _, body: written(header, body + b"x"),
    "empty": lambda *_: b"",
    "absurd length": lambda *_: (1 << 60).to_bytes(8, "little") + b"{}",
    "absurd shape": with_entry(shape=[1 << 40, 1 << 40]),
    "negative": with_entry(data_offsets=[-4, 0]),
    "no number": with_entry(shape=["3", True]),
    "overlap": lambda header, name, body: written(header | {"x": header[name]}, body),
    "dtype": with_entry(dtype="F3"),
    "deep": lambda _header, _, body: written(b"[" * 100_000, body),
    "no json": lambda _header, _, body: written(b"\xff\xfe", body),
    "twice": lambda header, name, body: written(
        (json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode(), body
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file(kind: str, saved: Path, tmp_path: Path) -> None:
    path = saved / "model.safetensors"
    header, body = header_of(path)
    name = next(key for key in header if key != "__metadata__")
    path.write_bytes(DAMAGES[kind](header, name, body))
    with opened(tmp_path / "store", "disk") as session:
        with pytest.raises(mt.StoreError, match=r"model\.safetensors"):
            mt.from_pretrained(auto_class("llama"), saved)
        assert list(session.models) == []
        assert session.store.used_bytes == 0


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "parts", max_shard_size="9KB")
    return tmp_path / "parts"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("../secret.safetensors", "no file in the same folder"),
        ("/etc/passwd", "no file in the same folder"),
        ("..", "no file in the same folder"),
        (3, "no file in the same folder"),
        ("a.py", "neither"),
        ("model-00009-of-00009.safetensors", "missing shard"),
    ],
)
def test_a_damaged_index(name: Any, match: str, sharded: Path, tmp_path: Path) -> None:
    shutil.copyfile(
        next(sharded.glob("*.safetensors")), tmp_path / "secret.safetensors"
    )
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with (
        opened(tmp_path / "store", "disk"),
        pytest.raises(mt.StoreError, match=match),
    ):
        mt.from_pretrained(auto_class("llama"), sharded)


def test_a_weight_that_its_shard_lacks(sharded: Path, tmp_path: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more"] = content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    with (
        opened(tmp_path / "store", "disk"),
        pytest.raises(mt.StoreError, match="'more' is in"),
    ):
        mt.from_pretrained(auto_class("llama"), sharded)


class Hostile:
    """What a pickle may do when it is loaded by the ordinary unpickler."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("old", [False, True])
def test_a_hostile_bin(old: bool, saved: Path, tmp_path: Path) -> None:
    as_bin(saved)
    torch.save(
        {"x": Hostile(tmp_path / "touched")},
        saved / "pytorch_model.bin",
        _use_new_zipfile_serialization=not old,
    )
    with (
        opened(tmp_path / "store", "disk"),
        pytest.raises(mt.StoreError, match="more than tensors"),
    ):
        mt.from_pretrained(auto_class("llama"), saved)
    assert not (tmp_path / "touched").exists()


def test_a_truncated_bin(saved: Path, tmp_path: Path) -> None:
    as_bin(saved)
    path = saved / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-3000])
    with (
        opened(tmp_path / "store", "disk"),
        pytest.raises(mt.StoreError, match=r"pytorch_model\.bin"),
    ):
        mt.from_pretrained(auto_class("llama"), saved)


def test_an_old_bin_that_would_not_fit(saved: Path) -> None:
    as_bin(saved, old=True)
    with pytest.raises(mt.StoreError, match=r"before torch 1\.6"):
        shards.open_checkpoint(saved, most_bytes=1000)


# -- failures on the way ------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reads fail after some; the list counts them."""
    calls = [0]
    original = infile.InFile.read_into

    def read_into(self: Any, data: memoryview, offset: int) -> None:
        if offset > 5000:
            calls[0] += 1
            if calls[0] > 20:
                msg = "reading failed: I/O error"
                raise mt.StoreError(msg)
        original(self, data, offset)

    monkeypatch.setattr(infile.InFile, "read_into", read_into)
    return calls


def test_a_disk_that_fails_on_the_way(
    saved: Path, tmp_path: Path, failing: list[int]
) -> None:
    with opened(tmp_path / "store", "disk") as session:
        with pytest.raises(mt.StoreError, match="I/O error"):
            mt.from_pretrained(auto_class("llama"), saved)
        assert list(session.models) == []
        assert session.store.used_bytes == 0
        assert session.pool.in_use_bytes == 0
        failing[0] = -10_000
        model = mt.from_pretrained(auto_class("llama"), saved)
        plain = plain_loaded("llama", saved)
        assert_same(parameters(model), parameters(plain), "weight")


def test_a_store_that_fails_gives_the_mapped_model_back(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_loaded("llama", saved)
    with opened(tmp_path / "store", "disk"):
        model = plain_loaded("llama", saved)
        original: Any = vars(fill)["stream_parameter"]
        calls: list[int] = []

        def fails(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 9:
                msg = "the disk is full"
                raise mt.StoreError(msg)
            return original(*args)

        monkeypatch.setattr(fill, "stream_parameter", fails)
        with pytest.raises(mt.StoreError, match="full"):
            mt.wrap(model)
        regions = mapped.Mapped()
        assert all(regions.holds(param) for param in model.parameters())
        assert_same(parameters(model), parameters(plain), "weight")


def test_progress(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar counts the file's bytes."""
    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
            bars.append(self)

    monkeypatch.setattr(progress, "tqdm", Bar)
    with opened(tmp_path / "store", "disk"):
        mt.from_pretrained(auto_class("llama"), saved)
    [bar] = bars
    size = sum(x.nbytes for x in load_file(saved / "model.safetensors").values())
    assert bar.n == bar.total == size
    bar.fp.close()
