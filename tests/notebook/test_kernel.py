"""In a real kernel: the cell awaits its body, and the kernel answers meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_client.manager import start_new_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
SETUP = """
%load_ext megatrain_nb
from tests.notebook.fakes import install
install()
import megatrain_nb as mt
s = %megatrain init --offload-dir /nvme/run
"""


class Kernel:
    """A kernel, and what its iopub channel said."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(cwd=str(ROOT))

    def start(self, code: str) -> str:
        msg_id: str = self.client.execute(code)
        return msg_id

    def finish(self, msg_id: str, timeout: float = 20) -> tuple[Any, list[Any]]:
        """Return the reply's content and the cell's messages up to idle."""
        reply = self.reply(msg_id, timeout)
        messages = self.until(msg_id, is_idle, timeout)
        return reply["content"], messages

    def run(self, code: str) -> tuple[Any, list[Any]]:
        return self.finish(self.start(code))

    def reply(self, msg_id: str, timeout: float = 20) -> Any:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            reply = self.client.get_shell_msg(timeout=timeout)
            if reply["parent_header"]["msg_id"] == msg_id:
                return reply
        raise TimeoutError

    def until(
        self, msg_id: str, found: Callable[[Any], bool], timeout: float = 20
    ) -> list[Any]:
        """Return the cell's messages up to the first that is meant."""
        messages = []
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                messages.append(message)
                if found(message):
                    return messages
        raise TimeoutError([m["msg_type"] for m in messages])


def is_idle(message: Any) -> bool:
    return bool(message["content"].get("execution_state") == "idle")


def is_view(message: Any) -> bool:
    return message["msg_type"] in ("display_data", "update_display_data")


def stream(messages: list[Any], name: str = "stdout") -> str:
    found = [m["content"] for m in messages if m["msg_type"] == "stream"]
    return "".join(content["text"] for content in found if content["name"] == name)


def of_type(messages: list[Any], kind: str) -> list[Any]:
    return [m["content"] for m in messages if m["msg_type"] == kind]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    reply, _ = kernel.run(SETUP)
    assert reply["status"] == "ok"
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
    kernel.manager.cleanup_resources()


def test_prints_value_and_one_view_land_in_the_cell(kernel: Kernel) -> None:
    body = "print('before')\nx = s.train(80)\nprint('after')\nx"
    reply, messages = kernel.run(f"%%megatrain train\n{body}")
    assert reply["status"] == "ok"
    assert stream(messages) == "before\nafter\n"
    assert of_type(messages, "execute_result")[0]["data"]["text/plain"].startswith(
        "'trained"
    )
    first = of_type(messages, "display_data")
    updates = of_type(messages, "update_display_data")
    assert len(first) == 1
    assert 2 <= len(updates) <= 6  # 0.8 s at four a second, and the end
    ids = {content["transient"]["display_id"] for content in first + updates}
    assert len(ids) == 1
    assert updates[-1]["data"]["text/plain"].startswith("Step 80 of 80 (done)")
    assert "<img" in updates[-1]["data"]["text/html"]


def test_returns_what_line_magics_return(kernel: Kernel) -> None:
    _, messages = kernel.run("s")
    data = of_type(messages, "execute_result")[0]["data"]
    assert data["text/html"] == "<b>session</b>"
    _, messages = kernel.run("x = %megatrain status\ntype(x).__name__")
    assert (
        of_type(messages, "execute_result")[0]["data"]["text/plain"] == "'FakeStatus'"
    )
    _, messages = kernel.run("%megatrain status")
    assert len(of_type(messages, "execute_result")) == 1
    assert of_type(messages, "display_data") == []


def test_errors_of_the_body(kernel: Kernel) -> None:
    reply, messages = kernel.run("%%megatrain\ndef f():\n    return 1 / 0\n\nf()")
    assert reply["status"] == "error"
    assert reply["ename"] == "ZeroDivisionError"
    (error,) = of_type(messages, "error")
    text = "\n".join(error["traceback"])
    assert "megatrain_nb" not in text
    assert "interactiveshell" not in text
    assert text.count("Traceback") == 1
    assert text.count("line 5") == 1
    assert text.count("line 3") == 1


def test_usage_errors_are_one_line(kernel: Kernel) -> None:
    reply, messages = kernel.run("%megatrain statsu")
    assert reply["status"] == "error"
    assert of_type(messages, "error") == []
    assert stream(messages, "stderr").startswith("UsageError: unknown command 'statsu'")


