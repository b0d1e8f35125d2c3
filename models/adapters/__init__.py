"""Low-rank adapters of a model, with PEFT's terms and files.

`config` defines an adapter. `layers` finds the layers that it targets and adapts them. `folder` reads and writes
adapters, and records which model they were trained on.
"""

from genesis.files.hub import ADAPTER_CONFIG
from genesis_models.adapters.config import AdapterConfig
from genesis_models.adapters.folder import (
    ADAPTER_WEIGHTS,
    BASE_NAME,
    Base,
    adapter_values,
    apply_adapters_of,
    base_name,
    base_of,
    check_same_base,
    is_adapter,
    load_adapter,
    read_adapter,
    read_base,
    write_adapter,
)
from genesis_models.adapters.layers import adapted_layers, adapter_of, adapter_parameters, apply_adapters

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "BASE_NAME",
    "AdapterConfig",
    "Base",
    "adapted_layers",
    "adapter_of",
    "adapter_parameters",
    "adapter_values",
    "apply_adapters",
    "apply_adapters_of",
    "base_name",
    "base_of",
    "check_same_base",
    "is_adapter",
    "load_adapter",
    "read_adapter",
    "read_base",
    "write_adapter",
]
