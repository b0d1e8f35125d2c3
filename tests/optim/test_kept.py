"""How values are kept: split masters, bfloat16 moments and parameters rounded at random, float32 sums of gradients."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genesis import nn, optim
from genesis.dtypes import bfloat16, float32, int16
from genesis.errors import ConfigError, ModelError
from genesis.functions.create import tensor
from genesis.op import registry
from genesis.optim.optimizer import Optimizer
from genesis.tensor import Tensor

SHAPES = ((60, 40), (17,), (), (3, 5, 7))
RULES: dict[str, dict[str, Any]] = {
    each.__name__: {"lr": 0.01} for each in optim.OPTIMIZERS.values() if each.elementwise
} | {
    "SGD": {"lr": 0.1, "weight_decay": 0.1},
    "Momentum": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
}


def make(name: str, params: Any, **more: Any) -> Optimizer:
    made: Optimizer = getattr(optim, "SGD" if name == "Momentum" else name)(params, **{**RULES[name], **more})
    return made


def leaves(dtype: str = "bfloat16") -> list[Tensor]:
    rng = np.random.default_rng(0)
    return [tensor(rng.standard_normal(s), dtype=dtype, requires_grad=True) for s in SHAPES]


def walk(optimizer: Optimizer, params: list[Tensor], first: int, last: int, dtype: str = "bfloat16") -> None:
    """Steps on random gradients; parameter 1 has none in step 2."""
    for step in range(first, last):
        rng = np.random.default_rng(100 + step)
        optimizer.zero_grad()
        for i, p in enumerate(params):
            grad = tensor(rng.standard_normal(p.shape), dtype=dtype)
            p.grad = None if (i, step) == (1, 2) else grad
        optimizer.step(grad_scale=0.5)


def bits(params: list[Tensor]) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in params)


# --- Split masters ----------------------------------------------------------------------------------------------------


def adamw_in_numpy(params: list[np.ndarray], steps: int) -> list[np.ndarray]:
    """20 lines of AdamW in float32 numpy, its constants in float64: what `walk` does with the rule above."""
    rule, kind = RULES["AdamW"], np.float32
    (beta1, beta2), lr, decay, scale = rule["betas"], rule["lr"], rule["weight_decay"], 0.5
    first, second = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    counts = [0] * len(params)
    for step in range(steps):
        rng = np.random.default_rng(100 + step)
        for i, p in enumerate(params):
            g = np.asarray(rng.standard_normal(p.shape)).astype(ml_dtypes.bfloat16).astype(kind)
            if (i, step) == (1, 2):
                continue
            counts[i] += 1
            root = np.sqrt(1 - beta2 ** counts[i])
            first[i] = first[i] * kind(beta1) + g * kind((1 - beta1) * scale)
            second[i] = second[i] * kind(beta2) + g * g * kind((1 - beta2) * scale * scale)
            alpha = kind(lr / (1 - beta1 ** counts[i]) * root)
            update = first[i] / (np.sqrt(second[i]) + kind(1e-8 * root)) * alpha
            params[i] = p * kind(1 - lr * decay) - update
    return params


def test_split_masters_are_those_of_numpy_bit_for_bit_over_20_steps() -> None:
    params = leaves()
    expected = adamw_in_numpy([p.detach().numpy().astype(np.float32) for p in params], 20)
    optimizer = make("AdamW", params, fused=True)
    walk(optimizer, params, 0, 20)
    for p, master in zip(params, expected, strict=True):
        found = optimizer.saved_state(p)["master"]
        np.testing.assert_array_equal(found.numpy().view(np.uint32), np.asarray(master, np.float32).view(np.uint32))
        np.testing.assert_array_equal(p.detach().numpy(), master.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", RULES)
def test_split_masters_are_those_that_are_kept_whole(name: str) -> None:
    split, whole = leaves(), leaves()
    fused, foreach = make(name, split, fused=True), make(name, whole, foreach=True)
    walk(fused, split, 0, 20)
    walk(foreach, whole, 0, 20)
    assert "master_low" in fused.state[split[0]] and "master" not in fused.state[split[0]]
    for a, b in zip(split, whole, strict=True):
        one, other = fused.saved_state(a), foreach.saved_state(b)
        assert one.keys() == other.keys()
        for key in one.keys() - {"step"}:
            np.testing.assert_array_equal(one[key].numpy(), other[key].numpy(), err_msg=key)
    assert bits(split) == bits(whole)


def test_a_split_master_takes_two_bytes_beside_the_weight() -> None:
    params = leaves()
    optimizer = make("AdamW", params, fused=True)
    walk(optimizer, params, 0, 1)
    flat = optimizer._flats[0][0]
    assert {name: b.dtype for name, b in flat.states.items()} == {
        "exp_avg": float32, "exp_avg_sq": float32, "master_low": int16,
    }  # fmt: skip


def test_float16_keeps_whole_masters() -> None:
    params = leaves("float16")
    optimizer = make("AdamW", params, fused=True)
    walk(optimizer, params, 0, 2, "float16")
    assert optimizer.state[params[0]]["master"].dtype is float32


@pytest.mark.parametrize(("save", "load"), [({"fused": True}, {}), ({}, {"fused": True}), ({"fused": True},) * 2])
def test_states_with_masters_go_from_any_implementation_to_any(save: dict[str, Any], load: dict[str, Any]) -> None:
    params, others = leaves(), leaves()
    optimizer, other = make("AdamW", params, **save), make("AdamW", others, **load)
    walk(optimizer, params, 0, 3)
    walk(other, others, 5, 6)
    other.load_state_dict(optimizer.state_dict())
    assert bits(others) == bits(params), "parameters become their masters, rounded"
    walk(optimizer, params, 3, 6)
    walk(other, others, 3, 6)
    assert bits(others) == bits(params)


def test_values_put_into_a_parameter_later_count_to_half_a_last_place() -> None:
    """The residual stays: a weight that is put away and put back continues as if nothing had happened."""
    model = nn.Linear(40, 30, bias=False).bfloat16()
    optimizer = make("SGD", model.parameters(), fused=True, weight_decay=0.0)
    weight = model.weight
    for _ in range(3):
        weight.grad = tensor(np.full((30, 40), 1e-3), dtype="bfloat16")
        optimizer.step()
    kept, before = weight.detach().clone(), optimizer.saved_state(weight)["master"].numpy().copy()
    fresh = tensor(np.random.default_rng(1).standard_normal((30, 40)), dtype="bfloat16")
    model.load_state_dict({"weight": fresh})
    master = optimizer.saved_state(weight)["master"].numpy()
    place = np.spacing(fresh.numpy()).astype(np.float64)
    assert (np.abs(master - fresh.numpy().astype(np.float64)) <= np.abs(place) / 2).all()
    assert (master != fresh.numpy().astype(np.float32)).any()
    model.load_state_dict({"weight": kept})
    np.testing.assert_array_equal(optimizer.saved_state(weight)["master"].numpy(), before)


def test_nan_in_a_master_is_nan_in_the_weight() -> None:
    """A NaN with all bits set would carry into the sign of the weight if it were rounded like a number."""
    for pattern in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):
        master = tensor(np.array([pattern], np.uint32).view(np.float32))
        weight, low = tensor(np.zeros(1), dtype="bfloat16"), tensor(np.zeros(1), dtype="int16")
        registry["split_master"](weight.array, low.array, master.array)
        assert np.isnan(weight.numpy()).all()
        assert np.isnan(registry["join_master"](weight.array, low.array).numpy()).all()


def test_every_kind_of_float32_is_split_and_joined_without_loss() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 200_000).astype(np.uint32).view(np.float32)
    values = np.concatenate([values[~np.isnan(values)], np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])
    weight, low = tensor(np.zeros(len(values)), dtype="bfloat16"), tensor(np.zeros(len(values)), dtype="int16")
    registry["split_master"](weight.array, low.array, tensor(values).array)
    found = registry["join_master"](weight.array, low.array).numpy()
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))


# --- Rounded at random ------------------------------------------------------------------------------------------------

KEPT: dict[str, dict[str, Any]] = {
    "moments": {"state_dtype": "bfloat16"},
    "all": {"state_dtype": "bfloat16", "low_precision": "stochastic"},
    "weights": {"low_precision": "stochastic"},
}


@pytest.mark.parametrize(
    ("kept", "dtype"), [*((k, d) for k in KEPT for d in ("bfloat16", "float32")), ("moments", "float16")]
)
@pytest.mark.parametrize("name", RULES)
def test_fused_steps_round_as_the_op_for_one_tensor_does(name: str, kept: str, dtype: str) -> None:
    """foreach widens, updates and rounds by `stochastic_round`; fused does it in one op, over all parameters."""
    flat, single = leaves(dtype), leaves(dtype)
    fused = make(name, flat, fused=True, seed=5, **KEPT[kept])
    foreach = make(name, single, foreach=True, seed=5, **KEPT[kept])
    walk(fused, flat, 0, 5, dtype)
    walk(foreach, single, 0, 5, dtype)
    for a, b in zip(flat, single, strict=True):
        one, other = fused.saved_state(a), foreach.saved_state(b)
        for key in one.keys() - {"step"}:
            assert one[key].dtype is other[key].dtype
            np.testing.assert_array_equal(one[key].numpy(), other[key].numpy(), err_msg=key)
    assert bits(flat) == bits(single)


def test_other_seeds_steps_and_states_have_other_noise() -> None:
    params, others = leaves(), leaves()
    optimizer = make("AdamW", params, fused=True, seed=5, **KEPT["all"])
    other = make("AdamW", others, fused=True, seed=6, **KEPT["all"])
    walk(optimizer, params, 0, 4)
    walk(other, others, 0, 4)
    assert bits(params) != bits(others)
    noise = optimizer._noise(params[0])
    starts = sorted(noise.counter(step, stream) for step in (1, 2, 3) for stream in range(3))
    assert min(np.diff(starts)) >= optimizer._counters_per_stream


def test_moments_rounded_at_random_stay_right_in_the_mean() -> None:
    """100 steps of a second moment whose changes are far below bfloat16's last place there."""
    weight = tensor(np.zeros(4096), dtype="float32", requires_grad=True)
    optimizer = make("AdamW", [weight], fused=True, state_dtype="bfloat16", betas=(0.9, 0.999))
    for _ in range(100):
        weight.grad = tensor(np.ones(4096), dtype="float32")
        optimizer.step()
    second = optimizer.state[weight]["exp_avg_sq"]
    assert second.dtype is bfloat16
    expected = 1 - 0.999**100
    values = second.numpy().astype(np.float64)
    # each of 100 roundings errs by at most a last place, 2^-11 below 0.125, independently in 4096 elements
    assert abs(values.mean() - expected) < 4 * 10 * 2**-11 / 64
    assert len(np.unique(values)) > 3


