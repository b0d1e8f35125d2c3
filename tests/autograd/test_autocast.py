"""autocast: types as torch's, gradients in the parameters' types, casts kept and dropped, nesting, checkpoints."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import optim
from genesis.array import Spec
from genesis.autograd import Function, checkpoint
from genesis.autograd.autocast import autocasting, wanted_types
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import DTypeError, GenesisError, UsageError
from genesis.nn import functional as F
from genesis.op import Op, observe, registry
from genesis_models import build
from tests.autograd.autocast_cases import CASES, FIXTURE, TYPES, Inputs, type_of
from tests.sampling import some_full

TABLE: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))
BFLOAT16, FLOAT16, FLOAT32 = genesis.bfloat16, genesis.float16, genesis.float32

# Where results have other types than torch's on CUDA.
DIFFERENT = {
    "dot": "a product like any other; torch promotes",
    "binary_cross_entropy": "runs in float32, as in torch on the CPU; on CUDA torch refuses it",
    "index_copy": "promotes, as in torch on the CPU",
    "scatter_add": "the source is cast to x's type first",
    "out": "not cast, so that mixed types are refused, as in torch on the CPU",
}
# On the CPU torch leaves these as they are.
PRODUCTS_ON_CUDA = ("mv", "addmv", "dot", "einsum without a sum")


@contextmanager
def casts() -> Iterator[list[Any]]:
    """The shapes and types of casts inside the block."""
    found: list[Any] = []

    def note(op: Op, inputs: Any, outputs: Any, attrs: Any, seconds: float) -> None:
        if op.name == "cast":
            found.append((inputs[0].shape, inputs[0].dtype.name, outputs[0].dtype.name))

    with observe(note):
        yield found


def weight(*shape: int, seed: int = 0, device: str = "cpu") -> Any:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return genesis.tensor(values, device=device, requires_grad=True)


# --- Types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_types_are_those_of_torch(name: str) -> None:
    for first, second in TYPES:
        with genesis.autocast("cpu"):
            found = type_of(CASES[name], Inputs(genesis, first, second, "cpu"), GenesisError)
        on_cuda, on_cpu = (TABLE[device][name][f"{first} {second}"] for device in ("cuda", "cpu"))
        if name not in DIFFERENT:
            assert found == on_cuda, f"{first} {second}"
        if found != on_cpu:  # the CPU's list is the shorter one
            assert on_cpu in ("bfloat16", "error") or name in PRODUCTS_ON_CUDA, f"{first} {second}"
            assert found == ("bfloat16" if name in PRODUCTS_ON_CUDA else "float32") or name in DIFFERENT


def test_differences_are_real() -> None:
    for name in DIFFERENT:
        found = {}
        for first, second in TYPES:
            with genesis.autocast("cpu"):
                found[f"{first} {second}"] = type_of(CASES[name], Inputs(genesis, first, second, "cpu"), GenesisError)
        assert found != TABLE["cuda"][name], name


def types_and_casts() -> list[Any]:
    """What torch's cases and the fused functions give inside autocast."""
    x, cosine = genesis.ones(2, 8, dtype=BFLOAT16), genesis.ones(3, 2, dtype=BFLOAT16)
    heads, scale = genesis.ones(1, 3, 3, 4, dtype=BFLOAT16), genesis.ones(4, dtype=BFLOAT16)
    calls = [call for call, _, _ in fused().values()]
    calls += [lambda: F.rms_norm(x, (8,)), lambda: F.cross_entropy(x, genesis.tensor([1, 2]))]
    calls += [lambda: F.norm_rope(heads, scale, scale, cosine, cosine, heads=1, key_heads=1, eps=1e-6)]
    with genesis.autocast("cpu", cache_enabled=False), casts() as found:
        cases = [
            type_of(case, Inputs(genesis, *types, "cpu"), GenesisError) for case in CASES.values() for types in TYPES
        ]
        return [*cases, *(call().dtype.name for call in calls), found]


@pytest.fixture(scope="module")
def expected_types() -> list[Any]:
    return types_and_casts()


NAMES = [op.name for op in registry.values() if op.autocast]


@pytest.mark.parametrize("name", some_full(NAMES, NAMES[::5]))
def test_a_record_without_its_autocast_is_noticed(
    name: str, expected_types: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry[name], "autocast", "")
    assert types_and_casts() != expected_types


def test_a_users_op_of_the_same_name_is_left_alone() -> None:
    users = Op("exp", lambda out, x: None, lambda x: Spec(x.shape, x.dtype), cuda_impl=lambda *given: None)
    x = genesis.ones(2, dtype=BFLOAT16).array
    with genesis.autocast("cpu"):
        assert wanted_types(registry["exp"], (x,)) == [FLOAT32]
        assert wanted_types(users, (x,)) == []


