"""Losses of preferences, as functions of the log-probabilities of whole answers. Each docstring cites the paper.

With log π(y|x) the sum of an answer's log-probabilities under the model, log π_ref(y|x) the same under the reference,
and |y| the number of its tokens:

    ratio(y) = log π(y|x) - log π_ref(y|x)        mean(y) = log π(y|x) / |y|
    Δ = ratio(chosen) - ratio(rejected)           σ(z) = 1 / (1 + e^-z)

`PAIRED` is the table of all losses of pairs. To add one, write a function and a row. Everything is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import genesis
from genesis.nn import functional as F
from genesis.tensor import Tensor

# Settings of a loss -> default.
Settings = Mapping[str, float]
# The largest mean log-probability of ORPO: its odds are infinite at 0.
_CERTAIN = -1e-6


class Answers(NamedTuple):
    """One answer to each of N prompts.

    Attributes:
        log_probs: `[N]`, log π(y|x).
        reference: `[N]`, log π_ref(y|x); 0 without a reference.
        lengths: `[N]` float, number of tokens |y|, at least 1.
    """

    log_probs: Tensor
    reference: Tensor
    lengths: Tensor

    @property
    def ratio(self) -> Tensor:
        """log π(y|x) - log π_ref(y|x)."""
        return self.log_probs - self.reference

    @property
    def mean(self) -> Tensor:
        """log π(y|x) / |y|."""
        return self.log_probs / self.lengths

    @property
    def mean_ratio(self) -> Tensor:
        """ratio(y) / |y|."""
        return self.ratio / self.lengths


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    """Return -(1 - ε)·log σ(z) - ε·log σ(-z)."""
    return -F.logsigmoid(z) * (1 - label_smoothing) - F.logsigmoid(-z) * label_smoothing


# --- Pairs with a reference -------------------------------------------------------------------------------------------


def dpo(chosen: Answers, rejected: Answers, *, beta: float, label_smoothing: float) -> Tensor:
    """DPO: -(1 - ε)·log σ(βΔ) - ε·log σ(-βΔ) (Rafailov et al., 2023, eq. 7; ε: conservative DPO, Mitchell, 2023)."""
    return _smoothed(beta * (chosen.ratio - rejected.ratio), label_smoothing)


def hinge(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """Hinge: max(0, 1 - βΔ) (SLiC, Zhao et al., 2023; with ratios by Liu et al., "RSO", 2024)."""
    return F.relu(1 - beta * (chosen.ratio - rejected.ratio))


def ipo(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """IPO: (ratio(chosen)/|chosen| - ratio(rejected)/|rejected| - 1/(2β))² (Azar et al., 2023, eq. 17).

    β is the paper's τ. The mean over tokens is not in the paper; its authors and TRL use it.
    """
    return (chosen.mean_ratio - rejected.mean_ratio - 1 / (2 * beta)).square()


def robust(chosen: Answers, rejected: Answers, *, beta: float, label_smoothing: float) -> Tensor:
    """Robust DPO: [-(1 - ε)·log σ(βΔ) + ε·log σ(-βΔ)] / (1 - 2ε), unbiased if a share ε of the labels is flipped
    (Chowdhury et al., 2024, eq. 12).
    """
    z = beta * (chosen.ratio - rejected.ratio)
    clean, flipped = -F.logsigmoid(z), -F.logsigmoid(-z)
    return (clean * (1 - label_smoothing) - flipped * label_smoothing) / (1 - 2 * label_smoothing)


def exo_pair(chosen: Answers, rejected: Answers, *, beta: float, label_smoothing: float) -> Tensor:
    """EXO: KL(p ‖ q) for p = (σ(βΔ), σ(-βΔ)) and q = (1 - ε, ε) (Ji et al., 2024, eq. 16)."""
    z = beta * (chosen.ratio - rejected.ratio)
    first, second = math.log1p(-label_smoothing), math.log(label_smoothing)
    return genesis.sigmoid(z) * (F.logsigmoid(z) - first) + genesis.sigmoid(-z) * (F.logsigmoid(-z) - second)


def nca_pair(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """NCA: -log σ(β·ratio(chosen)) - ½·log σ(-β·ratio(chosen)) - ½·log σ(-β·ratio(rejected)) (Chen et al., 2024)."""
    better, worse = beta * chosen.ratio, beta * rejected.ratio
    return -F.logsigmoid(better) - 0.5 * F.logsigmoid(-better) - 0.5 * F.logsigmoid(-worse)


def bco_pair(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """BCO without its running mean: -log σ(β·ratio(chosen)) - log σ(-β·ratio(rejected)) (Jung et al., 2024)."""
    return -F.logsigmoid(beta * chosen.ratio) - F.logsigmoid(-beta * rejected.ratio)


def sppo_hard(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """SPPO with hard labels: (ratio(chosen) - 1/(2β))² + (ratio(rejected) + 1/(2β))² (Wu et al., 2024, eq. 4.7)."""
    return (chosen.ratio - 0.5 / beta).square() + (rejected.ratio + 0.5 / beta).square()


def apo_zero(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """APO-zero: 1 - σ(β·ratio(chosen)) + σ(β·ratio(rejected)), for answers better than the model's own
    (D'Oosterlinck et al., 2024, eq. 7).
    """
    return 1 - genesis.sigmoid(beta * chosen.ratio) + genesis.sigmoid(beta * rejected.ratio)


def apo_down(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """APO-down: σ(β·ratio(chosen)) + 1 - σ(βΔ), for answers worse than the model's own
    (D'Oosterlinck et al., 2024, eq. 8).
    """
    return genesis.sigmoid(beta * chosen.ratio) + 1 - genesis.sigmoid(beta * (chosen.ratio - rejected.ratio))


def discopop(chosen: Answers, rejected: Answers, *, beta: float, tau: float) -> Tensor:
    """DiscoPOP: -(1 - m)·log σ(βΔ) + m·e^(-βΔ) for m = σ(βΔ/τ) (Lu et al., 2024, eq. 5)."""
    z = beta * (chosen.ratio - rejected.ratio)
    share = genesis.sigmoid(z / tau)
    return -F.logsigmoid(z) * (1 - share) + genesis.exp(-z) * share


def sigmoid_norm(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """Length-normalized DPO: -log σ(β·(ratio(chosen)/|chosen| - ratio(rejected)/|rejected|)) (Tulu 3, 2024, eq. 6)."""
    return -F.logsigmoid(beta * (chosen.mean_ratio - rejected.mean_ratio))


# --- Pairs without a reference ----------------------------------------------------------------------------------------


def cpo(chosen: Answers, rejected: Answers, *, beta: float, label_smoothing: float, alpha: float) -> Tensor:
    """CPO: -log σ(β·(log π(chosen) - log π(rejected))) - α·mean(chosen) (Xu et al., 2024, eq. 3 to 5), smoothed as DPO.

    The paper adds the summed log-likelihood. TRL divides it by the chosen tokens of a batch; this is the mean over
    pairs of the mean over tokens.
    """
    return _smoothed(beta * (chosen.log_probs - rejected.log_probs), label_smoothing) - alpha * chosen.mean


def simpo(chosen: Answers, rejected: Answers, *, beta: float, gamma: float, label_smoothing: float) -> Tensor:
    """SimPO: -log σ(β·mean(chosen) - β·mean(rejected) - γ) (Meng et al., 2024, eq. 6), smoothed as DPO."""
    return _smoothed(beta * (chosen.mean - rejected.mean) - gamma, label_smoothing)


def orpo(chosen: Answers, rejected: Answers, *, beta: float) -> Tensor:
    """ORPO: -mean(chosen) - β·log σ(log odds(chosen) - log odds(rejected)) (Hong et al., 2024, eq. 6 and 7).

    odds(y) = p / (1 - p) for p = e^mean(y), and β is the paper's λ. The first term is the mean over pairs of the mean
    over the answer's tokens; TRL's also counts the tokens of the prompt.
    """
    return -chosen.mean - beta * F.logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))


def _log_odds(mean: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for p = e^mean."""
    mean = mean.clamp(max=_CERTAIN)
    return mean - genesis.log(-genesis.expm1(mean))


# --- Reward models ----------------------------------------------------------------------------------------------------


def reward(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, *, gamma: float, center_rewards_coefficient: float
) -> Tensor:
    """Bradley-Terry: -log σ(r_c - r_r - m - γ) + c·(r_c + r_r)² for rewards `[N]` (Ouyang et al., 2022, eq. 1).

    m are the margins of pairs as in Llama 2 (Touvron et al., 2023, eq. 2), γ is one margin for all. The second term is
    that of Eisenstein et al., 2023.
    """
    losses = -F.logsigmoid(chosen - rejected - margin - gamma)
    return losses + center_rewards_coefficient * (chosen + rejected).square()


# --- Single answers ---------------------------------------------------------------------------------------------------


def kto(answers: Answers, is_good: Tensor, kl: Tensor, *, beta: float, desirable: float, undesirable: float) -> Tensor:
    """KTO: λ_D·[1 - σ(β·(ratio - z))] for a good answer, λ_U·[1 - σ(β·(z - ratio))] for a bad one
    (Ethayarajh et al., 2024, eq. 7 and 8).

    Args:
        is_good: `[N]`, 1 for a good answer, 0 for a bad one.
        kl: z, the result of `kto_kl` for the batch; 0-d, without gradient.
    """
    gain = beta * (answers.ratio - kl)
    good, bad = 1 - genesis.sigmoid(gain), 1 - genesis.sigmoid(-gain)
    return desirable * good * is_good + undesirable * bad * (1 - is_good)


def apo_zero_unpaired(
    answers: Answers, is_good: Tensor, kl: Tensor, *, beta: float, desirable: float, undesirable: float
) -> Tensor:
    """APO-zero for single answers: λ_D·[1 - σ(β·ratio)] or λ_U·σ(β·ratio) (D'Oosterlinck et al., 2024, eq. 7)."""
    return kto(answers, is_good, kl * 0, beta=beta, desirable=desirable, undesirable=undesirable)


def kto_kl(mismatched: Answers, is_there: Tensor) -> Tensor:
    """Return KTO's z, 0-d: max(0, mean of ratio(y') over mismatched answers y'), without gradient.

    y' is the answer of another prompt (section 4.1 of the paper).

    Args:
        is_there: `[N]`, 1 for an answer, 0 for an unused slot.
    """
    count = is_there.sum().clamp(min=1)
    return ((mismatched.ratio * is_there).sum() / count).clamp(min=0).detach()


# --- The tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """A loss of pairs.

    Attributes:
        loss: `(chosen, rejected, **settings) -> [N]`.
        settings: the loss's settings with their defaults.
        score: the quantity that β scales to a reward: `ratio` (with a reference), `log_probs` or `mean`.
    """

    loss: Callable[..., Tensor]
    settings: Settings
    score: Literal["ratio", "log_probs", "mean"] = "ratio"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.score == "ratio"


_BETA = {"beta": 0.1}
PAIRED: Mapping[str, Paired] = {
    "dpo": Paired(dpo, {**_BETA, "label_smoothing": 0.0}),
    "hinge": Paired(hinge, _BETA),
    "ipo": Paired(ipo, _BETA),
    "robust": Paired(robust, {**_BETA, "label_smoothing": 0.1}),
    "exo_pair": Paired(exo_pair, {**_BETA, "label_smoothing": 1e-3}),
    "nca_pair": Paired(nca_pair, _BETA),
    "bco_pair": Paired(bco_pair, _BETA),
    "sppo_hard": Paired(sppo_hard, _BETA),
    "apo_zero": Paired(apo_zero, _BETA),
    "apo_down": Paired(apo_down, _BETA),
    "discopop": Paired(discopop, {**_BETA, "tau": 0.05}),
    "sigmoid_norm": Paired(sigmoid_norm, _BETA),
    "cpo": Paired(cpo, {**_BETA, "label_smoothing": 0.0, "alpha": 1.0}, "log_probs"),
    "simpo": Paired(simpo, {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0}, "mean"),
    "orpo": Paired(orpo, _BETA, "mean"),
}
# Reward models learn from pairs too -> settings.
REWARD: Mapping[str, Settings] = {"reward": {"gamma": 0.0, "center_rewards_coefficient": 0.0}}
# Losses of TRL that have no row here -> the nearest objective.
NEAREST = {"sigmoid": "dpo", "aot": "dpo", "aot_unpaired": "kto", "wpo": "dpo", "bco": "kto", "sft": "next_tokens"}
_WEIGHTS = {**_BETA, "desirable": 1.0, "undesirable": 1.0}
# Losses of single answers -> the function and its settings.
JUDGED: Mapping[str, tuple[Callable[..., Tensor], Settings]] = {
    "kto": (kto, _WEIGHTS),
    "apo_zero_unpaired": (apo_zero_unpaired, _WEIGHTS),
}
