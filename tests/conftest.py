"""Settings of all tests: a fixed seed, repeatable Hypothesis examples, no display, no network, one BLAS thread."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from tests.interpreter import hasten
from tests.sampling import leave_to_full

# Set before numpy is imported, and inherited by the processes that tests start. Workers with a thread per core each
# would slow each other down.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(name, "1")
os.environ["MPLBACKEND"] = "Agg"

# `--hypothesis-profile=search` looks for new failures; the default one finds the same ones on every machine.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, print_blob=True, max_examples=40
)
settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("repeatable")

LOOPBACK = ("127.", "::1", "localhost")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run all tests, also those marked gpu, on a GPU")
    parser.addoption("--full", action="store_true", help="also run tests marked full, as --gpu does")
    parser.addoption("--few", action="store_true", help="run the interpreter's part of the op suite on a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Without --gpu, choose Triton's interpreter before the first kernel is imported."""
    if config.getoption("--gpu"):
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    if config.getoption("--few") or not config.getoption("--gpu"):
        os.environ["OP_SUITE"] = "few" if config.getoption("--gpu") or config.getoption("--full") else "fewest"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is not set
    if config.getoption("--gpu") and "PYTEST_XDIST_WORKER" in os.environ:
        # The workers of pytest already use all cores.
        importlib.import_module("genesis.backend.cuda.compilations")._work.workers.most = 0
    gc.disable()  # until all tests are collected: garbage collections would take 10 s of each worker


class Backwards(pytest.Package):
    """A folder whose last file is collected first."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        return reversed(list(super().collect()))


@pytest.hookimpl(tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Package | None:
    """Every second worker collects backwards. On a clean checkout the assertions of all files are rewritten, which
    takes a worker longer than collecting: two workers that meet in the middle rewrite half of them each.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    backwards = int(worker.removeprefix("gw")) % 2 and (path / "__init__.py").is_file()
    return Backwards.from_parent(parent, path=path) if backwards else None


LONG = ("startup", "wheel", "tests/packaging/test_extending.py", "tests/train/test_preference_learning.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, give a worker whole files, unless groups are other units: it makes their fixtures once.

    Files with many tests come first, but after a few that take long: at the end one worker would wait for them.

    What a worker has finished is forgotten: xdist would look through all of it after each test.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if scope == nodeid else scope

        def _assign_work_unit(self, node: Any) -> None:
            for scope in [scope for scope in LONG if scope in self.workqueue]:
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            scope = self._split_scope(self.registered_collections[node][item_index])
            super().mark_test_complete(node, item_index, duration)
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect or skip tests that this device cannot run, and tests that only `make unit-full` runs."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # all must have the same order, whichever way they collected
        items.sort(key=lambda item: item.path.parts)
    on_gpu = config.getoption("--gpu")
    leave_to_full(items)
    left = [] if on_gpu or config.getoption("--full") else [i for i in items if i.get_closest_marker("full")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make gpu"))
        if item.get_closest_marker("host") and on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs no GPU: make unit"))


modules: list[Any] = [None]  # the module of the previous test


def pytest_collection_finish() -> None:
    """Exclude the collected tests, which live to the end, from garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let libraries that report leaks at exit find none."""
    gc.enable()
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter(request: pytest.FixtureRequest) -> None:
    """Make Triton's interpreter faster without --gpu."""
    if not request.config.getoption("--gpu"):
        hasten()


@pytest.fixture(autouse=True, scope="session")
def yaml_read_once() -> Iterator[None]:
    """Keep the events of short YAML texts: runs read their configuration several times, and tests run it again."""
    import yaml

    plain = yaml.parse
    events = functools.lru_cache(maxsize=256)(lambda text, loader: list(plain(text, Loader=loader)))

    def parse(text: Any, Loader: Any = yaml.Loader) -> Any:
        if isinstance(text, str) and len(text) < 20_000:
            with suppress(yaml.YAMLError, ValueError, OverflowError):
                return events(text, Loader)
        return plain(text, Loader=Loader)  # an error comes after the events before it

    with mock.patch.object(yaml, "parse", parse):
        yield


@pytest.fixture(autouse=True, scope="session")
def collected_tests_stay_frozen() -> Iterator[None]:
    """A recording of steps ends with `gc.unfreeze`. All objects of the suite would then be looked through, in 0.2 s."""
    import genesis.measure.run

    def nothing() -> None:
        pass

    kept = SimpleNamespace(collect=gc.collect, freeze=nothing, unfreeze=nothing)
    with mock.patch.object(genesis.measure.run, "gc", kept):
        yield


@pytest.fixture(autouse=True, scope="session")
def commands_are_built_once() -> Iterator[None]:
    """All commands and their options, which takes 60 ms, as long as many a command in a test."""
    import typer

    with mock.patch.object(typer.main, "get_command", functools.cache(typer.main.get_command)):
        yield


@pytest.fixture(autouse=True)
def wide_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the interpreter, let programs of matmuls with few rows have 64 rows of W: time grows with the programs."""
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
    """The module of these kernels, imported before the first launch is prepared; None without Triton."""
    try:
        return importlib.import_module("genesis.kernels.decode.few_rows")
    except ImportError:
        return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the default generators: no test's inputs depend on the tests before it.

    This is a hook, because fixtures of a module are set up before any fixture of a test. Objects of earlier modules are
    excluded from garbage collections, which run before each graph capture and took longer with every module.
    """
    import numpy as np

    import genesis.random
    from genesis.backend import cpu

    if modules[-1] != item.path:
        modules[:] = [item.path]
        if "PYTEST_XDIST_WORKER" in os.environ:  # a test may have set more, which wait for each other by computing
            cpu.set_blas_threads(1)
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
