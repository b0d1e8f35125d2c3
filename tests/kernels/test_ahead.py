"""Every kernel compiles for three generations of GPUs on a machine without one, and a broken one is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from genesis.backend.cuda.signature import Signature
from tests.kernels.covering import covering, features


def ahead(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Compile in a process of its own, whose kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead", "--jobs", "1", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# Halves that two test processes can take; other dtypes are compiled by `make kernels`.
@pytest.mark.slow
@pytest.mark.parametrize("half", [("elementwise",), ("rest",)], ids="".join)
def test_every_kernel_compiles(half: tuple[str, ...]) -> None:
    ops = ["--ops", "elementwise"] if half == ("elementwise",) else ["--without", "elementwise"]
    done = ahead("--dtypes", "float32", "bfloat16", *ops)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "sm_80,90,100" in done.stdout and " 0 failures" in done.stdout


SIGNATURES = [
    Signature(types, (("F", function), ("ODD", odd), ("SIZE", size)), ())
    for types in (("*fp32:16", "*fp32"), ("*bf16", "*fp32"), ("*fp32", "*bf16"))
    for function in ("exp int32", "exp int8", "log float32")
    for odd in (False, True)
    for size in (64, 128)
]


def test_what_is_compiled_holds_every_feature() -> None:
    kernels = [(kernel, signature) for kernel in ("one", "two") for signature in SIGNATURES]
    chosen = covering(kernels)
    for kernel in ("one", "two"):
        wanted = {f for s in SIGNATURES for f in features(s)}
        assert {f for k, s in chosen if k == kernel for f in features(s)} == wanted
        assert len([k for k, _ in chosen if k == kernel]) == 3  # of 36
    assert covering(kernels) == chosen
    rare = ("one", Signature(("*fp64",), (), ()))
    assert rare in covering([*kernels, rare])


BROKEN = """
import triton
import triton.language as tl
from genesis.backend.cuda.signature import Signature
from tests.kernels.ahead import failures

@triton.jit
def broken(p_x, BLOCK: tl.constexpr):
    tl.store(p_x + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))

for failure in failures([(broken, Signature(("*fp32:16",), (("BLOCK", 64),), ()))], [80, 90]):
    print(failure)
"""


def test_a_kernel_that_does_not_compile_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)  # Triton reads a kernel's source from its file
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    command = [sys.executable, str(tmp_path / "broken.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "sm_80 broken" in done.stdout and "sm_90 broken" in done.stdout
