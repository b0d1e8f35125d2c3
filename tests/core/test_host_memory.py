"""How much host memory is free, as the kernel and containers say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from genesis.backend import host
from genesis.backend.host import free_host_memory


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 1000 KiB available, and no container."""
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable:  1000 kB\n")
    (tmp_path / "group").mkdir()
    monkeypatch.setattr(host, "MEMINFO", str(tmp_path / "meminfo"))
    group = (str(tmp_path / "group"), "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(host, "CGROUPS", (group,))
    return tmp_path


def container(files: Path, limit: str, used: str, cached: str | None) -> None:
    """Put the process into a container."""
    for name, text in (("memory.max", limit), ("memory.current", used)):
        (files / "group" / name).write_text(text)
    if cached is not None:
        (files / "group" / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def test_what_is_available_on_the_host(files: Path) -> None:
    assert free_host_memory() == 1000 << 10


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        ("max\n", "5000\n", "0", 1000 << 10),
        ("50000\n", "20000\n", "4000", 34000),
        ("50000\n", "20000\n", None, 30000),
        ("50000\n", "60000\n", "0", 0),
        ("99999999\n", "0\n", "0", 1000 << 10),
    ],
)
def test_what_a_container_leaves(files: Path, limit: str, used: str, cached: str | None, free: int) -> None:
    container(files, limit, used, cached)
    assert free_host_memory() == free


def test_nobody_knows(files: Path) -> None:
    (files / "meminfo").write_text("nothing here")
    assert free_host_memory() is None
    (files / "meminfo").unlink()
    assert free_host_memory() is None


def test_the_smaller_of_host_and_container(files: Path) -> None:
    whole = host.host_memory()
    container(files, "50000\n", "0", "0")
    assert whole is not None and whole > 50000
    assert host.host_memory() == 50000
