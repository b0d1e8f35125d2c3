"""Module: registration, names, tied parameters, state, hooks, moving, repr."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import genesis.nn as nn
from genesis.backend import Device
from genesis.dtypes import bfloat16, float32, float64
from genesis.errors import DeviceError, DTypeError, IndexRangeError, KeywordError, ModelError, UsageError
from genesis.functions.create import ones, tensor, zeros
from genesis.functions.random import randn
from genesis.nn.parameter import Parameter, take_memory
from genesis.ops.shape import joined
from genesis.random import manual_seed
from genesis.tensor import Tensor


class Tied(nn.Module):
    """A table, a head on it, a shared layer, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.layers[0]
        self.register_buffer("scale", tensor([2.0]))
        self.register_buffer("table", zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.again(x)) * self.scale  # type: ignore[no-any-return]


NAMES = ["embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
EVERY = {*NAMES, "scale", "head.weight", "again.weight", "again.bias"}


# --- Registration -----------------------------------------------------------------------------------------------------


def test_all_of_nn_is_exported() -> None:
    assert nn.__all__ == sorted(nn.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert all(hasattr(nn, name) for name in nn.__all__)
    defined = {n for n, v in vars(nn).items() if isinstance(v, type) and issubclass(v, (nn.Module, Parameter))}
    assert defined <= set(nn.__all__)


def test_assignment_registers_and_tied_parameters_come_once() -> None:
    model = Tied()
    assert [n for n, _ in model.named_parameters()] == NAMES
    assert len(list(model.parameters())) == 5
    assert {n for n, _ in model.named_parameters(remove_duplicate=False)} == EVERY - {"scale"}
    assert [n for n, _ in model.named_buffers()] == ["scale", "table"]
    assert [n for n, _ in model.named_modules()] == ["", "embed", "layers", "layers.0", "layers.1", "head"]
    assert [n for n, _ in model.named_parameters("model", recurse=False)] == []
    assert next(n for n, _ in model.layers.named_parameters("x")) == "x.0.weight"
    assert len(list(model.modules())) == 6
    assert [n for n, _ in model.named_children()] == ["embed", "layers", "head", "again"]


def test_attributes_of_each_kind_can_be_replaced_and_removed() -> None:
    model = nn.Linear(2, 3)
    old = model.weight
    model.weight = Parameter(ones(3, 2))
    assert model.weight is not old and [n for n, _ in model.named_parameters()] == ["weight", "bias"]
    model.bias = None
    assert [n for n, _ in model.named_parameters()] == ["weight"] and model.bias is None
    with pytest.raises(DTypeError, match=r"weight is a Parameter of Linear, not Tensor"):
        model.weight = ones(3, 2)
    del model.weight
    assert not hasattr(model, "weight") and list(model.parameters()) == []
    model.register_buffer("b", ones(1))
    model.b = zeros(2)
    assert dict(model.named_buffers())["b"].shape == (2,)
    model.b = None
    assert list(model.named_buffers()) == []
    model.part = nn.ReLU()
    model.part = nn.SiLU()
    assert isinstance(model.part, nn.SiLU) and "part" in dir(model)
    model.note = "text"
    assert model.note == "text"
    with pytest.raises(AttributeError, match="Linear has no attribute 'nothing'"):
        _ = model.nothing


def test_registration_errors() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            self.weight = Parameter(ones(1))

    with pytest.raises(UsageError, match=r"Early\.weight is set too early.*super\(\)"):
        Early()
    model = nn.Module()
    for name in ("", "a.b"):
        with pytest.raises(UsageError, match="empty or contains a dot"):
            model.add_module(name, nn.ReLU())
    with pytest.raises(UsageError, match=r"already .*'forward'"):
        model.register_buffer("forward", ones(1))
    with pytest.raises(DTypeError, match="Tensor, not a Parameter"):
        model.register_parameter("w", ones(1))  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="ndarray, not a Tensor"):
        model.register_buffer("w", np.ones(1))  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="int, not a Module"):
        model.add_module("w", 3)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="takes a tensor, not ndarray"):
        Parameter(np.ones(1))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"Module does not define forward"):
        model(1)


