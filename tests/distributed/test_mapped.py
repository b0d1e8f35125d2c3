"""Memory that all ranks have mapped, over the fake of NCCL: the bits of any group, who shares it, what lies there."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis import cuda
from genesis.array import Array, empty
from genesis.backend import Device
from genesis.distributed import Peers
from genesis.distributed.nccl import NcclGroup
from genesis.dtypes import bfloat16, float32
from genesis.errors import DistributedError, OutOfMemoryError
from genesis.optim import AdamW
from genesis.tensor import Tensor
from tests.cuda.stream_order import small_spans
from tests.distributed import nccl_ranks
from tests.distributed.test_group import expected_sum, of, values
from tests.distributed.test_nccl import given

pytestmark = pytest.mark.host

CUDA = Device("cuda", 0)
ROOM = 2048


def filled(group: NcclGroup, numbers: np.ndarray, parts: list[int]) -> Array:
    """Mapped memory with these numbers at its beginning, and poison where the rest of full parts would be."""
    whole = group.buffer(ROOM, bfloat16, "a test's", [parts])
    assert whole is not None
    Tensor(whole).fill_(float("nan"))
    x = whole.view((numbers.size,), (1,), whole.offset)
    Tensor(x).copy_(Tensor(given(numbers)))
    return x


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers(size: int, tmp_path: Path) -> None:
    """Parts of one size in one all-to-all, also where the last ones lack some or all of it."""
    lengths = [[512] * size, [512] * (size - 1) + [100], [32] + [0] * (size - 1)]

    def work(peers: Peers, group: NcclGroup) -> list[Any]:
        found, comm = list[Any](), group._nccl._handle
        for parts in lengths:
            x = filled(group, values(group.rank, sum(parts), bfloat16), parts)
            out = empty((parts[group.rank],), float32, CUDA)
            before = comm.calls
            group.reduce_scatter(x, out, parts)
            once = of(out.numpy())
            group.reduce_scatter(x, out, parts, adds=True)
            start = sum(parts[: group.rank])
            group.all_gather(x.view((out.size,), (1,), x.offset + start), x, parts)
            found.append([once, of(out.numpy()), comm.calls - before, of(x.numpy())])
        return found

    forks = nccl_ranks.started(size, work, tmp_path, is_mapped=True)
    for number, parts in enumerate(lengths):
        total = expected_sum(size, sum(parts), bfloat16, float32)
        again = np.copy(total)
        for other in range(size):
            again += values(other, sum(parts), bfloat16).astype(np.float32)
        starts = np.cumsum([0, *parts])
        whole = np.concatenate([values(r, sum(parts), bfloat16)[starts[r] : starts[r + 1]] for r in range(size)])
        for rank, each in enumerate(forks):
            assert each.value is not None, each.error
            mine = slice(starts[rank], starts[rank + 1])
            assert each.value[number] == [of(total[mine]), of(again[mine]), 3, of(whole)]


def test_memory_is_used_again_where_no_rank_uses_it(tmp_path: Path) -> None:
    """All agree on it, whichever rank has let go of it; it counts as the device's, and does not go back."""

    def work(peers: Peers, group: NcclGroup) -> list[Any]:
        parts, mapped = [[64, 64]], group._mapped
        assert mapped is not None
        gc.collect()  # what tests before have left
        cuda.empty_cache(CUDA)
        first = group.buffer(128, bfloat16, "a", parts)
        assert first is not None
        at, reserved, allocated = first.data_ptr(), cuda.memory_reserved(CUDA), cuda.memory_allocated(CUDA)
        names = {row["op"] for row in cuda.memory_snapshot(CUDA)}
        kept = first if group.rank else None
        del first
        second = group.buffer(128, bfloat16, "b", parts)  # rank 1 still has the first
        assert second is not None
        found = [second.data_ptr() != at, cuda.memory_allocated(CUDA) - allocated == (256 if kept else 0)]
        del kept
        cuda.empty_cache(CUDA)
        third = group.buffer(128, bfloat16, "c", parts)
        assert third is not None
        found += [third.data_ptr() == at, cuda.memory_reserved(CUDA) == reserved + 256]
        return [*found, "a" in names, mapped.arena.holds(at, 256), not mapped.arena.holds(at, 257)]

    for each in nccl_ranks.started(2, work, tmp_path, is_mapped=True):
        assert each.value == [True] * 7, each.error


@pytest.mark.parametrize("is_mapped", [True, False])
def test_flat_buffers(is_mapped: bool, tmp_path: Path) -> None:
    """Gradients and weights are mapped, where the group maps memory; sums are not."""

    def work(peers: Peers, group: NcclGroup) -> list[Any]:
        small_spans()
        param = given(values(0, 640, bfloat16))
        flat = next(AdamW([Tensor(param).requires_grad_()], fused=True, ranks=group)._shared())
        buffers = (flat.values, flat.gradients, flat.summed)
        mapped = group._mapped
        where = [mapped is not None and mapped.arena.holds(x.data_ptr(), x.nbytes) for x in buffers]
        return [of(flat.values.numpy()) == of(param.numpy()), where]

    for each in nccl_ranks.started(2, work, tmp_path, is_mapped=is_mapped):
        assert each.value == [True, [is_mapped, is_mapped, False]], each.error


def test_a_device_without_room_for_mapped_memory(tmp_path: Path) -> None:
    """It is out of memory, as for any other: holders are named, exit code 7."""

    def work(peers: Peers, group: NcclGroup) -> list[Any]:
        nccl, driver = group._nccl._nccl, group._backend.driver

        def refuse(size: int) -> int:
            raise nccl.NCCLError(1, "out of memory")

        nccl.mem_alloc = refuse
        driver.memory_info = lambda: (100, 1 << 30)  # type: ignore[method-assign]
        with pytest.raises(OutOfMemoryError) as caught:
            group.buffer(1024, bfloat16, "gradients", [[512, 512]])
        return [str(caught.value.what), caught.value.exit_code]

    for each in nccl_ranks.started(2, work, tmp_path, is_mapped=True):
        assert each.value is not None, each.error
        assert "staging of collectives" in each.value[0] and each.value[1] == 7


@pytest.mark.parametrize(
    ("name", "what", "next_step"),
    [
        ("allto_all", "DMA engines cannot copy between the GPUs: an all-to-all failed", "set NCCL_CTA_POLICY=0"),
        ("comm_window_register", "mapping memory on all ranks failed", "run again with NCCL_DEBUG=INFO"),
    ],
)
def test_what_nccl_refuses(name: str, what: str, next_step: str, tmp_path: Path) -> None:
    """The first copies are a trial, whose error says how to do without them."""

    def work(peers: Peers, group: NcclGroup) -> list[str]:
        nccl: Any = group._nccl._nccl

        def refuse(*given: Any) -> int:
            raise nccl.NCCLError(5, "not here")

        setattr(nccl, name, refuse)
        with pytest.raises(DistributedError) as caught:
            group.buffer(128, bfloat16, "a", [[64, 64]])
        return [str(caught.value.what), str(caught.value.next)]

    for each in nccl_ranks.started(2, work, tmp_path, is_mapped=True):
        assert each.value is not None, each.error
        assert each.value[0] == f"{what}: InvalidUsage (5): not here" and each.value[1].startswith(next_step)