def fused() -> dict[str, Any]:
    """Fused functions with their parameters, by name."""
    x, scale, wide = weight(2, 8, 16), weight(16, seed=1), weight(2, 8, 4, 4, seed=2)
    up, gate, down, bias = (weight(*s, seed=i) for i, s in enumerate(((8, 16), (8, 16), (16, 8), (8,)), 3))
    cos, sin = F.rope_table(genesis.arange(8), 4)
    ids = genesis.tensor(np.arange(16).reshape(2, 8) % 8)
    q, k = weight(4, seed=7), weight(4, seed=8)
    calls = {
        "linear": (lambda: F.linear(x, up, bias, x[..., :8]), (x, up, bias), "low"),
        "packed_linear": (lambda: F.packed_linear(x, (up, gate), (bias, bias)), (x, up, gate, bias), "low"),
        "norm_linear": (lambda: F.norm_linear(x, scale, (up, gate), eps=1e-6), (x, scale, up, gate), "low"),
        "norm_mlp": (lambda: F.norm_mlp(x, scale, (up, gate), (), down, eps=1e-6), (x, scale, up, gate, down), "low"),
        "attention": (lambda: F.attention(wide, wide, wide), (wide,), "low"),
        "packed": (lambda: F.attention_packed(wide, 2, 1, None, tables=(cos, sin)), (wide,), "low"),
        "head": (lambda: F.linear_cross_entropy(x, up, ids, num_targets=genesis.tensor(9.0)), (x, up), "wide"),
        "log_probs": (lambda: F.linear_token_log_probs(x, up, ids), (x, up), "wide"),
        "distillation": (
            lambda: F.linear_distillation(x, up, x.detach(), up.detach() * 2, ids, beta=0.5)[0],
            (x, up),
            "wide",
        ),
        "norm_rope": (lambda: F.norm_rope(wide, q, k, cos, sin, heads=2, key_heads=1, eps=1e-6), (wide, q, k), "wide"),
        "swiglu": (lambda: F.swiglu(x @ down, (x @ down).float()), (x, down), "wide"),
        "swiglu_packed": (lambda: F.swiglu(x @ down), (x, down), "low"),
    }
    return calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", list(fused()))
def test_fused_functions_compute_in_the_low_type(name: str, dtype: str) -> None:
    call, parameters, kind = fused()[name]
    expected = call()
    expected.sum().backward()
    gradients = [p.grad.numpy().copy() for p in parameters]
    for p in parameters:
        p.grad = None
    with genesis.autocast("cpu", dtype):
        found = call()
    assert found.dtype is (FLOAT32 if kind == "wide" else getattr(genesis, dtype))
    found.float().sum().backward()
    for p, gradient in zip(parameters, gradients, strict=True):
        assert p.grad.dtype is FLOAT32
        assert np.linalg.norm(p.grad.numpy() - gradient) < 2e-2 * max(np.linalg.norm(gradient), 1.0)
    difference = np.linalg.norm(found.float().detach().numpy() - expected.detach().numpy())
    assert difference < 2e-2 * np.linalg.norm(expected.detach().numpy())


@pytest.mark.parametrize(("name", "count"), [("packed", 1), ("head", 2), ("norm_mlp", 5), ("norm_rope", 0)])
def test_fused_functions_leave_tables_and_divisors_alone(name: str, count: int) -> None:
    call = fused()[name][0]
    with casts() as found, genesis.autocast("cpu"):
        call()
    assert len(found) == count


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_are_those_of_casts_by_hand(device: str) -> None:
    results = []
    for by_hand in (False, True):
        w, x = weight(4, 3, device=device), weight(5, 4, seed=1, device=device)
        if by_hand:
            low = (x.to(BFLOAT16) @ w.to(BFLOAT16)).float()
            loss = (low.softmax(-1) ** 2.0).sum()
        else:
            with genesis.autocast(device, BFLOAT16):
                loss = ((x @ w).softmax(-1) ** 2.0).sum()
        loss.backward()
        results.append([loss.tolist(), w.grad.tolist(), x.grad.tolist()])
    assert results[0] == results[1]


def test_tensors_of_another_device_are_left_alone() -> None:
    with genesis.autocast("cuda"):
        assert (weight(2, 2) @ weight(2, 2)).dtype is FLOAT32


# --- State ------------------------------------------------------------------------------------------------------------


