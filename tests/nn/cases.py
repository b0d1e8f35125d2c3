"""Calls that torch.nn.functional and genesis.nn.functional are both given: same names, same arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FIXTURE = Path(__file__).parent / "fixtures" / "functional.npz"


@dataclass(frozen=True)
class Call:
    """`function(*args, **kwargs)`; float64 arrays among `args` require gradients."""

    name: str
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def calls() -> list[Call]:
    """Every call, with the same random arrays each time."""
    rng = np.random.default_rng(11)

    def x(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape))

    def labels(*shape: int, classes: int = 5, ignored: int | None = -100) -> np.ndarray:
        made = rng.integers(0, classes, shape)
        if ignored is not None:
            made.flat[0] = ignored
        return np.asarray(made)

    chance = rng.random((4, 3)) * 0.9 + 0.05
    chance[0, 0], chance[0, 1] = 0.0, 1.0
    target = rng.random((4, 3))
    q, k, v = x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)
    long_k, long_v = x(2, 2, 9, 8), x(2, 2, 9, 8)
    seen = rng.random((6, 6)) < 0.6
    seen[:, 0] = True
    sdpa = "scaled_dot_product_attention"
    return [
        Call("gelu", "gelu", (x(3, 4),)),
        Call("gelu_tanh", "gelu", (x(3, 4),), {"approximate": "tanh"}),
        Call("silu", "silu", (x(3, 4),)),
        Call("relu", "relu", (x(3, 4),)),
        Call("softmax", "softmax", (x(3, 4),), {"dim": 0}),
        Call("log_softmax", "log_softmax", (x(3, 4),), {"dim": -1}),
        Call("linear", "linear", (x(2, 3, 4), x(5, 4), x(5))),
        Call("linear_no_bias", "linear", (x(3, 4), x(5, 4))),
        Call("rms_norm", "rms_norm", (x(2, 3, 8), (8,), x(8)), {"eps": 1e-6}),
        Call("rms_norm_plain", "rms_norm", (x(2, 8), (8,))),
        Call("layer_norm", "layer_norm", (x(2, 3, 8), (8,), x(8), x(8))),
        Call("layer_norm_plain", "layer_norm", (x(2, 8), (8,)), {"eps": 1e-3}),
        Call("embedding", "embedding", (labels(2, 3, ignored=None), x(5, 4))),
        Call("embedding_padded", "embedding", (labels(2, 7, ignored=None), x(5, 4)), {"padding_idx": -3}),
        Call("ce", "cross_entropy", (x(6, 5), labels(6))),
        Call("ce_sum", "cross_entropy", (x(6, 5), labels(6)), {"reduction": "sum"}),
        Call("ce_none", "cross_entropy", (x(6, 5), labels(6)), {"reduction": "none"}),
        Call("ce_smooth", "cross_entropy", (x(6, 5), labels(6)), {"label_smoothing": 0.1}),
        Call("ce_smooth_none", "cross_entropy", (x(6, 5), labels(6)), {"label_smoothing": 0.3, "reduction": "none"}),
        Call("ce_ignore", "cross_entropy", (x(6, 5), labels(6, ignored=2)), {"ignore_index": 2}),
        Call("ce_images", "cross_entropy", (x(2, 5, 3, 2), labels(2, 3, 2))),
        Call("ce_images_none", "cross_entropy", (x(2, 5, 3), labels(2, 3)), {"reduction": "none"}),
        Call("ce_one", "cross_entropy", (x(5), labels(ignored=None))),
        Call("mse", "mse_loss", (x(4, 3), x(4, 3))),
        Call("mse_none", "mse_loss", (x(4, 3), x(4, 3)), {"reduction": "none"}),
        Call("bce", "binary_cross_entropy", (chance[1:], target[1:]), {"reduction": "sum"}),
        Call("bce_logits", "binary_cross_entropy_with_logits", (x(4, 3) * 30, target)),
        Call("bce_weight", "binary_cross_entropy_with_logits", (x(4, 3), target), {"pos_weight": x(3)}),
        Call("sdpa", sdpa, (q, k, v)),
        Call("sdpa_causal", sdpa, (q, k, v), {"is_causal": True}),
        Call("sdpa_scale", sdpa, (q, k, v), {"is_causal": True, "scale": 0.3}),
        Call("sdpa_bool", sdpa, (q, k, v), {"attn_mask": seen}),
        Call("sdpa_float", sdpa, (q, k, v), {"attn_mask": x(2, 1, 6, 6)}),
        Call("sdpa_gqa", sdpa, (q, long_k, long_v), {"enable_gqa": True}),
        Call("sdpa_gqa_mask", sdpa, (q, long_k, long_v), {"enable_gqa": True, "attn_mask": x(6, 9)}),
        Call("sdpa_causal_long", sdpa, (q, long_k, long_v), {"enable_gqa": True, "is_causal": True}),
        Call("sdpa_three", sdpa, (q[0], k[0], v[0]), {"is_causal": True}),
        *_weighted(rng),
        *_activations(rng),
        *_norms_and_products(rng),
        *_losses(rng),
    ]


def _activations(rng: np.random.Generator) -> list[Call]:
    """Activations at ordinary, large and bordering values. torch's hardsigmoid has a factor in float32."""
    x = np.append(rng.standard_normal(7) * 3, [-800.0, 800.0, -3.0, 0.0, 0.5, 3.0, 6.0])
    plain = ("hardswish", "logsigmoid", "mish", "relu6", "selu", "softsign", "tanhshrink")
    settings: dict[str, dict[str, Any]] = {
        "celu": {"alpha": 0.5},
        "elu": {"alpha": 1.3},
        "hardshrink": {"lambd": 0.5},
        "hardtanh": {"min_val": -3.0, "max_val": 0.5},
        "leaky_relu": {"negative_slope": 0.2},
        "rrelu": {},
        "softmin": {"dim": 0},
        "softplus": {"beta": 2.0, "threshold": 6.0},
        "softshrink": {"lambd": 0.5},
        "threshold": {"threshold": 0.5, "value": -2.0},
    }
    return [
        *[Call(name, name, (x,)) for name in plain],
        *[Call(name, name, (x,), how) for name, how in settings.items()],
        Call("glu", "glu", (rng.standard_normal((3, 4, 5)),), {"dim": 1}),
        Call("prelu", "prelu", (rng.standard_normal((2, 3, 4)), rng.standard_normal(3))),
        Call("prelu_one", "prelu", (rng.standard_normal((2, 3)), rng.standard_normal(1))),
    ]


