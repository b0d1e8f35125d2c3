"""Modules that call one function of `genesis.nn.functional` with settings: activations, losses and distances.

A module's arguments are the function's parameters after its tensors, in their order; each becomes an attribute of its
name. Weights are buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from genesis.errors import UsageError
from genesis.functions.surface import functional
from genesis.nn import functional as _registers_its_functions  # noqa: F401
from genesis.nn.losses import reduction_of
from genesis.nn.module import Module
from genesis.op import registry
from genesis.tensor import Tensor

WEIGHTS = ("weight", "pos_weight")
OLD = ("size_average", "reduce")

# Module, its function, the number of tensors it takes, and parameters of the function that are not the module's.
TABLE: dict[str, tuple[str, int, tuple[str, ...]]] = {
    **{op.module: (op.public, 1, ()) for op in registry.values() if op.module},
    "CELU": ("celu", 1, ()),
    "ELU": ("elu", 1, ()),
    "GELU": ("gelu", 1, ()),
    "GLU": ("glu", 1, ()),
    "Hardshrink": ("hardshrink", 1, ()),
    "Hardsigmoid": ("hardsigmoid", 1, ()),
    "Hardswish": ("hardswish", 1, ()),
    "LeakyReLU": ("leaky_relu", 1, ()),
    "LogSigmoid": ("logsigmoid", 1, ()),
    "LogSoftmax": ("log_softmax", 1, ("_stacklevel", "dtype")),
    "Mish": ("mish", 1, ()),
    "ReLU6": ("relu6", 1, ()),
    "RReLU": ("rrelu", 1, ("training",)),
    "SELU": ("selu", 1, ()),
    "Softmax": ("softmax", 1, ("_stacklevel", "dtype")),
    "Softmin": ("softmin", 1, ("_stacklevel", "dtype")),
    "Softplus": ("softplus", 1, ()),
    "Softshrink": ("softshrink", 1, ()),
    "Softsign": ("softsign", 1, ()),
    "Tanhshrink": ("tanhshrink", 1, ()),
    "Threshold": ("threshold", 1, ()),
    "AlphaDropout": ("alpha_dropout", 1, ("training",)),
    "Dropout1d": ("dropout1d", 1, ("training",)),
    "FeatureAlphaDropout": ("feature_alpha_dropout", 1, ("training",)),
    "CosineSimilarity": ("cosine_similarity", 2, ()),
    "PairwiseDistance": ("pairwise_distance", 2, ()),
    "BCELoss": ("binary_cross_entropy", 2, ()),
    "BCEWithLogitsLoss": ("binary_cross_entropy_with_logits", 2, ()),
    "CosineEmbeddingLoss": ("cosine_embedding_loss", 3, ()),
    "CrossEntropyLoss": ("cross_entropy", 2, ()),
    "GaussianNLLLoss": ("gaussian_nll_loss", 3, ()),
    "HingeEmbeddingLoss": ("hinge_embedding_loss", 2, ()),
    "HuberLoss": ("huber_loss", 2, WEIGHTS),
    "KLDivLoss": ("kl_div", 2, ()),
    "L1Loss": ("l1_loss", 2, WEIGHTS),
    "MSELoss": ("mse_loss", 2, WEIGHTS),
    "MarginRankingLoss": ("margin_ranking_loss", 3, ()),
    "MultiLabelMarginLoss": ("multilabel_margin_loss", 2, ()),
    "MultiLabelSoftMarginLoss": ("multilabel_soft_margin_loss", 2, ()),
    "MultiMarginLoss": ("multi_margin_loss", 2, ()),
    "NLLLoss": ("nll_loss", 2, ()),
    "PoissonNLLLoss": ("poisson_nll_loss", 2, ()),
    "SmoothL1Loss": ("smooth_l1_loss", 2, ()),
    "SoftMarginLoss": ("soft_margin_loss", 2, ()),
    "TripletMarginLoss": ("triplet_margin_loss", 3, ()),
    "TripletMarginWithDistanceLoss": ("triplet_margin_with_distance_loss", 3, ()),
}


class Applied(Module):
    """Base class of the modules of `TABLE`."""

    _function: Callable[..., Any]
    _settings: tuple[str, ...]  # attributes passed by keyword
    _inputs: int  # number of tensors it takes
    _trains: bool  # whether the function takes `training`

    def _set(self, settings: dict[str, Any]) -> None:
        if "reduction" in settings:
            size_average, reduce = (settings.pop(name, None) for name in OLD)
            settings["reduction"] = reduction_of(size_average, reduce, settings["reduction"])
        if "p" in settings and self._trains and not 0 <= settings["p"] <= 1:
            raise UsageError(f"{type(self).__name__}: p is {settings['p']}", next="choose p in [0, 1]")
        for name, value in settings.items():
            if name in WEIGHTS:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        settings = {name: getattr(self, name) for name in self._settings}
        if self._trains:
            settings["training"] = self.training
        return self._function(*inputs, **named, **settings)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        found = {} if self._inputs > 1 else {name: getattr(self, name) for name in self._settings}
        if list(found) == ["lambd"]:
            return str(found["lambd"])
        return ", ".join(f"{n}={value!r}" for n, value in found.items() if n != "inplace" or value or "p" in found)


def _module(name: str, function: Callable[..., Any], tensors: int, omitted: tuple[str, ...]) -> type[Applied]:
    """Build the module class of a row of `TABLE`."""
    found = list(inspect.signature(function).parameters.values())
    own = [p.replace(annotation=p.annotation) for p in found[tensors:] if p.name not in ("out", *omitted)]
    if name == "GaussianNLLLoss":  # takes its settings by name only
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    signature = inspect.Signature(own)

    def __init__(self: Applied, *args: Any, **given: Any) -> None:
        Module.__init__(self)
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:
            raise UsageError(f"{name}: {error}", next=f"it takes {signature}") from None
        bound.apply_defaults()
        self._set(bound.arguments)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
    members = {
        "__doc__": function.__doc__,
        "__module__": __name__,
        "__init__": __init__,
        "_function": staticmethod(function),
        "_settings": tuple(p.name for p in own if p.name not in OLD),
        "_inputs": tensors,
        "_trains": "training" in omitted,
    }
    return type(name, (Applied,), members)


applied = {name: _module(name, functional[row[0]], *row[1:]) for name, row in TABLE.items()}
globals().update(applied)
