"""The one numba decorator, its cache, and a word to the user when it compiles.

[Note: in a process of its own] LLVM keeps some 300 MB of what it took to compile the kernels of one codec, and holds the
GIL for the ten seconds that one takes: the session's budget would be broken and its view stand still. So a child
compiles, and this process loads what the child has kept. Whatever goes wrong with that, it is compiled here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from weakref import WeakSet

Function = TypeVar("Function", bound=Callable[..., object])

logger = logging.getLogger("megatrain_nb")

on_compile: list[Callable[[str], None]] = []
"""Called with one line of text when a kernel is compiled, not when it is loaded."""

_OPTIONS = {
    "nogil": True,
    "fastmath": False,
    "error_model": "numpy",
    "boundscheck": False,
}

INLINED: Any = {"forceinline": True}
"""``jit_options`` of an `overload` that is a part of kernels, as `inlined` is."""

SPLICED: Literal["always"] = "always"
"""``inline`` of an `overload` that is a part of kernels, as `spliced` is."""

_lock = threading.Lock()
_alone = threading.Event()  # no child compiles for this process
_told: WeakSet[Callable[..., object]] = WeakSet()

_CHILD = "from megatrain_nb import jit; jit.compile_here()"


def kernel(function: Function) -> Function:
    """Compile a function over arrays, once per machine, without the GIL.

    Rounding is that of the source: fastmath stays off, so nothing is contracted,
    reordered or flushed to zero. With ``NUMBA_DISABLE_JIT=1`` the function comes
    back unchanged.

    Notes
    -----
    Machine code is kept next to the source file or, where that is not writable, in
    the user's cache directory; ``MEGATRAIN_CACHE_DIR`` names another place. A cache
    that cannot be read or written costs a compilation, never an error. An edit of
    any ``*kernels.py`` of this package is an edit of every kernel, since kernels may
    call each other across files.
    """
    compiled = _numba().njit(**_OPTIONS)(function)
    if compiled is not function:
        _listen()
        _keep(compiled)
    return cast("Function", compiled)


def inlined(function: Function) -> Function:
    """Compile a part of kernels, written out wherever one calls it.

    For what runs for some hundred elements: a call costs as much as its work, since
    each array is seven arguments.
    """
    compiled = _numba().njit(**INLINED, **_OPTIONS)(function)
    return cast("Function", compiled)


def spliced(function: Function) -> Function:
    """Compile a part of kernels that has loops, as if its lines stood where one calls it.

    LLVM makes vectors of the loops of `inlined` parts before it knows the caller's arrays, and then asks
    in each whether they overlap. Numba takes ``s.name[i] = x`` in such a part for a store that
    nobody reads, and drops it: call `megatrain_nb.codec.kernels.put`.
    """
    compiled = _numba().njit(inline=SPLICED, **_OPTIONS)(function)
    return cast("Function", compiled)


def compiling(what: str) -> None:
    """Say that a compilation starts: it takes a second, once for each machine."""
    text = f"Compiling the {what} for this machine (once; then it is kept)"
    logger.warning(text)  # shown where nobody has configured logging
    for tell in on_compile:
        try:
            tell(text)
        except Exception:
            logger.exception("on_compile hook %r failed", tell)


def compiling_once(function: Callable[..., object]) -> None:
    """Say that a kernel is compiled, unless that was said: for other types it says nothing new."""
    if function not in _told:
        _told.add(function)
        compiling(f"{function.__name__} kernel")


def _keep(dispatcher: Any) -> None:
    """Give a dispatcher a cache on disk that never raises."""
    try:
        with _lock, _cache_directory():
            dispatcher._cache = _tolerant_cache()(dispatcher.py_func)
    except (RuntimeError, OSError) as error:
        logger.warning("no writable directory for compiled kernels: %r", error)


@cache
def _tolerant_cache() -> type[Any]:
    base: Any = _numba("core.caching").FunctionCache

    class TolerantCache(base):  # type: ignore[misc]
        def load_overload(self, sig: object, target_context: object) -> object:
            load = partial(self._load, sig, target_context)
            return load() or _compiled_elsewhere(self._py_func, sig, load)

        def _load(self, sig: object, target_context: object) -> object:
            try:
                return super().load_overload(sig, target_context)
            except Exception as error:  # a broken pickle raises anything
                logger.warning("kernel cache not readable, compiling: %r", error)
                return None

        def save_overload(self, sig: object, data: object) -> None:
            try:
                super().save_overload(sig, data)
            except Exception:  # as above; then start from an empty index
                self._save_alone(sig, data)

        def _save_alone(self, sig: object, data: object) -> None:
            try:
                self.flush()
                super().save_overload(sig, data)
            except Exception as error:
                logger.warning("kernel cache not writable, not kept: %r", error)

        def _index_key(self, sig: object, codegen: object) -> tuple[object, ...]:
            return (*super()._index_key(sig, codegen), _source_digest())

    return TolerantCache


def _is_importable(function: Callable[..., object]) -> bool:
    """Whether another process finds a kernel by its module and name."""
    found = getattr(sys.modules.get(function.__module__), function.__name__, None)
    return getattr(found, "py_func", None) is function


def _compiled_elsewhere(
    function: Callable[..., object], sig: object, load: Callable[[], object]
) -> object:
    """Let a child compile a kernel and keep it, and load that; None where it does not work."""
    alone = _alone.is_set() or "MEGATRAIN_COMPILES" in os.environ
    if alone or not sys.executable or not _is_importable(function):
        return None
    compiling_once(function)
    dumps = _numba("core.serialize").dumps
    environment = {**os.environ, "MEGATRAIN_COMPILES": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # "" is where it is as well
    try:
        subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=dumps((function.__module__, function.__name__, sig)),
            env=environment,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        logger.debug("no process of its own compiles: %r", error)
    found = load()
    if found is None:
        _alone.set()
    return found


def compile_here() -> None:
    """Compile the kernel that stdin names, for the process that wrote it there, and keep it."""
    module, name, sig = pickle.load(sys.stdin.buffer)  # from our own parent
    getattr(import_module(module), name).compile(sig)


@contextmanager
def _cache_directory() -> Iterator[None]:
    """Point numba to MEGATRAIN_CACHE_DIR while it decides where a kernel is kept."""
    chosen = os.environ.get("MEGATRAIN_CACHE_DIR")
    config = _numba().config
    before = config.CACHE_DIR
    if chosen:
        config.CACHE_DIR = chosen
    try:
        yield
    finally:
        config.CACHE_DIR = before


@cache
def _source_digest() -> str:
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([Path(__file__), *package.rglob("*kernels.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _listen() -> None:
    """Call `compiling_once` whenever numba starts on a kernel of this package."""
    events = _numba("core.event")
    base: Any = events.Listener

    class Compilations(base):  # type: ignore[misc]
        depth = 0  # kernels inside kernels are one compilation to a person

        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            if self.depth == 0 and function.__module__.startswith("megatrain_nb."):
                compiling_once(function)
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1

    events.register("numba:compile", Compilations())


def _numba(module: str = "") -> Any:
    # Late, since it takes a second; untyped, since numba's types change by version.
    return import_module(f"numba.{module}".rstrip("."))
