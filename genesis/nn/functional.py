"""Functions of neural networks under the names of torch.nn.functional, and the fused ones that language models need.

Each function is registered where it is defined (`genesis.functions.surface`). `make stubs` writes their signatures into
`functional.pyi`.
"""

from genesis.functions.surface import functional as _functional
from genesis.nn import (  # noqa: F401  importing registers their functions
    activation_functions,
    class_losses,
    convolution,
    distance_functions,
    layer_functions,
    losses,
    multi_head_attention,
    norm_functions,
    scaled_attention,
    value_losses,
)

globals().update(_functional)
__all__ = [*_functional]  # noqa: PLE0604  the table holds names
__all__.sort()
