"""Kernels of your own as ops: a Triton function or a CUDA C++ string becomes a differentiable function on tensors.

    gelu = genesis.cuda_op("my_gelu", source, inputs=("x",), out=lambda x: x, grid=lambda out, x: cdiv(out.size, 256))
    y = gelu(x)

Such an op runs eagerly, under autograd, inside CUDA graphs and in `genesis profile --op mymodule:my_gelu`, as those of
Genesis do. With a numpy `reference` it runs on the CPU, too, and `check_op` holds the kernel against it. docs/
user-kernels.md is the tutorial. Importing this imports neither Triton nor CUDA.
"""

from genesis.array import Spec
from genesis.custom.check import check_op
from genesis.custom.kernel_ops import CudaOp, TritonOp, cuda_op, triton_op
from genesis.custom.user_op import UserOp, cdiv, load_op, user_ops
from genesis.keywords import check_calls

__all__ = ["CudaOp", "Spec", "TritonOp", "UserOp", "cdiv", "check_op", "cuda_op", "load_op", "triton_op", "user_ops"]

check_calls(globals(), __all__)
