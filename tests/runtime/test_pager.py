"""Pieces between RAM and disk: within the limit, never lost, never mixed up."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import megatrain_nb as mt
from megatrain_nb.plan.memory import Residency
from megatrain_nb.plan.model import PackSpec, pack_params
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import What
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool
from tests.runtime.common import TinyLM, opened, seeded, window_step, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PIECE = 4096 * 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path, direct=False)
    yield store
    store.close()


def make_pager(store: DiskStore, *, pieces: int, pool: HostPool | None = None) -> Pager:
    packs: tuple[PackSpec, ...] = tuple(
        pack_params(index, str(index), [("w", (4096,))]) for index in range(4)
    )
    return Pager(
        packs,
        prefix="0/",
        pool=pool or HostPool(pieces * PIECE, poison=True),
        store=store,
        on_span=lambda _: None,
        tile_numel=1024,
    )


def fill(pager: Pager, pack: int, value: float) -> None:
    pager.need(pack, What.WEIGHTS)[:] = value
    pager.drop(pack, What.WEIGHTS, dirty=True)


def values(pager: Pager, pack: int) -> set[float]:
    found = set(pager.need(pack, What.WEIGHTS).tolist())
    pager.drop(pack, What.WEIGHTS)
    return found


def test_what_was_never_written_is_zero(store: DiskStore) -> None:
    pager = make_pager(store, pieces=1)
    fill(pager, 0, np.nan)
    assert values(pager, 1) == {0.0}
    pager.discard(0, What.WEIGHTS)
    assert values(pager, 0) == {0.0}


def test_one_slab_is_enough_for_all_in_turn(store: DiskStore) -> None:
    pager = make_pager(store, pieces=1)
    for turn in range(3):
        for pack in range(4):
            fill(pager, pack, 10 * turn + pack)
        for pack in range(4):
            assert values(pager, pack) == {10.0 * turn + pack}
    assert pager.pool.peak_bytes == PIECE


def test_read_ahead_gives_way_to_what_is_needed(store: DiskStore) -> None:
    pager = make_pager(store, pieces=2)
    for pack in range(4):
        fill(pager, pack, pack)
    pager.barrier()
    assert pager.fetch(0, What.WEIGHTS)
    assert pager.fetch(1, What.WEIGHTS)
    assert not pager.fetch(2, What.WEIGHTS)
    pager.need(2, What.WEIGHTS)
    pager.need(3, What.WEIGHTS)
    with pytest.raises(mt.BudgetError, match="weights"):
        pager.need(0, What.WEIGHTS)
    pager.drop(2, What.WEIGHTS)
    assert values(pager, 0) == {0.0}


def test_residents_stay_and_leave_with_the_plan(store: DiskStore) -> None:
    pager = make_pager(store, pieces=4)
    pager.apply(Residency(weights=frozenset(range(4))))
    for pack in range(4):
        fill(pager, pack, pack + 1)
    assert store.keys() == []
    pager.apply(Residency())
    pager.barrier()
    assert pager.pool.in_use_bytes == 0
    for pack in range(4):
        assert values(pager, pack) == {pack + 1.0}


def test_opened_keeps_the_last_one_and_writes_it(store: DiskStore) -> None:
    pager = make_pager(store, pieces=1)
    with pager.opened(0, What.WEIGHTS, write=True) as [flat]:
        flat[:] = 7
    with pager.opened(1, What.WEIGHTS) as [flat]:
        assert not flat.any()
    pager.barrier()
    assert values(pager, 0) == {7.0}
    pager.close()
    assert pager.pool.in_use_bytes == 0


def test_a_split_pack_has_two_halves(store: DiskStore) -> None:
    """Their tiles need not be whole pages; both are there at once, and stay until another pack is opened."""
    pack = pack_params(0, "0", [("w", (6000,))], split=True)
    pager = Pager(
        (pack,),
        prefix="0/",
        pool=HostPool(2 * 6144 * 2, poison=True),
        store=store,
        on_span=lambda _: None,
        tile_numel=1024,
    )
    both = (What.WEIGHTS, What.LOW)
    assert pager.is_blank(0, What.LOW)
    with pager.opened(0, *both, write=True) as [hi, lo]:
        assert hi.dtype == np.uint16
        assert hi.shape == lo.shape == (6144,)
        assert not hi.any()
        assert not lo.any()
        hi[:], lo[:] = np.arange(6144), np.arange(6144)[::-1]
    with pager.opened(0, What.LOW) as [lo]:
        assert lo[0] == 6143
    pager.barrier()
    assert pager.pool.in_use_bytes == 0
    assert not pager.is_blank(0, What.LOW)
    assert {store.nbytes(key) for key in store.keys()} == {2048}  # noqa: SIM118
    with pager.opened(0, *both) as [hi, lo]:
        assert (hi[5000], lo[5000]) == (5000, 1143)
    with pytest.raises(mt.BudgetError, match="grads"), pager.opened(0, *both):
        pager.need(0, What.GRADS)
    pager.discard(0, What.LOW)
    with pager.opened(0, *both) as [hi, lo]:
        assert (hi[5000], lo[5000]) == (5000, 0)
    pager.close()


class LateGive(HostPool):
    """Slabs come back a moment after the write is done, as a busy interpreter may have it."""

    def give(self, slab: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        super().give(slab)


def test_a_slab_that_comes_back_late(store: DiskStore) -> None:
    pager = make_pager(store, pieces=1, pool=LateGive(PIECE))
    try:
        for pack in range(4):
            fill(pager, pack, pack)
    except mt.BudgetError as error:
        raise AssertionError(error) from error
    finally:
        time.sleep(0.2)


def test_a_barrier_ends_when_the_slabs_are_back(store: DiskStore) -> None:
    pager = make_pager(store, pieces=2, pool=LateGive(2 * PIECE))
    try:
        fill(pager, 0, 1)
        pager.barrier()
        assert pager.pool.in_use_bytes == 0
    finally:
        time.sleep(0.2)


def test_the_pool_is_never_exceeded_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    original = HostPool._take

    def take(self: HostPool, nbytes: int, what: str) -> Any:
        slab = original(self, nbytes, what)
        limits.append(self.limit_bytes - self._in_use_bytes - self._free_bytes)
        return slab

    monkeypatch.setattr(HostPool, "_take", take)
    with opened(tmp_path, max_ram_gb="105 kB"):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(3):
            window_step(model, optimizer, step)
            assert model.norm.weight.isfinite().all()
    assert min(limits) >= 0
    assert min(limits) < 30_000  # it was tight


# -- lent to a device -----------------------------------------------------------------------------------------


class Copying:
    """A device's copy that ends when it is told to."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waited = False

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        self.waited = True
        self.over.set()

    def times(self) -> tuple[float, float]:
        return 0.0, 0.0


