"""One call of one block: run it, and send gradients through it when backward comes.

[Note: nothing is lost] In forward a block runs with gradients on. Where the budget allows, what autograd
saves is kept (see `megatrain_nb.runtime.kept`). Elsewhere it is thrown away: only the inputs stay, and
backward runs the block again on them, with the same random numbers and autocast setting, for what the graph
of the forward lacks; where that graph must not stay, for a whole graph. A tensor that
escapes from the first run by any other way than the outputs (a hook that stores it, say) still has its
graph, and a gradient that reaches that graph raises an error that names the block: a lost gradient is never
silent. Values that transformers' own recorder collects inside a block (router logits) are treated as outputs.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatrain_nb.errors import ModelError
from megatrain_nb.runtime.kept import ESCAPED, OTHERWISE, Kept, Saver
from megatrain_nb.runtime.tensor import source_of
from megatrain_nb.runtime.threadstate import Autocast, get_rng, set_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatrain_nb.runtime.bound import Bound
    from megatrain_nb.runtime.fuse import FusedCall
    from megatrain_nb.runtime.keeping import Lease
    from megatrain_nb.runtime.layers import Block

_RECORDER = "transformers.utils.output_capturing"
_HERE = object()  # marks the place of a tensor in a block's result
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class BlockCall:
    """One call of one block by one micro-batch.

    Parameters
    ----------
    block
        The block; its weights must be bound during `run` and `backward`.
    args, kwargs
        As the model calls it.
    device
        Whose random state counts, beside the CPU's.

    Attributes
    ----------
    tracked
        The input tensors that want a gradient.
    outputs
        After `run`: detached output tensors, recorded ones last; those that had a graph require grad.
    fused
        The call that ran in the place of this one and others; None for one that ran by itself.
    """

    def __init__(
        self,
        block: Block,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.block = block
        self._inputs, self._structure = pytree.tree_flatten((args, kwargs))
        self._device = device
        self._autocast = Autocast.current(device)
        self.tracked = [
            x for x in self._inputs if isinstance(x, Tensor) and x.requires_grad
        ]
        self.outputs: list[Tensor] = []
        self.fused: FusedCall | None = None
        self._result: Any = None
        self._rng: list[Tensor] = []
        self._collector = _active_collector()
        self._collected = {
            key: len(x)
            for key, x in (self._collector or {}).items()
            if isinstance(x, list)
        }
        self._recorded_counts: dict[str, int] = {}
        self._versions = [x._version for x in self._inputs if isinstance(x, Tensor)]
        self._modes: list[bool] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._kept: Kept | None = None
        self._counted = False
        self._check_inputs()

    # Whether its graph may stay until backward, elsewhere than in a turn.
    keepable = True

    def run(self, bound: Bound, *, turning: bool = False) -> None:
        """Run the block; `outputs` are there afterwards.

        Parameters
        ----------
        bound
            The loaded block.
        turning
            Backward comes next and the weights stay bound till then, so the graph is used as it is.
        """
        self._rng = get_rng(self._device)
        self._modes = [module.training for module in self.block.module.modules()]
        keeping, index = bound.keeping, self.block.spec.index
        later = not turning and self.keepable and not keeping.refuses(index)
        with keeping.lease(index) if later else nullcontext() as lease:
            self._run(bound, turning=turning, later=later, lease=lease)

    def _run(
        self, bound: Bound, *, turning: bool, later: bool, lease: Lease | None
    ) -> None:
        """Run the block; ``later`` if its graph may stay until backward, and with a lease what that holds."""
        buffers = [(x, x.clone()) for x in self.block.module.buffers()]
        saver = None
        if turning:
            result, tensors, fresh = self._compute()
            self._kept = Kept(tensors, fresh)
        elif later:
            saver = Saver(bound, keep=lease is not None)
            with torch.autograd.graph.saved_tensors_hooks(
                saver.pack, bound.later.unpack
            ):
                result, tensors, fresh = self._compute()
            for tensor in fresh:
                tensor.register_hook(bound.later.check)
        else:
            with torch.autograd.graph.saved_tensors_hooks(_discard, self._refuse):
                result, tensors, fresh = self._compute()
            for tensor in fresh:
                tensor.register_hook(refuse_gradient(self.block.name))
        self._check_versions("changes its inputs in place")
        # Elsewhere than on a CPU a look would stop the training thread until the device is there: all are put back.
        on_host = self._device.type == "cpu"
        self._buffers = [
            (x, old) for x, old in buffers if not (on_host and torch.equal(x, old))
        ]
        self._result = pytree.tree_map_only(Tensor, lambda _: _HERE, result)
        for value in pytree.tree_leaves(self._result):
            self._check_output(value)
        weights = _weight_storages(self.block)
        self.outputs = [
            _off_weights(x.detach(), weights).requires_grad_(x.requires_grad)
            for x in tensors
        ]
        if saver is not None:
            kept = Kept(tensors, fresh, bound.later, saver.places())
            self._keep(bound, saver, kept, lease)

    def _keep(
        self, bound: Bound, saver: Saver, kept: Kept, lease: Lease | None
    ) -> None:
        """Keep the graph of a run, if that is safe, and what it holds, if that is no more than was set aside."""
        if not saver.weights_are_free():
            bound.keeping.refuse(self.block)
            return
        if lease is not None and self._count(bound, kept) <= lease.num_bytes:
            lease.hand_to(kept)
        else:
            kept.empty()
        self._kept = kept
        bound.later.used = True

    def _count(self, bound: Bound, kept: Kept) -> int:
        """Return the bytes that a run's graph holds, and let the plan learn of them."""
        num_bytes = kept.num_bytes(self._live_on())
        if not self._counted:
            bound.keeping.learn(self.block, num_bytes)
        self._counted = True
        return num_bytes

    def _live_on(self) -> list[Tensor]:
        """Return the tensors that are there until backward, whether activations are kept or not."""
        inputs = [x for x in self._inputs if isinstance(x, Tensor)]
        return [*inputs, *self.outputs, *self.block.module.buffers()]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Return what the block returned, with ``outputs`` in the place of its own tensors.

        The recorded ones among them go where transformers' recorder would have put them.
        """
        remaining = iter(outputs)
        returned = pytree.tree_map(
            lambda x: next(remaining) if x is _HERE else x, self._result
        )
        for key, count in self._recorded_counts.items():
            assert self._collector is not None
            self._collector[key].extend(next(remaining) for _ in range(count))
        self._result = None
        return returned

    def end_turn(self) -> None:
        """Give up a graph that was to be used at once: the weights it refers to are about to leave."""
        if self._kept is not None and self._kept.later is None:
            for tensor in self._kept.fresh:
                tensor.register_hook(refuse_gradient(self.block.name))
            self._kept = None

    def backward(
        self, grads: Sequence[Tensor | None], bound: Bound, *, seal: bool = False
    ) -> list[Tensor | None]:
        """Send the outputs' gradients through the block; parameter gradients land in their ``.grad``.

        Parameters
        ----------
        grads
            One for each of `outputs`, None where there is none.
        bound
            The loaded block.
        seal
            Gradients may still come to the graph by other ways, from a tensor that escaped.

        Returns
        -------
        list
            The gradient of each of `tracked`.
        """
        self._check_versions("got inputs that were changed in place after it ran")
        kept, self._kept = self._kept, None
        if kept is not None and kept.usable():
            inputs = self._use(kept, grads, bound)
            if seal:
                _seal(kept.tensors, self.block.name)
            return inputs
        del kept
        with self._as_it_was():
            _, tensors, fresh = self._compute()
            if len(tensors) != len(self.outputs):
                raise ModelError(OTHERWISE.format(self.block.name))
            self._flow(tensors, grads)
        return [x.grad for x in fresh]

    def _use(
        self, kept: Kept, grads: Sequence[Tensor | None], bound: Bound
    ) -> list[Tensor | None]:
        """Send gradients through a graph that forward left."""
        if kept.later is None:
            self._flow(kept.tensors, grads)
        else:
            check_same_weights(self.block, kept.later.version, bound.version)
            if kept.is_empty():
                with self._as_it_was():
                    kept.fill(bound, self._compute)
                self._count(bound, kept)
            kept.in_use = True
            with kept.later.found_in(bound):
                self._flow(kept.tensors, grads)
        kept.release()
        return [x.grad for x in kept.fresh]

    # -- inside ---------------------------------------------------------------------------------------

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Put random state, buffers and train or eval modes back for the second run."""
        modules = list(self.block.module.modules())
        modes = [module.training for module in modules]
        rng = get_rng(self._device)
        buffers = [(x, x.clone()) for x, _ in self._buffers]
        set_rng(self._device, self._rng)
        for module, mode in zip(modules, self._modes, strict=True):
            module.training = mode
        with torch.no_grad():
            for x, old in self._buffers:
                x.copy_(old)
        try:
            yield
        finally:
            set_rng(self._device, rng)
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            with torch.no_grad():
                for x, now in buffers:
                    x.copy_(now)

    @staticmethod
    def _flow(tensors: list[Tensor], grads: Sequence[Tensor | None]) -> None:
        pairs = [
            (x, grad)
            for x, grad in zip(tensors, grads, strict=True)
            if grad is not None and x.requires_grad
        ]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])

    def _check_versions(self, what: str) -> None:
        now = [x._version for x in self._inputs if isinstance(x, Tensor)]
        if now != self._versions:
            msg = (
                f"{self.block.name} {what}, so it cannot be run again for its gradients"
            )
            raise ModelError(msg)

    def _compute(self) -> tuple[Any, list[Tensor], list[Tensor]]:
        fresh: list[Tensor] = []
        leaves = list(self._inputs)
        for index, value in enumerate(leaves):
            if isinstance(value, Tensor) and value.requires_grad:
                leaves[index] = value.detach().requires_grad_()
                fresh.append(leaves[index])
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        with (
            torch.enable_grad(),
            self._autocast.applied(),
            self._recording() as recorded,
        ):
            result = self.block.forward(*args, **kwargs)
        if pytree.tree_structure((args, kwargs)) != self._structure:
            msg = (
                f"{self.block.name} adds to a list or dict that it is given; what it adds would be lost, "
                "so let it return the value"
            )
            raise ModelError(msg)
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return (
            result,
            tensors + [x for values in recorded.values() for x in values],
            fresh,
        )

    @contextmanager
    def _recording(self) -> Iterator[dict[str, list[Tensor]]]:
        """Collect apart what transformers' output recorder collects inside the block."""
        recorded: dict[str, list[Tensor]] = {}
        if self._collector is None:
            yield recorded
            return
        # Lists as long as they were at the call: what is collected may depend on the position.
        inner = dict(self._collector) | {
            key: [None] * count for key, count in self._collected.items()
        }
        variable = sys.modules[_RECORDER]._active_collector
        token = variable.set(inner)
        try:
            yield recorded
        finally:
            variable.reset(token)
        for key, count in self._collected.items():
            recorded[key] = [x for x in inner[key][count:] if isinstance(x, Tensor)]
        self._recorded_counts = {key: len(values) for key, values in recorded.items()}

    def _refuse(self, _: None) -> Tensor:
        raise ModelError(ESCAPED.format(self.block.name))

    def _check_inputs(self) -> None:
        for value in self._inputs:
            if isinstance(value, Tensor):
                source = source_of(value)
                if source is not None:
                    msg = (
                        f"{self.block.name} is given the parameter {source.name} as an argument; "
                        "its gradient would be lost"
                    )
                    raise ModelError(msg)
            elif (
                not isinstance(value, _PLAIN)
                and hasattr(value, "update")
                and hasattr(value, "get_seq_length")
            ):
                msg = f"{self.block.name} is given a key-value cache while training; call the model with use_cache=False"
                raise ModelError(msg)

    def _check_output(self, value: Any) -> None:
        if isinstance(value, _PLAIN) or not _holds_graph(value):
            return
        msg = (
            f"{self.block.name} returns a {type(value).__name__} that holds tensors with gradients; "
            "return the tensors themselves, in a tuple or a dict"
        )
        raise ModelError(msg)


