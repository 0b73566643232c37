"""Over to torch.distributed.checkpoint and back: the run goes on there, and here, as if it had not moved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import megatrain_nb as mt
from megatrain_nb.runtime import dcp as writing
from megatrain_nb.runtime.dcpread import Folder
from tests.runtime.common import (
    TinyLM,
    batch,
    differing,
    loss_of,
    micro_batches,
    seeded,
    snapshot,
    window_step,
    wrapped,
)
from tests.runtime.test_checkpoint import opened
from tests.runtime.test_codecs import WideLM

if TYPE_CHECKING:
    from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

dcp: Any = checkpoint
PLACES = {"ram": None, "disk": 0, "mixed": 80_000}
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are in several chunks, and chunks in several files."""
    monkeypatch.setattr(writing, "CHUNK_BYTES", 1000)


def adamw(model: nn.Module, *, groups: bool = False, **settings: Any) -> Any:
    """A plain AdamW with fused kernels; in two groups, the first without weight decay."""
    params: Any = [p for p in model.parameters() if p.requires_grad]
    if groups:
        params = [
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.3},
        ]
    return torch.optim.AdamW(params, fused=True, **({"lr": 0.5} | settings))


def make_tiny(seed: int, *, tied: bool = False) -> Any:
    model = seeded(lambda: TinyLM(tied=tied), seed)
    model.layers[1].up.weight.requires_grad_(False)
    return model


def load_plain(model: Any, optimizer: Any, folder: Path) -> None:
    """As torch's own tutorial loads."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def save_plain(model: Any, optimizer: Any, folder: Path) -> None:
    state = {
        "app": {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
    }
    dcp.save(state, checkpoint_id=folder)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    keys = ("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay")
    return [{key: group[key] for key in keys} for group in optimizer.param_groups]


def step_there(model: Any, optimizer: Any, step: int, count: int = 3) -> float:
    """One step of a plain loop; the window's loss is the fp32 sum of its parts, as here."""
    losses = [
        loss_of(model, each["ids"]) / count for each in micro_batches(step, count)
    ]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(sum(x.detach() for x in losses))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_a_plain_run_goes_on_bit_for_bit(
    tmp_path: Path, place: str, tied: bool, groups: bool
) -> None:
    count = 1 if tied else 3  # a tied gradient's micro-batches add up in another order
    with opened(tmp_path / "s", place):
        made = make_tiny(0, tied=tied)
        model, optimizer = wrapped(made, adamw(made, groups=groups, **SETTINGS))
        for step in range(3):
            window_step(model, optimizer, step, count)
        folder = mt.export_distributed(tmp_path / "out")
        expected = snapshot(model, optimizer)
        settings = settings_of(optimizer)
        losses = [window_step(model, optimizer, x, count).loss for x in (3, 4)]
        end = snapshot(model, optimizer)
    plain = make_tiny(1, tied=tied)
    other = adamw(plain, groups=groups)
    load_plain(plain, other, folder)
    assert differing(snapshot(plain, other), expected) == []
    assert settings_of(other) == settings
    assert [step_there(plain, other, x, count) for x in (3, 4)] == losses
    assert differing(snapshot(plain, other), end) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_a_plain_run_comes_here_bit_for_bit(
    tmp_path: Path, place: str, tied: bool, groups: bool
) -> None:
    count = 1 if tied else 3
    plain = make_tiny(0, tied=tied)
    other = adamw(plain, groups=groups, **SETTINGS)
    for step in range(3):
        step_there(plain, other, step, count)
    save_plain(plain, other, tmp_path / "in")
    expected = snapshot(plain, other)
    losses = [step_there(plain, other, x, count) for x in (3, 4)]
    with opened(tmp_path / "s", place) as session:
        made = make_tiny(1, tied=tied)
        model, optimizer = wrapped(made, adamw(made, groups=groups))
        window_step(model, optimizer, 20, count)
        mt.import_distributed(tmp_path / "in", model)
        assert differing(snapshot(model, optimizer), expected) == []
        assert settings_of(optimizer) == settings_of(other)
        assert session.status().models[0].num_steps == 3
        assert [window_step(model, optimizer, x, count).loss for x in (3, 4)] == losses
        assert differing(snapshot(model, optimizer), snapshot(plain, other)) == []


