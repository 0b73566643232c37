"""What a block's call keeps for its backward.

[Note: weights are named, not kept] A weight leaves its memory between forward and backward, and may come
back elsewhere. So what autograd saves of it (the weight, or a view such as its transpose) is packed as
(pack, size, stride, offset) and found again in the weights that are loaded at backward. Everything else is
kept as it is, with its version: what was changed in place since makes the call compute again.
Gradients go to the parameters that are bound at backward, through hooks on those of the forward.

[Note: places are kept where tensors are not] Where the budget does not allow them, the graph of the forward
stays without its tensors, and backward runs the block again to fill their places. That run ends with the
last place: what comes after it (the block's last product, usually) makes outputs that nobody needs. torch's
own non-reentrant checkpoint does the same (torch.utils.checkpoint, ``early_stop``).

[Note: whoever else holds a weight] An operation may hold a weight without telling autograd (an attribute of
its ctx, a closure). Then the numbers behind it would be those of another block by the time of backward.
So the references to each weight and its memory are counted before and after: one more, and nothing is kept.
"""

from __future__ import annotations

import math
import sys
import weakref
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatrain_nb.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from megatrain_nb.runtime.bound import Bound

ESCAPED = (
    "a tensor computed inside {} is used outside it by another way than the block's output (a hook or an "
    "attribute), and a gradient reached it: it would be lost. Return it from the block's forward"
)

OTHERWISE = (
    "{} computes otherwise when it is run again on the same inputs, as it must be for its gradients; let its forward "
    "depend on nothing but its arguments, weights, buffers and torch's random numbers"
)

# Without these private functions of torch no graph outlives its forward.
COUNTABLE = hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