def test_paths() -> None:
    model = Tied()
    assert model.get_submodule("layers.1") is model.layers[1] and model.get_submodule("") is model
    assert model.get_parameter("layers.1.bias") is model.layers[1].bias
    with pytest.raises(UsageError, match=r"no submodule 'layers\.2'"):
        model.get_submodule("layers.2")
    with pytest.raises(UsageError, match=r"no parameter 'embed\.bias'"):
        model.get_parameter("embed.bias")


def test_a_tied_parameter_gets_both_gradients() -> None:
    model = Tied()
    model(tensor([[1, 2]])).sum().backward()
    tied = model.embed.weight.grad.numpy().copy()
    model.zero_grad()
    model.head.weight = Parameter(model.embed.weight.detach().clone())
    model(tensor([[1, 2]])).sum().backward()
    np.testing.assert_allclose(tied, model.embed.weight.grad.numpy() + model.head.weight.grad.numpy(), atol=1e-5)


def test_copies_are_independent_and_stay_tied() -> None:
    model = Tied()
    cuda_impl = copy.deepcopy(model)
    assert cuda_impl.head.weight is cuda_impl.embed.weight and cuda_impl.again is cuda_impl.layers[0]
    assert isinstance(cuda_impl.embed.weight, Parameter) and cuda_impl.embed.weight.requires_grad
    model.embed.weight.data.fill_(9)
    assert not (cuda_impl.embed.weight.detach().numpy() == 9).any()


# --- State ------------------------------------------------------------------------------------------------------------


def test_state_dict_has_every_name_and_shares_memory() -> None:
    model = Tied()
    state = model.state_dict()
    assert set(state) == EVERY
    assert not any(t.requires_grad for t in state.values())
    state["layers.0.bias"].fill_(5)
    assert model.layers[0].bias.tolist() == [5.0] * 4
    assert model.state_dict(keep_vars=True)["embed.weight"] is model.embed.weight
    assert set(model.state_dict(prefix="m.")) == {f"m.{n}" for n in EVERY}


def test_loading_copies_in_place_and_casts() -> None:
    model, other = Tied(), Tied()
    weight = model.embed.weight
    state: dict[str, Any] = {n: t.detach().double().numpy() for n, t in other.state_dict().items()}
    result = model.load_state_dict(state)
    assert result == ([], [])
    assert model.embed.weight is weight and weight.dtype is float32
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), value.numpy())


def test_assigned_states_are_taken_as_they_are() -> None:
    model, other = Tied().requires_grad_(False), Tied().double()
    kept, state = model.embed.weight, other.state_dict()
    del state["embed.weight"]
    result = model.load_state_dict(state, assign=True)
    assert repr(result) == "<All keys matched successfully>"
    assert model.embed.weight is model.head.weight is not kept and not model.embed.weight.requires_grad
    assert isinstance(model.embed.weight, nn.Parameter) and model.embed.weight.dtype.name == "float64"
    for name, value in state.items():
        assert model.state_dict()[name].data_ptr() == value.data_ptr()
    layer, weight = nn.Linear(2, 1, bias=False), nn.Parameter(ones(1, 2), requires_grad=False)
    assert repr(layer.load_state_dict({"w": ones(1)}, False, True)) == (
        "_IncompatibleKeys(missing_keys=['weight'], unexpected_keys=['w'])"
    )
    layer.load_state_dict({"weight": weight}, assign=True)
    assert layer.weight is weight and weight.requires_grad
    with pytest.raises(ModelError, match="wrong shape"):
        layer.load_state_dict({"weight": ones(2)}, assign=True)


def test_a_tied_parameter_may_stand_under_any_of_its_names() -> None:
    model, other = Tied(), Tied()
    state = other.state_dict()
    for name in ("embed.weight", "again.bias", "again.weight"):
        del state[name]
    model.load_state_dict(state)
    np.testing.assert_array_equal(model.embed.weight.detach().numpy(), other.embed.weight.detach().numpy())
    state = dict(other.state_dict())
    state["head.weight"] = state["head.weight"] + 1
    before = model.embed.weight.detach().numpy().copy()
    with pytest.raises(ModelError, match=r"embed\.weight and head\.weight are tied in Tied"):
        model.load_state_dict(state)
    np.testing.assert_array_equal(model.embed.weight.detach().numpy(), before)


