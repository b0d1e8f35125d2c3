"""torch's place for the classes of layers, which `genesis.nn` exports, and for hooks on all modules (`module`)."""

from genesis.nn.modules import module

__all__ = ["module"]