def _norms_and_products(rng: np.random.Generator) -> list[Call]:
    def x(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape))

    ids, bags = rng.integers(0, 6, 9), {"offsets": np.array([0, 2, 2, 7]), "padding_idx": 3}
    rows = np.array([[1, 1, 4], [0, 5, 1]])
    images, kernel = x(2, 4, 9), x(6, 2, 3)
    return [
        Call("batch_norm", "batch_norm", (x(3, 4, 2), None, None, x(4), x(4), True)),
        Call("instance_norm", "instance_norm", (x(2, 4, 5), None, None, x(4), x(4))),
        Call("group_norm", "group_norm", (x(2, 6, 5), 3, x(6), x(6))),
        Call("normalize", "normalize", (np.vstack([x(2, 4), np.zeros((1, 4))]), 3.0)),
        Call("cosine_similarity", "cosine_similarity", (x(3, 1, 4), x(5, 4)), {"dim": -1}),
        Call("pairwise_distance", "pairwise_distance", (x(3, 4), x(4)), {"p": 1.5, "keepdim": True}),
        Call("pdist", "pdist", (x(4, 3),)),
        Call("bilinear", "bilinear", (x(2, 3, 4), x(2, 3, 5), x(6, 4, 5), x(6))),
        Call("embedding_by_count", "embedding", (rows, x(6, 3)), {"scale_grad_by_freq": True, "padding_idx": 4}),
        *[
            Call(f"bag_{mode}", "embedding_bag", (ids, x(6, 3)), {"mode": mode, **bags})
            for mode in ("sum", "mean", "max")
        ],
        Call("bag_rows", "embedding_bag", (rows, x(6, 3)), {"mode": "sum", "per_sample_weights": x(2, 3)}),
        Call("conv1d", "conv1d", (images, kernel, x(6), 2, 1, 2, 2)),
        Call("conv1d_same", "conv1d", (images[0], x(3, 4, 4)), {"padding": "same"}),
        Call("conv_transpose1d", "conv_transpose1d", (images, x(4, 3, 3), x(6), 3, 1, 2, 2, 2)),
        Call("pad_reflect", "pad", (x(2, 3, 4), (2, 3), "reflect")),
        Call("pad_replicate", "pad", (x(2, 3, 4), (-1, 3), "replicate")),
        Call("pad_circular", "pad", (x(2, 3, 4, 3), (2, 3, 1, -1), "circular")),
    ]


