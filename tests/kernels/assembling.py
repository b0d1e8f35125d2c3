"""The assembler over many kernels at once: to start it takes longer than to assemble most of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import genesis.backend.cuda.compile as compiling

__all__ = ["TOGETHER", "collected", "refused"]

TOGETHER = 32

_HEAD = re.compile(r"^\.(?:version|target|address_size)\b.*\n", re.MULTILINE)
_SHARED = re.compile(r"^\.extern \.shared .*\n", re.MULTILINE)
_KERNEL = re.compile(r"\.entry (\w+)")
_OWN = re.compile(r"^\.(?:global|const)\b.*?([\w$]+)\[|^\.func\b.*?([\w$]+)$", re.MULTILINE)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Kernels are compiled as far as PTX, without the lines of their source; that is kept, and no machine code made."""
    from triton import knobs

    texts: list[str] = []
    finish = compiling._assemble_dependent

    def keep(*stage: Any) -> Any:
        if stage:
            stage[1]["cubin"] = lambda ptx, metadata: texts.append(ptx) or b""
        return finish(*stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_assemble_dependent", keep)
        patch.setattr(knobs.compilation, "disable_line_info", True)
        yield texts


def refused(texts: list[str], arch: int) -> dict[int, str]:
    """Which of a few kernels the assembler does not take, and what it says of each."""
    if not texts or not _assemble(_together(texts), arch):
        return {}
    return {i: said for i, text in enumerate(texts) if (said := _assemble(text, arch))}


def _assemble(text: str, arch: int) -> str:
    """What the assembler complains of."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.ptx"
        source.write_text(text)
        command = [get_ptxas(arch).path, f"--gpu-name={sm_arch_from_capability(arch)}", source, "-o", f"{source}.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr)[-500:] or f"exit code {done.returncode}" if done.returncode else ""


def _together(texts: list[str]) -> str:
    """One text of many kernels, in which names that several have are told apart."""
    shared = dict.fromkeys(line for text in texts for line in _SHARED.findall(text))
    bodies = []
    for i, text in enumerate(texts):
        body = _SHARED.sub("", _HEAD.sub("", text))
        for name in _KERNEL.findall(body):
            body = body.replace(f".entry {name}(", f".entry {name}_{i}(").replace(
                f"{name}_param_", f"{name}_{i}_param_"
            )
        for name in {data or function for data, function in _OWN.findall(body)}:
            body = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_|(?![\w$]))", rf"\g<0>_{i}", body)
        bodies.append(body)
    return "".join([*_HEAD.findall(texts[0]), *shared, *bodies])
