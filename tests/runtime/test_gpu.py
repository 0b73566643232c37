"""On a CUDA device: the same numbers as plain PyTorch there, and the memory given back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_nb as mt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 97, (count, 2, 32), generator=generator).cuda()
    return [{"input_ids": x, "labels": x} for x in ids]


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("resident", [None, 0])
def test_training_on_cuda_is_that_of_plain_pytorch(
    tmp_path: Path, window: bool, resident: int | None
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    plain = copy.deepcopy(model)
    torch.nn.Module.cuda(plain)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    window_batches = batches(3)
    tokens = sum(x["labels"][:, 1:].numel() for x in window_batches)
    before = torch.cuda.memory_allocated()
    with mt.init(tmp_path, max_ram_gb=1, device="cuda") as session:
        session.max_resident_bytes = resident
        streamed, ours = mt.wrap(model, lr=1e-3, max_grad_norm=1.0)
        for _ in range(3):
            losses = []
            for batch in window_batches:
                number = torch.tensor(tokens, device="cuda")
                loss = plain(**batch, num_items_in_batch=number).loss
                loss.backward()
                losses.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            theirs.step()
            theirs.zero_grad()
            if window:
                result = mt.train_step(streamed, ours, window_batches)
                # Sums over other launch orders: fp32 rounding, not bit for bit.
                assert result.loss == pytest.approx(sum(losses), rel=1e-5)
            else:
                for batch in window_batches:
                    number = torch.tensor(tokens, device="cuda")
                    streamed(**batch, num_items_in_batch=number).loss.backward()
                ours.step()
                ours.zero_grad()
        for (name, expected), found in zip(
            plain.named_parameters(), streamed.parameters(), strict=True
        ):
            torch.testing.assert_close(
                found.detach().clone().cpu(),
                expected.detach().cpu(),
                rtol=1e-4,
                atol=2e-5,
                msg=name,
            )
    assert torch.cuda.memory_allocated() <= before + plain.lm_head.weight.nbytes * 4
