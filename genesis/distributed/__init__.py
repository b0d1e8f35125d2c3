"""Ranks: the identity of a rank, the launcher of one host, the control plane, the collectives, and torch's names."""

from genesis.distributed.collectives import (
    ReduceOp,
    Work,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_backend,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from genesis.distributed.environment import World, job_key, rank_count, read_world
from genesis.distributed.group import Alone, Group, PeersGroup
from genesis.distributed.launch import launch
from genesis.distributed.peers import Peers

__all__ = [
    "Alone", "Group", "Peers", "PeersGroup", "ReduceOp", "Work", "World", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "destroy_process_group",
    "gather", "get_backend", "get_rank", "get_world_size", "init_process_group", "is_available", "is_initialized",
    "job_key", "launch", "rank_count", "read_world", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
]  # fmt: skip
