"""A peer in a process of its own: what it is given, what is done with its answers, and what may go wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from genesis.backend import CPU, Device
from genesis.errors import UsageError
from genesis.measure.cases import make_case, op_named, supported
from genesis.measure.op import Measured, Settings, profile_case
from genesis.measure.peer import Child, PeerError, ratio_of, started
from genesis.measure.torch_peer import CALLS
from genesis.op import registry
from tests.measure import fake_torch
from tests.measure.quick import PLAN, made_limits


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch is the made one, and notes there what it was given."""
    monkeypatch.setenv("PYTHONPATH", str(fake_torch.install(tmp_path / "site")))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.npy"))
    return tmp_path / "seen.npy"


@pytest.fixture
def child(seen: Path) -> Iterator[Child]:
    with started("ops", CPU) as child:
        yield child


def compared(child: Child, name: str, shape: tuple[int, ...]) -> Measured:
    case = make_case(name, shape, None, None, CPU)
    return profile_case(case, made_limits(), Settings(plan=PLAN, causes=False, peer=child))


def test_the_peer_gets_the_same_values_and_is_timed_by_turns(child: Child, seen: Path) -> None:
    row = compared(child, "add", (5, 7))
    assert (row.notes, child.version) == ((), "9.9")
    assert row.peer is not None and row.peer.peer_seconds > 0 and row.peer.ratio > 0
    np.testing.assert_array_equal(np.load(seen), make_case("add", (5, 7), None, None, CPU).arrays[0].numpy())


def test_strides_and_long_inputs_are_made_again(child: Child, seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from genesis.measure import peer

    assert compared(child, "transpose", (5, 7)).peer is not None
    monkeypatch.setattr(peer, "FLOATS", 16)
    assert compared(child, "add", (5, 7)).peer is not None
    values = np.load(seen).ravel()
    np.testing.assert_array_equal(values, np.resize(values[:16], 35))


def test_what_libraries_print_is_no_answer(child: Child) -> None:
    assert compared(child, "sum", (4,)).peer is not None


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("overwrite", "torch has nothing like overwrite"),
        ("mul", "not compared with torch: ValueError: cannot"),
        ("sub", "not compared with torch: its result has the shape (1, 4), ours (4,)"),
        ("exp", "not compared with torch: AttributeError: module 'torch' has no attribute 'exp'"),
        ("div", "not compared with torch: the peer's process ended with 7: divided"),
    ],
)
def test_what_the_peer_cannot_do_is_noted(child: Child, name: str, note: str) -> None:
    row = compared(child, name, (4,))
    assert (row.peer, row.notes) == (None, (note,))
    assert (compared(child, "add", (4,)).peer is None) == (name == "div")  # others are compared as before


def test_a_peer_that_breaks_at_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(fake_torch.install(tmp_path, "raise OSError('libtorch is broken')")))
    with pytest.raises(PeerError, match="ended with 1: OSError: libtorch is broken"), started("ops", CPU):
        pass


def test_peers_that_make_no_sense(tmp_path: Path) -> None:
    for device, python, where in (
        (Device("cuda", 0), None, "--vs"),  # the interpreter's
        (CPU, str(tmp_path / "python"), "--torch-python"),
    ):
        with pytest.raises(UsageError) as error, started("ops", device, python):
            pass
        assert error.value.where == where


def test_ratios_are_of_rounds() -> None:
    found = ratio_of([(1.0, 2.0), (2.0, 3.0), (1.0, 1.0)])
    assert (found.seconds, found.peer_seconds, found.ratio, found.spread) == (1.0, 2.0, 1.5, 1.0)


@pytest.mark.parametrize(
    ("rounds", "band"),
    [
        ([(1.0, 2.0), (1.0, 2.1)], "faster"),
        ([(1.0, 1.02), (1.0, 1.0)], "level"),
        ([(1.0, 0.9), (1.0, 0.88)], "near"),
        ([(1.0, 0.6), (1.0, 0.58)], "slower"),
        ([(1.0, 0.3), (1.0, 0.31)], "far"),
        ([(1.0, 2.0), (1.0, 3.0)], "noise"),
    ],
)
def test_a_ratio_has_a_band_unless_it_is_noise(rounds: list[tuple[float, float]], band: str) -> None:
    assert ratio_of(rounds).band == band


def test_the_table_names_ops_of_the_registry() -> None:
    assert set(CALLS) <= set(registry)
    assert not [name for name in CALLS if registry[name].torch], "said twice: in the record and in the table"


def test_ops_that_are_measured_have_a_peer() -> None:
    """A record without torch's name, or a kind without the op, would leave out a comparison and say nothing."""
    compared = {name for name, op in registry.items() if op.torch or name in CALLS}
    measured = {op_named(name)[0].name for name in supported()}
    assert compared <= measured
