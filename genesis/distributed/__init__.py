"""Ranks: the identity of a rank, the launcher of one host, the control plane, and the collectives."""

from genesis.distributed.environment import World, job_key, rank_count, read_world
from genesis.distributed.group import Alone, Group, PeersGroup
from genesis.distributed.launch import launch
from genesis.distributed.peers import Peers

__all__ = ["Alone", "Group", "Peers", "PeersGroup", "World", "job_key", "launch", "rank_count", "read_world"]
