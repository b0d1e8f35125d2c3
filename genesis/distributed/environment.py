"""A rank's identity: rank, size and master address, read from what a launcher has set. It opens no connection.

One table says which variables each launcher sets, in the order in which they are looked for. Variables that contradict
each other, or of which some are missing, are errors: a rank that guesses wrong trains another run, or waits for ever.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from genesis.errors import UsageError, escape
from genesis.files.cache import Cache, EntryWriter, user_folder

JOB_KEY = "GENESIS_JOB_KEY"
LAUNCHER = "GENESIS_LAUNCHER"  # the process id of our own launcher
LISTENER = "GENESIS_LISTENER"  # the descriptor of the socket that it hands to rank 0
HAVE_MET = "GENESIS_HAVE_MET"  # of the pipe through which rank 0 tells it that all have come
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torch's

_WHERE = "environment"
_MAX_RANKS = 1 << 16
_MAX_DIGITS = 9
_LEAST_KEY = 16


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of its job: which of how many, and which of how many on this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None  # None where the launcher does not say
    address: str  # where rank 0 listens
    port: int
    source: str  # who started the ranks, for people
    launcher: int | None = None  # the process id of our own launcher
    listener: int | None = None  # the descriptor of the listening socket that our own launcher handed to rank 0
    have_met: int | None = None  # that of a pipe on which rank 0 tells our own launcher that all have come

    @property
    def is_on_one_host(self) -> bool:
        return self.local_size == self.size

    def __str__(self) -> str:
        if self.size == 1:
            return "ranks: 1"
        return f"ranks: {self.size} on {'one host' if self.is_on_one_host else 'several hosts'}, by {self.source}"


ALONE = World(0, 1, 0, 1, LOOPBACK, 0, "nobody")


@dataclass(frozen=True, slots=True)
class _Launcher:
    """A launcher's variables; `inside` is one that it alone sets, `local_size` and `address` are optional."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    address: str = "MASTER_ADDR"
    inside: str = ""


