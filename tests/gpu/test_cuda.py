"""On a CUDA device: the numbers of plain PyTorch there, within the budget, and everything given back."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_nb as mt
from megatrain_nb.runtime.device import open_device
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.slots import SlotDevice
from tests.runtime.common import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu

VOCABULARY = 97


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**(given | changes)))


def batches(
    count: int, rows: int = 2, length: int = 32, seed: int = 0
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        0, VOCABULARY, (count, rows, length), generator=generator
    ).cuda()
    return [{"input_ids": x, "labels": x} for x in ids]


@pytest.fixture(autouse=True)
def _precise() -> Iterator[None]:
    """TF32 would round differently in products of other shapes."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("window", [True, False], ids=["window", "loop"])
@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("poison", [False, True], ids=["", "poison"])
@pytest.mark.parametrize("mode", ["streams", "stays", "lives there"])
def test_training_is_that_of_plain_pytorch(
    tmp_path: Path, window: bool, place: str, poison: bool, mode: str
) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    torch.nn.Module.cuda(plain)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    window_batches = batches(3)
    tokens = sum(x["labels"][:, 1:].numel() for x in window_batches)
    with mt.init(tmp_path, max_ram_gb=1, device="cuda") as session:
        assert isinstance(session.device, SlotDevice)
        session.device._poison = poison
        session.max_resident_bytes = 0 if place == "disk" else None
        session.max_tail_bytes = None if mode == "lives there" else 0
        streamed, ours = wrapped(model, lr=1e-3, max_grad_norm=1.0)
        executor = streamed._megatrain.executor
        for step in range(4):
            if mode == "streams":
                executor.stay = frozenset()
                executor.keeping.limit_bytes = 0
            losses = []
            for batch in window_batches:
                number = torch.tensor(tokens, device="cuda")
                loss = plain(**batch, num_items_in_batch=number).loss
                loss.backward()
                losses.append(float(loss.detach()))
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            theirs.step()
            theirs.zero_grad()
            if window:
                result = mt.train_step(streamed, ours, window_batches)
                # Sums over other launch orders: fp32 rounding, not bit for bit.
                assert result.loss == pytest.approx(sum(losses), rel=1e-5)
                assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
                assert bool(result.onloaded_bytes) == (
                    mode != "lives there" or step < 2
                )
                assert result.seconds["compute"] > 0
            else:
                for batch in window_batches:
                    number = torch.tensor(tokens, device="cuda")
                    streamed(**batch, num_items_in_batch=number).loss.backward()
                ours.step()
                ours.zero_grad()
            if mode != "streams" and step:
                there = len(executor.stay), len(executor.tail)
                assert there == (7, 7 if mode == "lives there" else 0)
        for (name, expected), found in zip(
            plain.named_parameters(), streamed.parameters(), strict=True
        ):
            assert found.device == expected.device
            torch.testing.assert_close(
                found.detach().clone().cpu(),
                expected.detach().cpu(),
                rtol=1e-4,
                atol=2e-5,
                msg=name,
            )


def test_what_lives_there_is_seen_and_comes_back(tmp_path: Path) -> None:
    """A checkpoint holds what is on the device; a plan that shrinks brings it to RAM and gives the memory back."""
    with mt.init(tmp_path, max_ram_gb=1, device="cuda") as session:
        model, optimizer = wrapped(llama(), lr=1e-3, max_grad_norm=1.0)
        executor = model._megatrain.executor
        for _ in range(3):
            mt.train_step(model, optimizer, batches(2))
        assert len(executor.tail) == len(executor.layers.spec.packs)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        moments = optimizer.state[model.lm_head.weight]["exp_avg"].clone()
        session.save_checkpoint("here")
        losses = [mt.train_step(model, optimizer, batches(2)).loss for _ in range(2)]
        assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
        session.resume("here")
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name]), name
        assert torch.equal(optimizer.state[model.lm_head.weight]["exp_avg"], moments)
        for loss in losses:
            again = mt.train_step(model, optimizer, batches(2)).loss
            assert again == pytest.approx(loss, rel=1e-6)
        assert executor.tail
        used = session.device.used_bytes()
        gone = executor.tail.num_bytes
        session.max_tail_bytes = 0
        session.models.plan()
        session.device.trim()
        assert not executor.tail
        assert session.device.used_bytes() <= used - gone
        mt.train_step(model, optimizer, batches(2))