def _holds_graph(value: Any) -> bool:
    inner = vars(value).values() if hasattr(value, "__dict__") else ()
    return any(isinstance(x, Tensor) and x.requires_grad for x in inner)


def _active_collector() -> dict[str, Any] | None:
    """Return what transformers' output recorder fills at this moment, if it is at work."""
    variable = getattr(sys.modules.get(_RECORDER), "_active_collector", None)
    return variable.get() if variable is not None else None


def _discard(_: Tensor) -> None:
    """Keep nothing of what autograd wants to save."""


def check_same_weights(block: Block, then: int, now: int) -> None:
    """Raise ModelError if the executor's count of weight changes went on between forward and backward."""
    if then != now:
        msg = (
            f"the weights of {block.name} changed between forward and backward; "
            "call backward before optimizer.step()"
        )
        raise ModelError(msg)


def refuse_gradient(block: str) -> Callable[[object], None]:
    """Return a hook for tensors of a run whose graph must not be used: a gradient there would be lost."""

    def refuse(_: object) -> None:
        raise ModelError(ESCAPED.format(block))

    return refuse


def _seal(tensors: Sequence[Tensor], block: str) -> None:
    """Let a gradient that reaches a used graph raise an error that names the block: torch's own names none."""
    refuse = refuse_gradient(block)
    todo, seen = [tensor.grad_fn for tensor in tensors], set()
    while todo:
        node = todo.pop()
        # Leaves belong to other graphs as well, and have hooks of their own.
        if node is not None and node not in seen and node.next_functions:
            seen.add(node)
            node.register_prehook(refuse)
            todo += [following for following, _ in node.next_functions]


def keep_weights(block: Block, result: Any) -> Any:
    """Copy what a block returns of its own weights: the memory under them is about to change."""
    weights = _weight_storages(block)
    return pytree.tree_map_only(Tensor, lambda x: _off_weights(x, weights), result)


def _weight_storages(block: Block) -> set[int]:
    bound = (site.module._parameters[site.name] for site in block.sites)
    return {x.untyped_storage().data_ptr() for x in bound if x is not None}


def _off_weights(tensor: Tensor, weights: set[int]) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().data_ptr() in weights else tensor