def test_settings_may_be_tensors_and_a_scheduler_keeps_its_hold(tmp_path: Path) -> None:
    plain = make_tiny(0)
    other = adamw(plain, lr=torch.tensor(0.25))
    step_there(plain, other, 0)
    save_plain(plain, other, tmp_path / "in")
    with opened(tmp_path / "s"):
        made = make_tiny(1)
        rate = torch.tensor(0.5)
        model, optimizer = wrapped(made, adamw(made, lr=rate))
        mt.import_distributed(tmp_path / "in", model)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate == 0.25
        mt.export_distributed(tmp_path / "out")
    load_plain(plain, adamw(plain, lr=torch.tensor(0.5)), tmp_path / "out")


def test_a_parameter_that_was_never_updated_is_as_one(tmp_path: Path) -> None:
    with opened(tmp_path / "s"):
        model, optimizer = wrapped(make_tiny(0))
        mt.export_distributed(tmp_path / "out")
        window_step(model, optimizer, 0)
        mt.import_distributed(tmp_path / "out")
        assert not model._megatrain.adam.steps
        losses = [window_step(model, optimizer, x, 1).loss for x in (3, 4)]
    plain = make_tiny(1)
    other = adamw(plain)
    load_plain(plain, other, tmp_path / "out")
    assert [step_there(plain, other, x, 1) for x in (3, 4)] == losses