def test_bfloat16_moments_resume_to_the_bit() -> None:
    params = leaves()
    optimizer = make("AdamW", params, fused=True, **KEPT["all"])
    walk(optimizer, params, 0, 3)
    saved, middle = optimizer.state_dict(), [p.detach().clone() for p in params]
    saved = {**saved, "state": {n: {k: _copied(v) for k, v in s.items()} for n, s in saved["state"].items()}}
    walk(optimizer, params, 3, 6)
    resumed = [m.requires_grad_() for m in middle]
    other = make("AdamW", resumed, fused=True, **KEPT["all"])
    other.load_state_dict(saved)
    walk(other, resumed, 3, 6)
    assert bits(resumed) == bits(params)
    with pytest.raises(ModelError, match=r"saved exp_avg .* expected genesis.float32"):
        make("AdamW", leaves(), fused=True, low_precision="stochastic").load_state_dict(saved)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# --- Gradients --------------------------------------------------------------------------------------------------------


def test_gradients_of_many_micro_steps_add_up_in_float32() -> None:
    """256 gradients of 1 and one of 2^-8: in bfloat16 the sum stays at 256 and the small one is lost."""
    sums = {}
    for grad_dtype in ("float32", None):
        weight = tensor(np.zeros(8), dtype="bfloat16", requires_grad=True)
        optimizer = make("SGD", [weight], fused=True, grad_dtype=grad_dtype)
        for value in [1.0] * 300 + [2.0**-8]:
            (weight * value).sum().backward()
        assert weight.grad is not None
        sums[grad_dtype] = weight.grad.numpy().astype(np.float64)[0]
        assert weight.grad.array.storage is optimizer._flats[0][0].gradients.storage
    assert sums == {"float32": 300 + 2.0**-8, None: 256.0}


