"""Where each pack's bytes are, and how they move between disk and RAM.

[Note: pieces and slabs] A piece is in RAM while it has a slab; it may be used only between
``need`` and ``drop``. ``drop`` leaves a resident piece where it is and sends any other one to disk if
it changed; its slab goes back to the pool when the last byte is written. What was never written
reads as zeros, or as encoded zeros. All of it runs on the training thread; only reads, writes and the return of written
slabs happen on I/O threads.

[Note: leases] A device with memory of its own copies out of slabs and into them while the training thread goes
on. Such a piece is *lent* until the copy is over: ``need`` waits for it, and ``settle`` puts it off, so that its
bytes are neither used nor given back too early.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_nb.codec.lossless.chunks import name_of
from megatrain_nb.errors import StoreError
from megatrain_nb.plan.layout import PieceLayout
from megatrain_nb.plan.model import TILE_NUMEL
from megatrain_nb.plan.timeline import HIT, LATE, MISS, Span
from megatrain_nb.runtime.piece import Piece, What, master_of, moments_of
from megatrain_nb.store.base import wait

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from numpy.typing import NDArray

    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import PackSpec
    from megatrain_nb.runtime.lanes import Work
    from megatrain_nb.runtime.piece import Values
    from megatrain_nb.store.base import Store
    from megatrain_nb.store.host import HostPool, Slab


class _Landing:
    """Gives a slab back when the last of its writes has ended, on whichever thread that is.

    ``done`` is finished after the slab is back, so whoever waits for it finds the room.
    """

    def __init__(self, count: int, slab: Slab, pool: HostPool) -> None:
        self.done: Future[None] = Future()
        self._left = count
        self._slab = slab
        self._pool = pool
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, write: Future[None]) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
            if not write.cancelled():
                self._error = self._error or write.exception()
        if last:
            self._pool.give(self._slab)
            if self._error is not None:
                self.done.set_exception(self._error)
            else:
                self.done.set_result(None)


def changed_first(pieces: Iterable[Piece]) -> Piece:
    """Return a piece that has to be written at some time anyway, if there is one."""
    return min(pieces, key=lambda piece: not piece.dirty)


class Pager:
    """Moves pieces between RAM and disk within the pool's budget.

    Pieces of the kinds in ``packed`` are packed on disk, bit for bit; in RAM nothing is.

    Attributes
    ----------
    broken
        Why the store no longer holds the last weights or moments; empty while it does.
    lost
        The same for pending gradients, by pack.
    give_way
        Gives back some memory that was read ahead; False if there is none.
    give_back
        Gives back what kept activations had of the pool; False if there is nothing.
    give_up_kept
        Frees activations that some call keeps, to be computed again; False if there are none.
    forget_tiles
        Gives back all tiles that were read ahead.
    is_due
        Whether a pack's update is due: then its gradient can no longer be dropped.
    needed_last
        Which of several pieces will be needed last.
    prefix
        What its keys in the store begin with.
    wait_seconds
        Time that the training thread has waited for the disk so far.
    opaque
        What goes with every checkpoint and comes back with it, as it is: JSON, by pack's name.
    """

    def __init__(
        self,
        packs: tuple[PackSpec, ...],
        *,
        prefix: str,
        pool: HostPool,
        store: Store,
        on_span: Callable[[Span], None],
        packed: Container[What] = (),
        tile_numel: int = TILE_NUMEL,
    ) -> None:
        self.packs = packs
        self.pool = pool
        self.store = store
        self.tile_numel = tile_numel
        self.wait_seconds = 0.0
        self.broken = ""
        self.lost: dict[int, str] = {}
        self.opaque: dict[str, Any] = {}
        self.prefix = prefix
        self._on_span = on_span
        self._packed = packed
        self._pieces = {
            (pack.index, what): Piece(pack, what)
            for pack in packs
            for what in (*master_of(pack), What.GRADS, *moments_of(pack))
        }
        self._writing: dict[str, Future[None]] = {}
        self._held: list[Piece] = []
        self._leaving: dict[Piece, None] = {}
        self.give_way: Callable[[], bool] = lambda: False
        self.give_back: Callable[[], bool] = lambda: False
        self.give_up_kept: Callable[[], bool] = lambda: False
        self.forget_tiles: Callable[[], None] = lambda: None
        self.is_due: Callable[[int], bool] = lambda _: False
        self.needed_last: Callable[[list[Piece]], Piece] = changed_first

    def piece(self, pack: int, what: What) -> Piece:
        """Return the record of one piece."""
        return self._pieces[pack, what]

    @contextmanager
    def must_end(self, what: str) -> Iterator[None]:
        """Do inside what must not end half-way: after an error the model is not usable; ``what`` says what it was."""
        try:
            yield
        except BaseException as error:
            self.broken = (
                f"{what} failed half-way ({type(error).__name__}: {error}), so the model must not be used any more; "
                "close the session and start again"
            )
            raise

    # -- whole pieces ---------------------------------------------------------------------------

    def fetch(
        self, pack: int, what: What, *, patient: bool = False, blank: bool = False
    ) -> bool:
        """Start to bring a piece into RAM; False if there is no room for it now.

        Parameters
        ----------
        pack, what
            Which piece.
        patient
            Wait for room.
        blank
            Nothing is read, and the values are arbitrary: they are overwritten, or not looked at.

        Raises
        ------
        BudgetError
            With ``patient``: no room, and nothing that would make room.
        """
        piece = self._pieces[pack, what]
        _check_here(piece, changes=False, blank=blank)
        self._leaving.pop(piece, None)  # it is wanted again
        if piece.slab is not None:
            return True
        self._wait_writes(piece)
        slab = self._take(piece.num_bytes, piece.what.value, patient=patient)
        if slab is None:
            return False
        piece.slab = slab
        try:
            self._tell("ENTER", self._key(piece), 0 if blank else self._stored(piece))
            for start, stop in () if blank else piece.pack.tiles(self.tile_numel):
                out = piece.bytes_in(slab, start, stop)
                future = self._read(piece, start, stop, out)
                if future is not None:
                    piece.loading.append(future)
        except BaseException:
            self._forget_slab(piece)
            raise
        return True

    def need(
        self, pack: int, what: What, *, blank: bool = False, foreseen: bool = True
    ) -> Values:
        """Return a piece's values in RAM, shape (numel,); ``drop`` it after use.

        ``foreseen`` is False for a use that nothing predicts: it is no hit and no miss.
        """
        piece = self._pieces[pack, what]
        begin = time.perf_counter()
        missed = piece.slab is None
        late = not piece.landed
        self.fetch(pack, what, patient=True, blank=blank)
        self._end_lease(piece)
        from_disk = foreseen and bool(piece.loading)
        if piece.loading:
            try:
                self._wait_all(piece.loading, f"reading the {piece}")
            except BaseException:
                self._forget_slab(piece)
                self._forget_reads()
                raise
            piece.loading = []
        if from_disk:
            outcome = MISS if missed else LATE if late else HIT
            self._tell_need(self._key(piece), piece.num_bytes, begin, outcome)
        piece.users += 1
        return piece.values()

    def need_all(
        self,
        wanted: Iterable[tuple[int, What]],
        *,
        blank: Container[int] = (),
        foreseen: bool = True,
    ) -> dict[tuple[int, What], Values]:
        """Return the values of several pieces, by (pack, what); where one fails, none is in use.

        ``blank`` are the packs of which `fetch` reads nothing.
        """
        found = {}
        with ExitStack() as undo:
            for pack, what in wanted:
                found[pack, what] = self.need(
                    pack, what, blank=pack in blank, foreseen=foreseen
                )
                undo.callback(self.drop, pack, what)
            undo.pop_all()
        return found

    def drop(
        self, pack: int, what: What, *, dirty: bool = False, keep: bool = False
    ) -> None:
        """End the use that ``need`` began.

        Parameters
        ----------
        pack, what
            Which piece.
        dirty
            The bytes changed.
        keep
            It is used again soon: it stays until the room is needed.
        """
        piece = self._pieces[pack, what]
        if dirty:
            _check_here(piece, changes=True)
        piece.users -= 1
        piece.dirty = piece.dirty or dirty
        if piece.users == 0 and not keep:
            self.settle(piece)

    def settle(self, piece: Piece) -> None:
        """Put an unused piece where the plan wants it."""
        if piece.slab is None or piece.users or piece.resident:
            return
        if piece.lent:
            self._leaving[piece] = None
            return
        if not piece.dirty:
            self._forget_slab(piece)
            return
        self._tell("LEAVE", self._key(piece), piece.num_bytes)
        slab, piece.slab, piece.dirty = piece.slab, None, False
        tiles = self._tiles(piece)
        landing = _Landing(len(tiles), slab, self.pool)
        for key, start, stop in tiles:
            self._write(piece, key, piece.bytes_in(slab, start, stop), landing)

    def lend(self, pack: int, what: What, until: Work) -> None:
        """Note that a device copies out of a piece in use, or into it; whoever needs it next waits for the end."""
        self._pieces[pack, what].lease = until

    def end_leases(self) -> None:
        """Settle what was put off and is no longer lent; never waits."""
        for piece in [piece for piece in self._leaving if not piece.lent]:
            del self._leaving[piece]
            self.settle(piece)

    def is_blank(self, pack: int, what: What) -> bool:
        """Whether a piece was never written, so that it reads as zeros."""
        piece = self._pieces[pack, what]
        _check_here(piece, changes=False)
        keys = [key for key, _, _ in self._tiles(piece)]
        return piece.slab is None and not any(
            key in self._writing or key in self.store for key in keys
        )

    def discard(self, pack: int, what: What) -> None:
        """Forget a piece: from now on it reads as zeros."""
        piece = self._pieces[pack, what]
        if what is not What.GRADS:
            _check_here(piece, changes=True)
        if piece in self._held:
            self._held.remove(piece)
            piece.users -= 1
        for key, _, _ in self._tiles(piece):
            with suppress(StoreError):  # nobody wants any more what did not arrive
                self._wait_writes(piece, key)
        self._forget_slab(piece)
        piece.dirty = False
        if what is What.GRADS:
            self.lost.pop(pack, None)
        for key, _, _ in self._tiles(piece):
            if key in self.store:
                self.store.delete(key)

    def swap(self, pack: PackSpec, moments: Iterable[Piece]) -> None:
        """Let a pack have moments in other codecs, and forget the ones before."""
        for what in moments_of(self.packs[pack.index]):
            self.discard(pack.index, what)
            del self._pieces[pack.index, what]
        self.packs = tuple(pack if p.index == pack.index else p for p in self.packs)
        for (index, _), piece in self._pieces.items():
            if index == pack.index:
                piece.pack = pack
        for piece in moments:
            self._pieces[pack.index, piece.what] = piece

    @contextmanager
    def opened(
        self, pack: int, *what: What, write: bool = False
    ) -> Iterator[list[Values]]:
        """Use pieces of one pack outside a step; the last ones stay in RAM until others are opened."""
        pieces = [self._pieces[pack, each] for each in what]
        for piece in pieces:
            _check_here(piece, changes=write)
        if not all(piece in self._held for piece in pieces):
            self.close_held()
            self.need_all(((pack, each) for each in what), foreseen=False)
            self._held = [*pieces]
        for piece in pieces:
            self._end_lease(piece)
            # Whoever opens another one meanwhile must not take these away.
            piece.users += 1
        try:
            yield [piece.values() for piece in pieces]
        finally:
            for piece in pieces:
                self.drop(pack, piece.what, dirty=write)

    def close_held(self) -> None:
        """Drop the pieces that ``opened`` kept."""
        while self._held:
            held = self._held.pop()
            self.drop(held.pack.index, held.what)

    # -- tiles, for the optimizer -----------------------------------------------------------------

    def tile_key(self, piece: Piece, start: int) -> str:
        """Return the store's key of the tile that begins at element ``start``."""
        return self.prefix + self.tile_name(piece, start)

    def tile_name(self, piece: Piece, start: int) -> str:
        """Return what the tile that begins at element ``start`` is called, whichever model of the session it is."""
        return f"{piece.label}/{piece.pack.index}/{start // self.tile_numel}"

    def read_tile(
        self, piece: Piece, start: int, stop: int, *, patient: bool
    ) -> tuple[Slab, Future[None] | None] | None:
        """Start to read one tile of a piece that is on disk into a slab of its own; None if there is no room."""
        key = self.tile_key(piece, start)
        self._wait_writes(piece, key)
        first, end = piece.span(start, stop)
        slab = self._take(end - first, "tiles of the update", patient=patient)
        if slab is None:
            return None
        out = slab.view(np.uint8, 0, end - first)
        return slab, self._read(piece, start, stop, out)

    def write_tile(self, piece: Piece, start: int, slab: Slab) -> None:
        """Write one tile behind; the slab goes back to the pool when it is on disk."""
        landing = _Landing(1, slab, self.pool)
        stop = min(start + self.tile_numel, piece.pack.numel)
        first, end = piece.span(start, stop)
        data = slab.view(np.uint8, 0, end - first)
        self._write(piece, self.tile_key(piece, start), data, landing)

    def borrow(self, num_bytes: int, what: str) -> Slab:
        """Take a slab from the pool, which is to get it back.

        Raises
        ------
        BudgetError
            No room, and nothing that would make room.
        """
        slab = self._take(num_bytes, what, patient=True)
        assert slab is not None
        return slab

    @contextmanager
    def room(self, num_bytes: int, what: str) -> Iterator[Slab]:
        """Give a slab from the pool for a moment, to work in or only to be set aside: untouched it takes no memory.

        Raises
        ------
        BudgetError
            As `borrow`.
        """
        slab = self.borrow(num_bytes, what)
        try:
            yield slab
        finally:
            self.pool.give(slab)

    def wait_for(self, future: Future[None] | None, what: str) -> None:
        """Wait for one read, and count the wait."""
        if future is not None:
            self._wait_all([future], what)

    def wait_for_tile(
        self, piece: Piece, start: int, reading: Future[None] | None, *, missed: bool
    ) -> None:
        """Wait for the read of a tile, and count the wait; ``missed`` if it was not read ahead."""
        if reading is None:
            return
        begin, late = time.perf_counter(), not reading.done()
        try:
            self._wait_all([reading], f"reading tiles of {piece.pack.name}")
        except BaseException:
            self._forget_reads()
            raise
        first, end = piece.span(start, min(start + self.tile_numel, piece.pack.numel))
        outcome = MISS if missed else LATE if late else HIT
        self._tell_need(self.tile_key(piece, start), end - first, begin, outcome)

    def settle_writes(self, what: What) -> None:
        """Return when the writes of one kind have landed; raises what one of them raised."""
        for piece in self._pieces.values():
            if piece.what is what:
                self._end_lease(piece)
        self.end_leases()
        for piece in self._pieces.values():
            if piece.what is what:
                self._wait_writes(piece)

    # -- barriers -----------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every write has landed; raises what a write raised."""
        self.close_held()
        for piece in list(self._leaving):
            self._end_lease(piece)
        self.end_leases()
        self._wait_keys(list(self._writing), "writing tiles")

    def apply(self, residency: Residency) -> None:
        """Make a new plan take effect: what no longer stays leaves now."""
        self.close_held()
        planned = {What.WEIGHTS: residency.weights, What.GRADS: residency.grads}
        leaving = []
        for piece in self._pieces.values():
            stays = piece.pack.index in planned.get(piece.what, residency.states)
            if piece.resident and not stays:
                leaving.append(piece)
            piece.resident = stays
        for piece in leaving:  # but what was read ahead is still wanted
            self.settle(piece)

    def shrink(self, limit_bytes: int) -> None:
        """Give back what was read ahead or is being written, until what the pool has given is within a limit."""
        pool = self.pool
        while pool.in_use_bytes + pool.aside_bytes > limit_bytes and self._make_room():
            pass

    def take_back(self, num_bytes: int) -> None:
        """Have so much again of what was set aside."""
        self.pool.take_back(num_bytes)

    def set_aside(self, num_bytes: int) -> bool:
        """Leave some of the pool to kept activations; False if not even the end of all writes makes room."""
        while not self.pool.set_aside(num_bytes):
            if not self._await_leaving():
                return False
        return True

    def reset(self) -> None:
        """After an error: nobody uses anything any more."""
        self._held.clear()
        self._leaving.clear()
        for piece in self._pieces.values():
            piece.users = 0
            self._end_lease(piece)
            self.settle(piece)

    # -- checkpoints ----------------------------------------------------------------------------------

    def kept_pieces(self, *what: What) -> list[Piece]:
        """Return the pieces that a checkpoint holds: all but gradients, or those of some kinds."""
        return [
            piece
            for piece in self._pieces.values()
            if piece.what is not What.GRADS and (not what or piece.what in what)
        ]

    def names(self, piece: Piece) -> dict[str, str]:
        """Return the keys of a piece's tiles, by the tiles' names."""
        return {
            self.tile_name(piece, start): key for key, start, _ in self._tiles(piece)
        }

    def unsaved_pieces(self) -> list[Piece]:
        """Return the pieces of which RAM has the only true copy; what else it has is on the disk."""
        self.barrier()
        kept = self.kept_pieces()
        for piece in kept:
            _check_here(piece, changes=False)
            if not piece.resident:
                self.settle(piece)
        self.barrier()
        return [piece for piece in kept if piece.slab is not None and piece.dirty]

    def forget_stored(self, piece: Piece) -> None:
        """Delete what the store has of a piece whose true copy is in RAM."""
        assert piece.slab is not None
        for key, _, _ in self._tiles(piece):
            if key in self.store:
                self.store.delete(key)

    def flush(self, piece: Piece) -> None:
        """Write a piece that stays in RAM; if that fails, RAM still has it and nothing is lost."""
        slab = piece.slab
        assert slab is not None
        writes = [
            self.put(piece, key, piece.bytes_in(slab, start, stop))
            for key, start, stop in self._tiles(piece)
        ]
        for write in writes:  # until the last has ended, the slab is the store's
            with suppress(Exception):
                wait(write, what=f"writing the {piece}")
        self._wait_all(writes, f"writing the {piece}")
        piece.dirty = False

    def delete_all(self) -> None:
        """Delete every tile from the store."""
        for key in self.store.keys():  # noqa: SIM118
            if key.startswith(self.prefix):
                self.store.delete(key)

    def close(self) -> None:
        """Give all slabs back; the store is not touched."""
        self._held.clear()
        with suppress(Exception):
            self._wait_all(list(self._writing.values()), "writing tiles")
        self._writing.clear()
        for piece in self._pieces.values():
            piece.users = 0
            self._forget_slab(piece)

    def layout(self) -> list[PieceLayout]:
        """Return every piece's bytes, and where it is."""
        return [
            PieceLayout(
                self._key(piece),
                piece.num_bytes,
                piece.resident,
                piece.landed,
                piece.on_device,
            )
            for piece in self._pieces.values()
        ]

    # -- inside ---------------------------------------------------------------------------------------

    def _key(self, piece: Piece) -> str:
        return f"{self.prefix}{piece.label}/{piece.pack.index}"

    def _stored(self, piece: Piece) -> int:
        """Return the bytes of a piece that the store holds: the rest reads as zeros."""
        stored = (
            piece.span(start, stop)
            for key, start, stop in self._tiles(piece)
            if key in self.store
        )
        return sum(end - first for first, end in stored)

    def _tell(self, kind: str, key: str, num_bytes: int) -> None:
        now = time.perf_counter()
        self._on_span(
            Span(
                kind=kind,
                name=key,
                start_s=now,
                end_s=now,
                num_bytes=num_bytes,
                lane="disk",
            )
        )

    def _tell_need(self, key: str, num_bytes: int, begin: float, outcome: str) -> None:
        """Say how a piece or tile was found; see the note in plan/timeline.py."""
        end = begin if outcome == HIT else time.perf_counter()
        self._on_span(
            Span(
                kind="NEED",
                name=key,
                start_s=begin,
                end_s=end,
                num_bytes=num_bytes,
                outcome=outcome,
            )
        )

    def packing_of(self, piece: Piece) -> str:
        """Return the codec that the store puts the tiles of a piece with."""
        packed = piece.what in self._packed
        return name_of(piece.dtype.itemsize) if packed else "raw"

    def put(self, piece: Piece, key: str, data: NDArray[np.uint8]) -> Future[None]:
        """Start to write a tile as its kind is stored; nobody else knows of it until it is done."""
        return self.store.put(key, data, codec=self.packing_of(piece))

    def _write(
        self, piece: Piece, key: str, data: NDArray[np.uint8], landing: _Landing
    ) -> None:
        future = self.put(piece, key, data)
        self._writing[key] = landing.done
        future.add_done_callback(lambda write: self._check_written(piece, write))
        future.add_done_callback(landing)

    def _check_written(self, piece: Piece, write: Future[None]) -> None:
        """Note a write that failed: the store then holds an older version of what was in RAM."""
        error = None if write.cancelled() else write.exception()
        pack = piece.pack.index
        if error is not None and piece.what is What.GRADS and not self.is_due(pack):
            self.lost[pack] = (
                f"the {piece} could not be written ({error}); drop the gradients with optimizer.zero_grad()"
            )
        elif error is not None and not self.broken:
            self.broken = (
                f"the {piece} could not be written ({error}), so the model must not be used any more; "
                "close the session, make room or choose another offload_dir, and start again"
            )

    def _read(
        self, piece: Piece, start: int, stop: int, out: NDArray[np.uint8]
    ) -> Future[None] | None:
        key = self.tile_key(piece, start)
        if key in self.store:
            return self.store.get_into(key, out)
        piece.blank(start, stop, out)
        return None

    def _tiles(self, piece: Piece) -> list[tuple[str, int, int]]:
        return [
            (self.tile_key(piece, start), start, stop)
            for start, stop in piece.pack.tiles(self.tile_numel)
        ]

    def _take(self, num_bytes: int, what: str, *, patient: bool) -> Slab | None:
        """Take a slab; with patience wait for writes behind and give up what was read ahead."""
        while (slab := self.pool.try_take(num_bytes, what=what)) is None:
            if self.give_back():
                continue
            if self._leaving:
                before = len(self._leaving)
                self.end_leases()
                if len(self._leaving) < before:
                    continue
            if not patient:
                return None
            if not self._make_room():
                return self.pool.take(num_bytes, what=what)
        return slab

    def _make_room(self) -> bool:
        if self.give_back() or self._await_leaving():
            return True
        if self._held:
            self.close_held()
            return True
        unused = [
            piece
            for piece in self._pieces.values()
            if piece.slab is not None and not (piece.users or piece.resident)
        ]
        if unused:
            piece = self.needed_last(unused)
            self._end_lease(piece)
            self.settle(piece)
            return True
        return self.give_way() or self.give_up_kept()

    def _await_leaving(self) -> bool:
        """Wait for a write, or for a device that copies; False if there is none."""
        if self._writing:  # even if it has landed by now: then its room is free
            key = next(iter(self._writing))
            self._wait_keys([key], f"writing {key}")
            return True
        if self._leaving:
            self._end_lease(next(iter(self._leaving)))
            self.end_leases()
            return True
        return False

    def _forget_reads(self) -> None:
        """After a read that failed: others on their way may fail as well, and would tell it when it is no longer true."""
        for piece in self._pieces.values():
            if piece.loading and not piece.users:
                self._forget_slab(piece)
        self.forget_tiles()

    def _forget_slab(self, piece: Piece) -> None:
        if piece.slab is None:
            return
        self._leaving.pop(piece, None)
        self._end_lease(piece)
        self._tell("LEAVE", self._key(piece), 0)
        slab, piece.slab = piece.slab, None
        loading, piece.loading = piece.loading, []
        self.give_up(slab, loading, what=f"reading the {piece}")

    def give_up(self, slab: Slab, loading: list[Future[None]], *, what: str) -> None:
        """Give a slab back whose reads may not have ended."""
        for read in loading:
            if not read.cancel():
                # The slab may be reused only when no thread writes into it any more.
                with suppress(Exception):
                    wait(read, what=what)
        if all(read.done() for read in loading):
            self.pool.give(slab)
        elif not self.broken:
            # A late read may still write into the slab: it is never used again.
            self.broken = f"{what} does not end: the disk is stalled"

    def _end_lease(self, piece: Piece) -> None:
        """Wait until no device copies out of a piece or into it."""
        lease, piece.lease = piece.lease, None
        if lease is None or lease.done():
            return
        with self._counted(f"copying the {piece}"):
            lease.wait()

    def _wait_writes(self, piece: Piece, *only: str) -> None:
        """Let a piece's writes land: a read must see the last version."""
        keys = [
            key
            for key in only or [tile[0] for tile in self._tiles(piece)]
            if key in self._writing
        ]
        self._wait_keys(keys, f"writing the {piece}")

    def _wait_keys(self, keys: list[str], what: str) -> None:
        """Wait for writes; those that have not ended stay on the list."""
        try:
            self._wait_all([self._writing[key] for key in keys], what)
        finally:
            for key in keys:
                if self._writing[key].done():
                    del self._writing[key]

    def _wait_all(self, futures: list[Future[None]], what: str) -> None:
        with self._counted(what):
            for future in futures:
                wait(future, what=what)

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """Count the time inside as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            if end - start > 1e-5:
                self.wait_seconds += end - start
                self._on_span(
                    Span(
                        kind="WAIT", name=what, start_s=start, end_s=end, lane="compute"
                    )
                )


def _check_here(piece: Piece, *, changes: bool, blank: bool = False) -> None:
    """Raise StoreError rather than use an old copy, or change one that is not the true one."""
    if (piece.old and not blank) or (piece.on_device and changes):
        msg = (
            f"the {piece} is on the device, and what RAM and disk have of it must not be "
            f"{'changed' if changes else 'used'}: this is a fault of megatrain_nb; no value is lost"
        )
        raise StoreError(msg)