def test_top_level_await_works(kernel: Kernel) -> None:
    code = "%%megatrain\nimport asyncio\nawait asyncio.sleep(0.01)\n'awaited'"
    reply, messages = kernel.run(code)
    assert reply["status"] == "ok"
    assert of_type(messages, "execute_result")[0]["data"]["text/plain"] == "'awaited'"


def test_the_kernel_answers_while_the_cell_runs(kernel: Kernel) -> None:
    kernel.run(
        "got = []\n"
        "def target(comm, message):\n"
        "    comm.on_msg(lambda m: got.append((m['content']['data'], s.step)))\n"
        "get_ipython().kernel.comm_manager.register_target('test', target)"
    )
    opened = kernel.client.session.msg(
        "comm_open", {"comm_id": "c1", "target_name": "test", "data": {}}
    )
    kernel.client.shell_channel.send(opened)
    msg_id = kernel.start("%%megatrain\nfirst = s.step\ns.train(150)\nlast = s.step")
    kernel.until(msg_id, lambda m: m["msg_type"] == "update_display_data")
    message = kernel.client.session.msg(
        "comm_msg", {"comm_id": "c1", "data": {"click": 1}}
    )
    kernel.client.shell_channel.send(message)
    kernel.client.session.send(
        kernel.client.control_channel.socket, "kernel_info_request", {}
    )
    assert kernel.client.get_control_msg(timeout=1)["msg_type"] == "kernel_info_reply"
    reply, _ = kernel.finish(msg_id)
    assert reply["status"] == "ok"
    _, messages = kernel.run("len(got), first < got[0][1] < last")
    assert of_type(messages, "execute_result")[0]["data"]["text/plain"] == "(1, True)"


def test_interrupt_stops_within_a_step(kernel: Kernel) -> None:
    msg_id = kernel.start("%%megatrain\nprint('on')\nwhile True:\n    s.train(1)")
    kernel.until(msg_id, is_view)
    start_s = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply, messages = kernel.finish(msg_id)
    assert time.monotonic() - start_s < 1.5
    assert reply["status"] == "error"
    assert reply["ename"] == "Interrupted"
    (error,) = of_type(messages, "error")
    assert len(error["traceback"]) == 1
    assert error["traceback"][0].startswith("Interrupted: after step ")
    shown = [m["content"]["data"] for m in messages if is_view(m)]
    assert "(interrupted)" in shown[-1]["text/plain"]
    step = error["traceback"][0].split()[-1]
    _, messages = kernel.run("s.step, s.stop_event.is_set(), s.shown, s.callbacks")
    result = of_type(messages, "execute_result")[0]["data"]["text/plain"]
    assert result == f"({step}, False, False, [])"


def test_a_second_interrupt_breaks_off(kernel: Kernel) -> None:
    body = "import time\nprint('on', flush=True)\nwhile True:\n    time.sleep(0.01)"
    msg_id = kernel.start(f"%%megatrain\n{body}")
    kernel.until(msg_id, lambda message: message["msg_type"] == "stream")
    kernel.manager.interrupt_kernel()
    time.sleep(0.3)
    kernel.manager.interrupt_kernel()
    reply, _ = kernel.finish(msg_id)
    assert reply["ename"] == "Interrupted"
    reply, _ = kernel.run("1 + 1")
    assert reply["status"] == "ok"


SHOWN = """
from megatrain_nb.notebook.trainer import shown

def train_plainly(*args, **options):
    with shown(s, "widget", quiet=False):
        s.train(*args, **options)
"""


def make_subshell(kernel: Kernel) -> str:
    """Ask for a subshell, as JupyterLab does for a notebook's widgets."""
    session = kernel.client.session
    request = session.msg("create_subshell_request", {})
    kernel.client.control_channel.send(request)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        reply = kernel.client.get_control_msg(timeout=10)
        if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
            return str(reply["content"]["subshell_id"])
    raise TimeoutError


def find_message(kernel: Kernel, found: Callable[[Any], bool]) -> Any:
    """Return the first message from now on, of any cell or of none, that is meant."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            message = kernel.client.get_iopub_msg(timeout=1)
        except Empty:
            continue
        if found(message):
            return message
    raise TimeoutError


def find_widget(kernel: Kernel, **state: object) -> str:
    """Return the comm of a widget that is drawn now in this state, for no cell's request."""
    message = find_message(
        kernel,
        lambda m: (
            m["msg_type"] == "comm_open"
            and state.items() <= m["content"]["data"]["state"].items()
        ),
    )
    assert message["parent_header"] == {}
    return str(message["content"]["comm_id"])


