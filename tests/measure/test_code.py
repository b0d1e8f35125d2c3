"""The code of kernels: targets, stages, which kernels, and what is said where a tool or a stage is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from genesis.backend import CPU
from genesis.errors import DeviceError, UsageError
from genesis.measure import kernels
from genesis.measure.kernels import code_of, disassembled, target_named


@pytest.mark.parametrize(
    ("given", "capability"), [(None, (9, 0)), ("sm_80", (8, 0)), ("90", (9, 0)), ("sm90a", (9, 0)), ("sm_120", (12, 0))]
)
def test_a_target_is_named_as_nvidia_names_it(
    given: str | None, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert target_named(given, CPU).capability == capability


def test_targets_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with pytest.raises(UsageError, match="TRITON_INTERPRET is set"):
        target_named("sm_90", CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    for name in ("sm_75", "hopper", "sm_90b"):
        with pytest.raises(UsageError, match="is not an architecture") as error:
            target_named(name, CPU)
        assert error.value.where == "--arch" and "sm_80, sm_86" in error.value.next


def test_without_triton_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="Triton is not installed"):
        target_named(None, CPU)


def test_a_stage_that_is_none() -> None:
    target: Any = None
    with pytest.raises(UsageError, match="'cubin' is not a stage") as error:
        next(code_of("add", "cubin", target))
    assert error.value.next == "use one of ttir, ttgir, llir, ptx, sass, choice"


def test_machine_code_needs_a_disassembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(DeviceError, match="neither was found") as error:
        disassembled(b"")
    assert "nvidia-cuda-nvdisasm" in error.value.next
    tool = tmp_path / "cuda" / "bin" / "cuobjdump"
    tool.parent.mkdir(parents=True)
    tool.write_text(f'#!{shutil.which("sh", path=os.defpath)}\necho "$1" $(/bin/cat "$2")\n')
    tool.chmod(0o755)
    assert disassembled(b"code") == "-sass code\n"
    tool.write_text(f"#!{shutil.which('sh', path=os.defpath)}\necho no cubin >&2; exit 1\n")
    with pytest.raises(DeviceError, match="failed: no cubin"):
        disassembled(b"code")


# --- Compiled, in a process without the interpreter -------------------------------------------------------------------

SHOWN = """
import sys
from genesis_cli.main import main

def shown(*words):
    print("#", *words, flush=True)
    main(["profile", "--op", *words])
    sys.stdout.flush()

shown("softmax", "--show", "ptx", "--shape", "64,64", "--backward")
shown("softmax", "--show", "ptx", "--shape", "64,64", "--arch", "sm_80")
shown("exp", "--show", "sass", "--shape", "64", "--dtype", "bf16")
shown("fill", "--show", "ttir", "--shape", "64")
shown("matmul", "--show", "choice", "--shape", "512,896,128", "--dtype", "bf16")
shown("add", "--show", "choice", "--shape", "64")
"""


@pytest.mark.full
@pytest.mark.host
def test_kernels_are_shown_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    both, one, sass, fill, choice, none = done.stdout.split("# ")[1:]
    assert "// softmax_kernel: ptx for sm_90, grid " in both and ".target sm_90a" in both
    # What the assembler is given waits for the kernel before it in its stream; Ampere cannot.
    assert both.count(".entry") == both.count("griddepcontrol.wait") == 2
    assert one.count(".entry") == 1 and ".target sm_80" in one and "griddepcontrol" not in one
    assert "EXIT" in sass and "constants" in sass
    assert "tt.func public" in fill or "launches no kernel" in fill
    head, names, *candidates = choice.splitlines()[1:]
    assert head.startswith("half [512, 896] x [896, 128], layout nn: ") and "parts along k" in names
    predicted = [float(line.split()[0]) for line in candidates]
    assert len(predicted) == 8 and predicted == sorted(predicted)
    assert "add chooses no tile" in none
