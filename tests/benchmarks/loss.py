"""What the codecs of Adam's moments do to the loss of a small real training.

python -m tests.benchmarks.loss             # some hours on 2 cores; stop and go on at will
python -m tests.benchmarks.loss --table     # what has been measured so far

A decoder of 5 M parameters learns the sources of Python's standard library, byte by byte:
plain torch makes the gradients, `update_encoded` the steps. Every codec sees the same
initial weights and the same batches as fp32 with that seed, so that differences are paired.
"perturbed" is fp32 from weights that differ by 1e-6: what a difference means that no codec
has made. The learning rate is the best of fp32's. Each run is one line of the results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import sysconfig
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain_nb.codec.base import BLOCK, Codec, Key, get
from megatrain_nb.codec.choice import safe_codec
from megatrain_nb.codec.dynamic import Part, Role, choose, direction_error, role_of
from megatrain_nb.codec.names import RAW
from megatrain_nb.optim.adamw import UpdateThreads
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.optim.encoded import EncodedSegment, update_encoded

BASELINE = "fp32"
METHODS = (BASELINE, "perturbed", "8bit", "4bit", "3bit", "2bit", "dynamic")
RATES = (5e-4, 1e-3, 2e-3)
CHOOSE_EVERY = 50
SAMPLE = 512 * BLOCK
# Student's t, one-sided 95 %, for 1, 2, ... degrees of freedom.
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training; equal runs give equal results."""

    method: str
    seed: int
    rate: float
    beta2: float = 0.999
    steps: int = 1000
    batch: int = 4
    context: int = 64
    width: int = 320
    depth: int = 4


# ------------------------------------------------------------------- data


def read_text() -> tuple[Tensor, Tensor]:
    """Return the bytes to learn from, and those of every tenth file, to test with."""
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.glob("*.py")) if path.name[0] != "_"]
    for at, path in enumerate(files):
        texts[at % 10 == 0].append(path.read_bytes())
    train, test = (np.frombuffer(b"\n".join(text), np.uint8) for text in texts)
    return torch.from_numpy(train.copy()), torch.from_numpy(test.copy())


def draw(text: Tensor, count: int, context: int, random: torch.Generator) -> Tensor:
    """Return some windows, int64, shape (count, context + 1)."""
    starts = torch.randint(len(text) - context - 1, (count,), generator=random)
    return torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()


# ------------------------------------------------------------------ model


