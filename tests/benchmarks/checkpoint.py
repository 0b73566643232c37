"""What a checkpoint, a resume and the way to a cluster and back cost: seconds, bytes, RAM. The last line is JSON.

``python -m tests.benchmarks.checkpoint DIR --layers 23`` makes a Llama of 1.2 x 10^9 parameters; it takes 60 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import megatrain_nb as mt
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.warmup import load_code
from tests.benchmarks.grow import VOCABULARY, config_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def files_bytes(directory: Path) -> int:
    """Return the bytes of the files beside the tiles."""
    files = directory.rglob("*")
    return sum(x.stat().st_size for x in files if x.is_file() and x.name != "tiles.bin")


class Measured:
    """Seconds, the disk's bytes and the peak of RAM of each thing that is done."""

    def __init__(self, session: mt.Session, base: int) -> None:
        self.report: dict[str, Any] = {}
        self._session, self._base = session, base
        self._meter = rss.PeakMeter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        store, directory = self._session.store, self._session.preflight.path
        before = store.read_bytes, store.written_bytes, files_bytes(directory)
        self._meter.restart()
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.report[name] = {
            "seconds": round(seconds, 3),
            "tiles read": store.read_bytes - before[0],
            "tiles written": store.written_bytes - before[1],
            "files written": files_bytes(directory) - before[2],
            "peak": self._meter.read() - self._base,
            "load": round(os.getloadavg()[0], 1),
        }
        print(name, self.report[name], flush=True)


def main() -> None:
    """Make, train a step, save, train, resume; export, import."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-ram-gb", type=float, default=1.5)
    options = parser.parse_args()
    config = config_of(options.hidden, options.layers)
    load_code()
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (1, 64))
    window = [{"input_ids": ids, "labels": ids}]
    base = rss.resident_bytes()
    with mt.init(options.directory / "store", max_ram_gb=options.max_ram_gb) as session:
        session.max_resident_bytes = 0  # everything is on disk
        measured = Measured(session, base)
        with measured("make"):
            model, optimizer = mt.wrap(mt.from_config(config, seed=0).train())
        with measured("step"):
            mt.train_step(model, optimizer, window)
            optimizer.finish()
        with measured("checkpoint"):
            session.save_checkpoint("one")
        with measured("export_distributed"):
            folder = mt.export_distributed(options.directory / "cluster")
        with measured("import_distributed"):
            mt.import_distributed(folder)
        shutil.rmtree(folder)
        with measured("resume"):
            session.resume("one")
        with measured("step after it"):
            mt.train_step(model, optimizer, window)
            optimizer.finish()
        session.remove_checkpoint("one")
        num_params = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": num_params} | measured.report))


if __name__ == "__main__":
    main()