def test_blocks_nest_and_end() -> None:
    assert not genesis.is_autocast_enabled("cpu") and not genesis.is_autocast_enabled("cuda")
    assert (genesis.get_autocast_dtype("cpu"), genesis.get_autocast_dtype("cuda")) == (BFLOAT16, FLOAT16)
    w = weight(2, 2)
    with genesis.autocast("cpu", FLOAT16):
        assert genesis.is_autocast_enabled("cpu") and not genesis.is_autocast_enabled("cuda")
        with genesis.autocast("cuda", enabled=False), genesis.autocast("cpu"):
            assert (w @ w).dtype is FLOAT16  # the type of the block around
        with genesis.autocast("cpu", enabled=False):
            assert not genesis.is_autocast_enabled("cpu")
            assert (w @ w).dtype is FLOAT32
            with genesis.autocast("cpu", "bfloat16"):
                assert (w @ w).dtype is BFLOAT16
        assert (w @ w).dtype is FLOAT16
        with pytest.raises(ZeroDivisionError), genesis.autocast("cpu", enabled=False):
            raise ZeroDivisionError
        assert (w @ w).dtype is FLOAT16
    assert (w @ w).dtype is FLOAT32 and genesis.get_autocast_dtype("cpu") is BFLOAT16


def test_a_block_can_be_entered_twice_and_decorates() -> None:
    block, w = genesis.autocast("cpu"), weight(2, 2)
    with block, block:
        assert (w @ w).dtype is BFLOAT16
    assert not genesis.is_autocast_enabled("cpu")

    @genesis.autocast("cpu")
    def product(depth: int = 0) -> Any:
        return product(depth - 1) if depth else w @ w

    assert product(2).dtype is BFLOAT16 and not genesis.is_autocast_enabled("cpu")

    @genesis.autocast("cpu")
    def products() -> Iterator[Any]:
        yield w @ w
        yield w @ w

    for found in products():
        assert found.dtype is BFLOAT16 and not genesis.is_autocast_enabled("cpu")


def test_each_thread_has_its_own() -> None:
    found: list[Any] = []
    w = weight(2, 2)

    @genesis.autocast("cpu", FLOAT16)
    def inside() -> None:
        found.append((w @ w).dtype)

    def outside() -> None:
        found.append((w @ w).dtype)
        inside()

    with genesis.autocast("cpu"):
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
        assert (w @ w).dtype is BFLOAT16
    assert found == [FLOAT32, FLOAT16]


@pytest.mark.parametrize("device", ["tpu", "cuda:0", None])
def test_other_devices_are_refused(device: Any) -> None:
    for call in (genesis.autocast, genesis.is_autocast_enabled, genesis.get_autocast_dtype):
        with pytest.raises(UsageError, match='use "cpu" or "cuda"'):
            call(device)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(DTypeError, match=f"bfloat16 or float16, not in {dtype}"):
        genesis.autocast("cpu", dtype)


# --- Casts that are kept ----------------------------------------------------------------------------------------------


def test_a_parameter_is_cast_once_in_the_outermost_block() -> None:
    w, x = weight(3, 3), weight(3, 3, seed=1).detach()
    with casts() as found:
        with genesis.autocast("cpu"):
            y = x @ w
            with genesis.autocast("cpu"):
                y = y @ w
            y = y @ w
        assert found == [((3, 3), "float32", "bfloat16")] * 2  # x and w
        assert not autocasting.casts
        with genesis.autocast("cpu"):
            x @ w
        assert len(found) == 4
    y.sum().backward()
    assert w.grad.dtype is FLOAT32


def test_a_change_in_place_is_seen() -> None:
    w, x = weight(2, 2), genesis.ones(2, 2)
    optimizer = optim.SGD([w], lr=1.0)
    with genesis.autocast("cpu"):
        before = x @ w
        before.sum().backward()
        optimizer.step()
        after = x @ w
        expected = x @ w.detach()
    assert after.tolist() == expected.tolist() != before.tolist()


def test_kept_casts_do_not_lose_gradients() -> None:
    w, x = weight(2, 2), genesis.ones(2, 2)
    with genesis.autocast("cpu"):
        with genesis.no_grad():
            assert not (x @ w).requires_grad
        first = x @ w
        with genesis.no_grad():
            assert not (x @ w).requires_grad
        first.sum().backward()  # twice through one cast
        (x @ w).sum().backward()
    assert w.grad.tolist() == [[4, 4], [4, 4]]


