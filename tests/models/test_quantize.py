"""Models with weights in 8 bits: they compute what their converted weights say, and generate; what they refuse."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

import genesis
import genesis_models
from genesis import nn
from genesis.errors import GradientError, UsageError
from genesis.nn.quantized import Kind, QuantizedLinear, quantize_layers
from genesis_models.adapters import AdapterConfig, apply_adapters
from genesis_models.blocks import CausalLM
from genesis_models.engine.engine import EagerEngine, Engine, Request
from genesis_models.engine.sampling import Sampling
from genesis_models.weights import is_quantized, quantize
from tests.models.golden import FIXTURES, NAMES

IDS = genesis.tensor([[5, 17, 2, 40, 8, 8, 3]])


def model_of(family: str) -> CausalLM:
    return genesis_models.load(FIXTURES / family, dtype="float32").eval()


def converted(model: CausalLM, quantized: CausalLM) -> CausalLM:
    """`model` with the weights that those of `quantized` stand for."""
    made = dict(quantized.named_modules())
    with genesis.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(made[name].weight)
    return model


@pytest.mark.sample(cases=8)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("family", NAMES)
def test_logits_are_those_of_the_converted_weights(family: str, kind: Kind) -> None:
    plain = model_of(family)
    quantized = quantize(copy.deepcopy(plain), kind)
    assert is_quantized(quantized)
    assert not is_quantized(plain)
    assert not any(isinstance(module, nn.Linear) for module in quantized.modules())
    with genesis.no_grad():
        found, before = quantized(IDS).numpy(), plain(IDS).numpy()
        hidden = converted(plain, quantized).hidden_states(IDS)
        want = nn.functional.linear(hidden, quantized.head_weight).numpy()
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert 0 < np.linalg.norm(found - before) < (0.15 if kind == "fp8" else 0.05) * np.linalg.norm(before)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_engine_continues_as_the_plain_one(kind: Kind) -> None:
    model = quantize(model_of("qwen2-tied"), kind)
    requests = [Request(ids, Sampling(temperature=0), 9) for ids in ([3, 1, 4], [1, 5, 9, 2, 6], [5])]
    found: dict[int, list[int | None]] = {}
    for token in Engine(model, rows=2, capacity=32).run(requests):
        found.setdefault(token.request, []).append(token.id)
    want: dict[int, list[int | None]] = {}
    for token in EagerEngine(model).run(requests):
        want.setdefault(token.request, []).append(token.id)
    assert found == want
    assert all(len(ids) >= 9 for ids in found.values())


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_on_a_gpu(kind: Kind) -> None:
    """The same logits, of a prompt and of a token behind it, from four launches a layer and one of the head."""
    model = model_of("qwen2-tied")
    there = quantize(model_of("qwen2-tied").to("cuda"), kind)
    with genesis.no_grad():
        want = quantize(model, kind)(IDS).numpy()
        found = there(IDS.to("cuda")).cpu().numpy()
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_layers_are_neighbours_and_keep_their_biases() -> None:
    genesis.manual_seed(1)
    layers = [nn.Linear(24, n, bias=bias) for n, bias in ((16, True), (8, False), (8, True))]
    made = quantize_layers(layers, "int8")
    ends = [each.codes.array.offset + each.codes.numel() for each in made]
    assert [each.codes.array.offset for each in made[1:]] == ends[:-1]
    assert len({id(each.codes.array.storage) for each in made}) == 1
    x = genesis.randn(5, 24)
    with genesis.no_grad():
        for layer, each in zip(layers, made, strict=True):
            assert (each.bias is None) == (layer.bias is None)
            np.testing.assert_allclose(each(x).numpy(), layer(x).numpy(), atol=0.02)


@pytest.mark.parametrize(("kind", "largest"), [("int8", 0.5 / 127), ("fp8", 2.0**-4)])
def test_how_far_a_weight_is_from_its_codes(kind: Kind, largest: float) -> None:
    """int8 errs by half a step of a row's largest magnitude, fp8 by half a place of each number; 0 stays 0."""
    layer = nn.Linear(40, 6, bias=False)
    with genesis.no_grad():
        layer.weight.mul_(genesis.tensor([[1.0], [1e-6], [1e6], [0.0], [1.0], [1.0]]))
        layer.weight[4, 3], layer.weight[5, 2] = float("nan"), float("inf")
    (made,) = quantize_layers([layer], kind)
    before, after = layer.weight.detach().numpy(), made.weight.numpy()
    reach = np.abs(before[:3]).max(1, keepdims=True)
    size = reach if kind == "int8" else np.maximum(np.abs(before[:3]), reach * 2.0**-13)
    assert (np.abs(after[:3] - before[:3]) <= 1.001 * largest * size).all()
    assert (after[3] == 0).all()
    assert not np.isfinite(after[4]).any()
    assert not np.isfinite(after[5]).all()


def test_what_is_refused(tmp_path: Path) -> None:
    model = quantize(model_of("qwen2-tied"), "int8")
    with pytest.raises(UsageError, match="quantized already"):
        quantize(model, "int8")
    with pytest.raises(UsageError, match="cannot be saved"):
        genesis_models.save(model, tmp_path / "there")
    with pytest.raises(UsageError, match="fp8 or int8"):
        quantize(model_of("qwen2-tied"), "int4")  # type: ignore[arg-type]
    adapted = apply_adapters(model_of("qwen2-tied"), AdapterConfig(r=2, alpha=4, target_modules=["q_proj"]))
    with pytest.raises(UsageError, match="merge them"):
        quantize(adapted, "int8")
    x = genesis.randn(1, 8, requires_grad=True)
    (layer,) = quantize_layers([nn.Linear(8, 4)], "int8")
    with pytest.raises(GradientError, match="quantized_linear has no gradient"):
        layer(x).sum().backward()
    assert isinstance(layer, QuantizedLinear)
