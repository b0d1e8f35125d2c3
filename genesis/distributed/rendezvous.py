"""How ranks find each other: all connect to rank 0, prove that they know the job's key, and wait until all have come.

Rank 0 listens on the master address alone (loopback on one host), and only until then. Who does not know the key is
turned away and changes nothing; who knows it and does not fit (another size or release, a rank that is there already)
ends the job on every rank with the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge, wait
from typing import Any

from genesis.distributed.channel import FAILURE, Channel, Late
from genesis.distributed.environment import JOB_KEY, World
from genesis.errors import ConfigError, DistributedError, GenesisError, InterruptedRun, PeerGoneError, escape

_HANDSHAKE_S = 5.0
_MARGIN_S = 2.0
_TURN_S = 0.02
_RETRY_S = 0.05
_MAX_HELLO = 8192
_MAX_WAITING = 64  # connections in their handshake at one time
_KINDS: dict[str, type[GenesisError]] = {each.__name__: each for each in (ConfigError, DistributedError, PeerGoneError)}


def connect(world: World, key: bytes, *, version: str, limit_s: float) -> list[Channel]:
    """The channels of this rank, once all ranks of `world` have come: on rank 0 to all others, elsewhere to rank 0.

    Only ranks of this job know the `key`. `version` is the release of Genesis, the same on all ranks.

    Raises:
        ConfigError: ranks of different releases or sizes. DistributedError: ranks are missing, twice there or gone,
            the key is wrong, or the address cannot be used.
    """
    if world.size == 1:
        return []
    until = time.monotonic() + limit_s
    if world.rank:
        return [_join(world, key, version, until, limit_s)]
    with listen(world) as listener:
        channels = _Door(world, key, version, listener).gather(until, limit_s)
    if world.have_met is not None:
        with contextlib.suppress(OSError):
            os.write(world.have_met, b"1")
        os.close(world.have_met)
    return channels


def listen(world: World) -> socket.socket:
    """The socket on which rank 0 waits for the others: our launcher's, or one on the master address alone."""
    try:
        if world.listener is not None:
            handed = socket.socket(fileno=world.listener)
            handed.set_inheritable(False)
            return handed
        ((family, _, _, _, address), *_) = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(min(world.size, 1024))
        except OSError:
            listener.close()
            raise
    except OSError as error:
        what = f"rank 0 cannot listen on {_named(world)}: {error.strerror or error}"
        next = "set MASTER_PORT to a free port and MASTER_ADDR to an address of rank 0's host, on every rank"
        raise DistributedError(what, where="rendezvous", next=next) from error
    return listener


