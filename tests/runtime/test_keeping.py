"""Activations that borrow from what streams: the same gradients, and everything given back."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megatrain_nb.runtime.call import BlockCall
from megatrain_nb.runtime.keeping import Keeping
from tests.runtime.common import (
    TinyLM,
    batch,
    gradients_in,
    loss_of,
    micro_batches,
    opened,
    seeded,
    window_step,
    wrapped,
)
from tests.runtime.plain import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import megatrain_nb as mt


@contextmanager
def borrowing(directory: Path) -> Iterator[tuple[Any, Any, Any, mt.Session]]:
    """A model after one step, whose blocks keep all their activations in memory that the pool lends."""
    plain = seeded(TinyLM)
    with opened(directory) as session:
        session.keep_share = 1.0
        model, optimizer = wrapped(copy.deepcopy(plain), lr=0.0)
        window_step(model, optimizer, 0)
        for _ in range(2):  # in a loop the last block keeps its own as well
            loss_of(model, batch(0)).backward()
            optimizer.zero_grad()
        memory = model._megatrain.memory
        memory.end_step = lambda _: None  # the plan stays as it is
        memory.relieve = lambda: None
        keeping = model._megatrain.executor.keeping
        keeping.limit_bytes = keeping.lent_bytes = 2 * keeping.wanted_bytes
        yield plain, model, optimizer, session


def same(plain: Any, model: Any, optimizer: Any, backward: Callable[[], None]) -> None:
    """Compare the gradients of two micro-batches with plain PyTorch's, bit for bit."""

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    found = gradients_in(model, optimizer, step)
    for each in micro_batches(0, 2):
        loss_of(plain, each["ids"]).backward()
    for name, param in plain.named_parameters():
        assert torch.equal(found[name], param.grad), name


def test_what_is_kept_is_borrowed_and_given_back_when_the_pool_needs_it(
    tmp_path: Path,
) -> None:
    with borrowing(tmp_path) as (plain, model, optimizer, session):
        pool, keeping = session.pool, model._megatrain.executor.keeping
        held: list[int] = []

        def backward() -> None:
            for each in micro_batches(0, 2):
                loss = loss_of(model, each["ids"])
                held.append(keeping.held_bytes)
                assert pool.aside_bytes == keeping.held_bytes > 0
                loss.backward()
                assert keeping.held_bytes == 0
                assert pool.aside_bytes == held[0]  # until somebody needs it

        with counted() as again:
            same(plain, model, optimizer, backward)
        assert again == [0]
        assert held[0] == held[1]  # the second borrowed nothing more
        with model._megatrain.pager.room(
            pool.limit_bytes - pool.in_use_bytes - held[0] // 2, "a test"
        ):
            assert pool.aside_bytes == 0
        assert not keeping.give_back()


def test_what_the_pool_needs_before_backward_is_computed_again(tmp_path: Path) -> None:
    with borrowing(tmp_path) as (plain, model, optimizer, session):
        keeping = model._megatrain.executor.keeping
        given: list[int] = []

        def backward() -> None:
            for each in micro_batches(0, 2):
                loss = loss_of(model, each["ids"])
                before = keeping.held_bytes
                assert model._megatrain.pager.give_up_kept()
                assert keeping.held_bytes == session.pool.aside_bytes < before
                given.append(before - keeping.held_bytes)
                loss.backward()

        with counted() as again:
            same(plain, model, optimizer, backward)
        assert again == [2]  # the first layer that keeps anything, in each micro-batch
        assert min(given) > 0


def test_a_block_that_waits_for_memory_gets_what_activations_borrowed(
    tmp_path: Path,
) -> None:
    with borrowing(tmp_path) as (plain, model, optimizer, session):
        pool, pager = session.pool, model._megatrain.pager
        keeping = model._megatrain.executor.keeping

        def backward() -> None:
            for each in micro_batches(0, 2):
                loss = loss_of(model, each["ids"])
                pager.barrier()
                before = keeping.held_bytes
                used = sum(x.slab.nbytes for x in pager._pieces.values() if x.users)
                with pager.room(pool.limit_bytes - used - 2 * 4096, "a test"):
                    assert pool.aside_bytes == keeping.held_bytes < before
                loss.backward()

        with counted() as again:
            same(plain, model, optimizer, backward)
        assert again[0] >= 2


def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    with borrowing(tmp_path) as (plain, model, optimizer, session):
        keeping, pager = model._megatrain.executor.keeping, model._megatrain.pager
        pager.set_aside = lambda _: False

        def backward() -> None:
            for each in micro_batches(0, 2):
                loss = loss_of(model, each["ids"])
                assert keeping.held_bytes == session.pool.aside_bytes == 0
                loss.backward()

        same(plain, model, optimizer, backward)


