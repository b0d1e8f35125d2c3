"""The cache of compiled kernels: filled by rename, every byte checked, private, and not needed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from genesis.backend.cuda import compilations, compile
from genesis.backend.cuda.tma import Facts
from genesis.files.cache import Cache

pytest.importorskip("triton")
pytestmark = pytest.mark.host

SCRIPT = """
import json, sys, time
from genesis.backend.cuda import compilations, compile
from genesis.backend.cuda.compile import Signature
from genesis.kernels.formulas import add_exact
from genesis.kernels.pointwise.elementwise import flat_kernel
import triton.language as tl

one = (("constexpr", 1),)
types = (("*fp32:16",), ("*fp32:16",) * 2, "i32:16", ("i32:16",), one, (one, one))
constants = dict(BLOCK=1024, F=add_exact, INT64=False, SCALARS=0, WORK=tl.float32, FIRST=tl.float32)
signature = Signature(types, tuple(sorted(constants.items())), (("num_warps", 4),))
compiled = []
original = compilations.compile_kernel
compilations.compile_kernel = lambda *args: compiled.append(1) or time.sleep(float(sys.argv[1])) or original(*args)
seen = []
print(flush=True)
sys.stdin.readline()
with compilations.progress(lambda done, asked: seen.append((done, asked))):
    made = compilations.compiling(flat_kernel, signature, (9, 0)).result()
print(json.dumps(dict(compiled=len(compiled), size=len(made.image), seen=seen, name=made.name, warps=made.warps)))
"""


def run_at_once(cache: Path, processes: int, delay: float = 0.0) -> list[dict[str, object]]:
    """Compile in processes of their own, which have neither a GPU nor the interpreter and begin at once.

    Args:
        delay: seconds that a compilation takes longer.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"XDG_CACHE_HOME": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", SCRIPT, str(delay)]
    started = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(processes)]
    for each in started:
        assert each.stdout
        each.stdout.readline()
    for each in started:
        assert each.stdin
        each.stdin.write("go\n")
        each.stdin.flush()
    ended = [(*each.communicate(), each.returncode) for each in started]
    assert [code for *_, code in ended] == [0] * processes, ended
    return [json.loads(out) for out, _, _ in ended]


def run(cache: Path) -> dict[str, object]:
    """Compile in one."""
    return run_at_once(cache, 1)[0]


def test_a_kernel_is_compiled_once_and_survives_corruption(tmp_path: Path) -> None:
    both = run_at_once(tmp_path, 2, delay=0.3)
    assert sorted(str(each["compiled"]) for each in both) == ["0", "1"]  # the other one waited
    assert all(each["seen"] == [[0, 1], [1, 1]] for each in both)
    first = both[0]
    assert both[1] == {**first, "compiled": both[1]["compiled"]}
    (file,) = (tmp_path / "genesis" / "kernels").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.write_bytes(file.read_bytes()[:-1])
    assert run(tmp_path)["compiled"] == 1
    again = run(tmp_path)
    assert again["compiled"] == 0 and again["seen"] == []
    assert {k: again[k] for k in ("size", "name", "warps")} == {k: first[k] for k in ("size", "name", "warps")}


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder would be")
    assert run(blocked)["compiled"] == 1
    assert blocked.read_text() == "a file where the folder would be"


MADE = compile.Binary(b"\x7fELF" + bytes(60), "kernel", 1024, 4, 9, (Facts(3, 7, 4, (64, 32)), Facts(0, 9, 2, (16,))))


def test_no_flipped_bit_of_a_kernels_entry_changes_a_launch(tmp_path: Path) -> None:
    """The header was outside of the checksum: 74 of 1,296 flipped bits loaded with other facts."""
    cache = Cache(tmp_path)
    compilations._store(cache, "k", MADE)
    assert compilations._cached_binary(cache, "k") == MADE
    with open(tmp_path / "k", "r+b", buffering=0) as file:
        data = file.read()
        for bit in range(8 * len(data)):
            at, right = bit // 8, data[bit // 8]
            os.pwrite(file.fileno(), bytes([right ^ 1 << bit % 8]), at)
            assert compilations._cached_binary(cache, "k") is None, bit
            os.pwrite(file.fileno(), bytes([right]), at)
    assert compilations._cached_binary(cache, "k") == MADE


@pytest.mark.parametrize(
    "wrong",
    [
        {"shared": -1},
        {"shared": 1 << 40},
        {"shared": True},
        {"shared": 1.0},
        {"warps": 1000},
        {"parameters": 1 << 20},
        {"name": 3},
        {"descriptors": [[1, 2, 3]]},
        {"descriptors": [[1, 2, 3, [1 << 20]]]},
        {"descriptors": [[1, 2, "3", [1]]]},
        {"descriptors": 5},
    ],
)
def test_facts_that_no_kernel_has_are_not_loaded(tmp_path: Path, wrong: dict[str, object]) -> None:
    cache, facts = Cache(tmp_path), {**MADE._asdict(), **wrong}
    del facts["image"]
    cache.put("k", {"facts": json.dumps(facts).encode(), "image": MADE.image})
    assert compilations._cached_binary(cache, "k") is None


def test_a_file_of_an_older_version_is_replaced(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    facts = {"sha256": hashlib.sha256(b"code").hexdigest(), "name": "kernel", "shared": 0, "warps": 4, "parameters": 3}
    (tmp_path / "k").write_bytes(json.dumps({**facts, "descriptors": []}).encode() + b"\ncode")
    assert compilations._cached_binary(cache, "k") is None
    compilations._store(cache, "k", MADE)
    assert compilations._cached_binary(cache, "k") == MADE


def test_one_thread_at_a_time_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 and 3.12 may fail where two do."""
    active, most = [], 0

    def parse(*what: Any) -> str:
        nonlocal most
        active.append(1)
        most = max(most, len(active))
        time.sleep(0.005)
        active.pop()
        return ""

    class Source:
        def __init__(self, *of: Any) -> None: ...

        make_ir = hash = parse

    class Kernel:
        __name__ = "kernel"
        arg_names: tuple[str, ...] = ()
        cache_key = property(parse)
        fn = test_one_thread_at_a_time_parses

        def is_gluon(self) -> bool:
            return False

    signature = compile.Signature((), (), ())

    def work() -> None:
        compile.entry_name(Kernel(), signature, (9, 0))
        compile.compiled(Kernel(), signature, (9, 0))

    monkeypatch.setattr("triton.compiler.ASTSource", Source)
    monkeypatch.setattr("triton.compile", lambda source, **how: source.make_ir())
    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == 1
