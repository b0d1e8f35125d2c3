"""What README, CONTRIBUTING and docs say is so: commands, options, settings, paths, targets, extras, requirements."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import typer
import yaml
from packaging.requirements import Requirement

from genesis.ops.fp8 import MIN_COLUMNS
from genesis.train.config import Config, json_schema, setting_names
from genesis.train.config_file import parse_config
from genesis_cli.app import app
from genesis_cli.environment import packages
from tests.packaging.tree import REPOSITORY, repository_files

# docs/log.md and the decisions tell what was, not what is.
HISTORY = {"docs/log.md"}
GUIDES = sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(name for name in GUIDES if name not in HISTORY)]
TEXTS = {name: (REPOSITORY / name).read_text() for name in DOCUMENTS}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Extras whose distribution brings modules of another name.
MODULES = {"distributed": "nccl.bindings", "nvrtc": "cuda.bindings import nvrtc"}
FOR_DEVELOPERS = {"bench", "dev", "docs"}
GPU_ONLY = {"triton", "cuda-python", "cuda-core"}
SECTIONS = "|".join(Config.model_fields)
KEY = re.compile(rf"(?<![\w./-])(?:{SECTIONS})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*(?=[=:\s`,.;)]|$)", re.MULTILINE)


def code_of(text: str) -> Iterator[str]:
    """Lines of code blocks, and inline code."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def said(pattern: str) -> list[tuple[str, str]]:
    """Document and match of each piece of code that begins as `pattern` says."""
    return [(n, m[1]) for n, text in TEXTS.items() for c in code_of(text) if (m := re.match(pattern, c.strip()))]


def commands() -> dict[str, Any]:
    """Each command, by its words."""
    found: dict[str, Any] = {}

    def enter(group: Any, words: tuple[str, ...]) -> None:
        for name, command in group.commands.items():
            found[" ".join((*words, name))] = command
            if hasattr(command, "commands"):
                enter(command, (*words, name))

    enter(typer.main.get_command(app), ())
    return found


def faults_of(line: str) -> list[str]:
    """What is wrong with a command line that begins after `genesis`."""
    known, words = commands(), line.split("#", maxsplit=1)[0].split()
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), None) if words else ""
    if name is None:
        return [] if words[0].startswith("-") else [f"no command {words[0]}"]
    options = {"--debug", "--help", "--version"}
    options |= {option for parameter in (known[name].params if name else []) for option in parameter.opts}
    return [
        f"{name} has no {word}" for word in words if re.match("--[a-z]", word) and word.split("=")[0] not in options
    ]


def test_commands_and_their_options_exist() -> None:
    lines = said(r"(?:\$ )?(?:\.venv/bin/)?genesis +((?:[a-z-]).*)")
    assert len(lines) > 15
    assert not {line: faults for _, line in lines if (faults := faults_of(line))}


def test_wrong_commands_are_noticed() -> None:
    assert faults_of("trian quickstart") == ["no command trian"]
    assert faults_of("train quickstart --resum") == ["train has no --resum"]
    assert faults_of("bench all --fast --vs torch  # --none") == []


def known_keys() -> set[str]:
    return {*setting_names()}


def wrong_keys(text: str) -> set[str]:
    return {key for code in code_of(text) for key in KEY.findall(code) if not is_known(key)}


def is_known(key: str) -> bool:
    """A setting, or a module, file or attribute of the same look, or README's example of a mistake."""
    if key == "train.stpes":
        return True
    section, name = key.split(".")[:2]
    return f"{section}.{name}" in known_keys() or (section, name) in NO_SETTINGS


# Python in the documents whose names look like settings.
NO_SETTINGS = {
    *(("model", name) for name in ("layers", "loss", "model", "parameters", "safetensors")),
    *((section, "py") for section in ("train", "data")),
}
# By the reader of a guide.
TO_BE_WRITTEN = {
    "cli/count.py", "genesis/data/readers/psv.py", "genesis/kernels/pointwise/activation.py",
    "genesis/optim/rules/adagradw.py", "genesis/train/z_loss.py", "models/parallel.py",
    "tests/ops/samples/adagradw.py",
}  # fmt: skip


