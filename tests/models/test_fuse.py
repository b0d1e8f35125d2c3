"""Fused models against their plain forms: which blocks fuse, that both compute the same, what a changed block does."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis import Tensor, nn
from genesis.errors import ConfigError
from genesis_models.blocks import MLP, CausalLM, Context, widest_matmul
from genesis_models.config import FAMILIES, ModelConfig
from genesis_models.fuse import Fused, fuse, unfuse
from genesis_models.registry import ARCHITECTURES

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
# What each family may have.
CASES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "phi3"},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    {"model_type": "qwen3", "tie_word_embeddings": True},
    {"model_type": "qwen3", "attention_bias": True},
    {"model_type": "smollm3", "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5},
]
# Those whose layers stay plain; their MLPs fuse.
PLAIN: list[dict[str, Any]] = [
    {"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 2},
    {"model_type": "olmo2"},
    {"model_type": "granite", "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 4.0},
]


def name_of(case: dict[str, Any]) -> str:
    return "-".join((case["model_type"], *list(case)[1:]))


def step(model: CausalLM) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Logits, loss and gradients of packed documents."""
    tokens = genesis.from_numpy(np.random.default_rng(0).integers(0, 97, (2, 24)))
    positions = genesis.from_numpy(np.stack([np.r_[0:10, 0:14], np.r_[0:24]]))
    with genesis.no_grad():
        logits = model(tokens, positions).double().numpy()
    loss = model.loss(tokens, tokens, positions)
    loss.backward()
    return logits, loss.item(), {name: p.grad.double().numpy() for name, p in model.named_parameters()}


