"""Which ops launch the kernels of few rows, and that their results are those of other kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.array import Array, empty
from genesis.autograd.modes import fixed_weights, no_grad
from genesis.backend import Device, backend_for
from genesis.backend.cuda.launch import KernelLaunch, watching_launches
from genesis.dtypes import DType, bfloat16, float32
from genesis.nn import fused
from genesis.nn.quantized import quantize_layers, quantized_linear
from genesis.op import Op
from genesis.ops.linear import linear, packed_linear
from genesis.ops.norm_linear import norm_linear, norm_mlp

CUDA = Device("cuda", 0)
EPS = 1e-5


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


def calls(m: int) -> dict[str, tuple[Op, tuple[np.ndarray | None, ...], dict[str, Any], list[str]]]:
    """Ops on m rows, with the kernels that they launch where nothing is recorded."""
    f, k = 32, 16
    rng = np.random.default_rng(m)
    x, scale, bias, k_bias = rng.normal(size=(m, 1, k)), *(rng.normal(size=n) for n in (k, f, k))
    w, v, down = rng.normal(size=(f, k)) / 4, rng.normal(size=(f, k)) / 4, rng.normal(size=(k, f)) / 4
    two = ["few_rows_fma_kernel" if m == 1 else "few_rows_mma_kernel"] * 2
    return {
        "linear": (linear, (x, w, bias, rng.normal(size=(m, 1, f))), {}, two[:1]),
        "packed": (packed_linear, (x, w, v, bias, bias), {}, two),
        "norm": (norm_linear, (x, scale, w, v), {"eps": EPS}, two),
        "mlp": (norm_mlp, (x, scale, down, k_bias, w, v), {"eps": EPS}, two),
        "mlp, one weight": (
            norm_mlp,
            (x, scale, down, None, np.concatenate([w, v])),
            {"eps": EPS},
            two,
        ),
    }


@pytest.mark.sample
@pytest.mark.parametrize("name", calls(1))
@pytest.mark.parametrize(("m", "dtype"), [(1, float32), (6, bfloat16), (32, bfloat16), (6, float32), (33, float32)])
def test_ops_that_are_not_recorded_take_them(m: int, dtype: DType, name: str) -> None:
    """With the reference's results; recorded, and with more rows, they launch what they launched before."""
    op, inputs, attrs, wanted = calls(m)[name]
    arrays = [None if v is None else on_gpu(v, dtype) for v in inputs]
    launched: list[str] = []

    def note(made: KernelLaunch, stream: int) -> None:
        launched.append(made.name)
        made.run(stream)

    def run() -> tuple[np.ndarray, ...]:
        launched.clear()
        with watching_launches(note):  # until results are read: launches wait while kernels are compiled
            found = op(*arrays, **attrs)
            return tuple(map(wide, found if isinstance(found, tuple) else (found,)))

    recorded = run()
    assert wanted[0] not in launched
    before = list(launched)
    with no_grad():
        results = run()
        assert launched == (before if m > 1 and dtype is float32 else wanted)
    close = 1e-5 if dtype is float32 else 2.0**-4  # the normalised x, gate, up and h are rounded, each to 2^-8
    for want, found in zip(recorded, results, strict=True):
        np.testing.assert_allclose(found, want, rtol=close, atol=close)


def test_the_layers_of_a_step_take_the_norm_with_them() -> None:
    """On a GPU, where one token of each sequence is not recorded."""
    norm, layers = nn.RMSNorm(16, eps=1e-6), [nn.Linear(16, n) for n in (24, 8)]
    gate, up, down = nn.Linear(16, 12, bias=False), nn.Linear(16, 12, bias=False), nn.Linear(12, 16)
    x = genesis.randn(1, 1, 16)
    want = [fused.packed_linear(x, layers, norm), fused.gated_mlp(x, norm, [gate, up], down)]
    for each in (norm, *layers, gate, up, down):
        each.to("cuda")
    launched: list[str] = []

    def note(made: KernelLaunch, stream: int) -> None:
        launched.append(made.name)
        made.run(stream)

    with no_grad(), watching_launches(note):
        y = x.to("cuda")
        y.cpu()
        launched.clear()
        found = [
            fused.packed_linear(y, layers, norm),
            fused.gated_mlp(y, norm, [gate, up], down),
        ]
        got = [b.cpu().numpy() for b in found]
    assert {*launched} == {"few_rows_fma_kernel"}
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("name", calls(1))
def test_weights_that_nothing_writes_are_loaded_early(name: str) -> None:
    """Where the caller says so: a call before, of the same inputs, does not decide it. The bits stay."""
    op, inputs, attrs, _ = calls(1)[name]
    arrays, early = [None if v is None else on_gpu(v, float32) for v in inputs], list[bool]()

    def note(made: KernelLaunch, stream: int) -> None:
        if made.name == "few_rows_fma_kernel":
            early.append(made.constants["EARLY"])
        made.run(stream)

    def results(is_fixed: bool) -> list[np.ndarray]:
        early.clear()
        with no_grad(), fixed_weights(is_fixed), watching_launches(note):
            found = op(*arrays, **attrs)
            made = [wide(each) for each in (found if isinstance(found, tuple) else (found,))]
        assert {*early} == {is_fixed}
        return made

    first, second, third = (results(is_fixed) for is_fixed in (False, True, False))
    for a, b, c in zip(first, second, third, strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, c)


def test_codes_that_are_copied_first_are_not_loaded_early() -> None:
    """Layers in 8 bits that are multiplied together are neighbours in memory; others are copied to be."""
    layers, early = [nn.Linear(16, 8, bias=False) for _ in range(2)], list[bool]()
    on_device = [each.to("cuda") for each in layers]
    neighbours = quantize_layers(on_device, "int8")
    apart = [quantize_layers([each], "int8")[0] for each in on_device]

    def note(made: KernelLaunch, stream: int) -> None:
        if made.name == "few_rows_fma_kernel":
            early.append(made.constants["EARLY"])
        made.run(stream)

    x = genesis.tensor(np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32), device="cuda")
    with no_grad(), fixed_weights(True), watching_launches(note):
        found = [quantized_linear(x, each).cpu().numpy() for each in (neighbours, apart)]
    assert early == [True, False] and np.array_equal(*found)
