"""What lossless packing saves and costs, on moments and weights of a real training.

pytest tests/benchmarks/test_lossless.py --benchmark-enable -s

A small decoder learns the sources of the standard library for 400 steps of
`torch.optim.AdamW`; then its moments and weights are packed chunk by chunk, as the I/O
threads do. Speed is by CPU time of one thread, in bytes as they are in RAM.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain_nb.codec.lossless import chunks
from megatrain_nb.codec.lossless.chunks import CHUNK_NUMEL, Packer, most_bytes
from megatrain_nb.codec.split import Split, split

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH, DEPTH, CONTEXT, STEPS, ROUNDS = 192, 4, 64, 400, 9


class Decoder(nn.Module):
    """A language model over bytes, 1.9 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 3, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.tokens(windows[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(x).flatten(0, 1)
        return functional.cross_entropy(logits, windows[:, 1:].flatten())


def trained() -> dict[str, NDArray[Any]]:
    """Return m, v and weights after `STEPS` steps, by name of the tensor."""
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
    )
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (8,)).tolist()
        windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
        optimizer.zero_grad()
        model(windows).backward()
        optimizer.step()
    states = [optimizer.state[param] for param in model.parameters()]
    weights = torch.cat([param.data.flatten() for param in model.parameters()]).numpy()
    halves = Split(*np.zeros((2, weights.size), np.uint16))
    split(weights, halves)
    found = {
        name: torch.cat([state[key].flatten() for state in states]).numpy()
        for name, key in (("m fp32", "exp_avg"), ("v fp32", "exp_avg_sq"))
    }
    return {**found, "weights fp32": weights, "weights bf16": halves.hi}


def measure(values: NDArray[Any]) -> tuple[int, float, float]:
    """Return packed bytes, and seconds to pack and to unpack."""
    packer = Packer(np.zeros(CHUNK_NUMEL, np.uint8))
    item, data = values.dtype.itemsize, values.view(np.uint8)
    step = CHUNK_NUMEL * item
    parts = [data[start : start + step] for start in range(0, data.size, step)]
    outs = [np.zeros(most_bytes(part.size), np.uint8) for part in parts]
    back, seconds = np.zeros(step, np.uint8), np.full((2, ROUNDS), np.inf)
    packed: list[NDArray[np.uint8]] = []
    for turn in range(ROUNDS):
        start = time.thread_time()
        sizes = [
            packer.pack(part, item, out) for part, out in zip(parts, outs, strict=True)
        ]
        seconds[0, turn] = time.thread_time() - start
        packed = [out[:size] for out, size in zip(outs, sizes, strict=True)]
        start = time.thread_time()
        for each in packed:
            packer.unpack(each, item, back)
        seconds[1, turn] = time.thread_time() - start
    for part, each in zip(parts, packed, strict=True):
        assert packer.unpack(each, item, back) == part.size
        assert np.array_equal(back[: part.size], part)
    encode, decode = seconds.min(axis=1)
    return sum(each.size for each in packed), float(encode), float(decode)


@pytest.mark.slow
def test_ratio_and_speed(benchmark: Any) -> None:
    if not benchmark.enabled:
        pytest.skip("give --benchmark-enable")
    chunks.warm_up()
    tensors = trained()
    found = {name: measure(values) for name, values in tensors.items()}
    print()
    for name, (size, encode, decode) in found.items():
        whole = tensors[name].nbytes
        print(
            f"{name:13} {whole / size:.3f}x  pack {whole / encode / 1e9:.2f} GB/s  "
            f"unpack {whole / decode / 1e9:.2f} GB/s"
        )
    moments = [name for name in found if name[0] in "mv"]
    ratio = sum(tensors[name].nbytes for name in moments) / sum(
        found[name][0] for name in moments
    )
    print(f"m and v together {ratio:.3f}x")
    benchmark.pedantic(measure, args=(tensors["m fp32"],), rounds=1)
    assert ratio >= 1.15
    assert tensors["weights bf16"].nbytes / found["weights bf16"][0] >= 1.40
    for name, (_, encode, decode) in found.items():
        assert tensors[name].nbytes / encode >= 1e9, name
        assert tensors[name].nbytes / decode >= 3e9, name