def test_a_graph_in_use_gives_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with borrowing(tmp_path) as (plain, model, optimizer, _):
        pager, gave = model._megatrain.pager, []
        keeping = model._megatrain.executor.keeping
        flow = BlockCall._flow

        flows: list[int] = []
        blocks = len(model._megatrain.layers.blocks)

        def flowing(*given: Any) -> None:
            flows.append(keeping.held_bytes)
            while len(flows) % blocks == 2 and pager.give_up_kept():
                gave.append(True)
            flow(*given)

        monkeypatch.setattr(BlockCall, "_flow", staticmethod(flowing))

        def backward() -> None:
            for each in micro_batches(0, 2):
                loss_of(model, each["ids"]).backward()

        same(plain, model, optimizer, backward)
        assert gave
        assert min(flows[1::blocks]) > 0  # the second one that flows keeps something


def test_after_an_error_in_a_block_nothing_is_held(tmp_path: Path) -> None:
    with borrowing(tmp_path) as (plain, model, optimizer, session):
        keeping = model._megatrain.executor.keeping
        most: list[int] = []

        def fail(*_: Any) -> None:
            most.append(session.pool.aside_bytes)
            if most[-1] and len(most) % 2 == 0:
                msg = "of the test"
                raise ValueError(msg)

        last = model._megatrain.layers.blocks[-1].module
        hook = last.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="of the test"):
            window_step(model, optimizer, 1)
        hook.remove()
        assert max(most) > 0
        assert keeping.held_bytes == 0
        keeping.give_back()  # as whoever needs it does
        assert session.pool.aside_bytes == 0
        optimizer.zero_grad()

        def backward() -> None:
            for each in micro_batches(0, 2):
                loss_of(model, each["ids"]).backward()

        same(plain, model, optimizer, backward)


def test_a_run_that_fails_gives_its_lease_back(tmp_path: Path) -> None:
    with borrowing(tmp_path) as (_, model, _, session):
        keeping = model._megatrain.executor.keeping
        number = next(
            index for index in keeping._num_bytes if keeping._num_bytes[index]
        )
        keeping.choose(range(len(model._megatrain.layers.blocks)))
        try:
            with keeping.lease(number) as lease:
                assert lease is not None
                assert keeping.held_bytes == lease.num_bytes > 0
                raise RuntimeError  # noqa: TRY301 - what a block may do
        except RuntimeError:
            pass
        assert keeping.held_bytes == 0
        loss_of(model, batch(0)).backward()
        assert keeping.held_bytes == 0
        assert keeping.give_back()
        assert session.pool.aside_bytes == 0


class Lender:
    """Lends up to a limit."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def set_aside(self, num_bytes: int) -> bool:
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True

    def take_back(self, num_bytes: int) -> None:
        self.left += num_bytes


def test_only_what_goes_beyond_the_own_share_is_borrowed() -> None:
    lender = Lender(50)
    keeping = Keeping(lender)
    keeping.limit_bytes, keeping.lent_bytes = 100, 50
    keeping._num_bytes = keeping._call_bytes = {0: 40, 1: 40, 2: 30}
    keeping.choose([0, 1, 2])
    assert keeping.chosen == {1, 2}
    keeping._chosen = frozenset({0, 1, 2})
    with keeping.lease(0) as first, keeping.lease(1) as second:
        assert first is not None
        assert second is not None
        assert (first.lent_bytes, second.lent_bytes) == (0, 30)
        assert lender.left == 20
        with keeping.lease(2) as third:
            assert third is None  # 110 are more than 100
    assert keeping.held_bytes == 0
    assert keeping.give_back()
    assert lender.left == 50


def test_another_model_finds_the_whole_pool(tmp_path: Path) -> None:
    with borrowing(tmp_path) as (_, model, optimizer, session):
        loss_of(model, batch(0)).backward()
        optimizer.zero_grad()
        assert session.pool.aside_bytes > 0
        other, _ = wrapped(seeded(TinyLM))
        loss_of(other, batch(0)).backward()
        assert session.pool.aside_bytes == other._megatrain.executor.keeping.held_bytes


def test_a_model_that_is_closed_has_nothing_borrowed_even_if_a_graph_lives(
    tmp_path: Path,
) -> None:
    with borrowing(tmp_path) as (_, model, _, session):
        loss = loss_of(model, batch(0))
        assert session.pool.aside_bytes > 0
        model._megatrain.close("a test")
        assert session.pool.aside_bytes == 0
        del loss
        assert session.pool.aside_bytes == 0
