"""What lies beside a checkpoint's tiles, damaged by one who makes the checksums fit: our error, and nothing has changed.

``pytest tests/runtime/test_statecheck.py --cases 10000`` tries more.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime.runs import folder_of
from megatrain_nb.runtime.saved import read_state
from megatrain_nb.store.checkpoint import read_checkpoints
from tests.runtime.common import batch, differing, loss_of
from tests.runtime.models import make_model
from tests.runtime.test_checkpoint import Run, opened, seed_all, train
from tests.runtime.test_resume import made
from tests.store.test_checkpoint import make_checksum_fit
from tests.store.test_fuzz import cut, flip, replace_value

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATE, TENSORS = "state.json", "tensors.safetensors"


def taken_in(directory: Path, **case: Any) -> Path:
    """Train, and take a checkpoint; return the folder of its files."""
    seed_all(5)
    with opened(directory, "mixed") as session:
        train(Run(session, 0, groups=True, **case), 2)
        return session.save_checkpoint().folder


def change_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / STATE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    make_checksum_fit(path)


def change_header(data: bytes, change: Callable[[Any], Any]) -> bytes:
    """Change what a safetensors file says of its tensors."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def damage(folder: Path, dice: random.Random) -> None:
    def replaced(tree: Any) -> Any:
        for _ in range(dice.choice((1, 1, 2, 5))):
            tree = replace_value(tree, dice)
        return tree

    path = folder / dice.choice((STATE, STATE, TENSORS))
    data = path.read_bytes()
    kind = dice.random()
    if kind < 0.15:
        data = dice.choice((flip, cut))(data, dice)
    elif path.name == TENSORS and dice.random() < 0.5:
        end = 8 + int.from_bytes(data[:8], "little")
        data = data[:end] + flip(data[end:], dice)
    elif path.name == TENSORS:
        data = change_header(data, replaced)
    else:
        content = json.loads(data)
        # What an object of the user's takes is its own business.
        section = dice.choice(sorted(content.keys() - {"objects"}))
        if dice.random() < 0.05:
            content.pop(section)
        else:
            content[section] = replaced(content[section])
        data = json.dumps(content).encode()
    path.write_bytes(data)
    if dice.random() < 0.95:
        make_checksum_fit(path)


def outcome_of(session: mt.Session, run: Run, case: int) -> tuple[str, str]:
    """Go on from a damaged checkpoint, and train where that is taken."""
    try:
        session.resume()
    except mt.MegatrainError as error:
        return "refused", str(error)
    except Exception as error:  # whatever else it is, it is a fault
        return type(error).__name__, repr(error)
    try:
        loss_of(run.model, batch(case)).backward()
        run.optimizer.step()
        run.optimizer.finish()
    except mt.MegatrainError as error:  # a learning rate of 1e308
        return "taken", str(error)
    finally:
        run.optimizer.zero_grad()
    return "taken", "trained"


