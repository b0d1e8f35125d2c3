"""What each command passes on, prints, and does not print."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from genesis.errors import ConfigError
from genesis.train.config import DataConfig, EvalConfig, json_schema
from genesis_cli import recipes
from genesis_cli.env import report
from genesis_cli.environment import missing_for_cuda, packages, probe
from tests.cli.command import FAKE_SESSION, genesis, genesis_with, here

COMMANDS = [
    "train",
    "generate",
    "eval",
    "export",
    "validate",
    "profile",
    "bench-model",
    "bench-ops",
    "demo",
    "schema",
    "env",
]
# Says how it was called, and never runs a model.
ECHO = """
import json
def train(config, *, resume, resume_from, console, overrides):
    console.line(json.dumps([config.train.steps, config.optim.lr, resume, resume_from]))
def validate(config, *, console):
    console.line(json.dumps({"data": config.data.train}))
def generate(folder, prompt, *, tell, **options):
    yield from (json.dumps({"folder": folder, "prompt": prompt, **options}), "\\n", "\\x1b[31mred\\ttab")
def evaluate(folder, sources, **options):
    return {"eval/loss": 2.5, "eval/num_tokens": 100, "called": json.dumps([folder, sources, options])}
"""


def echoed(*words: str, cwd: Path | None = None) -> Any:
    done = genesis_with(ECHO, *words, cwd=cwd) if cwd else here(*words, session=ECHO)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout.splitlines()[0])


def test_train_takes_a_recipe_overrides_and_resume_in_any_order() -> None:
    assert echoed("train", "quickstart") == [250, 5e-3, False, None]
    assert echoed("train", "quickstart", "train.steps=7", "--resume", "optim.lr=1e-5") == [7, 1e-5, True, None]
    assert echoed("train", "quickstart", "--resume-from", "checkpoint-100") == [250, 5e-3, False, "checkpoint-100"]


def test_train_takes_a_file_and_prefers_it_to_a_recipe(tmp_path: Path) -> None:
    text = "model: {preset: 0.5B}\ndata: {train: x}\ntrain: {output_dir: r, steps: 3}\n"
    for name in ("mine.yaml", "quickstart"):
        (tmp_path / name).write_text(text)
        assert echoed("train", name, cwd=tmp_path)[0] == 3


def test_validate_passes_the_configuration_on() -> None:
    assert echoed("validate", "quickstart", "data.train=[a, b]") == {"data": ["a", "b"]}


def test_an_error_in_a_recipe_names_it() -> None:
    done = here("train", "quickstart", "data.seq_len=99999")
    assert done.returncode == 3
    assert "error: data.seq_len 99999 exceeds the model's max_position_embeddings 256" in done.stderr
    assert "where: override: data.seq_len=99999" in done.stderr


def test_recipes_are_the_shipped_files() -> None:
    assert "quickstart" in recipes.names()
    for name in recipes.names():
        recipes.load(name, [])


@pytest.mark.parametrize(
    ("name", "next"),
    [
        ("quikstart", "did you mean the recipe quickstart?"),
        ("nothing.yaml", "the shipped recipes are: "),
        ("a\0b", "check"),
    ],
)
def test_a_name_that_is_nothing(name: str, next: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.load(name, [])
    assert next in caught.value.next


def test_a_recipe_name_never_leaves_the_package() -> None:
    for name in ("../pyproject", "../configs/quickstart", "/etc/passwd", ""):
        with pytest.raises(ConfigError):
            recipes.load(name, [])


def test_generate_passes_no_way_of_drawing_that_was_not_given() -> None:
    """The model's generation_config.json has a say before the schema's defaults."""
    defaults = EvalConfig()
    called = echoed("generate", "folder", "--prompt", "def f")
    assert called == {
        "folder": "folder",
        "prompt": "def f",
        "max_tokens": defaults.sample_tokens,
        "seed": 0,
        "device": "auto",
        "dtype": "auto",
        "kv_cache": "auto",
        "exact": False,
        "base": None,
        "special": DataConfig(train=["x"]).parse_special,
        "prompts": None,
        "chat": False,
        "system": None,
        "stop": [],
    }


def test_generate_passes_what_is_given() -> None:
    given = ["--max-tokens", "5", "--temperature", "0", "--top-k", "3", "--top-p", "0.5", "--seed", "9"]
    given += ["--stop", "a", "--stop", "b", "--min-p", "0.25", "--repetition-penalty", "2", "--chat", "--system", "S"]
    given += ["--kv-cache", "fp8"]
    called = echoed("generate", "f", "--prompt", "", *given, "--base", "b", "--dtype", "bf16", "--special")
    assert called == {
        "folder": "f",
        "prompt": "",
        "max_tokens": 5,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "seed": 9,
        "device": "auto",
        "dtype": "bfloat16",
        "kv_cache": "fp8",
        "exact": False,
        "base": "b",
        "special": True,
        "prompts": None,
        "chat": True,
        "system": "S",
        "stop": ["a", "b"],
        "min_p": 0.25,
        "repetition_penalty": 2.0,
    }


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_generated_text_cannot_drive_a_terminal(stream: list[str]) -> None:
    done = here("generate", "f", "--prompt", "x", *stream, session=ECHO)
    assert done.stdout.endswith("\\x1b[31mred\ttab\n")


@pytest.mark.full
def test_generated_text_appears_piece_by_piece() -> None:
    slow = "import time\ndef generate(folder, prompt, **options):\n yield 'first'\n time.sleep(30)\n yield 'last'"
    command = [sys.executable, "-c", FAKE_SESSION.format(source=slow), "generate", "f", "--prompt", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"first"
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-k", "0"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--seed", "-1"),
        ("--device", "gpu"),
        ("--dtype", "int4"),
    ],
)
def test_options_have_the_bounds_of_the_schema(option: str, value: str) -> None:
    done = here("generate", "f", "--prompt", "x", option, value)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {option} must be ")


def test_eval_prints_its_numbers() -> None:
    done = here("eval", "f", "--data", "a", "--data", "b", "--seq-len", "64", session=ECHO)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["eval/loss        2.5", "eval/num_tokens  100"]
    folder, sources, options = json.loads(lines[2].split(maxsplit=1)[1])
    assert (folder, sources) == ("f", ["a", "b"])
    assert options == {
        "seq_len": 64,
        "batch_size": 8,
        "exact": False,
        "device": "auto",
        "dtype": "auto",
        "base": None,
        "template": None,
    }
    assert echoed("eval", "f", "--data", "a", "--json")["eval/loss"] == 2.5
    assert here("eval", "f", "--data", "a", "--seq-len", "1").returncode == 2


def test_schema_prints_the_schema() -> None:
    assert json.loads(here("schema").stdout) == json_schema()


def test_version_and_help() -> None:
    assert here("--version").stdout.startswith("genesis 0.")
    shown = here("-h").stdout
    assert all(f"  {command} " in shown for command in COMMANDS)
    assert "--install-completion" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = here(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: genesis {command} " in done.stdout
    assert "--debug" in done.stdout


def test_options_are_written_with_their_names() -> None:
    """Some releases of typer make an option's name from its metavar where none is given: --DEVICE."""
    folder = Path(recipes.__file__).parent
    calls = [
        (path.name, node.lineno, node.args)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option"
    ]
    assert len(calls) > 30
    assert [call[:2] for call in calls if not (call[2] and ast.unparse(call[2][0]).startswith("'-"))] == []


