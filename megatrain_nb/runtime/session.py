"""A session: one offload directory, its budgets, its threads, and the models that live in it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatrain_nb.codec.choice import Compression
from megatrain_nb.optim.adamw import UpdateThreads
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime import heap, rss
from megatrain_nb.runtime.checkpoint import Checkpoints
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.controls import Controls
from megatrain_nb.runtime.current import current_session, set_current
from megatrain_nb.runtime.device import pinned_pages
from megatrain_nb.runtime.inforce import plan_in_force
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.models import Models
from megatrain_nb.runtime.notes import describe_found, opening_notes
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.ramwatch import RamWatch
from megatrain_nb.runtime.status import Status, TierStatus, describe_model
from megatrain_nb.runtime.warmup import load_code
from megatrain_nb.store.checkpoint import read_checkpoints, sweep
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool
from megatrain_nb.store.owner import OwnerLock, reclaim
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.plan.plan import Plan
    from megatrain_nb.runtime.callbacks import Callback, StepResult
    from megatrain_nb.runtime.device import Device
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.recorder import Recorder
    from megatrain_nb.store.base import IoRecord
    from megatrain_nb.store.checkpoint import Checkpoint
    from megatrain_nb.store.manifest import Manifest
    from megatrain_nb.store.preflight import Preflight

logger = logging.getLogger("megatrain_nb")

_OWN_LOOP = (
    'crash_safe="step": in a loop of your own only you know where a step ends (after scheduler.step()), so call '
    'session.save_checkpoint("last-step") there; mt.Trainer does it by itself'
)

# Without max_ram_gb: this share of what the machine has left when the session opens.
_DEFAULT_RAM_SHARE = 0.8


class Session:
    """What `init` opened; use it as a context manager or call `close`.

    Attributes
    ----------
    preflight
        What the offload directory can do.
    notes
        What the user should know about this session, one sentence each.
    max_ram_bytes
        Budget for RAM in bytes.
    max_disk_bytes, max_vram_bytes
        Budgets in bytes; None for no limit.
    max_resident_bytes
        Keep at most this much of each model in RAM between uses, in bytes, however large the budget is; None
        lets the plan decide. For measurements and tests.
    max_kept_bytes
        Keep at most this much of each model's activations from forward to backward; None lets the plan decide.
    max_tail_bytes
        Keep at most this much of each model's gradients and moments on a device with memory of its own; None lets
        the plan decide, 0 leaves all updates to the host.
    keep_share
        Where a model streams: the share of the RAM beside what streams that may hold activations from forward
        to backward, before weights and states may stay there; None lets the plan decide.
    crash_safe
        ``"step"`` if a checkpoint follows every step of an `mt.Trainer`, or None.
    packed
        The kinds of pieces that are packed on disk, bit for bit.
    compression
        What `init` was asked for Adam's moments.
    callbacks
        Listeners; append a `Callback`.
    controls
        What a person asks for while training runs: pause, stop, save.
    recorder
        What folds the spans of this session, if someone watches or records.
    shown
        A live view follows the training; other progress displays keep quiet.
    last_step
        The last optimizer step, or None.
    models
        The models in the session.
    saved
        The checkpoints of the directory; `checkpoints` lists them.

    Notes
    -----
    Models are used from one thread at a time. `stop`, `clear_stop` and `status` may be called from any.
    """

    def __init__(
        self,
        preflight: Preflight,
        *,
        max_ram_bytes: int | None,
        max_disk_bytes: int | None,
        max_vram_bytes: int | None,
        device: Device,
        crash_safe: str | None = None,
        packed: frozenset[What] = frozenset(),
        compression: Compression | None = None,
    ) -> None:
        self.max_ram_bytes = max_ram_bytes or round(
            _DEFAULT_RAM_SHARE * rss.available_bytes()
        )
        self.compression = compression or Compression()
        heap.return_freed_memory(self.max_ram_bytes)
        self.packed = packed
        self.preflight = preflight
        self.crash_safe = crash_safe
        self.max_vram_bytes = max_vram_bytes
        self.max_disk_bytes = max_disk_bytes
        self.max_resident_bytes: int | None = None
        self.max_kept_bytes: int | None = None
        self.max_tail_bytes: int | None = None
        self.keep_share: float | None = None
        self.callbacks: list[Callback] = []
        self.controls = Controls()
        self.recorder: Recorder | None = None
        self.shown = False
        self.last_step: StepResult | None = None
        self.stop_event = threading.Event()
        self.models = Models(self)
        self._closed = False
        self.device = device
        self._lock = OwnerLock(preflight.path)
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            reclaimed, found = _take_over(self._lock, self.max_ram_bytes)
            self._open_store([each.manifest for each in found])
            undo.callback(self.store.close)
            self.saved = Checkpoints(self, found)
            self.threads = UpdateThreads()
            undo.callback(self.threads.close)
            undo.pop_all()
        self.notes = opening_notes(
            preflight,
            device,
            self.compression,
            max_vram_bytes=max_vram_bytes,
            max_disk_bytes=max_disk_bytes,
            reclaimed_bytes=reclaimed,
        )
        if found:
            self.note(describe_found(found, self._lock.left_at_step))
        self._watch = RamWatch(self.max_ram_bytes, self.note)

    def _open_store(self, pinned: list[Manifest]) -> None:
        """Open pool and store; what was packed by a session before is read as well."""
        packing = bool(self.packed) or any(each.packed for each in pinned)
        load_code(self.compression, packing=packing)
        self._other = rss.OtherMeter()
        self._page_lock = pinned_pages(self.device)
        self.pool = HostPool(
            self.max_ram_bytes,
            page_lock=self._page_lock,
            locked=frozenset({What.WEIGHTS.value, What.GRADS.value}),
            changing=self._other.changing,
        )
        self.store = DiskStore(
            self.preflight.path,
            max_bytes=self.max_disk_bytes,
            direct=self.preflight.direct,
            on_io=self._on_io,
            pinned=pinned,
            staging=self.pool if packing else None,
        )

    # -- life -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Give back every byte, thread and file but for checkpoints; a second call does nothing.

        Weights that are neither exported nor in a checkpoint are lost: save before with ``mt.save_pretrained``
        or `save_checkpoint`, or take the model out with ``mt.unwrap``.

        Raises
        ------
        SessionError
            Another thread trains.
        """
        CLAIM.check()
        self._close()

    def _close(self) -> None:
        with interrupts_wait(self.stop_event, breakable=False), ExitStack() as closing:
            if self._closed:
                return
            self._closed = True
            if current_session() is self:
                set_current(None)
            closing.callback(heap.trim)
            closing.callback(self._lock.release)
            closing.callback(self.device.close)
            closing.callback(self.pool.close)
            closing.callback(self.threads.close)
            closing.callback(self.store.close)
            closing.callback(self._watch.close)
            for model in self.models:
                closing.callback(model.close, "the session was closed")
                self._warn_unsaved(model)

    def _warn_unsaved(self, model: OffloadedModel) -> None:
        if model.executor.version != model.saved_version:
            logger.warning(
                "%s: closing the session discards changes of its weights that were not saved (now at step %d)",
                model.name,
                model.steps.done,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Ask the running training to stop: KeyboardInterrupt at the next block border.

        The model is then as after the last whole step.
        """
        self.stop_event.set()

    def clear_stop(self) -> None:
        """Take a request to stop back."""
        self.stop_event.clear()

    # -- checkpoints --------------------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Let checkpoints hold the state of other objects as well: a learning rate scheduler, a sampler.

        Parameters
        ----------
        **objects
            By a name of your choice. Each has ``state_dict()`` and ``load_state_dict()``, or ``get_state()`` and
            ``set_state()`` as a ``torch.Generator``; what they give is dicts, lists, texts, numbers and tensors.
            None takes one off the list.

        Raises
        ------
        ArgumentError
            An object without these.
        """
        self.saved.register(objects)

    def save_checkpoint(
        self, name: str | None = None, *, keep: int | None = None
    ) -> Checkpoint:
        """Keep the models, their optimizers, what was registered and the random states as they are now.

        Nothing that is on the disk is written again: its tiles are pinned. Call it between steps.

        Parameters
        ----------
        name
            None for ``step-`` and the number of the step. One of the same name is replaced.
        keep
            How many checkpoints to keep, this one included: older ones are removed after it. None keeps all.

        Returns
        -------
        Checkpoint
            Its ``name``, ``step``, ``time`` and ``num_bytes``.

        Raises
        ------
        SessionError
            No model is in the session, or it is in the middle of a step.
        BudgetError
            The disk has no room for it and the step after it; nothing was changed.
        StoreError
            The disk is full or failed; earlier checkpoints are whole, and training can go on.
        """
        return self.saved.save_and_keep(name, keep)

    def resume(
        self, name: str | None = None, *, weights_only: bool = False
    ) -> Checkpoint:
        """Go on from a checkpoint: everything is as it was when it was taken, bit for bit.

        Make model, optimizer and what you registered as before, then call this. Takes milliseconds: tiles
        are read when they are needed. Moments stay in the codecs that they had, also where this session has another
        ``optimizer_compression`` (a note says so; `recompress` converts them).

        Parameters
        ----------
        name
            Which one; None for the last that was taken.
        weights_only
            Only the weights and buffers; optimizer, random states and what was registered stay as they are.

        Raises
        ------
        ArgumentError
            There is none, or what was registered is not what the checkpoint holds.
        ModelError
            It is of another model: names the first difference. Nothing has changed.
        StoreError
            Its files are damaged. A tile is checked when it is read.
        BudgetError
            The moments do not fit in the codecs that they had. Nothing has changed.
        """
        return self.saved.resume(name, weights_only=weights_only)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints in the offload directory, oldest first."""
        return self.saved.all()

    def remove_checkpoint(self, name: str) -> None:
        """Delete a checkpoint; what only it held of the disk is free then."""
        CLAIM.check()
        self.saved.remove(self.saved.get(name))

    def export_checkpoint(self, name: str | None, folder: str | Path) -> Path:
        """Copy a checkpoint (None: the last) to a new folder, on any disk; ``mt.init`` can open it there.

        Raises
        ------
        ArgumentError
            No such checkpoint, or the folder exists.
        StoreError
            The disk is full or failed; no half folder is left.
        """
        return self.saved.export(name, Path(folder))

    def import_checkpoint(
        self, folder: str | Path, name: str | None = None
    ) -> Checkpoint:
        """Copy a checkpoint from a folder that `export_checkpoint` made, every tile checked; `resume` uses it.

        Raises
        ------
        ArgumentError
            Not such a folder.
        BudgetError, StoreError
            No room; damaged; or a disk failed.
        """
        return self.saved.take_in(Path(folder), name)

    # -- models -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force of the model that came last, as `estimate` makes one before a run; None before it trains.

        What stays where is what the session has decided. Seconds are simulated on the machine that was probed for the
        offload directory (`probe`), else on assumed figures. In a plain loop it is of one micro-batch.
        """
        found = [model for model in self.models if not model.deleted]
        return plan_in_force(found[-1]) if found else None

    def layouts(self) -> list[Layout]:
        """Return the blocks of each model, and what of them the plan keeps in RAM."""
        return self.models.layouts()

    # -- what happens -------------------------------------------------------------------------------------

    def on_span(self, span: Span) -> None:
        """Pass a span on to the callbacks."""
        for callback in self.callbacks:
            callback.on_span(span)

    def _on_io(self, record: IoRecord) -> None:
        span = Span(
            kind=record.op,
            name=record.key,
            start_s=record.start_s,
            end_s=record.end_s,
            num_bytes=record.nbytes,
            lane="disk",
        )
        try:
            self.on_span(span)
        except Exception:  # a listener's fault must not pass for one of the disk's
            logger.exception("a callback failed in on_span")

    def note_step(self, result: StepResult) -> None:
        """Tell the callbacks that a step is complete."""
        self.last_step = result
        self._lock.note_step(result.step)
        if self.crash_safe and not self.saved.after_each_step:
            self.saved.after_each_step = True
            self.note(_OWN_LOOP)
        for callback in self.callbacks:
            callback.on_step_end(result)

    def note(self, text: str) -> None:
        """Tell the user something, in the log and in the status."""
        logger.warning(text)
        self.notes = (*self.notes, text)

    def other_bytes(self) -> int:
        """Return the RAM that everything but the pool takes now, above the session's start."""
        return self._other.now(self.pool.mapped_bytes)

    def forget_ram_peak(self) -> None:
        """Let the peak of RAM that `tiers` tells begin again from now, without what was freed."""
        heap.trim()
        self._other.forget_together(self.pool.mapped_bytes)

    def other_peak_bytes(self) -> int:
        """Estimate the most RAM that everything but the pool took since the last call, above the session's start."""
        return max(0, self._other.restart(self.pool.mapped_bytes))

    # -- what a person sees --------------------------------------------------------------------------------

    def tiers(self) -> dict[str, TierStatus]:
        """Return bytes per tier now and at peak."""
        device_bytes = self.device.used_bytes()
        tiers = {
            "device": TierStatus(
                device_bytes, self.device.peak_bytes, self.max_vram_bytes
            ),
            "ram": self._ram(),
            "disk": TierStatus(
                self.store.used_bytes, self.store.peak_bytes, self.max_disk_bytes
            ),
        }
        if self.device.torch_device.type == "cpu":
            del tiers["device"]
        return tiers

    def _ram(self) -> TierStatus:
        pool, limit = self.pool, self.max_ram_bytes
        mapped = pool.mapped_bytes
        counted = self._other.together(mapped)
        if counted is None:
            return TierStatus(pool.in_use_bytes, pool.peak_bytes, limit)
        own, peak = counted
        return TierStatus(mapped + own, peak, limit, own)

    def status(self) -> Status:
        """Return bytes per tier now and at peak, and where the last step's time and bytes went."""
        return Status(
            tiers=self.tiers(),
            last_step=self.last_step,
            models=tuple(
                describe_model(model) for model in self.models if not model.deleted
            ),
            notes=self._notes_now(),
            packed_sizes=self.store.packed_sizes(),
            pinned_bytes=self.pool.pinned_bytes,
            directory=str(self.preflight.path),
            process_bytes=rss.resident_bytes(),
        )

    def __repr__(self) -> str:
        if self._closed:
            return "<Session closed>"
        disk = (
            f", disk at most {format_bytes(self.max_disk_bytes)}"
            if self.max_disk_bytes
            else ""
        )
        return (
            f"<Session {self.preflight.path} on {self.device.torch_device}, "
            f"RAM at most {format_bytes(self.max_ram_bytes)}{disk}>"
        )

    def _repr_html_(self) -> str:
        return (
            self.status()._repr_html_() if not self._closed else "<p>Session closed</p>"
        )

    def _notes_now(self) -> tuple[str, ...]:
        problem = self._page_lock.problem if self._page_lock is not None else ""
        return (*self.notes, problem) if problem else self.notes


def _take_over(lock: OwnerLock, max_ram_bytes: int) -> tuple[int, list[Checkpoint]]:
    """Remove what a dead owner left; return the bytes of it, and the checkpoints that are there."""
    directory = lock.directory
    sweep(directory)
    found = read_checkpoints(directory, most_bytes=max_ram_bytes)
    reclaimed = reclaim(directory) if lock.took_over and not found else 0
    return reclaimed, found


_pid = os.getpid()


def _close_current() -> None:
    # A forked child shares the files, but does not own them.
    session = current_session()
    if session is not None and os.getpid() == _pid:
        session._close()


# Nothing but checkpoints is left in the offload directory when the interpreter ends.
atexit.register(_close_current)