def test_settings_exist() -> None:
    assert not {name: wrong for name, text in TEXTS.items() if (wrong := wrong_keys(text))}
    assert wrong_keys("`train.stepps=3` and\n```\ngenesis train q optim.lrr=1\n```\n") == {"train.stepps", "optim.lrr"}


def test_configurations_are_valid() -> None:
    blocks = [b for text in TEXTS.values() for b in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    assert blocks
    for block in blocks:
        assert yaml.safe_load(block)
        parse_config(block, "a block")


def test_links_lead_somewhere() -> None:
    links = [(n, link) for n, text in TEXTS.items() for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)]
    assert len(links) > 10
    missing = [
        (n, link) for n, link in links if "://" not in link and not (REPOSITORY / n).parent.joinpath(link).exists()
    ]
    assert not missing


def test_folders_and_scripts_that_are_named_exist() -> None:
    pattern = r"((?:\./)?(?:genesis|cli|models|configs|docs|tests|benchmarks|\.ci)/[\w./-]*)"
    paths = {path for _, path in said(pattern) if "x.py" not in path and "<" not in path}
    modules = {path.replace(".", "/") for _, path in said(r"\S*python -m ((?:tests|benchmarks)\.[\w.]+)")}
    assert len(paths) > 15 and modules
    assert not {path for path in paths - TO_BE_WRITTEN if not (REPOSITORY / path).exists()}
    assert not {path for path in modules if not (REPOSITORY / f"{path}.py").exists()}


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = {word for _, line in said(r"make +((?:[a-z-]+ ?)+)") for word in line.split("#")[0].split()[:1]}
    assert {"quickstart", "test"} <= named <= targets


def test_every_extra_does_something() -> None:
    sources = [p.read_text() for p in repository_files("genesis", "cli", "models") if p.suffix == ".py"]
    for extra, wanted in PROJECT["optional-dependencies"].items():
        if extra in FOR_DEVELOPERS:
            continue
        module = MODULES.get(extra) or Requirement(wanted[0]).name.replace("-", "_")
        assert any(re.search(rf"\b(?:import|from) {module}\b", source) for source in sources), extra


def test_nobody_is_sent_to_a_registry_for_genesis() -> None:
    """One gets it from a clone: `pip install '.[…]'`; a package of that name elsewhere is somebody else's."""
    folders = ("genesis", "cli", "models", "configs", "docs")
    files = [p for p in repository_files(*folders) if p.suffix in (".py", ".md", ".yaml")]
    pattern = re.compile(r"pip install[^\n`]*genesis-lm")
    assert not [str(p) for p in files if p.name != "log.md" and pattern.search(p.read_text())]
    assert not [row for row in packages() if "genesis-lm" in row["add"]]


def test_readme_names_the_extras() -> None:
    (line,) = re.findall(r"^Optional parts are extras.*$", TEXTS["README.md"], re.MULTILINE)
    command, rest = re.fullmatch(r"(.*?pip install '\.\[[a-z,]+\]'`)(.*)", line).groups()  # type: ignore[union-attr]
    assert set(re.findall(r"`([a-z]+)`", rest)) == set(PROJECT["optional-dependencies"])
    assert set(re.findall(r"\[([a-z,]+)\]", command)[0].split(",")) <= set(PROJECT["optional-dependencies"])
    assert "genesis-lm[" not in TEXTS["README.md"]


def test_the_schema_tells_from_which_width_fp8_multiplies() -> None:
    description = json_schema()["$defs"]["TrainConfig"]["properties"]["precision"]["description"]
    assert f"{MIN_COLUMNS} columns or more" in description
    assert f"{MIN_COLUMNS} columns or more" in TEXTS["docs/training.md"]


def test_requirements_for_a_cpu_are_those_of_the_project_without_the_gpus() -> None:
    lines = (REPOSITORY / "requirements-cpu.txt").read_text().splitlines()
    found = sorted(line for line in lines if line and not line.startswith("#"))
    wanted = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name not in GPU_ONLY]
    assert all(r.marker is None for r in wanted)
    assert found == sorted(map(str, wanted))
    assert {Requirement(text).name for text in PROJECT["dependencies"]} >= GPU_ONLY
