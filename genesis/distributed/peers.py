"""The control plane: small messages between ranks, over a star of connections to rank 0.

Every call is collective: all ranks make the same calls in the same order. Each message carries the name of its call, so
ranks at different calls raise an error instead of mixing their data. The closed connection of a dead rank is detected,
and rank 0 reports it to the others. With one rank, every call returns at once and no socket exists.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from genesis.distributed.channel import FAILURE, MAX_PAYLOAD, Channel, Frame, Late
from genesis.distributed.environment import World
from genesis.distributed.rendezvous import connect
from genesis.errors import ConfigError, DistributedError, GenesisError, PeerGoneError, escape

_STOP = struct.Struct("<qq")  # signal number or 0, step
_MARGIN_S = 2.0
_FAREWELL_S = 1.0
_MAX_TEXT = 8192
_MAX_WHAT = 500


class Peers:
    """The connections of a rank to the other ranks of its job.

    As a context manager, it waits for all ranks at the end of the block, or reports the error of the block to them.

    Args:
        channels: on rank 0 one channel to every other rank, on the others one to rank 0.
        limit_s: time limit of a call in seconds, unless `during` sets another.

    Attributes:
        rank, size: this rank, and the number of ranks.
        limit_s: see above; it may be changed.
        phase: current phase of the job, for errors.
        step: last step on which the ranks agreed.
        is_ending: whether this rank is closing its connections or has detected a fault.
    """

    def __init__(self, rank: int, size: int, channels: Sequence[Channel] = (), *, limit_s: float = 60.0) -> None:
        self.rank, self.size, self.phase, self.step = rank, size, "", 0
        self._channels: dict[int, Channel] = {channel.rank: channel for channel in channels}
        self.limit_s, self.is_ending = limit_s, False

    @classmethod
    def connect(cls, world: World, key: bytes, *, version: str, limit_s: float = 60.0) -> Self:
        """Wait for all ranks of `world`, and connect to them; see `rendezvous.connect`."""
        return cls(world.rank, world.size, connect(world, key, version=version, limit_s=limit_s), limit_s=limit_s)

    @contextlib.contextmanager
    def during(self, phase: str, limit_s: float | None = None) -> Iterator[None]:
        """Set the phase and the time limit of calls inside the block. They must be the same on every rank."""
        before = self.phase, self.limit_s
        self.phase, self.limit_s = phase, self.limit_s if limit_s is None else limit_s
        try:
            yield
        finally:
            self.phase, self.limit_s = before

    # Agreement

    def agree(self, stop: int, step: int) -> int:
        """Return the largest `stop` (a signal number or 0) of all ranks. Raises DistributedError if steps differ."""
        packed = self.gather("agree", _STOP.pack(stop, step), _STOP.size)
        if packed is not None:
            steps = [_STOP.unpack(each)[1] for each in packed]
            if len(set(steps)) > 1:
                self._fail(DistributedError(f"the ranks are at different steps: {_by_rank(steps)}", where=self.where()))
            stop = max(_STOP.unpack(each)[0] for each in packed)
        (agreed,) = struct.unpack("<q", self.broadcast("agree", struct.pack("<q", stop), 8))
        self.step = step
        return int(agreed)

    def compare(self, facts: Mapping[str, str]) -> None:
        """Raise ConfigError on every rank unless `facts`, such as hashes of configuration and data, are the same."""
        all_facts = self.gather_json("compare", dict(facts))
        differing = ""
        if all_facts is not None:
            names = list(dict.fromkeys(name for each in all_facts for name in each))
            by_name = {name: [each.get(name, "nothing") for each in all_facts] for name in names}
            differing = "; ".join(f"{name}: {_by_rank(v)}" for name, v in by_name.items() if len(set(v)) > 1)
        differing = self.broadcast_json("compare", differing)
        if differing:
            next = "give all ranks the same configuration, data and release of Genesis"
            raise ConfigError(f"the ranks differ in {differing}", where=self.where(), next=next)

    def barrier(self, name: str = "barrier") -> None:
        """Wait until every rank has called this."""
        self.gather(name, b"", 0)
        self.broadcast(name, b"", 0)

    # Bytes and JSON

    def gather(self, name: str, data: bytes, limit: int = MAX_PAYLOAD) -> list[bytes] | None:
        """Return the bytes of all ranks in rank order on rank 0, and None on the others."""
        if self.rank:
            self._send(0, name, data)
            return None
        by_rank = {0: data}
        until = time.monotonic() + self.limit_s
        while missing := [rank for rank in self._channels if rank not in by_rank]:
            for rank in self._ready(missing, name, until):
                by_rank[rank] = self._receive(rank, name, limit)
        return [by_rank[rank] for rank in range(self.size)]

    def broadcast(self, name: str, data: bytes, limit: int = MAX_PAYLOAD) -> bytes:
        """Return rank 0's bytes on every rank."""
        if self.rank:
            return self._receive(0, name, limit)
        for rank in self._channels:
            self._send(rank, name, data)
        return data

    def gather_json(self, name: str, value: Any) -> list[Any] | None:
        """Gather JSON values; see `gather`."""
        texts = self.gather(name, json.dumps(value, allow_nan=False).encode())
        return None if texts is None else [json.loads(each) for each in texts]

    def broadcast_json(self, name: str, value: Any) -> Any:
        """Broadcast a JSON value; see `broadcast`."""
        return json.loads(self.broadcast(name, json.dumps(value, allow_nan=False).encode()))

    def all(self, name: str, own: bool) -> bool:
        """Whether `own` is true on every rank."""
        values = self.gather_json(name, own)
        return bool(self.broadcast_json(name, None if values is None else all(values)))

    def send_block(self, rank: int, block: np.ndarray) -> None:
        """Send bytes to a rank that calls `receive_block`, within a call that `check_call` has checked."""
        with self._peer(rank, "block") as channel:
            channel.send_block(block)

    def receive_block(self, rank: int, block: np.ndarray) -> None:
        """Fill `block`, an array of bytes. Rank 0 raises if any other rank fails meanwhile."""
        if not self.rank:
            self._ready([rank], "block")
        with self._peer(rank, "block") as channel:
            frame = channel.receive_block(block)
        if frame is not None:
            self._check(rank, "block", 0, frame)

    def check_call(self, call: str) -> None:
        """Raise DistributedError unless `call` is the same on every rank."""
        texts = self.gather("call", call.encode(), _MAX_TEXT)
        if texts is not None and len(set(texts)) > 1:
            calls = [escape(each.decode("utf-8", "replace")) for each in texts]
            self._fail(DistributedError(f"the ranks make different calls: {_by_rank(calls)}", where=self.where()))
        self.broadcast("call", b"", 0)

    # The end

    def report(self, error: BaseException) -> None:
        """Report to the other ranks that this one ends with `error`, as far as they are still connected."""
        if isinstance(error, PeerGoneError):
            return  # rank 0 has reported it, or is gone
        self.is_ending = True
        what = error.what if isinstance(error, GenesisError) else f"{type(error).__name__}: {error}"
        where = error.where if isinstance(error, GenesisError) else ""
        self._send_failure(self.rank, what or type(error).__name__, where or self.where())
        if not isinstance(error, GenesisError) or not self.rank:
            return
        # Wait a moment for rank 0's answer, to learn whether it reports the same error.
        until = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(EOFError, OSError, Late, ValueError, KeyError):
            channel = self._channels[0]
            while (left := until - time.monotonic()) > 0:
                channel.set_limit(left)
                kind, _name, payload = channel.receive()
                if kind == FAILURE:
                    failure = json.loads(payload)
                    # Rank 0 ends with the same error and prints it.
                    error.is_echo |= bool(failure["rank"] == 0 and failure["what"] == what[:_MAX_WHAT])
                    return

    def close(self) -> None:
        """Wait for all ranks, and close the connections."""
        if self._channels:
            with self.during(self.phase or "the end"):
                self.gather("close", b"", 0)
                self.is_ending = True  # closed connections are expected from now on
                self.broadcast("close", b"", 0)
        self.abort()

    def abort(self) -> None:
        """Close the connections without a message, so that the other ranks see this one as gone."""
        self.is_ending = True
        for channel in self._channels.values():
            channel.close()
        self._channels = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
            else:
                self.report(error)
        finally:
            self.abort()

    # Faults

    def closed(self, events: int) -> int | None:
        """Return a rank whose connection has one of the `poll` events, or None. Reads nothing; any thread may call."""
        try:
            return next(iter(_polled(dict(self._channels), events, 0)), None)
        except (OSError, ValueError):  # this rank is closing the connection
            return None

    def raise_gone(self, rank: int) -> None:
        """Raise the error that the rank reported before its connection closed, or that it is gone."""
        if not self.is_ending:
            self._raise_gone(rank)

    def _ready(self, wanted: Sequence[int], name: str, until: float = 0.0) -> list[int]:
        """Return the ranks in `wanted` that have sent data. Raises if none does in time, or any rank fails."""
        until = until or time.monotonic() + self._patience()
        watched = dict(self._channels)
        while True:
            ready = _polled(watched, select.POLLIN, until - time.monotonic())
            if not ready:
                self._raise_late(wanted, name)
            if wanted_ready := [rank for rank in ready if rank in wanted]:
                return wanted_ready
            for rank in ready:
                if watched.pop(rank).is_ending():
                    self._raise_gone(rank)

    def _patience(self) -> float:
        # Rank 0 must be the first to detect a late rank, because it can report it to the others.
        return self.limit_s + (min(_MARGIN_S, self.limit_s) if self.rank else 0.0)

    def _send(self, rank: int, name: str, data: bytes) -> None:
        with self._peer(rank, name) as channel:
            channel.send(name, data)

    def _receive(self, rank: int, name: str, limit: int) -> bytes:
        with self._peer(rank, name) as channel:
            frame = channel.receive(max(limit, _MAX_TEXT))
        return self._check(rank, name, limit, frame)

    def _check(self, rank: int, name: str, limit: int, frame: Frame) -> bytes:
        """Return the payload of a frame, or raise if it reports a failure or belongs to another call."""
        kind, received_name, payload = frame
        if kind == FAILURE:
            self._raise_failure(payload)
        if received_name != name or len(payload) > limit:
            what = f"rank {rank} is at {escape(received_name)!r}, and rank {self.rank} at {name!r}"
            self._fail(DistributedError(what, where=self.where(), next="report it as a bug in Genesis"))
        return payload

    @contextlib.contextmanager
    def _peer(self, rank: int, name: str) -> Iterator[Channel]:
        """Yield the channel to a rank with the time limit set. Its errors become errors that name the rank."""
        try:
            channel = self._channels[rank]
            channel.set_limit(self._patience())
            yield channel
        except Late:
            self._raise_late([rank], name)
        except (EOFError, OSError):
            self._raise_gone(rank)

    def where(self) -> str:
        """The phase and the step, for errors."""
        return ", ".join([*([self.phase] if self.phase else []), f"step {self.step}"])

    def _raise_late(self, ranks: Sequence[int], name: str) -> None:
        late = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        what = f"{late} did not answer rank {self.rank} within {self.limit_s:.3g} s, at {name!r}"
        next = f"check whether {late} is stopped, or inspect it with py-spy dump --pid"
        self._fail(DistributedError(what, where=self.where(), next=next))

    def _raise_gone(self, rank: int) -> None:
        """Raise the failure that a rank reported before its connection closed, or that it is gone."""
        self.is_ending = True
        channel = self._channels[rank]
        with contextlib.suppress(EOFError, OSError, Late):  # after a failed send, the report may still be unread
            channel.set_limit(_FAREWELL_S)
            for _ in range(4):
                kind, _name, payload = channel.receive(_MAX_TEXT)
                if kind == FAILURE:
                    self._raise_failure(payload)
        self._raise_lost(rank, f"rank {rank} is gone: its connection closed without a message", self.where())

    def _raise_failure(self, payload: bytes) -> None:
        """Raise the failure in a report, which may be of another rank than its sender."""
        try:
            failure = json.loads(payload)
            rank, what, where = int(failure["rank"]), str(failure["what"]), str(failure["where"])
        except (ValueError, KeyError, TypeError):
            rank, what, where = -1, "a rank failed with an unreadable report", ""
        self._raise_lost(rank, what, where)

    def _raise_lost(self, rank: int, what: str, where: str) -> None:
        self.is_ending = True
        if not self.rank:
            self._send_failure(rank, what, where)
        what = what if what.startswith("rank ") else f"rank {rank} failed: {what}"
        next = f"read the output of rank {rank}; without output it was killed, see the system log"
        raise PeerGoneError(escape(what), rank=rank, phase=self.phase, where=escape(where), next=next)

    def _fail(self, error: DistributedError) -> None:
        self.is_ending = True
        self._send_failure(self.rank, error.what, error.where)
        raise error

    def _send_failure(self, rank: int, what: str, where: str) -> None:
        payload = json.dumps({"rank": rank, "what": what[:_MAX_WHAT], "where": where[:100]}).encode()
        for channel in self._channels.values():
            with contextlib.suppress(OSError, Late):
                channel.set_limit(_FAREWELL_S)
                channel.send("failure", payload, FAILURE)


def _polled(channels: Mapping[int, Channel], events: int, seconds: float) -> list[int]:
    """Return the ranks whose connections have one of the events within `seconds`."""
    waiting = select.poll()  # a selector has more overhead than the message itself
    ranks = {channel.fileno(): rank for rank, channel in channels.items()}
    for descriptor in ranks:
        waiting.register(descriptor, events)
    return [ranks[descriptor] for descriptor, _ in waiting.poll(max(0, math.ceil(seconds * 1000)))]


def _by_rank(values: Sequence[Any]) -> str:
    """List which ranks have which value, the most common value last: "rank 1: b; ranks 0, 2: a"."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, those in sorted(ranks.items(), key=lambda item: len(item[1])):
        shown = ", ".join(map(str, those[:8])) + (" and more" if len(those) > 8 else "")
        parts.append(f"{'rank' if len(those) == 1 else 'ranks'} {shown}: {escape(str(value)[:200])}")
    return "; ".join(parts)
