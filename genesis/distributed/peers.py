"""The control plane: what ranks say to each other beside their arrays, over a star of connections to rank 0.

Every call is collective: all ranks make the same calls in the same order, and each carries its name, so that ranks
which are at different places find out instead of mixing their data. A rank that dies is seen by its closed connection;
rank 0 then tells the others who it was. With one rank every call returns at once and there is no socket.
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
    """The other ranks of a job, as this one reaches them; a context manager.

    Left without an error, it waits for all; left with one, it tells the others.

    Args:
        channels: on rank 0 one to every other rank, elsewhere one to rank 0.
        limit_s: how long another rank may take, outside of a `during` with a limit of its own.

    Attributes:
        rank, size: which of how many.
        limit_s: as given; it may be changed.
        phase: what the ranks are doing, for errors.
        step: the last step that was agreed on.
        is_ending: whether this rank is closing its connections, or has seen a fault.
    """

    def __init__(self, rank: int, size: int, channels: Sequence[Channel] = (), *, limit_s: float = 60.0) -> None:
        self.rank, self.size, self.phase, self.step = rank, size, "", 0
        self._channels: dict[int, Channel] = {channel.rank: channel for channel in channels}
        self.limit_s, self.is_ending = limit_s, False

    @classmethod
    def connect(cls, world: World, key: bytes, *, version: str, limit_s: float = 60.0) -> Self:
        """All ranks of `world`, once they have come; see `rendezvous.connect`."""
        return cls(world.rank, world.size, connect(world, key, version=version, limit_s=limit_s), limit_s=limit_s)

    @contextlib.contextmanager
    def during(self, phase: str, limit_s: float | None = None) -> Iterator[None]:
        """Name what follows in errors, and let it take `limit_s`; every rank must say the same."""
        before = self.phase, self.limit_s
        self.phase, self.limit_s = phase, self.limit_s if limit_s is None else limit_s
        try:
            yield
        finally:
            self.phase, self.limit_s = before

    # What ranks agree on

    def agree(self, stop: int, step: int) -> int:
        """The largest `stop` (a signal, 0 for none) of all ranks. Raises DistributedError where steps differ."""
        said = self.gather("agree", _STOP.pack(stop, step), _STOP.size)
        if said is not None:
            steps = [_STOP.unpack(each)[1] for each in said]
            if len(set(steps)) > 1:
                self._fail(DistributedError(f"the ranks are at different steps: {_by_rank(steps)}", where=self.where()))
            stop = max(_STOP.unpack(each)[0] for each in said)
        (agreed,) = struct.unpack("<q", self.broadcast("agree", struct.pack("<q", stop), 8))
        self.step = step
        return int(agreed)

    def compare(self, facts: Mapping[str, str]) -> None:
        """Raise ConfigError, on every rank, unless all hold the same `facts`: hashes of configuration, data, …"""
        said = self.gather_json("compare", dict(facts))
        differing = ""
        if said is not None:
            names = list(dict.fromkeys(name for each in said for name in each))
            by_name = {name: [each.get(name, "nothing") for each in said] for name in names}
            differing = "; ".join(f"{name}: {_by_rank(v)}" for name, v in by_name.items() if len(set(v)) > 1)
        differing = self.broadcast_json("compare", differing)
        if differing:
            next = "give all ranks the same configuration, data and release of Genesis"
            raise ConfigError(f"the ranks differ in {differing}", where=self.where(), next=next)

    def barrier(self, name: str = "barrier") -> None:
        """Return once every rank is here."""
        self.gather(name, b"", 0)
        self.broadcast(name, b"", 0)

    # Bytes and JSON

    def gather(self, name: str, data: bytes, most: int = MAX_PAYLOAD) -> list[bytes] | None:
        """On rank 0 the bytes of all ranks, in their order; None elsewhere."""
        if self.rank:
            self._send(0, name, data)
            return None
        said = {0: data}
        until = time.monotonic() + self.limit_s
        while missing := [rank for rank in self._channels if rank not in said]:
            for rank in self._ready(missing, name, until):
                said[rank] = self._receive(rank, name, most)
        return [said[rank] for rank in range(self.size)]

    def broadcast(self, name: str, data: bytes, most: int = MAX_PAYLOAD) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.rank:
            return self._receive(0, name, most)
        for rank in self._channels:
            self._send(rank, name, data)
        return data

    def gather_json(self, name: str, value: Any) -> list[Any] | None:
        """As `gather`, for what JSON can say."""
        said = self.gather(name, json.dumps(value, allow_nan=False).encode())
        return None if said is None else [json.loads(each) for each in said]

    def broadcast_json(self, name: str, value: Any) -> Any:
        """As `broadcast`, for what JSON can say."""
        return json.loads(self.broadcast(name, json.dumps(value, allow_nan=False).encode()))

    def all(self, name: str, own: bool) -> bool:
        """Whether something is so on every rank: a call of all ranks."""
        said = self.gather_json(name, own)
        return bool(self.broadcast_json(name, None if said is None else all(said)))

    def send_block(self, rank: int, block: np.ndarray) -> None:
        """Send bytes to a rank that takes them with `receive_block`; of a call that `check_call` announced."""
        with self._peer(rank, "block") as channel:
            channel.send_block(block)

    def receive_block(self, rank: int, block: np.ndarray) -> None:
        """Fill `block`, an array of bytes. Sees meanwhile when any other rank goes."""
        if not self.rank:
            self._ready([rank], "block")
        with self._peer(rank, "block") as channel:
            frame = channel.receive_block(block)
        if frame is not None:
            self._check(rank, "block", 0, frame)

    def check_call(self, call: str) -> None:
        """Raise unless every rank is about to make the same `call` with arrays of the same kind."""
        said = self.gather("call", call.encode(), _MAX_TEXT)
        if said is not None and len(set(said)) > 1:
            calls = [escape(each.decode("utf-8", "replace")) for each in said]
            self._fail(DistributedError(f"the ranks make different calls: {_by_rank(calls)}", where=self.where()))
        self.broadcast("call", b"", 0)

    # The end

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks, as far as they still listen, that this one ends by `error`."""
        if isinstance(error, PeerGoneError):
            return  # rank 0 has told them, or is gone
        self.is_ending = True
        what = error.what if isinstance(error, GenesisError) else f"{type(error).__name__}: {error}"
        where = error.where if isinstance(error, GenesisError) else ""
        self._tell(self.rank, what or type(error).__name__, where or self.where())
        if not isinstance(error, GenesisError) or not self.rank:
            return
        until = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(EOFError, OSError, Late, ValueError, KeyError):
            channel = self._channels[0]
            while (left := until - time.monotonic()) > 0:
                channel.set_limit(left)
                kind, _name, payload = channel.receive()
                if kind == FAILURE:
                    said = json.loads(payload)
                    # rank 0 ends by the same error, and so reports it
                    error.is_echo |= bool(said["rank"] == 0 and said["what"] == what[:_MAX_WHAT])
                    return

    def close(self) -> None:
        """Wait until all ranks are done, and close the connections."""
        if self._channels:
            with self.during(self.phase or "the end"):
                self.gather("close", b"", 0)
                self.is_ending = True  # from here on connections close
                self.broadcast("close", b"", 0)
        self.abort()

    def abort(self) -> None:
        """Close the connections without a word: others see this rank as gone."""
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
                self.tell(error)
        finally:
            self.abort()

    # Faults

    def closed(self, events: int) -> int | None:
        """A rank whose connection is closed, as `poll` says by these events; reads nothing, and runs in any thread."""
        try:
            return next(iter(_polled(dict(self._channels), events, 0)), None)
        except (OSError, ValueError):  # it is being closed here
            return None

    def see_gone(self, rank: int) -> None:
        """Raise what the rank said before its connection closed, if it did."""
        if not self.is_ending:
            self._gone(rank)

    def _ready(self, wanted: Sequence[int], name: str, until: float = 0.0) -> list[int]:
        """Those of `wanted` from which something has come; raises where none comes in time or any rank goes."""
        until = until or time.monotonic() + self._patience()
        watched = dict(self._channels)
        while True:
            ready = _polled(watched, select.POLLIN, until - time.monotonic())
            if not ready:
                self._late(wanted, name)
            if found := [rank for rank in ready if rank in wanted]:
                return found
            for rank in ready:
                if watched.pop(rank).is_ending():
                    self._gone(rank)

    def _patience(self) -> float:
        # Rank 0 finds out first who is late, and tells the others.
        return self.limit_s + (min(_MARGIN_S, self.limit_s) if self.rank else 0.0)

    def _send(self, rank: int, name: str, data: bytes) -> None:
        with self._peer(rank, name) as channel:
            channel.send(name, data)

    def _receive(self, rank: int, name: str, most: int) -> bytes:
        with self._peer(rank, name) as channel:
            frame = channel.receive(max(most, _MAX_TEXT))
        return self._check(rank, name, most, frame)

    def _check(self, rank: int, name: str, most: int, frame: Frame) -> bytes:
        """The payload of a frame that is the one expected."""
        kind, said, payload = frame
        if kind == FAILURE:
            self._told(payload)
        if said != name or len(payload) > most:
            what = f"rank {rank} is at {escape(said)!r}, and rank {self.rank} at {name!r}"
            self._fail(DistributedError(what, where=self.where(), next="report it as a bug in Genesis"))
        return payload

    @contextlib.contextmanager
    def _peer(self, rank: int, name: str) -> Iterator[Channel]:
        """The connection to a rank, within the limit. What goes wrong with it is the error that names the rank."""
        try:
            channel = self._channels[rank]
            channel.set_limit(self._patience())
            yield channel
        except Late:
            self._late([rank], name)
        except (EOFError, OSError):
            self._gone(rank)

    def where(self) -> str:
        """What the ranks are doing, for errors."""
        return ", ".join([*([self.phase] if self.phase else []), f"step {self.step}"])

    def _late(self, ranks: Sequence[int], name: str) -> None:
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        what = f"{who} did not answer rank {self.rank} within {self.limit_s:.3g} s, at {name!r}"
        next = f"see what holds {who} up: py-spy dump --pid, or a stopped process"
        self._fail(DistributedError(what, where=self.where(), next=next))

    def _gone(self, rank: int) -> None:
        """A closed connection: by what the rank has said last, if anything, or without a word."""
        self.is_ending = True
        channel = self._channels[rank]
        with contextlib.suppress(EOFError, OSError, Late):  # what a failed send does not read
            channel.set_limit(_FAREWELL_S)
            for _ in range(4):
                kind, _name, payload = channel.receive(_MAX_TEXT)
                if kind == FAILURE:
                    self._told(payload)
        self._lost(rank, f"rank {rank} is gone: its connection closed without a word", self.where())

    def _told(self, payload: bytes) -> None:
        """A rank has said that one fails, itself or another."""
        try:
            said = json.loads(payload)
            rank, what, where = int(said["rank"]), str(said["what"]), str(said["where"])
        except (ValueError, KeyError, TypeError):
            rank, what, where = -1, "a rank failed and said nothing that can be read", ""
        self._lost(rank, what, where)

    def _lost(self, rank: int, what: str, where: str) -> None:
        self.is_ending = True
        if not self.rank:
            self._tell(rank, what, where)
        told = what if what.startswith("rank ") else f"rank {rank} failed: {what}"
        next = f"see what rank {rank} printed, and the system's log: a rank without a word was killed"
        raise PeerGoneError(escape(told), rank=rank, phase=self.phase, where=escape(where), next=next)

    def _fail(self, error: DistributedError) -> None:
        self.is_ending = True
        self._tell(self.rank, error.what, error.where)
        raise error

    def _tell(self, rank: int, what: str, where: str) -> None:
        payload = json.dumps({"rank": rank, "what": what[:_MAX_WHAT], "where": where[:100]}).encode()
        for channel in self._channels.values():
            with contextlib.suppress(OSError, Late):
                channel.set_limit(_FAREWELL_S)
                channel.send("failure", payload, FAILURE)


def _polled(channels: Mapping[int, Channel], events: int, seconds: float) -> list[int]:
    """The ranks at whose connections such an event comes within `seconds`."""
    waiting = select.poll()  # a selector would take longer than the message
    ranks = {channel.fileno(): rank for rank, channel in channels.items()}
    for descriptor in ranks:
        waiting.register(descriptor, events)
    return [ranks[descriptor] for descriptor, _ in waiting.poll(max(0, math.ceil(seconds * 1000)))]


def _by_rank(values: Sequence[Any]) -> str:
    """ "rank 1 has b, all others a": which ranks have which value, the most common one last."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, those in sorted(ranks.items(), key=lambda item: len(item[1])):
        shown = ", ".join(map(str, those[:8])) + (" and more" if len(those) > 8 else "")
        parts.append(f"{'rank' if len(those) == 1 else 'ranks'} {shown}: {escape(str(value)[:200])}")
    return "; ".join(parts)
