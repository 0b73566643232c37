"""A notebook's day: cells run again, models dropped with updates due, workers forked, copies tried."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import megatrain_nb as mt
from megatrain_nb.runtime import heap, rss
from tests.runtime.common import (
    VOCABULARY,
    TinyLM,
    batch,
    differing,
    loss_of,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)
from tests.runtime.models import make_model, make_window
from tests.runtime.test_faults import left_over, states

if TYPE_CHECKING:
    from collections.abc import Callable


def due(model: Any) -> list[int]:
    return list(model._megatrain.updates._due)


def inventory(directory: Path) -> tuple[int, int, list[str]]:
    """Threads, file descriptors, files."""
    files = sorted(path.name for path in directory.iterdir())
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), files


@pytest.mark.parametrize("times", [6, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keeps", [False, True], ids=["overwrites", "keeps"])
def test_a_cell_that_runs_again(tmp_path: Path, times: int, keeps: bool) -> None:
    """As a notebook does: the names of the last run live on until they are bound again."""
    kept: list[Any] = []
    found = []
    model = optimizer = session = None
    for _ in range(times):
        session = mt.init(tmp_path, max_ram_gb=0.2)
        session.max_resident_bytes = 0
        model, optimizer = wrapped(seeded(lambda: TinyLM(num_layers=6)))
        for step in range(3):
            window_step(model, optimizer, step)
        plain_step(model, optimizer, 3)
        if keeps and len(kept) < 2:
            kept.append((model, optimizer))
        gc.collect()
        heap.trim()
        found.append(
            (*inventory(tmp_path), rss.resident_bytes(), session.store.used_bytes)
        )
    assert session is not None
    session.close()
    assert list(tmp_path.iterdir()) == []
    second, last = found[1], found[-1]
    assert last[:3] == second[:3]
    assert last[4] == second[4]
    assert last[3] <= second[3] + 4_000_000


def test_a_model_dropped_while_updates_are_due(tmp_path: Path) -> None:
    expected = states(3)
    with opened(tmp_path) as session:
        for again in range(4):
            model, optimizer = wrapped(seeded(TinyLM))
            for step in range(2):
                window_step(model, optimizer, step)
            assert due(model)
            if again == 1:
                del model  # the optimizer is still there
                gc.collect()
                with pytest.raises(mt.SessionError, match="deleted"):
                    optimizer.step()
            elif again == 2:
                del optimizer
        gc.collect()  # the one before went when its name was bound again
        window_step(model, optimizer, 2)
        assert differing(expected[3], snapshot(model, optimizer)) == []
        assert len(session.models) == 1
        assert left_over(model) == []


def test_two_models_one_after_the_other(tmp_path: Path) -> None:
    expected = states(4)
    with opened(tmp_path) as session:
        first, of_first = wrapped(seeded(TinyLM))
        for step in range(3):
            window_step(first, of_first, step)
        second, of_second = wrapped(seeded(TinyLM))  # with updates of the first due
        window_step(second, of_second, 0)
        plain_step(first, of_first, 3)
        assert differing(expected[4], snapshot(first, of_first)) == []
        assert differing(expected[1], snapshot(second, of_second)) == []
        first = mt.unwrap(first)
        assert (
            differing(
                {k: v for k, v in expected[4].items() if ":" not in k}, snapshot(first)
            )
            == []
        )
        window_step(second, of_second, 1)
        assert differing(expected[2], snapshot(second, of_second)) == []
        assert len(session.models) == 1


def test_unwrap_pays_first(tmp_path: Path) -> None:
    expected = {k: v for k, v in states(2)[2].items() if ":" not in k}
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(2):
            window_step(model, optimizer, step)
        assert due(model)
        assert differing(expected, snapshot(mt.unwrap(model))) == []


def test_saving_pays_first(tmp_path: Path) -> None:
    with opened(tmp_path / "store"):
        model, optimizer = wrapped(make_model("llama"))
        mt.train_step(model, optimizer, make_window("llama", 0, 2))
        assert due(model)
        mt.save_pretrained(model, tmp_path / "saved")
        assert due(model) == []
        saved = type(model).from_pretrained(tmp_path / "saved")
        assert differing(snapshot(model), snapshot(saved)) == []


def test_a_state_dict_pays_first(tmp_path: Path) -> None:
    expected = states(2)[2]
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(2):
            window_step(model, optimizer, step)
        found = {key: value.clone() for key, value in model.state_dict().items()}
        assert (
            differing({k: v for k, v in expected.items() if ":" not in k}, found) == []
        )
        state = optimizer.state_dict()["state"]
        names = [name for name, _ in model.named_parameters()]
        for index, name in enumerate(names):
            assert torch.equal(state[index]["exp_avg"], expected[f"{name}:exp_avg"])


class Tokens(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(
            0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(index)
        )


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_workers_forked_while_the_disk_works(tmp_path: Path) -> None:
    def train(model: Any, optimizer: Any, workers: int) -> None:
        for _ in range(2):
            for ids in DataLoader(Tokens(), batch_size=None, num_workers=workers):
                loss_of(model, ids).backward()
                optimizer.step()
                optimizer.zero_grad()

    plain = seeded(TinyLM)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    train(plain, theirs, 0)
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        train(model, optimizer, 2)
        assert differing(snapshot(plain, theirs), snapshot(model, optimizer)) == []
    assert list(tmp_path.iterdir()) == []


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()),
}


@pytest.mark.parametrize(
    "what", ["model", "block", "optimizer", "parameter", "gradient", "state_dict"]
)
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_refused_clearly_or_true(
    tmp_path: Path, what: str, how: str
) -> None:
    expected = states(2)
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM))
        for step in range(2):
            window_step(model, optimizer, step)
        loss_of(model, batch(0)).backward()
        thing = {
            "model": model,
            "block": model.layers[0],
            "optimizer": optimizer,
            "parameter": model.head.weight,
            "gradient": model.head.weight.grad,
            "state_dict": model.state_dict(),
        }[what]
        with pytest.raises(mt.MegatrainError, match=r"mt\.(unwrap|save_pretrained)"):
            COPIES[how](thing)
        optimizer.zero_grad()
        assert differing(expected[2], snapshot(model, optimizer)) == []
        assert left_over(model) == []
