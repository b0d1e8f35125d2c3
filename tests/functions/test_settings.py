"""Default dtype and device, random states, printing options; expected texts are torch's."""

from collections.abc import Iterator

import numpy as np
import pytest

import genesis
from genesis.errors import DTypeError, UsageError


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    genesis.set_default_dtype(genesis.float32)
    genesis.set_default_device(None)
    genesis.set_printoptions(profile="default")


@pytest.mark.parametrize("name", ["float64", "bfloat16"])
def test_the_default_dtype_is_that_of_factories_floats_and_integer_results(name: str) -> None:
    kind = getattr(genesis, name)
    genesis.set_default_dtype(kind)
    whole = genesis.tensor([1, 2])
    made = [
        genesis.zeros(2), genesis.tensor([0.5]), genesis.Tensor([1]), genesis.full((2,), 1.5),
        genesis.arange(0, 1, 0.5), genesis.linspace(0, 1, 3), genesis.rand(2), genesis.nn.Linear(2, 3).weight,
        whole / 2, whole * 1.5, whole.sqrt(), whole.logsumexp(0),
    ]  # fmt: skip
    assert {t.dtype for t in made} == {kind} and genesis.get_default_dtype() is kind
    assert genesis.finfo().dtype == name and repr(genesis.zeros(1)) == "tensor([0.])"
    with pytest.raises(TypeError, match="default dtype"):
        genesis.set_default_dtype(genesis.int64)


def test_the_default_device() -> None:
    genesis.set_default_device("cuda:1")
    assert genesis.get_default_device() == genesis.device("cuda:1")
    with genesis.device("cpu"):
        assert genesis.zeros(1).device.type == "cpu"
    assert genesis.get_default_device().index == 1


def test_random_states() -> None:
    assert genesis.manual_seed(-1).initial_seed() == genesis.initial_seed() == 2**64 - 1
    genesis.rand(3)
    state = genesis.get_rng_state()
    first = genesis.rand(3)
    other = genesis.Generator(device="cpu").set_state(state)
    genesis.set_rng_state(state)
    assert first.tolist() == genesis.rand(3).tolist() == genesis.rand(3, generator=other).tolist()
    assert other.clone_state().get_state().tolist() == other.get_state().tolist()
    assert genesis.seed() == genesis.initial_seed() and other.seed() == other.initial_seed()
    with pytest.raises(DTypeError):
        genesis.set_rng_state(state.to("int64"))
    with pytest.raises(UsageError):
        genesis.set_rng_state(state[:3])


@pytest.mark.parametrize(
    "values, options, text",
    [
        ([1.0, -2.5], {}, "tensor([ 1.0000, -2.5000])"),
        ([1.0, np.inf], {}, "tensor([1., inf])"),
        ([1e-5, 1.0], {}, "tensor([1.0000e-05, 1.0000e+00])"),
        ([1e-5, 1.0], {"sci_mode": False, "precision": 2}, "tensor([0.00, 1.00])"),
        ([[1, 20], [300, 4]], {}, "tensor([[  1,  20],\n        [300,   4]])"),
        ([True, False], {}, "tensor([ True, False])"),
        (0.5, {}, "tensor(0.5000)"),
        ([], {}, "tensor([])"),
        (np.arange(2000), {}, "tensor([   0,    1,    2,  ..., 1997, 1998, 1999])"),
        (np.arange(9), {"threshold": 5, "edgeitems": 1}, "tensor([0,  ..., 8])"),
        (np.zeros((0, 2), np.int32), {}, "tensor([], size=(0, 2), dtype=genesis.int32)"),
        (
            np.arange(12),
            {"linewidth": 30},
            "tensor([ 0,  1,  2,  3,  4,\n         5,  6,  7,  8,  9,\n        10, 11])",
        ),
    ],
)
def test_tensors_print_as_in_torch(values: object, options: dict[str, int], text: str) -> None:
    genesis.set_printoptions(**options)
    assert repr(genesis.tensor(values)) == text


def test_what_a_tensor_requires_follows_its_values() -> None:
    x = genesis.ones(2, requires_grad=True)
    assert repr(x) == "tensor([1., 1.], requires_grad=True)" and repr(x + 1) == "tensor([2., 2.], grad_fn=<add>)"


def test_facts_and_recorded_choices() -> None:
    assert genesis.is_tensor(genesis.ones(1)) and not genesis.is_tensor(1)
    assert genesis.is_floating_point(genesis.ones(1)) and genesis.numel(genesis.ones(2, 3)) == 6
    assert genesis.can_cast("int8", "float16") and not genesis.can_cast("float32", "int64")
    genesis.use_deterministic_algorithms(True, warn_only=True)
    assert genesis.are_deterministic_algorithms_enabled() and genesis.is_deterministic_algorithms_warn_only_enabled()
    genesis.use_deterministic_algorithms(False)
    genesis.set_float32_matmul_precision("high")
    assert genesis.get_float32_matmul_precision() == "high" and genesis.cuda.allow_tf32.get()
    genesis.set_float32_matmul_precision("highest")
    assert not genesis.cuda.allow_tf32.get()
    with pytest.raises(RuntimeError):
        genesis.set_num_threads(0)
