"""Tiny models of every architecture, batches of unequal rows, and which combinations to try."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

if TYPE_CHECKING:
    from torch import Tensor, nn

VOCABULARY = 61

ARCHITECTURES = ("llama", "qwen3", "gpt2", "gemma2", "opt", "mixtral", "bert")

# Cases of tests: those, one with shared layers and one with an encoder; and with tied weights or without.
EVERY = pytest.mark.parametrize("name", [*ARCHITECTURES, "albert", "t5"])
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])

# Their loss is a mean over the batch's own labels, whatever num_items_in_batch says.
IGNORES_NUM_ITEMS = ("bert", "albert", "t5")

# Where transformers' Trainer counts the labels without the first one of each row: its causal models. It takes
# GPT-2 for another kind (by the name of its class), so it counts all labels there; so does train_step.
COUNTS_SHIFTED = ("llama", "qwen3", "gemma2", "opt", "mixtral", "granite", "cohere")


def make_config(
    name: str, *, tied: bool = False, dropout: float = 0.0, **changes: Any
) -> Any:
    """Return the configuration of a model with some thousand parameters.

    Without a key-value cache: the runtime trains without one, and what attention reads from a cache has other
    strides, for which a matrix product may add in another order.
    """
    plain = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    grouped = plain | {"num_key_value_heads": 1, "attention_dropout": dropout}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, grouped),
        "qwen3": (transformers.Qwen3Config, grouped | {"head_dim": 8}),
        "gpt2": (
            transformers.GPT2Config,
            {
                "vocab_size": VOCABULARY,
                "n_embd": 16,
                "n_layer": 2,
                "n_head": 2,
                "n_positions": 32,
                "resid_pdrop": dropout,
                "embd_pdrop": dropout,
                "attn_pdrop": dropout,
                "bos_token_id": 0,
                "eos_token_id": 0,
            },
        ),
        "gemma2": (
            transformers.Gemma2Config,
            grouped | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
        ),
        "granite": (transformers.GraniteConfig, grouped | {"logits_scaling": 3.0}),
        "cohere": (transformers.CohereConfig, grouped | {"logit_scale": 0.3}),
        "opt": (
            transformers.OPTConfig,
            {
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "ffn_dim": 32,
                "num_attention_heads": 2,
                "max_position_embeddings": 32,
                "word_embed_proj_dim": 8,
                "dropout": dropout,
                "attention_dropout": dropout,
                "pad_token_id": 1,
                "bos_token_id": 2,
                "eos_token_id": 2,
            },
        ),
        "mixtral": (
            transformers.MixtralConfig,
            grouped
            | {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "output_router_logits": True,
                "router_aux_loss_coef": 0.5,
            },
        ),
        "bert": (
            transformers.BertConfig,
            plain
            | {
                "max_position_embeddings": 32,
                "hidden_dropout_prob": dropout,
                "attention_probs_dropout_prob": dropout,
            },
        ),
        "albert": (
            transformers.AlbertConfig,
            plain
            | {
                "embedding_size": 8,
                "max_position_embeddings": 32,
                "hidden_dropout_prob": dropout,
                "attention_probs_dropout_prob": dropout,
            },
        ),
        "t5": (
            transformers.T5Config,
            {
                "vocab_size": VOCABULARY,
                "d_model": 16,
                "d_kv": 8,
                "d_ff": 32,
                "num_layers": 2,
                "num_heads": 2,
                "dropout_rate": dropout,
                "decoder_start_token_id": 0,
            },
        ),
    }
    kind, arguments = kinds[name]
    return kind(
        **(arguments | {"tie_word_embeddings": tied, "use_cache": False} | changes)
    )


def auto_class(name: str) -> Any:
    """Return the transformers class that makes the model with its loss."""
    if name in ("bert", "albert"):
        return transformers.AutoModelForMaskedLM
    if name == "t5":
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def make_model(
    name: str,
    *,
    tied: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
    attention: str | None = None,
    **changes: Any,
) -> Any:
    """Return the model in training mode; the same numbers for the same arguments.

    Biases, norms and position tables get noise as well, so that no gradient or error hides behind a zero.
    """
    torch.manual_seed(seed)
    kwargs = {"attn_implementation": attention} if attention else {}
    config = make_config(name, tied=tied, dropout=dropout, **changes)
    model = auto_class(name).from_config(config, **kwargs)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    return model.train()


def make_batch(
    name: str, seed: int, *, rows: int = 2, width: int = 9
) -> dict[str, Any]:
    """Return one micro-batch: rows of unequal length, padded left or right, some labels left out."""
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        padding = 1 + (seed + row) % 4
        if seed % 2:
            mask[row, :padding] = 0
        else:
            mask[row, width - padding :] = 0
    ids[mask == 0] = 1
    labels = ids.masked_fill(mask == 0, -100)
    if name in ("bert", "albert"):
        hidden = torch.rand(ids.shape, generator=generator) < 0.5
        hidden[0, 0] = True
        labels = labels.masked_fill(~hidden, -100)
        ids = ids.masked_fill(hidden & (mask == 1), 2)
    else:
        labels[0, : seed % 3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_window(name: str, step: int, accumulation: int) -> list[dict[str, Any]]:
    """Return the micro-batches of one optimizer step."""
    return [make_batch(name, step * 10 + index) for index in range(accumulation)]


def count_labels(name: str, batch: dict[str, Any]) -> int:
    """Count what the loss is a mean over, as transformers' Trainer counts it."""
    labels: Tensor = batch["labels"]
    if name in COUNTS_SHIFTED:
        labels = labels[:, 1:]
    return int((labels != -100).sum())


def own_loss(
    model: nn.Module, name: str, batch: dict[str, Any], window: list[dict[str, Any]]
) -> Tensor:
    """Return a micro-batch's part of the window's loss."""
    total = sum(count_labels(name, one) for one in window)
    if name in IGNORES_NUM_ITEMS:
        loss: Tensor = model(**batch).loss
        return loss * (count_labels(name, batch) / total)
    loss = model(**batch, num_items_in_batch=torch.tensor(total)).loss
    assert loss.dim() == 0
    return loss


def covering(
    strength: int, seed: int, factors: dict[str, tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """Return rows in which any ``strength`` factors meet in every combination of their values.

    Greedy, and the same for the same seed; all combinations there are, in order, if all factors are to meet.
    """
    if strength >= len(factors):
        every = itertools.product(*factors.values())
        return [dict(zip(factors, values, strict=True)) for values in every]
    dice = random.Random(seed)
    missing = {
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(sorted(factors), strength)
        for values in itertools.product(*(factors[name] for name in names))
    }

    def met(row: dict[str, Any]) -> set[tuple[Any, ...]]:
        items = sorted(row.items())
        return missing.intersection(itertools.combinations(items, strength))

    rows: list[dict[str, Any]] = []
    while missing:
        wanted = dict(min(missing, key=repr))
        tries = [
            {name: dice.choice(values) for name, values in factors.items()} | wanted
            for _ in range(60)
        ]
        best = max(tries, key=lambda row: len(met(row)))
        missing -= met(best)
        rows.append(best)
    return rows
