"""As much of torch as a comparison asks for, over numpy: written into a folder that the peer's process imports from.

Its `mul` fails, its `sub` gives a wrong shape, its `div` ends the process, and `add` notes its first operand.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["install"]

SOURCE = """
import os, sys, types
import numpy as np

__version__ = "9.9"
float32, int64, bool = np.float32, np.int64, np.bool_
contiguous_format = "contiguous"


class Tensor(np.ndarray):
    def to(self, device):
        return self

    def repeat(self, count):
        return np.concatenate([self] * count).view(Tensor)

    def as_strided(self, shape, strides):
        steps = [s * self.itemsize for s in strides]
        return np.lib.stride_tricks.as_strided(self, shape, steps, subok=True)


def frombuffer(data, dtype):
    return np.frombuffer(data, dtype).view(Tensor)


def set_num_threads(count):
    threads.append(count)


def set_grad_enabled(is_enabled):
    pass


def add(x, y):
    np.save(os.environ["SEEN"], np.array(x))
    return np.add(x, y).view(Tensor)


def sub(x, y):
    return np.subtract(x, y)[None]


def mul(x, y):
    raise ValueError("cannot\\nmultiply")


def div(x, y):
    print("divided", file=sys.stderr, flush=True)
    os._exit(7)


def sum(x, *dims):
    print(threads)  # is no answer
    return np.asarray(x.sum()).view(Tensor)


def clone(x, memory_format):
    return x.copy()


threads = []
cuda = types.SimpleNamespace(is_available=lambda: False)
"""


def install(folder: Path, source: str = SOURCE) -> Path:
    """Make `folder` one from which `import torch` gets this."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torch.py").write_text(source)
    return folder