def test_errors_list_names_and_counts_and_load_nothing() -> None:
    model = Tied()
    before = {n: t.numpy().copy() for n, t in model.state_dict().items()}
    state: dict[str, Any] = {n: t + 1 for n, t in Tied().state_dict().items()}
    del state["scale"], state["layers.1.bias"]
    state["extra\x1b[31m"] = ones(1)
    state["layers.1.weight"] = ones(4, 5)
    with pytest.raises(ModelError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert "2 missing: layers.1.bias, scale" in text or "2 missing: scale, layers.1.bias" in text
    assert r"1 unexpected: extra\x1b[31m" in text and "\x1b" not in text
    assert "1 of the wrong shape: layers.1.weight is [4, 5], expected [4, 4]" in text
    assert "Tied" in text and caught.value.next and caught.value.exit_code == 5
    for name, value in before.items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), value)


def test_a_state_is_a_dict() -> None:
    with pytest.raises(ModelError, match="a dict of tensors by name, not a list"):
        nn.Linear(1, 1).load_state_dict([ones(1, 1)])


def test_at_most_ten_names_are_listed() -> None:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(25))
    with pytest.raises(ModelError, match="25 missing: ") as caught:
        model.load_state_dict({})
    assert str(caught.value).count(".weight") == 10 and "and 15 more" in str(caught.value)
    wrong = {f"{i}.weight": ones(3) for i in range(25)}
    with pytest.raises(ModelError, match="25 of the wrong shape: ") as caught:
        model.load_state_dict(wrong)
    assert str(caught.value).count(".weight is") == 10 and "and 15 more" in str(caught.value)


def test_loading_that_is_not_strict_reports_names_but_still_checks_shapes() -> None:
    model = nn.Linear(2, 2)
    result = model.load_state_dict({"weight": ones(2, 2), "other": ones(1)}, strict=False)
    assert result.missing_keys == ["bias"] and result.unexpected_keys == ["other"]
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(ModelError, match="wrong shape"):
        model.load_state_dict({"weight": ones(3, 2)}, strict=False)
    with pytest.raises(ModelError, match="list, not a tensor"):
        model.load_state_dict({"weight": [[1.0]]}, strict=False)


# --- The whole tree ---------------------------------------------------------------------------------------------------


