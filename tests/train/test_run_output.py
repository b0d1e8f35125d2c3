"""What a run tells and to whom: readers that leave, secrets that stay, control characters that drive no terminal."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from genesis.files.hf import read_head
from genesis.train.config_file import parse_config
from genesis.train.output import Output
from genesis_cli.session import export
from tests.train.runs import Ended, Forks, checkpoints, load, make, train

pytestmark = pytest.mark.xdist_group("runs in forks")


def check_complete(output: Path, expected: str) -> None:
    """The run reached its end, with its last checkpoint and the final model."""
    state = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())
    assert (state["step"], state["state_hash"]) == (6, expected)
    assert (output / "model.safetensors").stat().st_size > 10_000


class TestLostStdout:
    """Training goes on, completes, and is a success: the record is in the run's folder."""

    def test_a_reader_that_leaves_after_a_line(self, forks: Forks, recipe: Path, tmp_path: Path, expected: str) -> None:
        """As `| head -1`."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        child = forks.start("train", recipe, f"train.output_dir={tmp_path / 'run'}", out=str(pipe))
        with open(pipe) as reader:
            assert reader.readline().startswith("device: cpu")
        done = child.wait()
        assert (done.code, done.err) == (0, "")
        check_complete(tmp_path / "run", expected)

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
    def test_a_full_disk_behind_stdout(self, forks: Forks, recipe: Path, tmp_path: Path, expected: str) -> None:
        done = forks.run("train", recipe, f"train.output_dir={tmp_path / 'run'}", out="/dev/full")
        assert (done.code, done.err) == (0, "")
        check_complete(tmp_path / "run", expected)

    def test_the_check_fails_on_a_run_that_stopped(self, forks: Forks, recipe: Path, tmp_path: Path) -> None:
        forks.run("train", recipe, f"train.output_dir={tmp_path / 'run'}", fault=("nan_at", 4))
        with pytest.raises((AssertionError, FileNotFoundError)):
            check_complete(tmp_path / "run", "")


def test_the_card_of_an_export_says_what_the_run_was(recipe: Path, tmp_path: Path) -> None:
    """Of a final model and of a checkpoint; without a place on this machine, and from files of any kind."""
    run = tmp_path / "run"
    config = load(recipe, str(run), "data.template_args={slash: /no_think}", "eval.prompts=[/a b]")
    hash = train(config).state_hash
    state = json.loads((run / "trainer_state.json").read_text())
    assert (state["step"], state["state_hash"]) == (6, hash)
    console = Output(io.StringIO())
    options: dict[str, Any] = {"merge": False, "dtype": None, "check": False, "base": None, "console": console}
    for folder, steps, digest in ((run, 6, hash), (run / "checkpoint-4", 4, checkpoints(run)[4])):
        target = export(str(folder), out=str(tmp_path / f"out{steps}"), **options)
        text = (target / "README.md").read_text()
        data = state["data"]
        counts = f"{data['documents']} documents, {data['tokens']:,} tokens, {data['targets']:,} of them targets"
        assert digest in text and f"{steps} steps" in text and counts in text
        assert not files_with(target, str(tmp_path)) and str(recipe.parent) not in text
        head = read_head(target)
        assert (head["library_name"], head["tags"]) == ("transformers", ["genesis"])
        begin = text.index("    model:\n")
        lines = [line[4:] for line in text[begin:].splitlines()]
        again = parse_config("\n".join(lines), "card")
        assert again.optim == config.optim and again.eval.prompts == ["/a b"]
        assert again.data.template_args == {"slash": "/no_think"} and again.data.train == ["doc*.txt"]
    for broken in ('{"step": "x", "data": 5}', "{}", '{"data": {"tokens": []}, "state_hash": [1]}'):
        (run / "trainer_state.json").write_text(broken)
        export(str(run), out=str(tmp_path / "out6"), **options)
    (run / "config.resolved.yaml").write_text("settings: of another version\n")
    export(str(run), out=str(tmp_path / "out6"), **options)
    assert "config.yaml" not in (tmp_path / "out6" / "README.md").read_text()


CANARY = "canary-5f2b91d07e"
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GENESIS_TOKEN", "PASSWORD")


def files_with(folder: Path, text: str) -> list[str]:
    """Files below a folder whose name or content has `text`."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if text.encode() in path.read_bytes() or text in str(path.relative_to(folder))]


def test_no_secret_of_the_environment_is_written(forks: Forks, recipe: Path, tmp_path: Path) -> None:
    environment = {name: f"{CANARY}-{name}" for name in SECRETS}
    words = ("train", recipe, f"train.output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'run' / 'cache'}")
    for fault in (("nan_at", 3), ()):  # one that ends with an error and is resumed
        done = forks.run(*words, "--resume=allow", "--debug", fault=fault, environment=environment, picture=not fault)
        assert done.code == (9 if fault else 0)
        assert CANARY not in done.out + done.err
    assert (tmp_path / "run" / "loss.svg").exists()
    assert files_with(tmp_path / "run", CANARY) == []
    assert len(files_with(tmp_path / "run", "qwen3")) >= 4, "the search finds nothing at all"


# Every character that a terminal obeys: C0 but line feed and tab, DEL, C1, and marks that turn text around.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def check_harmless(done: Ended) -> None:
    """What the command wrote drives no terminal, and shows what was hidden."""
    for text in (done.out, done.err):
        assert not OBEYED.search(text), repr(OBEYED.search(text))


def test_control_characters_are_escaped(forks: Forks, tmp_path: Path) -> None:
    """In names of documents, their content, prompts, and the folder of the run."""
    recipe = make(tmp_path, documents=6)
    (tmp_path / f"doc{EVIL}.txt").write_text(f"{EVIL} alpha beta gamma " * 40)
    config = recipe.read_text().replace('prompts: ["alpha beta"]', f"prompts: [{json.dumps(EVIL + 'alpha')}]")
    config = config.replace("sample_tokens: 2", "sample_tokens: 24")
    recipe.write_text(config.replace('/run"', f'/run{json.dumps(EVIL)[1:-1]}"'))
    bad = forks.run("train", recipe, fault=("nan_at", 3))
    assert bad.code == 9
    check_harmless(bad)
    good = forks.run("train", recipe, "--resume")
    assert good.code == 0
    check_harmless(good)
    assert "sample at step 3:\n\\x1b]0;owned\\x07\\x1b[2J" in good.out
    assert "doc\\x1b]0;owned\\x07" in bad.err, "the name was never shown"


def test_the_check_sees_an_escape_sequence() -> None:
    check_harmless(Ended(0, "a\tb\n\\x1b[2J", "é\n"))
    for character in "\x1b\x00\r\x9b\u202e\x7f":
        with pytest.raises(AssertionError):
            check_harmless(Ended(0, "", f"a{character}b"))
