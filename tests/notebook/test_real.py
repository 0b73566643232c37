"""The magics over the real runtime, in a real kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.notebook.test_kernel import Kernel, is_view, of_type, stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETUP = """
import torch
import megatrain_nb as mt
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=2, vocab_size=64)
rows = [list(range(i, i + 16)) for i in range(32)]
data = [dict(input_ids=row, labels=row) for row in rows]
"""
TRAIN = """
model = AutoModelForCausalLM.from_config(config)
args = TrainingArguments("{out}", max_steps=100_000, per_device_train_batch_size=1,
                         save_strategy="no", report_to="none", disable_tqdm=False)
trainer = mt.Trainer(model=model, args=args, train_dataset=data)
trainer.train()
"""
AFTER = """
num_done = mt.current_session().last_step.step
trainer.args.max_steps = 3
_ = trainer.train()
(num_done, mt.current_session().last_step.step - num_done)
"""


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run("%load_ext megatrain_nb")
    yield kernel
    kernel.run("%megatrain close")
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
    kernel.manager.cleanup_resources()


@pytest.mark.slow
def test_train_interrupt_and_go_on(kernel: Kernel, tmp_path: Path) -> None:
    reply, _ = kernel.finish(kernel.start(SETUP), timeout=120)
    assert reply["status"] == "ok"
    kernel.run(f"%megatrain init --offload-dir {tmp_path}/o --max-ram 1GB --device cpu")

    body = TRAIN.format(out=tmp_path / "out")
    msg_id = kernel.start(f"%%megatrain{body}")
    kernel.until(
        msg_id, lambda m: is_view(m) and "tokens/s" in str(m["content"]), timeout=60
    )
    kernel.manager.interrupt_kernel()
    reply, messages = kernel.finish(msg_id, timeout=60)
    assert reply["ename"] == "Interrupted"
    told = reply["evalue"]
    # Only our view, and a chart if there were steps enough: transformers' own progress and log lines keep quiet.
    for chart in of_type(messages, "display_data"):
        assert chart["data"]["text/plain"].startswith("Chart of the run: ")
    assert "loss" not in stream(messages)
    last = [m["content"]["data"]["text/plain"] for m in messages if is_view(m)][-2:]
    assert any(" of 100000 (interrupted): loss " in text for text in last)

    reply, messages = kernel.finish(kernel.start(f"%%megatrain{AFTER}"), timeout=60)
    assert reply["status"] == "ok"
    result = of_type(messages, "execute_result")[0]["data"]["text/plain"]
    step = told.split()[-1]
    assert told == f"after step {step}: the model is as after step {step}"
    assert result == f"({step}, 3)"


PLAIN = """
model = AutoModelForCausalLM.from_config(config)
args = TrainingArguments("{out}", max_steps=4, per_device_train_batch_size=1, logging_steps=1,
                         save_strategy="no", report_to="none", disable_tqdm=False,
                         eval_strategy="steps", eval_steps=2)
trainer = mt.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data{more})
"""


@pytest.mark.slow
def test_a_plain_cell_shows_its_training(kernel: Kernel, tmp_path: Path) -> None:
    kernel.finish(kernel.start(SETUP), timeout=240)
    kernel.run(f"%megatrain init --offload-dir {tmp_path}/o --max-ram 1GB --device cpu")
    plain = PLAIN.format(out=tmp_path / "out", more="")
    assert kernel.run(plain)[0]["status"] == "ok"

    reply, messages = kernel.finish(kernel.start("trainer.train();"), timeout=240)
    assert reply["status"] == "ok"
    shown = [m["content"] for m in messages if is_view(m)]
    views = [c["data"]["text/plain"] for c in shown if "text/html" in c["data"]]
    assert any(text.startswith("Step 4 of 4 (done): loss ") for text in views)
    assert not any(text.startswith("<IPython") for text in views)  # transformers' own
    pages = [c["data"]["text/html"] for c in shown if "text/html" in c["data"]]
    assert any("Evaluation, loss" in html and "at step 4" in html for html in pages)
    _, messages = kernel.run(
        "import threading\n"
        "session = mt.current_session()\n"
        "[t.name for t in threading.enumerate() if t.name == 'megatrain-view'], "
        "session.callbacks, session.shown"
    )
    left = of_type(messages, "execute_result")[0]["data"]["text/plain"]
    assert left == "([], [], False)"

    quiet = "trainer.display = 'none'\ntrainer.train();"
    _, messages = kernel.finish(kernel.start(quiet), timeout=240)
    texts = [m["content"]["data"]["text/plain"] for m in messages if is_view(m)]
    assert not any(text.startswith("Step") for text in texts)

    # A cell that says how it is shown is obeyed by the Trainer in it.
    body = "%%megatrain train --display none\ntrainer.display = None\ntrainer.train();"
    _, messages = kernel.finish(kernel.start(body), timeout=240)
    texts = [m["content"]["data"]["text/plain"] for m in messages if is_view(m)]
    assert not any(text.startswith("Step") for text in texts)

    wrong = PLAIN.format(out=tmp_path / "out", more=", display='hologram'")
    reply, _ = kernel.finish(kernel.start(wrong), timeout=240)
    assert reply["ename"] == "ArgumentError"
    assert "use one of: auto, widget, html, text, none" in reply["evalue"]


@pytest.mark.slow
def test_lines_of_a_run_in_the_background_stay_in_its_cell(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.finish(kernel.start(SETUP), timeout=240)
    kernel.run(f"%megatrain init --offload-dir {tmp_path}/o --max-ram 1GB --device cpu")
    assert kernel.run(PLAIN.format(out=tmp_path / "out", more=""))[0]["status"] == "ok"
    start = "%%megatrain train --background --display text\nprint('from the body')\ntrainer.train();"
    msg_id = kernel.start(start)
    kernel.finish(msg_id)
    _, messages = kernel.finish(
        kernel.start("runs = %megatrain runs\nruns[1].wait()"), timeout=60
    )
    assert stream(messages) == ""
    assert [m for m in messages if is_view(m)] == []