def test_training_mode_freezing_apply_and_zero_grad() -> None:
    model = Tied()
    assert model.eval() is model and not any(m.training for m in model.modules())
    assert all(m.training for m in model.train().modules())
    order: list[str] = []
    model.apply(lambda m: order.append(type(m).__name__))
    assert order[-1] == "Tied" and order[0] == "Embedding" and order.index("Linear") < order.index("ModuleList")
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_()
    model(tensor([1])).sum().backward()
    model.zero_grad(set_to_none=False)
    assert all((p.grad.numpy() == 0).all() for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_to_keeps_objects_ties_and_integers() -> None:
    model = Tied()
    model.register_buffer("count", tensor([3]))
    weight = model.embed.weight
    model(tensor([1])).sum().backward()
    assert model.to("cpu", dtype="bfloat16") is model
    assert model.embed.weight is weight and weight.dtype is bfloat16 and model.head.weight is weight
    assert weight.grad is not None and weight.grad.dtype is bfloat16
    assert model.count.dtype.name == "int64" and model.scale.dtype is bfloat16
    model.double()
    assert weight.dtype is float64
    model.zero_grad()
    model(tensor([1])).sum().backward()
    assert weight.grad is not None and weight.grad.dtype is float64
    assert model.half().embed.weight.dtype.name == "float16"
    assert model.to(float32).float().embed.weight.dtype is float32
    with pytest.raises(DTypeError, match="float type"):
        model.to("int32")


def gradient_of_sizes(model: Tied) -> np.ndarray:
    """The tied weight's gradient with each parameter's absolute value in its place: rounding errors are parts of it."""
    sizes = Tied()
    sizes.load_state_dict({name: value.abs() for name, value in model.state_dict().items()})
    sizes(tensor([1])).sum().backward()
    return sizes.embed.weight.grad.numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("move", ["cuda", "cuda_index", "to_device", "to_string", "to_int", "to_tensor", "to_both"])
def test_cuda_and_back_keeps_objects_ties_and_gradients(move: str) -> None:
    model = Tied()
    sizes = gradient_of_sizes(model)
    model.register_buffer("count", tensor([3]))
    weight = model.embed.weight
    model(tensor([1])).sum().backward()
    assert weight.grad is not None
    values, gradient, allowed = weight.detach().numpy(), weight.grad.numpy(), np.zeros(weight.shape)
    gpu = Device("cuda", 0)
    moved = {
        "cuda": lambda: model.cuda(),
        "cuda_index": lambda: model.cuda(0),
        "to_device": lambda: model.to(gpu),
        "to_string": lambda: model.to("cuda:0"),
        "to_int": lambda: model.to(0),
        "to_tensor": lambda: model.to(tensor([1.0], device=gpu)),
        "to_both": lambda: model.to(gpu, "float32", non_blocking=True),
    }[move]()
    assert moved is model and model.embed.weight is weight and model.head.weight is weight
    assert {t.device for t in (*model.parameters(), *model.buffers(), weight.grad)} == {gpu}
    assert model.count.dtype.name == "int64"
    if move == "cuda":
        model(tensor([1], device=gpu)).sum().backward()
        # sums of 7 terms in the head and of 4 in each of 3 layers, then those of the two uses and of the two passes
        gradient, allowed = 2 * gradient, (7 + 3 * 4 + 2) * np.finfo(np.float32).eps * 2 * sizes
    assert (np.abs(weight.grad.cpu().numpy() - gradient) <= allowed).all()
    assert model.cpu() is model and {t.device.type for t in (*model.parameters(), weight.grad)} == {"cpu"}
    np.testing.assert_array_equal(weight.detach().numpy(), values)


def test_to_refuses_what_it_cannot_mean() -> None:
    model = Tied()
    for call, error, message in (
        (lambda: model.to("cpu", "cuda"), UsageError, "more than one device: cpu, cuda"),
        (lambda: model.to("cpu", device="cpu"), UsageError, "more than one device"),
        (lambda: model.to(float32, dtype="float16"), UsageError, "more than one dtype"),
        (lambda: model.to("gpu"), DTypeError, "gpu"),
        (lambda: model.to(device="gpu"), DeviceError, "gpu"),
        (lambda: model.to(tensor([1])), DTypeError, "not to int64"),
        (lambda: model.cuda("cpu"), DeviceError, r"cuda\(\) got the device 'cpu'"),
        (lambda: model.cuda(-1), DeviceError, "-1"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert model.embed.weight.dtype is float32 and model.embed.weight.device.type == "cpu"


def test_repr_shows_the_tree() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.GELU("tanh"), nn.Dropout(0.1)))
    assert repr(model) == (
        "Sequential(\n"
        "  (0): Linear(in_features=2, out_features=3, bias=True)\n"
        "  (1): Sequential(\n"
        "    (0): GELU(approximate='tanh')\n"
        "    (1): Dropout(p=0.1, inplace=False)\n"
        "  )\n"
        ")"
    )
    assert repr(Parameter(tensor([1.0]))).startswith("Parameter containing:\ntensor([1.")


# --- Hooks ------------------------------------------------------------------------------------------------------------


def test_forward_hooks_see_and_replace() -> None:
    layer = nn.Linear(2, 2)
    seen: list[Any] = []
    before = layer.register_forward_pre_hook(lambda m, args: (seen.append((m, args)), (args[0] * 2,))[1])
    after = layer.register_forward_hook(lambda m, args, out: (seen.append(out), out + 1)[1])
    x = randn(3, 2)
    found = layer(x).detach().numpy()
    plain = layer.forward(x * 2).detach().numpy()
    np.testing.assert_allclose(found, plain + 1, atol=1e-6)
    assert seen[0][0] is layer and seen[0][1][0] is x and len(seen) == 2
    before.remove()
    after.remove()
    before.remove()
    np.testing.assert_array_equal(layer(x).detach().numpy(), layer.forward(x).detach().numpy())
    assert len(seen) == 2
    with layer.register_forward_hook(lambda m, args, out: out * 0):
        assert (layer(x).detach().numpy() == 0).all()
    assert (layer(x).detach().numpy() != 0).any()


def test_backward_hooks_see_the_gradients_of_inputs_and_outputs() -> None:
    layer = nn.Linear(3, 2)
    seen: list[Any] = []
    handle = layer.register_full_backward_hook(lambda m, gi, go: seen.append((m, gi, go)))
    x = randn(4, 3).requires_grad_()
    weights = randn(4, 2)
    (layer(x) * weights).sum().backward()
    [(module, grad_input, grad_output)] = seen
    assert module is layer
    np.testing.assert_array_equal(grad_output[0].numpy(), weights.numpy())
    np.testing.assert_allclose(grad_input[0].numpy(), (weights @ layer.weight.detach()).numpy(), atol=1e-6)
    np.testing.assert_array_equal(x.grad.numpy(), grad_input[0].numpy())
    handle.remove()
    (layer(x) * weights).sum().backward()
    assert len(seen) == 1


def test_backward_hooks_may_replace_the_input_gradient() -> None:
    layer = nn.Linear(3, 2)
    layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0 + 7,))
    x = randn(4, 3).requires_grad_()
    layer(x).sum().backward()
    assert (x.grad.numpy() == 7).all() and layer.weight.grad is not None


