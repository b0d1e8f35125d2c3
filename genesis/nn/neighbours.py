"""Memory for a module's parameters: those of layers side by side are in one run, as ops want their operands.

The linear layers of a block (queries, keys and values, say) are one operand where their weights are neighbours, and
their biases, too. An optimizer sees to that for what it trains (`genesis.optim.flat`); here it is done for a whole
model, of which a part may stay frozen. A run is no larger than a block, so that what leaves it for an optimizer's
buffers leaves little unused memory behind. `Module.to` keeps runs.
"""

from __future__ import annotations

from typing import Any

from genesis.backend import as_device
from genesis.dtypes import as_dtype
from genesis.nn.module import Module
from genesis.nn.moving import run_of
from genesis.nn.parameter import Parameter, replace_array


def take_memory(module: Module, device: Any, dtype: Any) -> None:
    """Give all parameters memory, which is not initialised; those of one block of layers are in one run.

    In a run first come the matrices, then the vectors, each in the module's order.
    """
    blocks: dict[str, list[Parameter]] = {}
    for name, parameter in module.named_parameters():
        blocks.setdefault(".".join(name.split(".")[:-2]), []).append(parameter)
    for members in blocks.values():
        ordered = sorted(members, key=lambda p: p.ndim < 2)
        arrays = run_of([p.shape for p in ordered], as_dtype(dtype), as_device(device))
        for parameter, array in zip(ordered, arrays, strict=True):
            replace_array(parameter, array)
