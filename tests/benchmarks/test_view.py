"""What the view costs: time of one drawing, and of a step with the view over one without, interleaved."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

import megatrain_nb as mt
from megatrain_nb.notebook.render import page
from megatrain_nb.notebook.view import View, Watch
from megatrain_nb.runtime.recorder import Recorder
from tests.notebook.test_kernel import Kernel, of_type
from tests.notebook.test_pictures import full_snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain_nb.notebook.snapshot import Snapshot

MAX_DRAW_S = {80: 3e-3, 200: 8e-3}
MAX_RATIO = 1.01
PAIRS = 8


@pytest.mark.parametrize("blocks", MAX_DRAW_S)
@pytest.mark.usefixtures("benchmarking")
def test_drawing(blocks: int) -> None:
    """CPU time of building the page."""
    snap = full_snapshot(blocks, count=64)
    taken = []
    for _ in range(50):
        begin = time.thread_time()
        html = page(snap)
        taken.append(time.thread_time() - begin)
    print(
        f"\none drawing, {blocks} blocks, 64 steps: {median(taken) * 1e3:.2f} ms of CPU, "
        f"{len(html) / 1e3:.0f} kB"
    )
    assert median(taken) <= MAX_DRAW_S[blocks]


REDRAW = """
import time
from megatrain_nb.notebook.buttons import Subshells
from megatrain_nb.notebook.snapshot import Snapshot, fill
from megatrain_nb.notebook.surface import WidgetSurface
from megatrain_nb.notebook.view import Watch
from megatrain_nb.runtime.recorder import Recorder
from tests.notebook.test_pictures import full_snapshot

def redraw(blocks, count=60, draws=True):
    drawn, recorder = full_snapshot(blocks, count=64), Recorder()
    recorder.on_layout(drawn.layout)
    for row in drawn.rows:
        recorder.add(row)
    surface = WidgetSurface(Watch(shown=True), Subshells(get_ipython()))
    surface._panel.answered = True  # as a frontend does
    begin = time.process_time()
    for index in range(count):
        if draws:
            snap = fill(Snapshot(state="training", elapsed_s=index), recorder)
            surface.show(snap)
        time.sleep(0.02)
    took = time.process_time() - begin
    surface.clear()
    return took / count
"""


@pytest.mark.usefixtures("benchmarking")
def test_redrawing_in_a_kernel() -> None:
    """CPU time of the whole kernel for one redraw: the numbers, the page, the widget, its message on the wire."""
    kernel = Kernel()
    took = {}
    try:
        kernel.run(REDRAW)
        for blocks in MAX_DRAW_S:
            kernel.run(f"redraw({blocks})")
            code = f"redraw({blocks}) - redraw({blocks}, draws=False)"
            _, messages = kernel.run(code)
            result = of_type(messages, "execute_result")[0]["data"]["text/plain"]
            took[blocks] = float(result)
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)
        kernel.manager.cleanup_resources()
    for blocks, seconds in took.items():
        print(
            f"\none redraw in a kernel, {blocks} blocks: {seconds * 1e3:.2f} ms of CPU"
        )
    assert all(seconds <= MAX_DRAW_S[blocks] for blocks, seconds in took.items())


class Surface:
    """Draws as the widget does, without a frontend."""

    period_s = 0.25

    def __init__(self) -> None:
        self.drawn = 0

    def show(self, snap: Snapshot) -> None:
        page(snap)
        self.drawn += 1

    finish = show

    def clear(self) -> None:
        self.drawn = 0


@pytest.mark.usefixtures("benchmarking")
def test_overhead(tmp_path: Path) -> None:
    """CPU seconds of a step with recorder and view over those without, alternating in one process."""
    config = transformers.LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4, vocab_size=512,
    )  # fmt: skip
    with mt.init(tmp_path, max_ram_gb=2, device="cpu") as session:
        session.max_resident_bytes = 15_000_000
        model = mt.from_config(config, transformers.AutoModelForCausalLM, seed=0)
        model, optimizer = mt.wrap(model, lr=1e-4)
        ids = torch.randint(0, 512, (1, 128))
        batch = {"input_ids": ids, "labels": ids}

        def steps(count: int, view: View | None) -> tuple[float, float]:
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                mt.train_step(model, optimizer, [batch, batch])
                if view is not None:
                    view.refresh()
            return time.perf_counter() - begin, time.process_time() - cpu

        steps(3, None)
        surface, watch = Surface(), Watch(shown=True)
        view = View(watch, lambda: surface)
        ratios, walls = [], []
        for _ in range(PAIRS):
            watch.follow(None)
            without = steps(1, None)
            watch.follow(session)
            with_view = steps(1, view)
            ratios.append(with_view[1] / without[1])
            walls.append(with_view[0] / without[0])
        watch.follow(None)
    recorder = Recorder()
    spans = watch.recorder.last_spans() if watch.recorder else []
    begin = time.thread_time()
    for span in spans:
        recorder.on_span(span)
    each = (time.thread_time() - begin) / max(len(spans), 1)
    print(
        f"\nstep with the view over without, {PAIRS} pairs: CPU {median(ratios):.3f}, wall {median(walls):.3f} "
        f"(at most {MAX_RATIO}); {surface.drawn} drawings; {each * 1e6:.1f} us a span, "
        f"{len(spans) / PAIRS:.0f} spans a step"
    )
    assert surface.drawn > 0
    assert min(median(ratios), median(walls)) <= MAX_RATIO
