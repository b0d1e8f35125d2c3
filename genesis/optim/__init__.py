"""Optimizers, flat buffers, learning-rate schedules and loss scaling.

The optimizers are those that `rules` found; `__init__.pyi`, made by `make stubs`, names them for editors and mypy.
"""

from genesis.keywords import check_calls
from genesis.optim import lr_scheduler
from genesis.optim.flat import FlatBuffers
from genesis.optim.lr_scheduler import LambdaLR
from genesis.optim.optimizer import Optimizer
from genesis.optim.rules import OPTIMIZERS
from genesis.optim.scaler import GradScaler
from genesis.optim.schedules import (
    WSD,
    Constant,
    Cosine,
    Linear,
    OneCycle,
    Schedule,
    Sequential,
    Step,
    make_schedule,
)
from genesis.optim.states import decay_groups, muon_groups

globals().update({each.__name__: each for each in OPTIMIZERS.values()})

__all__ = [  # noqa: PLE0604  the optimizers are found
    "OPTIMIZERS",
    "WSD",
    "Constant",
    "Cosine",
    "FlatBuffers",
    "GradScaler",
    "LambdaLR",
    "Linear",
    "OneCycle",
    "Optimizer",
    "Schedule",
    "Sequential",
    "Step",
    "decay_groups",
    "lr_scheduler",
    "make_schedule",
    "muon_groups",
    *(each.__name__ for each in OPTIMIZERS.values()),
]

check_calls(globals(), __all__)
