"""Lists and dicts of parameters, buffers as attributes, hooks of states, layers with heads, and lazy ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.errors import DTypeError, IndexRangeError, ModelError, ShapeError, UsageError


def test_a_list_of_parameters() -> None:
    found = nn.ParameterList([genesis.ones(2), 3])
    found += [nn.Parameter(genesis.zeros(1))]
    assert list(found.state_dict()) == ["0", "2"]
    assert isinstance(found[0], nn.Parameter) and found[-2] == 3 and len(found[1:]) == 2
    found[1] = genesis.ones(4)
    assert [p.numel() for p in found.parameters()] == [2, 1, 4] and len(list(found)) == 3
    with pytest.raises(IndexRangeError):
        found[3]
    with pytest.raises(DTypeError):
        found.extend(genesis.ones(2))
    with pytest.raises(NotImplementedError):
        found(1)
    assert "(1): Parameter containing: [genesis.float32 of size 4]" in repr(found)


def test_a_dict_of_parameters() -> None:
    found = nn.ParameterDict({"b": genesis.ones(2), "a": genesis.zeros(1)})
    assert list(found) == ["a", "b"] == list(found.state_dict())  # a plain dict is sorted, as in torch
    found.update([("z", 1), ("c", genesis.ones(3))])
    assert found.get("z") == 1 and found.get("y", 5) == 5 and found.setdefault("c").shape == (3,)
    assert list((found | nn.ParameterDict([("q", 2)])).keys()) == ["a", "b", "z", "c", "q"]
    assert found.popitem()[0] == "c" and found.pop("z") == 1 and list(reversed(found)) == ["b", "a"]
    for wrong in ("u.v", "keys"):
        with pytest.raises(KeyError):
            found[wrong] = genesis.ones(1)
    with pytest.raises(AttributeError):
        found["none"]
    with pytest.raises(UsageError):
        found.update([(1, 2, 3)])
    found.clear()
    assert len(found) == 0 and not list(found.parameters())


def test_buffers_are_registered_when_assigned() -> None:
    module = nn.Module()
    module.kept, module.passing = nn.Buffer(genesis.ones(2)), nn.Buffer(genesis.ones(1), persistent=False)
    assert [name for name, _ in module.named_buffers()] == ["kept", "passing"] and list(module.state_dict()) == ["kept"]
    module.passing = nn.Buffer(genesis.ones(1))
    assert list(module.double().state_dict()) == ["kept", "passing"] and module.kept.dtype is genesis.float64


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1)))


def test_hooks_of_states() -> None:
    seen: list[Any] = []
    old = net()
    old.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append((prefix, keep_vars)))
    handle = old[1].register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}old": state.pop(f"{prefix}0.bias")})
    )
    state = old.state_dict()
    assert seen == [("", False)] and list(state) == ["0.weight", "0.bias", "1.0.weight", "1.old"]
    handle.remove()
    assert "1.0.bias" in old.state_dict()
    new = net()
    with pytest.raises(ModelError):
        new.load_state_dict(state)
    rename = new[1].register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.update({f"{prefix}0.bias": state.pop(f"{prefix}old")})
    )
    assert new.load_state_dict(state) == ([], []) and "1.old" in state
    assert genesis.equal(new(genesis.ones(2)), old(genesis.ones(2)))
    rename.remove()
    assert new.load_state_dict(old.state_dict()) == ([], [])
    forgive = new.register_load_state_dict_post_hook(lambda module, result: result.missing_keys.clear())
    assert new.load_state_dict({}) == ([], [])
    forgive.remove()
    new.register_load_state_dict_pre_hook(lambda *args: args[-1].append("the state is too old"))
    with pytest.raises(ModelError, match="too old"):
        new.load_state_dict(old.state_dict())


class Counting(nn.Module):
    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_further_values_of_states() -> None:
    first, second = nn.ModuleDict({"a": Counting()}), nn.ModuleDict({"a": Counting()})
    first["a"].count = 5
    second.load_state_dict(first.state_dict())
    assert second["a"].count == 5 and list(first.state_dict()) == ["a._extra_state"]
    with pytest.raises(ModelError):
        second.load_state_dict({})


def test_modules_are_replaced_and_converted() -> None:
    module = net()
    module.set_submodule("1.0", nn.ReLU())
    assert isinstance(module[1][0], nn.ReLU)
    for wrong in (("", nn.ReLU(), False), ("7", nn.ReLU(), True), ("0.weight", nn.ReLU(), False)):
        with pytest.raises(UsageError):
            module.set_submodule(*wrong)
    module(genesis.ones(2)).sum().backward()
    weight = module[0].weight
    assert module.type(genesis.float64)[0].weight is weight and weight.dtype is weight.grad.dtype is genesis.float64
    assert module.to_empty(device="cpu")[0].weight.shape == (3, 2)
    assert isinstance(module.pop(1), nn.Sequential) and len(module + nn.Sequential(nn.Tanh())) == 2


def test_lazy_layers_take_their_width_from_input_or_state() -> None:
    lazy, loaded = nn.LazyLinear(3), nn.LazyLinear(3)
    assert lazy(genesis.ones(5, 4)).shape == (5, 3) and type(lazy) is nn.Linear and lazy.weight.any()
    loaded.load_state_dict(lazy.state_dict())
    assert genesis.equal(loaded(genesis.ones(4)), lazy(genesis.ones(4)))


def test_losses_with_their_output_layer() -> None:
    x, target = genesis.randn(6, 8, dtype=genesis.float64), genesis.tensor([0, 1, 2, 3, 8, 9])
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(8, 10, [2, 5], div_value=2.0, dtype=genesis.float64)
    logs = adaptive.log_prob(x)
    assert np.allclose(logs.exp().sum(1).detach().numpy(), 1)
    output, loss = adaptive(x, target)
    assert genesis.allclose(output, logs.gather(1, target[:, None])[:, 0]) and genesis.allclose(loss, -output.mean())
    assert set(adaptive.predict(x).tolist()) <= set(range(10))
    linear = nn.LinearCrossEntropyLoss(8, 5, out_features=(2,), bias=True, dtype=genesis.float64)
    labels = genesis.tensor([[0, 1]] * 6)
    logits = linear.linear(x).reshape(6, 5, 2)
    assert genesis.allclose(linear(x, labels), nn.functional.cross_entropy(logits, labels))
    for error, make in (
        (UsageError, lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [5, 2])),
        (IndexRangeError, lambda: adaptive(x, target + 1)),
        (ShapeError, lambda: adaptive(x, target[:2])),
        (ShapeError, lambda: nn.LinearCrossEntropyLoss(8, 5, weight=genesis.ones(3))),
    ):
        with pytest.raises(error):
            make()