def lent(pager: Pager, value: float) -> tuple[Any, Copying]:
    """Values of pack 0 that a device still copies after their use has ended."""
    found, copying = pager.need(0, What.WEIGHTS), Copying()
    found[:] = value
    pager.lend(0, What.WEIGHTS, copying)
    pager.drop(0, What.WEIGHTS, dirty=True)
    return found, copying


def test_what_a_device_copies_stays_until_that_is_over(store: DiskStore) -> None:
    pager = make_pager(store, pieces=2)
    found, copying = lent(pager, 7.0)
    pager.end_leases()
    fill(pager, 1, 1.0)  # there is other room
    assert (set(found.tolist()), copying.waited) == ({7.0}, False)
    copying.over.set()
    pager.end_leases()
    pager.barrier()
    assert pager.piece(0, What.WEIGHTS).slab is None
    assert values(pager, 0) == {7.0}


def test_room_waits_for_what_a_device_copies(store: DiskStore) -> None:
    pager = make_pager(store, pieces=1)
    _, copying = lent(pager, 7.0)
    found = pager.fetch(1, What.WEIGHTS)
    assert (found, copying.waited) == (False, False)
    fill(pager, 1, 1.0)
    assert copying.over.is_set()
    assert values(pager, 0) == {7.0}


@pytest.mark.parametrize(
    "use",
    [
        lambda pager: pager.need(0, What.WEIGHTS),
        lambda pager: pager.discard(0, What.WEIGHTS),
        lambda pager: pager.barrier(),
        lambda pager: pager.reset(),
        lambda pager: pager.settle_writes(What.WEIGHTS),
        lambda pager: pager.close(),
    ],
    ids=["need", "discard", "barrier", "reset", "settle_writes", "close"],
)
def test_who_uses_a_piece_waits_for_the_device(store: DiskStore, use: Any) -> None:
    pager = make_pager(store, pieces=2)
    _, copying = lent(pager, 7.0)
    assert not pager.piece(0, What.WEIGHTS).landed
    use(pager)
    assert copying.waited
    if pager.piece(0, What.WEIGHTS).slab is not None:
        assert pager.piece(0, What.WEIGHTS).landed


def test_what_is_held_open_is_lent_as_well(store: DiskStore) -> None:
    pager = make_pager(store, pieces=2)
    copying = Copying()
    with pager.opened(0, What.WEIGHTS):
        pass
    pager.need(0, What.WEIGHTS)
    pager.lend(0, What.WEIGHTS, copying)
    pager.drop(0, What.WEIGHTS)
    with pager.opened(0, What.WEIGHTS):
        assert copying.waited


def test_what_is_wanted_again_does_not_leave(store: DiskStore) -> None:
    pager = make_pager(store, pieces=2)
    _, copying = lent(pager, 7.0)
    assert pager.fetch(0, What.WEIGHTS)
    copying.over.set()
    pager.end_leases()
    assert pager.piece(0, What.WEIGHTS).slab is not None
