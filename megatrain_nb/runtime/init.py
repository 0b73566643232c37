"""`mt.init`: checks what a session is asked for, and opens it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatrain_nb.codec import names
from megatrain_nb.codec.choice import parse_storage
from megatrain_nb.errors import ArgumentError
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.current import current_session, set_current
from megatrain_nb.runtime.device import open_device
from megatrain_nb.runtime.piece import MOMENTS, What
from megatrain_nb.runtime.session import Session
from megatrain_nb.store.preflight import check_directory
from megatrain_nb.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

# What is packed, as pieces of the pager.
_PIECES = {names.WEIGHTS: (What.WEIGHTS,), names.MOMENTS: MOMENTS}


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
        error budget. ``"3bit"``, ``"2bit"`` and ``"dynamic"`` are experimental. Or a mapping from patterns of parameter or
        module names to these, ``"lossless"`` not among them; the first that matches counts, and what none matches stays fp32. Vectors, norms and
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
    CLAIM.check()
    if crash_safe not in (None, "step"):
        msg = f'crash_safe={crash_safe!r} is not known; give "step" or None'
        raise ArgumentError(msg)
    compression, kinds = parse_storage(optimizer_compression, weight_compression)
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
    before = current_session()
    if before is not None:  # only now: a mistyped argument must not cost it
        before.close()
    session = Session(
        preflight,
        max_ram_bytes=sizes["max_ram_gb"],
        max_disk_bytes=sizes["max_disk_gb"],
        max_vram_bytes=sizes["max_vram_gb"],
        device=opened,
        crash_safe=crash_safe,
        compression=compression,
        packed=frozenset(what for kind in kinds for what in _PIECES[kind]),
    )
    set_current(session)
    return session
