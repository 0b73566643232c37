"""What a GPU makes of it, in one run of a few minutes: parity, speed against plain PyTorch, overlap, share of the bound.

Run as ``python -m tests.benchmarks.gpu`` (``make bench-gpu``). ``--quick`` takes small models, ``--device twin`` the
CPU's twin of a GPU, which shows that the script works and measures nothing else.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_nb as mt
from megatrain_nb.runtime.lanes import ThreadLanes
from megatrain_nb.runtime.slots import SlotDevice
from megatrain_nb.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megatrain_nb.plan.timeline import Span

    Window = list[dict[str, torch.Tensor]]
    Step = Callable[[Window], float]

# What is not begun by then is left out, so that the whole takes less than 6 minutes.
LAST_BEGIN_S = 270.0

# Of the loss, relative: sums over other launch orders.
MOST_DIFFERENCE = 1e-5

# Workspaces of the matrix library, and a chunk of logits.
MARGIN = 512 << 20


@dataclass(frozen=True)
class Size:
    """A model and the window of a step."""

    hidden: int
    layers: int
    vocabulary: int
    rows: int
    length: int
    count: int
    warm_up: int
    steps: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=round(2.75 * self.hidden / 64) * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=max(2, self.hidden // 128),
            tie_word_embeddings=False,
        )

    def window(self, device: torch.device) -> Window:
        generator = torch.Generator().manual_seed(0)
        shape = (self.count, self.rows, self.length)
        ids = torch.randint(0, self.vocabulary, shape, generator=generator).to(device)
        return [{"input_ids": x, "labels": x} for x in ids]

    def little_bytes(self, dtype: torch.dtype) -> int:
        """A device budget that holds slots, the blocks' inputs and one block's activations, and not much more."""
        item = dtype.itemsize
        slots = 2 * self.vocabulary * self.hidden * (item + 4)
        borders = self.count * (self.layers + 4) + 80
        inputs = borders * self.rows * self.length * self.hidden * item
        return round(1.3 * (slots + inputs)) + (MARGIN if self.hidden > 100 else 0)

    @property
    def tokens(self) -> int:
        return self.count * self.rows * (self.length - 1)


FULL = Size(1536, 16, 32_000, 8, 1024, 4, warm_up=2, steps=3)
QUICK = Size(512, 6, 8_000, 4, 256, 2, warm_up=2, steps=2)
TINY = Size(32, 3, 97, 2, 16, 2, warm_up=1, steps=2)


def plain_model(size: Size, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(size.config()).train()
    return torch.nn.Module.to(model, device=device, dtype=dtype)


def plain(model: Any, size: Size, *, checkpointing: bool) -> Step:
    """Plain PyTorch on the same device: fused AdamW, clipping."""
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(window: Window) -> float:
        number = torch.tensor(size.tokens, device=window[0]["labels"].device)
        losses = []
        for batch in window:
            loss = model(**batch, use_cache=False, num_items_in_batch=number).loss
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(losses))

    return step


def streamed(model: Any, results: list[mt.StepResult]) -> Step:
    """The same through the open session."""
    model, optimizer = mt.wrap(model.train(), lr=1e-4, max_grad_norm=1.0)

    def step(window: Window) -> float:
        results.append(mt.train_step(model, optimizer, window))
        return results[-1].loss

    return step


@contextmanager
def session_on(kind: str, **limits: Any) -> Iterator[mt.Session]:
    """A session on CUDA or on the twin, in a directory of its own."""
    twin = mock.patch(
        "megatrain_nb.runtime.init.open_device",
        lambda *_, max_vram_bytes: SlotDevice(
            torch.device("cpu"), max_bytes=max_vram_bytes, lanes=ThreadLanes()
        ),
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        twin if kind == "twin" else nullcontext(),
        mt.init(Path(directory) / "store", **limits) as session,
    ):
        yield session


class Spans(mt.Callback):
    """Keeps the spans of the device."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def on_span(self, span: Span) -> None:
        if span.lane in ("compute", "link"):
            self.spans.append(span)


def overlap(spans: list[Span]) -> float:
    """Return the share of the copies' time in which the device computed as well."""
    computing = sorted(
        (x.start_s, x.end_s) for x in spans if x.kind in ("FORWARD", "BACKWARD")
    )
    copies = [x for x in spans if x.lane == "link"]
    total = sum(x.seconds for x in copies)
    beside = 0.0
    for each in copies:
        seen = each.start_s
        for start_s, end_s in computing:  # none counts twice
            begin_s, until_s = max(start_s, seen), min(end_s, each.end_s)
            beside += max(0.0, until_s - begin_s)
            seen = max(seen, until_s)
    return beside / total if total else 0.0


def timed(step: Step, window: Window, size: Size) -> tuple[float, float]:
    """Return the median seconds of a step, and the last loss."""
    seconds = []
    loss = 0.0
    for index in range(size.warm_up + size.steps):
        start = time.perf_counter()
        loss = step(
            window
        )  # ends with the loss on the host: nothing is left to do on the device
        if index >= size.warm_up:
            seconds.append(time.perf_counter() - start)
    return median(seconds), loss


