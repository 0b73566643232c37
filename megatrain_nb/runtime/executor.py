"""Obeys the schedule: brings a block's weights, lets it compute, takes its gradients away.

[Note: who drives whom] The model drives: its forward calls block after block, and each call arrives
here. The executor then carries out the schedule up to the entry that says "this block computes". If
another block comes than the schedule says, the rest of the schedule is made anew from there; numbers
never depend on the prediction. Backward is driven by a `Window` (layer-major, all micro-batches of a
step), or by autograd in a plain loop (one micro-batch at a time); both end in the same two
operations, `running` and `BlockCall.backward`.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from megatrain_nb.errors import ModelError, SessionError, StoreError
from megatrain_nb.plan.schedule import Action, Kind, make_schedule, successors
from megatrain_nb.plan.timeline import Span
from megatrain_nb.plan.traffic import NUM_FIRST
from megatrain_nb.runtime.autograd import through_autograd
from megatrain_nb.runtime.call import BlockCall, keep_weights
from megatrain_nb.runtime.chunks import HOME
from megatrain_nb.runtime.device import tensor_over
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.kept import Keeping, Later, loosen
from megatrain_nb.runtime.logits import LargeLogits, plain_arguments
from megatrain_nb.runtime.pager import What

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from megatrain_nb.optim.adamw import Segment
    from megatrain_nb.runtime.device import Device
    from megatrain_nb.runtime.layers import Block, Home, Layers
    from megatrain_nb.runtime.pager import Pager
    from megatrain_nb.runtime.update import Updates
    from megatrain_nb.runtime.window import Window


class Bound:
    """A loaded block: inside ``with``, its modules hold ordinary parameters over the loaded weights.

    Attributes
    ----------
    plain
        The ordinary parameter for each streamed one.
    flats
        The loaded weights of each of its packs, flat.
    later
        Where the graphs of kept calls find their weights when backward comes.
    landed
        For a parameter whose gradient has a home: brings it there.
    sums
        Where the bf16 gradients of a split parameter add up in fp32.
    """

    def __init__(
        self, executor: Executor, block: Block, flats: dict[int, Tensor]
    ) -> None:
        self.plain: dict[nn.Parameter, nn.Parameter] = {}
        self.flats = flats
        self.later = Later(block.name, executor.version)
        self.landed: dict[nn.Parameter, Callable[[Tensor], None]] = {}
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._executor = executor
        self._block = block

    @property
    def version(self) -> int:
        """The count of weight changes now."""
        return self._executor.version

    @property
    def keeping(self) -> Keeping:
        """The budget of kept activations."""
        return self._executor.keeping

    def add_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """Do what autograd does for a parameter, for a graph that was made with another one's weights."""
        plain = self.plain[param]
        if plain.grad is not None:
            plain.grad.add_(grad)
            return
        plain.grad = grad
        if param in self.landed:
            self.landed[param](plain)

    def __enter__(self) -> Self:
        for site in self._block.sites:
            if site.module._parameters.get(site.name) is not site.param:
                msg = (
                    f"{self._block.name}: its parameter {site.name!r} was replaced after the model moved into the "
                    "session; change values in place (under torch.no_grad()), or mt.unwrap(model) first"
                )
                raise ModelError(msg)
        for site in self._block.sites:
            site.module._parameters[site.name] = self.plain[site.param]
        self._executor.inside = self._block
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.inside = None
        for site in self._block.sites:
            site.module._parameters[site.name] = site.param
        if kind is None:
            self._executor.between_calls()


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
        Time inside blocks' forward and backward so far.
    inside
        The block whose modules hold ordinary parameters at this moment, or None.
    unusable
        Why the model must not be used any more; empty while it may.
    logits
        Which calls of the head wait; None for none.
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
        self.keeping = Keeping()
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
        self._actions: deque[Action] = deque()
        self._loaded: dict[int, Tensor] = {}
        self._ahead: list[int] = []
        self._learned = [block.spec.index for block in layers.blocks]
        self._order: list[int] = []
        self._complete = False
        self._trace: list[int] = []

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
        self._advance(block, kind)
        with_grads = turning or kind is Kind.BACKWARD
        early = block.spec.index in self._first
        if early and kind is Kind.BACKWARD and self.window is not None:
            for pack in self._first_packs():  # a step follows, and the next forward
                self.updates.read_ahead(pack)
        grads = self._need_gradients(block) if with_grads else {}
        start, before = time.perf_counter(), self.not_computing()
        self._tell("BEGIN", block.name, start, outcome=str(kind))
        bound = Bound(
            self, block, {pack: self._loaded[pack] for pack in block.spec.packs}
        )
        self._make_parameters(bound, block, grads)
        versions = [plain._version for plain in bound.plain.values()]
        try:
            yield bound
            if versions != [plain._version for plain in bound.plain.values()]:
                msg = (
                    f"{block.name} changes its own weights in forward (an embedding with max_norm does); that "
                    "change would be lost"
                )
                raise ModelError(msg)
            if with_grads:
                self._take_gradients(block, bound)
            elif bound.later.used:
                for plain in bound.plain.values():
                    loosen(plain)
        finally:
            for pack in grads:
                self.pager.drop(pack, What.GRADS, dirty=True, keep=early)
            end = time.perf_counter()
            self.compute_seconds += end - start - (self.not_computing() - before)
            self._on_span(
                Span(kind=str(kind), name=block.name, start_s=start, end_s=end)
            )
        self._relieve()

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

    def _advance(self, block: Block, kind: Kind) -> None:
        """Carry out the schedule up to and including the entry that lets ``block`` compute."""
        if self.stop.is_set():
            self.stop.clear()
            raise KeyboardInterrupt
        wanted = Action(block.spec.index, kind)
        while True:
            action = self._actions.popleft() if self._actions else None
            if action == wanted:
                break
            if action is not None and action.kind is Kind.READ:
                self._read(action.block)
            elif action is not None and action.kind is Kind.FREE:
                self._free(action.block, wanted)
            else:  # the schedule is at its end, or another block came than it says
                self._actions = deque(self._plan(wanted))
        self._note(wanted)
        for pack in block.spec.packs:
            if pack not in self._loaded:
                self._onload(pack)

    def _onload(self, pack: int) -> None:
        host = self.pager.need(pack, What.WEIGHTS)
        try:
            self.updates.finish(pack)
        except BaseException:
            self.pager.drop(pack, What.WEIGHTS)
            raise
        start = time.perf_counter()
        self._loaded[pack] = self.device.onload(host)
        if not self.device.in_place:
            name = self.layers.spec.packs[pack].name
            end = time.perf_counter()
            self._on_span(
                Span(
                    kind="ONLOAD",
                    name=name,
                    start_s=start,
                    end_s=end,
                    num_bytes=host.nbytes,
                )
            )

    def _plan(self, wanted: Action) -> list[Action]:
        spec = self.layers.spec
        self._ahead.clear()
        if wanted.kind is Kind.FORWARD:
            order = successors(self._learned, wanted.block, len(self._order))
        else:
            seen = [*reversed(self._trace)]
            order = (
                seen[seen.index(wanted.block) :]
                if wanted.block in seen
                else [wanted.block]
            )
        self._settle_unneeded(self._packs_of(order[:NUM_FIRST]))
        return make_schedule(spec, order, wanted.kind)

    def _note(self, action: Action) -> None:
        """Remember what ran: forwards predict the next forward and, reversed, their backward."""
        if action.block in self._ahead:
            self._ahead.remove(action.block)
        if action.kind is Kind.FORWARD:
            self._order.append(action.block)
            del self._order[: -4 * len(self._learned) - 64]
            self._trace.append(action.block)
            del self._trace[: -4 * len(self._learned) - 64]
        elif action.block in self._trace:
            last = len(self._trace) - 1 - self._trace[::-1].index(action.block)
            del self._trace[last:]

    def _read(self, block: int) -> None:
        self._ahead.append(block)
        self._read_packs(block)

    def _read_packs(self, block: int) -> None:
        for pack in self.layers.spec.blocks[block].packs:
            if self.pager.fetch(pack, What.WEIGHTS) and pack in self.updates:
                self.updates.read_ahead(pack)

    def between_calls(self) -> None:
        """Between two micro-batches: read what had no room before, update what has been read."""
        for block in self._ahead:
            self._read_packs(block)
        self.updates.advance()

    def _free(self, block: int, wanted: Action) -> None:
        """Unload a block, but for the packs that the next ones use as well."""
        blocks = self.layers.spec.blocks
        keep = {
            pack for near in (wanted.block, *self._ahead) for pack in blocks[near].packs
        }
        soon = self._soon(wanted.kind)
        for pack in blocks[block].packs:
            if pack in self._loaded and pack not in keep:
                self._unload(pack, keep=pack in soon)

    def _unload(self, pack: int, *, keep: bool = False) -> None:
        self.device.release(self._loaded.pop(pack))
        if not self.device.in_place:
            name = self.layers.spec.packs[pack].name
            self._tell("UNLOAD", name, time.perf_counter())
        self.pager.drop(pack, What.WEIGHTS, keep=keep)

    def _settle_unneeded(self, keep: tuple[int, ...]) -> None:
        for pack in self.layers.spec.packs:
            if pack.index in keep:
                continue
            if pack.index in self._loaded:
                self._unload(pack.index)
            else:
                self.pager.settle(self.pager.piece(pack.index, What.WEIGHTS))

    def rest(self) -> None:
        """Let every block's weights go where the plan wants them; the schedule starts anew."""
        self._actions.clear()
        self._ahead.clear()
        self.updates.rest()
        self._settle_unneeded(())

    def turn_over(self) -> None:
        """After a step's backward: what the next forward begins with stays or is read, the rest goes."""
        order = self._expected()
        keep = self._first_packs()
        self._ahead.clear()
        for pack in keep:
            if pack in self._loaded:
                self._unload(pack, keep=True)  # a device's copy of it is old now
        self._settle_unneeded(keep)
        self._actions = deque(make_schedule(self.layers.spec, order, Kind.FORWARD))
        while self._actions and self._actions[0].kind is Kind.READ:
            self._read(self._actions.popleft().block)

    def begin_update(
        self, segments: dict[int, list[Segment]], *, grad_scale: float
    ) -> None:
        """Note an AdamW step as due, in the order in which the next forward needs it."""
        order = self._packs_of(self._expected())
        self.updates.begin(segments, grad_scale=grad_scale, order=order)
        self.version += 1

    def expected_order(self) -> tuple[int, ...]:
        """Return the block indices of the next forward, as far as is known."""
        return tuple(self._expected())

    def _expected(self) -> list[int]:
        """Return the blocks of the next forward, in order."""
        return self._order if self._complete and self._order else self._learned

    def _first_packs(self) -> tuple[int, ...]:
        """Return the packs that the next forward begins with."""
        return self._packs_of(self._first)

    def _soon(self, kind: Kind) -> tuple[int, ...]:
        """Return the packs that the pass after this one begins with: they stay while there is room."""
        if kind is Kind.BACKWARD:
            return self._first_packs()
        if self.window is None:  # who knows what comes
            return ()
        return self._packs_of(self._learned[-1 - NUM_FIRST : -1])

    def _packs_of(self, blocks: list[int]) -> tuple[int, ...]:
        return tuple(
            p for block in blocks for p in self.layers.spec.blocks[block].packs
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

    def _make_parameters(
        self, bound: Bound, block: Block, grads: dict[int, Any]
    ) -> None:
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
                    self._home_gradient(param, bound, grads[home.pack.index])
                elif recorded:
                    plain.register_hook(bound.later.check)
                    plain.register_post_accumulate_grad_hook(
                        bound.later.hand_over(param)
                    )

    def _home_gradient(self, param: nn.Parameter, bound: Bound, host: Any) -> None:
        """Let gradients accumulate in the very bytes that the optimizer will read, where that is possible."""
        home, plain = self.layers.homes[param], bound.plain[param]
        gradient = self.device.gradient_home(host)
        if home.pack.split:
            pending = part_of(tensor_over(host), home)
            self._sum_gradient(param, bound, pending, in_place=gradient is not None)
            return
        setattr(plain, HOME, None if gradient is None else part_of(gradient, home))
        if gradient is None:
            if param in self.norms:  # added to in the same order as on the host
                pending = part_of(torch.from_numpy(host), home)
                plain.grad = pending.to(self.device.torch_device, copy=True)
            return
        gradient = part_of(gradient, home)
        if param in self.norms:
            plain.grad = gradient

        def landed(tensor: Tensor) -> None:
            # The first gradient comes as a tensor of its own; from then on autograd adds in place.
            if (
                tensor.grad is not None
                and tensor.grad.data_ptr() != gradient.data_ptr()
            ):
                gradient.copy_(tensor.grad)
                tensor.grad = gradient

        bound.landed[param] = landed
        plain.register_post_accumulate_grad_hook(landed)

    def _sum_gradient(
        self, param: nn.Parameter, bound: Bound, pending: Tensor, *, in_place: bool
    ) -> None:
        """Let a split parameter's bf16 gradients add up in fp32, one micro-batch after the other."""
        total, device = pending, self.device.torch_device
        if not in_place:
            total = torch.empty_like(pending, device=device)
        if param in self.norms:
            bound.sums[param] = total if in_place else total.copy_(pending)

        def landed(tensor: Tensor) -> None:
            grad, tensor.grad = tensor.grad, None
            if grad is None:
                return
            if param in bound.sums:
                total.add_(grad)
            else:
                bound.sums[param] = total.copy_(grad)

        bound.landed[param] = landed
        bound.plain[param].register_post_accumulate_grad_hook(landed)

    def _need_gradients(self, block: Block) -> dict[int, Any]:
        """Bring the gradients of the packs to RAM in which a parameter wants one; by pack."""
        homes = self.layers.homes
        params = (site.param for site in block.sites if site.param.requires_grad)
        packs = dict.fromkeys(homes[param].pack.index for param in params)
        # A parameter without a norm has no gradient: nobody looks at the bytes there.
        blank = packs.keys() - {homes[param].pack.index for param in self.norms}
        found = self.pager.need_all(((pack, What.GRADS) for pack in packs), blank=blank)
        return {pack: values for (pack, _), values in found.items()}

    def _take_gradients(self, block: Block, bound: Bound) -> None:
        """Bring gradients to RAM, and note their norms while they are at hand."""
        start = time.perf_counter()
        num_bytes = 0
        for param, plain in bound.plain.items():
            gradient = bound.sums.get(param, plain.grad)
            if gradient is None:
                continue
            home = self.layers.homes[param]
            host = self.pager.piece(home.pack.index, What.GRADS).values()
            pending = part_of(tensor_over(host), home)
            if gradient.data_ptr() != pending.data_ptr():
                pending.copy_(gradient)
            num_bytes += pending.nbytes
            self.norms[param] = torch.linalg.vector_norm(pending)
        end = time.perf_counter()
        self._on_span(
            Span(
                kind="OFFLOAD",
                name=block.name,
                start_s=start,
                end_s=end,
                num_bytes=num_bytes,
            )
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
        """After an error or interrupt: nothing stays loaded, and nothing is expected."""
        self.window = self.inside = None
        self._order.clear()
        self._trace.clear()
        self._loaded.clear()
        self.pager.reset()
        self.rest()

    def check_usable(self) -> None:
        """Raise if the model must not be used any more.

        Raises
        ------
        SessionError
            Its session is closed, or an update failed half-way.
        StoreError
            A write failed, so the store no longer holds the model's last state.
        """
        if self.unusable:
            raise SessionError(self.unusable)
        if self.pager.broken:
            raise StoreError(self.pager.broken)


def part_of(flat: Tensor, home: Home) -> Tensor:
    """Return a parameter's values as a view of its pack's flat vector."""
    spec = home.spec
    return flat[spec.offset : spec.offset + spec.numel].view(spec.shape)