def _losses(rng: np.random.Generator) -> list[Call]:
    def x(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape))

    signs, chance = np.array([1, -1, 1, -1]), rng.random((4, 3))
    logits, labels, weight = "linear_cross_entropy", np.array([2, -100, 0, 1]), rng.random(3)
    chance[0, 0] = 0.0
    both = {"weight": weight, "label_smoothing": 0.2}
    sets = np.array([[3, 0, -1, 1], [2, -1, 0, 0]])
    found = []
    for reduction in ("mean", "sum", "none"):
        how: dict[str, Any] = {"reduction": reduction}
        weighted = {"weight": weight, **how}
        found += [
            Call(f"ce_chance_{reduction}", "cross_entropy", (x(4, 3, 2), rng.random((4, 3, 2))), {**both, **how}),
            Call(f"nll_{reduction}", "nll_loss", (x(4, 3), labels), weighted),
            Call(f"lce_{reduction}", logits, (x(4, 5), x(3, 5), labels), {"linear_bias": weight, **both, **how}),
            Call(f"l1_{reduction}", "l1_loss", (x(4, 3), x(4, 3)), {"weight": rng.random((4, 3)), **how}),
            Call(f"smooth_l1_{reduction}", "smooth_l1_loss", (x(4, 3) * 3, x(4, 3)), {"beta": 0.7, **how}),
            Call(f"huber_{reduction}", "huber_loss", (x(4, 3) * 3, x(4, 3)), {"delta": 0.7, **how}),
            Call(f"kl_{reduction}", "kl_div", (x(4, 3), chance[1:].repeat(2, 0)[:4]), how),
            Call(f"poisson_{reduction}", "poisson_nll_loss", (x(4, 3), chance * 4 + 0.1), {"full": True, **how}),
            Call(f"gaussian_{reduction}", "gaussian_nll_loss", (x(4, 3), x(4, 3), chance[:, :1]), how),
            Call(f"soft_margin_{reduction}", "soft_margin_loss", (x(4) * 9, signs), how),
            Call(f"hinge_{reduction}", "hinge_embedding_loss", (x(4), signs), how),
            Call(f"ranking_{reduction}", "margin_ranking_loss", (x(4), x(4), signs), {"margin": 0.3, **how}),
            Call(f"cosine_{reduction}", "cosine_embedding_loss", (x(4, 3), x(4, 3), signs), how),
            Call(f"triplet_{reduction}", "triplet_margin_loss", (x(4, 3), x(4, 3), x(4, 3)), {"swap": True, **how}),
            Call(f"multi_{reduction}", "multi_margin_loss", (x(4, 3), labels.clip(0)), {"p": 2, **weighted}),
            Call(f"sets_{reduction}", "multilabel_margin_loss", (x(2, 4), sets), how),
            Call(f"sets_soft_{reduction}", "multilabel_soft_margin_loss", (x(4, 3), chance), weighted),
        ]
    return [
        *found,
        Call("kl_rows", "kl_div", (x(4, 3), x(4, 3)), {"reduction": "batchmean", "log_target": True}),
        Call("lce_dimensions", logits, (x(4, 5), x(3, 2, 5), rng.integers(0, 3, (4, 2)))),
        Call("lce_chance", logits, (x(4, 5), x(3, 5), chance)),
    ]


def _weighted(rng: np.random.Generator) -> list[Call]:
    """Losses with weights. torch has no gradient for those: they go by name."""

    def x(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape))

    of_classes = rng.random(5) + 0.5
    of_classes[3] = 0
    labels = rng.integers(0, 5, 7)
    labels[2] = -100
    chance, target = rng.random((4, 3)) * 0.9 + 0.05, rng.random((4, 3))
    bce, logits = "binary_cross_entropy", "binary_cross_entropy_with_logits"
    found = []
    for reduction in ("mean", "sum", "none"):
        how = {"reduction": reduction}
        weighted = {"weight": of_classes, **how}
        found += [
            Call(f"ce_weighted_{reduction}", "cross_entropy", (x(7, 5), labels), weighted),
            Call(
                f"ce_weighted_smooth_{reduction}",
                "cross_entropy",
                (x(7, 5), labels),
                {**weighted, "label_smoothing": 0.2},
            ),
            Call(f"bce_by_row_{reduction}", bce, (chance, target), {"weight": rng.random((4, 1)), **how}),
            Call(f"bce_logits_by_column_{reduction}", logits, (x(4, 3), target), {"weight": rng.random(3), **how}),
            Call(f"mse_weighted_{reduction}", "mse_loss", (x(4, 3), x(4, 3)), {"weight": rng.random((4, 3)), **how}),
        ]
    images = rng.integers(0, 5, (2, 3))
    both = {"weight": rng.random((4, 3)), "pos_weight": rng.random(3)}
    return [
        *found,
        Call("ce_weighted_images", "cross_entropy", (x(2, 5, 3), images), {"weight": of_classes, "ignore_index": 4}),
        Call("ce_weighted_one", "cross_entropy", (x(5), np.asarray(1)), {"weight": of_classes}),
        Call("ce_smooth_one_hot", "cross_entropy", (x(7, 5), labels), {"weight": of_classes, "label_smoothing": 1.0}),
        Call("bce_logits_both", logits, (x(4, 3), target), both),
        Call("ce_old_sum", "cross_entropy", (x(7, 5), labels, None, False, -100)),
        Call("ce_old_none", "cross_entropy", (x(7, 5), labels.clip(0), None, None, 1, False)),
        Call("mse_old_mean", "mse_loss", (x(4, 3), x(4, 3), True, True)),
        Call("bce_in_order", bce, (chance, target, None, None, None, "sum")),
    ]