class _Door:
    """Rank 0's side: lets in the ranks of this job, each once."""

    def __init__(self, world: World, key: bytes, version: str, listener: socket.socket) -> None:
        self._world, self._key, self._version, self._listener = world, key, version, listener
        self._there: dict[int, Channel] = {}
        self._from: dict[int, str] = {}
        self._came: queue.SimpleQueue[tuple[Channel, dict[str, Any]]] = queue.SimpleQueue()
        self._handshakes = threading.Semaphore(_MAX_WAITING)
        self._refused: list[str] = []
        self._is_shut = False

    def gather(self, until: float, limit_s: float) -> list[Channel]:
        """Wait for all ranks, and tell them that all are there."""
        try:
            while len(self._there) < self._world.size - 1:
                if time.monotonic() >= until:
                    raise self._missing(limit_s)
                self._turn()
            for rank, channel in self._there.items():
                try:
                    channel.send("welcome")
                except (OSError, Late) as error:
                    raise _gone(rank) from error
        except GenesisError as error:
            for channel in self._there.values():
                _tell(channel, error)
            raise
        finally:
            self._is_shut = True
            self._turn_away()
        return [self._there[rank] for rank in sorted(self._there)]

    def _turn(self) -> None:
        ready = wait([self._listener, *(channel.connection for channel in self._there.values())], _TURN_S)
        for rank, channel in self._there.items():
            if channel.connection in ready:  # it has nothing to say now
                raise _gone(rank)
        if self._listener in ready and self._handshakes.acquire(blocking=False):
            try:
                sock, address = self._listener.accept()
            except OSError as error:  # it went again, or there are no descriptors left
                self._handshakes.release()
                self._refused.append(f"a connection was not accepted: {error.strerror or error}")
                time.sleep(_TURN_S)
                return
            threading.Thread(target=self._shake, args=(sock, str(address[0])), daemon=True).start()
        with contextlib.suppress(queue.Empty):
            self._let_in(*self._came.get_nowait())

    def _shake(self, sock: socket.socket, host: str) -> None:
        """Learn who connected, in a thread of its own: one who stays silent holds nobody up."""
        try:
            with sock:
                channel = Channel(sock)
            try:
                channel.set_limit(_HANDSHAKE_S)
                deliver_challenge(channel.connection, self._key)
                answer_challenge(channel.connection, self._key)
                _, _, hello = channel.receive(_MAX_HELLO)
                self._came.put((channel, {**json.loads(hello), "host": host}))
                if self._is_shut:
                    self._turn_away()
            except Exception:
                channel.close()
                raise
        except AuthenticationError:
            self._refused.append(f"{host} does not know the job's key")
        except Exception:  # whatever a stranger sends
            self._refused.append(f"{host} does not speak as a rank does")
        finally:
            self._handshakes.release()

    def _let_in(self, channel: Channel, hello: dict[str, Any]) -> None:
        who = f"the process {hello.get('pid')} on {escape(hello['host'])}"
        rank, size, version = hello.get("rank"), hello.get("size"), hello.get("version")
        error: GenesisError | None = None
        next = "give every rank the variables of one launcher"
        if version != self._version:
            what = f"rank {rank} is Genesis {escape(version)}, rank 0 is {self._version}"
            error = ConfigError(what, where="rendezvous", next="install the same release for every rank")
        elif size != self._world.size:
            what = f"rank {rank} was told of {size} ranks, rank 0 of {self._world.size}"
            error = ConfigError(what, where="rendezvous", next=next)
        elif not isinstance(rank, int) or not 0 < rank < self._world.size:
            error = DistributedError(f"{who} says that it is rank {escape(rank)}", where="rendezvous", next=next)
        elif rank in self._there:
            what = f"{who} says that it is rank {rank}, and so does {self._from[rank]}"
            error = DistributedError(what, where="rendezvous", next=next)
        if error is not None:
            _tell(channel, error)
            raise error
        channel.rank = rank  # type: ignore[assignment]
        self._there[channel.rank], self._from[channel.rank] = channel, who

    def _missing(self, limit_s: float) -> DistributedError:
        missing = [rank for rank in range(1, self._world.size) if rank not in self._there]
        shown = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
        what = f"{'rank' if len(missing) == 1 else 'ranks'} {shown} of {self._world.size} did not come within "
        what += f"{limit_s:g} s to {_named(self._world)}"
        what += "".join(f"\n{each}" for each in dict.fromkeys(self._refused[:8]))
        next = "see what those ranks printed, and whether their hosts reach that address"
        return DistributedError(what, where="rendezvous", next=next)

    def _turn_away(self) -> None:
        """Close what came too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._came.get_nowait()[0].close()


def _join(world: World, key: bytes, version: str, until: float, limit_s: float) -> Channel:
    """The channel to rank 0, once it says that all are there."""
    channel = _reach(world, until, limit_s)
    try:
        channel.set_limit(max(1.0, until - time.monotonic()) + _MARGIN_S)
        answer_challenge(channel.connection, key)
        deliver_challenge(channel.connection, key)
        hello = {"rank": world.rank, "size": world.size, "version": version, "pid": os.getpid()}
        channel.send("hello", json.dumps(hello).encode())
        kind, _, payload = channel.receive(_MAX_HELLO)
        if kind == FAILURE:
            error = _told(payload)
            error.is_echo = world.launcher is not None  # rank 0 says the same to the same people
            raise error
    except AuthenticationError as error:
        channel.close()
        what = f"{_named(world)} holds another job: it does not know the key of rank {world.rank}"
        next = f"set another MASTER_PORT for one of the two jobs, or the same {JOB_KEY} on every rank of one"
        raise DistributedError(what, where="rendezvous", next=next) from error
    except (AssertionError, EOFError, OSError, Late) as error:
        channel.close()
        if isinstance(error, Late | BlockingIOError):
            what = f"rank 0 did not answer at {_named(world)} within {limit_s:g} s"
            raise DistributedError(what, where="rendezvous", next="see what rank 0 printed") from error
        raise _gone(0) from error
    except GenesisError:
        channel.close()
        raise
    return channel


def _reach(world: World, until: float, limit_s: float) -> Channel:
    """A connection to rank 0, which may not listen yet."""
    while True:
        try:
            sock = socket.create_connection((world.address, world.port), max(1.0, until - time.monotonic()))
            sock.settimeout(None)
            return Channel(sock, 0)
        except OSError as error:
            # Our launcher listens before it starts a rank: where nobody does, rank 0 is no more.
            if world.launcher is not None and isinstance(error, ConnectionRefusedError):
                raise _gone(0) from error
            if time.monotonic() + _RETRY_S > until:
                what = f"rank {world.rank} does not reach rank 0 at {_named(world)} within {limit_s:g} s: "
                what += str(error.strerror or error)
                next = "see whether rank 0 runs there; MASTER_ADDR and MASTER_PORT say where"
                raise DistributedError(what, where="rendezvous", next=next) from error
        time.sleep(_RETRY_S)


def _named(world: World) -> str:
    return f"{escape(world.address)}:{world.port}"


def _gone(rank: int) -> PeerGoneError:
    what = f"rank {rank} went before all had come"
    next = f"see what rank {rank} printed, and the system's log: a rank without a word was killed"
    return PeerGoneError(what, rank=rank, phase="rendezvous", where="rendezvous", next=next)


def _tell(channel: Channel, error: GenesisError) -> None:
    """Say why the job ends here; a rank that is interrupted just goes."""
    if not isinstance(error, InterruptedRun):
        kind = type(error).__name__ if type(error).__name__ in _KINDS else DistributedError.__name__
        said = {"kind": kind, "what": error.what[:400], "next": error.next[:200], "rank": getattr(error, "rank", 0)}
        with contextlib.suppress(OSError, Late):
            channel.set_limit(1.0)
            channel.send("failure", json.dumps(said).encode(), FAILURE)
    channel.close()


def _told(payload: bytes) -> GenesisError:
    try:
        said = json.loads(payload)
        if said["kind"] == PeerGoneError.__name__:
            return _gone(int(said["rank"]))
        return _KINDS[said["kind"]](str(said["what"]), where="rendezvous", next=str(said["next"]))
    except (ValueError, KeyError, TypeError):
        return _gone(0)