def test_backward_hooks_without_gradients_of_inputs_and_with_tuples() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(ones(2))

        def forward(self, x: Tensor, flag: bool) -> tuple[Tensor, str, Tensor]:
            return x * self.weight, "text", self.weight * 2

    seen: list[Any] = []
    model = Two()
    model.register_full_backward_hook(lambda m, gi, go: seen.append((gi, go)))
    first, text, second = model(ones(2), True)
    assert text == "text"
    (first.sum() + second.sum() * 3).backward()
    [(grad_input, grad_output)] = seen
    assert grad_input == (None, None)
    assert grad_output[0].tolist() == [1, 1] and grad_output[1] is None and grad_output[2].tolist() == [3, 3]
    assert model.weight.grad.tolist() == [7, 7]


# --- Containers -------------------------------------------------------------------------------------------------------


def test_sequential() -> None:
    manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert len(model) == 2 and isinstance(model[-1], nn.ReLU) and [n for n, _ in model.named_children()] == ["0", "1"]
    x = randn(4, 2)
    np.testing.assert_array_equal(model(x).detach().numpy(), model[1](model[0](x)).detach().numpy())
    model.append(nn.Linear(3, 1))
    model.insert(1, nn.SiLU())
    assert [type(m).__name__ for m in model] == ["Linear", "SiLU", "ReLU", "Linear"]
    assert isinstance(model[1:3], nn.Sequential) and len(model[1:3]) == 2 and model[1:3][0] is model[1]
    del model[1]
    model[1] = nn.Tanh()
    assert [type(m).__name__ for m in model] == ["Linear", "Tanh", "Linear"]
    assert [n for n, _ in model.named_children()] == ["0", "1", "2"]
    named = nn.Sequential({"first": nn.Linear(2, 2), "second": nn.ReLU()})
    assert isinstance(named[1], nn.ReLU) and named.first is named[0]
    with pytest.raises(IndexRangeError, match="module 3 "):
        _ = model[3]


