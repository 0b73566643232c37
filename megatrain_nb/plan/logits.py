"""Logits that would break the budget: what they cost at once, and the chunks of tokens in which they fit.

Logits are the largest tensor of a model with a large vocabulary: tokens x vocabulary. Cross-entropy makes
more of that size. In chunks of tokens, with their backward at once, only one chunk of them exists.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_LOGIT = 4

# Alive at once in the backward of cross-entropy: the logits, their log-probabilities, and both gradients.
_COPIES_IN_TRAINING = 4
_COPIES_IN_EVALUATION = 2

# Each chunk reads and writes the gradient of the head's weight once (8 bytes for each element) and multiplies
# into it (2 operations for each element and token): with 128 tokens, 32 operations for each byte.
CHUNK_TOKENS = 128
CHUNK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Chunking:
    """How logits are cut.

    Attributes
    ----------
    tokens
        Tokens of one chunk.
    whole_bytes
        What logits and loss would take at once, in bytes.
    """

    tokens: int
    whole_bytes: int


def whole_logits_bytes(
    *, tokens: int, vocabulary: int, training: bool = True, operations: int = 0
) -> int:
    """Return what logits and loss take at once if they are not cut, in bytes; parameters as for `cut_logits`."""
    copies = (_COPIES_IN_TRAINING if training else _COPIES_IN_EVALUATION) + operations
    return tokens * vocabulary * BYTES_PER_LOGIT * copies


def cut_logits(
    *,
    tokens: int,
    vocabulary: int,
    room_bytes: int,
    training: bool,
    operations: int = 0,
) -> Chunking | None:
    """Return how to cut a micro-batch's logits, or None where they fit whole.

    Parameters
    ----------
    tokens, vocabulary
        Shape of the logits.
    room_bytes
        What is there for them, in bytes.
    training
        Whether a backward follows.
    operations
        Elementwise operations between the head and the loss (soft-capping has three); each makes a copy.

    Examples
    --------
    >>> cut_logits(tokens=4096, vocabulary=128_000, room_bytes=4 * 10**9, training=True)
    Chunking(tokens=128, whole_bytes=8388608000)
    >>> cut_logits(tokens=512, vocabulary=32_000, room_bytes=10**9, training=True)
    """
    whole_bytes = whole_logits_bytes(
        tokens=tokens, vocabulary=vocabulary, training=training, operations=operations
    )
    if whole_bytes <= room_bytes:
        return None
    # A chunk's gradient overwrites its logits; the operations' own backward needs more.
    chunk_copies = operations + 4 if operations else 1
    token_bytes = vocabulary * BYTES_PER_LOGIT * chunk_copies
    fitting = min(room_bytes // 2, CHUNK_BYTES) // token_bytes
    return Chunking(max(1, min(CHUNK_TOKENS, fitting, tokens)), whole_bytes)


def room_for_logits(
    room_bytes: int, *, micro_batches: int, blocks: int, tokens: int, width: int
) -> int:
    """Return what is left for logits beside the blocks' inputs that wait for their backward, in bytes.

    Parameters
    ----------
    room_bytes
        The budget without what streams.
    micro_batches
        Of the window.
    blocks, tokens, width
        Each block's input has ``tokens x width`` float32 elements in each micro-batch.

    Examples
    --------
    >>> room_for_logits(10**6, micro_batches=2, blocks=10, tokens=64, width=128)
    344640
    """
    return max(0, room_bytes - micro_batches * blocks * tokens * width * 4)
