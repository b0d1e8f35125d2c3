"""What all optimizers share: groups, state and its saving, skipped parameters, 2-byte parameters, errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from genesis import nn, optim
from genesis.dtypes import bfloat16
from genesis.errors import ConfigError, GradientError, ModelError
from genesis.functions.create import tensor
from genesis.op import registry
from genesis.optim.optimizer import Optimizer
from genesis.tensor import Tensor

ALL: dict[str, dict[str, Any]] = {each.__name__: {"lr": 0.01} for each in optim.OPTIMIZERS.values()} | {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adafactor": {},
    "Muon": {},
}
KINDS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SHAPES = ((6, 4), (5,), (4, 6))


def leaves(dtype: str = "float32", seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [tensor(rng.standard_normal(s), dtype=dtype, requires_grad=True) for s in SHAPES]


def give_gradients(params: list[Tensor], step: int) -> None:
    rng = np.random.default_rng(1000 + step)
    for p in params:
        p.grad = tensor(rng.standard_normal(p.shape), dtype=p.dtype)


def walk(optimizer: Optimizer, params: list[Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        give_gradients(params, step)
        optimizer.step()


def values(params: list[Tensor]) -> np.ndarray:
    return np.concatenate([p.detach().to("float64").numpy().reshape(-1) for p in params])


# --- Saving and loading -----------------------------------------------------------------------------------------------


@pytest.mark.sample(cases=20)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_a_resumed_optimizer_continues_to_the_bit(name: str, kind: str, dtype: str) -> None:
    make = getattr(optim, name)
    params = leaves(dtype)
    optimizer = make(params, **ALL[name], **KINDS[kind])
    walk(optimizer, params, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    middle = [p.detach().clone() for p in params]
    walk(optimizer, params, 3, 6)
    resumed = [m.requires_grad_() for m in middle]
    other = make(resumed, lr=123.0, **KINDS[kind])
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    walk(other, resumed, 3, 6)
    np.testing.assert_array_equal(values(resumed), values(params))


def test_implementations_load_each_others_state() -> None:
    params = leaves()
    optimizer = optim.AdamW(params, lr=0.01, fused=True)
    walk(optimizer, params, 0, 3)
    other_params = [p.detach().clone().requires_grad_() for p in params]
    other = optim.AdamW(other_params, lr=0.01, foreach=False)
    other.load_state_dict(optimizer.state_dict())
    walk(optimizer, params, 3, 5)
    walk(other, other_params, 3, 5)
    np.testing.assert_array_equal(values(params), values(other_params))


def test_state_dict_is_plain_values_and_tensors() -> None:
    params = leaves()
    optimizer = optim.AdamW([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], fused=True)
    walk(optimizer, params, 0, 2)
    saved = optimizer.state_dict()
    assert [g["params"] for g in saved["param_groups"]] == [[0], [1, 2]]
    assert [g["lr"] for g in saved["param_groups"]] == [0.5, 1e-3]
    assert set(saved["state"]) == {0, 1, 2}
    assert set(saved["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["state"][1]["step"] == 2 and saved["state"][1]["exp_avg"].shape == (5,)


def test_sgd_saves_what_torch_saves() -> None:
    for settings, kept in (({}, set()), ({"momentum": 0.9}, {"momentum_buffer"})):
        params = leaves()
        optimizer = optim.SGD(params, lr=0.1, **settings)
        walk(optimizer, params, 0, 2)
        saved = optimizer.state_dict()["state"]
        assert len(saved) == (3 if kept else 0) and all(set(s) == kept for s in saved.values())
    short = leaves("bfloat16")
    rounding = optim.SGD(short, lr=0.1, low_precision="stochastic")
    walk(rounding, short, 0, 2)
    assert {s["step"] for s in rounding.state_dict()["state"].values()} == {2}  # its noise depends on the step


def corrupt(saved: dict[str, Any], how: str) -> None:
    if how == "groups":
        saved["param_groups"].append({"params": []})
    elif how == "sizes":
        saved["param_groups"][0]["params"].append(3)
    elif how == "missing":
        del saved["state"][1]["exp_avg"]
    elif how == "extra":
        saved["state"][1]["other"] = tensor([1.0])
    elif how == "shape":
        saved["state"][1]["exp_avg"] = tensor(np.zeros(6, np.float32))
    elif how == "dtype":
        saved["state"][1]["exp_avg"] = tensor(np.zeros(5), dtype="float64")
    elif how == "kind":
        saved["state"][1]["exp_avg"] = [0.0] * 5
    elif how == "names":
        saved["param_groups"][0]["param_names"] = ["a", "x", "c"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("groups", r"groups of \[3, 0\]"),
        ("sizes", r"groups of \[4\]"),
        ("missing", "expected"),
        ("extra", "has .*other"),
        ("shape", r"saved exp_avg of parameter 1 is .*\(6,\)"),
        ("dtype", "float64"),
        ("kind", "list, not a tensor"),
        ("names", "'x' where this one has 'b'"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(how: str, message: str) -> None:
    params = leaves()
    optimizer = optim.AdamW(list(zip("abc", params, strict=True)), lr=0.01)
    walk(optimizer, params, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 9.0
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"] * 0
    corrupt(saved, how)
    before = optimizer.state[params[0]]["exp_avg"].numpy().copy()
    with pytest.raises(ModelError, match=message):
        optimizer.load_state_dict(saved)
    np.testing.assert_array_equal(optimizer.state[params[0]]["exp_avg"].numpy(), before)
    assert optimizer.param_groups[0]["lr"] == 0.01


# --- Groups, gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_groups_have_their_own_settings_and_may_be_added_later(kind: str) -> None:
    a, b, c = leaves()
    start = values([a, b, c])
    optimizer = optim.SGD([{"params": [a], "lr": 1.0}, {"params": b}], lr=0.5, **KINDS[kind])
    optimizer.add_param_group({"params": [c], "lr": 0.0, "weight_decay": 3.0})
    give_gradients([a, b, c], 0)
    step = np.concatenate([1.0 * a.grad.numpy().ravel(), 0.5 * b.grad.numpy(), 0.0 * c.grad.numpy().ravel()])
    optimizer.step()
    np.testing.assert_allclose(values([a, b, c]), start - step, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_a_parameter_without_gradient_stays_and_its_step_does_not_count(name: str, kind: str) -> None:
    params = leaves()
    decay = {} if name == "Rprop" else {"weight_decay": 0.1}
    optimizer = getattr(optim, name)(params, **decay, **ALL[name], **KINDS[kind])
    before = params[1].detach().numpy().copy()
    give_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    np.testing.assert_array_equal(params[1].detach().numpy(), before)
    assert params[1] not in optimizer.state
    optimizer.zero_grad()
    give_gradients(params, 1)
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [2, 1, 2]
    assert not np.array_equal(params[1].detach().numpy(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad(kind: str) -> None:
    params = leaves()
    optimizer = optim.SGD(params, **KINDS[kind])
    give_gradients(params, 0)
    params[2].grad = None
    optimizer.zero_grad(set_to_none=False)
    assert (params[0].grad.numpy() == 0).all() and params[2].grad is None
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("kind", KINDS)
def test_grad_norm_and_clipping_on_the_fly(kind: str) -> None:
    params, clipped = leaves(), leaves()
    optimizer, other = optim.SGD(params, lr=1.0, **KINDS[kind]), optim.SGD(clipped, lr=1.0, **KINDS[kind])
    give_gradients(params, 0)
    give_gradients(clipped, 0)
    norm = optimizer.grad_norm()
    assert norm.shape == () and norm.item() == pytest.approx(
        np.linalg.norm(np.concatenate([p.grad.numpy().ravel() for p in params])), rel=1e-6
    )
    optimizer.step(grad_scale=nn.utils.clip_scale(norm, 0.5))
    nn.utils.clip_grad_norm_(clipped, 0.5)
    other.step()
    np.testing.assert_allclose(values(params), values(clipped), rtol=0, atol=5e-7)
    assert other.grad_norm().item() == pytest.approx(0.5, rel=1e-5)


def test_a_closure_computes_the_loss_with_gradients() -> None:
    weight = tensor([2.0], requires_grad=True)
    optimizer = optim.SGD([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.item() == pytest.approx(2.0 - 0.1 * 4.0)


def test_a_step_marks_parameters_as_changed() -> None:
    """Backward through values from before the step is refused."""
    weight = tensor([2.0], requires_grad=True)
    for settings in KINDS.values():
        optimizer = optim.SGD([weight], lr=0.1, **settings)
        loss = (weight * weight).sum()
        weight.grad = tensor([1.0])
        optimizer.step()
        with pytest.raises(GradientError, match="changed in place"):
            loss.backward()


def test_repr_shows_groups() -> None:
    text = repr(optim.AdamW(leaves(), lr=0.25))
    assert "AdamW" in text and "group 0: 3 parameters" in text and "lr: 0.25" in text


# --- 2-byte parameters ------------------------------------------------------------------------------------------------


@pytest.mark.sample(cases=12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_masters_follow_the_float32_run(name: str, kind: str) -> None:
    """With float32 masters, a bfloat16 parameter is the rounded float32 parameter of a run on the same gradients."""
    narrow = leaves("bfloat16")
    wide = [p.detach().to("float32").requires_grad_() for p in narrow]
    optimizers = [getattr(optim, name)(p, **ALL[name], **KINDS[kind]) for p in (narrow, wide)]
    for step in range(4):
        give_gradients(narrow, step)
        for n, w in zip(narrow, wide, strict=True):
            w.grad = n.grad.to("float32")
        for optimizer in optimizers:
            optimizer.step()
    for n, w in zip(narrow, wide, strict=True):
        assert n.dtype is bfloat16
        np.testing.assert_array_equal(n.detach().numpy(), w.detach().to("bfloat16").numpy())
        np.testing.assert_array_equal(optimizers[0].saved_state(n)["master"].numpy(), w.detach().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_add_up_with_masters_and_with_stochastic_rounding(kind: str) -> None:
    """100 steps of 1e-3 on 1.0 are each below half of bfloat16's last place there, 2^-9."""
    results = {}
    for low_precision in ("master", "stochastic"):
        weight = tensor(np.ones(4096), dtype="bfloat16", requires_grad=True)
        optimizer = optim.SGD([weight], lr=1e-3, low_precision=low_precision, seed=7, **KINDS[kind])  # type: ignore[arg-type]
        for _ in range(100):
            weight.grad = tensor(np.ones(4096), dtype="bfloat16")
            optimizer.step()
        results[low_precision] = weight.detach().to("float64").numpy()
    assert (results["master"] == float(tensor(0.9, dtype="bfloat16").item())).all()
    # an unbiased walk: each step errs by at most 2^-8 with that chance; 100 steps, 4096 elements
    assert abs(results["stochastic"].mean() - 0.9) < 4 * 10 * 2**-9 / 64
    assert len(np.unique(results["stochastic"])) > 3


