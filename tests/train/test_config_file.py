"""Loading a file, overrides, the resolved configuration, and what a resumed run may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import ConfigError, UsageError
from genesis.train.config import OPTIMIZERS, SCHEDULES, Config
from genesis.train.config_file import changes, check_resume, load_config, parse_config
from genesis.train.strict_yaml import emit
from tests.train.schema_mutations import BASE, base_config, right_values, settings

TEXT = emit(BASE)
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def with_overrides(*overrides: str) -> Config:
    return parse_config(TEXT, "c.yaml", overrides)


def test_a_file_is_loaded_and_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    assert load_config(path) == load_config(str(path)) == base_config()
    path.write_text(TEXT.replace("steps: 100", "steps: many"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.where == f"{path}:7:10"


@pytest.mark.parametrize("kind", ["missing", "folder", "below a file", "nul", "long"])
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = {"folder": str(tmp_path), "nul": "a\0b", "long": "x" * 5000}.get(kind, str(tmp_path / "c.yaml"))
    if kind == "below a file":
        Path(path).write_text(TEXT)
        path += "/c.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.exit_code == 3
    assert caught.value.where.startswith(path[:2].strip("\0"))
    assert "\0" not in str(caught.value)


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="'/dev/zero' is a device"):
        load_config("/dev/zero")


@pytest.mark.parametrize("section", ["optim", "eval", "checkpoint", "log"])
def test_a_section_whose_lines_are_comments_is_empty(section: str) -> None:
    assert parse_config(f"{TEXT}{section}:\n  # every: 3\n", "c.yaml") == base_config()


def test_overrides_reach_every_kind_of_setting() -> None:
    config = with_overrides(
        "train.steps=7",
        "optim.lr=1e-5",
        "optim.betas=[0.8, 0.9]",
        "eval.prompts=[def f, 'a: b']",
        "data.train=stdlib:",
        "checkpoint.every=null",
        "checkpoint.save_final=false",
        "log.wandb_project=on",
        "eval.every=",
    )
    assert (config.train.steps, config.optim.lr, config.optim.betas) == (7, 1e-5, (0.8, 0.9))
    assert (config.eval.prompts, config.data.train) == (["def f", "a: b"], ["stdlib:"])
    assert (config.checkpoint.every, config.checkpoint.save_final) == (None, False)
    assert (config.log.wandb_project, config.eval.every) == ("on", None)


def test_the_last_override_of_a_key_wins() -> None:
    assert with_overrides("train.steps=7", "train.steps=9").train.steps == 9


def test_an_override_makes_the_mappings_on_its_way() -> None:
    config = with_overrides("model.preset=null", "model.config.model_type=qwen3", "model.config.rope.factor=2.0")
    assert config.model.config == {"model_type": "qwen3", "rope": {"factor": 2.0}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=abc", "train.steps must be an integer"),
        ("train.steps=0", "train.steps must be an integer from 1"),
        ("train.stpes=5", "unknown key train.stpes"),
        ("trian.steps=5", "unknown key trian"),
        ("train.steps.more=5", "train.steps is not a section"),
        ("train=5", "train must be a mapping"),
        ("optim.lr=[1", "not valid YAML"),
        ("train.epochs=3", "exclude each other"),
        ("optim.momentum=0.5", "no meaning"),
        ("model.config.rope=3", "exclude each other"),
    ],
)
def test_a_wrong_override_is_named(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_overrides(override)
    assert words in caught.value.what
    assert caught.value.where == f"override: {override}"


@pytest.mark.parametrize("override", ["train.steps", "=5", "train..steps=5", ".steps=5", "train.=5", ""])
def test_what_is_no_override_is_a_wrong_command_line(override: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_overrides(override)
    assert caught.value.exit_code == 2


def test_control_characters_of_an_override_are_escaped() -> None:
    with pytest.raises(ConfigError) as caught:
        with_overrides("train.\x1b[31m=5")
    assert "\x1b" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"U\+001B"):
        with_overrides("train.output_dir=a\x1bb")


def test_the_quickstart_is_valid_and_of_the_size_it_promises() -> None:
    config = load_config(QUICKSTART)
    model = config.model.config
    assert model is not None
    hidden, head = model["hidden_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    attention = 2 * hidden * head * (heads + kv_heads)
    layer = attention + 3 * hidden * model["intermediate_size"]
    parameters = model["vocab_size"] * hidden + model["num_hidden_layers"] * layer
    assert 3.9e6 < parameters < 4.1e6
    assert (config.train.batch_size, config.data.seq_len, config.train.steps) == (8, 256, 250)
    assert config.data.train == ["stdlib:"]


def test_the_resolved_configuration_loads_back_equal() -> None:
    for config in (base_config(), load_config(QUICKSTART)):
        text = config.resolved_yaml()
        again = parse_config(text, "config.resolved.yaml")
        assert again == config
        assert again.resolved_yaml() == text


SECTIONS = {
    "optim": st.sampled_from(list(OPTIMIZERS)).map(lambda name: {"name": name}),
    "data": st.fixed_dictionaries(
        {
            "train": st.just(["x", {"path": "y", "weight": 0.1}]),
            "fields": st.fixed_dictionaries({"text": st.text("aé'\"\\:#{}[]\n\t\x1b\u2028😀 ", min_size=1)}),
        }
    ),
    "eval": st.fixed_dictionaries(
        {"prompts": st.lists(st.text(min_size=1, max_size=20).filter(lambda t: "\0" not in t))}
    ),
}


@hypothesis.settings(max_examples=15)
@given(st.fixed_dictionaries(SECTIONS), st.floats(1e-12, 1e6), st.sampled_from(list(SCHEDULES)))
def test_any_configuration_survives_being_resolved(sections: dict[str, Any], lr: float, schedule: str) -> None:
    step = {"step_size": 5} if schedule == "step" else {}
    optim = {**sections["optim"], "lr": lr, "schedule": schedule, **step}
    config = Config.model_validate({**BASE, **sections, "optim": optim})
    assert parse_config(config.resolved_yaml(), "r.yaml") == config


MAY_CHANGE = {
    "data.cache_dir",
    "train.output_dir",
    "train.steps",
    "train.epochs",
    "train.name",
    "train.zero",
    "train.early_stop",
    "optim.lr",
    *(f"{section}.{key}" for section, key in settings() if section in ("checkpoint", "eval", "log")),
}


@pytest.mark.sample(cases=30)
@pytest.mark.parametrize(("section", "key"), list(settings()), ids=[f"{s}.{k}" for s, k in settings()])
def test_a_resumed_run_may_change_what_leaves_its_past_as_it_is(section: str, key: str) -> None:
    old = base_config(section)
    part = getattr(old, section)
    before = getattr(part, key)
    others = [value for value in right_values(settings()[section, key]) if value != before]
    assert others
    for value in others:
        new = old.model_copy(update={section: part.model_copy(update={key: value})})
        found = changes(old, new)
        assert {change.key.split(".")[1] for change in found} == {key}
        if f"{section}.{key}" in MAY_CHANGE:
            check_resume(old, new)
            continue
        with pytest.raises(ConfigError, match=f"{section}.{key}.*: .* -> ") as caught:
            check_resume(old, new, where="c.yaml")
        assert (caught.value.exit_code, caught.value.where) == (3, "c.yaml")


def test_an_unchanged_configuration_resumes() -> None:
    assert changes(base_config(), base_config()) == []
    check_resume(base_config(), base_config())


def test_a_change_inside_an_inline_model_is_named_by_its_key() -> None:
    old = load_config(QUICKSTART)
    new = load_config(QUICKSTART, ["model.config.hidden_size=512", "model.config.rope_theta=10000"])
    with pytest.raises(ConfigError) as caught:
        check_resume(old, new)
    assert "model.config.hidden_size: 256 -> 512" in caught.value.what
    assert "rope_theta" not in caught.value.what


def test_the_weight_of_a_source_is_shown_as_it_is_written() -> None:
    old, new = (load_config(QUICKSTART, [f"data.train=[{{path: a, weight: {n}}}]"]) for n in (1, 2))
    shown = 'data.train: [{"path": "a", "weight": 1.0}] -> [{"path": "a", "weight": 2.0}]'
    assert [str(change) for change in changes(old, new)] == [shown]


def test_true_and_one_are_not_the_same_setting() -> None:
    old = load_config(QUICKSTART, ["model.config.flag=true"])
    assert [str(change) for change in changes(old, load_config(QUICKSTART, ["model.config.flag=1"]))] == [
        "model.config.flag: true -> 1"
    ]


def test_many_changes_are_counted() -> None:
    old = load_config(QUICKSTART)
    new = load_config(QUICKSTART, [f"model.config.k{i}=1" for i in range(30)])
    with pytest.raises(ConfigError, match="and 20 more"):
        check_resume(old, new)
