from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import megatrain_nb as mt
from megatrain_nb.runtime import current
from tests.notebook.fakes import MODULE, fake_module

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What opens a session, replaced."""
    module = fake_module()
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(current, "_current", None)
    for name in ("init", "Session"):
        monkeypatch.setitem(mt.__dict__, name, module.__dict__[name])
    return module


@pytest.fixture
def bare_shell() -> Iterator[Any]:
    """A real IPython without kernel, terminal and history."""
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config, colors="nocolor")
    shell.display_pub = CapturingDisplayPublisher()
    shell.db = {}  # and not what the user's profile remembers
    yield shell
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(bare_shell: Any, fake: types.ModuleType) -> Any:
    """The same with the extension loaded and the runtime replaced."""
    bare_shell.run_line_magic("load_ext", "megatrain_nb")
    return bare_shell
