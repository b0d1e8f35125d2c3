"""The objective that a configuration names."""

from __future__ import annotations

from genesis.train.config import Config
from genesis.train.objective import Distillation, NextTokens, Objective
from genesis.train.preference_losses import JUDGED, PAIRED, REWARD
from genesis.train.preferences import JudgedObjective, PairObjective, RewardObjective
from genesis.train.top_k import TopKDistillation, width


def build_objective(config: Config) -> Objective:
    """Return the objective of a run with this configuration."""
    chosen = config.objective
    found: Objective = NextTokens()
    if chosen.name == "distill":
        assert chosen.beta is not None and chosen.temperature is not None, "the schema fills them in"
        found = Distillation(chosen.beta, chosen.temperature)
        if chosen.teacher_file is not None:
            found = TopKDistillation(width(chosen.teacher_file))
    elif chosen.name in PAIRED:
        found = PairObjective(chosen.name, chosen.settings, chosen.computed_reference(config.lora))
    elif chosen.name in REWARD:
        found = RewardObjective(chosen.settings)
    elif chosen.name in JUDGED:
        found = JudgedObjective(chosen.name, chosen.settings, chosen.computed_reference(config.lora))
    return found