_TORCHRUN = _Launcher("torchrun's variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = _Launcher(
    "SLURM",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "",
    "SLURM_LAUNCH_NODE_IPADDR",
    inside="SLURM_STEP_ID",  # a batch script has SLURM_NTASKS and SLURM_PROCID as well, but is no task of a step
)
_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_LAUNCHERS = (
    _TORCHRUN,
    _SLURM,
    _Launcher("Open MPI", *_MPI),
    _Launcher("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def read_world(environ: Mapping[str, str]) -> World:
    """Who this process is, by the first launcher that has set its variables, or `ALONE`. Raises UsageError."""
    found = [(launcher, *_ranks(launcher, environ)) for launcher in _LAUNCHERS if _has_set(launcher, environ)]
    if len(found) > 1:  # a step of one task is where another launcher was called
        found = [each for each in found if each[0] is not _SLURM or each[2] > 1]
    if not found:
        return ALONE
    launcher, rank, size, local_rank = found[0]
    for theirs, their_rank, their_size, _ in found[1:]:
        # `srun torchrun` has one agent a host
        is_agent = launcher is _TORCHRUN and environ.get("GROUP_WORLD_SIZE") == str(their_size)
        if (rank, size) != (their_rank, their_size) and not is_agent:
            what = f"{launcher.rank}={rank} of {launcher.size}={size}, but {theirs.rank}={their_rank} of "
            what += f"{theirs.size}={their_size}"
            next = f"start the ranks by one launcher: unset {launcher.rank} and {launcher.size}, or "
            next += f"unset {theirs.inside}" if theirs.inside else f"unset {theirs.rank} and {theirs.size}"
            raise UsageError(what, where=_WHERE, next=next)
    local_size = _local_size(launcher, size, environ)
    if local_rank >= (local_size or size):
        what = f"{launcher.local_rank}={local_rank}, but {local_size or size} ranks are on this host"
        raise UsageError(what, where=_WHERE, next="start the ranks by one launcher, which sets both")
    if size == 1:
        return ALONE
    one_host = local_size == size
    address = LOOPBACK if one_host else _address(launcher, environ)
    started = _number(LAUNCHER, environ, 1 << 31) if LAUNCHER in environ else None
    listener, have_met = (
        _number(name, environ, 1 << 20) if started is not None and name in environ else None
        for name in (LISTENER, HAVE_MET)
    )
    source = launcher.name if started is None else "--nproc"
    port = _port(launcher, environ)
    return World(rank, size, local_rank, local_size, address, port, source, started, listener, have_met)


def rank_count(text: str, available: int) -> int:
    """How many ranks `--nproc` asks for: 1 or more, or "all" of `available` devices. Raises UsageError."""
    if text == "all":
        return available
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or not 1 <= int(text) <= _MAX_RANKS:
        what = f"--nproc {escape(text)} is no number of ranks"
        raise UsageError(what, where="command line", next=f"give a number from 1 to {_MAX_RANKS}, or all")
    return int(text)


def refuse_ranks(environ: Mapping[str, str]) -> None:
    """Raise UsageError for `--nproc` in a process that is a rank already, or whose variables are wrong."""
    world = read_world(environ)
    if world.size > 1:
        what = f"--nproc in a process that is rank {world.rank} of {world.size} already, started by {world.source}"
        raise UsageError(what, where="command line", next="leave out --nproc, or start one process without a launcher")


def job_key(world: World, environ: Mapping[str, str]) -> bytes:
    """The secret by which ranks of one job know each other: GENESIS_JOB_KEY, or on one host a secret of this user.
    Raises UsageError for several hosts without the variable, or one that is too short.
    """
    given = environ.get(JOB_KEY)
    if given is not None and len(given) < _LEAST_KEY:
        what = f"{JOB_KEY} has {len(given)} characters, and at least {_LEAST_KEY} are needed"
        raise UsageError(what, where=_WHERE, next=f"set the same on every host: {JOB_KEY}=$(openssl rand -hex 32)")
    if given is not None:
        return given.encode("utf-8", "surrogateescape")
    if world.launcher is not None:
        what = f"{LAUNCHER} is set, but not {JOB_KEY}"
        raise UsageError(what, where=_WHERE, next=f"unset {LAUNCHER}: only genesis train --nproc sets both")
    if not world.is_on_one_host:
        what = f"{world.size} ranks on several hosts need a key in {JOB_KEY}, without which anybody could join"
        raise UsageError(what, where=_WHERE, next=f"set the same on every host: {JOB_KEY}=$(openssl rand -hex 32)")

    def make(writer: EntryWriter) -> None:
        writer.write("key", secrets.token_bytes(32))

    kept = Cache.of_user(user_folder("ranks")).get("key", {"of": "this user's ranks on this host"}, make)
    # Two jobs of one user have different keys, where only their ports differ.
    return hmac.digest(bytes(kept.entry.part("key")), f"{world.port} {world.size}".encode(), "sha256")


def _has_set(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    """Whether it started this process. Raises where only some of its variables are there."""
    names = [launcher.rank, launcher.size, launcher.local_rank]
    if launcher.inside:
        if launcher.inside not in environ:
            return False
    elif not any(name in environ for name in names):
        return False
    if launcher is _TORCHRUN:
        names += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in names if name not in environ]
    if missing:
        there = [name for name in (launcher.inside, *names) if name in environ]
        what = f"{_listed(there)} {'is' if len(there) == 1 else 'are'} set, but not {_listed(missing)}"
        next = f"unset {_listed(there)} to train in one process, or start the ranks by a launcher that sets all"
        raise UsageError(what, where=_WHERE, next=next)
    return True


def _ranks(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[int, int, int]:
    size = _number(launcher.size, environ, _MAX_RANKS)
    rank = _number(launcher.rank, environ, _MAX_RANKS)
    if rank >= size:
        what = f"{launcher.rank}={rank}, but {launcher.size}={size}: ranks are numbered from 0 to {size - 1}"
        raise UsageError(what, where=_WHERE, next="start the ranks by one launcher, which sets both")
    return rank, size, _number(launcher.local_rank, environ, _MAX_RANKS)


def _local_size(launcher: _Launcher, size: int, environ: Mapping[str, str]) -> int | None:
    """How many ranks are on this host, where the launcher says."""
    if launcher is _SLURM:
        hosts = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in environ), None)
        return size if hosts is not None and _number(hosts, environ, _MAX_RANKS) == 1 else None
    if launcher.local_size not in environ:
        is_loopback = environ.get("MASTER_ADDR", "").lower() in (LOOPBACK, "localhost", "::1")
        return size if launcher is _TORCHRUN and is_loopback else None
    local_size = _number(launcher.local_size, environ, _MAX_RANKS)
    if not 1 <= local_size <= size:
        what = f"{launcher.local_size}={local_size}, but {launcher.size}={size}"
        raise UsageError(what, where=_WHERE, next="start the ranks by one launcher, which sets both")
    return local_size


def _address(launcher: _Launcher, environ: Mapping[str, str]) -> str:
    address = environ.get("MASTER_ADDR") or environ.get(launcher.address, "")
    if not address or not address.isprintable() or len(address) > 255:
        what = f"{launcher.name} started ranks on several hosts, and MASTER_ADDR does not say where rank 0 listens"
        raise UsageError(what, where=_WHERE, next="set MASTER_ADDR to the name of rank 0's host, on every host")
    return address


def _port(launcher: _Launcher, environ: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environ:
        port = _number("MASTER_PORT", environ, 65535)
        # torchrun's own store listens there.
        port += int(launcher is _TORCHRUN and "TORCHELASTIC_RUN_ID" in environ)
    elif launcher is _SLURM and "SLURM_JOB_ID" in environ:
        step = _number("SLURM_STEP_ID", environ, 1 << 32)
        # Below the ports that systems hand out to clients.
        port = 16384 + (_number("SLURM_JOB_ID", environ, 1 << 32) * 31 + step) % 16384
    else:
        port = DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT gives port {port}", where=_WHERE, next="set MASTER_PORT from 1024 to 65534")
    return port


def _number(name: str, environ: Mapping[str, str], most: int) -> int:
    text = environ[name]
    # int() would take spaces, signs, underscores and the digits of other scripts.
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS + 1 or int(text) > most:
        what = f"{name}={escape(text[:80])!r} is no number from 0 to {most}"
        raise UsageError(what, where=_WHERE, next=f"unset {name} to train in one process, or start by a launcher")
    return int(text)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