def test_the_installed_script_is_the_same_program() -> None:
    script = Path(sysconfig.get_path("scripts"), "genesis")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, here("--version").stdout)


def test_env_tells_versions_and_what_is_missing_and_no_secret() -> None:
    canary = "hf_planted0secret"
    tokens = {"HF_TOKEN": canary, "WANDB_API_KEY": canary, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    text = genesis("env", env=tokens)
    assert (text.returncode, text.stderr) == (0, "")
    found = genesis("env", "--json", env=tokens)
    facts = json.loads(found.stdout)
    assert canary not in text.stdout + found.stdout
    assert facts["cpu"]["usable_cores"] >= 1
    assert facts["memory"]["total_bytes"] > 2**20
    numpy = next(row for row in facts["packages"] if row["name"] == "numpy")
    assert numpy["fits"]
    assert f"  numpy              {numpy['version']}" in text.stdout
    assert facts["numpy_blas"] != "unknown"
    for line in facts["missing_for_cuda"]:
        assert line in text.stdout
    assert facts["python"]["version"] in text.stdout


def test_a_missing_package_comes_with_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=1.26", "absent-one>=2.0", "absent-two>=3; extra == 'wandb'", "tool; extra == 'dev'"]
    wanted += ["typer>=999", "only-there>=1; sys_platform == 'elsewhere'", "pip<1"]
    monkeypatch.setattr("genesis_cli.environment.metadata.requires", lambda name: wanted)
    rows = {row["name"]: row for row in packages()}
    assert rows["numpy"]["add"] == ""
    assert rows["absent-one"]["version"] is None
    assert rows["absent-one"]["add"] == "pip install --upgrade 'absent-one>=2.0'"
    assert rows["absent-two"]["add"] == "pip install --upgrade 'absent-two>=3'"
    assert rows["typer"]["version"] is not None
    assert rows["typer"]["add"] == "pip install --upgrade 'typer>=999'"
    assert "tool" not in rows


CUDA = {
    "device_nodes": [],
    "devices": [{"name": "GPU", "memory_bytes": 1, "capability": "9.0"}],
    "cuda": "12.8",
    "problem": "",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"problem": "no library", "devices": []}, ["a working NVIDIA driver: no library"]),
        ({"devices": []}, ["a GPU: the driver sees none"]),
        ({"cuda": "11.4"}, ["a newer NVIDIA driver: this one supports CUDA 11.4"]),
        ({"cuda": "12.0"}, []),
        (
            {"devices": [{"name": "old", "memory_bytes": 1, "capability": "7.5"}]},
            ["compute capability 8.0 or above: old"],
        ),
    ],
)
def test_what_cuda_lacks(change: dict[str, Any], words: list[str]) -> None:
    installed = [{"name": "triton", "fits": True, "add": ""}]
    found = missing_for_cuda({**CUDA, **change}, installed, compiler=True)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


