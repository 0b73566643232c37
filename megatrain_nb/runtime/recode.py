"""Moments from one codec to another, tile by tile."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatrain_nb.codec.base import Key, get
from megatrain_nb.codec.choice import parse_compression, parse_name, safe_codec
from megatrain_nb.codec.dynamic import role_of
from megatrain_nb.codec.names import RAW
from megatrain_nb.errors import ArgumentError, BudgetError, ModelError
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.piece import Piece, What, moments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from megatrain_nb.plan.model import MomentPart, PackSpec
    from megatrain_nb.runtime.offload import OffloadedModel
    from megatrain_nb.runtime.pager import Pager
    from megatrain_nb.store.host import Slab

    F32 = NDArray[np.float32]
    Arrays = Mapping[What, Any]
    KeyOf = Callable[[str], tuple[int, int]]


class Moments(NamedTuple):
    """Both moments of a part, shape (numel,)."""

    exp_avg: F32
    exp_avg_sq: F32


def decode(part: MomentPart, encoded: Any, out: Moments) -> None:
    """Decode a part of a tile's bytes."""
    get(part.param.codec).decode(_bytes_of(part, encoded), *out)


def encode(part: MomentPart, moments: Moments, encoded: Any, key: Key) -> None:
    """Encode into a part of a tile's bytes.

    Raises
    ------
    ModelError
        They are not finite, or ``exp_avg_sq`` is negative; nothing is written.
    """
    codec = get(part.param.codec)
    m, v = moments
    if codec.name != RAW and not (
        np.isfinite(m).all() and np.isfinite(v).all() and (v >= 0).all()
    ):
        msg = (
            f"the moments of {part.param.name} cannot be encoded as {codec.name}: exp_avg and exp_avg_sq must be "
            "finite, and exp_avg_sq not negative"
        )
        raise ModelError(msg)
    first = 0 if codec.name == RAW else part.start - part.param.offset
    key = key._replace(first=first)  # small fp32 parameters may be cut anywhere
    codec.encode(m, v, _bytes_of(part, encoded), key)


def _bytes_of(part: MomentPart, encoded: Any) -> Any:
    return encoded[part.first_byte : part.first_byte + part.num_bytes]


def recompress(model_or_optimizer: Any, codec: bool | str | Mapping[str, Any]) -> None:
    """Convert Adam's moments to another codec, tile by tile within the budget.

    Parameters
    ----------
    model_or_optimizer
        From `wrap`, or in the open session.
    codec
        As ``optimizer_compression`` of `init`: False gives fp32 again, as the moments are now.

    Raises
    ------
    ArgumentError
        A codec that is not known.
    ModelError
        The model is not in a session, or a moment is not finite.
    BudgetError
        The larger moments do not fit; they are as they were.

    Notes
    -----
    To fewer bits rounds once. To fp32, or to the codec that they have, changes no value.
    """
    from megatrain_nb.runtime.offload import (  # noqa: PLC0415
        OffloadedModel,
        required_model,
    )

    wanted = parse_compression(codec, name="codec")
    offloaded = getattr(model_or_optimizer, "offloaded", None)
    if not isinstance(offloaded, OffloadedModel):
        offloaded = required_model(model_or_optimizer)
    offloaded.executor.check_usable()
    names = (home.spec.name for home in offloaded.layers.homes.values())
    ask(offloaded, {name: wanted.asked(name) for name in names})
    if offloaded.optimizer is not None:
        offloaded.optimizer.warn_of_settings()


