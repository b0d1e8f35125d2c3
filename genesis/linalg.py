"""Linear algebra, as in torch.linalg: norms, solvers and factorizations of batches of matrices.

Factorizations and solvers take float32 and float64 and run in LAPACK on the host: a matrix on a GPU is copied there and
back. Norms and products run on the tensors' device. Everything has a gradient that torch has, but for `eig` and
`eigvals`, which need complex numbers and are absent, and the LDL factorization.

>>> genesis.linalg.det(genesis.tensor([[2.0, 0.0], [0.0, 3.0]]))
tensor(6.)
"""

from genesis.errors import LinAlgError
from genesis.functions.matrices import linalg as _functions

globals().update(_functions)

__all__ = ["LinAlgError", *_functions]  # noqa: PLE0604  the table holds names
