"""Faults of disk, memory, code and user: each is one clear error, and the model is that of a whole step."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_nb as mt
from megatrain_nb.optim import adamw
from megatrain_nb.runtime.memory import ModelMemory
from megatrain_nb.runtime.optimizer import AdamW
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import What
from megatrain_nb.store import host, tilefile
from tests.runtime.common import (
    Layer,
    TinyLM,
    batch,
    differing,
    loss_of,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)
from tests.store.conformance import flip_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# 4 KiB: the packs of the tiny model have several tiles.
SMALL_TILE = 1024


class Disk:
    """The system calls of the store; the n-th one fails, or is short."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fails_at: dict[str, int] = {}
        self.error: OSError | None = OSError(errno.EIO, os.strerror(errno.EIO))
        self.fired = 0
        self.seen = {"preadv": 0, "pwritev": 0, "posix_fallocate": 0}
        self.for_ever = False
        self.short = 0.0
        self.chance = random.Random(0)
        for name in self.seen:
            patch.setattr(os, name, self._calling(name, getattr(os, name)))

    def arm(
        self, name: str, n: int, code: int = errno.EIO, *, for_ever: bool = False
    ) -> None:
        """Let the n-th call of one kind from now on fail, and with ``for_ever`` all after it."""
        self.seen[name] = self.fired = 0
        self.fails_at = {name: n}
        self.error = OSError(code, os.strerror(code))
        self.for_ever = for_ever

    def disarm(self) -> None:
        self.fails_at = {}

    def _calling(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            n, at = self.seen[name], self.fails_at.get(name)
            self.seen[name] += 1
            if at is not None and (n == at or (self.for_ever and n > at)):
                self.fired += 1
                assert self.error is not None
                raise OSError(self.error.errno, self.error.strerror)
            if (
                self.short
                and name != "posix_fallocate"
                and self.chance.random() < self.short
            ):
                (view,), offset = args
                return original(fd, [view[: len(view) // 4096 // 2 * 4096]], offset)
            return original(fd, *args)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def mixed_step(model: Any, optimizer: Any, step: int) -> None:
    """Steps of even number layer by layer, those of odd number in a plain loop."""
    if step % 2:
        plain_step(model, optimizer, step)
    else:
        window_step(model, optimizer, step)


def states(
    count: int, *, tied: bool = False, **kwargs: Any
) -> list[dict[str, torch.Tensor]]:
    """Return plain PyTorch's states after 0, 1, ... steps."""
    plain = seeded(lambda: TinyLM(tied=tied))
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True, **kwargs)
    found = [snapshot(plain, optimizer)]
    for step in range(count):
        plain_step(plain, optimizer, step)
        found.append(snapshot(plain, optimizer))
    return found


def left_over(model: Any) -> list[str]:
    """Name what nobody uses any more, but is counted as used."""
    record = model._megatrain
    record.pager.close_held()
    record.executor.rest()
    record.pager.barrier()
    found = [
        f"{piece}: {piece.users}"
        for piece in record.pager._pieces.values()
        if piece.users
    ]
    pool = record.session.pool
    kept = sum(
        p.slab.nbytes for p in record.pager._pieces.values() if p.slab is not None
    )
    if pool.in_use_bytes != kept:
        found.append(f"{pool.in_use_by_what()}")
    return found


def check_after_fault(
    model: Any, optimizer: Any, expected: list[Any], *, more: int = 2
) -> bool:
    """The model is that of a whole step and goes on, or says that it is not; returns which."""
    done = model._megatrain.steps.done
    try:
        optimizer.zero_grad()
        assert differing(expected[done], snapshot(model, optimizer)) == [], (
            f"after step {done}"
        )
        assert left_over(model) == []
        for step in range(done, done + more):
            mixed_step(model, optimizer, step)
        assert differing(expected[done + more], snapshot(model, optimizer)) == []
        assert left_over(model) == []
    except mt.StoreError:
        for use in (
            lambda: model(batch(0)),
            optimizer.step,
            optimizer.finish,
            lambda: mt.unwrap(model),
        ):
            with pytest.raises(mt.StoreError, match="must not be used"):
                use()
        return False
    return True


def fault_at(
    directory: Path,
    disk: Disk,
    name: str,
    n: int,
    code: int,
    expected: list[Any],
    **kwargs: Any,
) -> bool:
    """Let one system call fail in a window and a plain loop; False if so many were not made."""
    with opened(directory):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(2):
            mixed_step(model, optimizer, step)
        disk.arm(name, n, code, **kwargs)
        start = time.perf_counter()
        try:
            for step in range(2, 4):
                mixed_step(model, optimizer, step)
            optimizer.finish()
        except mt.StoreError:
            assert disk.fired
        else:
            assert not disk.fired, "a failed call was nobody's business"
        fired = disk.fired
        disk.disarm()
        assert time.perf_counter() - start < 10
        check_after_fault(model, optimizer, expected)
    assert list(directory.iterdir()) == []
    return fired > 0


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get
)
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize(
    "stride", [13, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_a_system_call_that_fails(
    tmp_path: Path, disk: Disk, name: str, code: int, stride: int
) -> None:
    if (name == "preadv") != (code == errno.EIO) and name == "preadv":
        pytest.skip("reads do not fail so")
    expected = states(6)
    n = 0
    while fault_at(tmp_path, disk, name, n, code, expected):
        n += stride
    assert n > 40


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_for_good(tmp_path: Path, disk: Disk, name: str) -> None:
    """What was read ahead meanwhile fails too, and must not be told when the disk is well again."""
    expected = states(6)
    for n in (0, 5, 17, 25, 29, 33, 34, 35, 36, 37, 40):
        assert fault_at(tmp_path, disk, name, n, errno.EIO, expected, for_ever=True)


@pytest.mark.parametrize("window", [False, True])
def test_small_tiles_whose_reads_fail(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, window: bool
) -> None:
    defaults = Pager.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "tile_numel", SMALL_TILE)
    expected = states(6)
    step_of = window_step if window else plain_step
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        for n in range(0, 400, 9):
            disk.arm("preadv", n)
            try:
                for step in range(2):
                    step_of(model, optimizer, step)
                optimizer.finish()
            except mt.StoreError:
                pass
            disk.disarm()
            assert check_after_fault(model, optimizer, expected, more=0)
            # Start again with the same weights.
            _, optimizer = wrapped(model)
            for (_, param), value in zip(
                model.named_parameters(), seeded(TinyLM).parameters(), strict=True
            ):
                with torch.no_grad():
                    param.copy_(value)
            model._megatrain.steps.done = 0


# -- faults while an update is due ----------------------------------------------------------------------


class Partial(nn.Module):
    """Two branches; one call of it computes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.loose = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, branches: tuple[int, ...]) -> Tensor:
        x = x * self.loose
        for index in branches:
            x = torch.tanh(self.layers[index](x))
        return x.square().sum()


def partial_steps(model: Any, optimizer: Any, *branches: tuple[int, ...]) -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    for each in branches:
        model(x, each).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_that_cannot_begin_counts_nothing(tmp_path: Path, disk: Disk) -> None:
    """The update of a block that a forward left out is paid when the next step begins, and may fail then."""
    plain = seeded(Partial)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    partial_steps(plain, theirs, (0, 1), (0, 1), (0,), (0, 1))
    failed = 0
    for n in range(3):
        with opened(tmp_path):
            model, optimizer = wrapped(seeded(Partial))
            partial_steps(model, optimizer, (0, 1), (0, 1))
            model(
                torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), (0,)
            ).backward()
            model._megatrain.executor.rest()
            disk.arm("preadv", n)
            for _ in range(2):
                try:
                    optimizer.step()
                    break
                except mt.StoreError:
                    failed += 1
            disk.disarm()
            assert record_steps(model) == 3
            optimizer.zero_grad()
            try:
                partial_steps(model, optimizer, (0, 1))
            except mt.StoreError:  # what the step read ahead for the next forward
                partial_steps(model, optimizer, (0, 1))
            assert differing(snapshot(plain, theirs), snapshot(model, optimizer)) == []
            assert left_over(model) == []
    assert failed


def test_a_gradient_that_is_lost_while_its_update_is_due(
    tmp_path: Path, disk: Disk
) -> None:
    expected, told = states(4), 0
    for n in range(8):
        with opened(tmp_path) as session:
            model, optimizer = wrapped(seeded(TinyLM))
            for step in range(2):
                window_step(model, optimizer, step)
            session.stop()  # gradients that waited in RAM go to the disk
            disk.arm("pwritev", n)
            with pytest.raises((KeyboardInterrupt, mt.StoreError)):
                window_step(model, optimizer, 2)
            session.clear_stop()
            told += not check_after_fault(model, optimizer, expected)
            disk.disarm()
    assert told


def small_tiles(patch: pytest.MonkeyPatch) -> None:
    defaults = Pager.__init__.__kwdefaults__
    assert defaults is not None
    patch.setitem(defaults, "tile_numel", SMALL_TILE)


class Wide(nn.Module):
    """Packs of many tiles."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        for layer in self.layers if frozen else ():
            layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def wide_window(model: Any, optimizer: Any, step: int) -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
    if isinstance(optimizer, AdamW):
        mt.train_step(
            model, optimizer, [{"x": x}], loss_fn=lambda model, batch: model(**batch)
        )
        return
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("room", [215_000, 230_000, 240_000, 250_000])
def test_a_plan_that_grows_while_a_part_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """What was read ahead tile by tile must not meet an older copy of the whole piece."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(ModelMemory, "learn", lambda _: None)
    monkeypatch.setattr(ModelMemory, "relieve", lambda _: None)
    plain = seeded(Wide)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with opened(tmp_path, max_ram_gb="2 MB") as session:
        model, mine = wrapped(seeded(Wide))
        for step in range(8):
            wide_window(plain, theirs, step)
            wide_window(model, mine, step)
            session.max_resident_bytes = None if step % 2 else 0
            model._megatrain.memory.reserved_bytes = 0 if step % 2 else 2_000_000 - room
            session.models.plan()
        assert differing(snapshot(plain, theirs), snapshot(model, mine)) == []


def test_tiles_without_an_update_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch)
    plain = seeded(lambda: Wide(frozen=True))
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with opened(tmp_path, max_ram_gb="5 MB") as session:
        model, mine = wrapped(seeded(lambda: Wide(frozen=True)))
        for step in range(4):
            wide_window(plain, theirs, step)
            wide_window(model, mine, step)
        mine.finish()
        assert left_over(model) == []
        assert session.pool.in_use_bytes == 0
        assert differing(snapshot(plain, theirs), snapshot(model, mine)) == []


def test_a_gradient_set_to_zero_while_its_update_is_due(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with opened(tmp_path):
        model, mine = wrapped(seeded(TinyLM))
        for each, optimizer in ((plain, theirs), (model, mine)):
            loss_of(each, batch(0)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert not each.layers[0].up.weight.grad.any()
            loss_of(each, batch(1)).backward()
            optimizer.step()
        assert differing(snapshot(plain, theirs), snapshot(model, mine)) == []
        for (name, mine_), theirs_ in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert torch.equal(mine_.grad, theirs_.grad), name


# -- damaged, short, out of memory -------------------------------------------------------------------------


def wide_layer() -> Layer:
    """A layer whose matrices are large enough that their moments are encoded."""
    layer = Layer()
    layer.up, layer.down = nn.Linear(16, 512), nn.Linear(512, 16)
    return layer


@pytest.mark.parametrize("what", [*What])
@pytest.mark.parametrize("where", ["due", "paid"])
def test_a_flipped_bit(tmp_path: Path, what: What, where: str) -> None:
    codec = "4bit" if what is What.ENCODED else False
    with opened(tmp_path, optimizer_compression=codec) as session:
        dtype = torch.bfloat16 if what is What.LOW else None
        layer = wide_layer if codec else Layer
        model, optimizer = wrapped(seeded(lambda: TinyLM(layer)), dtype=dtype)
        for step in range(2):
            window_step(model, optimizer, step)
        if where == "paid":
            optimizer.finish()
            if what is What.GRADS:
                loss_of(model, batch(0)).backward()
        record = model._megatrain
        record.executor.rest()
        record.pager.reset()
        record.pager.barrier()
        pack = 2
        tile = session.store._index[
            record.pager.tile_key(record.pager.piece(pack, what), 0)
        ]
        flip_bits(session.store.path, tile.offset + 100, 4)

        def use() -> None:
            if where == "due" or what is not What.GRADS:
                window_step(model, optimizer, 2)
            else:
                optimizer.step()
            optimizer.finish()

        for _ in range(2):
            named = f"{what.value}.*/{pack}/0.*damaged"
            with pytest.raises(mt.ChecksumError, match=named):
                use()
        assert not left_over(model)


def test_short_transfers(tmp_path: Path, disk: Disk) -> None:
    expected = states(6)
    disk.short = 0.3
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(6):
            mixed_step(model, optimizer, step)
        assert differing(expected[6], snapshot(model, optimizer)) == []


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")]
)
def test_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    expected, fails_at, seen = states(8), -1, 0
    original = host.map_pages

    def fails(nbytes: int) -> Any:
        nonlocal seen
        seen += 1
        if seen - 1 == fails_at:
            raise error
        return original(nbytes)

    monkeypatch.setattr(host, "map_pages", fails)
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        failed = 0
        for n in range(24):
            done = record_steps(model)
            if done >= 6:
                _, optimizer = wrapped(model)
                break
            session.pool.trim()
            seen, fails_at = 0, n
            try:
                mixed_step(model, optimizer, done)
            except mt.BudgetError as found:
                assert "system refused" in str(found)  # noqa: PT017
                failed += 1
            fails_at = -1
            optimizer.zero_grad()
            assert (
                differing(expected[record_steps(model)], snapshot(model, optimizer))
                == []
            )
            assert left_over(model) == []
        assert failed > 3


def record_steps(model: Any) -> int:
    steps: int = model._megatrain.steps.done
    return steps


@pytest.mark.parametrize("for_ever", [False, True])
def test_a_disk_that_is_full_when_the_file_grows(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, for_ever: bool
) -> None:
    monkeypatch.setattr(tilefile, "_GROW_MIN_BYTES", 4096)
    expected, fired = states(6), 0
    for n in range(0, 12, 3):
        with opened(tmp_path):
            model, optimizer = wrapped(seeded(TinyLM))
            disk.arm("posix_fallocate", n, errno.ENOSPC, for_ever=for_ever)
            start = time.perf_counter()
            try:
                for step in range(2):
                    mixed_step(model, optimizer, step)
                optimizer.finish()
            except mt.StoreError as error:
                assert "cannot grow" in str(error) or "must not be used" in str(error)  # noqa: PT017
            assert time.perf_counter() - start < 10
            fired += disk.fired
            disk.disarm()
            check_after_fault(model, optimizer, expected)
        assert list(tmp_path.iterdir()) == []
    assert fired


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_worker_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Something that is no fault of the disk: an error in our own code, or no memory for a bounce page."""
    original, fails_at, seen = getattr(tilefile.TileFile, operation), -1, 0

    def fails(*args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen - 1 == fails_at:
            raise MemoryError
        original(*args)

    monkeypatch.setattr(tilefile.TileFile, operation, fails)
    expected, raised = states(6), 0
    for n in range(0, 60, 7):
        fails_at = -1
        with opened(tmp_path):
            model, optimizer = wrapped(seeded(TinyLM))
            for step in range(2):
                mixed_step(model, optimizer, step)
            seen, fails_at = 0, n
            start = time.perf_counter()
            try:
                for step in range(2, 4):
                    mixed_step(model, optimizer, step)
                optimizer.finish()
            except (MemoryError, mt.StoreError):
                raised += 1
            assert time.perf_counter() - start < 10
            fails_at = -1
            check_after_fault(model, optimizer, expected)
    assert raised > 5


@pytest.mark.parametrize("n", range(0, 12, 2))
def test_an_update_that_fails_ends_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    seen = 0

    def fails(*args: Any, **kwargs: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > n:
            raise ZeroDivisionError
        adamw.update(*args, **kwargs)

    monkeypatch.setattr("megatrain_nb.runtime.update.update", fails)
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))

        def train() -> None:
            for step in range(4):
                mixed_step(model, optimizer, step)

        with pytest.raises(ZeroDivisionError):
            train()
        for use in (
            partial(model, batch(0)),
            optimizer.step,
            partial(mt.unwrap, model),
            model.head.weight.sum,
        ):
            with pytest.raises(mt.StoreError, match=r"half-way.*must not be used"):
                use()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_removed(tmp_path: Path) -> None:
    """The file lives on while it is open; closing says nothing of what is gone."""
    expected = states(4)
    with opened(tmp_path / "store") as session:
        model, optimizer = wrapped(seeded(TinyLM))
        mixed_step(model, optimizer, 0)
        shutil.rmtree(tmp_path / "store")
        for step in range(1, 4):
            mixed_step(model, optimizer, step)
        assert differing(expected[4], snapshot(model, optimizer)) == []
        session.close()
    assert list(tmp_path.iterdir()) == []
