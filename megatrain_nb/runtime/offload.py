"""A model whose weights are in the store: how it moves in, how its calls reach the runtime, how it moves out."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain_nb.errors import (
    ArgumentError,
    ModelError,
    SessionError,
)
from megatrain_nb.runtime.adamstate import AdamState
from megatrain_nb.runtime.executor import Executor
from megatrain_nb.runtime.export import save_pretrained
from megatrain_nb.runtime.fill import fill, put_back, read_what_stays
from megatrain_nb.runtime.fuse import Fusing
from megatrain_nb.runtime.hooked import take_from_hooks
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.layers import Layers, cut, parse_dtype
from megatrain_nb.runtime.logits import LargeLogits
from megatrain_nb.runtime.memory import ModelMemory
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.prepare import (
    move_what_stays,
    no_cache_in_training,
    prepare,
    takes_cache,
)
from megatrain_nb.runtime.share import DeviceShare
from megatrain_nb.runtime.source import PieceSource
from megatrain_nb.runtime.steps import Steps
from megatrain_nb.runtime.tensor import (
    plain_parameter,
    source_of,
)
from megatrain_nb.runtime.tokens import loss_of, valid_tokens
from megatrain_nb.runtime.update import Updates

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from megatrain_nb.runtime.fill import Origin
    from megatrain_nb.runtime.optimizer import AdamW
    from megatrain_nb.runtime.session import Session


class OffloadedModel:
    """One model in a session's store.

    Attributes
    ----------
    layers, pager, updates, executor
        The cut model, its bytes, the updates that are due, and what runs it.
    memory
        What stays in RAM and on the device.
    steps
        The optimizer steps.
    adam
        The optimizer's state.
    by_name
        The streamed parameters.
    saved_version
        The executor's count of weight changes when the weights were last exported, or made.
    """

    def __init__(self, model: nn.Module, layers: Layers, session: Session) -> None:
        session.models.check_in()
        self._model = weakref.ref(model)
        self.name = type(model).__name__
        self.layers = layers
        self.session = session
        self.memory = ModelMemory(self)
        self.pager = Pager(
            layers.spec.packs,
            prefix=f"{session.models.num_adopted}/",
            pool=session.pool,
            store=session.store,
            on_span=session.on_span,
            packed=session.packed,
        )
        self.updates = Updates(
            self.pager, threads=session.threads, on_span=session.on_span
        )
        self.executor = Executor(
            layers,
            pager=self.pager,
            updates=self.updates,
            device=session.device,
            on_span=session.on_span,
            stop=session.stop_event,
            relieve=self.memory.relieve,
        )
        self.share = DeviceShare(self.executor, session.device)
        self.logits = LargeLogits(self.executor, self.memory.room_bytes)
        self.executor.logits = self.logits
        self.use_layers(layers)
        self.device = session.device.torch_device
        self.steps = Steps(self)
        self.adam = AdamState(self)
        self.optimizer: AdamW | None = None
        self.saved_version = 0
        self.fusing: Fusing | None = None
        self._hooks: list[RemovableHandle] = []
        session.models.adopt(self)
        try:
            session.models.plan()
        except BaseException:
            session.models.dismiss(self)
            raise

    @property
    def model(self) -> nn.Module:
        """The model itself; its record does not keep it alive."""
        model = self._model()
        if model is None:
            msg = "the model was deleted"
            raise SessionError(msg)
        return model

    def check_dtype(self, dtype: torch.dtype | None) -> None:
        """Raise ArgumentError if parameters are in the store as anything but ``dtype``; None takes all."""
        for home in self.layers.homes.values():
            if dtype not in (None, home.dtype):
                msg = (
                    f"dtype={dtype}: {home.spec.name} is in the session as {home.dtype} already; leave dtype out, or "
                    "mt.unwrap(model) first"
                )
                raise ArgumentError(msg)

    @property
    def deleted(self) -> bool:
        """Whether nobody holds the model any more."""
        return self._model() is None

    def __reduce_ex__(self, protocol: Any) -> Any:
        msg = (
            f"{self.name}: pickling (torch.save) a model in a session would bring its weights into RAM; save with "
            "mt.save_pretrained(model, dir), or get an ordinary model back with mt.unwrap(model)"
        )
        raise ModelError(msg)

    # -- moving in and out ------------------------------------------------------------------------------

    def source(self, param: nn.Parameter, what: What = What.WEIGHTS) -> PieceSource:
        """Return where a parameter's weights, gradient or moment are."""
        return PieceSource(self, param, self.layers.homes[param], what)

    def become(self, model: nn.Module, layers: Layers) -> None:
        """Speak of another model that is cut the same way."""
        self._model = weakref.ref(model)
        self.use_layers(layers)

    def use_layers(self, layers: Layers) -> None:
        """Go on with the same cut, of another model or with other codecs."""
        self.layers = self.executor.layers = layers
        self.by_name = {home.spec.name: p for p, home in layers.homes.items()}

    def intercept(self, dtype: torch.dtype | None) -> None:
        """Send the blocks' calls through the executor; ordinary parameters become ``dtype`` as well."""
        self.saved_version = self.executor.version
        model = self.model
        model._megatrain = self  # type: ignore[assignment]
        model.save_pretrained = partial(save_pretrained, model)  # type: ignore[assignment]
        for param in self.layers.resident.values():
            param.data = param.data.to(dtype or param.dtype)
        self._hooks += [
            self.model.register_forward_pre_hook(
                self._before_forward, with_kwargs=True
            ),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        for module in self.model.modules():
            if takes_cache(module):
                self._hooks.append(
                    module.register_forward_pre_hook(
                        no_cache_in_training, with_kwargs=True
                    )
                )
        for block in self.layers.blocks:
            block.intercept(self.executor.call)
        if len(self.session.models) == 1:
            # What the first model took elsewhere before it moved in is not the session's.
            self.session.forget_ram_peak()

    def release(self) -> None:
        """Let the model's calls be its own again; the weights stay where they are."""
        for block in self.layers.blocks:
            block.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self.deleted:
            self.model.__dict__.pop("save_pretrained", None)
            self.model.__dict__.pop("_megatrain", None)

    def undo(self, origins: dict[nn.Parameter, Origin]) -> None:
        """Give a model back that could not move in: what had moved comes out again, or is where it was in its file."""
        for param in list(self.layers.homes):
            source = source_of(param)
            if param in origins:
                put_back(param, origins[param])
            elif isinstance(source, PieceSource):
                with source.master().opened(write=False) as values:
                    plain_parameter(
                        param,  # type: ignore[arg-type]
                        values.to(self.device, self.layers.given[param], copy=True),
                    )
        self.release()
        self.close("moving the model in failed")

    def move_out(self) -> nn.Module:
        """Bring all weights back into ordinary memory and let go of the model."""
        self.executor.check_usable()
        self.executor.rest()
        for param in list(self.layers.homes):
            with self.source(param).opened(write=False) as values:
                copy = values.to(self.device, copy=True)
            plain_parameter(param, copy)  # type: ignore[arg-type]
        self.release()
        self.close("the model was unwrapped")
        return self.model

    def close(self, why: str) -> None:
        """Give all memory and disk space back; reading a parameter is an error from now on."""
        self.executor.unusable = self.executor.unusable or (
            f"{why}: its weights are no longer in the store. Save before with mt.save_pretrained(model, dir), "
            "or get an ordinary model back with mt.unwrap(model)"
        )
        self.updates.rest()
        self.executor.let_go()
        self.executor.keeping.close()
        self.pager.close()
        self.session.models.dismiss(self)

    def fuse(self, wanted: bool) -> None:
        """Let micro-batches of a window pass a block together, or not.

        Raises
        ------
        ArgumentError
            Neither True nor False.
        """
        given: object = wanted
        if not isinstance(given, bool):
            msg = f"fuse_micro_batches={wanted!r} is neither True nor False"
            raise ArgumentError(msg)
        self.fusing = Fusing(self.session.note) if wanted else None

    def note_saved(self) -> None:
        """Note that the weights as they are now were exported."""
        self.pager.close_held()
        self.saved_version = self.executor.version

    # -- updates that are due -------------------------------------------------------------------------

    def finish_update(self, pack: int) -> None:
        """Do what is due for one pack."""
        with interrupts_wait(self.executor.stop, breakable=False):
            self.updates.settle(pack)

    def finish_updates(self) -> None:
        """Do all that is due, and return when it is on the disk."""
        with interrupts_wait(self.executor.stop, breakable=False):
            self.pay_updates()
            self.executor.tail.show_all()
            self.pager.barrier()

    def pay_updates(self) -> None:
        """Do all that is due; what the codecs are to be is decided then, see `AdamState.change_codecs`."""
        self.updates.finish_all()
        self.adam.change_codecs()

    # -- calls of the model ---------------------------------------------------------------------------

    def _before_forward(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with interrupts_wait(self.executor.stop, breakable=False):
            self.session.models.give_turn(self)
        if not self.steps.in_progress:
            self.memory.begin()
        self.executor.begin_forward()
        if torch.is_grad_enabled():
            self.steps.begin()
            if self.executor.window is not None:
                self.memory.foresee(args, kwargs, self.executor.window.num_batches)
                self.memory.tell()
            else:
                self.memory.foresight.note((args, kwargs), accumulation=1)

    def _after_forward(
        self, model: nn.Module, _: Any, kwargs: dict[str, Any], outputs: Any
    ) -> None:
        """Note what a plain loop's forward gave; a window notes its loss itself."""
        self.executor.end_forward()
        loss = loss_of(outputs)
        if loss is not None and loss.requires_grad and self.executor.window is None:
            self.steps.note_loss(loss, valid_tokens(model, kwargs))


def offload(
    model: nn.Module, session: Session, dtype: torch.dtype | str | None = None
) -> OffloadedModel:
    """Return a model's record; a model that is in RAM moves into the session's store first.

    Parameters
    ----------
    model
        In RAM, or in the session already.
    session
        The session.
    dtype
        What it computes in: ``torch.float32``, ``torch.bfloat16``, or None for what its parameters are.

    Raises
    ------
    ArgumentError
        Another dtype, or another one than the model has in the session.
    """
    wanted = parse_dtype(dtype)
    offloaded = offloaded_model(model)
    if offloaded is not None:
        offloaded.check_dtype(wanted)
        return offloaded
    take_from_hooks(model, session.max_ram_bytes)
    layers = cut(model, wanted, session.compression)
    for param, home in layers.homes.items():
        if param.device.type == "meta":
            msg = (
                f"{home.spec.name} is on the meta device and has no values; make the model with mt.from_config, or give "
                "it a checkpoint's weights with mt.from_pretrained(model, path)"
            )
            raise ModelError(msg)
    read_what_stays(model, layers)
    prepare(model)
    move_what_stays(model, layers, session.device.torch_device)
    offloaded = OffloadedModel(model, layers, session)
    origins: dict[nn.Parameter, Origin] = {}
    try:
        fill(offloaded, origins)
        offloaded.intercept(wanted)
    except BaseException:
        offloaded.undo(origins)
        raise
    return offloaded


def offloaded_model(model: nn.Module) -> OffloadedModel | None:
    """Return the record of a model that is in a store, or None."""
    found = getattr(model, "_megatrain", None)
    return found if isinstance(found, OffloadedModel) else None


def required_model(model: Any) -> OffloadedModel:
    """Return the record of a model that is in a store.

    Raises
    ------
    ModelError
        It is in none.
    """
    offloaded = offloaded_model(model)
    if offloaded is None:
        msg = f"{type(model).__name__} is not in a session; call mt.wrap(model) after mt.init(...)"
        raise ModelError(msg)
    return offloaded