def test_cuda_needs_its_packages_and_a_compiler() -> None:
    installed = [
        {"name": "triton", "fits": False, "add": "pip install triton"},
        {"name": "rich", "fits": False, "add": "x"},
    ]
    found = missing_for_cuda(CUDA, installed, compiler=False)
    assert found == ["triton: pip install triton", "a C compiler for Triton (cc, gcc or clang)"]


def test_a_driver_that_hangs_or_crashes_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from genesis_cli import environment

    hangs, crashes = "import time; time.sleep(20)", "import os; os.abort()"
    for code, seconds, words in ((hangs, 1, "did not answer"), (crashes, 60, "failed")):
        monkeypatch.setattr(environment, "PROBE_SECONDS", seconds)
        script = tmp_path / "probe.py"
        script.write_text(code)
        monkeypatch.setattr(environment, "__file__", str(script))
        assert words in environment._probe_cuda()["problem"]


def test_the_probe_answers_on_any_machine() -> None:
    found = probe()
    assert bool(found["devices"]) <= (found["problem"] == "")
    json.dumps(found)


def test_the_report_escapes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "genesis": "0.1",
        "python": {"version": "3", "implementation": "C"},
        "system": {"name": "L", "release": "1", "machine": "x"},
        "cpu": {"name": "\x1b[31m", "cores": 2, "usable_cores": 2, "quota_cores": 1.5},
        "memory": {"total_bytes": 2**30, "available_bytes": None, "limit_bytes": 2**29},
        "numpy_blas": "b",
        "packages": [],
        "cuda": {**CUDA, "devices": [{"name": "\x07", "memory_bytes": 2**31, "capability": "9.0"}]},
        "missing_for_cuda": [],
    }
    lines = list(report(facts))
    assert "cpu       \\x1b[31m: 2 cores, 2 usable, 1.5 by quota" in lines
    assert "memory    1.0 GiB, ? available, limit 0.5 GiB" in lines
    assert "  \\x07, 2.0 GiB, compute capability 9.0" in lines
    assert lines[-1] == "missing for CUDA: nothing"
