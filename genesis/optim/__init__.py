"""Optimizers, flat buffers, learning-rate schedules and loss scaling."""

from genesis.keywords import check_calls
from genesis.optim import lr_scheduler
from genesis.optim.adafactor import Adafactor
from genesis.optim.adam import Adam, AdamW
from genesis.optim.flat import FlatBuffers
from genesis.optim.groups import decay_groups, muon_groups
from genesis.optim.lion import Lion
from genesis.optim.lr_scheduler import LambdaLR
from genesis.optim.muon import Muon
from genesis.optim.optimizer import Optimizer
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
from genesis.optim.sgd import SGD

__all__ = [
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

check_calls(globals(), __all__)