def asked_by_groups(
    offloaded: OffloadedModel, groups: list[dict[str, Any]]
) -> dict[str, str]:
    """Return what is asked for each streamed parameter: by its group, else by the session.

    Raises
    ------
    ArgumentError
        A group asks for something that is not known, or for a parameter that is not streamed.
    """
    homes, session = offloaded.layers.homes, offloaded.session
    asked = {
        home.spec.name: session.compression.asked(home.spec.name)
        for home in homes.values()
    }
    for group in groups:
        if group.get("optimizer_compression") is None:
            continue
        codec = parse_name(group["optimizer_compression"])
        for param in group["params"]:
            if param in homes:
                asked[homes[param].spec.name] = codec
            elif codec != RAW:
                msg = (
                    f"optimizer_compression={codec!r} of a parameter group: a parameter of shape "
                    f"{tuple(param.shape)} in it lies beside the blocks and keeps fp32 moments; put it into another group"
                )
                raise ArgumentError(msg)
    return asked


def ask(offloaded: OffloadedModel, asked: Mapping[str, str]) -> None:
    """Give every parameter the codec that is safe where this is asked, and convert what there is."""
    layers = offloaded.layers
    params = [param for pack in layers.spec.packs for param in pack.params]
    codecs = {
        param.name: safe_codec(
            asked[param.name], role_of(param.shape, table=param.name in layers.tables)
        )
        for param in params
    }
    with interrupts_wait(offloaded.executor.stop, breakable=False):
        offloaded.updates.finish_all()
        offloaded.updates.chooser.forget()
        recode(offloaded, codecs)
        offloaded.adam.asked = dict(asked)


def recode(offloaded: OffloadedModel, codecs: Mapping[str, str]) -> None:
    """Convert the moments of a model, pack by pack, and plan again.

    Parameters
    ----------
    offloaded
        The model.
    codecs
        By parameter name; others stay.

    Raises
    ------
    BudgetError
        The larger moments do not fit; they are as they were.
    """
    new = offloaded.layers.with_codecs(codecs)
    if new.spec == offloaded.layers.spec:
        return
    pager, stop = offloaded.pager, offloaded.executor.stop
    with interrupts_wait(stop, breakable=False):
        offloaded.updates.finish_all()
        offloaded.executor.tail.leave_all()
        offloaded.executor.rest()
        pager.barrier()
        offloaded.memory.check(new.spec)
        try:
            for pack in new.spec.packs:
                if pack != pager.packs[pack.index]:
                    _convert_pack(pager, pack, offloaded.adam.rounding_of)
        finally:
            done = {param.name: param.codec for p in pager.packs for param in p.params}
            offloaded.use_layers(offloaded.layers.with_codecs(done))
        offloaded.session.models.plan()


def _convert_pack(pager: Pager, after: PackSpec, key_of: KeyOf) -> None:
    """Convert the moments of one pack; after an error they are as they were."""
    before = pager.packs[after.index]
    old = [pager.piece(before.index, what) for what in moments_of(before)]
    new = [Piece(after, what) for what in moments_of(after)]
    if all(pager.is_blank(before.index, what) for what in moments_of(before)):
        pager.swap(after, new)
        return
    if all(piece.slab is not None for piece in old):
        with suppress(BudgetError):  # no room for both at once: by way of the disk
            _convert_in_ram(pager, old, new, key_of)
            return
    for piece in old:
        piece.resident = False
        pager.settle(piece)
    pager.barrier()
    _convert_on_disk(pager, old, new, key_of)


def _convert_in_ram(
    pager: Pager, old: list[Piece], new: list[Piece], key_of: KeyOf
) -> None:
    before, after = old[0].pack, new[0].pack
    pager.need_all((before.index, piece.what) for piece in old)
    slabs: list[Slab] = []
    try:
        for piece in new:
            slabs.append(pager.borrow(piece.num_bytes, "moments in another codec"))
            slabs[-1].view(np.uint8, 0, piece.num_bytes).fill(0)
            piece.slab = slabs[-1]
        for start, stop in before.tiles(pager.tile_numel):
            sources = {piece.what: piece.part(start, stop) for piece in old}
            targets = {piece.what: piece.part(start, stop) for piece in new}
            _convert_tile(pager, before, after, (start, stop), sources, targets, key_of)
    except BaseException:
        for slab in slabs:
            pager.pool.give(slab)
        raise
    finally:
        for piece in old:
            pager.drop(before.index, piece.what, keep=True)
    for piece in new:
        piece.dirty = piece.resident = True  # until the next plan says otherwise
    pager.swap(after, new)


