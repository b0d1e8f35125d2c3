"""Optimizers, flat buffers, learning-rate schedules and loss scaling.

`rules` discovers the optimizers. `__init__.pyi`, written by `make stubs`, lists them for editors and mypy.
"""

from genesis.keywords import check_calls
from genesis.optim import lr_scheduler, swa_utils
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

__all__ = [  # noqa: PLE0604  `rules` discovers the optimizers
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
    "swa_utils",
    *(each.__name__ for each in OPTIMIZERS.values()),
]

check_calls(globals(), __all__)
