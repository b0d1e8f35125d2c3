"""The first five minutes: pull, init, train, export with a tiny model; every recipe; what `genesis init` writes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import genesis_models
from docs.generate import is_current
from genesis.data.sources import CHATS, expand
from genesis.files.hf import read_head
from genesis.train.config import Config
from genesis.train.config_file import load_config, parse_config
from genesis_cli import recipes
from genesis_cli.main import main
from genesis_cli.session import init as session
from genesis_cli.session.estimate import DRIVER
from genesis_cli.session.init import with_values
from tests.cli.command import printed
from tests.cli.first_model import write_model
from tests.hub import served, used
from tests.train.chats import chat, write_chats
from tests.train.preferences import judged, sums

TEXT = "def first():\n    return 1\n" * 40
QUICK = ("train.epochs=null", "train.steps=2", "train.batch_size=1", "train.accumulation_steps=1", "eval.max_batches=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("upstream") / "tiny")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(*words: object) -> str:
    code, out, told = printed(*words)
    assert code == 0, told
    return out


# --- Four commands ----------------------------------------------------------------------------------------------------


def test_four_commands_from_nothing_to_a_model(model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served({"org/tiny": model}) as hub:
        used(hub, here / "cache", monkeypatch)
        done("pull", "org/tiny")
    # The hub is gone: nothing else asks for it.
    assert "next: genesis train chats.yaml" in done("init", "chats.yaml", "--model", "org/tiny")
    done("train", "chats.yaml", *QUICK)
    out = done("export", "runs/chats", "--merge", "--out", "exported", "--check")
    assert "check:" in out
    assert sorted(os.listdir("exported"))[:3] == ["README.md", "chat_template.jinja", "config.json"]
    assert read_head(Path("exported"))["base_model"] == "org/tiny"
    found, base = genesis_models.load("exported"), genesis_models.load("org/tiny")
    assert found.state_dict().keys() == base.state_dict().keys()
    adapter = json.loads(Path("runs/chats/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "org/tiny"


def test_an_exported_adapter_names_its_base_as_the_hub_does(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served({"org/tiny": model}) as hub:
        used(hub, here / "cache", monkeypatch)
        done("pull", "org/tiny")
    write_chats(here / "chats.jsonl", (chat(f"{n}?", f"{n}!") for n in range(8)))
    done("init", "c.yaml", "--model", "org/tiny", "--data", "chats.jsonl", "--seq-len", "64")
    done("train", "c.yaml", *QUICK)
    done("export", "runs/c", "--out", "adapter")
    assert json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "org/tiny"
    done("generate", "adapter", "--prompt", "a", "--max-tokens", "2", "--device", "cpu")
    done("generate", "org/tiny", "--prompt", "a", "--max-tokens", "2", "--device", "cpu")
    assert "chats.jsonl" in done("data", "preview", "chats.jsonl", "--model", "org/tiny", "--seq-len", "64")
    done("export", "org/tiny")
    assert (here / "tiny-export" / "model.safetensors").exists(), "the cache is no place for it"


# --- Recipes ----------------------------------------------------------------------------------------------------------


def test_the_example_of_chats_is_current() -> None:
    assert is_current("configs/chats.jsonl"), "run `make docs`"
    (file,) = expand([CHATS])
    assert file.path.is_file() and file.name == CHATS


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "quickstart"])
def test_a_recipe_takes_its_first_steps(name: str, model: Path, here: Path) -> None:
    """quickstart itself is trained in tests/test_right_from_day_one.py."""
    changed = [*QUICK, "train.device=cpu", "train.output_dir=run", "eval.every=null", "checkpoint.save_final=false"]
    found = yaml.safe_load(recipes.text_of(name))
    if "path" in found["model"]:
        changed.append(f"model.path={model}")
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
        changed += [f"model.config.{key}={value}" for key, value in sizes.items()]
    if found["data"]["train"] == "stdlib:":
        (here / "texts").mkdir()
        for n in range(4):
            (here / "texts" / f"{n}.py").write_text(f"# {n}\n{TEXT}")
        changed += ["data.train=texts", "data.seq_len=32"]
    if "teacher" in found.get("objective", {}):
        changed.append(f"objective.teacher={model}")
    elif found.get("objective"):
        write_chats(here / "pairs.jsonl", judged(sums(8)) if found["objective"]["name"] == "kto" else sums(8))
        changed += ["data.train=pairs.jsonl", "data.seq_len=512", "train.batch_size=1"]
    if "prompts" in found.get("eval", {}):
        changed.append("eval.sample_tokens=2")
    assert "done: 2 steps" in done("train", name, *changed)


def test_recipes_are_listed_shown_and_copied(here: Path) -> None:
    listed = done("recipes")
    assert [line.split()[0] for line in listed.splitlines()] == recipes.names()
    assert all(len(line.split()) > 3 for line in listed.splitlines())
    assert done("recipes", "quickstart") == recipes.text_of("quickstart")
    done("recipes", "qwen3-0.6b-lora", "--copy")
    assert Path("qwen3-0.6b-lora.yaml").read_text() == recipes.text_of("qwen3-0.6b-lora")
    code, _, told = printed("recipes", "qwen3-0.6b-lora", "--copy")
    assert code == 3 and "already" in told
    code, _, told = printed("recipes", "qwen3-0.6-lora")
    assert code == 2 and "did you mean qwen3-0.6b-lora?" in told


def test_recipes_explain_each_setting() -> None:
    """A comment is above each setting or at its end, or at the one before that it goes with."""
    for name in recipes.names():
        lines = recipes.text_of(name).splitlines()
        assert sum("#" in line for line in lines) > len(lines) / 3, name
        assert lines[0].startswith("# ") and f"genesis train {name}" in "\n".join(lines[:10])


# --- init -------------------------------------------------------------------------------------------------------------


def test_without_a_word_a_new_model_for_this_machine(here: Path) -> None:
    out = done("init")
    assert "goal: scratch" in out
    config = load_config("genesis.yaml")
    assert config.data.train == ["stdlib:"] and config.train.output_dir == "runs/genesis"
    code, _, told = printed("init")
    assert code == 3 and "--force" in told
    done("init", "--force")


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("goal", ["lora", "full", "dpo", "kto", "reward", "pretrain"])
def test_each_goal_has_its_recipe_sized_for_the_gpu(goal: str, model: Path, here: Path) -> None:
    (here / "mine.jsonl").write_text("")
    words = ("--model", model, "--goal", goal, "--data", "mine.jsonl", "--gpu-memory", "0.7")
    out = done("init", "c.yaml", *words)
    assert "memory:" in out and "a GPU of 0.7 GiB" in out
    text, config = Path("c.yaml").read_text(), load_config("c.yaml")
    assert (config.model.path, config.data.train) == (str(model), ["mine.jsonl"])
    assert (config.lora is not None) is (goal in ("lora", "dpo", "kto", "reward"))
    assert config.objective.name == (goal if goal in ("dpo", "kto", "reward") else "next_tokens")
    rows = config.train.batch_size * config.train.accumulation_steps
    assert rows * config.data.seq_len >= 16 * min(1024, config.data.seq_len)
    assert text.count("#") > 20 and "genesis train c.yaml" in text
    estimate = json.loads(done("estimate", "c.yaml", "--gpu-memory", "0.7", "--json", "-"))
    assert estimate["fits"] is True


@pytest.mark.parametrize(("record", "goal"), [
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo"), (chat("hi", "yes"), "lora"), ({"text": "a"}, "lora"),
    ({"prompt": "a", "completion": "b", "label": True}, "kto"),
])  # fmt: skip
def test_the_goal_follows_the_records(model: Path, here: Path, record: dict[str, object], goal: str) -> None:
    Path("mine").mkdir()
    Path("mine/README.md").write_text("Mine.\n")
    Path("mine/data.jsonl").write_text(json.dumps(record) + "\n")
    out = done("init", "c.yaml", "--model", model, "--data", "mine")
    assert f"goal: {goal}," in out
    assert load_config("c.yaml").objective.name == ("next_tokens" if goal == "lora" else goal)
    others = {"dpo": ("kto", "lora"), "kto": ("dpo", "reward", "full")}.get(goal, ())
    for other in others:
        code, _, told = printed("init", "other.yaml", "--model", model, "--data", "mine", "--goal", other)
        assert code == 2 and f"the goal {other} does not learn from" in told and f"use --goal {goal}" in told


def test_a_base_model_gets_a_template_for_chats(model: Path, here: Path) -> None:
    base = Path(shutil.copytree(model, here / "base"))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    write_chats(here / "chats.jsonl", [chat(f"hi {n}", "yes") for n in range(40)])
    for goal in ("lora", "full", "pretrain"):
        out = done("init", "c.yaml", "--model", base, "--data", "chats.jsonl", "--goal", goal, "--force")
        template = load_config("c.yaml").data.template
        assert (template == "chatml") is ("template: chatml" in out) is (goal != "pretrain")
        if template:
            assert "targets" in done("data", "preview", "c.yaml")
    done("init", "c.yaml", "--model", model, "--data", "chats.jsonl", "--force")
    assert load_config("c.yaml").data.template is None


@pytest.mark.parametrize(("chats", "extra"), [(4, 0), (300, 2000)])
def test_a_run_is_evaluated_and_saved_several_times(model: Path, here: Path, chats: int, extra: int) -> None:
    """Also a short one, and one of records that are mostly not text."""
    rows = [{**chat(f"what is {n} and {n}?", f"it is {2 * n}"), "source": "x" * extra} for n in range(chats)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done("init", "c.yaml", "--model", model, "--data", "mine.jsonl", "--seq-len", "64")
    config = load_config("c.yaml")
    assert config.train.epochs is not None
    packed = re.search(r"rows of 64 tokens: ([\d,]+)", done("data", "preview", "c.yaml", "--samples", "0"))
    assert packed
    a_step = config.train.batch_size * config.train.accumulation_steps
    steps = math.ceil(int(packed[1].replace(",", "")) * config.train.epochs / a_step)
    assert config.eval.every == config.checkpoint.every is not None
    assert config.eval.every == float(f"{max(1, steps // 5):.0e}"), steps


def test_a_model_without_a_tokenizer_has_a_line(model: Path, here: Path) -> None:
    base = Path(shutil.copytree(model, here / "base"))
    (base / "tokenizer.json").unlink(missing_ok=True)
    write_chats(here / "chats.jsonl", [chat(f"hi {n}", "yes") for n in range(40)])
    assert "set data.tokenizer to a folder" in done("init", "c.yaml", "--model", base, "--data", "chats.jsonl")
    for words, has_config in ((("data", "preview", "c.yaml"), True), (("generate", base, "--prompt", "x"), False)):
        code, _, told = printed(*words)
        assert code == 5 and "has no tokenizer.json" in told and ("data.tokenizer" in told) is has_config
    assert "tokenizer:" not in done("init", "c.yaml", "--model", model, "--data", "chats.jsonl", "--force")


def test_a_small_gpu_computes_more_again_and_a_tiny_one_is_refused(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "mine.jsonl").write_text("")
    a_row = {"none": 100, "selective": 60, "full": 20}

    def planned(config: Config, *rest: object, activation_checkpointing: str, **_: int) -> SimpleNamespace:
        return SimpleNamespace(reserved=config.train.batch_size * a_row[activation_checkpointing] << 20)

    monkeypatch.setattr(session, "run_plan", planned)
    words = ("--model", model, "--goal", "full", "--data", "mine.jsonl", "--force")
    found = []
    for rows_of_none in (17, 4, 3, 1):
        done("init", "c.yaml", *words, "--gpu-memory", (DRIVER + (100 * rows_of_none << 20)) / 2**30)
        train = load_config("c.yaml").train
        found.append((train.activation_checkpointing, train.batch_size, train.accumulation_steps))
    assert found == [("none", 16, 1), ("none", 4, 4), ("selective", 4, 4), ("full", 4, 4)]
    monkeypatch.undo()
    monkeypatch.chdir(here)
    code, _, told = printed("init", "d.yaml", *words, "--gpu-memory", 0.63)
    assert code == 7 and "not even one row" in told and not Path("d.yaml").exists()


def test_mistakes_of_init(model: Path, here: Path) -> None:
    for words, said, expected in (
        (("--goal", "lora"), "needs the weights", 2),
        (("--goal", "scratch", "--model", model), "random weights", 2),
        (("--goal", "fly"), "is unknown", 2),
        (("--model", "org/absent"), "genesis pull org/absent", 5),
        (("--data", "absent.jsonl"), "matches no file", 4),
        (("--model", ""), "--model is empty", 2),
        (("--model", model, "--seq-len", 50_000), "--seq-len 50000", 3),
        (("--model", "qwen3-0.6B", "--seq-len", 50_000), "--seq-len 50000", 3),
        (("--seq-len", 50_000), "--seq-len 50000", 3),
        (("--seq-len", 10**8), "--seq-len must be an integer from 2 to 1048576", 3),
    ):
        code, _, told = printed("init", "x.yaml", *words)
        assert (code, said in told) == (expected, True), told
    code, _, told = printed("init", here, "--force")
    assert (code, "is a folder" in told) == (3, True), told
    assert not Path("x.yaml").exists()


def answered(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """A terminal whose user answers so; the questions, as they come."""
    asked, left = list[str](), iter(answers)

    def prompt(question: str, *, default: str, **how: object) -> str:
        asked.append(question.partition(":")[0])
        return next(left) or default

    monkeypatch.setattr("typer.prompt", prompt)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    return asked


def test_wrong_answers_are_asked_again_at_once(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.jsonl").write_text("")
    monkeypatch.setenv("HOME", str(model.parent))
    answers = ("absent", f" ~/{model.name} ", "fly", "lora", "absent.jsonl", "mine.jsonl")
    asked = answered(monkeypatch, *answers)
    assert main(["init", "c.yaml", "--gpu-memory", "0.7"]) == 0
    assert asked == ["Model", "Model", "Goal", "Goal", "Data", "Data"]
    out = capsys.readouterr().out
    assert all(said in out for said in ("absent", "the goal fly is unknown", "use one of lora", "matches no file"))
    config = load_config("c.yaml")
    assert config.model.path == str(model) and config.data.train == ["mine.jsonl"] and config.lora is not None


def test_a_goal_that_does_not_go_with_the_model_asks_for_both(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answered(monkeypatch, "", "lora", "qwen3-0.6B", "", "")
    assert main(["init", "c.yaml"]) == 0
    assert asked == ["Model", "Goal", "Model", "Goal", "Data"]
    assert "the goal lora needs the weights of a model" in capsys.readouterr().out
    assert load_config("c.yaml").model.preset == "qwen3-0.6B", "a size is for a new model"


def test_values_are_changed_and_comments_stay() -> None:
    text = "model:\n  preset: x   # a\ndata:\n  # b\n  train: y\n\ntrain:\n  output_dir: z # c\n"
    found = with_values(
        text, {"model.preset": "a b", "data.train": ["m", "n: o"], "data.seq_len": 8, "train.output_dir": "1"}
    )
    assert yaml.safe_load(found) == {
        "model": {"preset": "a b"},
        "data": {"train": ["m", "n: o"], "seq_len": 8},
        "train": {"output_dir": "1"},
    }
    assert found.count("#") == 3
    parse_config(found.replace("a b", "0.5B"), "a test", ["train.steps=1"])
