"""How kernels are compiled ahead of time: which, what of them is noticed, and the shared memory that products count.

The compilation itself is `make kernels-newest` and `make kernels-lowest`, of a sample, and `make kernels`, of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from genesis.backend.cuda.compile import Signature
from tests.kernels.covering import PARTS, covering, features, rotated

pytestmark = pytest.mark.host


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


def test_the_parts_hold_every_feature_and_two_neighbours_every_kernel() -> None:
    kernels = [(kernel, signature) for kernel in ("one", "two") for signature in SIGNATURES]
    parts = [covering(kernels, part) for part in range(PARTS)]
    assert all(len({kernel for kernel, _ in parts[i] + parts[i + 1]}) == 2 for i in range(0, PARTS, 2))
    for kernel in ("one", "two"):
        found = {f for part in parts for k, s in part if k == kernel for f in features(s)}
        assert found == {f for s in SIGNATURES for f in features(s)}
    assert all(len(part) < len(covering(kernels)) for part in parts[:2])


def test_kernels_with_other_parameters_are_others_but_in_a_part() -> None:
    """A kernel whose second operand is missing has nothing of its own but that."""
    kernels = [("one", Signature(types, (), ())) for types in (("*fp32", "*fp32"), ("*fp32", None))]
    assert covering(kernels) == kernels
    chosen = [covering(kernels, part) for part in range(PARTS)]
    assert {len(one) + len(two) for one, two in zip(chosen[::2], chosen[1::2], strict=True)} <= {1, 2, 3}
    assert {repr(each) for part in chosen for each in part} == set(map(repr, kernels))


def test_tiles_of_any_size_read_through_a_descriptor_are_of_one_type() -> None:
    sizes = [("one", Signature((f"tensordesc<bf16[{n}, 64]>", "i32"), (), ())) for n in (64, 128)]
    assert len(covering(sizes)) == 1
    assert len(covering([*sizes, ("one", Signature(("tensordesc<fp32[64, 64]>", "i32"), (), ()))])) == 2


def test_what_architectures_share_is_compiled_for_one_in_rotation() -> None:
    kernels: Any = {80: [("a", 1), ("b", 1), ("c", 1)], 90: [("a", 1), ("b", 1), ("c", 1), ("d", 1)]}
    assert rotated(kernels, 0) == {80: [("a", 1), ("c", 1)], 90: [("b", 1), ("d", 1)]}
    assert rotated(kernels, 1) == {80: [("b", 1)], 90: [("a", 1), ("c", 1), ("d", 1)]}


COLLECTED = """
from tests.kernels.ahead import needed

def names(kernels):
    return {(kernel.fn.__name__, repr(signature)) for kernel, signature in kernels}

ops, arches = ["matmul", "attention", "softmax", "masked_select"], (80, 90, 100)
together = needed(ops, ["bfloat16"], [], arches, True)
for arch in arches:
    alone = names(needed(ops, ["bfloat16"], [], (arch,), True)[arch])
    launched = {name for name, _ in alone} & {"gemm_tma", "masked_select_kernel"}
    print(names(together[arch]) == alone, *sorted(launched))
"""


@pytest.mark.full
def test_architectures_differ_where_somebody_asked_which_it_is(tmp_path: Path) -> None:
    """Samples are launched once for all architectures, and again where a tile or TMA hang on it."""
    on_80, *newer = output_lines(COLLECTED, tmp_path)
    assert on_80 == "True masked_select_kernel"
    assert newer == ["True gemm_tma masked_select_kernel"] * 2


READ = """
from contextlib import nullcontext
from triton import knobs
from genesis.backend.cuda.compile import compile_kernel
from tests.kernels.ahead import needed
from tests.kernels.assembling import collected
from tests.kernels.reading import read_once

knobs.compilation.always_compile = True
found = needed(["matmul", "add"], ["bfloat16"], [], (80, 90), True)
texts = []
for way in nullcontext, read_once:
    with way(), collected() as made:
        for arch, kernels in found.items():
            for kernel, signature in {kernel: (kernel, signature) for kernel, signature in kernels}.values():
                compile_kernel(kernel, signature, divmod(arch, 10))
    texts.append(made)
print(sum("mma" in text for text in texts[0]), sum("mma" not in text for text in texts[0]), texts[0] == texts[1])
"""


@pytest.mark.full
def test_kernels_that_are_read_once_come_out_the_same(tmp_path: Path) -> None:
    assert output_lines(READ, tmp_path) == ["3 2 True"]


BROKEN = """
import triton
import triton.language as tl
from genesis.backend.cuda.compile import Signature
from tests.kernels.ahead import failures

@triton.jit
def broken(p_x, BLOCK: tl.constexpr):
    tl.store(p_x + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))

