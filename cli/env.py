"""`genesis env`: versions, devices, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from genesis.errors import escape


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, devices and what is missing.

    Prints processor, memory, packages and GPU, and what this machine lacks for CUDA.
    """
    from genesis_cli.environment import facts

    found = facts()
    print(json.dumps(found, indent=2) if as_json else "\n".join(report(found)))


def report(found: dict[str, Any]) -> Iterator[str]:
    """Yield the facts of `environment.facts` as lines of text."""
    cpu, memory, cuda = found["cpu"], found["memory"], found["cuda"]
    system = found["system"]
    yield f"genesis   {found['genesis']}"
    yield f"python    {found['python']['version']} ({found['python']['implementation']})"
    yield f"system    {system['name']} {system['release']} {system['machine']}"
    quota = f", {cpu['quota_cores']:g} by quota" if cpu["quota_cores"] else ""
    yield f"cpu       {escape(cpu['name'] or 'unknown')}: {cpu['cores']} cores, {cpu['usable_cores']} usable{quota}"
    limit = f", limit {_gib(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    yield f"memory    {_gib(memory['total_bytes'])}, {_gib(memory['available_bytes'])} available{limit}"
    yield f"blas      {escape(found['numpy_blas'])}"
    yield ""
    yield "packages"
    yield from _packages([row for row in found["packages"] if not row["extra"]])
    for extra in dict.fromkeys(row["extra"] for row in found["packages"] if row["extra"]):
        yield f"extra {extra}"
        yield from _packages([row for row in found["packages"] if row["extra"] == extra])
    yield ""
    yield "gpu"
    if cuda.get("kernel_driver"):
        yield f"  {escape(cuda['kernel_driver'])}"
    if cuda.get("cuda"):
        yield f"  driver supports CUDA {cuda['cuda']}"
    for device in cuda["devices"]:
        yield f"  {escape(device['name'])}, {_gib(device['memory_bytes'])}, compute capability {device['capability']}"
    if not cuda["devices"]:
        yield "  none; training runs on the CPU"
    yield "missing for CUDA: " + ("nothing" if not found["missing_for_cuda"] else "")
    for line in found["missing_for_cuda"]:
        yield f"  {escape(line)}"


def _packages(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        version = row["version"] or "missing"
        yield f"  {row['name']:<18} {version:<12} {row['add']}".rstrip()


def _gib(size: int | None) -> str:
    return f"{size / 2**30:.1f} GiB" if size is not None else "?"
