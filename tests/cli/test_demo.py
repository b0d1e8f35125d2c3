"""`genesis demo`: every demo on little data, and that its sentences say what the figures do."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

import genesis
from genesis.backend import CPU, Device
from genesis.demos import DEMOS, comparing
from genesis.demos.comparing import Setting, Way, compare, factor, passes
from genesis.demos.fusion import gelu_by_hand, softmax_by_hand
from genesis.demos.schema import DemoReport, DemoRow
from genesis.errors import NumericError
from genesis.profile.schema import Time
from genesis_cli import environment
from tests.cli.command import printed
from tests.measure.quick import PLAN, small_limits


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    with (
        small_limits(),
        mock.patch.object(comparing, "FAST", PLAN),
        mock.patch.object(environment, "facts", return_value=facts),
    ):
        yield


def shown(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis demo words…`."""
    return printed("demo", *words)


@pytest.mark.parametrize("name", DEMOS)
def test_each_runs_on_the_cpu(name: str) -> None:
    code, text, told = shown(name, "--fast", "--device", "cpu", "--json", "-")
    assert (code, told) == (0, "")
    report = DemoReport.model_validate_json(text)
    assert report.command == f"genesis demo {name} --device cpu --fast"
    for section in report.sections:
        assert len(section.rows) >= 2
        assert section.sentences
        for row in section.rows:
            assert row.launches >= 1
            assert row.share == pytest.approx(row.bytes / row.wall.seconds / report.copy_bytes_per_second)


@pytest.mark.parametrize("name", DEMOS)
def test_each_runs_in_the_interpreter(name: str) -> None:
    code, text, told = shown(name, "--fast", "--device", "cuda")
    assert (code, told) == (0, "")
    assert text.splitlines()[:2] == [f"demo    {DEMOS[name]}", f"code    genesis/demos/{name}.py"]
    assert text.splitlines()[2].startswith("device  Triton's interpreter (cuda:0), which copies ")


def test_fusion_counts_passes_and_bytes() -> None:
    code, text, _ = shown("fusion", "--fast", "--device", "cuda", "--json", "-")
    assert code == 0
    gelu, softmax = DemoReport.model_validate_json(text).sections
    size = 4 * 32 * 32
    assert [(row.name, row.launches) for row in gelu.rows] == [
        ("by hand", 9),
        ("fused", 1),
        ("in CUDA C++", 1),
        ("in Triton", 1),
    ]
    # Nine ops write a tensor; six read one, three read two.
    assert [row.bytes for row in gelu.rows] == [22 * size, 2 * size, 2 * size, 2 * size]
    assert [row.launches for row in softmax.rows] == [5, 1]
    assert softmax.rows[0].bytes == 8 * size + 4 * 4 * 32  # two times a number for each row is written and read


def test_the_table_is_text() -> None:
    code, text, told = shown("memory", "--fast", "--device", "cpu")
    assert (code, told) == (0, "")
    lines = text.splitlines()
    assert lines[4].startswith("four ops on 1024x1024 float32, 4.0 MiB")
    assert lines[5].split()[:3] == ["way", "ops", "read+written"]
    assert lines[6].startswith("in new memory ")
    assert lines[9].startswith("New memory takes 2.0 tensors besides the input at its peak, in place 0.0,")


def test_names() -> None:
    code, text, _ = shown()
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == list(DEMOS)
    code, _, told = shown("fusoin")
    assert code == 2
    assert "there is no demo fusoin" in told
    assert "did you mean fusion?" in told
    assert shown("x")[2].endswith("demos: fusion, batched, memory, access\n")


def test_by_hand_is_what_it_says() -> None:
    x = genesis.randn(5, 7)
    assert (gelu_by_hand(x) - genesis.gelu_tanh(x)).abs().amax().item() < 1e-6
    assert (softmax_by_hand(x) - genesis.softmax(x, -1)).abs().amax().item() < 1e-6


def test_ways_must_agree() -> None:
    x = genesis.ones(3)
    with pytest.raises(NumericError, match="twice differs from once by 1, "):
        compare([Way("once", lambda: x), Way("twice", lambda: x * 2)], Setting(CPU, True, PLAN))
    with pytest.raises(NumericError, match="by nan"):
        compare([Way("once", lambda: x), Way("none", lambda: x * float("nan"))], Setting(CPU, True, PLAN))


def test_sizes_follow_the_place() -> None:
    sizes = {"gpu": 4, "cpu": 3, "fast": 2, "tiny": 1}
    cuda = Device("cuda")
    assert [Setting(CPU).size(**sizes), Setting(CPU, True).size(**sizes), Setting(cuda).size(**sizes)] == [3, 2, 1]
    with mock.patch.object(comparing, "has_gpu_time", return_value=True):
        assert [Setting(cuda).size(**sizes), Setting(cuda, True).size(**sizes)] == [4, 2]
        assert Setting(cuda).square() == 8192  # of the 8 GiB that the interpreter's device has
    assert [Setting(CPU).square(), Setting(cuda).square()] == [4096, 32]


def row(name: str, launches: int, size: int, seconds: float, share: float) -> DemoRow:
    time = Time(
        seconds=seconds, fastest=seconds, half_width=0.0, spread=0.0, samples=9, calls=1, outliers=0, is_noisy=False
    )
    return DemoRow(
        name=name, launches=launches, bytes=size, flops=1, wall=time, gpu=None, bytes_per_second=size / seconds,
        share=share, peak_bytes=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "shares", "said"),
    [
        (10.5, (0.9, 0.9), "11.0 times the bytes and 10.5 times the time: the time follows the bytes."),
        (20.0, (0.4, 0.9), "Bytes alone do not explain it: by hand runs at 40% of a copy's rate."),
        (2.0, (0.9, 0.2), "Memory is not all that counts: fused runs at 20% of a copy's rate."),
        (5.0, (2.0, 0.9), "Much is read while it is in a cache: by hand runs at 200% of a copy's rate."),
    ],
)
def test_a_sentence_follows_from_the_figures(seconds: float, shares: tuple[float, float], said: str) -> None:
    told = passes(row("by hand", 9, 2200, seconds, shares[0]), row("fused", 1, 200, 1.0, shares[1]))
    assert told.startswith("By hand there are 9 passes, fused 1; that is 11.0 times the bytes and ")
    assert told.endswith(said)
    assert (factor(10.84), factor(1.234)) == ("10.8 times", "1.23 times")
