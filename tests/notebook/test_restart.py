"""A kernel that is restarted, or interrupted, in a real kernel: the run goes on with the bits of one that was not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.notebook.test_kernel import Kernel, of_type, stream
from tests.notebook.test_real import SETUP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAKE = """
torch.manual_seed(0)
config.attention_dropout = 0.1
model, optimizer = mt.wrap(AutoModelForCausalLM.from_config(config), lr=1e-2)
model.train()
session = mt.current_session()

def step(number):
    batch = dict(input_ids=torch.tensor(rows[number : number + 2]), labels=torch.tensor(rows[number : number + 2]))
    return mt.train_step(model, optimizer, [batch]).loss.hex()
"""
# Slow enough to be interrupted.
TRAINER = """
import hashlib, time, transformers

class Slowly(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(seconds)

def trainer_in(out, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    given = dict(max_steps=24, per_device_train_batch_size=1, save_steps=4, save_total_limit=2, report_to="none",
                 learning_rate=1e-2, lr_scheduler_type="cosine", logging_steps=4) | changes
    return mt.Trainer(model=model, args=TrainingArguments(out, **given), train_dataset=data, callbacks=[Slowly()])

def end_of(trainer):
    bits = b"".join(p.detach().clone().numpy().tobytes() for p in trainer.model.parameters())
    return hashlib.sha256(bits).hexdigest(), [x.get("loss") for x in trainer.state.log_history]
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """With a profile of its own: what ``%megatrain resume`` remembers is kept there."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "profile"))
    kernel = Kernel()
    yield kernel
    run(kernel, "%megatrain close")
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
    kernel.manager.cleanup_resources()


def run(kernel: Kernel, code: str) -> tuple[str, str]:
    """Return what a cell printed and its value."""
    reply, messages = kernel.finish(kernel.start(code), timeout=240)
    assert reply["status"] == "ok", reply
    values = of_type(messages, "execute_result")
    value = values[0]["data"]["text/plain"] if values else ""
    return stream(messages), " ".join(value.split())  # wide ones come in lines


@pytest.mark.slow
def test_resume_after_a_restart(kernel: Kernel, tmp_path: Path) -> None:
    run(kernel, f"%load_ext megatrain_nb\n{SETUP}")
    given = "--max-ram 1GB --device cpu --crash-safe step --compress 8bit"
    run(kernel, f"%megatrain init --offload-dir {tmp_path}/o {given};")
    run(kernel, MAKE)
    _, losses = run(
        kernel,
        "[step(i) for i in range(3)], session.save_checkpoint() and [step(i) for i in range(3, 6)]",
    )
    kernel.manager.restart_kernel(now=True)  # kills it
    kernel.client.wait_for_ready(timeout=240)

    told, _ = run(kernel, f"%load_ext megatrain_nb\n{SETUP}\n%megatrain resume;")
    assert (
        f"session in {tmp_path}/o opened again; last checkpoint: 'step-3', step 3, saved"
        in told
    )
    assert "Run the cells that make the model" in told
    _, value = run(
        kernel,
        "s = mt.current_session()\ns.crash_safe, s.max_ram_bytes, s.compression.rules[0][1], s.notes[-1]",
    )
    assert value.startswith("('step', 1000000000, '8bit', ")
    assert "the process that died here had done 3 more steps, which are lost" in value
    run(kernel, f"{MAKE}\nx = %megatrain resume")
    _, value = run(kernel, "x.step, [step(i) for i in range(3, 6)]")
    assert value == f"(3, {losses[losses.index('], [') + 3 : -1]})"


@pytest.mark.slow
def test_interrupt_then_resume_from_checkpoint(kernel: Kernel, tmp_path: Path) -> None:
    run(kernel, f"%load_ext megatrain_nb\n{SETUP}\n{TRAINER}")
    run(
        kernel, f"%megatrain init --offload-dir {tmp_path}/o --max-ram 1GB --device cpu"
    )
    whole = f"seconds = 0\ntrainer = trainer_in('{tmp_path}/whole')\ntrainer.train()\nend_of(trainer)"
    _, expected = run(kernel, whole)
    run(
        kernel, f"%megatrain init --offload-dir {tmp_path}/p --max-ram 1GB --device cpu"
    )
    run(kernel, f"seconds = 0.2\ntrainer = trainer_in('{tmp_path}/out')")
    msg_id = kernel.start("%%megatrain\ntrainer.train()")
    deadline = time.monotonic() + 240
    while not (tmp_path / "out" / "checkpoint-8").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kernel.manager.interrupt_kernel()
    reply, _ = kernel.finish(msg_id, timeout=60)
    assert reply["ename"] == "Interrupted"
    _, value = run(
        kernel,
        "seconds = 0\n_ = trainer.train(resume_from_checkpoint=True)\nend_of(trainer)",
    )
    assert value == expected
