"""A model whose weights are in the store: how it moves in, what is planned for it, how it moves out."""

from __future__ import annotations

import inspect
import logging
import math
import weakref
import zlib
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.codec.dynamic import Role
from megatrain_nb.codec.names import DYNAMIC
from megatrain_nb.errors import (
    ArgumentError,
    BudgetError,
    ModelError,
    SessionError,
    StoreError,
)
from megatrain_nb.plan.keep import prefers_kept
from megatrain_nb.plan.layout import Layout, make_layout
from megatrain_nb.plan.memory import (
    Residency,
    disk_need_bytes,
    plan_residency,
    working_bytes,
)
from megatrain_nb.plan.own import SPREAD_BYTES
from megatrain_nb.plan.reserve import first_guess, still_fits, with_margin
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.runtime import heap
from megatrain_nb.runtime.callbacks import StepResult
from megatrain_nb.runtime.chooser import is_looked_at
from megatrain_nb.runtime.costs import least_seconds, seconds_by_cause
from megatrain_nb.runtime.executor import Executor
from megatrain_nb.runtime.export import save_pretrained
from megatrain_nb.runtime.foresee import Foresight
from megatrain_nb.runtime.fuse import Fusing
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.layers import Layers, cut, parse_dtype
from megatrain_nb.runtime.logits import LargeLogits
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.piece import MOMENTS, What, moments_of
from megatrain_nb.runtime.recode import Moments, encode, recode
from megatrain_nb.runtime.share import DeviceShare
from megatrain_nb.runtime.source import MomentSource, PieceSource, encoded_of
from megatrain_nb.runtime.tensor import (
    plain_parameter,
    source_of,
    stream_parameter,
    streamed_tensor,
)
from megatrain_nb.runtime.tokens import loss_of, valid_tokens
from megatrain_nb.runtime.update import Updates
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.hooks import RemovableHandle

    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.runtime.optimizer import AdamW
    from megatrain_nb.runtime.session import Session

logger = logging.getLogger("megatrain_nb")


