"""Ranks of one process, for as many threads."""

from __future__ import annotations

import socket

from genesis.distributed import Peers
from genesis.distributed.channel import Channel

__all__ = ["pairs"]


def pairs(size: int, *, limit_s: float = 60.0) -> list[Peers]:
    """`size` ranks over pairs of sockets."""
    ends = [socket.socketpair() for _ in range(1, size)]
    first = Peers(0, size, [Channel(near, k) for k, (near, _) in enumerate(ends, 1)], limit_s=limit_s)
    return [first, *(Peers(k, size, [Channel(far, 0)], limit_s=limit_s) for k, (_, far) in enumerate(ends, 1))]