class Block(nn.Module):
    """Attention and MLP, normed before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, -1, 64)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return y


class Decoder(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, 0, 0.02 / math.sqrt(2 * depth if deep else 1))

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean loss of every byte but the first."""
        x = self.tokens(windows[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


# -------------------------------------------------------------- optimizer


class Optimizer:
    """AdamW over one flat vector, its moments encoded by parameter."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self._run = run
        params = dict(model.named_parameters())
        self.values = torch.cat([param.data.flatten() for param in params.values()])
        self.grads = torch.zeros_like(self.values)
        self.roles: dict[str, Role] = {}
        self.places: dict[str, slice] = {}
        start = 0
        for name, param in params.items():
            part = slice(start, start + param.numel())
            param.data = self.values[part].view(param.shape)
            param.grad = self.grads[part].view(param.shape)
            table = name in {"tokens.weight", "places.weight", "head.weight"}
            self.roles[name] = role_of(tuple(param.shape), table=table)
            self.places[name] = part
            start = part.stop
        self._codecs = {name: self._first(name) for name in self.places}
        self._encoded = {name: self._zeros(name) for name in self.places}
        self._threads = UpdateThreads(1)

    def step(self, step: int, rate: float) -> None:
        """Clip and update; the first step is 1."""
        norm = float(torch.linalg.vector_norm(self.grads))
        config = AdamWConfig(lr=rate, beta2=self._run.beta2)
        if self._run.method == "dynamic" and step % CHOOSE_EVERY == 1:
            self._choose(step)
        segments = [
            EncodedSegment(
                part.start,
                part.stop,
                self._codecs[name],
                self._encoded[name],
                replace(config, weight_decay=0.0 if small(role) else 0.1),
                step,
                seed=at,
                name=name,
            )
            for at, ((name, part), role) in enumerate(
                zip(self.places.items(), self.roles.values(), strict=True)
            )
        ]
        update_encoded(
            self.values.numpy(),
            self.grads.numpy(),
            segments,
            grad_scale=min(1.0, 1.0 / (norm + 1e-6)),
            threads=self._threads,
        )

    def bits(self) -> float:
        """Return the bits that both moments of a parameter take, on average."""
        return 8 * sum(map(len, self._encoded.values())) / len(self.values)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def _first(self, name: str) -> Codec:
        method = self._run.method
        asked = RAW if method in {BASELINE, "perturbed"} else method
        return get(safe_codec(asked, self.roles[name]))

    def _zeros(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        codec, part = self._codecs[name], self.places[name]
        encoded = np.empty(codec.encoded_bytes(part.stop - part.start), np.uint8)
        codec.blank(encoded)
        return encoded

    def _choose(self, step: int) -> None:
        """Measure on the moments that this step is about to make; change codecs."""
        parts = []
        for name, part in self.places.items():
            role, numel = self.roles[name], part.stop - part.start
            m, v = self._decoded(name)
            grad = self.grads.numpy()[part][:SAMPLE]
            new_m = np.float32(0.9) * m[:SAMPLE] + np.float32(0.1) * grad
            rest = np.float32(1 - self._run.beta2)
            new_v = (1 - rest) * v[:SAMPLE] + rest * grad * grad
            errors = {
                codec: direction_error(get(codec), new_m, new_v, Key(0, step, 0))
                for codec in role.codecs
            }
            parts.append(Part(name=name, numel=numel, role=role, errors=errors))
        before = {name: codec.name for name, codec in self._codecs.items()}
        for at, (name, chosen) in enumerate(choose(parts, previous=before).items()):
            if chosen == before[name]:
                continue
            moments = self._decoded(name)
            codec = self._codecs[name] = get(chosen)
            self._encoded[name] = np.empty(
                codec.encoded_bytes(moments[0].size), np.uint8
            )
            codec.encode(*moments, self._encoded[name], Key(0, step, at))

    def _decoded(self, name: str) -> tuple[Any, Any]:
        part = self.places[name]
        m, v = np.empty((2, part.stop - part.start), np.float32)
        self._codecs[name].decode(self._encoded[name], m, v)
        return m, v


def small(role: Role) -> bool:
    """Whether a parameter is neither compressed nor decayed."""
    return role is Role.SMALL


# --------------------------------------------------------------- training


def train(run: Run, text: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the loss at the end on text that was not learned from, in nats a byte."""
    torch.manual_seed(run.seed)
    model = Decoder(run.width, run.depth, run.context)
    random = torch.Generator().manual_seed(run.seed)
    optimizer = Optimizer(model, run)
    if run.method == "perturbed":
        noise = torch.randn(optimizer.values.shape, generator=torch.Generator())
        optimizer.values.mul_(1 + 1e-6 * noise)
    start, late = time.perf_counter(), []
    for step in range(1, run.steps + 1):
        optimizer.grads.zero_()
        loss = model(draw(text[0], run.batch, run.context, random))
        loss.backward()
        optimizer.step(step, run.rate * schedule(step, run.steps))
        if step > 0.9 * run.steps:
            late.append(loss.item())
    seconds = time.perf_counter() - start
    random = torch.Generator().manual_seed(0)  # the same test for all
    with torch.no_grad():
        losses = [model(draw(text[1], 32, run.context, random)) for _ in range(16)]
    optimizer.close()
    return {
        "loss": float(torch.stack(losses).mean()),
        "train_loss": statistics.fmean(late),
        "bits": optimizer.bits(),
        "params": len(optimizer.values),
        "seconds": round(seconds, 1),
    }


def schedule(step: int, steps: int) -> float:
    """Return the learning rate's factor: up in a tenth, then a cosine down to a tenth."""
    warm = max(1, steps // 10)
    if step <= warm:
        return step / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


# ------------------------------------------------------------------ study


class Results:
    """The lines of a file, one for each run that is done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[Run, dict[str, float]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self._done[Run(**record["run"])] = record["result"]

    def get(self, run: Run, text: tuple[Tensor, Tensor]) -> dict[str, float]:
        """Return what a run gives; it trains unless that is known."""
        if run not in self._done:
            self._done[run] = train(run, text)
            record = {
                "run": asdict(run),
                "result": self._done[run],
                "when": datetime.datetime.now(datetime.UTC).isoformat(
                    timespec="seconds"
                ),
                "machine": f"{platform.machine()}, torch {torch.__version__}",
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        return self._done[run]

    def finished(self) -> dict[Run, dict[str, float]]:
        """Return all that is known."""
        return dict(self._done)


def tuned_rate(
    results: Results, first: Run, rates: tuple[float, ...], text: tuple[Tensor, Tensor]
) -> float:
    """Return the rate at which fp32 does best; others are tried until both sides of it are worse.

    A codec that shortens m would gain from a rate that is too high, and one that adds noise lose.
    """
    tried: dict[float, float] = {}
    wanted = list(rates)
    while wanted:
        for rate in wanted:
            run = replace(first, method=BASELINE, seed=0, rate=rate)
            tried[rate] = results.get(run, text)["loss"]
        best = min(tried, key=lambda rate: tried[rate])
        wanted = [best / 2] * (best == min(tried)) + [best * 2] * (best == max(tried))
    return best


def table(
    done: dict[Run, dict[str, float]], rates: dict[tuple[float, int], float]
) -> str:
    """Return the paired differences as markdown.

    Parameters
    ----------
    done
        Runs and their results.
    rates
        By beta2 and steps: the tuned learning rate.
    """
    lines = [
        "| beta2 | steps | codec | bits | seeds | loss | fp32's | mean difference | 95 % upper bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (beta2, steps), rate in sorted(rates.items()):
        these = {
            run: result
            for run, result in done.items()
            if (run.beta2, run.steps, run.rate) == (beta2, steps, rate)
        }
        for method in METHODS[1:]:
            pairs = [
                (result, these[replace(run, method=BASELINE)])
                for run, result in these.items()
                if run.method == method and replace(run, method=BASELINE) in these
            ]
            if pairs:
                lines.append(_row(beta2, steps, method, pairs))
    return "\n".join(lines)


def _row(
    beta2: float,
    steps: int,
    method: str,
    pairs: list[tuple[dict[str, float], dict[str, float]]],
) -> str:
    share = [100 * (one["loss"] / other["loss"] - 1) for one, other in pairs]
    mean, bound = statistics.fmean(share), "-"
    if len(share) > 1:
        t = T95[min(len(share) - 2, len(T95) - 1)]
        bound = f"{mean + t * statistics.stdev(share) / math.sqrt(len(share)):+.2f} %"
    loss, base = (statistics.fmean(p[at]["loss"] for p in pairs) for at in (0, 1))
    bits = statistics.fmean(one["bits"] for one, _ in pairs)
    return (
        f"| {beta2} | {steps} | `{method}` | {bits:.2f} | {len(share)} | {loss:.4f} | "
        f"{base:.4f} | {mean:+.2f} % | {bound} |"
    )


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("codec-loss.jsonl"))
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.999, 0.95])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    for name in ("batch", "context", "width", "depth"):
        size = Run.__dataclass_fields__[name].default
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results, text = Results(args.results), read_text()
    rates: dict[tuple[float, int], float] = {}
    for beta2 in args.beta2:
        first = Run(
            method=BASELINE,
            seed=0,
            rate=0.0,
            beta2=beta2,
            steps=args.steps,
            batch=args.batch,
            context=args.context,
            width=args.width,
            depth=args.depth,
        )
        if args.table:
            tried = {
                run.rate: result["loss"]
                for run, result in results.finished().items()
                if run == replace(first, rate=run.rate)
            }
            if tried:
                rates[beta2, args.steps] = min(tried, key=lambda rate: tried[rate])
            continue
        rate = tuned_rate(results, first, tuple(args.rates), text)
        rates[beta2, args.steps] = rate
        for seed in range(args.seeds):
            for method in dict.fromkeys([BASELINE, *args.methods]):
                run = replace(first, method=method, seed=seed, rate=rate)
                result = results.get(run, text)
                print(
                    f"beta2 {beta2} seed {seed} {method}: {result['loss']:.4f}",
                    flush=True,
                )
    lines = table(results.finished(), rates)
    print(lines)
    if args.markdown:
        args.markdown.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
