"""Checkpoints of a session: what is pinned, what is written beside it, and how a run goes on from it.

[Note: taking one] What is due is done first; pieces that stay in RAM are written; then the manifest is
pinned and synced. That is all that happens to weights, master halves and moments: they are on the disk
already. What is not in tiles is small and goes into the side files: step counts, parameter groups, ordinary
parameters and their moments, buffers, random states, and whatever was registered. Pending gradients do not
belong to it: a checkpoint is taken between steps.

[Note: what it costs] A pinned version stays whole, while the next step writes every tile anew. So each
checkpoint that is kept may cost as much disk as the model's weights and moments. That is checked before.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import safetensors.torch

from megatrain_nb.errors import (
    ArgumentError,
    BudgetError,
    ModelError,
    SessionError,
)
from megatrain_nb.plan.memory import written_bytes
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.modelstate import identity, restore_model, state_of
from megatrain_nb.runtime.otherstate import (
    check_stateful,
    load_object,
    random_state,
    set_random_state,
    state_of_object,
)
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.runs import TRAINER
from megatrain_nb.runtime.saved import Saved, read_state
from megatrain_nb.runtime.statecheck import check_same, check_state, check_weights
from megatrain_nb.runtime.tree import to_json
from megatrain_nb.store.base import round_up
from megatrain_nb.store.checkpoint import (
    Label,
    delete_checkpoint,
    write_checkpoint,
)
from megatrain_nb.store.portable import export_checkpoint, import_checkpoint
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.session import Session
    from megatrain_nb.store.checkpoint import Checkpoint

# A session whose pool is full can still read what lies beside a checkpoint's tiles.
_LEAST_ROOM_BYTES, _LEAST_ROOM = 64 << 20, 0.05

logger = logging.getLogger("megatrain_nb")


class Checkpoints:
    """The checkpoints of a session's directory.

    Parameters
    ----------
    session
        Whose models they are of.
    found
        Those that were there when the session opened; their manifests are pinned.

    Attributes
    ----------
    objects
        What else has a state: by name, objects with ``state_dict`` and ``load_state_dict``, or with
        ``get_state`` and ``set_state``.
    num_steps
        Steps of the whole run, as far as somebody said.
    after_each_step
        Somebody sees to it that each step is kept, or was told to.
    """

    def __init__(self, session: Session, found: Sequence[Checkpoint]) -> None:
        self.objects: dict[str, Any] = {}
        self.num_steps: int | None = None
        self.after_each_step = False
        self._session = session
        self._number = max((each.number for each in found), default=0)
        self._all = list(found)
        for older in self._all[
            :-1
        ]:  # a crash came between the new one and the old one's end
            if any(each.name == older.name for each in self._after(older)):
                self.remove(older)

    def _after(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        return [each for each in self._all if each.number > checkpoint.number]

    def all(self) -> list[Checkpoint]:
        """Return them, oldest first."""
        return list(self._all)

    def get(self, name: str | None) -> Checkpoint:
        """Return the one of a name, or the last one.

        Raises
        ------
        ArgumentError
            There is none: says which there are.
        """
        named = [each for each in self._all if name in (None, each.name)]
        if named:
            return named[-1]
        there = ", ".join(repr(each.name) for each in self._all) or "none"
        wanted = "no checkpoint" if name is None else f"no checkpoint {name!r}"
        msg = f"{wanted} in {self._session.preflight.path}; there: {there}"
        raise ArgumentError(msg)

    def register(self, objects: Mapping[str, Any]) -> None:
        """Let checkpoints hold the state of these as well; None takes one off the list.

        Raises
        ------
        ArgumentError
            One has no state that can be kept.
        """
        for name, each in objects.items():
            if each is None:
                self.objects.pop(name, None)
                continue
            check_stateful(name, each)
            self.objects[name] = each

    # -- taking one -----------------------------------------------------------------------------------

    def save_and_keep(self, name: str | None, keep: int | None) -> Checkpoint:
        """Take one under the name that a person gave, and keep so many, this one included; None keeps all."""
        if keep is not None and (type(keep) is not int or keep < 1):
            msg = f"keep={keep!r} is not usable; give a number of checkpoints, 1 or more, or None"
            raise ArgumentError(msg)
        given: object = name
        if name is not None and not (isinstance(given, str) and 0 < len(given) <= 200):
            msg = f"name={name!r} is not usable; give a short text, or None"
            raise ArgumentError(msg)
        others = [each for each in self._all if each.name != name]
        removing = [] if keep is None else others[: max(0, len(others) + 1 - keep)]
        checkpoint = self.save(name, leaving=removing)
        for each in removing:
            self.remove(each)
        return checkpoint

    def save(
        self,
        name: str | None = None,
        *,
        leaving: Sequence[Checkpoint] = (),
    ) -> Checkpoint:
        """Take a checkpoint; one of the same name is removed after it.

        ``leaving`` are others that will be removed: the step after this one may use their space.
        """
        session = self._session
        with (
            CLAIM.held("saving a checkpoint"),
            interrupts_wait(session.stop_event, breakable=False),
        ):
            models = session.models.usable()
            for model in models:
                check_between_steps(model)
            begin = time.perf_counter()
            for model in models:
                model.finish_updates()
            done = max(model.steps.done for model in models)
            name = f"step-{done}" if name is None else name
            same = [each for each in self._all if each.name == name]
            state, tensors = self._describe(models)
            self._make_room(models, [*same, *leaving])
            checkpoint = self._pin(models, name, done, state, tensors)
            self._all.append(checkpoint)
            for each in same:
                self.remove(each)
            for model in models:
                model.saved_version = model.executor.version
            logger.info("%r taken in %.3f s", checkpoint, time.perf_counter() - begin)
        return checkpoint

    def _describe(self, models: Sequence[OffloadedModel]) -> tuple[bytes, bytes]:
        tensors: dict[str, Tensor] = {}
        state = {
            "identity": [identity(model) for model in models],
            "models": [
                to_json(state_of(model), tensors, model.name) for model in models
            ],
            "random": to_json(random_state(), tensors, "random"),
            "lr_factor": self._session.controls.lr_factor,
            "objects": {
                name: to_json(state_of_object(each), tensors, name)
                for name, each in self.objects.items()
            },
        }
        return json.dumps(state).encode(), safetensors.torch.save(tensors)

    def _make_room(
        self, models: Sequence[OffloadedModel], removing: Sequence[Checkpoint]
    ) -> None:
        """Write what is in RAM only, if there is room for that, and for the step after it.

        Raises
        ------
        BudgetError
            There is not; nothing has changed.
        """
        store = self._session.store
        unsaved = [
            (model.pager, piece)
            for model in models
            for piece in model.pager.unsaved_pieces()
        ]
        for pager, piece in unsaved:
            pager.forget_stored(piece)
        now = sum(round_up(piece.num_bytes) for _, piece in unsaved)
        whole = sum(
            round_up(piece.num_bytes)
            for model in models
            for piece in model.pager.kept_pieces()
            if not model.pager.is_blank(piece.pack.index, piece.what)
        )
        gone = {each.manifest for each in removing}
        after = whole + store.pinned_bytes(without=gone) + _next_step_bytes(models)
        needed = max(store.used_bytes + now, after)
        if needed > store.capacity_bytes:
            kept = len(self._all) - len(removing)
            msg = (
                f"a checkpoint keeps {format_bytes(whole)} on disk as they are, and the next step writes them anew: "
                f"{format_bytes(needed)} are needed with the {kept} checkpoints that stay, and max_disk_gb or the free "
                f"space allow {format_bytes(store.capacity_bytes)}. Raise max_disk_gb, free some space, or keep fewer: "
                "session.remove_checkpoint(name), save_total_limit"
            )
            raise BudgetError(msg)
        for pager, piece in unsaved:
            pager.flush(piece)

    def check_room(self) -> None:
        """Look, before a run that will take checkpoints, whether the disk could ever hold one and the step after it.

        Raises
        ------
        BudgetError
            It could not, whatever else is removed.
        """
        models = self._session.models.usable()
        whole = sum(_whole_bytes(model) for model in models)
        # No plan is asked, since the next one may keep more in RAM: at best, all of the budget.
        share, most = (
            self._session.models.share_bytes(),
            self._session.max_resident_bytes,
        )
        share = share if most is None else min(share, most)
        specs = [model.layers.spec for model in models]
        left = [max(0, spec.state_bytes - share) for spec in specs]
        needed = whole + sum(left)
        allowed = self._session.store.capacity_bytes
        if needed > allowed:
            msg = (
                f"a checkpoint keeps {format_bytes(whole)} on disk as they are, and the next step writes them anew: "
                f"at least {format_bytes(needed)} are needed for one, and max_disk_gb or the free space allow "
                f"{format_bytes(allowed)}, so that this run would end at its first save. Raise max_disk_gb, free some "
                'space, or train without checkpoints: save_strategy="no", and no crash_safe'
            )
            raise BudgetError(msg)

    def _pin(
        self,
        models: Sequence[OffloadedModel],
        name: str,
        step: int,
        state: bytes,
        tensors: bytes,
    ) -> Checkpoint:
        session = self._session
        keys = {
            f"{index}/{tile}": key
            for index, model in enumerate(models)
            for piece in model.pager.kept_pieces()
            for tile, key in model.pager.names(piece).items()
            if key in session.store
        }
        manifest = session.store.pin(keys)
        label = Label(
            name=name, step=step, num_steps=self.num_steps, time=datetime.now(UTC)
        )
        self._number += 1
        try:
            session.store.sync()
            return write_checkpoint(
                session.preflight.path,
                self._number,
                label,
                manifest,
                state=state,
                tensors=tensors,
            )
        except BaseException:
            session.store.unpin(manifest)
            raise

    # -- going on -------------------------------------------------------------------------------------

    def resume(
        self,
        name: str | None = None,
        *,
        weights_only: bool = False,
        saved: Saved | None = None,
    ) -> Checkpoint:
        """Bring models, optimizers, registered objects and random states back as they were.

        Parameters
        ----------
        name
            Which one; None for the last.
        weights_only
            Only weights, ordinary parameters and buffers.
        saved
            What `read` gave for that one, if it was read already.
        """
        session = self._session
        checkpoint = self.get(name)
        with (
            CLAIM.held("going on from a checkpoint"),
            interrupts_wait(session.stop_event, breakable=False),
        ):
            models = session.models.usable()
            saved = saved or self.read(checkpoint.name)
            states, objects = saved.models, saved.objects
            check_same(
                saved.identity, [identity(model) for model in models], checkpoint
            )
            if not weights_only:
                self._check_resumable(models, states, objects, checkpoint)
            check = check_weights if weights_only else check_state
            for index, (model, each) in enumerate(zip(models, states, strict=True)):
                check(model, each, checkpoint.manifest, prefix=f"{index}/")
            if not weights_only:  # before the models: an object may refuse its state
                for key, value in objects.items():
                    load_object(key, self.objects[key], value)
            for model in models:
                model.finish_updates()
                model.executor.drop_gradients()
                model.steps.forget()
                model.executor.tail.leave_all()
                model.executor.weights_change()
            with ExitStack() as half_way:
                for model in models:
                    what = f"going on from {checkpoint!r}"
                    half_way.enter_context(model.pager.must_end(what))
                for index, (model, each) in enumerate(zip(models, states, strict=True)):
                    restore_model(
                        model,
                        each,
                        checkpoint.manifest,
                        prefix=f"{index}/",
                        weights_only=weights_only,
                    )
                if not weights_only:
                    session.controls.lr_factor = saved.lr_factor
                    set_random_state(saved.random)
        logger.info("resumed from %r", checkpoint)
        return checkpoint

    def read(self, name: str) -> Saved:
        """Return what a checkpoint holds beside its tiles.

        Raises
        ------
        StoreError
            It is damaged, or takes more RAM than there is.
        """
        return read_state(self.get(name), most_bytes=self.room_bytes())

    def room_bytes(self) -> int:
        """Return what the budget leaves for files of a checkpoint, in bytes, and a little where it leaves nothing."""
        session = self._session
        session.pool.trim()
        room = session.max_ram_bytes - session.pool.mapped_bytes
        return max(room, _LEAST_ROOM_BYTES, round(_LEAST_ROOM * session.max_ram_bytes))

    def _check_resumable(
        self,
        models: Sequence[OffloadedModel],
        states: Sequence[dict[str, Any]],
        objects: dict[str, Any],
        checkpoint: Checkpoint,
    ) -> None:
        missing = sorted(objects.keys() - self.objects.keys())
        if TRAINER in missing:
            msg = (
                f"{checkpoint!r} was taken by mt.Trainer; make the same trainer and go on with "
                "trainer.train(resume_from_checkpoint=True), or take the weights alone with weights_only=True"
            )
            raise ArgumentError(msg)
        for model, state in zip(models, states, strict=True):
            if state.get("groups") is not None and model.optimizer is None:
                msg = (
                    f"{checkpoint!r} holds the state of an optimizer; make it first (mt.wrap, mt.Trainer), or take "
                    "the weights alone with weights_only=True"
                )
                raise ModelError(msg)
        if missing:
            msg = (
                f"{checkpoint!r} holds the state of {', '.join(missing)}; register what it belongs to before: "
                f"session.register({missing[0]}=...), or take the weights alone with weights_only=True"
            )
            raise ArgumentError(msg)
        new = sorted(self.objects.keys() - objects.keys())
        if new:
            msg = f"{checkpoint!r} has no state of {', '.join(new)}; register only what was registered when it was taken"
            raise ArgumentError(msg)

    # -- removing and moving --------------------------------------------------------------------------

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete one; what only it held of the disk is free then."""
        delete_checkpoint(checkpoint)
        self._all.remove(checkpoint)
        self._session.store.unpin(checkpoint.manifest)

    def export(self, name: str | None, folder: Path) -> Path:
        """Copy one into a folder of its own."""
        room = self.room_bytes()
        store = self._session.store
        return export_checkpoint(self.get(name), store, folder, most_bytes=room)

    def take_in(self, folder: Path, name: str | None) -> Checkpoint:
        """Copy one from a portable folder."""
        store = self._session.store
        self._number += 1
        checkpoint = import_checkpoint(
            folder,
            store,
            number=self._number,
            name=name,
            most_bytes=self.room_bytes(),
        )
        same = [each for each in self._all if each.name == checkpoint.name]
        self._all.append(checkpoint)
        for each in same:
            self.remove(each)
        return checkpoint


def _whole_bytes(model: OffloadedModel) -> int:
    """Return what a checkpoint of a model holds on disk once all its trained parameters were updated."""
    trained = {
        home.pack.index
        for param, home in model.layers.homes.items()
        if param.requires_grad
    }
    return sum(
        round_up(piece.num_bytes)
        for piece in model.pager.kept_pieces()
        if piece.what is What.WEIGHTS or piece.pack.index in trained
    )


def _next_step_bytes(models: Sequence[OffloadedModel]) -> int:
    """Return what steps take of the disk beside what is pinned."""
    total = 0
    for model in models:
        disk = model.memory.residency.disk_bytes
        total += disk and disk + written_bytes(model.layers.spec)
    return total


def check_between_steps(model: OffloadedModel) -> None:
    """Raise SessionError if gradients of a step are pending."""
    if model.steps.in_progress:
        msg = (
            f"{model.name} is in the middle of step {model.steps.done + 1}: gradients are pending, and a checkpoint does "
            "not hold them. Take it after optimizer.step(), or call optimizer.zero_grad() first"
        )
        raise SessionError(msg)
