"""What a model's own tensors take, and how much there is to compute, from its shape alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_nb.plan.logits import (
    Chunking,
    cut_logits,
    room_for_logits,
    whole_logits_bytes,
)

if TYPE_CHECKING:
    from megatrain_nb.plan.shape import Part, Shape


@dataclass(frozen=True, slots=True)
class _Kept:
    """Elements that a layer keeps for its backward, for each token, by width; and how many norms it has."""

    hidden: float
    intermediate: float
    query: float
    key: float
    norms: int = 2


# Counted on small models with autograd's saved tensors: distinct memory without weights, inputs and outputs. A
# mixture keeps the intermediate for each expert that a token meets, and two more hidden.
_LLAMA = _Kept(5, 4, 2, 2)
_NORMED = _Kept(5, 4, 4, 4)  # queries and keys are normalised
_GPT = _Kept(3, 5, 2, 2, norms=0)
_KEPT = {
    "qwen3": _NORMED,
    "qwen3_moe": _NORMED,
    "olmo2": _NORMED,
    "olmoe": _NORMED,
    "gemma2": _Kept(9, 4, 4, 2, norms=4),
    "gemma3_text": _Kept(9, 4, 4, 4, norms=4),
    "gemma3": _Kept(9, 4, 4, 4, norms=4),
    "gpt2": _GPT,
    "opt": _GPT,
    "bert": _Kept(5, 3, 2, 2, norms=0),
    "bloom": _Kept(4, 6, 2, 2, norms=0),
    "falcon": _GPT,
    "phi": _Kept(2, 5, 2, 2, norms=0),
    "gpt_oss": _Kept(5, 7, 2, 2),
}

# Attention that keeps its matrix: copies of heads x length for each token.
_EAGER = {"gemma2": 2.0, "gpt_oss": 1.0}

# A norm after the last product saves what comes of it, as dropout does, so backward computes that product again.
_NORM_AFTER = frozenset({"bert", "gemma2", "gemma3", "gemma3_text", "olmo2"})

_FP32, _BF16 = 4, 2

# Whatever is no matrix product, as passes over what is kept in fp32: measured on decoder layers of 3 and 13 M parameters,
# on a CPU, which computes such operations of bf16 in fp32 and converts each.
_PASSES, _BF16_PASSES = 5.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The tokens of one optimizer step: so many micro-batches of so many rows of so many tokens."""

    batch: int
    seq_len: int
    accumulation: int

    @property
    def rows(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the window."""
        return self.rows * self.accumulation


def kept_bytes(shape: Shape, part: Part, window: Window, *, bf16: bool) -> int:
    """Return what one call of a block keeps from forward to backward, in bytes.

    The input of the block, which is there anyway, is not counted.
    """
    dims, size = shape.dims, _BF16 if bf16 else _FP32
    if part.kind == "other":
        return window.rows * dims.hidden * (6 if bf16 else 4)
    if part.kind != "layer":
        return 0
    kept = _KEPT.get(shape.family, _LLAMA)
    elements = (
        kept.hidden * dims.hidden
        + kept.query * dims.query
        + kept.key * dims.key
        + kept.intermediate * dims.intermediate
        + dims.heads
    )
    if any(shape.share(params) < 1 for _, params in part.params):
        each = dims.expert_intermediate or dims.intermediate
        many = dims.experts_per_token + dims.shared_experts
        elements += kept.intermediate * (each * many - dims.intermediate)
        elements += 2 * dims.experts_per_token * dims.hidden
    if dims.eager:
        elements += _EAGER.get(shape.family, 2.0) * dims.heads * window.seq_len
    # Norms compute in fp32: with bf16 they keep their input twice.
    more = 3 * kept.norms * dims.hidden if bf16 else 0
    return math.ceil(window.rows * (elements * size + more))


def largest_kept_bytes(shape: Shape, window: Window, *, bf16: bool) -> int:
    """Return what one call keeps of the block that keeps the most, in bytes."""
    return max(kept_bytes(shape, part, window, bf16=bf16) for part in shape.parts)


def border_bytes(shape: Shape, window: Window, *, bf16: bool) -> int:
    """Return what the inputs of all blocks take that wait for their backward, in bytes."""
    blocks = sum(part.count for part in shape.parts)
    size = _BF16 if bf16 else _FP32
    return blocks * window.tokens * shape.dims.hidden * size


def logits_bytes(
    shape: Shape, window: Window, *, room_bytes: int
) -> tuple[int, Chunking | None]:
    """Return what logits and loss take at once, in bytes, and how they are cut if they would not fit.

    Parameters
    ----------
    shape, window
        The model, and one step's tokens.
    room_bytes
        What the budget has for the model's own tensors.
    """
    dims = shape.dims
    if not any(part.kind == "head" for part in shape.parts):
        return 0, None
    room = room_for_logits(
        room_bytes,
        micro_batches=window.accumulation,
        blocks=sum(part.count for part in shape.parts),
        tokens=window.rows,
        width=dims.hidden,
    )
    chunking = cut_logits(
        tokens=window.rows,
        vocabulary=dims.vocabulary,
        room_bytes=room,
        training=True,
    )
    if chunking is None:
        whole = whole_logits_bytes(tokens=window.rows, vocabulary=dims.vocabulary)
        return whole, None
    hidden = 2 * window.rows * dims.hidden * 4
    return 2 * chunking.tokens * dims.vocabulary * 4 + hidden, chunking


@dataclass(frozen=True, slots=True)
class Work:
    """What one micro-batch computes in one block.

    Attributes
    ----------
    products
        The forward's matrix products: (rows, operations); the backward has twice as many operations.
    moved_bytes
        Bytes that everything else moves through the memory of what computes, in the forward.
    last
        The block's last product, where nothing that is saved comes after it: backward does not compute it again if
        nothing was kept.
    """

    products: tuple[tuple[float, float], ...]
    moved_bytes: float
    last: tuple[float, float] = (1.0, 0.0)


def block_work(shape: Shape, part: Part, window: Window, *, bf16: bool) -> Work:
    """Return what one micro-batch computes in one block of a part.

    Notes
    -----
    Two operations for each token and each weight that it meets, and 4 x length x width of the queries for
    attention; where the kernel leaves masked pairs out it is half of that.
    """
    dims, rows = shape.dims, window.rows
    if part.kind == "embedding":
        return Work((), 3.0 * rows * dims.hidden * 4)
    flops = thin = 0.0
    for _, params in part.params:
        if len(params) >= 2:
            share = shape.share(params)
            found = 2.0 * rows * math.prod(params) * share
            flops, thin = (flops + found, thin) if share == 1 else (flops, thin + found)
    if part.kind == "head":
        if not part.params:  # tied
            flops += 2.0 * rows * dims.vocabulary * dims.hidden
        return Work(((rows, flops),), 6.0 * rows * dims.vocabulary * 4)
    last = 0.0
    if part.kind == "layer":
        flops += 4.0 * rows * window.seq_len * dims.query
        if not (thin or dims.dropout or shape.family in _NORM_AFTER):
            last = 2.0 * rows * dims.hidden * dims.intermediate
    each = rows * dims.experts_per_token / dims.experts if thin else rows
    passes = _BF16_PASSES if bf16 else _PASSES
    moved_bytes = passes * kept_bytes(shape, part, window, bf16=False)
    return Work(((rows, flops), (each, thin)), moved_bytes, (rows, last))
