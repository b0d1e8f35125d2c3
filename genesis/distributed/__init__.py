"""Ranks: who this process is, how ranks of one host are started, what they say to each other, and their collectives."""

from genesis.distributed.environment import World, job_key, rank_count, read_world
from genesis.distributed.group import Alone, Group, PeersGroup
from genesis.distributed.launch import launch
from genesis.distributed.peers import Peers

__all__ = ["Alone", "Group", "Peers", "PeersGroup", "World", "job_key", "launch", "rank_count", "read_world"]
