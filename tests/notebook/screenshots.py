"""Take the pictures of docs/images anew: ``python -m tests.notebook.screenshots docs/images``.

A small model trains in JupyterLab, in a real browser. Look at each picture: nothing else does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.notebook.browsing import (
    browsing,
    command,
    open_notebook,
    run_cell,
    serving,
    write_notebook,
)

SETUP = """\
%load_ext megatrain_nb
import tempfile, torch, transformers
import megatrain_nb as mt
from pydoc_data.topics import topics
from transformers import Trainer  # what is imported later counts as taken since the session opened
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
work = tempfile.mkdtemp()
session = mt.init(work + "/offload", max_ram_gb=0.4, device="cpu")
session.max_resident_bytes = 26_000_000
mt.probe()
config = transformers.LlamaConfig(hidden_size=192, intermediate_size=512, num_hidden_layers=22,
                                  num_attention_heads=4, vocab_size=256)
model = mt.from_config(config, transformers.AutoModelForCausalLM, seed=0)
text = list("".join(topics[name] for name in sorted(topics)).encode())
data = [dict(input_ids=text[i:i + 96], labels=text[i:i + 96]) for i in range(0, 96_000, 96)]
args = transformers.TrainingArguments(
    work + "/out", max_steps=400, per_device_train_batch_size=1, gradient_accumulation_steps=2, save_strategy="no",
    report_to=[], learning_rate=5e-4, warmup_steps=8, logging_steps=10, lr_scheduler_type="cosine", seed=0)
trainer = mt.Trainer(model=model, args=args, train_dataset=data)"""
TRAIN = """\
%%megatrain train
import time; time.sleep(4)  # read the data
trainer.train();"""
COMPUTES = "text=/^(forward|backward) of /"
# Neither the prompt nor the bar that marks the cell, nor a status bar over it, and no question about news.
STYLE = (
    ".jp-OutputPrompt, .jp-Collapser, #jp-main-statusbar { display: none !important }"
)
NO_NEWS = (
    "home/.jupyter/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings",
    '{"fetchNews": "false"}',
)
NUM_STEPS = 30  # before the first picture of training
# What is longer than a page is cut off.
WIDE, NARROW, LONG = (
    {"width": 1280, "height": 1300},
    {"width": 700, "height": 1900},
    {"width": 1280, "height": 2300},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, serving(Path(home)) as lab:
        write_notebook(Path(home, "view.ipynb"), SETUP, TRAIN)
        settings = Path(home, NO_NEWS[0])
        settings.parent.mkdir(parents=True)
        settings.write_text(NO_NEWS[1])
        with browsing() as browser:
            shoot_run(browser, lab, folder)
            saved = Path(home, "view.ipynb").read_text()
            assert "widgets" not in json.loads(saved)["metadata"]
            copy = saved.replace(
                "max_steps=400", "max_steps=401"
            )  # so it is not trusted
            Path(home, "copy.ipynb").write_text(copy)
            page = open_page(browser, lab, "copy.ipynb")
            page.set_viewport_size(LONG)
            page.locator("text=stopped, as asked").wait_for(timeout=20_000)
            shoot(page, folder / "reopened.png")


def shoot_run(browser: Any, lab: str, folder: Path) -> None:
    page = open_page(browser, lab, "view.ipynb")
    run_cell(page, 0)
    page.locator(".jp-CodeCell").nth(0).locator("text=/^\\[1\\]:$/").wait_for(
        timeout=300_000
    )
    run_cell(page, 1)
    page.locator("text=/^Starting$/").wait_for(timeout=20_000)
    page.wait_for_timeout(1_500)
    shoot(page, folder / "starting.png")
    page.locator(f"text=/^Step {NUM_STEPS} of 400$/").wait_for(timeout=300_000)
    shoot(page, folder / "live.png", busy=True)
    change_theme(page, "JupyterLab Dark")
    shoot(page, folder / "live-dark.png", busy=True)
    change_theme(page, "JupyterLab Light")
    page.set_viewport_size(NARROW)
    page.wait_for_timeout(3_000)
    shoot(page, folder / "narrow.png", busy=True)
    page.set_viewport_size(LONG)
    page.wait_for_timeout(2_000)
    page.get_by_role("button", name="Stop").click()
    page.locator("text=stopped, as asked").wait_for(timeout=20_000)
    shoot(page, folder / "final.png")
    command(page, "docmanager:save")
    page.wait_for_timeout(2_000)
    page.close()


def open_page(browser: Any, lab: str, name: str) -> Any:
    page = open_notebook(browser, lab, name)
    page.set_viewport_size(WIDE)
    page.add_style_tag(content=STYLE)
    command(page, "application:toggle-left-area")
    page.wait_for_timeout(1_000)
    return page


def change_theme(page: Any, theme: str) -> None:
    page.evaluate(
        "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
        theme,
    )
    page.wait_for_timeout(3_000)


def shoot(page: Any, path: Path, *, busy: bool = False) -> None:
    """Take a picture of the second cell's output; if ``busy``, one in which something computes."""
    output = page.locator(".jp-CodeCell").nth(1).locator(".jp-Cell-outputWrapper")
    output.scroll_into_view_if_needed()
    page.wait_for_timeout(1_500)  # charts are drawn late
    for _ in range(20 if busy else 1):
        before = output.locator(COMPUTES).count()
        output.screenshot(path=str(path))
        if before and output.locator(COMPUTES).count():
            break


if __name__ == "__main__":
    main()