def test_stochastic_rounding_is_the_same_in_all_implementations_and_other_for_other_seeds() -> None:
    found = []
    for seed, settings in ((7, KINDS["plain"]), (7, KINDS["foreach"]), (7, KINDS["fused"]), (8, KINDS["fused"])):
        params = leaves("bfloat16")
        walk(optim.AdamW(params, lr=0.01, low_precision="stochastic", seed=seed, **settings), params, 0, 4)
        found.append(values(params))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[3])


def test_stochastic_rounding_keeps_no_copy_and_resumes() -> None:
    params = leaves("bfloat16")
    optimizer = optim.AdamW(params, lr=0.01, low_precision="stochastic")
    walk(optimizer, params, 0, 2)
    assert "master" not in optimizer.state[params[0]]
    saved, middle = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    walk(optimizer, params, 2, 4)
    resumed = [m.requires_grad_() for m in middle]
    other = optim.AdamW(resumed, low_precision="stochastic", fused=True)
    other.load_state_dict(saved)
    walk(other, resumed, 2, 4)
    np.testing.assert_array_equal(values(resumed), values(params))


def test_stochastic_rounding_is_unbiased_and_goes_to_neighbours() -> None:
    value = np.float32(1 + 0.3 * 2**-7)
    rounded = (
        registry["stochastic_round"](tensor(np.full(100_000, value)).array, dtype=bfloat16, seed=0, offset=0)
        .view_np()
        .astype(np.float64)
    )
    assert set(rounded) == {1.0, 1 + 2**-7}
    share = float((rounded > 1).mean())
    assert abs(share - 0.3) < 4 * np.sqrt(0.21 / 100_000)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, 3.4e38], np.float32)
    found = registry["stochastic_round"](tensor(special).array, dtype=bfloat16, seed=0, offset=0).view_np()
    assert np.isposinf(found[0]) and np.isneginf(found[1]) and np.isnan(found[2]) and found[3] == 0 and found[4] > 3e38


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("AdamW", {"lr": -1.0}, "lr is -1.0"),
        ("AdamW", {"lr": float("nan")}, "lr is nan"),
        ("AdamW", {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ("Adam", {"eps": -1e-8}, "eps"),
        ("AdamW", {"weight_decay": -0.1}, "weight_decay"),
        ("SGD", {"momentum": -0.5}, "momentum"),
        ("SGD", {"nesterov": True}, "nesterov needs"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs"),
        ("Lion", {"betas": (-0.1, 0.9)}, r"betas\[0\]"),
        ("Muon", {"adjust_lr_fn": "other"}, "adjust_lr_fn"),
        ("Muon", {"ns_steps": 100}, "ns_steps"),
        ("Adafactor", {"d": 0.5}, "d is 0.5"),
        ("Adafactor", {"beta2_decay": 0.8}, "beta2_decay"),
        ("AdamW", {"foreach": True, "fused": True}, "exclude each other"),
        ("AdamW", {"low_precision": "none"}, "low_precision"),
    ],
)
def test_settings_out_of_range(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(optim, name)(leaves(), **settings)


def test_parameters_that_cannot_be_trained() -> None:
    a = leaves()[0]
    with pytest.raises(ConfigError, match="no parameters"):
        optim.SGD([])
    with pytest.raises(ConfigError, match="occurs twice"):
        optim.SGD([a, a])
    with pytest.raises(ConfigError, match=r"'w'.*occurs twice"):
        optim.SGD([{"params": [a]}, {"params": [("w", a)]}])
    with pytest.raises(ConfigError, match="not a float leaf"):
        optim.SGD([a * 2])
    with pytest.raises(ConfigError, match="not a float leaf"):
        optim.SGD([tensor([1, 2])])
    with pytest.raises(ConfigError, match="ndarray, not a tensor"):
        optim.SGD([np.zeros(3)])
    with pytest.raises(ConfigError, match=r"float16.*master"):
        optim.SGD([a.detach().half()], low_precision="stochastic")
    optimizer = optim.SGD([a])
    a.grad = tensor(np.zeros((6, 4)), dtype="float32")
    with pytest.raises(GradientError, match="grad_scale has shape"):
        optimizer.step(grad_scale=tensor([1.0]))


# --- Groups by kind ---------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 4)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.lm_head = nn.Linear(4, 10, bias=False)


def test_decay_is_for_matrices() -> None:
    groups = optim.decay_groups(Small().named_parameters(), 0.1)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert [n for n, _ in groups[0]["params"]] == ["embed_tokens.weight", "proj.weight", "lm_head.weight"]
    assert [n for n, _ in groups[1]["params"]] == ["proj.bias", "norm.weight"]
    assert len(optim.decay_groups([("w", leaves()[0])], 0.1)) == 1


def test_muon_takes_hidden_matrices() -> None:
    model = Small()
    groups = optim.muon_groups(model.named_parameters(), 0.1)
    assert [[n for n, _ in g["params"]] for g in groups] == [
        ["proj.weight"],
        ["embed_tokens.weight", "lm_head.weight"],
        ["proj.bias", "norm.weight"],
    ]
    assert [g["use_muon"] for g in groups] == [True, False, False]
    optimizer = optim.Muon(groups)
    for p in model.parameters():
        p.grad = p.detach() * 0 + 1
    optimizer.step()
    assert set(optimizer.state[model.proj.weight]) == {"step", "momentum_buffer"}
    assert set(optimizer.state[model.lm_head.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["param_names"] == ["proj.weight"]


def test_muon_without_matrices_is_adamw() -> None:
    results = []
    for make in (
        lambda p: optim.Muon(p, lr=0.01, weight_decay=0.2),
        lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.2, betas=(0.9, 0.95)),
    ):
        params = leaves()[1:2]
        walk(make(params), params, 0, 4)
        results.append(values(params))
    np.testing.assert_array_equal(*results)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    from genesis.optim.rules.muon import orthogonalize

    for shape in ((6, 4), (4, 6), (5, 5)):
        x = tensor(np.random.default_rng(0).standard_normal(shape))
        found = np.linalg.svd(orthogonalize(x).numpy(), compute_uv=False)
        assert found.min() > 0.3 and found.max() < 1.6
