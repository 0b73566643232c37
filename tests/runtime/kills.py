"""Kill a training process at random moments, let the next one go on, compare with a run that nobody disturbed.

``python -m tests.runtime.kills DIRECTORY --kills 200`` prints after each run what was hit so far. Every process is a fork of this one,
which has imported everything and opened nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import megatrain_nb as mt
from megatrain_nb.runtime.dcpread import Folder
from megatrain_nb.runtime.warmup import load_code
from tests.runtime.common import snapshot
from tests.runtime.models import make_model
from tests.runtime.test_checkpoint import Run, opened, seed_all
from tests.runtime.test_trainer import Rows, arguments, history

STEPS = 8
PLACES = ("ram", "disk", "mixed")
HOW = ("now and then", "every step", "trainer", "trainer, crash-safe")


Expected = tuple[dict[int, Any], str, set[str]]


class Log:
    """What a process says, so that it is known when it was killed and what it had computed."""

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(
            directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )

    def say(self, phase: str, **values: Any) -> None:
        text = json.dumps({"phase": phase} | values)
        os.write(self._fd, text.encode() + b"\n")


def digest(values: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(values.items()):
        found.update(name.encode())
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save(model: Any, folder: Path, dtype: torch.dtype, log: Log) -> None:
    """Save a model, and say before what should be in the folder then."""
    kept = model.state_dict().keys()
    values = {
        name: x.detach().clone().to(dtype) for name, x in model.named_parameters()
    }
    values |= {name: x for name, x in model.named_buffers() if name in kept}
    if hasattr(model, "config"):
        model.config.saved_as = str(dtype)
    log.say("save", saving=digest(values))
    mt.save_pretrained(model, folder, dtype=dtype)
    log.say("step", saved=True)


class Saves(transformers.TrainerCallback):
    """Saves after each step, in another dtype every time, so that config and weights change together."""

    def __init__(self, folder: Path, log: Log) -> None:
        self._folder, self._log = folder, log

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dtype = (torch.float32, torch.bfloat16)[state.global_step % 2]
        save(kwargs["model"], self._folder, dtype, self._log)


def train_loop(directory: Path, place: str, how: str, log: Log) -> None:
    seed_all(5)
    log.say("init")
    with opened(directory / "store", place) as session:
        log.say("load")
        run = Run(session, 0, window=True, accumulation=2)
        start = session.resume().step if session.checkpoints() else 0
        for step in range(start, STEPS):
            log.say("step")
            log.say("step", step=step, loss=run.step())
            if how == "every step" or step % 3 == 1:
                log.say("checkpoint")
                session.save_checkpoint("last")
            if how == "now and then":
                save(run.model, directory / "saved", torch.float32, log)
            if step == 4 and not (directory / "moved").exists():
                log.say("export")
                session.export_checkpoint("last", directory / "moved")
            if step == 5 and not (directory / "handed").exists():
                log.say("hand over")
                mt.export_distributed(directory / "handed")
        log.say("done", digest=digest(run.everything()))
        for each in session.checkpoints():
            session.remove_checkpoint(each.name)


def train_trainer(
    directory: Path, place: str, log: Log, crash_safe: str | None
) -> None:
    log.say("init")
    seed_all(5)
    with opened(directory / "store", place, crash_safe=crash_safe) as session:
        log.say("load")
        # From a folder chunk by chunk, or from RAM.
        source = directory.parent / "source"
        model: Any = (
            make_model("llama", dropout=0.1)
            if crash_safe
            else mt.from_pretrained(transformers.AutoModelForCausalLM, source)
        )
        trainer = mt.Trainer(
            model=model,
            args=arguments(
                directory / "out",
                max_steps=STEPS,
                gradient_accumulation_steps=2,
                save_strategy="steps",
                save_steps=3,
                save_total_limit=1,
                lr_scheduler_type="cosine",
            ),
            train_dataset=Rows(size=20),
            callbacks=[Saves(directory / "saved", log)],
        )
        log.say("step")
        try:
            trainer.train(resume_from_checkpoint=True)
        except mt.ArgumentError as error:
            if session.checkpoints() or "refers to no checkpoint" not in str(error):
                raise
            trainer.train()
        for index, entry in enumerate(history(trainer)[:-1]):
            log.say("step", step=index, loss=entry)
        log.say("done", digest=digest(snapshot(trainer.model, trainer.optimizer)))
        for each in session.checkpoints():
            session.remove_checkpoint(each.name)


def fork(directory: Path, place: str, how: str) -> int:
    """Start a process; it ends with 0 when its training is complete."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = Log(directory)
        if how.startswith("trainer"):
            crash_safe = "step" if "crash-safe" in how else None
            train_trainer(directory, place, log, crash_safe)
        else:
            train_loop(directory, place, how, log)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def entries(directory: Path) -> list[dict[str, Any]]:
    path = directory / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def undisturbed(directory: Path, place: str, how: str) -> Expected:
    """Return each step's loss, the digest of the end, and those of what was saved."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _, status = os.waitpid(fork(directory, place, how), 0)
    assert status == 0, (place, how)
    found = entries(directory)
    losses = {each["step"]: each["loss"] for each in found if "step" in each}
    saved = {each["saving"] for each in found if "saving" in each}
    check_saved(directory, found, saved)
    return losses, found[-1]["digest"], saved


def check_saved(directory: Path, found: list[dict[str, Any]], saved: set[str]) -> None:
    """Look at the saved folder as one who knows nothing of us: one whole save, from the first on."""
    folder = directory / "saved"
    weights, config = folder / "model.safetensors", folder / "config.json"
    if not any("saved" in each for each in found) and not weights.exists():
        return
    values = load_file(weights)
    assert digest(values) in saved, [each for each in found if "saving" in each][-2:]
    if config.exists():
        dtype = next(x.dtype for x in values.values() if x.is_floating_point())
        told = json.loads(config.read_text())["saved_as"]
        assert told == str(dtype), (told, dtype)


def check(directory: Path, found: list[dict[str, Any]], expected: Expected) -> int:
    """Compare what the processes said with an undisturbed run; return how many steps they computed."""
    losses, end, _ = expected
    steps = [each for each in found if "step" in each]
    for each in steps:
        assert each["loss"] == losses[each["step"]], each
    assert {each["step"] for each in steps} == losses.keys()
    assert found[-1]["digest"] == end
    left = list((directory / "store").iterdir())
    assert not left, left
    for name in ("moved", "handed"):  # whole, or only the beginning of one
        whole, begun = directory / name, directory / f".{name}.part"
        assert not (whole.exists() and begun.exists()), name
    if (directory / "handed").exists():
        Folder(directory / "handed")
    return len(steps)


def prepare(directory: Path) -> None:
    """Import what a fork would have to, and make the model that is loaded from a folder."""
    torch.set_num_threads(1)
    load_code()
    assert callable(mt.export_distributed)
    seed_all(5)
    make_model("llama", dropout=0.1).save_pretrained(directory / "source")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare(options.directory)
    dice = random.Random(options.seed)
    expected: dict[tuple[str, str], Expected] = {}
    seconds: dict[str, float] = {}
    hit: Counter[str] = Counter()
    runs = steps_again = 0
    while hit.total() < options.kills:
        how, place = HOW[runs % len(HOW)], PLACES[runs // len(HOW) % len(PLACES)]
        if (how, place) not in expected:
            begin = time.perf_counter()
            expected[how, place] = undisturbed(options.directory / "whole", place, how)
            seconds[how] = time.perf_counter() - begin
        directory = options.directory / "run"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        status = -1
        while status:
            pid = fork(directory, place, how)
            time.sleep(dice.random() * 1.1 * seconds[how])
            if hit.total() < options.kills:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            found = entries(directory)
            if status == signal.SIGKILL:
                hit[found[-1]["phase"] if found else "start"] += 1
            assert status in (0, signal.SIGKILL), (how, place, status, found[-3:])
            check_saved(directory, found, expected[how, place][2])
        steps_again += check(directory, found, expected[how, place]) - STEPS
        runs += 1
        report = {"kills": hit.total(), "runs": runs, "hit while": dict(hit)}
        again = {"steps computed again": steps_again}
        print(json.dumps(report | again), flush=True)


if __name__ == "__main__":
    main()
