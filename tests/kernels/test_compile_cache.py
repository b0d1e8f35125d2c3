"""The cache of compiled kernels: filled by rename, checked by checksum, private, and not needed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.host

SCRIPT = """
import json, sys, time
from genesis.backend.cuda import compile
from genesis.backend.cuda.signature import Signature
from genesis.kernels.elementwise import _add, binary
import triton.language as tl

types = ("*fp32:16", "*fp32:16", "*fp32:16", "i32:16", ("i32:16",), *((("constexpr", 1),),) * 3)
constants = dict(BLOCK=1024, DIMS=1, F=_add, NUMBERS=0, WIDE=False, WORK=tl.float32)
signature = Signature(types, tuple(sorted(constants.items())), (("num_warps", 4),))
compiled = []
original = compile.compile_kernel
compile.compile_kernel = lambda *args: compiled.append(1) or original(*args)
seen = []
with compile.progress(lambda done, asked: seen.append((done, asked))):
    made = compile.compiling(binary, signature, (9, 0)).result()
print(json.dumps(dict(compiled=len(compiled), size=len(made.image), seen=seen, name=made.name, warps=made.warps)))
"""


def run(cache: Path) -> dict[str, object]:
    """Compile in a process of its own, which has neither a GPU nor the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"XDG_CACHE_HOME": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_kernel_is_compiled_once_and_survives_corruption(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first["compiled"] == 1 and first["seen"] == [[0, 1], [1, 1]]
    (file,) = (tmp_path / "genesis" / "kernels").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    again = run(tmp_path)
    assert again["compiled"] == 0 and again["seen"] == []
    assert {k: again[k] for k in ("size", "name", "warps")} == {k: first[k] for k in ("size", "name", "warps")}

    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run(tmp_path)["compiled"] == 1
    assert run(tmp_path)["compiled"] == 0
    file.write_bytes(data[:10])
    assert run(tmp_path)["compiled"] == 1


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder would be")
    assert run(blocked)["compiled"] == 1
    assert blocked.read_text() == "a file where the folder would be"