class OffloadedModel:
    """One model in a session's store.

    Attributes
    ----------
    layers, pager, updates, executor
        The cut model, its bytes, the updates that are due, and what runs it.
    step_seconds
        Time in ``optimizer.step`` so far, without the kernels' and without waiting.
    steps
        Updates that each parameter has had.
    asked
        By name of a streamed parameter: the codec that is asked for its moments.
    rounding_seed
        Of the rounding of encoded moments, all parameters.
    residency
        The plan in force.
    saved_version
        The executor's count of weight changes when the weights were last exported, or made.
    """

    def __init__(self, model: nn.Module, layers: Layers, session: Session) -> None:
        session.check_in()
        self._model = weakref.ref(model)
        self.name = type(model).__name__
        self.layers = layers
        self.session = session
        self.pager = Pager(
            layers.spec.packs,
            prefix=f"{session.num_models}/",
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
            relieve=self.relieve,
        )
        self.share = DeviceShare(self.executor, session.device)
        self.logits = LargeLogits(self.executor, self._room_bytes)
        self.executor.logits = self.logits
        self.use_layers(layers)
        self.device = session.device.torch_device
        self.steps: dict[nn.Parameter, int] = {}
        self.moments: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for pattern in session.compression.unused(
            home.spec.name for home in layers.homes.values()
        ):
            session.note(
                f"optimizer_compression: {pattern!r} decides of no parameter of {self.name}"
            )
        self.asked = {
            home.spec.name: session.compression.asked(home.spec.name)
            for home in layers.homes.values()
        }
        self.rounding_seed = 0
        self.num_steps = 0
        self.step_seconds = 0.0
        self.last_step: StepResult | None = None
        self.optimizer: AdamW | None = None
        self._since: dict[str, float] | None = None
        self._losses: list[Tensor] = []
        self._tokens = 0
        self.saved_version = 0
        self.residency = Residency()
        self.fusing: Fusing | None = None
        self._hooks: list[RemovableHandle] = []
        self._reserved = first_guess(session.max_ram_bytes)
        self._foresight = Foresight()
        self._keep_wanted = self._keep_beside = self._spread_bytes = 0
        self._keep_first = False
        self._room = 0
        session.adopt(self)
        try:
            session.plan()
        except BaseException:
            session.dismiss(self)
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

    def move_in(self) -> None:
        """Bring the model's parameters into the store, block by block; their memory is freed as it goes.

        A split parameter's fp32 number is the very value that it has.
        """
        for param, home in self.layers.homes.items():
            source = self.source(param)
            # What is bf16 already has no lower half: it is left out, and reads as zeros.
            exact = home.pack.split and param.dtype != torch.bfloat16
            place = source.master() if exact else source
            with place.opened(write=True) as values, torch.no_grad():
                values.copy_(param)
            stream_parameter(param, source, self.device, home.dtype)
        self.pager.barrier()

    def become(self, model: nn.Module, layers: Layers) -> None:
        """Speak of another model that is cut the same way."""
        self._model = weakref.ref(model)
        self.use_layers(layers)

    def use_layers(self, layers: Layers) -> None:
        """Go on with the same cut, of another model or with other codecs."""
        self.layers = self.executor.layers = layers
        self._by_name = {home.spec.name: p for p, home in layers.homes.items()}

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
            if _takes_cache(module):
                self._hooks.append(
                    module.register_forward_pre_hook(
                        no_cache_in_training, with_kwargs=True
                    )
                )
        for block in self.layers.blocks:
            block.intercept(self.executor.call)

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

    def undo(self) -> None:
        """Give a model back that could not move in: what had moved comes out again."""
        for param in list(self.layers.homes):
            source = source_of(param)
            if isinstance(source, PieceSource):
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
        self.pager.close()
        self.session.dismiss(self)

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

    # -- planning -----------------------------------------------------------------------------------------

    def plan(self, limit_bytes: int) -> None:
        """Decide what stays in RAM, and make it so.

        Parameters
        ----------
        limit_bytes
            This model's share of the session's RAM.

        Raises
        ------
        BudgetError
            The share does not even hold what streams, or the disk not what does not stay.
        """
        spec = self.layers.spec
        room = self._beside_streaming(spec, limit_bytes)
        self._room = max(room, 0)
        if self._reserved > max(room, 0) and self.num_steps:
            logger.warning(
                "%s: its own tensors took %s and %s are left beside what streams, so the process exceeds max_ram_gb; "
                "shorten the sequence or the micro-batch, or raise max_ram_gb",
                self.name,
                format_bytes(self._reserved),
                format_bytes(max(room, 0)),
            )
        residency = self._residency(spec, limit_bytes)
        before = self.residency
        if not (residency.states <= before.states and residency.grads <= before.grads):
            # Tiles read ahead of a piece that is to stay would be newer than the whole that is read for it.
            self.updates.rest()
        self.pager.apply(residency)
        self.pager.barrier()
        self.residency = residency
        if not self.share.holds_activations:
            keepable = residency.keep_bytes - self._keep_beside
            self.executor.keeping.limit_bytes = max(keepable, 0)
        self._plan_device()

    def _plan_device(self) -> None:
        others = (model.executor for model in self.session.models if model is not self)
        self.share.plan(self._keep_allowed(), others)

    def check_plan(self, spec: ModelSpec) -> None:
        """Raise BudgetError if the model would not fit with these packs."""
        self._residency(spec, self.session.share_bytes())

    def _residency(self, spec: ModelSpec, limit_bytes: int) -> Residency:
        room = self._beside_streaming(spec, limit_bytes)
        residency = plan_residency(
            spec,
            limit_bytes=limit_bytes,
            activation_bytes=max(0, min(self._reserved, room)),
            keep_bytes=self._keepable_bytes() + self._keep_beside,
            keep_share=self._keep_share(),
            resident_bytes=self.session.max_resident_bytes,
            packing_bytes=self.session.packing_share_bytes(),
            tile_numel=self.pager.tile_numel,
        )
        self._check_disk(spec, residency)
        return residency

    def _beside_streaming(self, spec: ModelSpec, limit_bytes: int) -> int:
        """Return what a share of the RAM leaves when nothing is resident; less than 0 where it is too small."""
        working = working_bytes(spec, tile_numel=self.pager.tile_numel)
        return limit_bytes - working - self.session.packing_share_bytes()

    def _keep_share(self) -> float:
        given = self.session.keep_share
        return float(self._keep_first) if given is None else given

    def _keepable_bytes(self) -> int:
        """Return what activations would take if all of a window's were kept, within what the session allows."""
        return 0 if self.share.holds_activations else self._keep_allowed()

    def _keep_allowed(self) -> int:
        allowed = self.session.max_kept_bytes
        return self._keep_wanted if allowed is None else min(self._keep_wanted, allowed)

    def _room_bytes(self) -> int:
        """Return what the budgets have for the model's own tensors where its blocks compute, in bytes."""
        return self.share.room_bytes(self._room)

    def _check_disk(self, spec: ModelSpec, residency: Residency) -> None:
        """Copy on write needs room for the tiles that are written while their old versions are there."""
        needed = disk_need_bytes(spec, residency)
        allowed = self.session.disk_room_bytes(self)
        if needed > allowed:
            pinned = self.session.store.pinned_bytes()
            beside = (
                f" beside the checkpoints' {format_bytes(pinned)}" if pinned else ""
            )
            msg = (
                f"max_disk_gb or the free space allow {format_bytes(max(allowed, 0))} on disk{beside}, and this model "
                f"needs {format_bytes(1.005 * needed)} there; raise max_disk_gb, free some space, or raise max_ram_gb"
            )
            raise BudgetError(msg)

    def _foresee(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Plan for a window that is larger than any before, before it runs."""
        window = self.executor.window
        assert window is not None
        found = self._foresight.look(
            model,
            self.layers,
            (args, kwargs),
            accumulation=window.num_batches,
            room_bytes=self._room,
        )
        if found is None or found.reserved > self._room:
            return  # without room everything streams, whatever is set aside
        if found.reserved > self._reserved or self._spread_bytes == 0:
            self._reserved, kept, beside = found
            self._keep_wanted = max(self._keep_wanted, kept)
            self._keep_beside = max(self._keep_beside, beside)
            self._spread_bytes = min(3 * SPREAD_BYTES, self.session.share_bytes() // 5)
            self.session.plan()

    def relieve(self) -> None:
        """At a block's border: if more is taken than was set aside, give back what is free and set more aside."""
        if self.session.other_bytes() > self._reserved + self.residency.keep_bytes:
            heap.trim()
            self.learn()

    def learn(self) -> None:
        """Compare what is set aside with what the kernel counted, and plan again where it matters."""
        keeping = self.executor.keeping
        least = self.last_step.least_seconds if self.last_step is not None else {}
        first = prefers_kept(least, now=self._keep_first)
        measured = with_margin(self.session.other_peak_bytes())
        in_ram = not self.share.holds_activations
        kept = keeping.restart_peak() if in_ram else 0
        changed = first != self._keep_first
        if kept:
            # What else was taken is what keeping costs beside its bytes (freed memory waits in the heap). It only
            # grows, and only keeping gives way to it: so the plan comes to rest.
            beside = measured - kept - self._reserved
            changed |= beside > self._keep_beside
            self._keep_beside = max(self._keep_beside, beside)
            measured = self._reserved
        if keeping.wanted_bytes > self._keep_wanted:
            self._keep_wanted = with_margin(keeping.wanted_bytes)
            changed |= in_ram
        fits = still_fits(self._reserved, measured, spread_bytes=self._spread_bytes)
        if changed or not fits:
            self._reserved = self._reserved if fits else max(measured, 0)
            self._keep_first = first
            self.session.plan()
            logger.info(
                "set aside %s for activations; %s resident",
                format_bytes(self._reserved + self.residency.keep_bytes),
                format_bytes(self.residency.resident_bytes),
            )

    def check_gradients(self) -> None:
        """Raise if a pending gradient did not reach the disk.

        Raises
        ------
        StoreError
            Names it; no weight has changed.
        """
        with suppress(StoreError):
            self.pager.settle_writes(What.GRADS)
        if self.pager.lost:
            raise StoreError(next(iter(self.pager.lost.values())))

    def reset_optimizer(self) -> None:
        """Forget moments and step counts: a new optimizer starts from zero."""
        self.finish_updates()
        self.updates.rest()
        self.steps.clear()
        self.moments.clear()
        for pack in self.layers.spec.packs:
            for what in moments_of(pack):
                self.pager.discard(pack.index, what)

    # -- steps ----------------------------------------------------------------------------

    def count_step(self, param: nn.Parameter) -> int:
        """Count an update of a parameter, and return its number; the first is 1."""
        self.steps[param] = self.steps.get(param, 0) + 1
        return self.steps[param]

    def finish_update(self, pack: int) -> None:
        """Do what is due for one pack."""
        with interrupts_wait(self.executor.stop, breakable=False):
            self.updates.settle(pack)

    def finish_updates(self) -> None:
        """Do all that is due, and return when it is on the disk."""
        with interrupts_wait(self.executor.stop, breakable=False):
            self.pay_updates()
            self.pager.barrier()

    @property
    def in_step(self) -> bool:
        """Whether a forward or backward of a step runs, or gradients of one are pending."""
        executor = self.executor
        running = executor.window is not None or executor.inside is not None
        return running or (self._since is not None and bool(executor.norms))

    def pay_updates(self) -> None:
        """Do all that is due; what the codecs are to be is decided then, see [Note: when codecs change]."""
        self.updates.finish_all()
        chooser = self.updates.chooser
        if chooser.looking:
            changed = chooser.decide(self.codecs)
            recode(self, changed)
            if changed:
                logger.info("codecs of moments changed: %s", changed)

    def look_at_update(self, params: Iterable[nn.Parameter]) -> None:
        """Measure codecs in the update that begins, if it is time and some of these are dynamic."""
        self.updates.chooser.forget()
        if is_looked_at(self.num_steps + 1):
            homes = [self.layers.homes[p] for p in params if p in self.layers.homes]
            found = {
                home.spec.name: home.spec.numel
                for home in homes
                if home.spec.codec in Role.BODY.codecs
                and self.asked[home.spec.name] == DYNAMIC
            }
            if found:
                self.updates.chooser.begin(found)

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of each streamed parameter's moments, by name."""
        specs = (home.spec for home in self.layers.homes.values())
        return {spec.name: spec.codec for spec in specs}

    def begin_step(self, *, stops: bool = True) -> None:
        """Let a step's clock run, unless it does already; before it does, do what a person asked for.

        Without ``stops`` the caller ends the training itself where that was asked for.
        """
        if self._since is None:
            self.between_steps()
            controls = self.session.controls
            if stops and controls.stopping:
                controls.reset()
                raise KeyboardInterrupt
            self._since = self.session.clock()

    def between_steps(self) -> None:
        """Save, or wait, if a person asked for it."""
        session = self.session
        session.controls.obey(
            self.num_steps, partial(save_pretrained, self.model), session.stop_event
        )

    def layout(self) -> Layout:
        """Return the model's blocks, and what of them stays in RAM."""
        spec = self.layers.spec
        traffic = step_traffic(spec, self.residency, self.executor.expected_order())
        return make_layout(
            spec,
            self.pager.layout(),
            model=self.pager.prefix.rstrip("/"),
            name=self.name,
            in_place=self.session.device.in_place,
            planned_bytes=(traffic.read_bytes, traffic.written_bytes),
        )

    def forget_step(self) -> None:
        """Start over: the step that was begun will not end."""
        self._since = None
        self._losses.clear()
        self._tokens = 0

    def note_loss(self, loss: Tensor, tokens: int) -> None:
        """Note a loss of the step in progress, and the valid tokens behind it."""
        self._losses.append(loss.detach())
        self._tokens += tokens

    def finish_step(self, grad_norm: float) -> None:
        """Make the step's result and tell the session; then plan again if memory says so."""
        device = self.session.device
        self.executor.end_step()
        since, now = self._since, self.session.clock()
        assert since is not None
        spent = {key: now[key] - since[key] for key in now}
        seconds = seconds_by_cause(spent, in_place=device.in_place)
        least = least_seconds(spent, device, disk_rate=self.session.store.rate.best)
        losses = self._losses
        self.last_step = StepResult(
            step=self.num_steps,
            loss=float(sum(losses)) / len(losses) if losses else math.nan,
            grad_norm=grad_norm,
            tokens=self._tokens,
            seconds=seconds,
            read_bytes=int(spent["read"]),
            written_bytes=int(spent["written"]),
            onloaded_bytes=int(spent["onloaded"]),
            offloaded_bytes=int(spent["offloaded"]),
            link_seconds=spent["link"],
            least_seconds=least,
            lr=self._learning_rate(),
        )
        self.forget_step()
        self.session.note_step(self.last_step)
        if not device.in_place:
            self.share.learn(least)
        self.learn()
        self._plan_device()

    def _learning_rate(self) -> float:
        if self.optimizer is None:
            return math.nan
        return (
            float(self.optimizer.param_groups[0]["lr"])
            * self.session.controls.lr_factor
        )

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with interrupts_wait(self.executor.stop, breakable=False):
            self.session.give_turn(self)
        self.executor.begin_forward()
        if torch.is_grad_enabled():
            self.begin_step()
            if self.executor.window is not None and self.session.plans_by_shape:
                self._foresee(model, args, kwargs)

    def _after_forward(
        self, model: nn.Module, _: Any, kwargs: dict[str, Any], outputs: Any
    ) -> None:
        """Note what a plain loop's forward gave; a window notes its loss itself."""
        self.executor.end_forward()
        loss = loss_of(outputs)
        if loss is not None and loss.requires_grad and self.executor.window is None:
            self.note_loss(loss, valid_tokens(model, kwargs))

    # -- gradients ------------------------------------------------------------------------------------------

    def total_norm(self) -> Tensor:
        """Return the 2-norm of all pending gradients, a float32 scalar, as torch's clip_grad_norm_ computes it."""
        norms = self.executor.norms
        found = []
        for param in self.model.parameters():
            if param in norms:
                found.append(norms[param])
            elif param not in self.layers.homes and param.grad is not None:
                found.append(torch.linalg.vector_norm(param.grad))
        if not found:
            return torch.tensor(0.0)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(_on_host(found)))
        return norm

    def rounding_of(self, name: str) -> tuple[int, int]:
        """Return step and seed of the rounding of a parameter's moments, see `megatrain_nb.codec.base.Key`."""
        param = self._by_name[name]
        return self.steps.get(param, 0), seed_of(self.rounding_seed, name)

    def set_moments(
        self, param: nn.Parameter, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> None:
        """Store both moments of a parameter; encoded ones round once.

        Raises
        ------
        ModelError
            They cannot be encoded: not finite, or ``exp_avg_sq`` negative.
        """
        home = self.layers.homes.get(param)
        if home is None or not home.pack.encoded:
            for what, value in zip(MOMENTS, (exp_avg, exp_avg_sq), strict=True):
                self.moment(param, what).copy_(value)
            return
        flat = [_flat(value, home.spec.shape) for value in (exp_avg, exp_avg_sq)]
        self.executor.check_usable()
        with interrupts_wait(self.executor.stop, breakable=False):
            self.finish_update(home.pack.index)
            with encoded_of(self, home, write=True) as (parts, key):
                for part, data, place in parts:
                    encode(part, Moments(*(x[place] for x in flat)), data, key)

    def moment(self, param: nn.Parameter, what: What) -> Tensor:
        """Return a moment as a tensor: streamed, or ordinary for a parameter that is."""
        if param in self.layers.homes:
            return streamed_tensor(
                MomentSource(self, param, self.layers.homes[param], what),
                tuple(param.shape),
                torch.float32,
                torch.device("cpu"),
            )
        moments = self.moments.setdefault(
            param, (torch.zeros_like(param), torch.zeros_like(param))
        )
        return moments[0 if what is What.EXP_AVG else 1]


def _on_host(scalars: list[Tensor]) -> list[Tensor]:
    """Bring scalars to the CPU, those of one device together: the host waits once."""
    found = list(scalars)
    for device in {x.device for x in scalars if x.device.type != "cpu"}:
        places = [index for index, x in enumerate(scalars) if x.device == device]
        values = torch.stack([scalars[index] for index in places]).cpu()
        for index, value in zip(places, values.unbind(), strict=True):
            found[index] = value
    return found


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
    layers = cut(model, wanted, session.compression)
    for param, home in layers.homes.items():
        if param.device.type == "meta":
            msg = f"{home.spec.name} is on the meta device and has no values; make the model with mt.from_config"
            raise ModelError(msg)
    prepare(model)
    move_what_stays(model, layers, session.device.torch_device)
    offloaded = OffloadedModel(model, layers, session)
    try:
        offloaded.move_in()
        offloaded.intercept(wanted)
    except BaseException:
        offloaded.undo()
        raise
    return offloaded


def _flat(values: Tensor, shape: tuple[int, ...]) -> Any:
    """Return values as a flat fp32 array of a shape's elements; without a copy where they are that already."""
    if (
        type(values) is not Tensor
        or values.device.type != "cpu"
        or values.dtype != torch.float32
        or tuple(values.shape) != shape
        or not values.is_contiguous()
    ):
        values = torch.empty(shape, dtype=torch.float32).copy_(values)
    return values.detach().view(-1).numpy()


def seed_of(seed: int, name: str) -> int:
    """Return the seed of one parameter's rounding, from that of all: else two parameters would round alike."""
    return zlib.crc32(f"{seed}/{name}".encode())


def prepare(model: nn.Module) -> None:
    """Turn off what the runtime does itself."""
    for name in (
        "activation",
        "gradient",
    ):  # as transformers calls it now, and as it did before
        if hasattr(type(model), f"is_{name}_checkpointing"):
            if getattr(model, f"is_{name}_checkpointing"):
                logger.info(
                    "gradient checkpointing is turned off: the runtime recomputes each block already"
                )
                getattr(model, f"{name}_checkpointing_disable")()
            return


def move_what_stays(model: nn.Module, layers: Layers, device: torch.device) -> None:
    """Bring buffers, and parameters that do not stream, to where the blocks compute."""
    for name, param in layers.resident.items():
        if param.device.type == "cpu":
            param.data = param.data.to(device)
        if param.device != device:
            msg = f"{name} is on {param.device}, but the session computes on {device}; move it there first"
            raise ModelError(msg)
    if device.type == "cpu":
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def no_cache_in_training(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Leave the key-value cache out where gradients are recorded: a recompute would fill it twice."""
    if torch.is_grad_enabled() and kwargs.get("use_cache") is None:
        return args, kwargs | {"use_cache": False}
    return None


def _takes_cache(module: nn.Module) -> bool:
    return (
        hasattr(getattr(module, "config", None), "use_cache")
        and "use_cache" in inspect.signature(module.forward).parameters
    )


def offloaded_model(model: nn.Module) -> OffloadedModel | None:
    """Return the record of a model that is in a store, or None."""
    found = getattr(model, "_megatrain", None)
    return found if isinstance(found, OffloadedModel) else None
