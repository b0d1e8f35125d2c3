"""Optimizers, flat buffers, learning-rate schedules and loss scaling.

Made by `make stubs`: do not edit.
"""

from genesis.optim import lr_scheduler as lr_scheduler
from genesis.optim import swa_utils as swa_utils
from genesis.optim.flat import FlatBuffers as FlatBuffers
from genesis.optim.lr_scheduler import LambdaLR as LambdaLR
from genesis.optim.optimizer import Optimizer as Optimizer
from genesis.optim.rules.adafactor import Adafactor as Adafactor
from genesis.optim.rules.adam import Adam as Adam
from genesis.optim.rules.adam import AdamW as AdamW
from genesis.optim.rules.composed import ASGD as ASGD
from genesis.optim.rules.composed import Adadelta as Adadelta
from genesis.optim.rules.composed import Adagrad as Adagrad
from genesis.optim.rules.composed import Adamax as Adamax
from genesis.optim.rules.composed import NAdam as NAdam
from genesis.optim.rules.composed import RAdam as RAdam
from genesis.optim.rules.composed import RMSprop as RMSprop
from genesis.optim.rules.composed import Rprop as Rprop
from genesis.optim.rules.lion import Lion as Lion
from genesis.optim.rules.muon import Muon as Muon
from genesis.optim.rules.sgd import SGD as SGD
from genesis.optim.scaler import GradScaler as GradScaler
from genesis.optim.schedules import WSD as WSD
from genesis.optim.schedules import Constant as Constant
from genesis.optim.schedules import Cosine as Cosine
from genesis.optim.schedules import Linear as Linear
from genesis.optim.schedules import OneCycle as OneCycle
from genesis.optim.schedules import Schedule as Schedule
from genesis.optim.schedules import Sequential as Sequential
from genesis.optim.schedules import Step as Step
from genesis.optim.schedules import make_schedule as make_schedule
from genesis.optim.states import decay_groups as decay_groups
from genesis.optim.states import muon_groups as muon_groups

__all__ = [
    "ASGD",
    "OPTIMIZERS",
    "SGD",
    "WSD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Constant",
    "Cosine",
    "FlatBuffers",
    "GradScaler",
    "LambdaLR",
    "Linear",
    "Lion",
    "Muon",
    "NAdam",
    "OneCycle",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Schedule",
    "Sequential",
    "Step",
    "decay_groups",
    "lr_scheduler",
    "make_schedule",
    "muon_groups",
    "swa_utils",
]
OPTIMIZERS: dict[str, type[Optimizer]]
