"""The functions that are made of an op's record alone, as the record names them: `exp`, `mul`, `relu` and their like.

They take one tensor, or two operands of which one may be a number. Forms with a trailing underscore work in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genesis.functions.make import binary, inplace, inplace_two, unary
from genesis.functions.surface import registered
from genesis.op import registry
from genesis.ops import activation as _activation  # noqa: F401  its records
from genesis.ops import elementwise as _elementwise  # noqa: F401

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


for _op in registry.values():
    if _op.public:
        _made = {_op.public: (unary if _op.operands == 1 else binary)(_op)}
        if _op.in_place:
            _made[f"{_op.public}_"] = (inplace if _op.operands == 1 else inplace_two)(_op)
        for _name, _function in _made.items():
            globals()[_name] = registered(_function, _name, method=_op.method, nn=bool(_op.module))