def test_every_family_is_here() -> None:
    assert {case["model_type"] for case in CASES + PLAIN} == set(ARCHITECTURES) == set(FAMILIES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_build_fuses_every_layer_and_unfuse_gives_the_plain_ones_back(case: dict[str, Any]) -> None:
    model = genesis_models.build(SIZES | case)
    names = [name for name, _ in model.named_parameters()]
    for layer in model.model.layers:
        assert all(isinstance(block, Fused) for block in (layer, layer.self_attn, layer.mlp))
    unfuse(model)
    assert not [block for block in model.modules() if isinstance(block, Fused)]
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_a_layer_that_no_rule_knows_stays_plain(case: dict[str, Any]) -> None:
    for layer in genesis_models.build(SIZES | case).model.layers:
        assert not isinstance(layer, Fused)
        assert isinstance(layer.mlp, Fused)


@pytest.mark.sample
@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("case", CASES + PLAIN, ids=name_of)
def test_forward_has_the_same_bits_and_gradients_differ_by_the_order_of_sums(case: dict[str, Any], how: str) -> None:
    """A joined matmul sums the input's gradient over the columns of all its weights at once: n terms reordered."""
    config = ModelConfig.from_dict(SIZES | case)
    for dtype in ("float32", "float64"):
        fused, plain = (genesis_models.build(config, 3).to(dtype=dtype) for _ in range(2))
        fused.activation_checkpointing = plain.activation_checkpointing = how
        found, expected = step(fused), step(unfuse(plain))
        np.testing.assert_array_equal(found[0], expected[0])
        assert found[1] == expected[1]
        bound = config.num_hidden_layers * widest_matmul(config) * np.finfo(dtype).eps
        for name, gradient in expected[2].items():
            assert np.linalg.norm(found[2][name] - gradient) <= bound * np.linalg.norm(gradient), name


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("case", CASES + PLAIN, ids=name_of)
def test_in_bfloat16_plain_layers_round_more_often(case: dict[str, Any]) -> None:
    """Fused ops keep some results in float32 that a plain layer rounds: some 16 a layer, forward and backward."""
    config = ModelConfig.from_dict(SIZES | case)
    fused, plain = (genesis_models.build(config, 3, dtype="bfloat16") for _ in range(2))
    found, expected = step(fused), step(unfuse(plain))
    bound = config.num_hidden_layers * 16 * 2**-8
    assert np.linalg.norm(found[0] - expected[0]) <= bound * np.linalg.norm(expected[0])
    for name, gradient in expected[2].items():
        assert np.linalg.norm(found[2][name] - gradient) <= bound * np.linalg.norm(gradient), name


class Doubled(nn.Module):
    """A block of a user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_block_or_norm_in_place_of_another_is_used() -> None:
    model = genesis_models.build(SIZES | CASES[0], 3)
    plain = unfuse(genesis_models.build(SIZES | CASES[0], 3))
    for each in (model, plain):
        each.model.layers[0].mlp = Doubled()
        each.model.layers[1].input_layernorm = nn.RMSNorm(SIZES["hidden_size"], eps=0.5)
    first, second = model.model.layers
    assert not isinstance(first, Fused) and isinstance(first.self_attn, Fused) and isinstance(second, Fused)
    np.testing.assert_array_equal(step(model)[0], step(plain)[0])
    first.mlp = genesis_models.build(SIZES | CASES[0], 4).model.layers[1].mlp
    fuse(model)
    assert isinstance(first, Fused) and isinstance(first.mlp, Fused)


def test_a_fused_block_is_right_wherever_it_is_put() -> None:
    """Blocks hold no norm: it is the layer's."""
    found = []
    for is_plain in (False, True):
        model, other = (genesis_models.build(SIZES | CASES[0], seed) for seed in (3, 4))
        first, second = model.model.layers
        unfuse(first)
        first.mlp = other.model.layers[1].mlp  # a fused block in a plain layer,
        second.mlp = first.mlp  # one block in two layers,
        unfuse(second.self_attn)  # and a fused layer whose block was unfused by itself
        if is_plain:
            unfuse(model)
        else:
            assert [isinstance(x, Fused) for x in (first, first.mlp, second, second.self_attn)] == [
                False,
                True,
                True,
                False,
            ]
        found.append(step(model)[0])
    np.testing.assert_array_equal(*found)


def test_a_block_with_exact_gelu_stays_plain_beside_a_fused_tanh_form() -> None:
    config = ModelConfig.from_dict(SIZES | CASES[0])
    x = genesis.from_numpy(np.random.default_rng(1).standard_normal((2, 5, 48)).astype(np.float32))
    for approximate, is_fused in (("none", False), ("tanh", True)):
        genesis.manual_seed(0)
        block = MLP(config, nn.GELU(approximate))
        with genesis.no_grad():
            expected = block(x).numpy()
        assert isinstance(fuse(block), Fused) == is_fused
        with genesis.no_grad():
            np.testing.assert_allclose(block(x).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_copy_has_its_own_norms() -> None:
    model = genesis_models.build(SIZES | CASES[0], 3)
    before = step(model)[0]
    copied = copy.deepcopy(model)
    with genesis.no_grad():
        model.model.layers[0].input_layernorm.weight.fill_(0.0)
    np.testing.assert_array_equal(step(copied)[0], before)
    assert (step(model)[0] != before).any()


def test_a_layer_with_a_forward_of_its_own_stays_plain_and_its_blocks_fuse() -> None:
    model = unfuse(genesis_models.build(SIZES | CASES[0], 3))
    before = step(model)[0]

    class Scaled(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, x: Tensor, context: Context) -> Tensor:
            x = x + self.self_attn(self.input_layernorm(x), context) * 0.5
            return x + self.mlp(self.post_attention_layernorm(x)) * 0.5

    for layer in model.model.layers:
        layer.__class__ = Scaled
    plain = step(model)[0]
    fuse(model)
    assert type(model.model.layers[0]) is Scaled and isinstance(model.model.layers[0].mlp, Fused)
    np.testing.assert_array_equal(step(model)[0], plain)
    assert (plain != before).any()


def test_only_the_registry_asks_for_the_model_type() -> None:
    root, found = Path(__file__).parents[2], []
    for folder in ("models", "cli", "genesis"):
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if re.search(r"model_type\W*\s(==|!=|in|not in)\s|case \"(llama|qwen)", text):
                found.append(path.relative_to(root).as_posix())
    assert found == []


def test_what_layers_cannot_do_is_refused_where_it_is_set() -> None:
    model = genesis_models.build(SIZES | CASES[0])
    model.activation_checkpointing, model.precision = "selective", "fp8"
    for name, value in (("activation_checkpointing", "selectiv"), ("precision", "fp16")):
        with pytest.raises(ConfigError, match=f"{value}'"):
            setattr(model, name, value)
    plain = unfuse(genesis_models.build(SIZES | CASES[0]))
    plain.activation_checkpointing = "full"
    for name, value in (("activation_checkpointing", "selective"), ("precision", "fp8")):
        with pytest.raises(ConfigError, match=f"{value} needs fused layers, but the layers of .* are plain"):
            setattr(plain, name, value)
    assert (plain.activation_checkpointing, plain.precision) == ("full", None)