@pytest.mark.parametrize("name", RULES)
def test_steps_take_float32_gradients_of_bfloat16_parameters(name: str) -> None:
    """The same values in both types give the same step; norm, clipping and zeroing work on them, too."""
    found = []
    for grad_dtype in ("float32", None):
        params = leaves()
        optimizer = make(name, params, fused=True, grad_dtype=grad_dtype)
        walk(optimizer, params, 3, 6)
        found.append(bits(params))
        assert all(p.grad is not None and p.grad.dtype is (float32 if grad_dtype else bfloat16) for p in params)
    assert found[0] == found[1]
    norm = np.linalg.norm(np.concatenate([p.grad.numpy().astype(np.float64).ravel() for p in params]))
    assert optimizer.grad_norm().item() == pytest.approx(norm, rel=1e-6)
    nn.utils.clip_grad_norm_(params, 0.1)
    assert optimizer.grad_norm().item() == pytest.approx(0.1, rel=1e-2)
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.grad_norm().item() == 0


def test_a_wider_gradient_type_never_narrows() -> None:
    weight = tensor(np.zeros(8), dtype="float32", requires_grad=True)
    make("SGD", [weight], fused=True, grad_dtype="bfloat16")
    weight.sum().backward()
    assert weight.grad is not None and weight.grad.dtype is float32