def _convert_on_disk(
    pager: Pager, old: list[Piece], new: list[Piece], key_of: KeyOf
) -> None:
    before, after = old[0].pack, new[0].pack
    tiles = before.tiles(pager.tile_numel)
    try:
        for tile in tiles:
            _convert_stored(pager, old, new, tile, key_of)
    except BaseException:
        for piece in new:
            for start, _ in tiles:
                if pager.tile_key(piece, start) in pager.store:
                    pager.store.delete(pager.tile_key(piece, start))
        raise
    pager.swap(after, new)


def _convert_stored(
    pager: Pager,
    old: list[Piece],
    new: list[Piece],
    tile: tuple[int, int],
    key_of: KeyOf,
) -> None:
    """Read a tile, convert it, and return when it is written."""
    start, stop = tile
    flights: list[tuple[Slab, list[Future[None]]]] = []
    sources, targets = {}, {}
    try:
        for piece in old:
            read = pager.read_tile(piece, start, stop, patient=True)
            assert read is not None
            flights.append((read[0], [] if read[1] is None else [read[1]]))
            pager.wait_for(read[1], f"reading the {piece}")
            sources[piece.what] = piece.over(read[0], start, stop)
        for piece in new:
            first, end = piece.span(start, stop)
            slab = pager.borrow(end - first, "moments in another codec")
            flights.append((slab, []))
            targets[piece.what] = piece.over(slab, start, stop)
            targets[piece.what].fill(0)
        packs = old[0].pack, new[0].pack
        _convert_tile(pager, *packs, tile, sources, targets, key_of)
        writes = [writes for _, writes in flights[len(old) :]]
        for piece, each in zip(new, writes, strict=True):
            data = targets[piece.what].view(np.uint8)
            each.append(pager.put(piece, pager.tile_key(piece, start), data))
        for piece, each in zip(new, writes, strict=True):
            pager.wait_for(each[0], f"writing the {piece}")
    finally:
        for slab, moving in flights:
            pager.give_up(slab, moving, what=f"converting tiles of {old[0].pack.name}")


def _convert_tile(
    pager: Pager,
    before: PackSpec,
    after: PackSpec,
    tile: tuple[int, int],
    sources: Arrays,
    targets: Arrays,
    key_of: KeyOf,
) -> None:
    start, stop = tile
    scratch: Slab | None = None
    if before.encoded and after.encoded:
        size = max((p.stop - p.start for p in before.moment_parts(*tile)), default=0)
        scratch = pager.borrow(8 * size, "moments between two codecs")
    try:
        for old, new in zip(
            before.moment_parts(start, stop),
            after.moment_parts(start, stop),
            strict=True,
        ):
            place, numel = (
                slice(old.start - start, old.stop - start),
                old.stop - old.start,
            )
            if before.encoded and after.encoded:
                if old.param.codec == new.param.codec:
                    _bytes_of(new, targets[What.ENCODED])[:] = _bytes_of(
                        old, sources[What.ENCODED]
                    )
                    continue
                assert scratch is not None
                both = scratch.view(np.float32, 0, 2 * numel)
                moments = Moments(both[:numel], both[numel:])
            elif before.encoded:
                moments = Moments(
                    targets[What.EXP_AVG][place], targets[What.EXP_AVG_SQ][place]
                )
            else:
                moments = Moments(
                    sources[What.EXP_AVG][place], sources[What.EXP_AVG_SQ][place]
                )
            if before.encoded:
                decode(old, sources[What.ENCODED], moments)
            if after.encoded:
                step, seed = key_of(new.param.name)
                encode(new, moments, targets[What.ENCODED], Key(0, step, seed))
    finally:
        if scratch is not None:
            pager.pool.give(scratch)
