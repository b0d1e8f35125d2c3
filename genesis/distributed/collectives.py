"""torch.distributed's functions for the group of all ranks.

`init_process_group` finds the ranks by the variables of a launcher (ours, torchrun, SLURM, MPI) or by its arguments.
Every function is collective. CPU tensors travel over the connections of the ranks, CUDA tensors over NCCL if it is
installed. Calls are done when they return, or run in the order of the current stream; `async_op=True` returns a handle
of a call that is done. There is one group: `group` is None or `group.WORLD`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import Any, cast
from urllib.parse import urlsplit

from genesis import cuda
from genesis.autograd import no_grad
from genesis.backend import Device, as_device
from genesis.distributed.environment import DEFAULT_PORT, World, job_key, read_world
from genesis.distributed.group import Alone, Group, PeersGroup, StagedGroup
from genesis.distributed.peers import Peers
from genesis.distributed.watch import Collectives, Watch
from genesis.dtypes import bool_
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions.shape import cat
from genesis.tensor import Tensor

BACKENDS = {"gloo", "nccl", "cpu:gloo,cuda:nccl"}
JOIN = timedelta(minutes=30)


class ReduceOp(Enum):
    """How the values of all ranks become one."""

    SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)


# A reduction of the ranks' values, stacked along dimension 0; SUM and AVG use the group's sum.
_REDUCTIONS: dict[ReduceOp, Any] = {
    ReduceOp.PRODUCT: lambda x: x.prod(0, dtype=x.dtype),
    ReduceOp.MIN: lambda x: x.amin(0),
    ReduceOp.MAX: lambda x: x.amax(0),
    ReduceOp.BAND: lambda x: _folded("bitwise_and", x),
    ReduceOp.BOR: lambda x: _folded("bitwise_or", x),
    ReduceOp.BXOR: lambda x: _folded("bitwise_xor", x),
}


def _folded(method: str, x: Tensor) -> Tensor:
    total, *rest = x.unbind(0)
    for each in rest:
        total = getattr(total, method)(each)
    return total


class Work:
    """A call that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed


class _Job:
    """The ranks of this process's job and their groups: one for the CPU, and one for each device that a call used."""

    def __init__(self, world: World, peers: Peers, backend: str) -> None:
        self.world, self.peers, self.backend = world, peers, backend
        self.groups: dict[str, Group] = {"cpu": Alone() if peers.size == 1 else PeersGroup(peers)}
        self.watch: Watch | None = None  # ends this process if a rank is gone that its device may wait for

    def group(self, device: Device) -> Group:
        found = self.groups.get(str(device))
        if found is None and self.peers.size > 1:
            from genesis.distributed.nccl import group_for

            found, _ = group_for(self.peers, device, one_host=self.world.is_on_one_host)
            if found.is_in_stream_order and self.watch is None:
                self.watch = Watch(self.peers, lambda call: None)
                self.watch.collectives = cast(Collectives, found)
                self.watch.__enter__()
        return self.groups.setdefault(str(device), found or StagedGroup(self.groups["cpu"]))


_jobs: list[_Job] = []  # of this process: none or one


def _job(group: Any = None) -> _Job:
    if not _jobs:
        raise UsageError("there is no process group", next="call init_process_group()")
    if group is not None:
        raise UsageError("there is one group, of all ranks", next="leave group out, or pass group.WORLD")
    return _jobs[0]


