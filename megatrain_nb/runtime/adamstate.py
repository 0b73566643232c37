"""Adam's state of one model: how many updates each parameter has had, its moments, and their codecs."""

from __future__ import annotations

import logging
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain_nb.codec.dynamic import Role
from megatrain_nb.codec.names import DYNAMIC
from megatrain_nb.runtime.chooser import is_looked_at
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.piece import MOMENTS, What, moments_of
from megatrain_nb.runtime.recode import Moments, encode, recode
from megatrain_nb.runtime.source import MomentSource, encoded_of
from megatrain_nb.runtime.tensor import streamed_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from megatrain_nb.runtime.offload import OffloadedModel

logger = logging.getLogger("megatrain_nb")


class AdamState:
    """What an AdamW keeps of the parameters of one model.

    Attributes
    ----------
    steps
        Updates that each parameter has had.
    moments
        Both moments of each parameter that does not stream, fp32.
    asked
        By name of a streamed parameter: the codec that is asked for its moments.
    rounding_seed
        Of the rounding of encoded moments, all parameters.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self.steps: dict[nn.Parameter, int] = {}
        self.moments: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self.rounding_seed = 0
        self._offloaded = offloaded
        session = offloaded.session
        names = [home.spec.name for home in offloaded.layers.homes.values()]
        for pattern in session.compression.unused(names):
            session.note(
                f"optimizer_compression: {pattern!r} decides of no parameter of {offloaded.name}"
            )
        self.asked = {name: session.compression.asked(name) for name in names}

    def reset(self) -> None:
        """Forget moments and step counts: a new optimizer starts from zero."""
        offloaded = self._offloaded
        offloaded.finish_updates()
        offloaded.updates.rest()
        self.steps.clear()
        self.moments.clear()
        for pack in offloaded.layers.spec.packs:
            for what in moments_of(pack):
                offloaded.pager.discard(pack.index, what)

    def count_step(self, param: nn.Parameter) -> int:
        """Count an update of a parameter, and return its number; the first is 1."""
        self.steps[param] = self.steps.get(param, 0) + 1
        return self.steps[param]

    # -- moments --------------------------------------------------------------------------------------

    def moment(self, param: nn.Parameter, what: What) -> Tensor:
        """Return a moment as a tensor: streamed, or ordinary for a parameter that is."""
        homes = self._offloaded.layers.homes
        if param in homes:
            return streamed_tensor(
                MomentSource(self._offloaded, param, homes[param], what),
                tuple(param.shape),
                torch.float32,
                torch.device("cpu"),
            )
        moments = self.moments.setdefault(
            param, (torch.zeros_like(param), torch.zeros_like(param))
        )
        return moments[0 if what is What.EXP_AVG else 1]

    def set_moments(
        self, param: nn.Parameter, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> None:
        """Store both moments of a parameter; encoded ones round once.

        Raises
        ------
        ModelError
            They cannot be encoded: not finite, or ``exp_avg_sq`` negative.
        """
        offloaded = self._offloaded
        home = offloaded.layers.homes.get(param)
        if home is None or not home.pack.encoded:
            for what, value in zip(MOMENTS, (exp_avg, exp_avg_sq), strict=True):
                self.moment(param, what).copy_(value)
            return
        flat = [_flat(value, home.spec.shape) for value in (exp_avg, exp_avg_sq)]
        offloaded.executor.check_usable()
        with interrupts_wait(offloaded.executor.stop, breakable=False):
            offloaded.finish_update(home.pack.index)
            with encoded_of(offloaded, home, write=True) as (parts, key):
                for part, data, place in parts:
                    encode(part, Moments(*(x[place] for x in flat)), data, key)

    def rounding_of(self, name: str) -> tuple[int, int]:
        """Return step and seed of the rounding of a parameter's moments, see `megatrain_nb.codec.base.Key`."""
        param = self._offloaded.by_name[name]
        return self.steps.get(param, 0), seed_of(self.rounding_seed, name)

    # -- codecs ---------------------------------------------------------------------------------------

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of each streamed parameter's moments, by name."""
        specs = (home.spec for home in self._offloaded.layers.homes.values())
        return {spec.name: spec.codec for spec in specs}

    def look_at_update(self, params: Iterable[nn.Parameter]) -> None:
        """Measure codecs in the update that begins, if it is time and some of these are dynamic."""
        chooser, homes = self._offloaded.updates.chooser, self._offloaded.layers.homes
        chooser.forget()
        if is_looked_at(self._offloaded.steps.done + 1):
            specs = [homes[param].spec for param in params if param in homes]
            found = {
                spec.name: spec.numel
                for spec in specs
                if spec.codec in Role.BODY.codecs and self.asked[spec.name] == DYNAMIC
            }
            if found:
                chooser.begin(found)

    def change_codecs(self) -> None:
        """Give moments the codecs that the update that was looked at asks for, see [Note: when codecs change]."""
        chooser = self._offloaded.updates.chooser
        if chooser.looking:
            changed = chooser.decide(self.codecs)
            recode(self._offloaded, changed)
            if changed:
                logger.info("codecs of moments changed: %s", changed)


def seed_of(seed: int, name: str) -> int:
    """Return the seed of one parameter's rounding, from that of all: else two parameters would round alike."""
    return zlib.crc32(f"{seed}/{name}".encode())


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