def send_to(kernel: Kernel, comm: str, subshell: str, **data: object) -> None:
    """Send what a frontend sends of a widget."""
    message = kernel.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
    message["header"]["subshell_id"] = subshell
    kernel.client.shell_channel.send(message)


def test_buttons_of_a_plain_cell_answer_through_a_subshell(kernel: Kernel) -> None:
    """The cell keeps the kernel's main thread busy from its first line to its last."""
    pytest.importorskip("ipywidgets")
    kernel.run(SHOWN)
    subshell = make_subshell(kernel)
    kernel.run("clicked = []\nstop = s.controls.stop")
    kernel.run("s.controls.stop = lambda: (clicked.append(s.step), stop())")
    msg_id = kernel.start("train_plainly(3000, seconds=0.02)")
    button = find_widget(kernel, description="Stop")

    def enables(message: Any) -> bool:
        """Answer as a frontend does, each time it is asked: a busy kernel asks again before it has heard."""
        content = message["content"]
        if message["msg_type"] == "comm_open":
            if content["data"]["state"].get("_view_count") == 0:
                drawn: dict[str, Any] = {
                    "state": {"_view_count": 1},
                    "buffer_paths": [],
                }
                asked = content["comm_id"]
                send_to(kernel, asked, subshell, method="update", **drawn)
            return False
        return bool(
            message["msg_type"] == "comm_msg"
            and content["comm_id"] == button
            and content["data"].get("state") == {"disabled": False}
        )

    ready = find_message(kernel, enables)
    assert ready["parent_header"] == {}
    send_to(kernel, button, subshell, method="custom", content={"event": "click"})
    reply, messages = kernel.finish(msg_id)
    assert reply["status"] == "ok"
    shown = [m["content"]["data"] for m in messages if is_view(m)]
    assert any("(stopped, as asked" in data["text/plain"] for data in shown)
    result = "len(clicked), s.step - clicked[0] <= 1, s.controls.stopping"
    _, messages = kernel.run(f"s.controls.stop = stop\n{result}")
    found = of_type(messages, "execute_result")[0]["data"]["text/plain"]
    assert found == "(1, True, False)"


def test_twenty_cells_with_buttons_leave_nothing(kernel: Kernel) -> None:
    """Neither comms nor threads nor memory, of plain cells and of ``%%megatrain`` cells."""
    pytest.importorskip("ipywidgets")
    kernel.run(SHOWN)
    kernel.run(
        "import gc, os, threading, tracemalloc\nfrom comm import get_comm_manager\n"
        "os.environ['MEGATRAIN_DISPLAY'] = 'widget'\n"
        "def left():\n"
        "    gc.collect()\n"
        "    return len(get_comm_manager().comms), threading.active_count(), tracemalloc.get_traced_memory()[0]"
    )

    def train() -> None:
        for code in ("train_plainly(3)", "%%megatrain train\ns.train(3);"):
            assert kernel.run(code)[0]["status"] == "ok"

    train()
    kernel.run("tracemalloc.start()")
    train()
    kernel.run("before = left()")
    for _ in range(20):
        train()
    kernel.run(
        "after = left(); tracemalloc.stop(); del os.environ['MEGATRAIN_DISPLAY']"
    )
    _, messages = kernel.run(
        "after[0] - before[0], after[1] - before[1], after[2] - before[2]"
    )
    comms, threads, grown = eval(
        of_type(messages, "execute_result")[0]["data"]["text/plain"]
    )
    assert (comms, threads) == (0, 0)
    assert grown < 40 * 10_000  # IPython keeps each cell's code: some kB


@pytest.mark.parametrize("outer", ["capture", "time"])
def test_inside_another_cell_magic(kernel: Kernel, outer: str) -> None:
    reply, messages = kernel.run(f"%%{outer}\n%%megatrain\nprint('inner')\ny = 42")
    assert reply["status"] == "ok"
    assert ("inner" in stream(messages)) == (outer == "time")
    reply, _ = kernel.run("assert y == 42\ndel y")
    assert reply["status"] == "ok"


def test_unload_and_load_again(kernel: Kernel) -> None:
    kernel.run("%unload_ext megatrain_nb")
    _, messages = kernel.run("%%megatrain\n1")
    assert "Cell magic `%%megatrain` not found" in stream(messages, "stderr")
    kernel.run("%load_ext megatrain_nb")
    reply, _ = kernel.run("%%megatrain\n1")
    assert reply["status"] == "ok"