@triton.jit
def unknown(p_x, BLOCK: tl.constexpr):
    x = tl.load(p_x + tl.arange(0, BLOCK))
    y = tl.inline_asm_elementwise("no.such.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    tl.store(p_x + tl.arange(0, BLOCK), y)

@triton.jit
def fine(p_x, BLOCK: tl.constexpr):
    tl.store(p_x + tl.arange(0, BLOCK), tl.load(p_x + tl.arange(0, BLOCK)) + 1)

kernels = [(kernel, size) for size in (64, 128) for kernel in (fine, broken, unknown, fine)]
for arch in 80, 90:
    print(*failures([(k, Signature(("*fp32:16",), (("BLOCK", size),), ())) for k, size in kernels], arch), sep="\\n")
"""

LARGE = """
import triton
import triton.language as tl
from genesis.backend.cuda.compile import Signature
from tests.kernels.ahead import failures

@triton.jit
def large(p_x, p_y, steps, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    b_acc = tl.zeros((SIZE, SIZE), tl.float32)
    for i in range(steps):
        b_acc = tl.dot(tl.load(p_x + i * SIZE * SIZE + o), tl.load(p_y + i * SIZE * SIZE + o), b_acc)
    tl.store(p_x + o, b_acc.to(tl.float16))

for arch, stages in (80, 4), (90, 3):  # 196,608 bytes, either way
    options = (("num_stages", stages), ("num_warps", 8))
    print(arch, *failures([(large, Signature(("*fp16:16", "*fp16:16", "i32"), (("SIZE", 128),), options))], arch))
"""


def output_lines(script: str, folder: Path, *args: str) -> list[str]:
    """What a script prints that runs where kernels are compiled; Triton reads a kernel's source from its file."""
    (folder / "script.py").write_text(script)
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    command = [sys.executable, str(folder / "script.py"), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_kernel_that_does_not_compile_is_reported(tmp_path: Path) -> None:
    """Whether Triton stops at it, or the assembler, which takes it together with others."""
    found = [line for line in output_lines(BROKEN, tmp_path) if line.startswith("sm_")]
    for arch in (80, 90):
        names = [line.split()[1] for line in found if line.startswith(f"sm_{arch} ")]
        assert sorted(names) == ["broken", "broken", "unknown", "unknown"]


def test_a_kernel_that_takes_more_shared_memory_than_there_is_is_reported(tmp_path: Path) -> None:
    on_80, on_90 = output_lines(LARGE, tmp_path)
    assert "sm_80 large" in on_80 and "196608 bytes of shared memory, and a block has 166912" in on_80
    assert on_90 == "90"


TILES = """
import sys
from genesis.array import empty
from genesis.backend import Device
from genesis.backend.cuda.compile import compile_kernel
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.dtypes import bfloat16, float32
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.tiles import RESERVED, TILES, fitted, shared_bytes
from tests.kernels.allocating import shared_memory
from tests.kernels.assembling import collected
from tests.kernels.collecting import collecting

CUDA, SHARED = Device("cuda", 0), 227 << 10
kinds = {"half": bfloat16, "tf32": float32}
for kind in sys.argv[1:]:
    dtype = kinds[kind]
    allow_tf32.set(kind == "tf32")
    for swapped in {False, len(sys.argv) > 2}:
        for out in {dtype, float32}:
            rows = {tile._replace(swapped=swapped) for tile in TILES[kind]}
            for tile in {fitted(tile, dtype.itemsize, SHARED, True, out.itemsize) for tile in rows}:
                room = (SHARED + RESERVED) // tile.ctas_per_sm - RESERVED
                guess = shared_bytes(tile, dtype.itemsize, True, out.itemsize)
                if guess < 0.96 * room:  # far from the limit nothing hangs on it
                    continue
                with collecting() as found:
                    a, b, o = (empty((8192, 8192), d, CUDA) for d in (dtype, dtype, out))
                    matmul_into(o, a, b, transpose_b=True, accumulate=True, tile=tile)
                for kernel, signature in found.values():
                    if kernel.fn.__name__ == "gemm_tma":
                        shared = shared_memory(kernel, signature, (9, 0))
                        print(guess - shared, room - shared, kind, out.name, *tile)
with collected():
    print("as compiled:", compile_kernel(kernel, signature, (9, 0)).shared - shared)
"""


@pytest.mark.full
@pytest.mark.parametrize("kinds", [["half"], pytest.param(["half", "tf32"], marks=pytest.mark.full)])
def test_gemms_use_the_shared_memory_that_is_counted_for_them(kinds: list[str], tmp_path: Path) -> None:
    """Also where the result is added to what is there, which is then read through shared memory."""
    *lines, compiled = output_lines(TILES, tmp_path, *kinds)
    assert compiled == "as compiled: 0"
    found = [line.split(maxsplit=2) for line in lines]
    assert len(found) > 10 * len(kinds) - 5
    assert [what for spare, room, what in found if int(spare) < 0 or int(room) < 0] == []
