"""Obeys the schedule: brings a block's weights, lets it compute, takes its gradients away.

[Note: who drives whom] The model drives: its forward calls block after block, and each call arrives
here. The executor then carries out the schedule up to the entry that says "this block computes". If
something else comes than was expected (`megatrain_nb.plan.predict`), the rest of the schedule is made
anew from there; numbers never depend on the prediction. Backward is driven by a `Window` (layer-major,
all micro-batches of a step), or by autograd in a plain loop (one micro-batch at a time); both end in
the same two operations, `running` and `BlockCall.backward`.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.errors import BudgetError, ModelError, SessionError, StoreError
from megatrain_nb.plan.predict import Phase, Predictor
from megatrain_nb.plan.schedule import Action, Kind, each_action
from megatrain_nb.plan.timeline import Span
from megatrain_nb.plan.traffic import NUM_FIRST
from megatrain_nb.runtime.autograd import through_autograd
from megatrain_nb.runtime.bound import Bound
from megatrain_nb.runtime.call import BlockCall, keep_weights
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.gradients import Gradients
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.keeping import Keeping
from megatrain_nb.runtime.kept import loosen
from megatrain_nb.runtime.lanes import tensor_over
from megatrain_nb.runtime.layers import part_of
from megatrain_nb.runtime.logits import LargeLogits, plain_arguments
from megatrain_nb.runtime.pager import changed_first
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.tail import Tail
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Container, Iterable, Iterator

    from megatrain_nb.optim.adamw import Segment
    from megatrain_nb.plan.predict import Use
    from megatrain_nb.runtime.device import Device
    from megatrain_nb.runtime.gradients import Slots
    from megatrain_nb.runtime.layers import Block, Layers
    from megatrain_nb.runtime.pager import Pager
    from megatrain_nb.runtime.piece import Piece
    from megatrain_nb.runtime.slots import Slot
    from megatrain_nb.runtime.update import Updates
    from megatrain_nb.runtime.window import Window


class Executor:
    """Runs one model's blocks on weights that come and go.

    Attributes
    ----------
    norms
        2-norm of the pending gradient of each parameter that has one, as a float32 scalar tensor.
    version
        Counts changes of the weights.
    keeping
        Which calls keep their activations for backward.
    compute_seconds
        Time inside blocks' forward and backward so far, where the host computes.
    inside
        The block whose modules hold ordinary parameters at this moment, or None.
    unusable
        Why the model must not be used any more; empty while it may.
    logits
        Which calls of the head wait; None for none.
    stay
        The packs whose weights stay on a device with memory of its own until they change.
    tail
        The packs that live there altogether.
    computing
        The packs of the block that computes at this moment.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        pager: Pager,
        updates: Updates,
        device: Device,
        on_span: Callable[[Span], None],
        stop: threading.Event,
        relieve: Callable[[], None],
    ) -> None:
        self.layers = layers
        self.keeping = Keeping(pager)
        self.pager = pager
        self.updates = updates
        self.device = device
        self.norms: dict[nn.Parameter, Tensor] = {}
        self.version = 0
        self.compute_seconds = 0.0
        self.window: Window | None = None
        self.inside: Block | None = None
        self.unusable = ""
        self.logits: LargeLogits | None = None
        self.stop = stop
        self._relieve = relieve
        self._on_span = on_span
        self._actions: Iterator[Action] = iter(())
        self.stay: frozenset[int] = frozenset()
        self.tail = Tail(self)
        self.computing: tuple[int, ...] = ()
        self.gradients = Gradients(self, on_span)
        self._loaded: dict[int, Slot] = {}
        self._hosted: set[int] = set()
        self._ahead: list[int] = []
        self._learned = [block.spec.index for block in layers.blocks]
        self._order: list[int] = []
        self._complete = False
        self._predictor = Predictor(self._learned)
        pager.needed_last = self._needed_last
        pager.give_back = self.keeping.give_back
        pager.give_up_kept = self.keeping.give_up

    # -- calls of blocks ------------------------------------------------------------------------------

    def call(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for the forward of a block's module."""
        self.check_usable()
        if self.inside is not None:
            return self._nested(block, args, kwargs)
        if self.logits is not None:
            args, kwargs = plain_arguments(args, kwargs)
            waiting = self.logits.put_off(block, args, kwargs)
            if waiting is not None:
                return waiting
        return self.call_now(block, args, kwargs)

    def call_now(
        self,
        block: Block,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        make: type[BlockCall] = BlockCall,
    ) -> Any:
        """Run a block, or hand its call to the window."""
        if not torch.is_grad_enabled():
            if self.window is not None and self.window.is_inside():
                return self.window.visit(block, args, kwargs)
            return self.forward_only(block, args, kwargs)
        call = make(block, args, kwargs, self.device.torch_device)
        if self.window is not None and self.window.is_inside():
            return self.window.suspend(call)
        return through_autograd(self, call)

    def forward_only(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block without gradients, as it is called."""
        with self.running(block, Kind.FORWARD) as bound, bound:
            return keep_weights(block, block.forward(*args, **kwargs))

    def _nested(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block that another block calls: fine if it shares that one's loaded parameters."""
        if all(
            site.module._parameters[site.name] is not site.param for site in block.sites
        ):
            return block.forward(*args, **kwargs)
        assert self.inside is not None
        msg = (
            f"{block.name} is called from inside {self.inside.name}, but is not a part of it; "
            "a block can only compute with its own parameters"
        )
        raise ModelError(msg)

    def begin_forward(self) -> None:
        """Note that the model's forward starts: the order of the last complete one is what to expect."""
        if self._complete and self._order:
            self._learned = self._order
        self._order, self._complete = [], False
        if self.window is None:
            self.keeping.choose(self._learned)

    def expect_window(self) -> None:
        """Note that a window starts."""
        self.keeping.choose(self._learned)

    def end_forward(self) -> None:
        """Note that the model's forward is complete."""
        self._complete = True

    @contextmanager
    def running(
        self, block: Block, kind: Kind, *, turning: bool = False
    ) -> Iterator[Bound]:
        """Load a block and let it compute; the gradients that landed are noted at the end.

        Parameters
        ----------
        block
            The block.
        kind
            ``FORWARD`` or ``BACKWARD``.
        turning
            A forward that goes over into its backward while the block is loaded.
        """
        with interrupts_wait(self.stop):
            yield from self._running(block, kind, turning=turning)

    def _running(self, block: Block, kind: Kind, *, turning: bool) -> Iterator[Bound]:
        self._advance(block, kind, turning=turning)
        with_grads = turning or kind is Kind.BACKWARD
        early = block.spec.index in self._first
        if early and kind is Kind.BACKWARD and self.window is not None:
            self._read_first_states()
        grads = self.gradients.open(block) if with_grads else {}
        moment = self.device.begin()
        start, before = time.perf_counter(), self.not_computing()
        problem, self.computing = None, block.spec.packs
        self._tell("BEGIN", block.name, start, outcome=str(kind))
        try:
            packs = block.spec.packs
            bound = Bound(
                self, block, {p: self.device.ready(self._loaded[p]) for p in packs}
            )
            moment = self.device.begin()
            self._make_parameters(bound, block, grads)
            self._onload_early()
            versions = [plain._version for plain in bound.plain.values()]
            yield bound
            if versions != [plain._version for plain in bound.plain.values()]:
                msg = (
                    f"{block.name} changes its own weights in forward (an embedding with max_norm does); that "
                    "change would be lost"
                )
                raise ModelError(msg)
            if with_grads:
                self.gradients.take(block, bound, grads)
            elif bound.later.used:
                for plain in bound.plain.values():
                    loosen(plain)
        except torch.OutOfMemoryError as error:
            problem = out_of_memory(error, block.name, self.device)
        finally:
            self.computing = ()
            # A block that is used several times goes on with them.
            self.gradients.close(grads, keep=early or block.spec.index in self._ahead)
            if self.device.in_place:
                self._count(block, kind, start, self.not_computing() - before)
            else:
                self.device.since(moment, str(kind), block.name)
        if problem is not None:
            self._clear_device()
            raise problem
        self._report()
        self._relieve()

    def _read_first_states(self) -> None:
        """Read what the updates of the first blocks need: a step follows, and the next forward."""
        for pack in self._first_packs():
            if pack not in self.tail:
                self.updates.read_ahead(pack)

    def _count(
        self, block: Block, kind: Kind, start: float, not_computing: float
    ) -> None:
        """Count the time since ``start`` as computing, but for some."""
        end = time.perf_counter()
        self.compute_seconds += end - start - not_computing
        self._on_span(Span(kind=str(kind), name=block.name, start_s=start, end_s=end))

    def end_step(self) -> None:
        """All computing of a step is over: tell what is known of it now."""
        self._report()
        self.device.end_step()

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots that hold something at this moment."""
        weights = sum(slot.flat.nbytes for slot in self._loaded.values())
        return weights + self.tail.num_bytes

    def _report(self) -> None:
        """At a border: tell what the device has done meanwhile, and let go of what it no longer copies."""
        if self.device.in_place:
            return
        self.pager.end_leases()
        for span in self.device.collect():
            self._on_span(span)

    def _tell(self, kind: str, name: str, now: float, *, outcome: str = "") -> None:
        """Tell of a moment."""
        self._on_span(
            Span(kind=kind, name=name, start_s=now, end_s=now, outcome=outcome)
        )

    def not_computing(self) -> float:
        """Return the seconds that the kernels of the update and waiting for the disk have taken so far."""
        return self.updates.seconds + self.pager.wait_seconds

    def is_last(self, block: Block) -> bool:
        """Whether the forward in progress is expected to end with this call of the block."""
        index = block.spec.index
        return self._learned[-1] == index and self._order.count(
            index
        ) + 1 >= self._learned.count(index)

    # -- the schedule -----------------------------------------------------------------------------------

    def _advance(self, block: Block, kind: Kind, *, turning: bool) -> None:
        """Carry out the schedule up to and including the entry that lets ``block`` compute."""
        if self.stop.is_set():
            self.stop.clear()
            raise KeyboardInterrupt
        wanted = Action(block.spec.index, kind)
        if not self._predictor.note(wanted.block, self._phase(kind, turning=turning)):
            self._actions = iter(())
        while (action := next(self._actions, None)) != wanted:
            if action is not None and action.kind is Kind.READ:
                self._read(action.block, kind)
            elif action is not None and action.kind is Kind.FREE:
                self._free(action.block, wanted)
            else:  # the schedule is at its end, or another block came than it says
                self._actions = self._plan(wanted)
        self._note(wanted)
        for pack in block.spec.packs:
            if pack not in self._loaded:
                self._onload(pack, block)
        for other in self._predictor.instead():
            self._read_packs(other)

    def _phase(self, kind: Kind, *, turning: bool) -> Phase:
        """Return what a block is used for that computes now."""
        if turning:
            return Phase.TURN
        if kind is Kind.BACKWARD:
            return Phase.BACKWARD
        recorded = self.window is not None or torch.is_grad_enabled()
        return Phase.FORWARD if recorded else Phase.EVALUATE

    def _onload(self, pack: int, block: Block) -> None:
        host = self.pager.need(pack, What.WEIGHTS)
        try:
            self.updates.finish(pack)
            values = tensor_over(host)
            self.make_device_room(values.numel(), values.dtype, block)
            slot = self.device.onload(host, name=self.layers.spec.packs[pack].name)
        except BaseException:
            self.pager.drop(pack, What.WEIGHTS)
            raise
        self._loaded[pack] = slot
        self._hosted.add(pack)
        if slot.busy is not None:
            self.pager.lend(pack, What.WEIGHTS, slot.busy)

    def _onload_early(self) -> None:
        """Let the next block's weights come while this one computes, where they have landed and are up to date."""
        if self.device.in_place or not self._ahead:
            return
        block = self.layers.blocks[self._ahead[0]]
        for pack in block.spec.packs:
            if pack in self._loaded or pack in self.updates:
                continue
            piece = self.pager.piece(pack, What.WEIGHTS)
            dtype = torch.bfloat16 if piece.pack.split else torch.float32
            if piece.landed and self.device.has_room(piece.pack.numel, dtype):
                self._onload(pack, block)

    def make_device_room(self, numel: int, dtype: torch.dtype, block: Block) -> None:
        """Take slots from blocks that need not be on the device now, if one of that kind cannot be had otherwise."""
        others = [pack for pack in self._loaded if pack not in block.spec.packs]
        for pack in sorted(others, key=self.tail.__contains__):
            if self.device.has_room(numel, dtype):
                return
            if pack in self.tail:
                self.tail.leave(pack)
            else:
                self.unload(pack, keep=True)

    def _plan(self, wanted: Action) -> Iterator[Action]:
        """Return the schedule from a block on that computes now."""
        self._ahead.clear()
        forward = wanted.kind is Kind.FORWARD
        following = self._forward_ahead() if forward else self._predictor.to_come
        order = chain([wanted.block], following)
        # In a plain loop the last block does not turn while it is loaded, so it is the first one of backward.
        near = list(islice(order, NUM_FIRST if forward else NUM_FIRST + 1))
        keep = self.layers.spec.pack_indices([*near, *self._predictor.instead()])
        # What the last block shares with the first, as tied weights, need not be read again at the end of backward.
        self._settle_unneeded(keep, soon=self._soon(wanted.kind), stale=False)
        return self._schedule(chain(near, order), wanted.kind)

    def _schedule(self, order: Iterable[int], kind: Kind) -> Iterator[Action]:
        spec = self.layers.spec
        largest = max(map(spec.block_bytes, self._learned), default=0)
        return each_action(spec, order, kind, largest_bytes=largest)

    def _forward_ahead(self) -> Iterator[int]:
        """Return the blocks that are expected to compute before a backward comes; it may have no end."""
        ahead = takewhile(
            lambda use: use.phase is not Phase.BACKWARD, self._predictor.ahead()
        )
        return (use.block for use in ahead)

    def _note(self, action: Action) -> None:
        """Remember in which order the forward passes the blocks."""
        if action.block in self._ahead:
            self._ahead.remove(action.block)
        if action.kind is Kind.FORWARD:
            self._order.append(action.block)
            del self._order[: -4 * len(self._learned) - 64]

    def _read(self, block: int, kind: Kind = Kind.FORWARD) -> None:
        self._ahead.append(block)
        self._read_packs(block)
        if kind is Kind.BACKWARD:
            self.gradients.read_ahead(self.layers.blocks[block])

    def _read_packs(self, block: int) -> None:
        for pack in self.layers.spec.blocks[block].packs:
            if pack in self._loaded and not self.device.in_place:
                continue  # the device has them, up to date
            if self.pager.fetch(pack, What.WEIGHTS) and pack in self.updates:
                self.updates.read_ahead(pack)

    def between_calls(self) -> None:
        """Between two micro-batches: read what had no room before, update what has been read."""
        for block in self._ahead:
            self._read_packs(block)
        self.updates.advance()
        self._onload_early()

    def _free(self, block: int, wanted: Action) -> None:
        """Unload a block, but for the packs that the next ones use as well."""
        blocks = self.layers.spec.blocks
        keep = {
            pack for near in (wanted.block, *self._ahead) for pack in blocks[near].packs
        }
        soon = self._soon(wanted.kind)
        for pack in blocks[block].packs:
            if pack in self._loaded and pack not in keep:
                self.unload(pack, keep=pack in soon, stay=pack in self.stay)

    def unload(self, pack: int, *, keep: bool = False, stay: bool = False) -> None:
        """End the use of a pack's weights; with ``stay``, or where it lives there, its slot goes on holding them."""
        if not stay and pack not in self.tail:
            self.device.release(self._loaded.pop(pack))
            if not self.device.in_place:
                name = self.layers.spec.packs[pack].name
                self._tell("UNLOAD", name, time.perf_counter())
        if pack in self._hosted:
            self._hosted.remove(pack)
            self.pager.drop(pack, What.WEIGHTS, keep=keep)

    def _settle_unneeded(
        self,
        keep: Collection[int],
        *,
        soon: Collection[int] = (),
        stale: bool = True,
    ) -> None:
        """Unload what is not needed; with ``stale`` what stays on the device as well, since it is old.

        What is needed ``soon`` stays in RAM until the room is needed.
        """
        for pack in self.layers.spec.packs:
            if pack.index in keep:
                continue
            if pack.index in self._loaded:
                stay = not stale and pack.index in self.stay
                self.unload(pack.index, keep=pack.index in soon, stay=stay)
            if pack.index not in soon:
                self.pager.settle(self.pager.piece(pack.index, What.WEIGHTS))

    def rest(self) -> None:
        """Let every block's weights go where the plan wants them; the schedule starts anew."""
        self._actions = iter(())
        self._ahead.clear()
        self.updates.rest()
        self.keeping.give_back()
        self._settle_unneeded(())

    def turn_over(self) -> None:
        """After a step's backward: what the next forward begins with stays or is read, the rest goes."""
        order = self._forward_ahead()
        near = list(islice(order, NUM_FIRST)) or self._first
        self._ahead.clear()
        # A device's copies are old now.
        self._settle_unneeded((), soon=self.layers.spec.pack_indices(near))
        self._actions = self._schedule(chain(near, order), Kind.FORWARD)
        for action in self._actions:
            if action.kind is not Kind.READ:
                self._actions = chain([action], self._actions)
                break
            self._read(action.block)

    def begin_update(
        self, segments: dict[int, list[Segment]], *, grad_scale: float
    ) -> None:
        """Note an AdamW step as due, in the order in which the next forward needs it; the tail's is done at once."""
        order = self.layers.spec.pack_indices(self._expected())
        there = {pack: segments.pop(pack) for pack in self.tail if pack in segments}
        self.updates.begin(segments, grad_scale=grad_scale, order=order)
        self.tail.update(there, grad_scale=grad_scale)
        self.version += 1

    def expected_order(self) -> tuple[int, ...]:
        """Return the block indices of the next forward, as far as is known."""
        return tuple(self._expected())

    def _expected(self) -> list[int]:
        """Return the blocks of the next forward, in order."""
        return self._order if self._complete and self._order else self._learned

    def _first_packs(self) -> list[int]:
        """Return the packs that the next forward begins with."""
        return self.layers.spec.pack_indices(self._first)

    def _soon(self, kind: Kind) -> list[int]:
        """Return the packs that the pass after this one begins with: they stay while there is room."""
        if kind is Kind.BACKWARD:
            return self._first_packs()
        if self.window is not None:
            return self.layers.spec.pack_indices(self._learned[-1 - NUM_FIRST : -1])
        near = islice(self._predictor.ahead(), 2 * NUM_FIRST)
        return self.layers.spec.pack_indices(
            use.block for use in near if use.phase is Phase.BACKWARD
        )

    def _needed_last(self, pieces: list[Piece]) -> Piece:
        """Return the piece that will be needed last, as far as can be foreseen."""
        left = dict.fromkeys(pieces)
        now = self._predictor.now
        for use in chain(
            [] if now is None else [now],
            islice(self._predictor.ahead(), 2 * len(self._learned)),
        ):
            for piece in [each for each in left if self._needs(use, each)]:
                del left[piece]
                if not left:
                    return piece
        return changed_first(left)  # none of these is foreseen

    def _needs(self, use: Use, piece: Piece) -> bool:
        """Whether a use of a block needs a piece: gradients not for a forward, unless an update is due."""
        pack = piece.pack.index
        if pack not in self.layers.spec.blocks[use.block].packs:
            return False
        return (
            piece.what is not What.GRADS
            or use.phase in (Phase.BACKWARD, Phase.TURN)
            or pack in self.updates
        )

    @property
    def _first(self) -> list[int]:
        return self._expected()[:NUM_FIRST]

    def weights_change(self) -> None:
        """Note that weights are about to change outside an update; copies on a device are stale then."""
        self.version += 1
        if self.window is None and self.inside is None:
            self.rest()

    # -- parameters in modules --------------------------------------------------------------------------

    def _make_parameters(self, bound: Bound, block: Block, grads: Slots) -> None:
        """Make ordinary parameters over the loaded weights."""
        recorded = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            for param in dict.fromkeys(site.param for site in block.sites):
                home = self.layers.homes[param]
                values = part_of(bound.flats[home.pack.index], home)
                plain = nn.Parameter(values, requires_grad=param.requires_grad)
                bound.plain[param] = plain
                if not param.requires_grad:
                    continue
                if grads:
                    self.gradients.home(param, bound, grads)
                elif recorded:
                    plain.register_hook(bound.later.check)
                    plain.register_post_accumulate_grad_hook(
                        bound.later.hand_over(param)
                    )

    # -- gradients -----------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Forget all pending gradients."""
        self.norms.clear()
        for pack in self.layers.spec.packs:
            self.updates.forget_gradient(pack.index)
        for param in self.layers.resident.values():
            param.grad = None

    def abort(self) -> None:
        """After an error or interrupt: nothing stays loaded but the tail, and nothing is expected."""
        self.window = self.inside = None
        self._order.clear()
        self._predictor.forget_open()
        self._release_all(but=self.tail)
        self.pager.reset()
        self.rest()

    def _clear_device(self) -> None:
        """Let everything leave the device that need not be there."""
        self.stay = frozenset()
        self.tail.plan(frozenset())
        self.rest()
        self.device.trim()

    def let_go(self) -> None:
        """Give all slots back, whatever is in them."""
        self.tail.drop()
        self._release_all(but=())

    def _release_all(self, *, but: Container[int]) -> None:
        for pack in [pack for pack in self._loaded if pack not in but]:
            self.device.release(self._loaded.pop(pack))
        self._hosted.clear()

    def slot(self, pack: int) -> Slot:
        """Return where a loaded pack's weights are."""
        return self._loaded[pack]

    def check_usable(self) -> None:
        """Raise if the model must not be used any more.

        Raises
        ------
        SessionError
            Another thread trains, its session is closed, or an update failed half-way.
        StoreError
            A write failed, so the store no longer holds the model's last state.
        """
        CLAIM.check()
        if self.unusable:
            raise SessionError(self.unusable)
        if self.pager.broken:
            raise StoreError(self.pager.broken)


def out_of_memory(
    error: torch.OutOfMemoryError, block: str, device: Device
) -> BudgetError:
    """Say what a device's memory was too little for, and let go of what the error holds."""
    device.exhausted = True
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    need = f" needs {wanted[1]} more and" if wanted else ""
    error.__traceback__ = None  # its frames hold the tensors of the call
    return BudgetError(
        f"{block}{need} does not fit on {device.torch_device} any more: {format_bytes(device.left_bytes())} of "
        "max_vram_gb (or of the device) are left. Give smaller micro-batches or shorter sequences, or raise "
        "max_vram_gb; the model is as before this step"
    )
