"""Names of settings: no optimizer, group, saved state or scheduler takes one that it does not know."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from genesis import optim
from genesis.errors import ConfigError, GenesisError, KeywordError, ModelError
from genesis.functions.create import tensor
from genesis.tensor import Tensor

NAMES = tuple(each.__name__ for each in optim.OPTIMIZERS.values())


def leaf() -> Tensor:
    return tensor(np.ones((4, 3)), dtype="float32", requires_grad=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"weigth_decay": 0.3}, "did you mean weight_decay?"),
        ({"Lr": 0.3}, "did you mean lr?"),
        ({"for_each": True}, "did you mean foreach?"),
        ({"low_precison": "master"}, "did you mean low_precision?"),
        ({"zzz": 1}, "it takes "),
    ],
)
def test_an_unknown_setting_is_an_error_that_names_the_nearest(name: str, given: dict[str, Any], meant: str) -> None:
    wrong = next(iter(given))
    if name == "Rprop" and "weight_decay" in meant:
        meant = "it takes "  # it has no such setting
    with pytest.raises(KeywordError) as raised:
        getattr(optim, name)([leaf()], **given)
    assert raised.value.what == f"{name} takes no keyword {wrong!r}"
    assert raised.value.next.startswith(meant)
    assert isinstance(raised.value, TypeError)
    for make in (
        lambda: getattr(optim, name)([{"params": [leaf()], **given}]),
        lambda: getattr(optim, name)([leaf()]).add_param_group({"params": [leaf()], **given}),
        lambda: getattr(optim, name)([leaf()]).param_groups[0].update(given),
        lambda: getattr(optim, name)([leaf()]).param_groups[0].setdefault(wrong, 1),
    ):
        with pytest.raises(KeywordError, match=f"group of {name} takes no keyword '{wrong}'"):
            make()


@pytest.mark.parametrize(
    ("name", "setting"),
    [(n, s) for n in NAMES for s in ("amsgrad", "differentiable") if s != "amsgrad" or n not in ("Adam", "AdamW")],
)
def test_a_setting_of_torchs_is_refused_by_name_unless_its_value_changes_nothing(name: str, setting: str) -> None:
    make = getattr(optim, name)
    for value in (False, None):
        assert setting not in make([leaf()], **{setting: value}).param_groups[0]
        assert setting not in make([{"params": [leaf()], setting: value}]).param_groups[0]
    for call in (
        lambda: make([leaf()], **{setting: True}),
        lambda: make([{"params": [leaf()], setting: True}]),
    ):
        with pytest.raises(KeywordError, match=rf"{name} does not offer {setting}=True \| remove it"):
            call()


def test_decoupled_weight_decay_is_what_the_class_says() -> None:
    for value in (True, False):
        assert optim.Adam([leaf()], decoupled_weight_decay=value).param_groups[0]["decoupled_weight_decay"] == value
    optim.AdamW([leaf()], decoupled_weight_decay=True)  # type: ignore[call-arg]
    with pytest.raises(KeywordError, match="use Adam for an L2 penalty"):
        optim.AdamW([leaf()], decoupled_weight_decay=False)  # type: ignore[call-arg]


def test_settings_of_the_whole_optimizer_are_none_of_a_group() -> None:
    with pytest.raises(KeywordError, match=r"fused is .* to AdamW"):
        optim.AdamW([{"params": [leaf()], "fused": True}])


def test_a_group_refuses_names_later_too_and_copies_do() -> None:
    optimizer = optim.AdamW([leaf()], lr=0.5)
    group = optimizer.param_groups[0]
    for held in (group, copy.deepcopy(optimizer).param_groups[0]):
        held["lr"] = 0.25
        with pytest.raises(KeywordError, match="did you mean lr"):
            held["l_r"] = 0.1
        with pytest.raises(KeywordError, match="weight_decay"):
            held |= {"lr": 3.0, "weight_dcay": 1.0}
        assert held["lr"] == 0.25
    assert dict(group)["weight_decay"] == 1e-2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"parms": []}], "under 'params', not one with the keys parms"),
        ([{"params": []}, 3], "under 'params', not of type int"),
    ],
)
def test_a_group_needs_its_parameters(groups: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optim.SGD(groups)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": "fast"}, {"betas": 0.9}, {"betas": (0.9,)}, {"eps": None}, {"fused": "no"}, {"foreach": "no"},
        {"maximize": "no"}, {"seed": "a"},
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_is_a_config_error(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError) as raised:
        optim.AdamW([leaf()], **settings)
    assert raised.value.what.startswith(f"{name} is {value!r}, and must be")


def test_a_saved_state_with_unknown_names_changes_nothing() -> None:
    optimizer = optim.AdamW([leaf()], lr=0.5)
    good = optimizer.state_dict()
    group = good["param_groups"][0]
    neutral = {"amsgrad": False, "capturable": False, "decoupled_weight_decay": True}
    optimizer.load_state_dict({**good, "param_groups": [{**group, "lr": 0.4, **neutral}]})
    assert optimizer.param_groups[0]["lr"] == 0.4
    bad: list[tuple[type[GenesisError], dict[str, Any]]] = [
        (KeywordError, {**good, "param_groups": [{**group, "lr": 0.3, "weigth_decay": 1}]}),
        (KeywordError, {**good, "param_groups": [{**group, "lr": 0.3, "differentiable": True}]}),
        (ConfigError, {**good, "param_groups": [{**group, "lr": -0.3}]}),
        (ModelError, {**good, "sched": 1}),
        (ModelError, {"state": {}}),
    ]
    for kind, state in bad:
        with pytest.raises(kind):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.4


def test_scalers_and_schedulers_load_their_own_state_alone() -> None:
    scheduler = optim.LambdaLR(optim.SGD([leaf()]), lambda step: 1.0)
    for each in (optim.GradScaler(), scheduler):
        with pytest.raises(ModelError, match="has the entries"):
            each.load_state_dict({**each.state_dict(), "growth": 2.0})
        with pytest.raises(ModelError, match="has the entries"):
            each.load_state_dict({})
