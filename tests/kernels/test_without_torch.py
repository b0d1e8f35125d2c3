"""torch is never imported, also where it is installed: here importing it would end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import triton
import triton.language as tl
import genesis
x = genesis.tensor([[1.0, 2.0], [3.0, 4.0]], device="cuda", requires_grad=True)
loss = (x * x).sum()
loss.backward()
assert x.grad.tolist() == [[2.0, 4.0], [6.0, 8.0]]

@triton.jit
def double_kernel(p_out, p_x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_out + i, 2 * tl.load(p_x + i))

double_kernel[(1,)](x.grad, x, N=4)
assert x.grad.tolist() == [[2.0, 4.0], [6.0, 8.0]]
"""


def test_cuda_runs_beside_an_installed_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "script.py").write_text(SCRIPT)  # Triton reads the source of kernels from files
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
