"""Rendezvous: all ranks connect to rank 0, prove that they know the job's key, and wait until all have joined.

Rank 0 listens on the master address only (loopback on one host) and only until all have joined. A process without the
key is rejected without an effect. A process with the key that does not fit (a different size or release, or a rank that
has already joined) ends the job on every rank with the same error.
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
_POLL_S = 0.02
_RETRY_S = 0.05
_MAX_HELLO = 8192
_MAX_WAITING = 64  # maximum number of concurrent handshakes
_KINDS: dict[str, type[GenesisError]] = {each.__name__: each for each in (ConfigError, DistributedError, PeerGoneError)}


def connect(world: World, key: bytes, *, version: str, limit_s: float) -> list[Channel]:
    """Wait until all ranks of `world` have joined, and return the channels: rank 0's to all others, others' to rank 0.

    `key` is the secret of the job. `version` is the release of Genesis, which must be the same on all ranks.

    Raises:
        ConfigError: if ranks have different releases or sizes.
        DistributedError: if ranks are missing, duplicated or gone, the key is wrong, or the address is not usable.
    """
    if world.size == 1:
        return []
    until = time.monotonic() + limit_s
    if world.rank:
        return [_join(world, key, version, until, limit_s)]
    with listen(world) as listener:
        channels = _Host(world, key, version, listener).gather(until, limit_s)
    if world.have_met is not None:
        with contextlib.suppress(OSError):
            os.write(world.have_met, b"1")
        os.close(world.have_met)
    return channels


def listen(world: World) -> socket.socket:
    """Return the listening socket of rank 0: our launcher's, or a new one on the master address."""
    try:
        if world.listener is not None:
            inherited = socket.socket(fileno=world.listener)
            inherited.set_inheritable(False)
            return inherited
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
        what = f"rank 0 cannot listen on {_address_text(world)}: {error.strerror or error}"
        next = "set MASTER_PORT to a free port, and MASTER_ADDR to an address of rank 0's host"
        raise DistributedError(what, where="rendezvous", next=next) from error
    return listener


