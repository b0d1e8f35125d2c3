"""Checks which models, devices and sampling settings exact generation supports.

docs/decisions/0014-exact.md states the order of every sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from genesis import cuda
from genesis.dtypes import bfloat16
from genesis.errors import DeviceError, ModelError, UsageError
from genesis.nn.quantized import QuantizedLinear
from genesis_models.blocks import CausalLM
from genesis_models.engine.sampling import Sampling

CAPABILITY = 9  # major compute capability for which docs/decisions/0014-exact.md was verified


def check_model(model: CausalLM, cache: str = "auto") -> None:
    """Check that a model and its device support exact generation.

    Args:
        cache: dtype of keys and values, as in `DeviceEngine`.

    Raises:
        UsageError: the cache has 8 bits.
        ModelError: the weights have 8 bits, or are not bfloat16.
        DeviceError: the model is not on a GPU of compute capability 9.
    """
    weight = model.model.embed_tokens.weight
    if not weight.is_cuda:
        what = f"exact generation needs a GPU, but the model is on {weight.device}, where sums depend on the batch"
        raise DeviceError(what, next="use an H100 or H200 (--device cuda), or generate without exact")
    major, minor = cuda.get_device_capability(weight.device)
    if major != CAPABILITY:
        what = f"exact generation needs compute capability {CAPABILITY}.x, but the GPU has {major}.{minor}"
        raise DeviceError(what, next="use an H100 or H200, or generate without exact")
    if cache != "auto":
        raise UsageError(f"exact generation does not support a KV cache in {cache}", next="leave the cache at auto")
    quantized = [name for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]
    if quantized:
        what = f"exact generation does not support 8-bit weights, such as {quantized[0]}"
        raise ModelError(what, next="load the model in bfloat16 (--dtype bfloat16)")
    if weight.dtype is not bfloat16:
        raise ModelError(
            f"exact generation needs bfloat16 weights, but they are {weight.dtype.name}",
            next="load the model in bfloat16",
        )


def filters(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of sampling settings, other than the temperature, that change the distribution."""
    plain = {"top_k": None, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    return [name for name, value in plain.items() if settings.get(name) not in (None, value)]


def check_sampling(sampling: Sampling) -> None:
    """Check that tokens are drawn from the distribution whose log-probability is reported.

    Raises:
        UsageError: a setting other than the temperature changes the distribution.
    """
    for name in filters(asdict(sampling)):
        raise UsageError(
            f"exact generation does not support {name} (it is {getattr(sampling, name)})", next=f"leave {name} out"
        )
