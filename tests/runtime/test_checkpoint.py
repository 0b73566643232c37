"""N steps are k steps, a checkpoint, a new session, and N - k steps: bit for bit."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import megatrain_nb as mt
from megatrain_nb.runtime.offload import offload
from megatrain_nb.runtime.piece import What
from megatrain_nb.store.tilefile import TileFile
from tests.runtime.common import (
    VOCABULARY,
    WIDTH,
    TinyLM,
    batch,
    differing,
    loss_of,
    report_of,
    seeded,
    set_tile_numel,
    snapshot,
)
from tests.runtime.models import covering

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PLACES = {"ram": None, "disk": 0, "mixed": 80_000}


class Odd(TinyLM):
    """With dropout, a parameter beside the blocks, buffers of both kinds, and a count that forward moves."""

    layers: Any
    scale: nn.Parameter
    seen: torch.Tensor
    last: torch.Tensor

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(tied=True)
        self.drop = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))
        self.layers[1].up.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
            self.last = torch.full((1 + int(self.seen) % 3,), float(self.seen))
        logits: torch.Tensor = self.drop(super().forward(ids)) * self.scale
        return logits


class Run:
    """A model, its optimizer, a scheduler and shuffled data, in the open session."""

    def __init__(self, session: mt.Session, seed: int, **case: Any) -> None:
        self.case = case
        torch.manual_seed(seed)
        made = Odd()
        # A parameter beside the blocks has no master in bf16, so it is frozen there.
        if case.get("dtype"):
            made.scale.requires_grad_(False)
        plain = [p for p in made.parameters() if p.requires_grad]
        given: Any = None
        if case.get("groups"):
            sizes = [p for p in plain if p.dim() > 1], [p for p in plain if p.dim() < 2]
            decays = (0.1, 0.0)
            given = torch.optim.AdamW(
                [
                    {"params": part, "weight_decay": decay}
                    for part, decay in zip(sizes, decays, strict=True)
                ],
                lr=1e-2,
            )
        self.model: Any
        self.model, self.optimizer = mt.wrap(
            made, given, dtype=case.get("dtype"), max_grad_norm=0.5
        )
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 6),
            ],
            [2],
        )
        self.order = torch.Generator().manual_seed(seed)
        session.register(scheduler=self.scheduler, order=self.order)

    def step(self) -> float:
        count = self.case.get("accumulation", 1)
        numbers = torch.randint(0, 99, (count,), generator=self.order).tolist()
        random.random()
        np.random.rand()  # noqa: NPY002 - the global state is what counts
        window = [{"ids": batch(number)} for number in numbers]
        if self.case.get("window"):
            loss = mt.train_step(
                self.model,
                self.optimizer,
                window,
                lambda model, each: loss_of(model, each["ids"]) / count,
            ).loss
        else:
            loss = 0.0
            for each in window:
                part = loss_of(self.model, each["ids"]) / count
                part.backward()
                loss += float(part.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def everything(self) -> dict[str, torch.Tensor]:
        found = snapshot(self.model, self.optimizer)
        for name, param in self.model.named_parameters():
            source = getattr(param, "_source", None)
            if source is not None and hasattr(source, "master"):
                with source.master().opened(write=False) as values:
                    found[f"{name}:master"] = values.clone()
        for name, buffer in self.model.named_buffers():
            found[name] = buffer.clone()
        for index, group in enumerate(self.optimizer.param_groups):
            found[f"lr {index}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        found["order"] = self.order.get_state()
        found["torch"] = torch.get_rng_state()
        found["random"] = torch.tensor([random.random(), np.random.rand()])  # noqa: NPY002
        return found


@contextmanager
def opened(
    directory: Path,
    place: str = "disk",
    tile_numel: int = 1024,
    places: Mapping[str, int | None] = PLACES,
    **kwargs: Any,
) -> Iterator[mt.Session]:
    """A session with small tiles."""
    with pytest.MonkeyPatch.context() as patch:
        set_tile_numel(patch, tile_numel)
        with mt.init(directory, **({"max_ram_gb": 0.5} | kwargs)) as session:
            session.max_resident_bytes = places[place]
            yield session


def train(run: Run, count: int) -> list[float]:
    return [run.step() for _ in range(count)]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


FACTORS: dict[str, tuple[Any, ...]] = {
    "accumulation": (1, 3),
    "dtype": (None, torch.bfloat16),
    "groups": (False, True),
    "window": (False, True),
    "before": ("ram", "disk", "mixed"),
    "after": ("ram", "disk", "mixed"),
}


@pytest.mark.parametrize("case", covering(2, 1, FACTORS), ids=str)
def test_a_run_that_goes_on_is_the_same_run(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    seed_all(5)
    with opened(tmp_path / "a", case["before"]) as session:
        run = Run(session, 0, **case)
        losses = train(run, 6)
        expected = run.everything()
    seed_all(5)
    with opened(tmp_path / "b", case["before"]) as session:
        run = Run(session, 0, **case)
        assert train(run, 3) == losses[:3]
        taken = session.save_checkpoint()
        assert train(run, 1) == losses[3:4]
    seed_all(6)
    with opened(tmp_path / "b", case["after"], max_ram_gb=0.7) as session:
        run = Run(session, 1, **case)
        train(run, 2)
        found = session.resume()
        assert (found.name, found.step, found.time) == (
            "step-3",
            3,
            taken.time.replace(microsecond=0),
        )
        assert train(run, 3) == losses[3:]
        assert differing(run.everything(), expected) == []
        session.remove_checkpoint("step-3")
    assert list((tmp_path / "b").iterdir()) == []


def test_back_and_forth_in_one_session(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        run = Run(session, 0)
        train(run, 1)
        session.save_checkpoint("one")
        first = run.everything()
        seed_all(3)
        after = train(run, 2)
        session.save_checkpoint("three")
        session.resume("one")
        assert differing(run.everything(), first) == []
        session.resume("one")
        seed_all(3)
        assert train(run, 2) == after
        session.resume()
        assert run.optimizer.param_groups[0]["lr"] == run.scheduler.get_last_lr()[0]
        assert [each.name for each in session.checkpoints()] == ["one", "three"]


def test_the_weights_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        run = Run(session, 0, dtype=torch.bfloat16)
        train(run, 2)
        session.save_checkpoint()
        before = run.everything()
        train(run, 2)
        later = run.everything()
        session.resume("step-2", weights_only=True)
        now = run.everything()
        weights = {name for name, _ in run.model.named_parameters()}
        weights |= {f"{name}:master" for name in weights}
        weights |= {name for name, _ in run.model.named_buffers()}
        for key in before:
            if key in weights:
                assert torch.equal(now[key], before[key]), key
            elif key != "random":
                assert torch.equal(now[key], later[key]), key
        assert session.status().models[0].num_steps == 4


def test_it_costs_nothing_that_is_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path, "disk") as session:
        run = Run(session, 0)
        train(run, 2)
        run.optimizer.finish()
        before = session.store.written_bytes, session.store.read_bytes
        taken = session.save_checkpoint()
        assert (session.store.written_bytes, session.store.read_bytes) == before
        pager = run.model._megatrain.pager
        written = [
            piece
            for piece in pager.kept_pieces()
            if not pager.is_blank(piece.pack.index, piece.what)
        ]
        assert taken.num_bytes == sum(piece.num_bytes for piece in written)
        begin = time.perf_counter()
        session.resume()
        session.save_checkpoint("again")
        assert time.perf_counter() - begin < 5
        assert session.store.written_bytes == before[0]
        assert session.store.pinned_bytes() == taken.num_bytes


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(tmp_path / "new" / "store", "mixed") as session:
            train(Run(session, 0), 2)
            session.save_checkpoint()
            session.export_checkpoint(None, tmp_path / "moved")
            found = [tmp_path / "new", tmp_path / "moved"]
            found += [inner for each in found for inner in each.rglob("*")]
            modes = {path: path.lstat().st_mode for path in found}
    finally:
        os.umask(before)
    names = {path.name for path in found}
    assert names >= {"owner.lock", "tiles.bin", "state.json", "checksums"}
    for path, mode in modes.items():
        allowed = 0o700 if stat.S_ISDIR(mode) else 0o600
        assert stat.S_IMODE(mode) == allowed, path


@pytest.mark.parametrize("place", ["disk", "mixed"])
def test_a_run_that_begins_again_reuses_the_space(tmp_path: Path, place: str) -> None:
    """The same names, and no more bytes, however often a cell runs again in a directory with a checkpoint."""
    sizes = []
    for _ in range(6):
        with opened(tmp_path, place) as session:
            train(Run(session, 0), 2)
            session.save_checkpoint("last")
        sizes.append((tmp_path / "tiles.bin").stat().st_size)
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "tiles.bin"}  # fmt: skip
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert max(sizes) <= 3 * sizes[0], (
        sizes
    )  # the old version, the new one, and what is on its way


def test_names_and_how_many(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        run = Run(session, 0)
        for _ in range(4):
            train(run, 1)
            session.save_checkpoint(keep=2)
        assert [each.step for each in session.checkpoints()] == [3, 4]
        train(run, 1)
        session.save_checkpoint("step-3")
        assert [each.name for each in session.checkpoints()] == ["step-4", "step-3"]
        assert session.resume("step-3").step == 5
        session.save_checkpoint("only", keep=1)
        assert [each.name for each in session.checkpoints()] == ["only"]
        for keep in (0, True, 1.5):
            with pytest.raises(mt.ArgumentError, match="keep="):
                session.save_checkpoint(keep=keep)  # type: ignore[arg-type]
        with pytest.raises(mt.ArgumentError, match="name="):
            session.save_checkpoint("")
        for use in (session.resume, session.remove_checkpoint):
            with pytest.raises(mt.ArgumentError, match=r"no checkpoint 'x'.*'only'"):
                use("x")
    with opened(tmp_path) as session:
        assert "holds a checkpoint: 'only', step 5" in session.notes[-1]
        session.remove_checkpoint("only")
    assert list(tmp_path.iterdir()) == []


def test_out_of_one_directory_and_into_another(tmp_path: Path) -> None:
    with opened(tmp_path / "a", "ram") as session:
        run = Run(session, 0)
        train(run, 2)
        session.save_checkpoint("mine")
        expected = run.everything()
        folder = session.export_checkpoint("mine", tmp_path / "moved")
    shutil.rmtree(tmp_path / "a")
    with opened(tmp_path / "b") as session:
        assert session.import_checkpoint(folder, "yours").name == "yours"
        session.import_checkpoint(str(folder), "yours")
        assert len(session.checkpoints()) == 1
        run = Run(session, 1)
        session.resume("yours")
        assert differing(run.everything(), expected) == []
    with opened(tmp_path / "moved") as session:
        run = Run(session, 1)
        session.resume()
        assert differing(run.everything(), expected) == []


def test_two_models(tmp_path: Path) -> None:
    def make(session: mt.Session, seed: int) -> list[Any]:
        return [mt.wrap(seeded(TinyLM, seed + i)) for i in range(2)]

    def step(pairs: list[Any]) -> None:
        for model, optimizer in pairs:
            loss_of(model, batch(0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with opened(tmp_path) as session:
        pairs = make(session, 0)
        step(pairs)
        session.save_checkpoint()
        step(pairs)
        expected = [snapshot(*pair) for pair in pairs]
    with opened(tmp_path) as session:
        pairs = make(session, 5)[:1]
        pairs.append(mt.wrap(seeded(TinyLM, 9)))
        # The model of the pair that was dropped has left, so there are two again.
        session.resume()
        step(pairs)
        assert [
            differing(a, snapshot(*b)) for a, b in zip(expected, pairs, strict=True)
        ] == [[], []]


def test_what_codecs_note_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        run = Run(session, 0)
        run.model._megatrain.pager.opaque["layers.0"] = {"seed": 7, "scale": [1.5]}
        session.save_checkpoint()
    with opened(tmp_path) as session:
        run = Run(session, 0)
        session.resume()
        opaque = run.model._megatrain.pager.opaque
        assert opaque == {"layers.0": {"seed": 7, "scale": [1.5]}}


# -- what is refused --------------------------------------------------------------------------------------


def other_width() -> nn.Module:
    model = TinyLM()
    model.head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)
    return model


OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "more layers": (
        lambda: TinyLM(num_layers=4),
        {},
        r"blocks, layers\.3.* is not in the check",
    ),
    "fewer layers": (lambda: TinyLM(num_layers=2), {}, r"layers\.2.* is missing here"),
    "shape": (other_width, {}, r"head.weight, shape\[0\] is 31 .* 32 here"),
    "dtype": (
        TinyLM,
        {"dtype": torch.bfloat16},
        r"computes in is 'float32' in .* 'bfloat16'",
    ),
    "tied": (lambda: TinyLM(tied=True), {}, r"blocks, head\[0\] is 'head' .* 'embed'"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused_by_its_first_difference(
    tmp_path: Path, other: str
) -> None:
    make, kwargs, match = OTHERS[other]
    with opened(tmp_path) as session:
        mt.wrap(seeded(TinyLM))
        session.save_checkpoint()
    with opened(tmp_path) as session:
        model, optimizer = mt.wrap(seeded(make, 3), **kwargs)
        before = snapshot(model, optimizer)
        with pytest.raises(mt.ModelError, match=match):
            session.resume()
        assert differing(snapshot(model, optimizer), before) == []


def test_other_groups_and_objects_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        run = Run(session, 0)
        train(run, 1)
        session.save_checkpoint()
    with opened(tmp_path) as session:
        run = Run(session, 0, groups=True)
        before = run.everything()
        with pytest.raises(mt.ModelError, match="parameter groups"):
            session.resume()
        session.register(order=None)
        with pytest.raises(mt.ArgumentError, match=r"session\.register\(order="):
            session.resume()
        session.register(order=run.order, more=run.order)
        with pytest.raises(mt.ArgumentError, match="has no state of more"):
            session.resume()
        with pytest.raises(mt.ArgumentError, match="neither state_dict"):
            session.register(data=[1])
        after = run.everything()
        assert differing(after, before | {"random": after["random"]}) == []


def test_an_optimizer_must_be_made_first(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        model, _ = mt.wrap(seeded(TinyLM))
        session.save_checkpoint()
        expected = snapshot(model)
    with opened(tmp_path) as session:
        with pytest.raises(mt.SessionError, match="no model"):
            session.resume()
        model = seeded(TinyLM, 4)
        offload(model, session)
        with pytest.raises(mt.ModelError, match="holds the state of an optimizer"):
            session.resume()
        session.resume(weights_only=True)
        assert differing(snapshot(model), expected) == []


def test_not_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        model, optimizer = mt.wrap(seeded(TinyLM))
        loss_of(model, batch(0)).backward()
        with pytest.raises(mt.SessionError, match="in the middle of step 1"):
            session.save_checkpoint()
        optimizer.step()
        session.save_checkpoint()  # before zero_grad is fine: these gradients were used
        optimizer.zero_grad()
        session.save_checkpoint()
        loss_of(model, batch(0)).backward()
        session.resume()  # what was pending is dropped
        assert all(param.grad is None for param in model.parameters())
        assert session.checkpoints()[-1].step == 1


def test_without_a_session_or_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        with pytest.raises(mt.SessionError, match="no model"):
            session.save_checkpoint()
        mt.wrap(seeded(TinyLM))
        with pytest.raises(mt.ArgumentError, match=r"no checkpoint in .*there: none"):
            session.resume()
    with pytest.raises(mt.SessionError, match="closed"):
        session.save_checkpoint()


def test_a_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    class Strange:
        def state_dict(self) -> Any:
            return {"a": [1, {"b": object()}]}

        def load_state_dict(self, state: Any) -> None: ...

    with opened(tmp_path) as session:
        mt.wrap(seeded(TinyLM))
        session.register(data=Strange())
        with pytest.raises(mt.ArgumentError, match=r"data\['a'\]\[1\]\['b'\] is a obj"):
            session.save_checkpoint()
        assert session.checkpoints() == []
        assert session.store.pinned_bytes() == 0


def test_what_fails_half_way_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "no more")

    with opened(tmp_path) as session:
        run = Run(session, 0)
        train(run, 1)
        session.save_checkpoint()
        with monkeypatch.context() as patch:
            patch.setattr(session.store, "restore", fails)
            with pytest.raises(OSError, match="no more"):
                session.resume()
        with pytest.raises(mt.StoreError, match="failed half-way"):
            train(run, 1)
    with opened(tmp_path) as session:
        run = Run(session, 0)
        session.resume(weights_only=True)
        train(run, 1)


def test_an_object_that_refuses_its_state(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise KeyError(state)

    with opened(tmp_path) as session:
        run = Run(session, 0)
        session.register(data=Refuses())
        train(run, 1)
        session.save_checkpoint()
        train(run, 1)
        before = snapshot(run.model, run.optimizer)
        with pytest.raises(mt.StoreError, match="data does not take the state"):
            session.resume()
        assert differing(snapshot(run.model, run.optimizer), before) == []
        train(run, 1)


# -- room and faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_room_is_checked_before(tmp_path: Path, place: str) -> None:
    def make() -> TinyLM:
        return TinyLM(num_layers=40)

    with opened(tmp_path / "a", place, 4096) as session:
        torch.manual_seed(0)
        model, optimizer = mt.wrap(make())
        ids = batch(0)
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = session.save_checkpoint().num_bytes
        running = session.store.used_bytes
    # Enough to run, and for one checkpoint beside the run, but not for two.
    budget = (2.9 if place == "disk" else 1.5) * whole
    assert running >= whole
    with opened(tmp_path / "b", place, 4096, max_disk_gb=budget / 1e9) as session:
        model, optimizer = mt.wrap(make())

        def step() -> None:
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        session.save_checkpoint("a")
        step()
        before = snapshot(model, optimizer)
        with pytest.raises(mt.BudgetError, match=r"a checkpoint keeps .* MB .* needed"):
            session.save_checkpoint("b")
        assert [each.name for each in session.checkpoints()] == ["a"]
        assert differing(snapshot(model, optimizer), before) == []
        for _ in range(2):
            step()
        session.remove_checkpoint("a")
        session.save_checkpoint("c")
        step()
        optimizer.finish()
        session.resume()
        assert session.store.peak_bytes <= budget + 1


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("fault", ["write", "sync", "folder"])
def test_a_failed_checkpoint_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, fault: str
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    where: dict[str, tuple[Any, str]] = {
        "write": (os, "pwritev"),
        "sync": (os, "fsync"),
        "folder": (os, "fdopen"),
    }
    with opened(tmp_path, place) as session:
        run = Run(session, 0)
        train(run, 1)
        run.optimizer.finish()
        first = session.save_checkpoint("first")
        train(run, 1)
        run.optimizer.finish()
        before = run.everything()
        with monkeypatch.context() as patch:
            patch.setattr(*where[fault], fails)
            if (place, fault) == ("disk", "write"):
                session.save_checkpoint()  # nothing to write
                session.remove_checkpoint("step-2")
            else:
                with pytest.raises(mt.StoreError, match="Input/output error"):
                    session.save_checkpoint()
        assert [each.name for each in session.checkpoints()] == ["first"]
        assert session.store.pinned_bytes() == first.num_bytes
        after = run.everything()
        assert differing(after, before | {"random": after["random"]}) == []
        train(run, 1)
        session.save_checkpoint("third")
        session.resume("third")


def test_a_damaged_tile_is_found_when_it_is_read(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        run = Run(session, 0)
        train(run, 1)
        taken = session.save_checkpoint()
    tile = taken.manifest.tiles["0/exp_avg/0/0"]
    with (tmp_path / "tiles.bin").open("r+b") as file:
        file.seek(tile.offset + 17)
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    with opened(tmp_path) as session:
        run = Run(session, 0)
        session.resume()
        with pytest.raises(mt.ChecksumError, match="exp_avg"):
            train(run, 2)


def test_tiles_of_a_checkpoint_are_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    write = TileFile.write

    def noted(self: TileFile, offset: int, data: Any) -> None:
        if self.path.name == "tiles.bin":  # and not the probe's file
            ranges.append((offset, offset + data.nbytes))
        write(self, offset, data)

    monkeypatch.setattr(TileFile, "write", noted)
    with opened(tmp_path) as session:
        run = Run(session, 0)
        train(run, 2)
        taken = session.save_checkpoint()
        ranges.clear()
        train(run, 3)
        run.optimizer.finish()
    with opened(tmp_path, "mixed") as session:
        run = Run(session, 0)
        session.resume()
        train(run, 2)
        run.optimizer.finish()
    assert len(ranges) > 100
    for tile in taken.manifest.tiles.values():
        start, stop = tile.offset, tile.offset + tile.extent_bytes
        assert not any(a < stop and b > start for a, b in ranges)


# -- the process dies -------------------------------------------------------------------------------------

KILLED = """
import json, os, sys
from pathlib import Path
import torch
import megatrain_nb as mt
from tests.runtime.test_checkpoint import Run, opened, seed_all, train