def test_random_damage(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A refusal leaves the model as it was; what is taken can be trained; and the sound checkpoint can be had again."""
    outcomes = {"taken": 0, "refused": 0}
    with opened(tmp_path, "mixed") as session:
        run = Run(session, 0, groups=True)
        train(run, 2)
        taken = session.save_checkpoint()
        expected = run.everything()
        sound = {path: path.read_bytes() for path in taken.folder.iterdir()}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in range(pytestconfig.getoption("--cases")):
            session.resume()
            damage(taken.folder, random.Random(case))
            outcome, text = outcome_of(session, run, case)
            assert outcome in outcomes, (case, outcome, text)
            assert 0 < len(text) < 3000, (case, text)
            outcomes[outcome] += 1
            if outcome == "refused" and case % 10 == 0:
                assert differing(run.everything(), expected) == [], case
            for path, data in sound.items():
                path.write_bytes(data)
        session.resume()
        assert differing(run.everything(), expected) == []
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200_000  # kB
    assert min(outcomes.values()) > sum(outcomes.values()) // 20, outcomes


def of_model(change: Callable[[dict[str, Any]], Any]) -> Any:
    return lambda content: change(content["models"][0])


# Changes, and what the user is told.
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no models": (lambda c: c.update(models=[]), "cannot be read"),
    "two models": (lambda c: c["models"].append({}), "cannot be read"),
    "a model that is a number": (lambda c: c.update(models=[7]), "cannot be read"),
    "objects as a list": (lambda c: c.update(objects=[]), "cannot be read"),
    "a word of numpy's far away": (
        lambda c: c["random"]["numpy"]["__tuple__"].__setitem__(2, 10**6),
        "numpy at word 1000000",
    ),
    "one tensor twice": (
        lambda c: c["random"].update(torch=c["random"]["numpy"]["__tuple__"][1]["__array__"]),
        "cannot be read",
    ),
    "no groups": (of_model(lambda s: s.pop("groups")), "parameter groups are none"),
    "groups as numbers": (of_model(lambda s: s.update(groups=[1, 2])), "are none"),
    "a rate that is a text": (of_model(lambda s: s["groups"][1].update(lr="x")), "settings of parameter group 1"),
    "a rate below zero": (of_model(lambda s: s["groups"][0].update(lr=-1.0)), "settings of parameter group 0"),
    "a beta of 2": (of_model(lambda s: s["groups"][0].update(betas=[2.0, 0.9])), "settings of parameter group 0"),
    "steps as a text": (of_model(lambda s: s.update(num_steps="2")), "has done '2' steps"),
    "steps of nobody": (of_model(lambda s: s["steps"].update(x=3)), "steps of 'x'"),
    "a moment less": (of_model(lambda s: s["moments"]["scale"].pop()), "moments of 'scale'"),
    "a parameter less": (of_model(lambda s: s["ordinary"].pop("scale")), "ordinary parameters are not"),
    "a buffer less": (of_model(lambda s: s["buffers"].pop("seen")), "buffers are not"),
    "a buffer of another shape": (of_model(lambda s: s["buffers"].update(seen=s["buffers"]["last"])), "cannot be read|buffers of 'seen'"),
    "no notes of codecs": (of_model(lambda s: s.pop("opaque")), "notes of codecs"),
    "a seed of no number": (of_model(lambda s: s.update(rounding_seed=2**200)), "seed of the rounding"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_each_thing_is_looked_at(tmp_path: Path, what: str) -> None:
    change, told = CHANGES[what]
    folder = taken_in(tmp_path)
    change_state(folder, change)
    with opened(tmp_path, "disk") as session:
        run = Run(session, 1, groups=True)
        train(run, 1)
        before = run.everything()
        with pytest.raises(mt.StoreError, match=told):
            session.resume()
        after = run.everything()
        assert differing(after, before | {"random": after["random"]}) == []
        train(run, 1)


@pytest.mark.parametrize("depth", [900, 100_000])
def test_nothing_is_too_deep(tmp_path: Path, depth: int) -> None:
    folder = taken_in(tmp_path)
    path = folder / STATE
    text = json.dumps(json.loads(path.read_text()) | {"identity": ["deep"]})
    path.write_text(text.replace('"deep"', "[" * depth + "]" * depth))
    make_checksum_fit(path)
    with opened(tmp_path, "disk") as session:
        Run(session, 1, groups=True)
        with pytest.raises((mt.StoreError, mt.ModelError)) as raised:
            session.resume()
        assert len(str(raised.value)) < 1500


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_tile_of_weights_that_is_missing(tmp_path: Path, weights_only: bool) -> None:
    """It would read as zeros."""
    path = taken_in(tmp_path) / "manifest.json"
    content = json.loads(path.read_text())
    name = next(x for x in content["tiles"] if x.startswith("0/weights/"))
    content["tiles"].pop(name)
    path.write_text(json.dumps(content))
    make_checksum_fit(path)
    with opened(tmp_path, "disk") as session:
        run = Run(session, 1, groups=True)
        before = run.everything()
        with pytest.raises(mt.StoreError, match=f"no tile '{name}'"):
            session.resume(weights_only=weights_only)
        after = run.everything()
        assert differing(after, before | {"random": after["random"]}) == []


@pytest.mark.parametrize("what", ["values", "tensors", "text", "numbers"])
def test_it_takes_no_more_ram_than_there_is(tmp_path: Path, what: str) -> None:
    folder = taken_in(tmp_path)
    most = 20_000_000
    if what == "tensors":
        path = folder / TENSORS
        many = {f"x{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}  # fmt: skip
        path.write_bytes(change_header(path.read_bytes(), lambda _: many))
    elif what == "numbers":
        path = folder / TENSORS
        path.write_bytes(path.read_bytes() + bytes(most))
    else:
        path = folder / STATE
        more = "[" + "[]," * 100_000 + "0]" if what == "values" else '"' + "a" * most + '"'  # fmt: skip
        path.write_text(path.read_text().replace("{", '{"more": ' + more + ", ", 1))
    make_checksum_fit(path)
    (checkpoint,) = read_checkpoints(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(mt.StoreError, match="max_ram_gb"):
            read_state(checkpoint, most_bytes=most)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_what_is_sound_takes_what_was_reckoned(tmp_path: Path) -> None:
    taken_in(tmp_path)
    (checkpoint,) = read_checkpoints(tmp_path)
    assert read_state(checkpoint, most_bytes=64 << 20).models
    with pytest.raises(mt.StoreError, match="max_ram_gb"):
        read_state(checkpoint, most_bytes=10_000)


def test_a_session_that_is_too_small_for_a_manifest(tmp_path: Path) -> None:
    """The directory stays as it is, and can be opened with more RAM."""
    path = taken_in(tmp_path) / "manifest.json"
    content = json.loads(path.read_text())
    tile = next(iter(content["tiles"].values()))
    content["tiles"] |= {f"1/x/{i}": tile for i in range(50_000)}
    path.write_text(json.dumps(content))
    make_checksum_fit(path)
    with pytest.raises(mt.StoreError, match=r"manifest\.json .* max_ram_gb"):
        mt.init(tmp_path, max_ram_gb=0.1)
    with opened(tmp_path, "disk", max_ram_gb=1.0) as session:
        assert len(session.checkpoints()[0].manifest.tiles) > 50_000


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(state="{"),
        lambda s: s.update(state="[" * 5000),
        lambda s: s.update(state=s["state"].replace('"global_step": 1', '"global_step": "x"')),
        lambda s: s.update(state=s["state"].replace('"max_steps"', '"most_steps"')),
        lambda s: s.update(seed="7"),
        lambda s: s.pop("loss"),
        lambda s: s.update(last_logged=None),
    ],
)  # fmt: skip
def test_the_trainers_own_state(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    args = {"max_steps": 2, "save_steps": 1, "gradient_accumulation_steps": 1}
    with opened(tmp_path / "s", "disk") as session:
        made(tmp_path / "a", make_model("llama"), args=args).train()
        (folder,) = [x.folder for x in session.checkpoints() if x.name.endswith("-1")]
        change_state(folder, lambda c: change(c["objects"]["trainer"]))
        trainer = made(tmp_path / "a", make_model("llama"), args=args)
        before = torch.get_rng_state()
        with pytest.raises(mt.StoreError, match="of the Trainer is damaged"):
            trainer.train(resume_from_checkpoint=str(folder_of(tmp_path / "a", 1)))
        assert torch.equal(torch.get_rng_state(), before)
        trainer.train(resume_from_checkpoint=True)