FORMS = ("lossless", "8bit", "4bit", "3bit", "2bit", "dynamic")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_moments_are_decoded_and_encoded(
    tmp_path: Path, form: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has what the moments decode to and the fp32 master; encoded again they are near that."""
    monkeypatch.setattr(writing, "CHUNK_BYTES", 10_000)
    with opened(tmp_path / "s", "mixed", optimizer_compression=form):
        torch.manual_seed(0)
        model, optimizer = wrapped(WideLM(), lr=1e-2, dtype=dtype)
        for step in range(3):
            window_step(model, optimizer, step)
        mt.export_distributed(tmp_path / "out")
        moments = snapshot(model, optimizer)
        masters = {}
        for name, param in model.named_parameters():
            with param._source.master().opened(write=False) as values:
                masters[name] = values.clone()
        mt.import_distributed(tmp_path / "out")
        again = snapshot(model, optimizer)
        for name, param in model.named_parameters():
            with param._source.master().opened(write=False) as values:
                assert torch.equal(values, masters[name]), name
        for key, value in moments.items():
            if form in ("lossless", "8bit", "4bit", "dynamic") or ":exp" not in key:
                assert torch.equal(again[key], value), key
            else:  # exp_avg is rounded relative to exp_avg_sq, see docs/codecs.md
                bound = value.abs().max() / (2 if form == "2bit" else 4)
                assert (again[key] - value).abs().max() <= bound, key
        window_step(model, optimizer, 3)
    found = Folder(tmp_path / "out")
    for name, master in masters.items():
        stored = torch.empty_like(master)
        found.read_into(f"model.{name}", stored)
        assert torch.equal(stored, master), name
        for moment in ("exp_avg", "exp_avg_sq"):
            found.read_into(f"optim.state.{name}.{moment}", stored)
            assert torch.equal(stored, moments[f"{name}:{moment}"]), name


def test_weights_in_bf16(tmp_path: Path) -> None:
    with opened(tmp_path / "s"):
        model, optimizer = wrapped(make_tiny(0), dtype=torch.bfloat16)
        window_step(model, optimizer, 0)
        mt.export_distributed(tmp_path / "out", dtype=torch.bfloat16)
        expected = snapshot(model)
        mt.import_distributed(tmp_path / "out", weights_only=True)
        assert differing(snapshot(model), expected) == []
        assert optimizer.state[model.head.weight]["step"] == 1
    plain = make_tiny(1).to(torch.bfloat16)
    load_plain(plain, adamw(plain), tmp_path / "out")
    assert differing(snapshot(plain), expected) == []
    found = Folder(tmp_path / "out").tensors
    assert found["model.head.weight"][1] == torch.bfloat16
    assert found["optim.state.head.weight.exp_avg"][1] == torch.float32


def test_torchs_own_converter_reads_it(tmp_path: Path) -> None:
    with opened(tmp_path / "s"):
        model, optimizer = wrapped(make_tiny(0, tied=True))
        window_step(model, optimizer, 0)
        mt.export_distributed(tmp_path / "out")
        expected = snapshot(model)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(whole["model"]) == {*expected, "head.weight"}
    for name, value in expected.items():
        assert torch.equal(whole["model"][name], value)
    trained = [name for name in expected if name != "layers.1.up.weight"]
    assert whole["optim"]["param_groups"][0]["params"] == trained


# -- FSDP2 ---------------------------------------------------------------------------------------------

FSDP2 = """
import json, sys
from pathlib import Path
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.runtime import test_distributed as tests

torch.set_num_threads(1)
rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
distributed.init_process_group(
    "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=size)
mesh = init_device_mesh("cpu", (size,))
model = tests.make_tiny(1)
model.layers[1].up.weight.requires_grad_(True)
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = tests.adamw(model)
tests.load_plain(model, optimizer, directory / "out")
losses = [tests.step_there(model, optimizer, step) for step in (3, 4)]
tests.save_plain(model, optimizer, directory / "in")
distributed.barrier()
distributed.destroy_process_group()
print(json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_fsdp2_goes_on_and_comes_back(tmp_path: Path, size: int) -> None:
    """Each rank has the same data, so that their mean gradient is the gradient."""
    with opened(tmp_path / "s", "mixed"):
        made = make_tiny(0)
        made.layers[1].up.weight.requires_grad_(True)
        model, optimizer = wrapped(made, adamw(made, **SETTINGS))
        for step in range(3):
            window_step(model, optimizer, step)
        mt.export_distributed(tmp_path / "out")
        losses = [window_step(model, optimizer, x).loss for x in (3, 4)]
        end = snapshot(model, optimizer)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", FSDP2, str(rank), str(size), str(tmp_path)],
                cwd=Path(__file__).parents[2],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            said = [each.communicate(timeout=500)[0] for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        for each, out in zip(ranks, said, strict=True):
            assert each.returncode == 0, out
            assert json.loads(out.splitlines()[-1]) == losses
        if size > 1:
            assert len(list((tmp_path / "in").glob("__1_*"))) >= 1
        window_step(model, optimizer, 20)
        mt.import_distributed(tmp_path / "in")
        assert differing(snapshot(model, optimizer), end) == []


# -- what it holds in RAM, and what is there after an error -----------------------------------------------


def test_one_tensor_is_open_at_a_time_and_each_piece_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "s", "disk") as session:
        model, optimizer = wrapped(make_tiny(0), lr=1e-2)
        for step in range(2):
            window_step(model, optimizer, step)
        optimizer.finish()
        before = session.store.read_bytes
        folder = mt.export_distributed(tmp_path / "out")
        read = session.store.read_bytes - before
        stored = sum(piece.num_bytes for piece in model._megatrain.pager.kept_pieces())
        assert read <= stored + 4096 * len(session.store.keys())
    for file in folder.glob("*.distcp"):
        # torch's archive adds about a kilobyte to each of the tensors in it.
        assert file.stat().st_size < 1000 + 50 * 2000
    kept = Folder(folder)._metadata.state_dict_metadata
    chunks = {key: len(getattr(x, "chunks", ())) for key, x in kept.items()}
    assert chunks["model.layers.0.up.weight"] == 3
    assert chunks["model.norm.weight"] == 1


def test_boxes_are_exactly_the_tensor() -> None:
    for shape in ((), (7,), (5, 3), (2, 3, 4), (1, 50), (0, 3)):
        for most in (1, 2, 5, 7, 1000):
            seen = torch.zeros(shape, dtype=torch.int64)
            for offsets, sizes in writing.boxes_of(shape, most):
                writing._box(seen, offsets, sizes).add_(1)
                assert torch.Size(sizes).numel() <= most
            assert (seen == 1).all()


def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "s"):
        model, optimizer = wrapped(make_tiny(0))
        window_step(model, optimizer, 0)
        real = writing.LazyPlanner.resolve_data
        for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
            count = 0

            def fails(self: Any, item: Any, error: Any = error) -> Any:
                nonlocal count
                count += 1
                if count == 9:
                    raise error
                return real(self, item)

            monkeypatch.setattr(writing.LazyPlanner, "resolve_data", fails)
            wanted = mt.StoreError if isinstance(error, OSError) else KeyboardInterrupt
            with pytest.raises(wanted):
                mt.export_distributed(tmp_path / "out")
            assert {x.name for x in tmp_path.iterdir()} == {"s"}
        monkeypatch.setattr(writing.LazyPlanner, "resolve_data", real)
        window_step(model, optimizer, 1)
        mt.export_distributed(tmp_path / "out")
        with pytest.raises(mt.ArgumentError, match="exists; give the name"):
            mt.export_distributed(tmp_path / "out")
        with monkeypatch.context() as patch:
            usage = type("Usage", (), {"free": 1000})
            patch.setattr("shutil.disk_usage", lambda _: usage)
            with pytest.raises(
                mt.StoreError, match=r"are needed in .* and 1\.00 kB are"
            ):
                mt.export_distributed(tmp_path / "more")


# -- what does not fit ----------------------------------------------------------------------------------


def unlike(path: Path) -> dict[str, str]:
    """Folders of other models and optimizers, and what is said of them."""
    wide = seeded(lambda: TinyLM(vocabulary=40), 0)
    save_plain(wide, adamw(wide), path / "wide")
    long = seeded(lambda: TinyLM(num_layers=4), 0)
    save_plain(long, adamw(long), path / "long")
    short = seeded(lambda: TinyLM(num_layers=2), 0)
    save_plain(short, adamw(short), path / "short")
    same = make_tiny(0)
    save_plain(same, adamw(same, groups=True), path / "groups")
    dcp.save({"m": same.state_dict()}, checkpoint_id=path / "weights")
    amsgrad = torch.optim.AdamW(same.parameters(), amsgrad=True)
    save_plain(same, amsgrad, path / "amsgrad")
    two = {"a": same.state_dict(), "b": same.state_dict()}
    dcp.save(two, checkpoint_id=path / "two")
    dcp.save({"other": torch.ones(3)}, checkpoint_id=path / "other")
    return {
        "nowhere": "is not there",
        "s": "has no .metadata",
        "wide": r"embed.weight has shape \(40, 16\) in .*\(31, 16\) here",
        "long": "layers.3.*which TinyLM has not",
        "short": r"has no app.model.layers.2",
        "groups": "no parameter group with the",
        "weights": "holds no state of AdamW",
        "amsgrad": "amsgrad",
        "two": "holds several such models",
        "other": "has no embed.weight",
    }


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "s"):
        model, optimizer = wrapped(make_tiny(0))
        window_step(model, optimizer, 0)
        before = snapshot(model, optimizer)
        for folder, match in unlike(tmp_path).items():
            with pytest.raises(mt.MegatrainError, match=match):
                mt.import_distributed(tmp_path / folder)
            assert differing(snapshot(model, optimizer), before) == []
        mt.import_distributed(tmp_path / "weights", weights_only=True)
        assert differing(snapshot(model), snapshot(make_tiny(0))) == []
        window_step(model, optimizer, 1)


def test_which_model_and_when(tmp_path: Path) -> None:
    with pytest.raises(mt.SessionError, match="no session is open"):
        mt.export_distributed(tmp_path / "out")
    with opened(tmp_path / "s"):
        with pytest.raises(mt.SessionError, match="no model is in the session"):
            mt.export_distributed(tmp_path / "out")
        model, _ = wrapped(make_tiny(0))
        mt.export_distributed(tmp_path / "out")
        other, _ = wrapped(make_tiny(1))
        for call in (mt.export_distributed, mt.import_distributed):
            with pytest.raises(mt.ArgumentError, match="2 models are in the session"):
                call(tmp_path / "more")
            with pytest.raises(mt.ModelError, match="is not in a session"):
                call(tmp_path / "more", make_tiny(0))
        mt.import_distributed(tmp_path / "out", other)
        assert differing(snapshot(model), snapshot(other)) == []
        loss_of(model, batch(0)).backward()
        for call in (mt.export_distributed, mt.import_distributed):
            with pytest.raises(mt.SessionError, match="in the middle of step 1"):
                call(
                    tmp_path / "out2"
                    if call is mt.export_distributed
                    else tmp_path / "out",
                    model,
                )


def test_damage_after_the_first_weight_stops_the_model(tmp_path: Path) -> None:
    with opened(tmp_path / "s"):
        model, optimizer = wrapped(make_tiny(0))
        window_step(model, optimizer, 0)
        folder = mt.export_distributed(tmp_path / "out")
        index = Folder(folder)._metadata.storage_data
        assert index is not None
        last = max(
            index.values(), key=lambda x: (len(x.relative_path), x.relative_path)
        )
        path = folder / last.relative_path
        path.write_bytes(b"\0" * path.stat().st_size)
        with pytest.raises(mt.StoreError, match="cannot be read"):
            mt.import_distributed(folder)
        with pytest.raises(mt.MegatrainError, match="failed half-way"):
            window_step(model, optimizer, 1)
