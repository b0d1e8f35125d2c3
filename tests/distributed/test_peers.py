"""The control plane: rendezvous, agreement, and every way in which a rank can be missing, wrong or gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genesis.distributed import Peers
from genesis.errors import DistributedError, OutOfMemoryError
from tests.distributed.forks import KEY, VERSION, Fork, ended, fork, free_port, run_ranks, start_ranks, world
from tests.distributed.pairs import pairs

LISTEN = "0A"


def test_ranks_talk(tmp_path: Path) -> None:
    """Four processes gather, broadcast, compare and agree; a signal of one is known to all."""

    def work(peers: Peers) -> Any:
        peers.compare({"config": "abc", "data": "def"})
        gathered = peers.gather_json("names", {"rank": peers.rank})
        said = peers.broadcast_json("names", gathered)
        large = peers.broadcast("large", b"x" * 3_000_000 if peers.rank == 0 else b"")
        stops = [peers.agree(15 if (peers.rank, step) == (2, 3) else 0, step) for step in range(5)]
        return [said, len(large), stops]

    expected = [[{"rank": rank} for rank in range(4)], 3_000_000, [0, 0, 0, 15, 0]]
    assert [(each.code, each.value) for each in run_ranks(4, work, tmp_path)] == [(0, expected)] * 4


def test_one_rank_needs_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    with Peers.connect(world(0, 1, 0), KEY, version=VERSION) as peers:
        peers.compare({"config": "abc"})
        assert peers.agree(15, 3) == 15
        assert peers.gather("name", b"x") == [b"x"] and peers.broadcast("name", b"x") == b"x"


def test_threads_over_pairs() -> None:
    """Ranks in threads of one process, over pairs of sockets, are the same ranks."""
    stops: dict[int, int] = {}

    def work(peers: Peers) -> None:
        with peers:
            stops[peers.rank] = peers.agree(peers.rank, 1)

    threads = [threading.Thread(target=work, args=(peers,)) for peers in pairs(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert stops == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("fact", ["config", "data", "version"])
def test_ranks_that_differ(fact: str, tmp_path: Path) -> None:
    """Every rank says what differs, and on which ranks."""

    def work(peers: Peers) -> None:
        peers.compare({"version": "1", "config": "2", "data": "3", fact: "bb" if peers.rank == 1 else "aa"})

    for each in run_ranks(3, work, tmp_path):
        assert each.code == 3
        assert each.error["what"] == f"the ranks differ in {fact}: rank 1: bb; ranks 0, 2: aa"


def test_ranks_at_different_steps(tmp_path: Path) -> None:
    for each in run_ranks(2, lambda peers: peers.agree(0, 7 + peers.rank), tmp_path):
        assert each.code == 10 and "the ranks are at different steps: rank 0: 7; rank 1: 8" in each.error["what"]


def test_ranks_at_different_calls(tmp_path: Path) -> None:
    def work(peers: Peers) -> None:
        peers.barrier("save" if peers.rank else "step")

    for each in run_ranks(2, work, tmp_path):
        assert each.code == 10 and "rank 1 is at 'save', and rank 0 at 'step'" in each.error["what"]


def joined(rank: int, size: int, port: int, key: bytes = KEY, version: str = VERSION, limit_s: float = 10.0) -> Any:
    def run() -> None:
        Peers.connect(world(rank, size, port), key, version=version, limit_s=limit_s).close()

    return run


def rendezvous(folder: Path, *ranks: Callable[[], Any]) -> list[Fork]:
    return ended([fork(rank, folder / f"{number}.json") for number, rank in enumerate(ranks)])


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """All that came say which one did not, within the limit."""
    port = free_port()
    for each in rendezvous(tmp_path, joined(0, 3, port, limit_s=1.0), joined(2, 3, port)):
        assert each.code == 10 and each.seconds < 3.5
        assert "rank 1 of 3 did not join" in each.error["what"]


def test_no_rank_0(tmp_path: Path) -> None:
    (only,) = rendezvous(tmp_path, joined(1, 2, free_port(), limit_s=0.5))
    assert only.code == 10 and "did not reach rank 0" in only.error["what"]


def test_another_key_is_turned_away(tmp_path: Path) -> None:
    """It learns why, and the job goes on without it."""
    port = free_port()
    first, second, stranger = rendezvous(
        tmp_path, joined(0, 2, port), _later(joined(1, 2, port)), joined(1, 2, port, key=b"another job's")
    )
    assert (first.code, second.code, stranger.code) == (0, 0, 10)
    assert "different key" in stranger.error["what"] and "MASTER_PORT" in stranger.error["next"]


def test_ranks_that_do_not_fit(tmp_path: Path) -> None:
    """Another release and another size: both sides say so; the code is that of a wrong configuration."""
    port = free_port()
    for each in rendezvous(tmp_path, joined(0, 2, port), joined(1, 2, port, version="1.2.4")):
        assert each.code == 3 and "rank 1 runs Genesis 1.2.4, and rank 0 runs 1.2.3" in each.error["what"]
    port = free_port()
    for each in rendezvous(tmp_path, joined(0, 3, port), joined(1, 2, port)):
        assert each.code == 3 and "rank 1 expects 2 ranks, and rank 0 expects 3" in each.error["what"]


@pytest.mark.parametrize("rank", ["1", 1.5, None, [1], 0, 2, -1])
def test_a_rank_that_is_no_rank_of_the_job(rank: Any) -> None:
    from unittest import mock

    from genesis.distributed.rendezvous import _Host

    room = mock.Mock(spec=_Host, _world=world(0, 2, 1), _version=VERSION, _joined={}, _processes={})
    hello = {"rank": rank, "size": 2, "version": VERSION, "pid": 7, "host": "there"}
    with pytest.raises(DistributedError, match="the process 7 on there has the invalid rank"):
        _Host._accept(room, mock.Mock(), hello)
    assert not room._joined


def test_a_rank_that_is_there_twice(tmp_path: Path) -> None:
    port = free_port()
    for each in rendezvous(tmp_path, joined(0, 3, port), joined(1, 3, port), joined(1, 3, port)):
        assert each.code == 10 and "has the same rank 1 as" in each.error["what"]


def test_strangers_hold_nobody_up(tmp_path: Path) -> None:
    """Connections that say nothing, or nonsense, while the ranks come."""
    port = free_port()
    first = fork(joined(0, 2, port), tmp_path / "0.json")
    strangers = []
    try:
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x04abcd"):
            strangers.append(_connected(port))
            strangers[-1].sendall(text)
        second = fork(joined(1, 2, port), tmp_path / "1.json")
        assert [each.code for each in ended([first, second], within=4.0)] == [0, 0]
    finally:
        for each in strangers:
            each.close()


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (only,) = rendezvous(tmp_path, joined(0, 2, other.getsockname()[1]))
    assert only.code == 10 and "cannot listen on 127.0.0.1" in only.error["what"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")
def test_only_loopback_listens_and_not_for_long(tmp_path: Path) -> None:
    """While it waits, rank 0 listens on loopback; once all have come, nobody listens on the port."""
    port = free_port()
    done = tmp_path / "done"

    def stay() -> None:
        with Peers.connect(world(0, 2, port), KEY, version=VERSION, limit_s=10) as peers:
            peers.barrier()
            while not done.exists():
                time.sleep(0.01)

    def come() -> None:
        with Peers.connect(world(1, 2, port), KEY, version=VERSION, limit_s=10) as peers:
            peers.barrier()

    first = fork(stay, tmp_path / "0.json")
    _connected(port).close()
    assert _listeners(port) == {"0100007F"}
    second = fork(come, tmp_path / "1.json")
    until = time.monotonic() + 5
    while _listeners(port) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _listeners(port)
    done.touch()
    assert [each.code for each in ended([first, second])] == [0, 0]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("end", [signal.SIGKILL, "exit"])
def test_a_rank_that_goes(victim: int, end: signal.Signals | str, tmp_path: Path) -> None:
    """Killed, or gone with 0 too early: all others know within a moment which one it was, and where."""

    def work(peers: Peers) -> None:
        with peers.during("evaluation"):
            peers.agree(0, 11)
            if peers.rank == victim:
                time.sleep(0.1)
                os._exit(0) if end == "exit" else os.kill(os.getpid(), signal.SIGKILL)
            peers.agree(0, 12)

    forks = run_ranks(3, work, tmp_path)
    assert forks[victim].code == (0 if end == "exit" else -9)
    for each in forks[:victim] + forks[victim + 1 :]:
        assert each.code == 10 and each.error["kind"] == "PeerGoneError" and each.error["rank"] == victim
        assert each.error["what"] == f"rank {victim} is gone: its connection closed without a message"
        assert each.error["where"] == "evaluation, step 11" and each.seconds < 2


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_fails(victim: int, tmp_path: Path) -> None:
    """Its own code for itself; for the others 10, with what it said."""

    def work(peers: Peers) -> None:
        peers.agree(0, 3)
        if peers.rank == victim:
            raise OutOfMemoryError("no room for 3 GiB")
        peers.agree(0, 4)

    forks = run_ranks(3, work, tmp_path)
    for rank, each in enumerate(forks):
        assert each.code == (7 if rank == victim else 10)
        assert rank == victim or each.error["what"] == f"rank {victim} failed: no room for 3 GiB"


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped(victim: int, tmp_path: Path) -> None:
    """SIGSTOP: the others give up at the limit, and name it and the call."""

    def work(peers: Peers) -> None:
        peers.agree(0, 1)
        if peers.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        peers.agree(0, 2)

    forks = start_ranks(3, work, tmp_path, limit_s=0.5)
    others = forks[:victim] + forks[victim + 1 :]
    for each in ended(others):
        assert each.code == 10 and each.seconds < 5
        assert f"rank {victim} did not answer rank" in each.error["what"] and "'agree'" in each.error["what"]
    forks[victim].kill(signal.SIGKILL)
    ended([forks[victim]])


def test_a_rank_stopped_in_the_middle_of_a_message() -> None:
    """The rest of a large message does not come; the wait ends at the limit."""
    first, second = pairs(2, limit_s=0.3)
    os.write(second._channels[0].connection.fileno(), (1000).to_bytes(4, "big") + b"\x00\x05agree")
    began = time.monotonic()
    with pytest.raises(DistributedError, match="rank 1 did not answer"):
        first.agree(0, 1)
    assert time.monotonic() - began < 3
    first.abort()
    second.abort()


def test_limits_of_size() -> None:
    """A message that claims to be larger than its call allows takes no memory."""
    first, second = pairs(2, limit_s=1.0)
    os.write(second._channels[0].connection.fileno(), b"\xff\xff\xff\xff" + (1 << 60).to_bytes(8, "big"))
    with pytest.raises(DistributedError):
        first.gather("name", b"", 100)
    first.abort()
    second.abort()


def _later(run: Callable[[], Any]) -> Callable[[], Any]:
    def wait() -> Any:
        time.sleep(0.5)
        return run()

    return wait


def _connected(port: int) -> socket.socket:
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _listeners(port: int) -> set[str]:
    """The addresses on which somebody listens on `port`, in hexadecimal as /proc has them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, number = local.partition(":")
                if state == LISTEN and int(number, 16) == port:
                    found.add(address)
    return found
