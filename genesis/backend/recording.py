"""Whether ops are recorded for a backward pass, per thread: `genesis.autograd.modes` switches it.

It is here because a CUDA implementation asks, too: nobody compares the results of ops that are not recorded with those
of a training step, bit for bit, and so a matmul of few rows may take another kernel.
"""

from __future__ import annotations

import threading


class Mode(threading.local):
    """The switches of each thread; what runs for every op reads them here, without a call.

    Attributes:
        grad: ops record what backward needs.
        anomaly: backward checks every gradient for NaN.
        fixed_weights: see `genesis.autograd.modes.fixed_weights`.
    """

    grad = True
    anomaly = False
    fixed_weights = False


mode = Mode()
