"""The identity of a rank: its rank, size and master address, read from a launcher's variables. Opens no connection.

One table lists the variables of each launcher, in the order of the search. Contradicting or incomplete variables are
errors, because a rank with a wrong identity would train another run or wait forever.
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
LISTENER = "GENESIS_LISTENER"  # the descriptor of the listening socket that it passes to rank 0
HAVE_MET = "GENESIS_HAVE_MET"  # the descriptor of the pipe on which rank 0 reports that all ranks have joined
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torch's

_WHERE = "environment"
_MAX_RANKS = 1 << 16
_MAX_DIGITS = 9
_LEAST_KEY = 16


@dataclass(frozen=True, slots=True)
class World:
    """The position of this process among the ranks of its job and among the ranks of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None  # None if the launcher does not set it
    address: str  # the address on which rank 0 listens
    port: int
    source: str  # the launcher, for messages
    launcher: int | None = None  # see LAUNCHER
    listener: int | None = None  # see LISTENER
    have_met: int | None = None  # see HAVE_MET

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
    """The variables of a launcher. `inside` is set by this launcher only; `local_size` and `address` are optional."""

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
    inside="SLURM_STEP_ID",  # a batch script also has SLURM_NTASKS and SLURM_PROCID, but it is not a task of a step
)
_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_LAUNCHERS = (
    _TORCHRUN,
    _SLURM,
    _Launcher("Open MPI", *_MPI),
    _Launcher("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def read_world(environ: Mapping[str, str]) -> World:
    """Return the identity set by the first launcher found, or `ALONE`. Raises UsageError."""
    # Find the launchers that have set their variables.
    candidates = [(launcher, *_ranks(launcher, environ)) for launcher in _LAUNCHERS if _has_set(launcher, environ)]
    if len(candidates) > 1:  # in a SLURM step of one task, another launcher was called
        candidates = [each for each in candidates if each[0] is not _SLURM or each[2] > 1]
    if not candidates:
        return ALONE
    # They must agree.
    launcher, rank, size, local_rank = candidates[0]
    for theirs, their_rank, their_size, _ in candidates[1:]:
        # `srun torchrun` runs one agent per host.
        is_agent = launcher is _TORCHRUN and environ.get("GROUP_WORLD_SIZE") == str(their_size)
        if (rank, size) != (their_rank, their_size) and not is_agent:
            what = f"{launcher.rank}={rank} of {launcher.size}={size}, but {theirs.rank}={their_rank} of "
            what += f"{theirs.size}={their_size}"
            next = f"start the ranks with one launcher: unset {launcher.rank} and {launcher.size}, or "
            next += f"unset {theirs.inside}" if theirs.inside else f"unset {theirs.rank} and {theirs.size}"
            raise UsageError(what, where=_WHERE, next=next)
    local_size = _local_size(launcher, size, environ)
    if local_rank >= (local_size or size):
        what = f"{launcher.local_rank}={local_rank}, but {local_size or size} ranks are on this host"
        raise UsageError(what, where=_WHERE, next="start the ranks with one launcher, which sets both")
    if size == 1:
        return ALONE
    # Add the address of rank 0 and what our own launcher passes on.
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
    """Return the number of ranks for `--nproc`: a number, or "all" for `available` devices. Raises UsageError."""
    if text == "all":
        return available
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or not 1 <= int(text) <= _MAX_RANKS:
        what = f"--nproc {escape(text)} is not a number of ranks"
        raise UsageError(what, where="command line", next=f"pass a number from 1 to {_MAX_RANKS}, or all")
    return int(text)


def refuse_ranks(environ: Mapping[str, str]) -> None:
    """Raise UsageError if this process is already a rank, so that `--nproc` cannot start ranks."""
    world = read_world(environ)
    if world.size > 1:
        what = f"--nproc was given to a process that is already rank {world.rank} of {world.size}, by {world.source}"
        raise UsageError(what, where="command line", next="remove --nproc, or start one process without a launcher")


def job_key(world: World, environ: Mapping[str, str]) -> bytes:
    """Return the secret that authenticates the ranks of a job: GENESIS_JOB_KEY, or on one host a secret of this user.
    Raises UsageError if several hosts have no key, or if it is too short.
    """
    key = environ.get(JOB_KEY)
    if key is not None and len(key) < _LEAST_KEY:
        what = f"{JOB_KEY} has {len(key)} characters, and needs at least {_LEAST_KEY}"
        raise UsageError(what, where=_WHERE, next=f"set the same on every host: {JOB_KEY}=$(openssl rand -hex 32)")
    if key is not None:
        return key.encode("utf-8", "surrogateescape")
    if world.launcher is not None:
        what = f"{LAUNCHER} is set, but not {JOB_KEY}"
        raise UsageError(what, where=_WHERE, next=f"unset {LAUNCHER}: only genesis train --nproc sets both")
    if not world.is_on_one_host:
        what = f"{world.size} ranks on several hosts need {JOB_KEY}, because anybody could join without it"
        raise UsageError(what, where=_WHERE, next=f"set the same on every host: {JOB_KEY}=$(openssl rand -hex 32)")

    def make(writer: EntryWriter) -> None:
        writer.write("key", secrets.token_bytes(32))

    kept = Cache.of_user(user_folder("ranks")).get("key", {"of": "this user's ranks on this host"}, make)
    # Jobs of one user on different ports have different keys.
    return hmac.digest(bytes(kept.entry.part("key")), f"{world.port} {world.size}".encode(), "sha256")


def _has_set(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    """Whether the launcher started this process. Raises UsageError if only some of its variables are set."""
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
        present = [name for name in (launcher.inside, *names) if name in environ]
        what = f"{_listed(present)} {'is' if len(present) == 1 else 'are'} set, but not {_listed(missing)}"
        next = f"unset {_listed(present)} to train in one process, or start the ranks with a launcher that sets all"
        raise UsageError(what, where=_WHERE, next=next)
    return True


def _ranks(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[int, int, int]:
    size = _number(launcher.size, environ, _MAX_RANKS)
    rank = _number(launcher.rank, environ, _MAX_RANKS)
    if rank >= size:
        what = f"{launcher.rank}={rank}, but {launcher.size}={size}: ranks are numbered from 0 to {size - 1}"
        raise UsageError(what, where=_WHERE, next="start the ranks with one launcher, which sets both")
    return rank, size, _number(launcher.local_rank, environ, _MAX_RANKS)


def _local_size(launcher: _Launcher, size: int, environ: Mapping[str, str]) -> int | None:
    """The number of ranks on this host, or None if the launcher does not set it."""
    if launcher is _SLURM:
        hosts = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in environ), None)
        return size if hosts is not None and _number(hosts, environ, _MAX_RANKS) == 1 else None
    if launcher.local_size not in environ:
        is_loopback = environ.get("MASTER_ADDR", "").lower() in (LOOPBACK, "localhost", "::1")
        return size if launcher is _TORCHRUN and is_loopback else None
    local_size = _number(launcher.local_size, environ, _MAX_RANKS)
    if not 1 <= local_size <= size:
        what = f"{launcher.local_size}={local_size}, but {launcher.size}={size}"
        raise UsageError(what, where=_WHERE, next="start the ranks with one launcher, which sets both")
    return local_size


def _address(launcher: _Launcher, environ: Mapping[str, str]) -> str:
    address = environ.get("MASTER_ADDR") or environ.get(launcher.address, "")
    if not address or not address.isprintable() or len(address) > 255:
        what = f"{launcher.name} started ranks on several hosts, and MASTER_ADDR does not name rank 0's host"
        raise UsageError(what, where=_WHERE, next="set MASTER_ADDR on every host to the name of rank 0's host")
    return address


def _port(launcher: _Launcher, environ: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environ:
        port = _number("MASTER_PORT", environ, 65535)
        # torchrun's own store listens on MASTER_PORT.
        port += int(launcher is _TORCHRUN and "TORCHELASTIC_RUN_ID" in environ)
    elif launcher is _SLURM and "SLURM_JOB_ID" in environ:
        step = _number("SLURM_STEP_ID", environ, 1 << 32)
        # These ports are below the ephemeral ones.
        port = 16384 + (_number("SLURM_JOB_ID", environ, 1 << 32) * 31 + step) % 16384
    else:
        port = DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT gives port {port}", where=_WHERE, next="set MASTER_PORT from 1024 to 65534")
    return port


def _number(name: str, environ: Mapping[str, str], limit: int) -> int:
    text = environ[name]
    # int() would accept spaces, signs, underscores and the digits of other scripts.
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS + 1 or int(text) > limit:
        what = f"{name}={escape(text[:80])!r} is not a number from 0 to {limit}"
        raise UsageError(what, where=_WHERE, next=f"unset {name} to train in one process, or use a launcher")
    return int(text)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