# --- Clipping, errors -------------------------------------------------------------------------------------------------


def test_the_clip_factor_reports_and_guards() -> None:
    params = leaves()
    optimizer = make("AdamW", params, fused=True)
    walk(optimizer, params, 0, 1)
    report, loss = tensor(np.zeros(4, np.float32)), tensor(np.float32(2.5))
    factor = optimizer.clip_factor(report, loss, 1.0)
    norm = optimizer.grad_norm()
    assert factor.item() == nn.utils.clip_scale(norm, 1.0).item() < 1
    np.testing.assert_array_equal(report.numpy()[:2], [2.5, norm.item()])
    before = bits(params)
    optimizer.clip_factor(report, tensor(np.float32("inf")), None)
    optimizer.step(grad_scale=factor)
    assert bits(params) == before, "the loss was not finite"
    optimizer.clip_factor(report, loss, 1.0)
    optimizer.step(grad_scale=factor)
    assert bits(params) == before, "nor is any step made later"
    assert report.numpy()[0] == 2.5 and np.isnan(report.numpy()[2:]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_dtype": "float16", "fused": True}, "state_dtype is .*float16"),
        ({"grad_dtype": "float32"}, "grad_dtype .*fused"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("AdamW", leaves(), **settings)


def test_what_cannot_be_captured_says_why() -> None:
    assert make("AdamW", leaves(), fused=True).not_capturable is None
    assert make("AdamW", leaves(), fused=True, **KEPT["all"]).not_capturable is None
    assert optim.Muon(leaves(), fused=True).not_capturable is None
    assert optim.Adafactor(leaves(), fused=True).not_capturable is None
    assert "on the host" in (make("AdamW", leaves(), foreach=False).not_capturable or "")
    rounded = optim.Muon(leaves(), fused=True, state_dtype="bfloat16")
    assert "Muon rounds" in (rounded.not_capturable or "")