class _Host:
    """Rank 0's side: accepts each rank of this job once."""

    def __init__(self, world: World, key: bytes, version: str, listener: socket.socket) -> None:
        self._world, self._key, self._version, self._listener = world, key, version, listener
        self._joined: dict[int, Channel] = {}
        self._processes: dict[int, str] = {}  # the process of each joined rank, for errors
        self._authenticated: queue.SimpleQueue[tuple[Channel, dict[str, Any]]] = queue.SimpleQueue()
        self._handshakes = threading.Semaphore(_MAX_WAITING)
        self._rejected: list[str] = []
        self._is_closed = False

    def gather(self, until: float, limit_s: float) -> list[Channel]:
        """Wait for all ranks, send each a welcome, and return their channels in rank order."""
        try:
            while len(self._joined) < self._world.size - 1:
                if time.monotonic() >= until:
                    raise self._missing(limit_s)
                self._poll()
            for rank, channel in self._joined.items():
                try:
                    channel.send("welcome")
                except (OSError, Late) as error:
                    raise _gone_error(rank) from error
        except GenesisError as error:
            for channel in self._joined.values():
                _send_failure(channel, error)
            raise
        finally:
            self._is_closed = True
            self._close_unused()
        return [self._joined[rank] for rank in sorted(self._joined)]

    def _poll(self) -> None:
        ready = wait([self._listener, *(channel.connection for channel in self._joined.values())], _POLL_S)
        for rank, channel in self._joined.items():
            if channel.connection in ready:  # a joined rank sends nothing now, so its connection has closed
                raise _gone_error(rank)
        if self._listener in ready and self._handshakes.acquire(blocking=False):
            try:
                sock, address = self._listener.accept()
            except OSError as error:  # the peer has closed it, or no descriptors are left
                self._handshakes.release()
                self._rejected.append(f"a connection was not accepted: {error.strerror or error}")
                time.sleep(_POLL_S)
                return
            threading.Thread(target=self._authenticate, args=(sock, str(address[0])), daemon=True).start()
        with contextlib.suppress(queue.Empty):
            self._accept(*self._authenticated.get_nowait())

    def _authenticate(self, sock: socket.socket, host: str) -> None:
        """Run the handshake of one connection. It has its own thread, so that a silent peer blocks no other."""
        try:
            with sock:
                channel = Channel(sock)
            try:
                channel.set_limit(_HANDSHAKE_S)
                deliver_challenge(channel.connection, self._key)
                answer_challenge(channel.connection, self._key)
                _, _, hello = channel.receive(_MAX_HELLO)
                self._authenticated.put((channel, {**json.loads(hello), "host": host}))
                if self._is_closed:
                    self._close_unused()
            except Exception:
                channel.close()
                raise
        except AuthenticationError:
            self._rejected.append(f"{host} does not know the job's key")
        except Exception:  # a stranger may send anything
            self._rejected.append(f"{host} does not use the protocol of ranks")
        finally:
            self._handshakes.release()

    def _accept(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Add a rank to the job, or raise the error that ends the job."""
        process = f"the process {hello.get('pid')} on {escape(hello['host'])}"
        # The process knows the key, so a mismatch is a mistake in the job and ends it.
        rank, size, version = hello.get("rank"), hello.get("size"), hello.get("version")
        error: GenesisError | None = None
        next = "give every rank the variables of one launcher"
        if version != self._version:
            what = f"rank {rank} runs Genesis {escape(version)}, and rank 0 runs {self._version}"
            error = ConfigError(what, where="rendezvous", next="install the same release for every rank")
        elif size != self._world.size:
            what = f"rank {rank} expects {size} ranks, and rank 0 expects {self._world.size}"
            error = ConfigError(what, where="rendezvous", next=next)
        elif not isinstance(rank, int) or not 0 < rank < self._world.size:
            what = f"{process} has the invalid rank {escape(rank)}"
            error = DistributedError(what, where="rendezvous", next=next)
        elif rank in self._joined:
            what = f"{process} has the same rank {rank} as {self._processes[rank]}"
            error = DistributedError(what, where="rendezvous", next=next)
        if error is not None:
            _send_failure(channel, error)
            raise error
        channel.rank = rank  # type: ignore[assignment]
        self._joined[channel.rank], self._processes[channel.rank] = channel, process

    def _missing(self, limit_s: float) -> DistributedError:
        missing = [rank for rank in range(1, self._world.size) if rank not in self._joined]
        shown = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
        what = f"{'rank' if len(missing) == 1 else 'ranks'} {shown} of {self._world.size} did not join "
        what += f"{_address_text(self._world)} within {limit_s:g} s"
        what += "".join(f"\n{each}" for each in dict.fromkeys(self._rejected[:8]))
        next = "read the output of those ranks, and check that their hosts reach that address"
        return DistributedError(what, where="rendezvous", next=next)

    def _close_unused(self) -> None:
        """Close the connections that were authenticated too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._authenticated.get_nowait()[0].close()


def _join(world: World, key: bytes, version: str, until: float, limit_s: float) -> Channel:
    """Join rank 0, and return the channel to it after its welcome."""
    channel = _reach(world, until, limit_s)
    try:
        # Prove that both sides know the key, introduce this rank, and wait for the welcome.
        channel.set_limit(max(1.0, until - time.monotonic()) + _MARGIN_S)
        answer_challenge(channel.connection, key)
        deliver_challenge(channel.connection, key)
        hello = {"rank": world.rank, "size": world.size, "version": version, "pid": os.getpid()}
        channel.send("hello", json.dumps(hello).encode())
        kind, _, payload = channel.receive(_MAX_HELLO)
        if kind == FAILURE:
            error = _received_failure(payload)
            error.is_echo = world.launcher is not None  # rank 0 prints the same error on the same terminal
            raise error
    # Turn whatever went wrong into an error that names the rank and the address.
    except AuthenticationError as error:
        channel.close()
        what = f"the job at {_address_text(world)} has a different key than rank {world.rank}"
        next = f"set a different MASTER_PORT for each job, and the same {JOB_KEY} on every rank of a job"
        raise DistributedError(what, where="rendezvous", next=next) from error
    except (AssertionError, EOFError, OSError, Late) as error:
        channel.close()
        if isinstance(error, Late | BlockingIOError):
            what = f"rank 0 did not answer at {_address_text(world)} within {limit_s:g} s"
            raise DistributedError(what, where="rendezvous", next="read the output of rank 0") from error
        raise _gone_error(0) from error
    except GenesisError:
        channel.close()
        raise
    return channel


def _reach(world: World, until: float, limit_s: float) -> Channel:
    """Connect to rank 0, with retries until it listens."""
    while True:
        try:
            sock = socket.create_connection((world.address, world.port), max(1.0, until - time.monotonic()))
            sock.settimeout(None)
            return Channel(sock, 0)
        except OSError as error:
            # Our launcher listens before it starts a rank, so a refused connection means that rank 0 has ended.
            if world.launcher is not None and isinstance(error, ConnectionRefusedError):
                raise _gone_error(0) from error
            if time.monotonic() + _RETRY_S > until:
                what = f"rank {world.rank} did not reach rank 0 at {_address_text(world)} within {limit_s:g} s: "
                what += str(error.strerror or error)
                next = "check that rank 0 runs there, and that MASTER_ADDR and MASTER_PORT are right"
                raise DistributedError(what, where="rendezvous", next=next) from error
        time.sleep(_RETRY_S)


def _address_text(world: World) -> str:
    return f"{escape(world.address)}:{world.port}"


def _gone_error(rank: int) -> PeerGoneError:
    what = f"rank {rank} ended before all ranks had joined"
    next = f"read the output of rank {rank}; without output it was killed, see the system log"
    return PeerGoneError(what, rank=rank, phase="rendezvous", where="rendezvous", next=next)


def _send_failure(channel: Channel, error: GenesisError) -> None:
    """Send the error that ends the job, unless it is an interrupt, and close the channel."""
    if not isinstance(error, InterruptedRun):
        kind = type(error).__name__ if type(error).__name__ in _KINDS else DistributedError.__name__
        failure = {"kind": kind, "what": error.what[:400], "next": error.next[:200], "rank": getattr(error, "rank", 0)}
        with contextlib.suppress(OSError, Late):
            channel.set_limit(1.0)
            channel.send("failure", json.dumps(failure).encode(), FAILURE)
    channel.close()


def _received_failure(payload: bytes) -> GenesisError:
    try:
        failure = json.loads(payload)
        if failure["kind"] == PeerGoneError.__name__:
            return _gone_error(int(failure["rank"]))
        return _KINDS[failure["kind"]](str(failure["what"]), where="rendezvous", next=str(failure["next"]))
    except (ValueError, KeyError, TypeError):
        return _gone_error(0)
