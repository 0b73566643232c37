"""Training on encoded moments: the bytes of plain gradients, decode, AdamW and encode, one after another."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import megatrain_nb as mt
from megatrain_nb.codec import base
from megatrain_nb.codec.base import Key
from megatrain_nb.codec.quantised import block_kernels
from megatrain_nb.codec.quantised.block_kernels import make_counter
from megatrain_nb.codec.split import Split, split
from megatrain_nb.optim.adamw import UpdateThreads
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.optim.encoded import EncodedSegment
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.runtime import adamstate, update
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.source import encoded_of
from tests.codec.common import QUANTISED, decoded, encoded
from tests.optim.common import by_torch
from tests.optim.test_encoded import twin
from tests.runtime.common import (
    Layer,
    TinyLM,
    batch,
    differing,
    loss_of,
    micro_batches,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)
from tests.runtime.plain import TILE_NUMEL, opened
from tests.runtime.test_faults import Disk, check_after_fault, mixed_step
from tests.store.conformance import flip_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

WIDTH = 64
# Rows that are no multiple of a block, so that padding and short last blocks are met.
ROWS = 131


class WideLM(TinyLM):
    """An embedding and a head of 8384 parameters, layers with two matrices of 8192, vectors."""

    def __init__(self, *, tied: bool = False, num_layers: int = 2) -> None:
        super().__init__(
            lambda: Layer(WIDTH),
            num_layers=num_layers,
            tied=tied,
            vocabulary=ROWS,
            width=WIDTH,
        )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with other hyper-parameters."""
    params = dict(model.named_parameters())
    ups = [param for name, param in params.items() if "up" in name]
    rest = [param for name, param in params.items() if "up" not in name]
    return [
        {"params": ups, "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1},
        {"params": rest, "lr": 1e-2, "eps": 1e-6, "weight_decay": 0.0},
    ]


@dataclass
class Reference:
    """Plain PyTorch's gradients, and AdamW by numpy on encoded moments."""

    model: nn.Module
    asked: str
    seed: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def codec_of(self, name: str, param: Tensor) -> str:
        if param.dim() < 2 or param.numel() < 4096:
            return "raw"
        table = name.startswith(("embed", "head", "model.embed", "lm_head"))
        return "8bit" if table else self.asked

    def step(self, groups: list[dict[str, Any]], *, max_norm: float) -> None:
        """Update every parameter that has a gradient."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        names = {param: name for name, param in self.model.named_parameters()}
        for group in groups:
            beta1, beta2 = group.get("betas", (0.9, 0.999))
            config = AdamWConfig(
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group.get("eps", 1e-8),
                weight_decay=group["weight_decay"],
            )
            for param in group["params"]:
                if param.grad is not None:
                    self._update(names[param], param, config, scale)
                    param.grad = None

    def _update(
        self, name: str, param: Tensor, config: AdamWConfig, scale: float
    ) -> None:
        codec = base.get(self.codec_of(name, param))
        numel = param.numel()
        zeros = np.zeros(numel, np.float32)
        seed = adamstate.seed_of(self.seed, name)
        data = self.data.setdefault(
            name, encoded(codec, zeros, zeros, Key(0, 77, 12345))
        )
        self.steps[name] = step = self.steps.get(name, 0) + 1
        assert param.grad is not None
        segment = EncodedSegment(0, numel, codec, data, config, step, seed)
        values, grad = (
            x.detach().view(-1).numpy().astype(np.float32) for x in (param, param.grad)
        )
        if codec.name == "raw":
            m, v = data.view(np.float32).reshape(2, numel)
            new, m, v = by_torch(
                values, m, v, grad, config=config, step=step, grad_scale=scale
            )
            data[:] = np.concatenate([m, v]).view(np.uint8)
        else:
            new, data[:] = twin(values, data, grad, segment, scale)
        with torch.no_grad():
            param.copy_(torch.from_numpy(new).view(param.shape))


def codes(model: Any) -> dict[str, bytes]:
    """The encoded moments of every parameter, by name; fp32 ones as they are."""
    record, found = model._megatrain, {}
    for param, home in record.layers.homes.items():
        pack = record.pager.packs[home.pack.index]
        if not pack.encoded:
            both = [
                record.adam.moment(param, w) for w in (What.EXP_AVG, What.EXP_AVG_SQ)
            ]
            found[home.spec.name] = b"".join(x.clone().numpy().tobytes() for x in both)
            continue
        record.finish_update(pack.index)
        with encoded_of(record, home, write=False) as (parts, _):
            pieces = []
            for part, data, _ in parts:
                end = part.first_byte + part.num_bytes
                codec, size = base.get(part.param.codec), part.stop - part.start
                pieces.append(decoded(codec, data[part.first_byte : end].copy(), size))
            m, v = (np.concatenate(x) for x in zip(*pieces, strict=True))
        codec = base.get(home.spec.codec)
        found[home.spec.name] = encoded(codec, m, v).tobytes()
    return found


def start(make: Callable[[], Any], **kwargs: Any) -> tuple[Any, Any]:
    """A model and an optimizer of two groups, with a seed of rounding that does not depend on torch's."""
    model = seeded(make)
    optimizer = torch.optim.AdamW(groups_of(model))
    for group in optimizer.param_groups:
        group["rounding_seed"] = 0
    return wrapped(model, optimizer, max_grad_norm=0.5, **kwargs)


def train(model: Any, optimizer: Any, steps: int, path: str, count: int = 2) -> None:
    for step in range(steps):
        if path == "window":
            window_step(model, optimizer, step, count)
        else:
            plain_step(model, optimizer, step, count)


def state_of(optimizer: Any) -> dict[str, Any]:
    """A state dict of its own: what the optimizer does later changes nothing in it."""
    state = optimizer.state_dict()
    state["state"] = {
        index: {key: value.clone() for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return copy.deepcopy(state)


def reference(
    asked: str, steps: int, *, tied: bool = False, count: int = 2
) -> Reference:
    model = seeded(lambda: WideLM(tied=tied))
    found = Reference(model, asked)
    for step in range(steps):
        for each in micro_batches(step, count):
            (loss_of(model, each["ids"]) / count).backward()
        found.step(groups_of(model), max_norm=0.5)
    return found


@pytest.mark.parametrize("place", ["ram", "disk", "mixed"])
@pytest.mark.parametrize("path", ["window", "loop"])
@pytest.mark.parametrize("name", QUANTISED)
def test_bytes_of_plain_gradients_and_the_twin(
    tmp_path: Path, name: str, path: str, place: str
) -> None:
    """Two groups, accumulation, clipping; parameters and codes after five steps."""
    expected = reference(name, 5)
    with opened(tmp_path, place, compression=name) as session:
        model, optimizer = start(WideLM)
        train(model, optimizer, 5, path)
        assert (session.store.read_bytes > 0) == (place != "ram")
        found = snapshot(model)
        assert differing(found, snapshot(expected.model)) == []
        assert codes(model) == {k: v.tobytes() for k, v in expected.data.items()}


@pytest.mark.parametrize("path", ["window", "loop"])
def test_tied_parameters(tmp_path: Path, path: str) -> None:
    """One micro-batch: then the tied gradient is summed in plain PyTorch's order."""
    expected = reference("4bit", 3, tied=True, count=1)
    with opened(tmp_path, "disk", compression="4bit") as _:
        model, optimizer = start(lambda: WideLM(tied=True))
        train(model, optimizer, 3, path, count=1)
        assert differing(snapshot(model), snapshot(expected.model)) == []
        assert codes(model) == {k: v.tobytes() for k, v in expected.data.items()}


def bf16_reference(asked: str, steps: int) -> tuple[dict[str, Tensor], Reference]:
    """The same with weights that compute as the upper halves of fp32 ones; returns the fp32 ones too."""
    model = seeded(WideLM)
    masters = {
        name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()
    }
    model = model.to(torch.bfloat16)
    take_upper_halves(model, masters)
    found = Reference(_Named(masters), asked)
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for each in micro_batches(step, 2):
            (loss_of(model, each["ids"]) / 2).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                total = sums.setdefault(name, torch.zeros(param.shape))
                total.add_(param.grad)
                param.grad = None
        for name, total in sums.items():
            masters[name].grad = total
        ups = [p for name, p in masters.items() if "up" in name]
        rest = [p for name, p in masters.items() if "up" not in name]
        shapes = groups_of(model)
        found.step(
            [{**shapes[0], "params": ups}, {**shapes[1], "params": rest}], max_norm=0.5
        )
        take_upper_halves(model, masters)
    return {name: value.detach() for name, value in masters.items()}, found


@torch.no_grad()
def take_upper_halves(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    """Let a bf16 model have the upper halves of fp32 numbers."""
    for name, param in model.named_parameters():
        flat = masters[name].detach().view(-1).numpy().copy()
        halves = Split(*np.zeros((2, flat.size), np.uint16))
        split(flat, halves)
        bits = torch.from_numpy(halves.hi.view(np.int16).copy())
        param.copy_(bits.view(torch.bfloat16).view(param.shape))


class _Named(nn.Module):
    """Parameters under their own names."""

    def __init__(self, masters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.masters = masters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield from self.masters.items()


@pytest.mark.parametrize("place", ["ram", "disk", "mixed"])
@pytest.mark.parametrize("name", ["4bit", "2bit"])
def test_bf16_with_an_fp32_master(tmp_path: Path, name: str, place: str) -> None:
    masters, expected = bf16_reference(name, 4)
    with opened(tmp_path, place, compression=name) as _:
        model, optimizer = start(WideLM, dtype=torch.bfloat16)
        train(model, optimizer, 4, "window")
        record = model._megatrain
        for param, home in record.layers.homes.items():
            with record.source(param).master().opened(write=False) as values:
                assert torch.equal(values, masters[home.spec.name]), home.spec.name
        assert codes(model) == {k: v.tobytes() for k, v in expected.data.items()}


def after(
    path: Path, place: str, steps: int = 4, tile_numel: int = TILE_NUMEL, **kwargs: Any
) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    with opened(path, place, tile_numel=tile_numel, **kwargs) as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, steps, "window")
        return snapshot(model, optimizer), codes(model)


@pytest.mark.parametrize("name", ["4bit", "3bit"])
def test_threads_tiles_residency_and_time_leave_no_trace(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = after(tmp_path / "a", "disk", compression=name)
    for index, (place, tile) in enumerate(
        [("ram", TILE_NUMEL), ("mixed", 2048), ("disk", 4 * 2**20), ("ram", 512)]
    ):
        other = after(tmp_path / str(index), place, tile_numel=tile, compression=name)
        assert differing(first[0], other[0]) == []
        assert first[1] == other[1]
    for threads in (1, 3):
        monkeypatch.setattr(
            "megatrain_nb.runtime.session.UpdateThreads",
            lambda n=threads: UpdateThreads(n),
        )
        monkeypatch.setattr("megatrain_nb.optim.adamw.CHUNK", 512)
        other = after(tmp_path / f"t{threads}", "disk", compression=name)
        assert differing(first[0], other[0]) == []
        assert first[1] == other[1]
    monkeypatch.undo()
    with opened(tmp_path / "late", "disk", compression=name) as _:
        model, optimizer = start(WideLM)
        for step in range(4):
            window_step(model, optimizer, step, 2)
            optimizer.finish()  # at a barrier instead of just in time
        assert differing(first[0], snapshot(model, optimizer)) == []
        assert first[1] == codes(model)


def test_the_seed_is_torchs_and_part_of_the_state(tmp_path: Path) -> None:
    found = []
    for index, seed in enumerate((1, 1, 2)):
        with opened(tmp_path / str(index), "disk", compression="4bit") as _:
            model = seeded(WideLM)
            torch.manual_seed(seed)
            model, optimizer = wrapped(model, lr=1e-2)
            assert optimizer.state_dict()["param_groups"][0]["rounding_seed"] == seed
            train(model, optimizer, 3, "window")
            found.append(codes(model))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_parameters_without_a_gradient_stay(tmp_path: Path) -> None:
    """Frozen ones, and those that a step leaves out: their codes and counts are as they were."""
    with opened(tmp_path, "disk", compression="4bit") as _:
        model, optimizer = start(WideLM)
        model.layers[1].down.weight.requires_grad_(False)
        train(model, optimizer, 2, "loop")
        before, weights = codes(model), snapshot(model)
        loss_of(model, batch(5)).backward()
        model.layers[0].up.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        now, after_step = codes(model), snapshot(model)
        for name in ("layers.0.up.weight", "layers.1.down.weight"):
            assert now[name] == before[name]
            assert torch.equal(weights[name], after_step[name])
        assert now["layers.0.down.weight"] != before["layers.0.down.weight"]
        assert "layers.1.down.weight" not in {
            home.spec.name
            for param, home in model._megatrain.layers.homes.items()
            if param in optimizer.state
        }
        steps = optimizer.state[model.layers[0].up.weight]["step"]
        assert (steps, optimizer.state[model.head.weight]["step"]) == (2, 3)


def test_moments_read_as_fp32_and_can_be_assigned(tmp_path: Path) -> None:
    with opened(tmp_path, "disk", compression="4bit") as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, 2, "window")
        state = optimizer.state[model.layers[0].up.weight]
        m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
        assert m.dtype == v.dtype == torch.float32
        assert (v > 0).all()
        before = codes(model)
        with torch.no_grad():
            state["exp_avg"].copy_(m)  # what is stored already rounds to itself
            state["exp_avg_sq"].copy_(v)
        assert codes(model) == before
        with torch.no_grad():
            state["exp_avg"].mul_(0.5)
        assert torch.equal(state["exp_avg_sq"], v)
        assert torch.allclose(state["exp_avg"], m / 2, atol=float(m.abs().max()) / 7)
        with torch.no_grad(), pytest.raises(mt.ModelError, match=r"layers\.0\.up"):
            state["exp_avg"].fill_(float("nan"))
        assert torch.equal(state["exp_avg_sq"], v)


@pytest.mark.parametrize("name", QUANTISED)
def test_state_dict_goes_out_and_in_byte_for_byte(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "a", "disk", compression=name) as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, 3, "window")
        state = state_of(optimizer)
        weights, before = snapshot(model), codes(model)
        train(model, optimizer, 2, "window")
        end, last = snapshot(model), codes(model)
    with opened(tmp_path / "b", "ram", compression=name) as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, 1, "window")  # something else to overwrite
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(weights[key])
        assert codes(model) == before
        train(model, optimizer, 2, "window")
        assert differing(snapshot(model), end) == []
        assert codes(model) == last


def test_a_torch_optimizer_with_state_is_taken_over(tmp_path: Path) -> None:
    plain = seeded(WideLM)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain_step(plain, theirs, 0)
    wanted = {
        name: (
            theirs.state[p]["exp_avg"].clone(),
            theirs.state[p]["exp_avg_sq"].clone(),
        )
        for name, p in plain.named_parameters()
    }
    with opened(tmp_path, "disk", compression="8bit") as _:
        model, optimizer = wrapped(plain, theirs)
        for name, param in model.named_parameters():
            m, v = wanted[name]
            state = optimizer.state[param]
            assert state["step"] == 1
            assert torch.allclose(state["exp_avg"], m, atol=float(m.abs().max()) / 100)
            small = v < v.max() * 2.0**-30  # further down than 8 bits reach
            assert torch.allclose(state["exp_avg_sq"][~small], v[~small], rtol=0.13)
        plain_step(model, optimizer, 1)


def test_loops_that_set_gradients_to_zero(tmp_path: Path) -> None:
    with opened(tmp_path, "disk", compression="4bit") as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, 2, "loop")
        before = snapshot(model, optimizer)
        loss_of(model, batch(0)).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        name = "layers.0.up.weight"
        now = snapshot(model, optimizer)
        assert now[f"{name}:step"] == 3
        assert float(now[f"{name}:exp_avg"].norm()) < float(
            before[f"{name}:exp_avg"].norm()
        )


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_gradient_that_is_not_finite(tmp_path: Path, nonfinite: str) -> None:
    with opened(tmp_path, "disk", compression="4bit") as _:
        model, optimizer = start(WideLM, nonfinite=nonfinite)
        train(model, optimizer, 2, "loop")
        before, weights = codes(model), snapshot(model)
        loss_of(model, batch(0)).backward()
        with torch.no_grad():
            model.layers[1].down.weight.grad[3, 3] = float("inf")
        if nonfinite == "stop":
            with pytest.raises(
                mt.ModelError, match=r"layers\.1\.down\.weight is not fin"
            ):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        assert codes(model) == before
        assert differing(snapshot(model), weights) == []


# -- what is asked ----------------------------------------------------------------------------------------


def codecs_of(model: Any) -> dict[str, str]:
    codecs: dict[str, str] = model._megatrain.adam.codecs
    return codecs


def test_patterns_and_groups(tmp_path: Path) -> None:
    rules = {"layers.0.up": False, "layers.*": "2bit", "head.weight": "4bit"}
    with opened(tmp_path, "disk", compression=rules) as session:
        model, _ = wrapped(seeded(WideLM))
        found = codecs_of(model)
        assert found["layers.0.up.weight"] == "raw"
        assert found["layers.0.down.weight"] == found["layers.1.up.weight"] == "2bit"
        assert found["head.weight"] == "8bit"  # never below
        assert found["embed.weight"] == "raw"  # no pattern matches
        assert found["layers.0.up.bias"] == found["norm.weight"] == "raw"
        model = seeded(WideLM)
        groups = groups_of(model)
        groups[0]["optimizer_compression"] = "8bit"
        model, optimizer = wrapped(model, torch.optim.AdamW(groups))
        found = codecs_of(model)
        assert found["layers.0.up.weight"] == found["layers.1.up.weight"] == "8bit"
        assert found["layers.0.down.weight"] == "2bit"
        train(model, optimizer, 2, "window")
        text = str(session.status())
        assert "2bit (experimental) 16.4 k" in text
        status = session.status().models[-1]
        assert status.moments_bytes == model._megatrain.layers.spec.moments_bytes
        assert status.moments_ratio == pytest.approx(8 / status.moments_bytes_per_param)


def test_a_group_that_cannot_be_honoured(tmp_path: Path) -> None:
    class Beside(WideLM):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * self.scale

    with opened(tmp_path, "disk") as _:
        model = seeded(Beside)
        groups = [{"params": [model.scale], "optimizer_compression": "4bit"}]
        with pytest.raises(mt.ArgumentError, match="lies beside the blocks"):
            mt.wrap(model, torch.optim.AdamW(groups))
        groups = [{"params": [model.head.weight], "optimizer_compression": "5bit"}]
        with pytest.raises(mt.ArgumentError, match="optimizer_compression='5bit'"):
            mt.wrap(model, torch.optim.AdamW(groups))


def llama() -> LlamaConfig:
    """Matrices of 4096 elements and more, grouped-query attention, an untied head."""
    return LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


def test_a_transformer_made_in_the_store_and_one_moved_in(tmp_path: Path) -> None:
    """By mt.from_config and by mt.Trainer: the same codecs, the same bytes."""
    ids = torch.randint(0, 97, (8, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    args: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
        "report_to": "none",
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "adam_beta2": 0.95,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    found = []
    for index, made in enumerate((True, False)):
        with opened(tmp_path / str(index), "disk", compression="4bit") as _:
            if made:
                model = mt.from_config(llama(), seed=3)
            else:
                torch.manual_seed(3)
                model = LlamaForCausalLM(llama())
            arguments = TrainingArguments(**args)
            trainer = mt.Trainer(model=model, args=arguments, train_dataset=data)
            trainer.train()
            codecs = codecs_of(model)
            assert codecs["model.layers.0.self_attn.q_proj.weight"] == "4bit"
            assert codecs["model.layers.0.self_attn.k_proj.weight"] == "raw"  # 2048
            assert codecs["model.layers.1.mlp.up_proj.weight"] == "4bit"
            assert codecs["model.embed_tokens.weight"] == "8bit"
            assert codecs["lm_head.weight"] == "8bit"
            groups = trainer.streamed_optimizer.param_groups
            assert {group["rounding_seed"] for group in groups} == {arguments.seed}
            found.append((snapshot(model), codes(model)))
    assert differing(found[0][0], found[1][0]) == []
    assert found[0][1] == found[1][1]


def test_settings_that_hurt_a_codec_are_told(tmp_path: Path) -> None:
    with opened(tmp_path, "disk", compression="2bit") as session:
        wrapped(seeded(WideLM), betas=(0.9, 0.9999))
        assert any("2bit moments have been tried" in note for note in session.notes)
        before = len(session.notes)
        wrapped(seeded(WideLM))
        assert len(session.notes) == before


def test_settings_that_hurt_what_dynamic_may_choose_are_told(tmp_path: Path) -> None:
    """It begins with 4 bits, which they do not hurt."""
    with opened(tmp_path, "disk", compression="dynamic") as session:
        wrapped(seeded(WideLM), betas=(0.95, 0.999))
        assert any("dynamic moments have been tried" in note for note in session.notes)


def test_what_is_asked_later_is_told_as_well(tmp_path: Path) -> None:
    """By a parameter group, or by mt.recompress: experimental codecs, once, and settings that hurt one."""
    with opened(tmp_path, "disk", compression="4bit") as session:
        assert not any("experimental" in note for note in session.notes)
        model = seeded(WideLM)
        groups = groups_of(model)
        groups[0]["optimizer_compression"] = "dynamic"
        model, _ = wrapped(model, torch.optim.AdamW(groups))
        assert [n[:31] for n in session.notes if "experimental" in n] == [
            'optimizer_compression="dynamic"'
        ]
        model, _ = wrapped(seeded(WideLM), betas=(0.9, 0.9999))
        assert not any("have been tried" in note for note in session.notes)
        mt.recompress(model, "2bit")
        mt.recompress(model, "4bit")
        mt.recompress(model, "2bit")
        assert len([n for n in session.notes if "experimental" in n]) == 2
        assert any("2bit moments have been tried" in note for note in session.notes)


def test_size_of_the_states(tmp_path: Path) -> None:
    """What the plan says is what lies on the disk."""
    for name, most in (("8bit", 2.03), ("4bit", 1.03), ("3bit", 0.78), ("2bit", 0.53)):
        with opened(
            tmp_path / name, "disk", tile_numel=4 * 2**20, compression={"layers": name}
        ) as session:
            model = seeded(Deep)
            model, optimizer = wrapped(model)
            window_step(model, optimizer, 0)
            optimizer.finish()
            keys = [key for key in session.store.keys() if "encoded" in key]  # noqa: SIM118
            on_disk = sum(-(-session.store.nbytes(key) // 4096) * 4096 for key in keys)
            spec = model._megatrain.layers.spec
            packs = [pack for pack in spec.packs if pack.encoded]
            assert on_disk == sum(pack.moments_bytes for pack in packs)
            weights = [p.numel for pack in packs for p in pack.params]
            assert on_disk / sum(weights) <= most


class Deep(WideLM):
    """One layer with matrices large enough that vectors and padding hardly count."""

    def __init__(self) -> None:
        super().__init__(num_layers=0)
        self.layers.append(_Large())


class _Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * 512, bias=False)
        self.down = nn.Linear(16 * 512, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["4bit", "2bit"])
def test_a_step_moves_what_the_plan_says(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    with opened(tmp_path, "disk", tile_numel=4 * 2**20, compression=name) as _:
        model, optimizer = wrapped(seeded(WideLM), dtype=dtype)
        for step in range(2):
            window_step(model, optimizer, step)
        results = [window_step(model, optimizer, step) for step in range(2, 32)]
        record = model._megatrain
        order = [block.index for block in record.layers.spec.blocks]
        planned = step_traffic(record.layers.spec, record.memory.residency, order)
        read = sum(result.read_bytes for result in results) / len(results)
        written = sum(result.written_bytes for result in results) / len(results)
        assert read == pytest.approx(planned.read_bytes, rel=0.02)
        assert written == pytest.approx(planned.written_bytes, rel=0.02)


# -- faults -----------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_system_call_that_fails(tmp_path: Path, disk: Disk, name: str) -> None:
    """The model is that of a whole step and goes on, or says that it is not."""
    expected = []
    with opened(tmp_path / "whole", "disk", compression="4bit") as _:
        model, optimizer = wrapped(seeded(WideLM), lr=1e-2)
        for step in range(7):
            expected.append(snapshot(model, optimizer))
            mixed_step(model, optimizer, step)
    fired = 0
    for n in range(0, 500, 61):
        with opened(tmp_path / str(n), "disk", compression="4bit") as _:
            model, optimizer = wrapped(seeded(WideLM), lr=1e-2)
            for step in range(2):
                mixed_step(model, optimizer, step)
            disk.arm(name, n)
            try:
                for step in range(2, 4):
                    mixed_step(model, optimizer, step)
                optimizer.finish()
            except mt.StoreError:
                assert disk.fired
            else:
                assert not disk.fired
            fired += disk.fired
            disk.disarm()
            check_after_fault(model, optimizer, expected)
    assert fired >= 4


@pytest.mark.parametrize("name", QUANTISED)
def test_damaged_codes_are_refused(tmp_path: Path, name: str) -> None:
    """What was read is what the kernel wrote, or an error that names the tile: any code would decode to something."""
    with opened(tmp_path, "disk", compression=name) as session:
        model, optimizer = start(WideLM)
        train(model, optimizer, 2, "window")
        optimizer.finish()
        record = model._megatrain
        record.pager.barrier()
        record.executor.rest()
        tiles = session.store.pin()
        key, tile = next((k, t) for k, t in tiles.tiles.items() if "/encoded" in k)
        session.store.unpin(tiles)
        flip_bits(session.store.path, tile.offset + tile.nbytes // 2, 1)
        with pytest.raises(mt.StoreError, match=f"{key}.*is damaged"):
            record.pager.need(int(key.split("/")[2]), What.ENCODED)


# -- teeth ----------------------------------------------------------------------------------------------


def a_write_is_dropped(patch: pytest.MonkeyPatch) -> None:
    write = Pager.write_tile

    def skip(self: Any, piece: Any, start: int, slab: Any) -> None:
        if piece.what is What.ENCODED and start > 0:
            self.pool.give(slab)
        else:
            write(self, piece, start, slab)

    patch.setattr(Pager, "write_tile", skip)


def the_dither_has_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Only the rounding: the numbers are those of the right step."""

    def late(key: Key) -> Any:
        return make_counter(key._replace(step=key.step - 1))

    patch.setattr(block_kernels, "make_counter", late)


def all_parameters_round_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adamstate, "seed_of", lambda seed, name: seed)


def the_dither_starts_anew_in_each_tile(patch: pytest.MonkeyPatch) -> None:
    segments = update._encoded_segments

    def anew(*args: Any) -> Any:
        return [replace(s, first=0) for s in segments(*args)]

    patch.setattr(update, "_encoded_segments", anew)


@pytest.mark.parametrize(
    "broken",
    [
        a_write_is_dropped,
        the_dither_has_the_step_before,
        the_dither_starts_anew_in_each_tile,
        all_parameters_round_alike,
    ],
)
def test_parity_has_teeth(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[pytest.MonkeyPatch], None],
) -> None:
    expected = reference("4bit", 3)
    broken(monkeypatch)
    with opened(tmp_path, "disk", compression="4bit") as _:
        model, optimizer = start(WideLM)
        train(model, optimizer, 3, "window")
        assert codes(model) != {k: v.tobytes() for k, v in expected.data.items()}
