"""Optimizers, flat buffers, learning-rate schedules and loss scaling."""

from genesis.keywords import check_calls
from genesis.optim import lr_scheduler
from genesis.optim.flat import FlatBuffers
from genesis.optim.groups import decay_groups, muon_groups
from genesis.optim.lr_scheduler import LambdaLR
from genesis.optim.optimizer import Optimizer
from genesis.optim.rules import OPTIMIZERS
from genesis.optim.rules.adafactor import Adafactor
from genesis.optim.rules.adam import Adam, AdamW
from genesis.optim.rules.lion import Lion
from genesis.optim.rules.muon import Muon
from genesis.optim.rules.sgd import SGD
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

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "WSD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "FlatBuffers",
    "GradScaler",
    "LambdaLR",
    "Linear",
    "Lion",
    "Muon",
    "OneCycle",
    "Optimizer",
    "Schedule",
    "Sequential",
    "Step",
    "decay_groups",
    "lr_scheduler",
    "make_schedule",
    "muon_groups",
]

# Those above are named for editors and type checkers; a new file of `rules` needs no line here.
globals().update({each.__name__: each for each in OPTIMIZERS.values()})
__all__ += [name for name in (each.__name__ for each in OPTIMIZERS.values()) if name not in __all__]

check_calls(globals(), __all__)
