"""A session: one offload directory, its budgets, its threads, and the models that live in it."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatrain_nb.codec import split
from megatrain_nb.codec.choice import Compression, parse_compression
from megatrain_nb.codec.lossless import chunks
from megatrain_nb.codec.names import LOSSLESS
from megatrain_nb.errors import ArgumentError, SessionError
from megatrain_nb.optim import encoded
from megatrain_nb.optim.adamw import UpdateThreads, warm_up
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime import heap, rss
from megatrain_nb.runtime.checkpoint import Checkpoints, check_stateful
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.controls import Controls
from megatrain_nb.runtime.device import open_device, pinned_pages
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.piece import MOMENTS, What
from megatrain_nb.runtime.status import Status, TierStatus, describe_model
from megatrain_nb.store.checkpoint import read_checkpoints, sweep
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool
from megatrain_nb.store.owner import OwnerLock, reclaim
from megatrain_nb.store.preflight import check_directory
from megatrain_nb.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from megatrain_nb.plan.layout import Layout
    from megatrain_nb.runtime.callbacks import Callback, StepResult
    from megatrain_nb.runtime.device import Device
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.recorder import Recorder
    from megatrain_nb.store.base import IoRecord
    from megatrain_nb.store.checkpoint import Checkpoint
    from megatrain_nb.store.manifest import Manifest
    from megatrain_nb.store.preflight import Preflight

logger = logging.getLogger("megatrain_nb")

_current: Session | None = None

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
        self.keep_share: float | None = None
        self.callbacks: list[Callback] = []
        self.controls = Controls()
        self.recorder: Recorder | None = None
        self.shown = False
        self.last_step: StepResult | None = None
        self.stop_event = threading.Event()
        self.num_models = 0
        self._models: list[OffloadedModel] = []
        self._at_work: OffloadedModel | None = None
        self._closed = False
        self.device = device
        self._lock = OwnerLock(preflight.path)
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            reclaimed, found = _take_over(self._lock)
            self._open_store([each.manifest for each in found])
            undo.callback(self.store.close)
            self.saved = Checkpoints(self, found)
            self.threads = UpdateThreads()
            undo.callback(self.threads.close)
            undo.pop_all()
        self.notes = self._find_notes(reclaimed)
        self._tell_found(found)
        self._peak = rss.PeakMeter()

    def _open_store(self, pinned: list[Manifest]) -> None:
        """Open pool and store; what was packed by a session before is read as well."""
        packing = bool(self.packed) or any(each.packed for each in pinned)
        load_code(self.compression, packing=packing)
        self._base_bytes = rss.resident_bytes()
        self._page_lock = pinned_pages(self.device)
        self.pool = HostPool(
            self.max_ram_bytes,
            page_lock=self._page_lock,
            locked=frozenset({What.WEIGHTS.value, What.GRADS.value}),
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
        global _current  # noqa: PLW0603
        with interrupts_wait(self.stop_event, breakable=False), ExitStack() as closing:
            if self._closed:
                return
            self._closed = True
            if _current is self:
                _current = None
            closing.callback(heap.trim)
            closing.callback(self._lock.release)
            closing.callback(self.device.close)
            closing.callback(self.pool.close)
            closing.callback(self.threads.close)
            closing.callback(self.store.close)
            for model in list(self._models):
                closing.callback(model.close, "the session was closed")
                self._warn_unsaved(model)

    def _warn_unsaved(self, model: OffloadedModel) -> None:
        if model.executor.version != model.saved_version:
            logger.warning(
                "%s: closing the session discards changes of its weights that were not saved (now at step %d)",
                model.name,
                model.num_steps,
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
        for name, each in objects.items():
            if each is None:
                self.saved.objects.pop(name, None)
                continue
            check_stateful(name, each)
            self.saved.objects[name] = each

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
        if keep is not None and (type(keep) is not int or keep < 1):
            msg = f"keep={keep!r} is not usable; give a number of checkpoints, 1 or more, or None"
            raise ArgumentError(msg)
        given: object = name
        if name is not None and not (isinstance(given, str) and 0 < len(given) <= 200):
            msg = f"name={name!r} is not usable; give a short text, or None"
            raise ArgumentError(msg)
        before = self.saved.all()
        others = [each for each in before if each.name != name]
        removing = [] if keep is None else others[: max(0, len(others) + 1 - keep)]
        checkpoint = self.saved.save(name, leaving=removing)
        for each in removing:
            self.saved.remove(each)
        return checkpoint

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

    def usable_models(self) -> list[OffloadedModel]:
        """Return the models in the order in which they came.

        Raises
        ------
        SessionError
            There is none, the session is closed, or one must not be used any more.
        """
        if self._closed:
            msg = "the session is closed; open one with mt.init(...)"
            raise SessionError(msg)
        if (
            len(self._models) > 1
        ):  # one that nobody uses any more may wait for the collector
            gc.collect()
        self._let_go()
        if not self._models:
            msg = "no model is in the session; call mt.wrap(model) or make an mt.Trainer first"
            raise SessionError(msg)
        for model in self._models:
            model.executor.check_usable()
        return list(self._models)

    # -- models -----------------------------------------------------------------------------------------

    def check_in(self) -> None:
        """Make room before a model moves in: let go of those that nobody holds any more."""
        CLAIM.check()
        if self._models:
            gc.collect()
        self._let_go()

    def _let_go(self) -> None:
        for model in [model for model in self._models if model.deleted]:
            model.close("the model was deleted")

    def adopt(self, model: OffloadedModel) -> None:
        """Note a model that moves in."""
        self._models.append(model)
        self.num_models += 1

    def dismiss(self, model: OffloadedModel) -> None:
        """Note a model that left, and free what it had on disk."""
        if model in self._models:
            self._models.remove(model)
            self._at_work = None
            if not self._closed:
                model.pager.delete_all()
                if self._models:  # the others may have its share
                    self.plan()

    @property
    def models(self) -> tuple[OffloadedModel, ...]:
        """The models in the session."""
        return tuple(self._models)

    def plan(self) -> None:
        """Give every model an equal share of the RAM, and let each decide what of it stays there.

        Raises
        ------
        BudgetError
            A share is too small.
        """
        share = self.share_bytes()
        self.pool.limit_bytes = self.max_ram_bytes
        for model in self._models:
            model.plan(share)
        self.pool.trim()
        reserved = max(
            model.residency.activation_bytes + model.residency.keep_bytes
            for model in self._models
        )
        limit = self.max_ram_bytes - reserved
        for model in self._models:
            model.pager.shrink(limit)
        self.pool.limit_bytes = limit
        if self.callbacks:
            for layout in self.layouts():
                for callback in self.callbacks:
                    callback.on_layout(layout)

    def layouts(self) -> list[Layout]:
        """Return the blocks of each model, and what of them the plan keeps in RAM."""
        return [model.layout() for model in self._models]

    @property
    def plans_by_shape(self) -> bool:
        """Whether a model's shape may tell what to set aside for it: blocks compute in RAM, and nothing was asked for."""
        asked = (self.max_resident_bytes, self.max_kept_bytes, self.keep_share)
        return self.device.in_place and asked == (None, None, None)

    def share_bytes(self) -> int:
        """Return what each model may have of the RAM, in bytes."""
        return self.max_ram_bytes // len(self._models)

    def packing_share_bytes(self) -> int:
        """Return what each model has to leave of its share for packing, in bytes."""
        return -(-self.store.staging_bytes // max(len(self._models), 1))

    def give_turn(self, model: OffloadedModel) -> None:
        """Let one model run; what the others have read ahead, or the deleted ones had, makes room for it."""
        self._let_go()
        if self._at_work is not model:
            for other in self._models:
                if other is not model:
                    other.executor.rest()
            self._at_work = model

    def disk_room_bytes(self, model: OffloadedModel) -> int:
        """Return the bytes that a model may have on disk beside the other models."""
        others = sum(m.residency.disk_bytes for m in self._models if m is not model)
        return self.store.capacity_bytes - self.store.pinned_bytes() - others

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

    def clock(self) -> dict[str, float]:
        """Return running totals: seconds by cause and bytes moved; two of them bound an interval."""
        return {
            "now": time.perf_counter(),
            "compute": self.device.compute_seconds
            + sum(model.executor.compute_seconds for model in self._models),
            "wait": sum(model.pager.wait_seconds for model in self._models),
            "update": sum(
                model.step_seconds + model.updates.seconds for model in self._models
            ),
            "read": float(self.store.read_bytes),
            "written": float(self.store.written_bytes),
            "onloaded": float(self.device.onloaded.num_bytes),
            "offloaded": float(self.device.offloaded.num_bytes),
            "link": self.device.onloaded.seconds + self.device.offloaded.seconds,
        }

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
        return max(0, rss.resident_bytes() - self._base_bytes - self.pool.mapped_bytes)

    def other_peak_bytes(self) -> int:
        """Estimate the most RAM that everything but the pool took since the last call, above the session's start."""
        peak = self._peak.read()
        self._peak.restart()
        return max(0, peak - self._base_bytes - self.pool.mapped_bytes)

    # -- what a person sees --------------------------------------------------------------------------------

    def tiers(self) -> dict[str, TierStatus]:
        """Return bytes per tier now and at peak."""
        device_bytes = self.device.used_bytes()
        ram_bytes = self.pool.in_use_bytes
        tiers = {
            "device": TierStatus(
                device_bytes, self.device.peak_bytes, self.max_vram_bytes
            ),
            "ram": TierStatus(ram_bytes, self.pool.peak_bytes, self.max_ram_bytes),
            "disk": TierStatus(
                self.store.used_bytes, self.store.peak_bytes, self.max_disk_bytes
            ),
        }
        if self.device.torch_device.type == "cpu":
            del tiers["device"]
        return tiers

    def status(self) -> Status:
        """Return bytes per tier now and at peak, and where the last step's time and bytes went."""
        return Status(
            tiers=self.tiers(),
            last_step=self.last_step,
            models=tuple(
                describe_model(model) for model in self._models if not model.deleted
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

    def _tell_found(self, found: list[Checkpoint]) -> None:
        if found:
            self.note(_describe_found(found, self._lock.left_at_step))

    def _find_notes(self, reclaimed: int) -> tuple[str, ...]:
        notes = [*self.preflight.notes, self.preflight.direct_note]
        if reclaimed:
            notes.append(
                f"{format_bytes(reclaimed)} that an earlier, dead process had left here were removed"
            )
        if self.device.torch_device.type == "cpu" and self.max_vram_bytes:
            notes.append("max_vram_gb has no effect without a GPU")
        if self.device.torch_device.type == "cpu":
            notes.append(
                "no GPU is used: blocks compute in place in RAM, which device and host share"
            )
        if self.device.torch_device.type == "mps":
            notes.append(
                "MPS: blocks are copied to it and from it without overlap; this was never measured"
            )
        if self.max_disk_bytes and self.max_disk_bytes > self.preflight.free_bytes:
            notes.append(
                f"max_disk_gb allows {format_bytes(self.max_disk_bytes)}, but only "
                f"{format_bytes(self.preflight.free_bytes)} are free"
            )
        return tuple(notes)


def init(
    offload_dir: str | Path,
    max_vram_gb: float | str | None = None,
    max_ram_gb: float | str | None = None,
    max_disk_gb: float | str | None = None,
    optimizer_compression: bool | str | Mapping[str, bool | str] = False,
    weight_compression: bool | str = False,
    device: str | torch.device | None = None,
    crash_safe: str | None = None,
) -> Session:
    """Open a session: from now on models are trained through this directory, within these budgets.

    Parameters
    ----------
    offload_dir
        A directory on a fast local disk; made (0700) if it is missing. One session at a time owns it.
    max_vram_gb, max_ram_gb, max_disk_gb
        Budgets: GB (10^9 bytes), or text such as ``"24GiB"``. ``max_ram_gb`` bounds everything held in host
        memory: weights, gradients, moments, staging. Left out: no limit for device and disk, 80 % of
        the free memory for RAM. Without a GPU, device and host share ``max_ram_gb``.
    optimizer_compression
        How Adam's moments are stored: False, as fp32; ``"lossless"``, packed on disk bit for bit, and fp32 in RAM;
        ``"8bit"``, ``"4bit"``, ``"3bit"`` or ``"2bit"``, quantised; ``"dynamic"`` or True, in 2 to 4 bits by an
        error budget. Or a mapping from patterns of parameter or module names to these, ``"lossless"`` not among
        them; the first that matches counts, and what none matches stays fp32. Vectors, norms and
        parameters below 4096 elements stay fp32 in any case; embeddings and the head get 8 bits at least. See
        docs/codecs.md for what each loses.
    weight_compression
        False; or ``"lossless"``: weights are packed on disk bit for bit, fp32 ones and the bf16 halves that compute
        in bf16. Lossless packing takes 22 MB of ``max_ram_gb``, and time of the I/O threads; see docs/lossless.md.
    device
        ``"cuda"`` or ``"cpu"``; left out: CUDA where there is one. ``"mps"`` (Apple) works with plain copies, and was
        never measured.
    crash_safe
        ``"step"``: `mt.Trainer` takes a checkpoint after every step and keeps the last of them, so that a crash
        costs at most the step in progress. Its updates are done at once then, and the disk holds a second version
        of every tile. None: only what ``save_strategy`` and `Session.save_checkpoint` keep.

    Returns
    -------
    Session
        A context manager. An open session of this process is closed first.

    Raises
    ------
    ArgumentError
        A size, directory, device or compression that cannot be used.
    BudgetError
        Less RAM than packing takes.
    SessionError
        Another process owns the directory.
    """
    global _current  # noqa: PLW0603
    CLAIM.check()
    if crash_safe not in (None, "step"):
        msg = f'crash_safe={crash_safe!r} is not known; give "step" or None'
        raise ArgumentError(msg)
    lossless = optimizer_compression == LOSSLESS
    compression = parse_compression(False if lossless else optimizer_compression)
    packed = _packed(moments=lossless, weights=weight_compression)
    given: object = offload_dir
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        msg = f"offload_dir={given!r} is not a directory; give a path on a fast local disk"
        raise ArgumentError(msg)
    sizes = {
        name: None if value is None else parse_size(value, name=name)
        for name, value in (
            ("max_vram_gb", max_vram_gb),
            ("max_ram_gb", max_ram_gb),
            ("max_disk_gb", max_disk_gb),
        )
    }
    preflight = check_directory(offload_dir)
    opened = open_device(device, max_vram_bytes=sizes["max_vram_gb"])
    if (
        _current is not None
    ):  # only now: a mistyped argument must not cost the open session
        _current.close()
    _current = Session(
        preflight,
        max_ram_bytes=sizes["max_ram_gb"],
        max_disk_bytes=sizes["max_disk_gb"],
        max_vram_bytes=sizes["max_vram_gb"],
        device=opened,
        crash_safe=crash_safe,
        compression=compression,
        packed=packed,
    )
    return _current


def _take_over(lock: OwnerLock) -> tuple[int, list[Checkpoint]]:
    """Remove what a dead owner left; return the bytes of it, and the checkpoints that are there."""
    directory = lock.directory
    reclaimed = reclaim(directory) if lock.took_over else 0
    sweep(directory)
    return reclaimed, read_checkpoints(directory)


def _describe_found(found: list[Checkpoint], left_at_step: int | None) -> str:
    last = found[-1]
    count = "a checkpoint" if len(found) == 1 else f"{len(found)} checkpoints, the last"
    lost = (left_at_step or 0) - last.step
    after = (
        f"; the process that died here had done {lost} more {'step' if lost == 1 else 'steps'}, which are lost"
        if lost > 0
        else ""
    )
    return (
        f"this directory holds {count}: {last.label}{after}. Go on with session.resume(), or with "
        "trainer.train(resume_from_checkpoint=True)"
    )


def _packed(*, moments: bool, weights: object) -> frozenset[What]:
    """Return the kinds of pieces to pack."""
    if weights is not False and weights != LOSSLESS:
        msg = f'weight_compression={weights!r}: give False or "{LOSSLESS}" (packed on disk, bit for bit)'
        raise ArgumentError(msg)
    kinds = (MOMENTS if moments else ()) + ((What.WEIGHTS,) if weights else ())
    return frozenset(kinds)


def load_code(compression: Compression | None = None, *, packing: bool = False) -> None:
    """Import and compile what the first step would, so that it is not taken for the model's memory."""
    importlib.import_module("torch._dynamo")  # torch does when an optimizer is made
    warm_up()
    warm_up(split=True)
    split.warm_up()
    for codec in () if compression is None else compression.codecs():
        encoded.warm_up(codec)
        encoded.warm_up(codec, split=True)
    if packing:
        chunks.warm_up()


def current_session() -> Session | None:
    """Return the open session, or None."""
    return _current


def require_session() -> Session:
    """Return the open session.

    Raises
    ------
    SessionError
        There is none: says how to open one.
    """
    if _current is None:
        msg = "no session is open; call mt.init(offload_dir=..., max_ram_gb=...) first (in a notebook: %megatrain init)"
        raise SessionError(msg)
    return _current


_pid = os.getpid()


def _close_current() -> None:
    # A forked child shares the files, but does not own them.
    if _current is not None and os.getpid() == _pid:
        _current._close()


# Nothing but checkpoints is left in the offload directory when the interpreter ends.
atexit.register(_close_current)