def test_what_is_not_kept() -> None:
    w, frozen = weight(2, 2), weight(2, 2).detach()
    with casts() as found:
        with genesis.autocast("cpu", cache_enabled=False), genesis.autocast("cpu"):  # as around
            w @ w
        assert len(found) == 2
        with genesis.autocast("cpu"):
            frozen @ frozen, (w * 1) @ (w * 1), w[:] @ w[:]
        assert len(found) == 8


def test_a_graph_casts_again_when_it_is_replayed() -> None:
    w, x = weight(4, 4, device="cuda"), genesis.ones(4, 4, device="cuda")
    graph, found = FunctionGraph(), genesis.zeros(4, 4, device="cuda")

    def product() -> None:
        with genesis.no_grad():
            found.copy_(x @ w)

    with genesis.autocast("cuda"):
        graph.capture(product)
        with genesis.no_grad():
            w.fill_(2.0)
    graph.replay()
    np.testing.assert_array_equal(found.numpy(), 8.0)


# --- Together with the tape -------------------------------------------------------------------------------------------


def test_backward_runs_outside_of_autocast() -> None:
    seen: list[Any] = []

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.append((genesis.is_autocast_enabled("cpu"), (grad @ grad).dtype))
            return grad * 2

    x = weight(2, 2)
    with genesis.autocast("cpu"):
        (Product.apply(x) @ x).sum().backward()
        genesis.autograd.grad(Product.apply(x).sum(), x)
        assert genesis.is_autocast_enabled("cpu")
    assert seen[0] == seen[1] == (False, FLOAT32)


@pytest.mark.parametrize("around", [True, False])
def test_checkpoints_repeat_the_types(around: bool) -> None:
    """With a weight that several checkpointed calls, and calls outside of them, share."""
    w, v = weight(4, 4), weight(4, 4, seed=1)

    def block(x: Any) -> Any:
        with genesis.autocast("cpu", enabled=True):
            return ((x @ w) @ v @ w).softmax(-1)

    def plain(x: Any) -> Any:
        return ((x @ w) @ v @ w).softmax(-1)

    results = []
    for wrapped in (False, True):
        x = weight(3, 4, seed=2)
        w.grad = v.grad = None
        function = plain if around else block
        with genesis.autocast("cpu", enabled=around):
            y = x @ w
            for _ in range(2):
                y = checkpoint(function, y) if wrapped else function(y)
            loss = ((y @ w) ** 2.0).sum()
        loss.backward()
        assert not genesis.is_autocast_enabled("cpu") and not autocasting.casts
        results.append([loss.tolist(), x.grad.numpy(), w.grad.numpy(), v.grad.numpy()])
    assert results[0][0] == results[1][0]
    for plainly, repeated in zip(results[0][1:], results[1][1:], strict=True):
        # Sums over uses of a weight are rounded to bfloat16 in one case, and made in float32 in the other.
        np.testing.assert_allclose(repeated, plainly, atol=2e-2 * np.abs(plainly).max())


def test_a_model_trains_in_two_bytes() -> None:
    shape = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build({**shape, **counts}, 1)
    ids = genesis.tensor(np.arange(24).reshape(2, 12))
    expected = model.loss(ids, ids).item()
    with genesis.autocast("cpu"):
        loss, logits = model.loss(ids, ids), model(ids)
    assert loss.dtype is FLOAT32 and logits.dtype is BFLOAT16
    assert 0 < abs(loss.item() - expected) < 2e-2
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {FLOAT32}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_float16_with_a_scaler(device: str) -> None:
    """Gradients of 2^-26 would be 0 in float16; scaled, they train like those in float32."""
    rng = np.random.default_rng(0)
    x = genesis.tensor(rng.normal(size=(16, 4)).astype(np.float32), device=device)
    target = genesis.tensor(rng.normal(size=(16, 1)).astype(np.float32), device=device)
    losses: dict[str, list[float]] = {}
    for kind in ("float32", "float16", "unscaled"):
        weights = [weight(8, 4, seed=1, device=device), weight(1, 8, seed=2, device=device)]
        optimizer = optim.SGD(weights, lr=0.02 * 2.0**24)
        scaler = optim.GradScaler(2.0**20, enabled=kind == "float16")
        losses[kind] = []
        for _ in range(6):
            with genesis.autocast(device, FLOAT16, enabled=kind != "float32"):
                loss = F.mse_loss(F.linear(F.relu(F.linear(x, weights[0])), weights[1]), target)
            scaler.scale(loss * 2.0**-24).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
    assert losses["float32"][-1] < 0.8 * losses["float32"][0]
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=2e-2)
    assert losses["unscaled"][-1] > 1.1 * losses["float16"][-1]