class Bench:
    """Measures, and says what it found line by line.

    Attributes
    ----------
    wrong
        A session's numbers were not those of plain PyTorch.
    """

    def __init__(self, kind: str, say: Callable[[str], None]) -> None:
        self.kind = kind
        self.say = say
        self.device = torch.device("cuda" if kind == "cuda" else "cpu")
        self.wrong = False
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._begin

    def is_late(self, what: str) -> bool:
        """Whether there is no time for more; says so."""
        late = self.seconds > LAST_BEGIN_S
        if late:
            self.say(f"{what}: left out, no time left")
        return late

    def parity(self, dtype: torch.dtype = torch.float32) -> None:
        """Compare three steps of a small model with plain PyTorch."""
        window = TINY.window(self.device)
        reference = plain_model(TINY, self.device, dtype)
        model = copy.deepcopy(reference)
        torch.nn.Module.to(model, "cpu")
        theirs = plain(reference, TINY, checkpointing=False)
        with session_on(self.kind, max_ram_gb=0.5) as session:
            session.max_resident_bytes = 0
            ours = streamed(model, [])
            worst = max(abs(ours(window) / theirs(window) - 1) for _ in range(3))
        self.wrong |= not worst < MOST_DIFFERENCE
        self.say(
            f"parity, fp32, 3 steps: the losses differ by {worst:.1e} at most"
            + (f", more than {MOST_DIFFERENCE:.0e}: WRONG" if self.wrong else "")
        )

    def speed(self, size: Size, dtype: torch.dtype) -> None:
        """Time plain PyTorch with and without checkpointing, and sessions with and without room on the device."""
        window = size.window(self.device)
        with torch.device("meta"):
            params = sum(
                x.numel() for x in LlamaForCausalLM(size.config()).parameters()
            )
        self.say(
            f"{str(dtype).removeprefix('torch.')}, Llama of {format_count(params)} parameters, "
            f"{size.rows} x {size.length} tokens x {size.count} micro-batches"
        )
        base = {}
        for checkpointing in (True, False):
            label = (
                f"plain PyTorch {'with' if checkpointing else 'without'} checkpointing"
            )
            if self.is_late(label):
                return
            model = plain_model(size, self.device, dtype)
            step = plain(model, size, checkpointing=checkpointing)
            base[checkpointing], loss = timed(step, window, size)
            self.say(
                f"  {label:<36} {format_seconds(base[checkpointing])}, loss {loss:.4f}"
            )
            del model, step
            self.tidy()
        for label, max_vram_bytes in (
            ("session, all the device has", None),
            (
                f"session, max_vram_gb={size.little_bytes(dtype) / 1e9:.2f}",
                size.little_bytes(dtype),
            ),
        ):
            if self.is_late(label):
                return
            self.session(label, size, dtype, base, window, params, max_vram_bytes)

    def session(
        self,
        label: str,
        size: Size,
        dtype: torch.dtype,
        base: dict[bool, float],
        window: Window,
        params: int,
        max_vram_bytes: int | None,
    ) -> None:
        """Time one session."""
        results: list[mt.StepResult] = []
        watch = Spans()
        with session_on(
            self.kind,
            max_ram_gb=2 + 20 * params / 1e9,
            max_vram_gb=max_vram_bytes and max_vram_bytes / 1e9,
        ) as session:
            step = streamed(mt.from_config(size.config(), seed=0, dtype=dtype), results)
            session.callbacks.append(watch)
            seconds, loss = timed(step, window, size)
            session.callbacks.clear()
            pinned = session.pool.pinned_bytes
            used = session.device.peak_bytes
            del step
        self.tidy()
        result = results[-1]
        causes, least = (
            ", ".join(f"{what} {format_seconds(value)}" for what, value in each.items())
            for each in (result.seconds, result.least_seconds)
        )
        self.say(
            f"  {label:<36} {format_seconds(seconds)}, loss {loss:.4f}: {seconds / base[True]:.2f} of plain PyTorch with "
            f"checkpointing, {seconds / base[False]:.2f} without\n"
            f"    {result.share_of_bound:.0%} of what {result.bound} allows; {overlap(watch.spans):.0%} of the copies' "
            f"time beside computing\n"
            f"    time: {causes}\n    at least: {least}\n"
            f"    {format_bytes(result.onloaded_bytes)} to the device, {format_bytes(result.offloaded_bytes)} back; device memory "
            f"{format_bytes(used)}, page-locked {format_bytes(pinned)}"
        )

    def tidy(self) -> None:
        """Give memory back before the next one measures."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()


def run(kind: str, size: Size, say: Callable[[str], None] = print) -> int:
    """Run everything there is time for; returns the exit status."""
    bench = Bench(kind, say)
    if kind == "cuda":
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    bench.parity()
    for dtype in (torch.bfloat16, torch.float32):
        bench.speed(size, dtype)
    say(f"{bench.seconds:.0f} s in all")
    return int(bench.wrong)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=("cuda", "twin"), default="cuda")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here")
        return 1
    small = TINY if given.device == "twin" else QUICK
    return run(given.device, small if given.quick else FULL)


if __name__ == "__main__":
    sys.exit(main())