torch.set_num_threads(1)
with opened(Path(sys.argv[1])) as session:
    seed_all(int(sys.argv[2]))
    run = Run(session, int(sys.argv[2]))
    losses = []
    if sys.argv[3] == "resume":
        losses.append(session.notes[-1])
        session.resume()
        losses += train(run, 3)
        session.remove_checkpoint("two")
    elif sys.argv[3] == "die":
        losses += train(run, 2)
        session.save_checkpoint("two")
        losses += train(run, 2)
        print(json.dumps(losses), flush=True)
        os.kill(os.getpid(), 9)
    else:
        losses += train(run, 5)
    print(json.dumps(losses))
"""


@pytest.mark.slow
def test_after_kill_9_another_process_goes_on(tmp_path: Path) -> None:
    whole = report_of(KILLED, tmp_path / "a", 0, "whole")
    with pytest.raises(AssertionError):
        report_of(KILLED, tmp_path / "b", 0, "die")
    note, *rest = report_of(KILLED, tmp_path / "b", 1, "resume")
    assert "'two', step 2, saved " in note
    assert "had done 2 more steps, which are lost" in note
    assert rest == whole[2:]
    assert list((tmp_path / "b").iterdir()) == []


def test_what_is_kept_has_pieces_but_no_gradients(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        run = Run(session, 0, dtype=torch.bfloat16)
        train(run, 1)
        kinds = {piece.what for piece in run.model._megatrain.pager.kept_pieces()}
        assert kinds == {What.WEIGHTS, What.LOW, What.EXP_AVG, What.EXP_AVG_SQ}
