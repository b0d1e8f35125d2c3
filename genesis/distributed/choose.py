"""Which group the ranks of a run have: NCCL's where they have GPUs and can use it, else one through host memory."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from genesis.backend import Device
from genesis.backend.cuda import driver_for
from genesis.backend.cuda.driver import Driver, is_interpreted
from genesis.distributed.communicator import ZERO_CTAS, Communicator, Tuning, bindings, identity_of
from genesis.distributed.group import PeersGroup, StagedGroup
from genesis.distributed.nccl import LITTLE, STAGING, NcclGroup
from genesis.distributed.peers import Peers

INSTALL = 'pip install "nccl4py>=0.6,<0.7" nvidia-nccl-cu13'  # the extra `distributed`
_RELEASE = "0.6."
_HAS_COPIES = 22800  # NCCL 2.28, the first whose all-to-all and all-gather go by DMA engines
_CUDA_12 = "nvidia-nccl-cu12"


def group_for(peers: Peers, device: Device, *, one_host: bool) -> tuple[NcclGroup | StagedGroup, str]:
    """The group of all ranks, and a line that says which it is, where that is worth one: a call of all ranks.

    Args:
        one_host: whether no rank is on another host.

    Raises:
        DistributedError: NCCL is there and does not start.
    """
    if device.type != "cuda" or is_interpreted():
        return StagedGroup(PeersGroup(peers)), ""
    nccl, problem = _loaded(device)
    version = 0 if nccl is None else int(nccl.get_version())
    if problem := _agreed(peers, version, problem):
        return StagedGroup(PeersGroup(peers)), f"warning: {problem}: ranks send gradients through host memory, slowly"
    _prepare(one_host)
    driver = driver_for(device.index)
    before, _ = driver.memory_info()
    identity = bytes.fromhex(peers.broadcast_json("nccl", identity_of(nccl).hex() if peers.rank == 0 else None))
    is_mapped = one_host and peers.all("copies", _has_copies(nccl, driver, peers.size))
    tuning = Tuning(cta_policy=ZERO_CTAS) if is_mapped else Tuning()
    communicator = Communicator(nccl, driver, peers.rank, peers.size, identity, peers.limit_s, tuning)
    group = NcclGroup(peers, device, communicator, LITTLE if is_mapped else STAGING, is_mapped=is_mapped)
    taken = max(0, before - driver.memory_info()[0]) / 2**20
    how = " by DMA engines" if is_mapped else ""
    return group, f"collectives: NCCL {_readable(version)}{how}, {taken:,.0f} MiB of each GPU"


def _has_copies(nccl: Any, driver: Driver, ranks: int) -> bool:
    """Whether DMA engines can copy between the GPUs of all ranks: those are here, and linked by NVLink. A user's own
    CTA policy for NCCL is left, and so is NVLink's multicast, with which two ranks may wait for ever (NCCL's #2290).
    """
    is_new = nccl.get_version() >= _HAS_COPIES
    is_ours = "NCCL_CTA_POLICY" not in os.environ and os.environ.get("NCCL_NVLS_ENABLE") == "0"
    return is_new and is_ours and driver.is_linked(range(ranks))


def _loaded(device: Device) -> tuple[Any, str]:
    """The bindings, or why there are none and what to do."""
    try:
        nccl = bindings()
    except ImportError as error:
        return None, f"NCCL is not installed ({error}; {INSTALL})"
    except (RuntimeError, OSError) as error:  # no library, or one for another system
        return None, f"NCCL does not load ({str(error).strip().splitlines()[0]}; {INSTALL})"
    if (found := _version("nccl4py")) and not found.startswith(_RELEASE):
        return None, f"nccl4py {found} is installed, and {_RELEASE}x is needed ({INSTALL})"
    driver = driver_for(device.index).cuda_version()
    if driver < 13000 and _version("nvidia-nccl-cu13") and not _version(_CUDA_12):
        what = f"the NVIDIA driver serves CUDA {driver // 1000}.{driver % 1000 // 10}, and nvidia-nccl-cu13 needs 13.0"
        return None, f"{what} (pip uninstall nvidia-nccl-cu13; pip install {_CUDA_12})"
    return nccl, ""


def _version(distribution: str) -> str:
    """That of an installed package, or nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _agreed(peers: Peers, version: int, problem: str) -> str:
    """What keeps any rank from it; all ranks go the same way."""
    said = peers.gather_json("collectives", [version, problem])
    found = ""
    if said is not None:
        problems = [f"rank {rank}: {each[1]}" for rank, each in enumerate(said) if each[1]]
        versions = sorted({each[0] for each in said})
        if problems:
            found = problem or problems[0]
        elif len(versions) > 1:
            found = f"the ranks have NCCL {' and '.join(map(_readable, versions))}, and need one version"
    return str(peers.broadcast_json("collectives", found))


def _readable(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _prepare(one_host: bool) -> None:
    """NCCL's own variables, where the user has set none. NVLink's multicast adds on the way, which is not wanted here,
    and its set-up fails on some systems.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