class WeightView(NamedTuple):
    """A view of a pack's flat weights; sizes, strides and offset in elements."""

    pack: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Saved:
    """The place of a tensor that autograd saved: the tensor and its version then, or nothing until it is filled."""

    __slots__ = ("__weakref__", "_traits", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self._traits = _traits(tensor)

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since."""
        return self.tensor is not None and self.tensor._version != self.version

    def empty(self) -> None:
        """Keep the place only."""
        self.tensor = None

    def fill(self, tensor: Tensor) -> bool:
        """Put the tensor of another run in an empty place; False if it is of another kind."""
        if self.tensor is None:
            self.tensor, self.version = tensor, tensor._version
        return _traits(tensor) == self._traits


class Later:
    """What the graph of one `Bound`'s calls finds its weights in: nothing, until the block is loaded again.

    Attributes
    ----------
    bound
        The loaded block while one of those calls is in its backward, else None.
    used
        A call of it was kept.
    version
        The executor's count of weight changes when the block was loaded.
    """

    # A graph holds this object, so it must not hold the graph: see `Kept`.

    def __init__(self, block: str, version: int) -> None:
        self.bound: Bound | None = None
        self.used = False
        self.version = version
        self._block = block

    @contextmanager
    def found_in(self, bound: Bound) -> Iterator[None]:
        """Find the weights in a loaded block for a while."""
        self.bound = bound
        try:
            yield
        finally:
            self.bound = None  # a cycle would keep the weights' memory

    def unpack(self, packed: Saved | WeightView) -> Tensor:
        """Give autograd back what it saved."""
        bound = self._require()
        if isinstance(packed, WeightView):
            with torch.no_grad():
                return bound.flats[packed.pack].as_strided(*packed[1:])
        if packed.changed:
            msg = f"{self._block}: a tensor that its backward needs was changed in place after it was computed"
            raise ModelError(msg)
        if packed.tensor is None:
            raise ModelError(OTHERWISE.format(self._block))
        return packed.tensor

    def check(self, _: Tensor) -> None:
        """Refuse a gradient outside the block's own backward: it would be lost."""
        self._require()

    def hand_over(self, param: nn.Parameter) -> Callable[[Tensor], None]:
        """Return a hook that adds a gradient to the parameter that is bound at backward."""

        def move(leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            self._require().add_gradient(param, grad)

        return move

    def _require(self) -> Bound:
        if self.bound is None:
            raise ModelError(ESCAPED.format(self._block))
        return self.bound


class Saver:
    """Packs what autograd saves during one run of a block.

    Parameters
    ----------
    bound
        The loaded block.
    keep
        Keep tensors, not only their places.
    """

    def __init__(self, bound: Bound, *, keep: bool) -> None:
        self._bound = bound
        self._keep = keep
        self._references = self._count_references()
        self._found: list[weakref.ref[Saved]] = []

    def pack(self, tensor: Tensor) -> Saved | WeightView:
        """Take one tensor that autograd saves."""
        found = _located(self._bound, tensor)
        if isinstance(found, WeightView):
            return found
        saved = Saved(found)
        if not self._keep:
            saved.empty()
        self._found.append(weakref.ref(saved))
        return saved

    def places(self) -> list[weakref.ref[Saved]]:
        """Return all in the order in which they came; those that the graph has let go of are dead."""
        return self._found

    def weights_are_free(self) -> bool:
        """Whether nothing but the block's modules and autograd's own leaves holds a weight."""
        return COUNTABLE and self._references == self._count_references()

    def _count_references(self) -> list[int]:
        if not COUNTABLE:
            return []
        leaves = [_references(leaf) for leaf in self._bound.plain.values()]
        flats = [
            torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
            for flat in self._bound.flats.values()
        ]
        return [*leaves, *flats]


class Kept:
    """The graph of one call, from its outputs back to its inputs.

    Parameters
    ----------
    tensors, fresh
        The call's output tensors and the input leaves, as they are in the graph.
    later
        Where the graph's weights will be found; None if they stay loaded until backward.
    places
        Of what the graph holds.

    Attributes
    ----------
    in_use
        Its backward has begun.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        fresh: list[Tensor],
        later: Later | None = None,
        places: Sequence[weakref.ref[Saved]] = (),
    ) -> None:
        self.tensors = tensors
        self.fresh = fresh
        self.later = later
        self.in_use = False
        self._places = places
        self._release: Callable[[], object] = bool

    def on_release(self, give: Callable[[], None]) -> None:
        """Have ``give`` called once when the graph is let go, or has nothing but places any more."""
        self._release = finalizer = weakref.finalize(self, give)
        finalizer.atexit = False

    def usable(self) -> bool:
        """Whether nothing of it was changed in place since."""
        return not any(saved.changed for saved in self._saved())

    def is_empty(self) -> bool:
        """Whether it waits for the tensors of another run."""
        return any(saved.tensor is None for saved in self._saved())

    def empty(self) -> None:
        """Keep the places only."""
        for saved in self._saved():
            saved.empty()
        self.release()

    def fill(self, bound: Bound, run: Callable[[], object]) -> None:
        """Run the block again, as far as its graph needs, and put what autograd would save in the empty places.

        Raises
        ------
        ModelError
            It saves something else than before.
        """
        filler = _Filler(bound, self._places)
        with (
            suppress(_FilledError),
            torch.autograd.graph.saved_tensors_hooks(filler.pack, _never),
        ):
            run()
        if filler.differs or self.is_empty():
            raise ModelError(OTHERWISE.format(bound.name))

    def num_bytes(self, lives_on: Iterable[Tensor]) -> int:
        """Return the bytes of the distinct storages in the graph, without those of ``lives_on``."""
        besides = {_identity(tensor) for tensor in lives_on}
        tensors = [saved.tensor for saved in self._saved() if saved.tensor is not None]
        sizes = {_identity(tensor): _size(tensor) for tensor in tensors}
        return sum(size for key, size in sizes.items() if key not in besides)

    def release(self) -> None:
        """Give its bytes back to the budget."""
        self._release()

    def _saved(self) -> Iterator[Saved]:
        for ref in self._places:
            saved = ref()
            if saved is not None:
                yield saved


class _FilledError(Exception):
    """Ends a run of a block, from inside an operation, once everything is there that backward needs."""


class _Filler:
    """Puts what autograd saves in a second run in the places of the first."""

    def __init__(self, bound: Bound, places: Sequence[weakref.ref[Saved]]) -> None:
        self.differs = False
        self._bound = bound
        self._places = places
        alive = (index for index, ref in enumerate(places) if ref() is not None)
        self._last = max(alive, default=-1)
        self._next = 0

    def pack(self, tensor: Tensor) -> None:
        found = _located(self._bound, tensor)
        if isinstance(found, WeightView):
            return
        index, self._next = self._next, self._next + 1
        saved = self._places[index]() if index <= self._last else None
        if saved is not None and not saved.fill(found):
            self.differs = True
        if index >= self._last or self.differs:
            raise _FilledError


def _never(_: None) -> Tensor:
    raise AssertionError


def _located(bound: Bound, tensor: Tensor) -> Tensor | WeightView:
    """Return where in the loaded weights a tensor lies that autograd saves, or the tensor without its own graph."""
    tensor = tensor.detach()  # an output of a node must not hold its own graph
    storage = _storage(tensor)
    pack = None if storage is None else bound.pack_at(storage.data_ptr())
    if pack is None:
        return tensor
    if tensor.dtype != bound.flats[pack].dtype or tensor.is_neg():
        return tensor.clone()
    size, offset = tuple(tensor.shape), int(tensor.storage_offset())
    return WeightView(pack, size, tensor.stride(), offset)


def _references(leaf: Any) -> int:
    """Count who holds a leaf, from Python or from C++, without the accumulator that a graph gives it."""
    uses = int(leaf._use_count())
    in_graph = leaf.requires_grad and uses > 1
    return sys.getrefcount(leaf) + uses - in_graph * _graph_references()


@cache
def _graph_references() -> int:
    """Return how many references a graph adds to its leaf; torch's releases differ."""

    def count() -> int:
        return sys.getrefcount(leaf) + int(leaf._use_count())

    with torch.enable_grad():
        leaf: Any = torch.zeros(1, requires_grad=True)
        before, graph, after = count(), leaf * 2, count()
        return after - before if graph.requires_grad else 0


def loosen(leaf: Tensor) -> None:
    """Let go of a parameter's memory but keep its shape; whoever reads its values reads NaN."""
    with torch.no_grad():
        leaf.data = leaf.new_full((), math.nan).expand(leaf.shape)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        with torch._C.DisableTorchFunctionSubclass():  # to look is not to use
            return tensor.untyped_storage()
    except NotImplementedError:  # a sparse or otherwise special tensor
        return None


def _identity(tensor: Tensor) -> int:
    storage = _storage(tensor)
    return id(tensor) if storage is None else storage.data_ptr()


def _traits(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _size(tensor: Tensor) -> int:
    storage = _storage(tensor)
    return (
        tensor.numel() * tensor.element_size() if storage is None else storage.nbytes()
    )
