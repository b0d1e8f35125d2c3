"""What every test runs under: a fixed seed, repeatable Hypothesis examples, no display, no network, one BLAS thread."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from tests.interpreter import hasten

# Before numpy is imported, and inherited by the processes that tests start: workers that each spin up a thread per core
# slow each other down.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(name, "1")
os.environ["MPLBACKEND"] = "Agg"

# `--hypothesis-profile=search` looks for new failures; the default one finds the same ones on every machine.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("repeatable")

LOOPBACK = ("127.", "::1", "localhost")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run what is marked gpu, on a real one")
    parser.addoption("--full", action="store_true", help="also run what is marked full, as with --gpu")
    parser.addoption("--few", action="store_true", help="of the op suite on a GPU, what the interpreter runs of it")


def pytest_configure(config: pytest.Config) -> None:
    """Without --gpu, kernels run in Triton's interpreter; it is chosen before the first of them is imported."""
    if config.getoption("--gpu"):
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    if config.getoption("--few") or not config.getoption("--gpu"):
        os.environ["OP_SUITE"] = "few"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is left open
    if config.getoption("--gpu") and "PYTEST_XDIST_WORKER" in os.environ:
        # There are processes enough.
        importlib.import_module("genesis.backend.cuda.compilations")._work.workers.most = 0
    gc.disable()  # until all is collected, of which hardly anything is garbage: 10 s of each worker


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the device at hand cannot run, and what `make unit-full` runs."""
    on_gpu = config.getoption("--gpu")
    left = [] if on_gpu or config.getoption("--full") else [i for i in items if i.get_closest_marker("full")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make gpu"))
        if item.get_closest_marker("host") and on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs no GPU: make unit"))


modules: list[Any] = [None]  # that of the test before


def pytest_collection_finish() -> None:
    """What was collected stays to the end: garbage collections need not look through all of it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries that look for what is left at the end find nothing."""
    gc.enable()
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter(request: pytest.FixtureRequest) -> None:
    """Without --gpu, kernels are run by Triton's interpreter with nothing done twice."""
    if not request.config.getoption("--gpu"):
        hasten()


@pytest.fixture(autouse=True)
def wide_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the interpreter, whose time is that of the programs, matmuls of few rows have few: 64 rows of W in each."""
    few_rows = None if request.config.getoption("--gpu") else kernels_of_few_rows()
    if few_rows is None:
        yield
        return

    def wide(choose: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: choose(*given)._replace(bn=64)

    with ExitStack() as patches:
        for name in ("choose_fma_tile", "choose_one_row_tile"):
            patches.enter_context(mock.patch.object(few_rows, name, wide(getattr(few_rows, name))))
        yield


@functools.cache
def kernels_of_few_rows() -> Any:
    """Imported before one is launched, since launches of the same shapes are prepared once; None without Triton."""
    try:
        return importlib.import_module("genesis.kernels.decode.few_rows")
    except ImportError:
        return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what tests draw from without a generator of their own: no test's inputs depend on the tests before it.

    A hook, because fixtures of a module are set up before any fixture of one test. What earlier modules imported and
    made stays to the end, too: a capture of a graph collects garbage, which took longer with every module.
    """
    import numpy as np

    import genesis.random

    if modules[-1] != item.path:
        modules[:] = [item.path]
        gc.collect()
        gc.freeze()
    genesis.random.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class NetworkUsed(BaseException):
    """A test reached for the network. Not an `Exception`, so that code under test cannot swallow it."""


def _refuse_remote(host: object) -> None:
    if isinstance(host, str) and host and not host.startswith(LOOPBACK):
        raise NetworkUsed(f"a test tried to reach {host!r}; nothing is downloaded and nothing is sent")


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuse name look-ups and connections that leave this machine."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse_remote(address[0])
        connect(self, address)

    def guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_remote(host.decode() if isinstance(host, bytes) else host)
        return lookup(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_lookup)
        yield
