"""The models of a session: who is there, whose turn it is, and what each may have of RAM and disk."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from megatrain_nb.errors import SessionError
from megatrain_nb.runtime.claim import CLAIM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.session import Session


class Models:
    """The models in a session, in the order in which they came.

    Attributes
    ----------
    num_adopted
        How many have come so far, those that left included.
    """

    def __init__(self, session: Session) -> None:
        self.num_adopted = 0
        self._session = session
        self._all: list[OffloadedModel] = []
        self._at_work: OffloadedModel | None = None

    def __iter__(self) -> Iterator[OffloadedModel]:
        return iter(tuple(self._all))  # closing one takes it off the list

    def __len__(self) -> int:
        return len(self._all)

    # -- coming and going -----------------------------------------------------------------------------

    def check_in(self) -> None:
        """Make room before a model moves in: let go of those that nobody holds any more."""
        CLAIM.check()
        if self._all:
            gc.collect()
        self._let_go()

    def adopt(self, model: OffloadedModel) -> None:
        """Note a model that moves in."""
        self._all.append(model)
        self.num_adopted += 1

    def dismiss(self, model: OffloadedModel) -> None:
        """Note a model that left, and free what it had on disk."""
        if model in self._all:
            self._all.remove(model)
            self._at_work = None
            if not self._session.closed:
                model.pager.delete_all()
                if self._all:  # the others may have its share
                    self.plan()

    def usable(self) -> list[OffloadedModel]:
        """Return the models in the order in which they came.

        Raises
        ------
        SessionError
            There is none, the session is closed, or one must not be used any more.
        """
        if self._session.closed:
            msg = "the session is closed; open one with mt.init(...)"
            raise SessionError(msg)
        if len(self._all) > 1:  # one that nobody uses may wait for the collector
            gc.collect()
        self._let_go()
        if not self._all:
            msg = "no model is in the session; call mt.wrap(model) or make an mt.Trainer first"
            raise SessionError(msg)
        for model in self._all:
            model.executor.check_usable()
        return list(self._all)

    def give_turn(self, model: OffloadedModel) -> None:
        """Let one model run; what the others have read ahead, or the deleted ones had, makes room for it."""
        self._let_go()
        if self._at_work is not model:
            for other in self._all:
                if other is not model:
                    other.executor.rest()
            self._at_work = model

    def _let_go(self) -> None:
        for model in [model for model in self._all if model.deleted]:
            model.close("the model was deleted")

    # -- what each may have ---------------------------------------------------------------------------

    def plan(self) -> None:
        """Give every model an equal share of the RAM, and let each decide what of it stays there.

        Raises
        ------
        BudgetError
            A share is too small.
        """
        session = self._session
        pool, share = session.pool, self.share_bytes()
        pool.limit_bytes = session.max_ram_bytes
        for model in self._all:
            model.memory.plan(share)
        pool.trim()
        aside = max(model.memory.residency.aside_bytes for model in self._all)
        limit = session.max_ram_bytes - aside
        for model in self._all:
            model.pager.shrink(limit)
        pool.limit_bytes = limit
        if session.callbacks:
            for layout in self.layouts():
                for callback in session.callbacks:
                    callback.on_layout(layout)

    def layouts(self) -> list[Layout]:
        """Return the blocks of each model, and what of them the plan keeps in RAM."""
        return [model.memory.layout() for model in self._all]

    def share_bytes(self) -> int:
        """Return what each model may have of the RAM, in bytes."""
        return self._session.max_ram_bytes // len(self._all)

    def packing_share_bytes(self) -> int:
        """Return what each model has to leave of its share for packing, in bytes."""
        return -(-self._session.store.staging_bytes // max(len(self._all), 1))

    def disk_room_bytes(self, model: OffloadedModel) -> int:
        """Return the bytes that a model may have on disk beside the other models."""
        store = self._session.store
        others = sum(m.memory.residency.disk_bytes for m in self._all if m is not model)
        return store.capacity_bytes - store.pinned_bytes() - others
