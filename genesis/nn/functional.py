"""Functions of neural networks under the names of torch.nn.functional, and the fused ones that language models need.

Each is registered where it is defined (`genesis.functions.surface`); `functional.pyi`, made by `make stubs`, has their
signatures.
"""

from genesis.functions.surface import functional as _functional
from genesis.nn import layer_functions, losses, scaled_attention  # noqa: F401  they enter the table

globals().update(_functional)
__all__ = [*_functional]  # noqa: PLE0604  the table holds names
__all__.sort()
