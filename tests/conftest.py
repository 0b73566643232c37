"""What every test shares: no network, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os

# Read when huggingface_hub, transformers and tokenizers are imported: set first.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels that tests start remember nothing in the user's own profile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        default=300,
        help="random cases of a fuzz test (300 in the suite)",
    )
    parser.addoption(
        "--strength",
        type=int,
        default=2,
        help="so many factors of the resume matrix meet in every combination (2 in the suite; 8, all there are, takes an hour)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # noqa: PLC0415 - a run without GPU tests need not wait for torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