def test_the_update_there_is_the_host_s_but_for_rounding(tmp_path: Path) -> None:
    found = []
    for name, most in (("host", 0), ("device", None)):
        with mt.init(tmp_path / name, max_ram_gb=1, device="cuda") as session:
            session.max_tail_bytes = most
            model, optimizer = wrapped(llama(), lr=1e-3, weight_decay=0.1)
            for step in range(4):
                mt.train_step(model, optimizer, batches(2, seed=step))
            assert bool(model._megatrain.executor.tail) == (most is None)
            found.append(
                [p.detach().clone().cpu() for p in model.parameters()]
                + [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
            )
    for host, device in zip(*found, strict=True):
        # Same formula; sums and products are contracted otherwise, and the gradients after the first step follow.
        torch.testing.assert_close(device, host, rtol=1e-4, atol=2e-6)


def test_bf16_with_an_fp32_master(tmp_path: Path) -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with mt.init(tmp_path, max_ram_gb=1, device="cuda"):
        streamed, optimizer = wrapped(model, lr=1e-3, dtype="bfloat16")
        losses = [mt.train_step(streamed, optimizer, batches(2)).loss for _ in range(8)]
        assert losses[-1] < losses[0] - 0.05
        assert streamed._megatrain.executor.tail
        ordinary = mt.unwrap(streamed)
        for name, value in ordinary.state_dict().items():
            assert value.is_cuda
            assert not torch.equal(value.float().cpu(), before[name]), name


def test_slabs_are_page_locked_at_their_exact_size(tmp_path: Path) -> None:
    with mt.init(tmp_path, max_ram_gb=1, device="cuda") as session:
        model, optimizer = wrapped(llama())
        mt.train_step(model, optimizer, batches(1))
        pager = model._megatrain.pager
        weights = pager.need(1, What.WEIGHTS)
        assert torch.from_numpy(weights).is_pinned()
        pager.drop(1, What.WEIGHTS)
        moments = pager.need(1, What.EXP_AVG)
        assert not torch.from_numpy(moments).is_pinned()
        pager.drop(1, What.EXP_AVG)
        status = session.status()
        linked = sum(
            p.weight_bytes + p.grad_bytes for p in model._megatrain.layers.spec.packs
        )
        assert 0 < status.pinned_bytes <= 1.5 * linked
        assert "page-locked" in str(status)
    assert session.pool.pinned_bytes == 0


def test_copies_overlap_computing(tmp_path: Path) -> None:
    spans: list[Any] = []

    class Watch(mt.Callback):
        def on_span(self, span: Any) -> None:
            spans.append(span)

    config = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    with mt.init(tmp_path, max_ram_gb=4, device="cuda") as session:
        model, optimizer = wrapped(llama(**config))
        session.max_tail_bytes = 0
        for step in range(3):
            model._megatrain.executor.stay = frozenset()
            if step == 2:
                optimizer.finish()
                session.callbacks.append(Watch())
            mt.train_step(model, optimizer, batches(4, rows=8, length=256))
        session.callbacks.clear()
    computing = [x for x in spans if x.kind in ("FORWARD", "BACKWARD")]
    copies = [x for x in spans if x.kind == "ONLOAD"]
    assert len(copies) >= 16
    beside = [
        x
        for x in copies
        if any(c.start_s < x.end_s and x.start_s < c.end_s for c in computing)
    ]
    assert len(beside) >= len(copies) - 3


def test_the_budget_bounds_all_that_torch_allocates(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    fraction = torch.cuda.get_per_process_memory_fraction()
    config = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    torch.cuda.reset_peak_memory_stats()
    with mt.init(tmp_path, max_ram_gb=6, max_vram_gb=0.6, device="cuda") as session:
        model, optimizer = wrapped(llama(**config))
        spec = model._megatrain.layers.spec
        assert spec.weight_bytes > 0.6e9
        for _ in range(3):
            mt.train_step(model, optimizer, batches(2, rows=2, length=128))
            assert torch.cuda.max_memory_reserved() <= 0.6e9
        with pytest.raises(mt.BudgetError, match="max_vram_gb"):
            mt.train_step(model, optimizer, batches(1, rows=64, length=2048))
        result = mt.train_step(model, optimizer, batches(2, rows=2, length=128))
        assert np.isfinite(result.loss)
        assert session.device.limit_bytes == 600_000_000
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(fraction)


def test_too_small_a_budget(tmp_path: Path) -> None:
    config = {"hidden_size": 1024, "intermediate_size": 2816}
    with mt.init(tmp_path, max_ram_gb=4, max_vram_gb=0.03, device="cuda"):
        model, optimizer = wrapped(llama(**config))
        with pytest.raises(mt.BudgetError, match="max_vram_gb"):
            mt.train_step(model, optimizer, batches(1))


def test_everything_is_given_back(tmp_path: Path) -> None:
    def once(name: str) -> None:
        with mt.init(tmp_path / name, max_ram_gb=1, device="cuda"):
            model, optimizer = wrapped(llama())
            mt.train_step(model, optimizer, batches(2))

    once("first")  # libraries take their workspaces
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for index in range(3):
        once(str(index))
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before[0]
    assert torch.cuda.memory_reserved() <= before[1]


def test_which_device_is_opened() -> None:
    device = open_device("cuda", max_vram_bytes=None)
    assert device.torch_device.index is not None
    device.close()
    with pytest.raises(mt.ArgumentError, match="counted from 0"):
        open_device("cuda:99", max_vram_bytes=None)
