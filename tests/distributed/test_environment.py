"""Who this process is: every launcher's variables, and every set of them that cannot be trusted."""

from __future__ import annotations

import pytest

from genesis.distributed.environment import ALONE, job_key, rank_count, read_world, refuse_ranks
from genesis.errors import UsageError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "2000",
}
SLURM = {
    "SLURM_STEP_ID": "1",
    "SLURM_JOB_ID": "70",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "70", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_launchers() -> None:
    """Rank, size, address, port and the line for people, of each launcher."""
    world = read_world(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.address, world.port) == ("node-0", 2000)
    assert str(world) == "ranks: 4 on several hosts, by torchrun's variables"

    world = read_world(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 1, 2)
    assert (world.address, world.port) == ("127.0.0.1", 16384 + 70 * 31 + 1)
    assert str(world) == "ranks: 2 on one host, by SLURM"
    assert read_world({**SLURM, "SLURM_NNODES": "2"}).address == "10.0.0.7"
    assert read_world({**SLURM, "SLURM_NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}).port == 7

    for variables, name in ((OPEN_MPI, "Open MPI"), (HYDRA, "Hydra")):
        world = read_world(variables)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 1, 2)
        assert (world.address, world.port, world.source) == ("127.0.0.1", 29500, name)


def test_alone() -> None:
    """No variables, those of a batch script, of a step of one task, or a world of one: one process."""
    one_task = {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    one_rank = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for variables in ({}, BATCH, one_task, one_rank, {"MASTER_ADDR": "node-0", "MASTER_PORT": "2000"}):
        assert read_world(variables) is ALONE
    assert str(ALONE) == "ranks: 1"


def test_torchrun_keeps_its_port() -> None:
    """Under torchrun itself its store listens on MASTER_PORT."""
    assert read_world({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).port == 2001
    with pytest.raises(UsageError, match="port 65536"):
        read_world({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "65535"})


def test_one_launcher_inside_another() -> None:
    """Agents of torchrun as tasks of SLURM, and a launcher called in a step of one task."""
    tasks = {**SLURM, "SLURM_NNODES": "2"}
    assert read_world({**TORCHRUN, **tasks, "GROUP_WORLD_SIZE": "2"}).size == 4
    one_task = {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_world({**OPEN_MPI, **one_task}).source == "Open MPI"
    assert read_world({**TORCHRUN, **one_task}).rank == 3


def test_loopback_is_one_host() -> None:
    assert read_world({**without(TORCHRUN, "LOCAL_WORLD_SIZE"), "MASTER_ADDR": "localhost"}).is_on_one_host
    assert read_world({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).address == "127.0.0.1"
    assert not read_world(without(TORCHRUN, "LOCAL_WORLD_SIZE")).is_on_one_host


BAD = {
    "stray rank": ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"),
    "stray size": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not RANK"),
    "stray local rank": ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, but not RANK"),
    "no port": (without(TORCHRUN, "MASTER_PORT"), "are set, but not MASTER_PORT"),
    "no address": (without(TORCHRUN, "MASTER_ADDR"), "are set, but not MASTER_ADDR"),
    "no task": (without(SLURM, "SLURM_PROCID"), "are set, but not SLURM_PROCID"),
    "no local rank": (without(HYDRA, "MPI_LOCALRANKID"), "PMI_RANK and PMI_SIZE are set, but not MPI_LOCALRANKID"),
    "rank too large": ({**TORCHRUN, "RANK": "4"}, "RANK=4, but WORLD_SIZE=4: ranks are numbered from 0 to 3"),
    "no rank in 0": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_RANK=1"),
    "local rank too large": ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2, but 2 ranks are on this host"),
    "local size too large": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5, but WORLD_SIZE=4"),
    "no number": ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a number"),
    "negative": ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a number"),
    "spaces": ({**TORCHRUN, "WORLD_SIZE": " 4"}, "WORLD_SIZE=' 4' is not a number"),
    "other digits": ({**TORCHRUN, "RANK": "\u0663"}, "is not a number"),
    "control characters": ({**TORCHRUN, "RANK": "\x1b[2J"}, r"RANK='\\x1b[2J' is not a number"),
    "empty": ({**TORCHRUN, "RANK": ""}, "RANK='' is not a number"),
    "long": ({**TORCHRUN, "RANK": "1" * 5000}, "is not a number"),
    "port": ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not a number"),
    "port 0": ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT gives port 0"),
    "no address to reach": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "MASTER_ADDR",
    ),
    "two launchers": (
        {**OPEN_MPI, **HYDRA, "PMI_RANK": "0"},
        "OMPI_COMM_WORLD_RANK=1 of OMPI_COMM_WORLD_SIZE=2, but PMI_RANK=0",
    ),
    "another SLURM": ({**TORCHRUN, **SLURM}, "unset SLURM_STEP_ID"),
    "SLURM of a world of one": (
        {**SLURM, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        "RANK=0 of WORLD_SIZE=1, but SLURM_PROCID=1 of SLURM_NTASKS=2",
    ),
    "two torchruns": ({**TORCHRUN, **SLURM, "GROUP_WORLD_SIZE": "1"}, "RANK=3 of WORLD_SIZE=4, but SLURM_PROCID=1"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_variables(case: str) -> None:
    """What is wrong and what to do, as a usage error."""
    variables, expected = BAD[case]
    with pytest.raises(UsageError) as caught:
        read_world(variables)
    assert expected in f"{caught.value.what} {caught.value.next}"
    assert caught.value.next and caught.value.where == "environment" and caught.value.exit_code == 2


def test_nproc_of_a_rank() -> None:
    """`--nproc` starts no ranks from a rank."""
    refuse_ranks({})
    refuse_ranks(BATCH)
    for variables in (TORCHRUN, SLURM, OPEN_MPI, HYDRA):
        with pytest.raises(UsageError, match="--nproc was given to a process that is already rank"):
            refuse_ranks(variables)


def test_count_of_ranks() -> None:
    assert rank_count("all", 8) == 8 and rank_count("3", 8) == 3
    for text in ("0", "-1", "", "1.5", " 2", "2x", "ALL", "1" * 400, "70000"):
        with pytest.raises(UsageError, match="--nproc"):
            rank_count(text, 8)


def test_keys(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own key, a secret of the user on one host, and none for several hosts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slurm, torchrun = read_world(SLURM), read_world(TORCHRUN)
    assert job_key(torchrun, {"GENESIS_JOB_KEY": "0123456789abcdef"}) == b"0123456789abcdef"
    key = job_key(slurm, {})
    assert len(key) == 32 and job_key(slurm, {}) == key
    assert job_key(read_world({**SLURM, "SLURM_JOB_ID": "71"}), {}) != key
    ours = read_world({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "GENESIS_LAUNCHER": "17"})
    assert str(ours) == "ranks: 4 on one host, by --nproc"
    for world, variables in ((torchrun, {}), (ours, {}), (slurm, {"GENESIS_JOB_KEY": "short"})):
        with pytest.raises(UsageError, match="GENESIS_JOB_KEY"):
            job_key(world, variables)
