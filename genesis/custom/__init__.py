"""Kernels of your own as ops: a Triton function or a CUDA C++ string becomes a differentiable function on tensors.

    gelu = genesis.cuda_op("my_gelu", source, inputs=("x",), out=lambda x: x, grid=lambda out, x: cdiv(out.size, 256))
    y = gelu(x)

The op runs eagerly, under autograd, inside CUDA graphs and in `genesis profile --op mymodule:my_gelu`, like the ops of
Genesis. With a numpy `reference` it also runs on the CPU, and `check_op` compares the kernel with it. The tutorial is
docs/user-kernels.md. Importing this module imports neither Triton nor CUDA.
"""

from genesis.array import Spec
from genesis.custom.check import check_op
from genesis.custom.cuda_module import CudaKernel, CudaModule, cuda_module
from genesis.custom.kernel_ops import CudaOp, TritonOp, cuda_op, triton_op
from genesis.custom.user_op import UserOp, cdiv, load_op, user_ops
from genesis.keywords import check_calls

__all__ = [
    "CudaKernel",
    "CudaModule",
    "CudaOp",
    "Spec",
    "TritonOp",
    "UserOp",
    "cdiv",
    "check_op",
    "cuda_module",
    "cuda_op",
    "load_op",
    "triton_op",
    "user_ops",
]

check_calls(globals(), __all__)
