"""A fake of the part of nccl4py's bindings that Genesis uses, over the memory of Triton's interpreter.

Ranks are processes; what they send each other are files below `folder`. It raises where NCCL would hang, crash or send
other bytes than were meant: ranks that make other calls or in another order, a communicator that is used after its end
or destroyed while a graph holds it, memory that is not the device's. Functions have the names and parameters of
nccl4py, which `test_nccl.py` compares where that is installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from genesis.backend.cuda import driver_for

folder = Path()  # where ranks meet: a test sets it before it forks them
wait_s = 20.0

SIZES = {0: 1, 1: 1, 2: 4, 4: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # bytes of ncclDataType_t
_IDENTITY = 128  # bytes of ncclUniqueId
_open_groups: list[list[tuple[Any, ...]]] = []


class NCCLError(Exception):
    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(f"{get_error_string(status)} ({status}): {text}")
        self.status = status


class Config:
    __slots__ = ("cta_policy", "max_ctas", "min_ctas")


class UniqueId:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bytes__(self) -> bytes:
        return self._data

    @classmethod
    def from_buffer(cls, buffer: bytes) -> UniqueId:
        assert len(buffer) == _IDENTITY
        return cls(bytes(buffer))


class Comm:
    """A communicator of one rank.

    Attributes:
        state: "open", "finalized" or "ended".
        error: what `comm_get_async_error` gives.
        config: what it was made with.
    """

    def __init__(self, name: str, rank: int, size: int, config: Config) -> None:
        self.config = config
        self.name, self.rank, self.size, self.state, self.error = name, rank, size, "open", 0
        self.calls = 0  # collectives so far
        self.sent: Counter[int] = Counter()  # messages so far, by the rank they go to
        self.taken: Counter[int] = Counter()
        self.windows: list[tuple[int, int]] = []  # pointer and bytes

    def place(self, pointer: int, nbytes: int) -> list[int] | None:
        """Which window holds memory, and where in it."""
        for number, (start, size) in enumerate(self.windows):
            if start <= pointer and pointer + nbytes <= start + size:
                return [number, pointer - start]
        return None

    def check(self, *states: str) -> None:
        if self.state not in (states or ("open",)):
            raise NCCLError(4, f"a communicator that is {self.state}")

    def put(self, key: str, what: Any, data: bytes = b"") -> None:
        path = folder / f"{self.name}-{key}"
        part = path.with_suffix(".part")
        part.write_bytes(json.dumps(what).encode() + b"\n" + data)
        os.rename(part, path)

    def take(self, key: str, *, keep: bool = False) -> tuple[Any, bytes] | None:
        """What another rank has put there; None where the communicator is aborted meanwhile."""
        path, until = folder / f"{self.name}-{key}", time.monotonic() + wait_s
        while not path.exists():
            if self.state == "ended":
                return None
            if time.monotonic() > until:
                raise NCCLError(8, f"{key} did not come")
            time.sleep(0.0005)
        head, _, data = path.read_bytes().partition(b"\n")
        if not keep:
            path.unlink()
        return json.loads(head), data

    def together(self, what: list[Any], data: bytes = b"") -> list[bytes] | None:
        """A call of all ranks: what each of them brings."""
        self.calls += 1
        self.put(f"call{self.calls}-{self.rank}", what, data)
        brought = []
        for rank in range(self.size):
            found = self.take(f"call{self.calls}-{rank}", keep=True)
            if found is None:
                return None
            if found[0] != what:
                raise NCCLError(5, f"rank {rank} calls {found[0]}, rank {self.rank} {what}")
            brought.append(found[1])
        return brought


class _Work:
    """What a stream does, now or at each replay of a graph."""

    def __init__(self, comm: Comm, run: Any) -> None:
        self.comm, self.run = comm, run

    def __call__(self) -> None:
        self.comm.check("open", "finalized")
        self.run()


def _driver() -> Any:
    return driver_for(0)


def _do(comm: Comm, stream: int, run: Any) -> None:
    comm.check()
    _driver().run_or_capture(stream, _Work(comm, run))


def _checked(pointer: int, nbytes: int) -> None:
    blocks = _driver()._blocks
    if not any(start <= pointer and pointer + nbytes <= start + b.nbytes - 512 for start, b in blocks.items()):
        raise NCCLError(4, f"{nbytes} bytes at {pointer:#x} are not the device's")


# --- The bindings -----------------------------------------------------------------------------------------------------


def get_version() -> int:
    return 23203


def get_error_string(result: int) -> str:
    names = ("Success", "UnhandledCudaError", "SystemError", "InternalError", "InvalidArgument", "InvalidUsage")
    return (*names, "RemoteError", "InProgress", "Timeout")[result]


def get_last_error(comm: Comm) -> str:
    return "the fake says so"


def get_unique_id() -> UniqueId:
    return UniqueId(uuid.uuid4().hex.encode().ljust(_IDENTITY, b"\0"))


def comm_init_rank_config(nranks: int, comm_id: UniqueId, rank: int, config: Config) -> Comm:
    assert isinstance(comm_id, UniqueId) and isinstance(config, Config)
    made = Comm(bytes(comm_id).rstrip(b"\0").decode(), rank, nranks, config)
    made.together(["init", nranks])
    return made


def comm_get_async_error(comm: Comm) -> int:
    comm.check("open", "finalized")
    return comm.error


def comm_finalize(comm: Comm) -> None:
    comm.check()
    _refuse_graphs(comm)
    comm.together(["finalize"])
    comm.state = "finalized"


def comm_destroy(comm: Comm) -> None:
    comm.check("open", "finalized")
    _refuse_graphs(comm)
    comm.state = "ended"


def comm_abort(comm: Comm) -> None:
    comm.check("open", "finalized")
    comm.state = "ended"


def _refuse_graphs(comm: Comm) -> None:
    if any(isinstance(work, _Work) and work.comm is comm for graph in _driver().graphs.values() for work in graph):
        raise NCCLError(5, "a graph still holds the communicator: NCCL would wait for its end")


def group_start() -> None:
    _open_groups.append([])


def group_end() -> None:
    calls = _open_groups.pop()
    if not calls:
        return
    comm, stream = calls[0][4:6]
    assert all(call[4] is comm and call[5] == stream for call in calls)

    def run() -> None:
        for kind, pointer, nbytes, peer, *_ in calls:
            if kind == "send":
                comm.sent[peer] += 1
                key = f"message{comm.sent[peer]}-{comm.rank}-{peer}"
                comm.put(key, [nbytes, comm.calls], ctypes.string_at(pointer, nbytes))
        for kind, pointer, nbytes, peer, *_ in calls:
            if kind == "recv":
                comm.taken[peer] += 1
                found = comm.take(f"message{comm.taken[peer]}-{peer}-{comm.rank}")
                if found is None:
                    return
                if found[0] != [nbytes, comm.calls]:
                    raise NCCLError(5, f"bytes and collectives before: sent {found[0]}, taken {[nbytes, comm.calls]}")
                ctypes.memmove(pointer, found[1], nbytes)

    _do(comm, stream, run)


def send(sendbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
    _add("send", sendbuff, count, datatype, peer, comm, stream)


def recv(recvbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
    _add("recv", recvbuff, count, datatype, peer, comm, stream)


def _add(kind: str, pointer: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
    comm.check()
    if not _open_groups:
        raise NCCLError(5, f"{kind} outside of a group waits for its peer")
    if not 0 <= peer < comm.size:
        raise NCCLError(4, f"there is no rank {peer}")
    _checked(pointer, count * SIZES[datatype])
    if comm.place(pointer, 1) is not None:
        raise NCCLError(5, f"{kind} of mapped memory: hangs where the other end is not mapped")
    _open_groups[-1].append((kind, pointer, count * SIZES[datatype], peer, comm, stream))


def all_gather(sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Comm, stream: int) -> None:
    nbytes = sendcount * SIZES[datatype]
    _checked(sendbuff, nbytes)
    _checked(recvbuff, nbytes * comm.size)
    inside = recvbuff <= sendbuff < recvbuff + nbytes * comm.size
    if inside and sendbuff != recvbuff + comm.rank * nbytes:
        raise NCCLError(4, "the part is in the result, and not where it belongs")

    place = comm.place(recvbuff, nbytes * comm.size)
    if (place is None) != (comm.place(sendbuff, nbytes) is None):
        raise NCCLError(5, "a gather between memory that is mapped and memory that is not")
    if place is not None and stream == 0:
        raise NCCLError(1, "DMA engines do not serve the default stream")

    def run() -> None:
        parts = comm.together(["all_gather", nbytes, datatype, place], ctypes.string_at(sendbuff, nbytes))
        for rank, part in enumerate(parts or []):
            ctypes.memmove(recvbuff + rank * nbytes, part, nbytes)

    _do(comm, stream, run)


def allto_all(sendbuff: int, recvbuff: int, count: int, datatype: int, comm: Comm, stream: int) -> None:
    nbytes = count * SIZES[datatype]
    _checked(sendbuff, nbytes * comm.size)
    _checked(recvbuff, nbytes * comm.size)
    places = [comm.place(sendbuff, nbytes * comm.size), comm.place(recvbuff, nbytes * comm.size)]
    if None in places or comm.config.cta_policy != 2:
        raise NCCLError(5, "an all-to-all that DMA engines do not make")
    if stream == 0:
        raise NCCLError(1, "DMA engines do not serve the default stream")
    if sendbuff < recvbuff + nbytes * comm.size and recvbuff < sendbuff + nbytes * comm.size:
        raise NCCLError(4, "an all-to-all in place")

    def run() -> None:
        whole = comm.together(["allto_all", nbytes, datatype, places], ctypes.string_at(sendbuff, nbytes * comm.size))
        for rank, brought in enumerate(whole or []):
            ctypes.memmove(recvbuff + rank * nbytes, brought[comm.rank * nbytes :], nbytes)

    _do(comm, stream, run)


def mem_alloc(size: int) -> int:
    return int(_driver().allocate(size))


def comm_window_register(comm: Comm, buff: int, size: int, win_flags: int) -> int:
    comm.check()
    _checked(buff, size)
    comm.together(["window", size, win_flags])
    comm.windows.append((buff, size))
    return len(comm.windows)


def broadcast(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Comm, stream: int) -> None:
    nbytes = count * SIZES[datatype]
    _checked(sendbuff, nbytes)
    _checked(recvbuff, nbytes)

    def run() -> None:
        mine = ctypes.string_at(sendbuff, nbytes) if comm.rank == root else b""
        parts = comm.together(["broadcast", nbytes, datatype, root], mine)
        if parts is not None:
            ctypes.memmove(recvbuff, parts[root], nbytes)

    _do(comm, stream, run)
