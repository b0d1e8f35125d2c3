"""`genesis profile`: text, JSON, the interpreter's CUDA, and what a wrong command line is answered."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from genesis.measure import op as measuring
from genesis.measure.op import Settings
from genesis_cli import environment
from tests.cli.command import printed
from tests.measure.quick import PLAN, small_limits


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Little time for each figure, and no questions to the driver."""
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    with (
        small_limits(),
        mock.patch.object(measuring, "Settings", partial(Settings, plan=PLAN, causes=False)),
        mock.patch.object(environment, "facts", return_value=facts),
    ):
        yield


def profiled(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis profile words…` on the CPU, unless the words say otherwise."""
    where = [] if "--device" in words else ["--device", "cpu"]
    return printed("profile", *words, *where)


def test_one_case_is_told_in_full() -> None:
    code, text, told = profiled("--op", "reduce_sum", "--shape", "4,8", "--axis", "-1", "--backward")
    assert (code, told) == (0, "")
    assert text.startswith("device  a processor (cpu)\n\nmeasured now\n")
    titles = [line.split()[0] for line in text[text.index("\nreduce_sum 4x8 over -1\n") :].splitlines()[2:] if line]
    assert {"wall", "moves", "computes", "share", "band", "memory", "recording", "backward"} <= set(titles)


def test_several_cases_are_a_table() -> None:
    with mock.patch.object(measuring, "choices", return_value=[((4, 8), None), ((4, 8), -1)]):
        code, text, _ = profiled("--op", "reduce_sum", "--dtype", "bf16")
    assert code == 0
    assert "\nreduce_sum, bfloat16\n" in text
    assert "\nreduce_sum 4x8 over all  " in text
    assert "\nreduce_sum 4x8 over -1   " in text


def test_json_alone_on_stdout() -> None:
    code, text, told = profiled("--op", "matmul", "--shape", "2,3,4", "--json", "-")
    assert (code, told) == (0, "")
    report = json.loads(text)
    assert (report["schema_version"], report["kind"]) == (2, "profile-op")
    assert report["command"] == "genesis profile --op matmul --shape 2,3,4 --device cpu"
    assert report["machine"]["genesis"] == "0.0"
    limits, ops = report["tables"]
    assert [row["dtype"] for row in limits["rows"]] == ["float32"]
    assert [(row["name"], row["flops"], row["inputs"]) for row in ops["rows"]] == [
        ("matmul", 48, "float32[2,3], float32[3,4]")
    ]


def test_cuda_runs_in_the_interpreter() -> None:
    code, text, told = profiled("--op", "add", "--shape", "8", "--device", "cuda", "--json", "-")
    assert (code, told) == (0, "")
    report = json.loads(text)
    assert (report["device"], report["device_name"]) == ("cuda:0", "Triton's interpreter")
    _, ops, kernels = (table["rows"] for table in report["tables"])
    assert ops[0]["gpu"] is None
    assert [(row["kernel"], row["grid"], row["registers"]) for row in kernels] == [("flat_kernel", "1x1x1", None)]


@pytest.mark.parametrize(
    ("words", "what", "where", "next"),
    [
        (["--op", "reduce_summ"], "there is no op reduce_summ", "--op", "did you mean reduce_sum?"),
        (["--op", "add", "--shape", "4,x"], "'4,x' is not a shape", "--shape", "4,512,896"),
        (["--op", "add", "--shape", "4,0"], "'4,0' is not a shape", "--shape", "4,512,896"),
        (["--op", "matmul", "--shape", "4,2"], "N, or M,K,N", "--shape", ""),
        (["--op", "sum", "--shape", "4", "--axis", "3"], "out of range", "--axis", "use -1 to 0"),
        (["--op", "softmax", "--shape", "2,3", "--axis", "0,1"], "softmax takes one axis", "--axis", "such as -1"),
        (["--op", "sum", "--axis", "x"], "'x' is not an axis", "--axis", "write -1"),
        (["--op", "add", "--axis", "0"], "add has no axis", "--axis", "leave --axis out"),
        (["--op", "add", "--dtype", "f99"], "'f99' is not a dtype", "--dtype", "use one of float64"),
        (["--op", "mean", "--shape", "4", "--dtype", "int32"], "takes float tensors", "--dtype", ".float()"),
        (["--op", "eq", "--backward"], "eq has no gradient", "--backward", "leave --backward out"),
        (["--op", "add", "--arch", "sm_90"], "--arch selects the GPU", "--arch", "add --show ptx"),
        (["--op", "add", "--show", "ptx", "--vs", "torch"], "--show prints code alone", "--vs", "leave --vs"),
        (["--op", "add", "--show", "ptx", "--json", "-"], "--show prints code alone", "--json", "leave --json"),
        (["--op", "add", "--show", "ptx"], "TRITON_INTERPRET is set", "--show", "unset TRITON_INTERPRET"),
        (["--shape", "4"], "Missing option '--op'", "command line", "genesis profile --help"),
    ],
)
def test_a_wrong_command_line(words: list[str], what: str, where: str, next: str) -> None:
    code, text, told = profiled(*words)
    assert (code, text) == (2, "")
    assert what in told.splitlines()[0]
    assert f"  where: {where}\n" in told
    assert next in told


def test_no_room_for_the_inputs() -> None:
    code, text, told = profiled("--op", "add", "--shape", "1000000000000000000")
    assert (code, text) == (7, "")
    assert "no room" in told


MISSPELT = """
import genesis
def reference(x):
    {body}
rules = {{"out": lambda x: {out}, "grid": lambda out, x: 1, "reference": reference, {more}}}
op = genesis.cuda_op("misspelt", "__global__ void k() {{}}", inputs=("x",), block=32, **rules)
"""


@pytest.mark.parametrize(
    ("body", "out", "more", "what", "where"),
    [
        ("return genesis.zeros(2, dtpye='int8')", "x", "", "zeros takes no keyword 'dtpye'", ""),
        ("raise ValueError('no')", "x", "", "ValueError: no", "the reference of misspelt, {file}:4"),
        ("return genesis.exp(x)", "x", "", "misspelt: exp takes tensors and", "the reference of misspelt, {file}:4"),
        ("return open('nothing')", "x", "", "FileNotFoundError: ", "the reference of misspelt, {file}:4"),
        ("return x[:1]", "x", "", "the reference of misspelt returned shape (1,)", "the reference of misspelt\n"),
        ("return x", "x.nothing", "", "AttributeError: ", "the rule out of misspelt, {file}:5"),
        ("return x", "x", "'flops': lambda out, x: 'no'", "ValueError: ", "the cost of misspelt"),
        ("return x", "x", "'sample': lambda shape, dtype: 1 / 0", "ZeroDivisionError: ", "the sample of misspelt"),
    ],
)
def test_an_error_of_a_users_op_is_no_bug_of_genesis(
    body: str, out: str, more: str, what: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "misspelling.py"
    file.write_text(MISSPELT.format(body=body, out=out, more=more))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "misspelling", raising=False)
    code, _, told = profiled("--op", "misspelling:op", "--shape", "8", "--device", "cpu")
    assert code == 2 and told.startswith(f"error: {what}")
    assert where.format(file=file) in told and "a bug in Genesis" not in told


def test_an_error_of_genesis_in_a_users_op_stays_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "misspelling.py").write_text(MISSPELT.format(body="return x", out="x", more=""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "misspelling", raising=False)
    with mock.patch.object(measuring, "profile_case", side_effect=ValueError("ours")):
        code, _, told = profiled("--op", "misspelling:op", "--shape", "8", "--device", "cpu")
    assert code == 70 and told.startswith("error: this is a bug in Genesis: ValueError: ours")
