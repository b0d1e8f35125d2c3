"""torch.distributed's functions: on one process, and on ranks of our launcher or with an address."""

from __future__ import annotations

import functools
import json
import operator
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import distributed as dist
from genesis.backend import Device
from genesis.distributed import World, collectives, nccl
from genesis.errors import DTypeError, ShapeError, UsageError
from tests.distributed.pairs import pairs

PROGRAM = Path(__file__).with_name("torch_program.py")
LAUNCH = "import sys; from genesis.distributed import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"


def expected(rank: int, size: int) -> dict[str, Any]:
    """What the program finds, in numpy."""
    last, ranks = size - 1, range(size)
    pairs = np.array([[1 + 10 * r, 2 + 10 * r] for r in ranks])
    rows = np.array([[[i + 10 * r, i + 0.5 + 10 * r] for i in ranks] for r in ranks])  # [rank, part, 2]
    mean = 10 * (size - 1) / 2
    bits = {
        name: [functools.reduce(getattr(operator, word), pairs[:, i].tolist()) for i in (0, 1)]
        for name, word in (("BAND", "and_"), ("BOR", "or_"), ("BXOR", "xor"))
    }
    return {
        "rank": rank,
        "size": size,
        "backend": "gloo",
        "is": True,
        "SUM": pairs.sum(0).tolist(),
        "PRODUCT": pairs.prod(0).tolist(),
        "MIN": pairs.min(0).tolist(),
        "MAX": pairs.max(0).tolist(),
        **bits,
        "AVG": [[1 + mean, 3 + mean], [2 + mean, 4 + mean]],
        "broadcast": [1.5 + 10 * last],
        "any": [True, False],
        "reduce": (pairs.sum(0) if rank == last else pairs[rank]).tolist(),
        "all_gather": [[[1 + 10 * r], [2 + 10 * r]] for r in ranks],
        "all_gather_into_tensor": [value for r in ranks for value in (r == 0, False)],
        "gather": [5 + 10 * r for r in ranks] if rank == last else None,
        "scatter": [rank + 10 * last, -rank + 10 * last],
        "reduce_scatter_SUM": [rows.sum(0)[rank].tolist()],
        "reduce_scatter_MAX": [rows.max(0)[rank].tolist()],
        "reduce_scatter": [rank + mean],
        "objects": [{"rank": r, "values": [1.5, "a", None]} for r in ranks],
        "broadcast_objects": [f"of {last}", last],
        "is after": False,
    }


def found(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(("size", "device"), [(1, "cpu"), (3, "cpu")])
def test_functions_on_ranks_of_the_launcher(size: int, device: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), device]
    if size > 1:
        command = [sys.executable, "-c", LAUNCH, str(size), *command]
    environ = os.environ | {"RESULTS": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, size) == [expected(rank, size) for rank in range(size)]


@pytest.mark.full
def test_ranks_with_an_address(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    environ = os.environ | {"RESULTS": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), "cuda", address, "2"]
    ranks = [subprocess.Popen(command, env=environ | {"MY_RANK": str(rank)}) for rank in (0, 1)]
    assert [each.wait(60) for each in ranks] == [0, 0]
    assert found(tmp_path, 2) == [expected(rank, 2) for rank in (0, 1)]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: dist.init_process_group(), UsageError, "a process group already"),
        (lambda x: dist.all_reduce(x, group=object()), UsageError, "there is one group"),
        (lambda x: dist.all_reduce(x, "sum"), UsageError, "'sum' is not a reduction"),
        (lambda x: dist.all_reduce(x.long(), dist.ReduceOp.AVG), DTypeError, "average of int64"),
        (lambda x: dist.broadcast(x, 1), UsageError, "rank 1 is not one of 1"),
        (lambda x: dist.broadcast(x), UsageError, "rank None is not one of 1"),
        (lambda x: dist.all_gather([x, x], x), ShapeError, r"shapes \[\(2,\), \(2,\)\]"),
        (lambda x: dist.all_gather([x.view(1, 2)], x), ShapeError, r"shapes \[\(1, 2\)\]"),
        (lambda x: dist.all_gather_into_tensor(x.double(), x), ShapeError, "cannot hold 2 of float32"),
        (lambda x: dist.reduce_scatter_tensor(x[:1], x), ShapeError, "output has 1 float32 elements, input 2"),
        (lambda x: dist.gather(x), UsageError, "gather_list belongs to the rank dst alone"),
        (lambda x: dist.scatter(x, [x[:1]]), ShapeError, "scatter needs 1 tensors of 2 elements"),
        (lambda x: dist.all_gather_object([None], (1, 2)), DTypeError, r"JSON does not keep \(1, 2\)"),
        (lambda x: dist.all_gather_object([None], {1: x}), DTypeError, "JSON does not keep"),
    ],
)  # fmt: skip
def test_wrong_calls(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(genesis.ones(2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"backend": "mpi"}, "'mpi' is not known"),
        ({"store": object()}, "has no store"),
        ({"init_method": "file:///tmp/x"}, "file:///tmp/x' is not known"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2 does not exist"),
        ({"rank": 1, "world_size": 2}, "address of rank 0 is unknown"),
    ],
)
def test_ranks_that_cannot_be_found(arguments: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match=text):
        dist.init_process_group(**arguments)
    assert not dist.is_initialized() and dist.is_available()
    with pytest.raises(ValueError, match="no process group"):
        dist.get_rank()


def test_ranks_over_nccl_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pairs(2, limit_s=10)
    over_nccl = SimpleNamespace(is_in_stream_order=True, fault=lambda: None, abort=lambda: None, close=lambda: None)
    monkeypatch.setattr(nccl, "group_for", lambda peers, device, one_host: (over_nccl, ""))
    job = collectives._Job(World(0, 2, 0, 2, "127.0.0.1", 1, "a test"), first, "nccl")
    monkeypatch.setattr(collectives, "_jobs", [job])
    assert job.group(Device("cuda")) is over_nccl is job.group(Device("cuda"))
    assert job.watch is not None and job.watch._thread.is_alive()
    closing = threading.Thread(target=second.close)
    closing.start()
    dist.destroy_process_group()
    closing.join()
    job.watch._thread.join(5)
    assert not job.watch._thread.is_alive() and not dist.is_initialized()