def test_module_list_and_dict() -> None:
    layers = nn.ModuleList([nn.Linear(1, 1)])
    layers.extend([nn.Linear(1, 1), nn.ReLU()])
    assert len(layers) == 3 and layers[0] in layers and nn.ReLU() not in layers and len(layers[:2]) == 2
    assert len(list(layers.parameters())) == 4
    parts = nn.ModuleDict({"a": nn.Linear(1, 1)})
    parts["b"] = nn.ReLU()
    parts.update({"c": nn.Tanh()})
    assert list(parts) == ["a", "b", "c"] and "b" in parts and len(parts) == 3
    assert [k for k, _ in parts.items()] == list(parts.keys()) and len(list(parts.values())) == 3
    assert isinstance(parts.pop("b"), nn.ReLU) and "b" not in parts
    del parts["c"]
    with pytest.raises(UsageError, match="'z', only a"):
        _ = parts["z"]
    with pytest.raises(UsageError, match=r"already .*'keys'"):
        parts["keys"] = nn.ReLU()
    parts.clear()
    assert len(parts) == 0


class WithAnything(nn.Module):
    def __init__(self, size: int, **rest: int) -> None:
        super().__init__()
        self.size, self.rest = size, rest


def test_a_keyword_that_a_module_or_function_does_not_take_is_refused_with_the_nearest() -> None:
    for call, said in (
        (lambda: nn.Linear(3, 3, bais=False), "Linear takes no keyword 'bais' | did you mean bias?"),
        (lambda: nn.Dropout(prob=0.5), "Dropout takes no keyword 'prob' | it takes p, inplace, generator"),
        (lambda: nn.Sigmoid(inplace=True), "Sigmoid takes no keyword 'inplace' | it takes no keywords"),
        (lambda: nn.functional.gelu(ones(2), aproximate="tanh"), "did you mean approximate?"),
        (lambda: nn.functional.cross_entropy(ones(2, 3), zeros(2), ignore_idx=1), "ignore_index?"),
        (lambda: nn.functional.scaled_dot_product_attention(*[ones(1, 2, 2)] * 3, causal=1), "is_causal?"),
    ):
        with pytest.raises(KeywordError) as caught:
            call()
        assert said in str(caught.value)
    assert WithAnything(1, other=2).rest == {"other": 2}


class Block(nn.Module):
    """Three layers on one input, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n) for n in (64, 32, 32))
        self.norm = nn.RMSNorm(16, eps=1e-6)


def operands(block: Block) -> tuple[bool, bool]:
    """Whether the weights are one operand, and the biases."""
    layers = (block.q, block.k, block.v)
    biases = [layer.bias.array for layer in layers if layer.bias is not None]
    return joined([layer.weight.array for layer in layers]) is not None, joined(biases) is not None


def test_parameters_of_a_block_are_neighbours_and_stay_so_when_they_move() -> None:
    model = nn.Sequential(Block(), Block())
    before = dict(model.named_parameters())
    take_memory(model.named_parameters(), "cpu", "float32")
    assert before == dict(model.named_parameters())  # the objects are the same
    for number, parameter in enumerate(model.parameters()):
        parameter.detach().fill_(number)
    assert all(operands(block) == (True, True) for block in model)
    model[0].q.weight.grad = ones(64, 16)
    for kind in ("float64", "bfloat16"):
        model.to(kind)
        assert all(operands(block) == (True, True) for block in model)
    assert [p.dtype.name for p in model.parameters()] == ["bfloat16"] * 14
    assert [float(p.detach().max()) for p in model.parameters()] == list(range(14))
    assert model[0].q.weight.grad is not None
    assert model[0].q.weight.grad.dtype is bfloat16
    storages = {id(p.array.storage): p.array.storage for p in model.parameters()}
    assert len(storages) == 2


def test_a_part_of_a_run_moves_alone() -> None:
    block = Block()
    take_memory(block.named_parameters(), "cpu", "float32")
    block.q.to("float64")
    assert (block.q.weight.dtype, block.k.weight.dtype) == (float64, float32)


@pytest.mark.parametrize("kind", ["buffer", "parameter", "submodule"])
def test_a_missing_member_is_an_attribute_error(kind: str) -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    assert net.get_buffer("0.running_mean") is net[0].running_mean
    with pytest.raises(AttributeError, match=f"no {kind} '0.absent'"):
        getattr(net, f"get_{kind}")("0.absent")
