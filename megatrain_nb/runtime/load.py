"""Make a model straight in the store: its weights are never whole in RAM.

[Note: two constructions] The model is made twice. The first time on the meta device, to learn its
blocks and where each parameter will be. The second time for real, by the very code and with the very
random draws of transformers; but each parameter moves into the store the moment a module registers
it, and what the model's own initialisation then does to it in place happens there. So the initial
weights are those of ``auto_class.from_config(config)`` for the same seed.
"""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.errors import ArgumentError, ModelError
from megatrain_nb.runtime.current import require_session
from megatrain_nb.runtime.layers import cut, parse_dtype
from megatrain_nb.runtime.offload import OffloadedModel
from megatrain_nb.runtime.prepare import move_what_stays, prepare
from megatrain_nb.runtime.tensor import stream_parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megatrain_nb.runtime.layers import Home

_registering = threading.Lock()


def from_config(
    config: Any,
    auto_class: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Make and initialise a transformers model block by block, straight into the open session.

    Parameters
    ----------
    config
        A transformers configuration.
    auto_class
        ``AutoModelForCausalLM`` (the default), another auto class, or a model class.
    dtype
        float32, the default; or bfloat16: computes in bf16, with the fp32 numbers of the initial weights as
        master.
    seed
        Calls ``torch.manual_seed(seed)`` first; None goes on with the random state as it is.
    **kwargs
        Handed to the class, for instance ``attn_implementation``.

    Returns
    -------
    torch.nn.Module
        With the initial weights that transformers gives for that seed. Train it with ``mt.Trainer`` or
        ``mt.wrap``.

    Raises
    ------
    SessionError
        No session is open.
    ArgumentError
        A dtype that is neither.
    BudgetError
        The budget does not hold what streams.
    """
    session = require_session()
    wanted = parse_dtype(dtype) or torch.float32
    make = _maker(auto_class, dict(kwargs, dtype=torch.float32))
    with torch.device("meta"), _each_registered() as registered:
        draft = make(copy.deepcopy(config))
    layers = cut(draft, wanted, session.compression)
    homes: list[Home | None] = [layers.homes.get(param) for param in registered]
    resident = set(layers.resident.values())
    keeps = [param in resident for param in registered]
    offloaded = OffloadedModel(draft, layers, session)
    sources = iter(zip(registered.copy(), homes, keeps, strict=True))
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with _each_registered(lambda param: _settle(param, sources, offloaded)):
            model = make(config)
        offloaded.pager.barrier()
        return _finish(model, offloaded, wanted)
    except BaseException:
        offloaded.close("making the model failed")
        raise


def _settle(
    param: nn.Parameter,
    sources: Iterator[tuple[nn.Parameter, Home | None, bool]],
    offloaded: OffloadedModel,
) -> None:
    """Move a parameter that was just registered to the place its draft got."""
    draft, home, keeps = next(sources, (None, None, False))
    if draft is None or draft.shape != param.shape:
        msg = (
            f"the model registers a parameter of shape {tuple(param.shape)} that it did not register on the meta "
            "device; make it with from_config of transformers and hand it to mt.wrap or mt.Trainer"
        )
        raise ModelError(msg)
    if keeps:
        return
    # The model's own initialisation works on the fp32 numbers, whatever computes later.
    scratch = _Scratch(tuple(param.shape))
    source = scratch if home is None else offloaded.source(draft).master()
    with source.opened(write=True) as values, torch.no_grad():
        values.copy_(param)
    stream_parameter(param, source, offloaded.device)


def _finish(
    model: nn.Module, offloaded: OffloadedModel, dtype: torch.dtype
) -> nn.Module:
    """Let the record that was made for the draft speak of the real model."""
    layers = cut(model, dtype, offloaded.session.compression)
    if layers.spec != offloaded.layers.spec:
        msg = f"{type(model).__name__} has other blocks than on the meta device; make it with from_config of transformers"
        raise ModelError(msg)
    prepare(model)
    move_what_stays(model, layers, offloaded.device)
    offloaded.become(model, layers)
    for param in layers.homes:
        stream_parameter(param, offloaded.source(param), offloaded.device, dtype)
    if getattr(getattr(model, "config", None), "dtype", None) is not None:
        model.config.dtype = dtype
    offloaded.intercept(dtype)
    return model


class _Scratch:
    """The place of a parameter that will be tied away: its random draws count, its values do not."""

    name = "a parameter that is tied to another one"

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        yield torch.empty(self._shape)

    def grad(self) -> None:
        """Return none: it never has a gradient."""

    def set_grad(self, value: Tensor | None) -> None:
        """Do nothing: it never has a gradient."""


def _maker(auto_class: Any, kwargs: dict[str, Any]) -> Callable[[Any], nn.Module]:
    if auto_class is None:
        from transformers import AutoModelForCausalLM as auto_class  # noqa: N813, PLC0415
    make = getattr(auto_class, "from_config", None) or getattr(
        auto_class, "_from_config", None
    )
    if make is None:
        msg = f"auto_class={auto_class!r} cannot make a model from a config; give AutoModelForCausalLM or a model class"
        raise ArgumentError(msg)
    return lambda config: make(config, **kwargs)


@contextmanager
def _each_registered(
    then: Callable[[nn.Parameter], None] | None = None,
) -> Iterator[list[nn.Parameter]]:
    """Call ``then`` for every new parameter that a module registers; gives the list of them."""
    seen: list[nn.Parameter] = []
    register = nn.Module.register_parameter
    thread = threading.get_ident()

    def register_parameter(
        module: nn.Module, name: str, param: nn.Parameter | None
    ) -> None:
        register(module, name, param)
        if (
            param is None
            or threading.get_ident() != thread
            or any(param is other for other in seen)
        ):
            return
        seen.append(param)
        if then is not None:
            then(param)

    with _registering:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign,assignment]
        try:
            yield seen
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