# --- The group --------------------------------------------------------------------------------------------------------


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Wait for all ranks and connect to them. A process without a launcher's variables is the only rank.

    Args:
        backend: "gloo", "nccl" or None; the device of the tensors decides how they travel.
        init_method: "env://", or "tcp://host:port" of rank 0, with `world_size` and `rank`.
        timeout: the longest wait for another rank, 30 minutes by default.
        store, pg_options: only None. `group_name` is not used.
        device_id: the rank's device, which becomes the current one.

    Raises:
        UsageError: a group exists, or arguments and variables do not say who the ranks are.
        DistributedError: a rank does not come in time.
    """
    if _jobs:
        raise UsageError("there is a process group already", next="call destroy_process_group() first")
    if backend is not None and backend.lower() not in BACKENDS:
        raise UsageError(f"the backend {backend!r} is not known", next=f"use {', '.join(sorted(BACKENDS))}, or None")
    if store is not None or pg_options is not None:
        raise UsageError("init_process_group has no store and no pg_options", next="use init_method, or a launcher")
    world = _world(init_method or "env://", world_size, rank)
    device = None if device_id is None else as_device(device_id)
    if device is not None and device.type == "cuda":
        cuda.set_device(device)
    limit_s = (timeout or JOIN).total_seconds()
    peers = Peers(0, 1)
    if world.size > 1:
        key = job_key(world, os.environ)
        peers = Peers.connect(world, key, version=sys.modules["genesis"].__version__, limit_s=limit_s)
        peers.phase = "collectives"
    _jobs.append(_Job(world, peers, backend or "cpu:gloo,cuda:nccl"))


def _world(method: str, size: int, rank: int) -> World:
    address, environ = urlsplit(method), dict(os.environ)
    if address.scheme not in ("env", "tcp"):
        raise UsageError(f"the init_method {method!r} is not known", next="use env:// or tcp://host:port")
    if address.scheme == "env" and size < 0 and rank < 0:
        if "RANK" in environ:
            environ.setdefault("LOCAL_RANK", environ["RANK"])
        return read_world(environ)
    if size < 1 or not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size} does not exist", next="pass world_size and rank together")
    host = address.hostname or environ.get("MASTER_ADDR", "")
    if not host:
        raise UsageError(
            "the address of rank 0 is unknown", next="set MASTER_ADDR, or pass init_method=tcp://host:port"
        )
    port = address.port or environ.get("MASTER_PORT", str(DEFAULT_PORT))
    named = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": host, "MASTER_PORT": port}
    return replace(read_world({key: str(value) for key, value in named.items()}), source="init_process_group")


def destroy_process_group(group: Any = None) -> None:
    """Wait for all ranks and close the connections."""
    job = _job(group)
    _jobs.clear()
    if job.watch is not None:
        job.watch.__exit__(None, None, None)
    for each in job.groups.values():
        each.close()
    job.peers.close()


def is_available() -> bool:
    """Return True."""
    return True


def is_initialized() -> bool:
    """Whether there is a process group."""
    return bool(_jobs)


def get_rank(group: Any = None) -> int:
    """This rank, from 0. Raises UsageError without a group."""
    return _job(group).peers.rank


def get_world_size(group: Any = None) -> int:
    """The number of ranks. Raises UsageError without a group."""
    return _job(group).peers.size


def get_backend(group: Any = None) -> str:
    """The backend that `init_process_group` got."""
    return _job(group).backend


# --- Tensors ----------------------------------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Work | None:
    """Set `tensor` to the reduction over ranks. Sums of 2-byte floats are added in float32 and rounded once."""
    _set(tensor, _reduced(tensor, op, group))
    return _work(async_op)


def reduce(
    tensor: Tensor, dst: int | None = None, op: ReduceOp = ReduceOp.SUM, group: Any = None, async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:  # fmt: skip
    """Set `tensor` on rank `dst` to the reduction over ranks; it does not change on the others."""
    root, total = _root(dst, group_dst, group), _reduced(tensor, op, group)
    if get_rank() == root:
        _set(tensor, total)
    return _work(async_op)


def broadcast(
    tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
) -> Work | None:
    """Set `tensor` to its values on rank `src`."""
    root, values = _root(src, group_src, group), _flat(tensor)
    _job().group(tensor.device).broadcast(values.array, root)
    _set(tensor, values)
    return _work(async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Work | None:
    """Set `output_tensor` to the tensors of all ranks, concatenated or stacked along dimension 0."""
    _set(output_tensor, _gathered(input_tensor, group))
    return _work(async_op)


def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Work | None:
    """Set each tensor of `tensor_list` to the tensor of that rank."""
    _set_all(tensor_list, _gathered(tensor, group), tensor)
    return _work(async_op)


def gather(
    tensor: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int | None = None, group: Any = None,
    async_op: bool = False, group_dst: int | None = None,
) -> Work | None:  # fmt: skip
    """On rank `dst`, set each tensor of `gather_list` to the tensor of that rank."""
    root, job, part = _root(0 if dst is group_dst is None else dst, group_dst, group), _job(), _flat(tensor)
    is_root = job.peers.rank == root
    if is_root != bool(gather_list):
        raise UsageError("gather_list belongs to the rank dst alone", next="pass one tensor for each rank there")
    sizes = [part.numel()] * job.peers.size
    out = tensor.new_empty(sum(sizes)) if is_root else None
    job.group(tensor.device).gather(part.array, None if out is None else out.array, sizes, root)
    if out is not None:
        _set_all(gather_list or (), out, tensor)
    return _work(async_op)


def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, src: int | None = None, group: Any = None,
    async_op: bool = False, group_src: int | None = None,
) -> Work | None:  # fmt: skip
    """Set `tensor` to the tensor of this rank in the `scatter_list` of rank `src`."""
    root, job = _root(0 if src is group_src is None else src, group_src, group), _job()
    if (job.peers.rank == root) != bool(scatter_list):
        raise UsageError("scatter_list belongs to the rank src alone", next="pass one tensor for each rank there")
    parts = [_flat(x) for x in scatter_list or ()] or [tensor.new_empty(tensor.numel() * job.peers.size)]
    values = cat(parts)
    if values.numel() != tensor.numel() * job.peers.size or values.dtype is not tensor.dtype:
        raise ShapeError(f"scatter needs {job.peers.size} tensors of {tensor.numel()} elements and the same dtype")
    job.group(tensor.device).broadcast(values.array, root)
    _set(tensor, values.view(job.peers.size, -1)[job.peers.rank])
    return _work(async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Set `output` to this rank's part of the reduction of `input` over ranks."""
    job, source = _job(group), _flat(input)
    size = source.numel() // job.peers.size
    if output.numel() * job.peers.size != source.numel() or output.dtype is not input.dtype:
        raise ShapeError(
            f"output has {output.numel()} {output.dtype.name} elements, input {source.numel()} {input.dtype.name}",
            next=f"input has {job.peers.size} parts of the shape and dtype of output",
        )
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        total = source.new_empty(size)
        parts = [size] * job.peers.size
        job.group(input.device).reduce_scatter(source.array, total.array, parts)
        total = _averaged(total, op, job)
    else:
        total = _reduced(source, op, group).view(job.peers.size, -1)[job.peers.rank]
    _set(output, total)
    return _work(async_op)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Set `output` to the reduction over ranks of this rank's tensor in `input_list`."""
    return reduce_scatter_tensor(output, cat([_flat(x) for x in input_list]), op, group, async_op)


def barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: timedelta | None = None
) -> Work | None:
    """Wait until every rank has called this."""
    _job(group).peers.barrier()
    return _work(async_op)


def _work(async_op: bool) -> Work | None:
    return Work() if async_op else None


def _root(rank: int | None, same: int | None, group: Any) -> int:
    root, size = same if rank is None else rank, get_world_size(group)
    if root is None or not 0 <= root < size or None not in (rank, same):
        raise UsageError(f"the rank {root} is not one of {size}", next=f"pass one rank from 0 to {size - 1}")
    return root


def _flat(x: Tensor) -> Tensor:
    """The values of x in its order, `[n]`: x's own memory if it is contiguous, else a copy."""
    return x.detach().reshape(-1)


def _set(x: Tensor, values: Tensor) -> None:
    """Set x to values in its order."""
    if x.numel() != values.numel() or x.dtype is not values.dtype:
        what = f"a tensor of {x.numel()} {x.dtype.name} elements cannot hold {values.numel()} of {values.dtype.name}"
        raise ShapeError(what, next="pass tensors of the same dtype on all ranks, and one part for each")
    with no_grad():
        x.detach().copy_(values.view(x.shape))


def _set_all(tensors: Sequence[Tensor], values: Tensor, like: Tensor) -> None:
    """Set each tensor, which has the shape of `like`, to its part of values."""
    size, shapes = get_world_size(), [tuple(x.shape) for x in tensors]
    if shapes != [tuple(like.shape)] * size:
        raise ShapeError(f"the list has tensors of shapes {shapes}", next=f"pass {size} of shape {tuple(like.shape)}")
    for each, part in zip(tensors, values.view(size, -1), strict=True):
        _set(each, part)


def _gathered(x: Tensor, group: Any) -> Tensor:
    job, part = _job(group), _flat(x)
    out = x.new_empty(x.numel() * job.peers.size)
    job.group(x.device).all_gather(part.array, out.array, [x.numel()] * job.peers.size)
    return out


def _reduced(x: Tensor, op: ReduceOp, group: Any) -> Tensor:
    job = _job(group)
    if op is ReduceOp.SUM and x.dtype is bool_:  # as in torch
        op = ReduceOp.MAX
    if op in _REDUCTIONS:
        return _REDUCTIONS[op](_gathered(x, group).view(job.peers.size, -1))  # type: ignore[no-any-return]
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UsageError(f"{op!r} is not a reduction", next="use ReduceOp.SUM or another of its names")
    total = _flat(x).clone()
    job.group(x.device).all_reduce(total.array)
    return _averaged(total, op, job)


def _averaged(total: Tensor, op: ReduceOp, job: _Job) -> Tensor:
    if op is ReduceOp.SUM:
        return total
    if not total.is_floating_point():
        raise DTypeError(f"the average of {total.dtype.name} over ranks is not defined", next="convert it to float32")
    return total / job.peers.size


# --- Objects ----------------------------------------------------------------------------------------------------------


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False) -> None:
    """Set the items of `object_list` to the objects of all ranks; they travel as JSON, because nothing is pickled.

    Raises DTypeError unless JSON keeps the object: None, numbers, strings, and lists and dicts of them.
    """
    job = _job(group)
    if len(object_list) != job.peers.size:
        raise ShapeError(f"object_list has {len(object_list)} items for {job.peers.size} ranks")
    objects = job.peers.gather_json("all_gather_object", _plain(obj))
    object_list[:] = job.peers.broadcast_json("all_gather_object", objects)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Set `object_list` to the objects of rank `src`, which are as in `all_gather_object`."""
    root = _root(src, group_src, group)
    lists: list[Any] = [None] * get_world_size()
    all_gather_object(lists, object_list if get_rank() == root else [])
    if len(lists[root]) != len(object_list):
        raise ShapeError(f"object_list has {len(object_list)} items, and rank {root} has {len(lists[root])}")
    object_list[:] = lists[root]


def _plain(value: Any) -> Any:
    try:
        is_kept = repr(json.loads(json.dumps(value, allow_nan=False))) == repr(value)
    except (TypeError, ValueError):
        is_kept = False
    if not is_kept:
        raise DTypeError(f"JSON does not keep {value!r:.200}", next="send numbers, strings, lists and dicts of strings")
    return value
