"""``mt.Trainer``: transformers' Trainer, its accumulation window taken layer by layer in one step."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from megatrain_nb.errors import ArgumentError
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.current import require_session
from megatrain_nb.runtime.export import save_pretrained
from megatrain_nb.runtime.gradients import total_norm
from megatrain_nb.runtime.offload import OffloadedModel, offload, offloaded_model
from megatrain_nb.runtime.optimizer import (
    AdamW,
    adopt,
    check_kind,
    check_nonfinite,
)
from megatrain_nb.runtime.otherstate import set_random_state
from megatrain_nb.runtime.runs import (
    TRAINER,
    folder_of,
    folders_in,
    read_reference,
    step_of,
    to_remove,
    write_reference,
)
from megatrain_nb.runtime.tokens import valid_tokens
from megatrain_nb.runtime.trainerstate import Progress, state_in
from megatrain_nb.runtime.wrap import run_window
from megatrain_nb.store.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import TrainingArguments

    from megatrain_nb.runtime.saved import Saved
    from megatrain_nb.runtime.session import Session

# The loss that the running micro-batch would have called backward on; every micro-batch has its own context.
_taken: ContextVar[list[Tensor]] = ContextVar("taken")
# What crash_safe="step" keeps of a run, beside its checkpoint folders.
_LAST_STEP = "last-step"
_DISPLAYS = ("NotebookProgressCallback", "ProgressCallback", "PrinterCallback")
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


class Trainer(transformers.Trainer):
    """A drop-in for ``transformers.Trainer`` over a model in the open session.

    Parameters
    ----------
    model
        In RAM (it moves into the session, block by block), or from ``mt.from_config``.
    args
        ``TrainingArguments`` as for transformers; what cannot be honoured is refused.
    fuse_micro_batches
        Let small micro-batches of a step pass a block together, where that gives the same up to rounding. Dropout
        then draws other masks.
    **kwargs
        As for ``transformers.Trainer``. ``optimizers=(optimizer, scheduler)`` takes an AdamW or Adam over.
        ``nonfinite``, ``dtype``: as for `wrap`.

    Raises
    ------
    SessionError
        ``mt.init`` was not called.
    ArgumentError
        A training argument that cannot be honoured: says which and why.

    Notes
    -----
    ``output_dir/checkpoint-N`` refers to a checkpoint of the session, which stays in the offload directory and
    costs no second write; see `Session.checkpoints`.

    With dropout and more than one micro-batch per step, the micro-batches after the first draw from
    random streams of their own (see `megatrain_nb.runtime.window`).
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        fuse_micro_batches: bool = False,
        **kwargs: Any,
    ) -> None:
        self.session: Session = require_session()
        args = args or transformers.TrainingArguments("tmp_trainer", save_strategy="no")
        check_arguments(args, kwargs)
        if args.device.type != self.session.device.torch_device.type:
            msg = (
                f"the session computes on {self.session.device.torch_device}, TrainingArguments on {args.device}; "
                "give use_cpu=True there, or another device to mt.init"
            )
            raise ArgumentError(msg)
        args._n_gpu = min(args.n_gpu, 1)
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            if hasattr(args, name):
                setattr(args, name, False)  # each block is recomputed anyway
        if self.session.device.torch_device.type == "cpu":
            args.dataloader_pin_memory = False  # there is nothing to pin for
        self._nonfinite = kwargs.pop("nonfinite", "stop")
        check_nonfinite(self._nonfinite)
        optimizer, scheduler = kwargs.pop("optimizers", (None, None)) or (None, None)
        if optimizer is not None:
            check_kind(optimizer)
        self._made_state: Tensor | None = None
        if model is None and kwargs.get("model_init") is not None:
            # transformers makes it here and again before training, seeded; here once, for the same numbers.
            transformers.set_seed(args.seed)
            model = kwargs.pop("model_init")()
            self._made_state = torch.get_rng_state()
        if not isinstance(model, nn.Module):
            msg = f"model={model!r} is not a model; give model= or model_init="
            raise ArgumentError(msg)
        offload(model, self.session, kwargs.pop("dtype", None))
        self._offloaded_of(model).executor.check_usable()
        self._offloaded_of(model).fuse(fuse_micro_batches)
        if optimizer is not None:
            optimizer = adopt(
                self._offloaded_of(model), optimizer, None, self._nonfinite
            )
        self._window: list[tuple[nn.Module, Any, Any]] = []
        self._progress = Progress(self)
        self._references: dict[Path, str] = {}
        self._resuming: Saved | None = None
        self.session.controls.save_dir = Path(args.output_dir or "megatrain-saved")
        super().__init__(
            model=model, args=args, optimizers=(optimizer, scheduler), **kwargs
        )
        self.add_callback(_Reports(self))

    @staticmethod
    def _offloaded_of(model: Any) -> OffloadedModel:
        offloaded = offloaded_model(model)
        assert offloaded is not None
        return offloaded

    @property
    def offloaded(self) -> OffloadedModel:
        """The model's record in the session."""
        return self._offloaded_of(self.model)

    @property
    def streamed_optimizer(self) -> AdamW:
        """The optimizer itself, without accelerate's wrapper."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(optimizer, AdamW)
        return optimizer

    # -- what transformers' training loop calls ---------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make an AdamW with transformers' own parameter groups."""
        if self.optimizer is None:
            made = super().create_optimizer(model)
            self.optimizer = adopt(self.offloaded, made, None, self._nonfinite)
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Collect a micro-batch; with the last one of the window, run forward and backward of all."""
        self.offloaded.steps.begin(stops=False)
        self._window.append((model, inputs, num_items_in_batch))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        window, self._window = self._window, []
        tokens = sum(valid_tokens(model, inputs) for model, inputs, _ in window)
        self.accelerator.backward = self._take_loss
        try:
            losses = run_window(
                self.offloaded,
                [self._compute(*micro_batch) for micro_batch in window],
                tokens=tokens,
            )
        finally:
            del self.accelerator.backward
        for loss in losses[:-1]:
            self._add_to_running_loss(loss)
        return losses[-1]

    def _add_to_running_loss(self, loss: Tensor) -> None:
        """Add a micro-batch's loss as transformers' loop does; the last one of a window it adds itself."""
        if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
            since = 1 + self.state.global_step - self._globalstep_last_logged
            self._tr_loss += self._tr_loss / since
        else:
            self._tr_loss += loss

    def _compute(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any
    ) -> Callable[[], Tensor]:
        """Return the micro-batch as a function that gives its loss, graph included.

        transformers' own training_step runs; where it would call backward, the loss is taken instead.
        """

        def compute() -> Tensor:
            taken: list[Tensor] = []
            _taken.set(taken)
            super(Trainer, self).training_step(model, inputs, num_items_in_batch)
            return taken[0]

        return compute

    def _take_loss(self, loss: Tensor, **_: Any) -> None:
        """Stand in for accelerate's backward inside a micro-batch."""
        _taken.get().append(loss / self.accelerator.gradient_accumulation_steps)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.streamed_optimizer.clip_next(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return total_norm(self.offloaded) if grad_norm is None else grad_norm

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the blocks go to the session's device by themselves."""

    def train(
        self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as transformers does; the callbacks of the session hear of it.

        Parameters
        ----------
        resume_from_checkpoint
            True: the last checkpoint in ``output_dir``. A folder ``checkpoint-N``: that one. One of
            ``session.checkpoints()``, or its name: that one, also where it came from elsewhere without such a folder. None
            or False: begin.
        *args, **kwargs
            As for transformers.

        Raises
        ------
        ArgumentError
            There is no such checkpoint, or the session has not got it.
        ModelError
            It is of another model.
        SessionError
            Another thread trains.
        """
        with CLAIM.held("mt.Trainer.train"):
            return self._begin(resume_from_checkpoint, *args, **kwargs)

    def _begin(self, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        self._window.clear()
        if resume_from_checkpoint in (None, False):
            return self._train(None, *args, **kwargs)
        name = self._find_checkpoint(resume_from_checkpoint)
        checkpoints = self.session.saved
        self._resuming = checkpoints.read(name)
        try:
            with tempfile.TemporaryDirectory() as folder:  # what transformers reads
                reference = folder_of(Path(folder), checkpoints.get(name).step)
                write_reference(
                    reference,
                    name=name,
                    offload_dir=self.session.preflight.path,
                    trainer_state=state_in(
                        self._resuming.objects.get(TRAINER),
                        most_bytes=checkpoints.room_bytes(),
                    ),
                )
                return self._train(str(reference), *args, **kwargs)
        finally:
            self._resuming = None

    def _train(self, resume: str | None, *args: Any, **kwargs: Any) -> Any:
        if self._made_state is not None:
            transformers.set_seed(self.args.seed)
            torch.set_rng_state(self._made_state)
        if self.session.shown:  # one progress display is enough
            for display in list(self.callback_handler.callbacks):
                if type(display).__name__ in _DISPLAYS:
                    self.remove_callback(display)
        try:
            return super().train(resume, *args, **kwargs)
        finally:
            self._window.clear()
            self.session.controls.reset()
            for callback in self.session.callbacks:
                callback.on_train_end()

    # -- checkpoints --------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write model, tokenizer and arguments, as transformers does; any model, and all but the arguments at once."""
        if not self.args.should_save:
            return
        directory = Path(output_dir or self.args.output_dir or ".")
        assert self.model is not None
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)  # fmt: skip
        save_pretrained(self.model, directory, tokenizer=tokenizer)
        torch.save(self.args, directory / TRAINING_ARGS_NAME)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Take a checkpoint of the session, and make the folder that refers to it."""
        if trial is None:
            self.store_flos()
        run, state = self._run_directory(trial), self.state
        folder = folder_of(run, state.global_step)
        if state.best_global_step:
            best = folder_of(run, state.best_global_step)
            if best == folder or best.exists():
                state.best_model_checkpoint = str(best)
        _note_callbacks(self)
        there = self._referring(folders_in(run))
        leaving = to_remove(
            sorted(there, key=lambda path: path.stat().st_mtime),
            folder,
            limit=self.args.save_total_limit,
            best=state.best_model_checkpoint,
        )
        checkpoints = self.session.saved
        old = [
            each
            for each in checkpoints.all()
            if each.name in {there[x] for x in leaving}
        ]
        with self._registered():
            checkpoints.save(str(folder), leaving=old)
        write_reference(
            folder,
            name=str(folder),
            offload_dir=self.session.preflight.path,
            trainer_state=self._progress.text(),
        )
        for path in leaving:
            shutil.rmtree(path, ignore_errors=True)
        for each in old:
            checkpoints.remove(each)
        self._references = self._referring(folders_in(run))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.session.crash_safe:
            _note_callbacks(self)
            with self._registered():
                self.session.saved.save(str(self._run_directory() / _LAST_STEP))

    def _run_directory(self, trial: Any = None) -> Path:
        return Path(self._get_output_dir(trial=trial)).absolute()

    def _referring(self, folders: list[Path]) -> dict[Path, str]:
        """Return the checkpoint that each folder refers to, where the session has it.

        Where a folder cannot say it, that is the one called after it, as `_save_checkpoint` calls them; a save does
        not fail for what an old folder has lost.
        """
        names = {each.name for each in self.session.checkpoints()}
        found = {}
        for folder in folders:
            try:
                name = read_reference(folder)["checkpoint"]
            except ArgumentError:
                name = str(folder)
                known = (
                    "is taken for" if name in names else "and the session has not got"
                )
                note = f"{folder} does not say which checkpoint it refers to (megatrain.json is damaged), {known} the one of its name"  # fmt: skip
                if note not in self.session.notes:
                    self.session.note(note)
            if name in names:
                found[folder] = name
        return found

    def _forget_removed(self) -> None:
        """Let checkpoints go whose folders transformers has deleted since the last save."""
        for folder, name in self._references.items():
            if not folder.exists():
                self.session.remove_checkpoint(name)
        self._references = self._referring([x for x in self._references if x.exists()])

    def _find_checkpoint(self, wanted: Any) -> str:
        """Return the name of the checkpoint that ``resume_from_checkpoint`` means."""
        every = [each.name for each in self.session.checkpoints()]
        if wanted is True:
            run = self._run_directory()
            there = self._referring(folders_in(run))
            names = [there[max(there, key=step_of)]] if there else []
            last_step = str(run / _LAST_STEP)
            if last_step in every:
                names.append(last_step)
            if not names:
                msg = (
                    f"resume_from_checkpoint=True: {run} refers to no checkpoint in {self.session.preflight.path}; "
                    f"give the offload_dir and output_dir of the run that is to go on, or {_alternative(every)}"
                )
                raise ArgumentError(msg)
            return max(names, key=every.index)
        if isinstance(wanted, Checkpoint):
            return self.session.saved.get(wanted.name).name
        if not isinstance(wanted, str | Path):
            msg = f"resume_from_checkpoint={wanted!r} is neither True, nor a folder, nor one of session.checkpoints()"
            raise ArgumentError(msg)
        folder = Path(wanted).absolute()
        if not folder.exists():  # a checkpoint that came here without its folder
            if str(wanted) in every:
                return str(wanted)
            msg = (
                f"resume_from_checkpoint={str(wanted)!r} is neither a folder nor the name of a checkpoint in "
                f"{self.session.preflight.path}; there: {', '.join(map(repr, every)) or 'none'}"
            )
            raise ArgumentError(msg)
        reference = read_reference(folder)
        name = reference["checkpoint"]
        if name not in every:
            msg = (
                f"{folder} refers to a checkpoint in {reference['offload_dir']}, and the session in "
                f"{self.session.preflight.path} has not got it; open mt.init there, or bring it over with "
                "session.export_checkpoint and session.import_checkpoint"
            )
            raise ArgumentError(msg)
        return name

    @contextmanager
    def _registered(self) -> Iterator[None]:
        """Let the session's checkpoints hold the scheduler's and the loop's state for a while."""
        mine = {"lr_scheduler": self.lr_scheduler, TRAINER: self._progress}
        self.session.register(**mine)
        try:
            yield
        finally:
            self.session.register(**dict.fromkeys(mine))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        """Do nothing yet: weights come back together with the optimizer, once that is made."""
        assert self._resuming is not None
        # The order of the data follows from it.
        torch.manual_seed(self._resuming.objects[TRAINER]["seed"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            name = read_reference(Path(checkpoint))["checkpoint"]
            with self._registered():
                self.session.saved.resume(name, saved=self._resuming)
            assert self._resuming is not None
            self._resuming = dataclasses.replace(self._resuming, models=[], objects={})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states once more, where the data are where they were."""
        if checkpoint is not None:
            assert self._resuming is not None
            set_random_state(self._resuming.random)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Take no step beyond the last: transformers takes one when a finished run is resumed within an epoch."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        best = Path(self.state.best_model_checkpoint)
        name = self._referring([best]).get(best, str(best))
        self.session.resume(name, weights_only=True)


def _alternative(names: list[str]) -> str:
    """Return what one can do instead of going on from the last checkpoint of ``output_dir``."""
    if not names:
        return "begin without it"
    there = ", ".join(repr(name) for name in names)
    return f"name one that the session holds: resume_from_checkpoint={there}"


def _note_callbacks(trainer: Trainer) -> None:
    """Put the callbacks' states into the Trainer's, as transformers does before it saves."""
    states: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    trainer.state.stateful_callbacks = {  # type: ignore[assignment]
        name: each if len(each) > 1 else each[0] for name, each in states.items()
    }


class _Reports(transformers.TrainerCallback):
    """Passes what happens in transformers' loop on to the session."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        if args.save_strategy != SaveStrategy.NO or self._trainer.session.crash_safe:
            self._trainer.session.saved.check_room()
        self._trainer._progress.begin()
        self._trainer.session.controls.usual_logging_steps = state.logging_steps
        self._trainer.session.saved.num_steps = state.max_steps
        self._trainer.session.saved.after_each_step = True
        for callback in self._trainer.session.callbacks:
            callback.on_train_begin(state.max_steps - state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        controls = self._trainer.session.controls
        self._trainer.offloaded.steps.obey_controls()
        if controls.stopping:
            control.should_training_stop = True
            # As after the last step of all: a run that is to go on can.
            if args.save_strategy == SaveStrategy.STEPS:
                control.should_save = True
        state.logging_steps = controls.logging_steps or controls.usual_logging_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = kwargs.get("metrics") or {}
        metrics = {k: float(v) for k, v in found.items() if isinstance(v, int | float)}
        for callback in self._trainer.session.callbacks:
            callback.on_evaluate(state.global_step, metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.streamed_optimizer.finish()
        self._trainer._forget_removed()
        self._trainer.session.saved.after_each_step = False


def check_arguments(args: TrainingArguments, kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be honoured, in a sentence that says why.

    Raises
    ------
    ArgumentError
        The first such argument.
    """
    for refused, name, why in _refusals(args, kwargs):
        if refused:
            msg = f"{name}: {why}"
            raise ArgumentError(msg)


def _refusals(
    args: TrainingArguments, kwargs: dict[str, Any]
) -> list[tuple[bool, str, str]]:
    optim = str(getattr(args.optim, "value", args.optim))
    return [
        (
            args.save_strategy != SaveStrategy.NO and args.save_only_model,
            "save_only_model=True",
            "a checkpoint pins weights and moments together, at no cost; leave it out, and write the weights alone "
            "with trainer.save_model(dir)",
        ),
        (
            args.save_strategy != SaveStrategy.NO and args.push_to_hub,
            "push_to_hub=True with save_strategy",
            'checkpoints stay in the offload directory; give save_strategy="no" and push at the end',
        ),
        (
            optim not in _OPTIMIZERS,
            f"optim={optim!r}",
            f"updates run on the host in AdamW kernels; give one of {', '.join(_OPTIMIZERS)}. Moments in fewer bits are "
            "asked for with mt.init(optimizer_compression=...)",
        ),
        (
            args.fp16,
            "fp16=True",
            "there is no loss scaler; train in fp32, or in bf16 with mt.Trainer(dtype=torch.bfloat16)",
        ),
        (
            args.bf16,
            "bf16=True",
            "in transformers it means autocast over fp32 weights; leave it out, and for bf16 compute with an fp32 "
            "master give mt.Trainer(dtype=torch.bfloat16) or a model that is bf16",
        ),
        (
            bool(args.fp16_full_eval),
            "fp16_full_eval=True",
            "the streamed weights stay as they are; leave it out",
        ),
        (
            bool(args.bf16_full_eval),
            "bf16_full_eval=True",
            "the streamed weights stay as they are; leave it out",
        ),
        (
            bool(args.fsdp),
            f"fsdp={args.fsdp!r}",
            "the session streams the model on one device; leave fsdp out",
        ),
        (
            bool(args.deepspeed),
            "deepspeed",
            "the session offloads the model itself; leave deepspeed out",
        ),
        (
            bool(args.torch_compile),
            "torch_compile=True",
            "compiled graphs hold on to weights that come and go",
        ),
        (
            bool(args.auto_find_batch_size),
            "auto_find_batch_size=True",
            "it restarts after out-of-memory errors",
        ),
        (
            args.world_size > 1,
            f"{args.world_size} processes",
            "one process and one device; start without a launcher",
        ),
        (
            kwargs.get("optimizer_cls_and_kwargs") is not None,
            "optimizer_cls_and_kwargs",
            "give optimizers=(torch.optim.AdamW(...), None) instead",
        ),
    ]
