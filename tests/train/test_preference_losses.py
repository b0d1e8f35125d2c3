"""The losses of preferences, against the papers' formulas in plain float64 and against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import genesis
from genesis.autograd.gradcheck import gradcheck
from genesis.tensor import Tensor
from genesis.train.preference_losses import JUDGED, PAIRED, Answers, kto_kl

N = 7


def s(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def log_s(z: float) -> float:
    return -math.log1p(math.exp(-z))


def odds(mean: float) -> float:
    return math.exp(mean) / (1 - math.exp(mean))


# With b = beta, e = label_smoothing, c and r the summed ratios (or log-probabilities), m and n the means over tokens.
B = 0.1
FORMULAS: dict[str, Callable[[float, float, float, float], float]] = {
    "dpo": lambda c, r, m, n: -log_s(B * (c - r)),
    "hinge": lambda c, r, m, n: max(0, 1 - B * (c - r)),
    "ipo": lambda c, r, m, n: (m - n - 1 / (2 * B)) ** 2,
    "robust": lambda c, r, m, n: (0.9 * -log_s(B * (c - r)) - 0.1 * -log_s(-B * (c - r))) / 0.8,
    "exo_pair": lambda c, r, m, n: (
        s(B * (c - r)) * (math.log(s(B * (c - r))) - math.log(0.999))
        + s(B * (r - c)) * (math.log(s(B * (r - c))) - math.log(0.001))
    ),
    "nca_pair": lambda c, r, m, n: -log_s(B * c) - 0.5 * log_s(-B * c) - 0.5 * log_s(-B * r),
    "bco_pair": lambda c, r, m, n: -log_s(B * c) - log_s(-B * r),
    "sppo_hard": lambda c, r, m, n: (c - 5) ** 2 + (r + 5) ** 2,
    "apo_zero": lambda c, r, m, n: 1 - s(B * c) + s(B * r),
    "apo_down": lambda c, r, m, n: s(B * c) + 1 - s(B * (c - r)),
    "discopop": lambda c, r, m, n: (
        -log_s(B * (c - r)) * (1 - s(B * (c - r) / 0.05)) + math.exp(-B * (c - r)) * s(B * (c - r) / 0.05)
    ),
    "sigmoid_norm": lambda c, r, m, n: -log_s(B * (m - n)),
    "cpo": lambda c, r, m, n: -log_s(B * (c - r)) - m,
    "simpo": lambda c, r, m, n: -log_s(2 * (m - n) - 1),
    "orpo": lambda c, r, m, n: -m - B * log_s(math.log(odds(m) / odds(n))),
}


def answers(seed: int) -> tuple[Answers, np.ndarray, np.ndarray]:
    """Answers of 1 to 9 tokens in float64 that require gradients, their scores with and without a reference."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 10, N).astype(np.float64)
    own, other = (-lengths * generator.uniform(0.2, 3, N) for _ in range(2))
    tensors = [genesis.tensor(x) for x in (own, other, lengths)]
    return Answers(tensors[0].requires_grad_(), *tensors[1:]), np.stack([own - other, own]), lengths


@pytest.mark.parametrize("name", PAIRED)
def test_pairs(name: str) -> None:
    paired = PAIRED[name]
    (chosen, c, c_lengths), (rejected, r, r_lengths) = answers(1), answers(2)
    c, r = (x[0 if paired.needs_reference else 1] for x in (c, r))
    found = paired.loss(chosen, rejected, **paired.settings).tolist()
    means = c / c_lengths, r / r_lengths
    assert found == pytest.approx([FORMULAS[name](*x) for x in zip(c, r, *means, strict=True)], rel=1e-9)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return paired.loss(chosen._replace(log_probs=x), rejected._replace(log_probs=y), **paired.settings)

    assert gradcheck(loss, (chosen.log_probs, rejected.log_probs))


def test_smoothing_reverses_a_share_of_the_labels() -> None:
    (chosen, *_), (rejected, *_) = answers(1), answers(2)
    loss = PAIRED["dpo"].loss
    some = loss(chosen, rejected, beta=0.5, label_smoothing=0.25)
    both = loss(chosen, rejected, beta=0.5, label_smoothing=0.0), loss(rejected, chosen, beta=0.5, label_smoothing=0.0)
    assert some.tolist() == pytest.approx((0.75 * both[0] + 0.25 * both[1]).tolist())


@pytest.mark.parametrize("name", JUDGED)
def test_single_answers(name: str) -> None:
    loss, settings = JUDGED[name]
    (own, ratios, _), (other, others, _) = answers(3), answers(4)
    is_good = genesis.tensor(np.arange(N) % 3 == 0).to(dtype="float64")
    is_there = genesis.tensor([1.0] * (N - 2) + [0.0] * 2, dtype="float64")
    z = max(0.0, others[0][: N - 2].mean())
    kl = kto_kl(other, is_there)
    assert not kl.requires_grad and kl.item() == pytest.approx(z)
    assert kto_kl(other, is_there * 0).item() == 0
    z = 0.5 if name == "kto" else 0.0
    weights = {**settings, "desirable": 1.5, "undesirable": 0.5}
    found = loss(own, is_good, genesis.tensor(0.5), **weights).tolist()
    expected = [
        1.5 * (1 - s(B * (x - z))) if good else 0.5 * (1 - s(B * (z - x)))
        for x, good in zip(ratios[0], is_good.tolist(), strict=True)
    ]
    assert found == pytest.approx(expected, rel=1e-9)
    assert gradcheck(lambda x: loss(own._replace(log_probs=x), is_good, kl, **weights), (own.log_probs,))


def test_certain_and_impossible_answers_stay_finite() -> None:
    """ORPO's odds of a certain answer, and ratios of thousands of nats."""
    sums = genesis.tensor([0.0, -1e4, -30.0], requires_grad=True)
    zeros, lengths = genesis.zeros(3), genesis.tensor([1.0, 1.0, 3.0])
    chosen, rejected = Answers(sums, zeros, lengths), Answers(sums.flip(0) * 1, zeros, lengths)
    for name in ("dpo", "robust", "orpo", "simpo", "nca_pair", "apo_down"):
        loss = PAIRED[name].loss(chosen, rejected, **PAIRED[name].settings).sum()
        sums.grad = None
        loss.backward()
        assert np.isfinite([loss.item(), *sums.grad.tolist()]).all(), name
