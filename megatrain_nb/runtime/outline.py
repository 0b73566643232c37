"""The shape of a model that was cut into blocks: what the forecast knows of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from megatrain_nb.plan.shape import Dims, Part, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.plan.model import ModelSpec, PackSpec
    from megatrain_nb.runtime.layers import Layers

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ALIASES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "intermediate": (
        "intermediate_size_mlp",
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
    ),
    "heads": ("num_attention_heads", "n_head"),
    "layers": ("num_hidden_layers", "n_layer"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk"),
    "expert_intermediate": ("moe_intermediate_size", "intermediate_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
}
_BATCHED = ("llama4", "llama4_text")  # one batched product for all experts, always
_DROPOUT = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout")


def shape_from(model: nn.Module, layers: Layers) -> Shape:
    """Return the shape of a model that was cut."""
    config = getattr(model, "config", None)
    parts: list[Part] = []
    owners = layers.spec.owners()
    for block in layers.blocks:
        part = _part(model, layers.spec, block.spec.index, block.module, owners)
        if parts and (joined := _join(parts[-1], part)) is not None:
            parts[-1] = joined
        else:
            parts.append(part)
    text = getattr(config, "get_text_config", lambda: config)()
    return Shape(
        name=type(model).__name__,
        family=str(getattr(config, "model_type", "")),
        dims=_dims(text, layers),
        parts=tuple(parts),
        architecture=type(model).__name__,
        resident_numel=sum(param.numel() for param in layers.resident.values()),
    )


def _part(
    model: nn.Module,
    spec: ModelSpec,
    index: int,
    module: nn.Module,
    owners: Mapping[int, int],
) -> Part:
    block = spec.blocks[index]
    own = [pack for pack in block.packs if owners[pack] == index]
    number = _NUMBER.search(block.name)
    name = _NUMBER.sub("{}", block.name, count=1)
    borrows = own != list(block.packs)
    used = (spec.blocks[owners[pack]].name for pack in block.packs)
    return Part(
        name=name,
        kind=_kind(model, module, numbered=number is not None),
        first=int(number[0]) if number else 0,
        params=tuple(
            entry for pack in own for entry in _params(spec.packs[pack], block.name)
        ),
        uses=tuple(used) if borrows else (),
    )


def _params(pack: PackSpec, block: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (
            param.name.removeprefix(block)
            if param.name.startswith(f"{block}.")
            else param.name,
            param.shape,
        )
        for param in pack.params
    ]


def _kind(model: nn.Module, module: nn.Module, *, numbered: bool) -> str:
    if numbered:
        return "layer"
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is not None and any(inner is output for inner in module.modules()):
        return "head"
    if any(isinstance(inner, nn.Embedding) for inner in module.modules()):
        return "embedding"
    return "other"


def _join(before: Part, after: Part) -> Part | None:
    """Return one part for both if they are equal blocks that follow each other."""
    following = replace(before, first=before.first + before.count, count=1)
    if "{}" not in before.name or following != after or before.uses:
        return None
    return replace(before, count=before.count + 1)


def _dims(config: Any, layers: Layers) -> Dims:
    def get(what: str) -> int:
        found = (getattr(config, name, None) for name in _ALIASES[what])
        return next((int(value) for value in found if isinstance(value, int)), 0)

    hidden, heads = get("hidden"), get("heads")
    if not hidden:  # another kind of model: as wide as its largest layer's input
        widths = [
            param.shape[-1] for pack in layers.spec.packs for param in pack.params
        ]
        return Dims(
            hidden=max(widths, default=0),
            intermediate=max(widths, default=0),
            query=0,
            key=0,
            heads=0,
            layers=len(layers.blocks),
            vocabulary=0,
        )
    head = getattr(config, "head_dim", None) or hidden // max(heads, 1)
    if getattr(config, "kv_lora_rank", None):
        head = config.qk_nope_head_dim + config.qk_rope_head_dim
        keys = heads
    else:
        keys = _key_heads(config, heads)
    experts = get("experts")
    return Dims(
        hidden=hidden,
        intermediate=get("intermediate") or 4 * hidden,
        query=heads * head,
        key=keys * head,
        heads=heads,
        layers=get("layers"),
        vocabulary=int(getattr(config, "vocab_size", 0) or 0),
        experts=experts,
        experts_per_token=get("experts_per_token") if experts else 0,
        expert_intermediate=get("expert_intermediate") if experts else 0,
        shared_experts=get("shared_experts") if experts else 0,
        eager=getattr(config, "_attn_implementation", None) == "eager",
        dropout=any(getattr(config, name, None) for name in _DROPOUT),
        looped=bool(experts)
        and getattr(config, "_experts_implementation", None) == "eager"
        and getattr(config, "model_type", None) not in _BATCHED,
    )


def _key_heads(config: Any, heads: int) -> int:
    if getattr(config, "new_decoder_architecture", None) is False and getattr(
        config, "multi_query", False
    ):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return heads
