"""Every setting of the schema against wrong and right values; rules between settings; what is filled in."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

import pytest
from pydantic import ValidationError

from genesis.errors import ConfigError
from genesis.train.config import OPTIMIZERS, SCHEDULES, Config, WeightedSource, fine_tuning_defaults, json_schema
from genesis.train.config_file import parse_config
from genesis.train.config_help import OTHER_NAMES
from genesis.train.strict_yaml import emit
from tests.train.schema_mutations import (
    BASE,
    base_config,
    check_refused,
    right_values,
    settings,
    text_with,
    wrong_values,
)

SETTINGS = settings()
NAMES = [f"{section}.{key}" for section, key in SETTINGS]
SECTIONS = ["model", "data", "train", "optim", "lora", "objective", "eval", "checkpoint", "log"]


def merged(**sections: dict[str, Any]) -> str:
    data = {section: {**BASE.get(section, {}), **sections.get(section, {})} for section in SECTIONS}
    return emit({section: keys for section, keys in data.items() if keys})


def refused(**sections: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(merged(**sections), "c.yaml")
    return caught.value


def test_schema_has_the_sections_of_the_conventions() -> None:
    assert list(json_schema()["properties"]) == SECTIONS
    assert len(SETTINGS) > 50


@pytest.mark.parametrize("setting", list(SETTINGS), ids=NAMES)
def test_wrong_values_are_refused_where_they_stand(setting: tuple[str, str], request: pytest.FixtureRequest) -> None:
    """A fifth of them for each setting; with --full all."""
    section, key = setting
    values = list(wrong_values(SETTINGS[setting]))
    assert len(values) >= 5
    if not request.config.getoption("--full"):
        values = values[len(key) % 5 :: 5]
    for value in values:
        check_refused(*text_with(section, key, value), name=f"{section}.{key}")


def test_the_refusal_check_fails_on_what_is_accepted() -> None:
    text, place = text_with("train", "steps", 7)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_refused(text, place, "train.steps")


@pytest.mark.parametrize(("line", "name"), [(1, "train.steps"), (0, "train.seed")])
def test_the_refusal_check_fails_on_the_wrong_place_or_name(line: int, name: str) -> None:
    text, place = text_with("train", "steps", "abc")
    number, _, column = place.partition(":")
    with pytest.raises(AssertionError):
        check_refused(text, f"{int(number) + line}:{column}", name)


@pytest.mark.parametrize("setting", list(SETTINGS), ids=NAMES)
def test_right_values_raise_no_complaint_about_type_or_bounds(setting: tuple[str, str]) -> None:
    section, key = setting
    for value in right_values(SETTINGS[setting]):
        data = base_config(section).model_dump()
        data[section][key] = value
        # A rule between settings may object, for the base holds other ones; a bound or a type must not.
        assert complaints(data) <= {"genesis_rule"}, value


def complaints(data: dict[str, Any]) -> set[str]:
    try:
        Config.model_validate(data)
    except ValidationError as error:
        return {detail["type"] for detail in error.errors()}
    return set()


def test_complaints_sees_a_value_out_of_bounds() -> None:
    data = base_config().model_dump()
    data["train"]["steps"] = 0
    assert complaints(data) == {"greater_than_equal"}


@pytest.mark.sample(cases=30)
@pytest.mark.parametrize("setting", list(SETTINGS), ids=NAMES)
def test_a_misspelled_key_is_named_with_the_right_one(setting: tuple[str, str]) -> None:
    section, key = setting
    swapped = key[1:2] + key[0] + key[2:]
    for wrong in {key + "x", key.replace("_", "-") if "_" in key else key.upper(), swapped} - {key}:
        data = base_config(section).model_dump()
        data[section] = {wrong: data[section].pop(key), **data[section]}
        lines = emit(data).split("\n")
        with pytest.raises(ConfigError) as caught:
            parse_config("\n".join(lines), "c.yaml")
        assert caught.value.what == f"unknown key {section}.{wrong}"
        assert caught.value.where == f"c.yaml:{lines.index(f'{section}:') + 2}:3"
        assert f"did you mean {section}.{key}?" in caught.value.next.split("\n")[0]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_misspelled_section_is_named_with_the_right_one(section: str) -> None:
    data = base_config(section).model_dump()
    data[section + "s"] = data.pop(section)
    with pytest.raises(ConfigError, match=f"did you mean {section}?") as caught:
        parse_config(emit(data), "c.yaml")
    assert caught.value.what == f"unknown key {section}s"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.learning_rate", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("per_device_train_batch_size", "train.batch_size"),
        ("steps", "train.steps"),
        ("eval_every", "eval.every"),
        ("train_name", "train.name"),
        ("checkpoint_every", "checkpoint.every"),
        ("train.weight_decay", "optim.weight_decay"),
        ("data.enable_thinking", "data.template_args"),
        ("lora.rank", "lora.r"),
        ("optim.beta", "optim.betas"),
        ("micro_batch_size", "train.batch_size"),
        ("data.dataset_text_field", "data.fields.text"),
    ],
)
def test_a_key_of_another_section_or_trainer_is_found(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}") as caught:
        parse_config(merged(), "c.yaml", [f"{key}=1"])
    assert caught.value.where == f"override: {key}=1"


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("load_in_4bit", "8 bits"),
        ("bnb_4bit_quant_type", "8 bits"),
        ("train.push_to_hub", "genesis export"),
        ("packing", "packed"),
        ("train.sample-packing", "packed"),
        ("fsdp", "--nproc"),
        ("train.deepspeed", "train.zero"),
        ("gradient_checkpointing_kwargs.use_reentrant", "train.activation_checkpointing"),
        ("group_by_length", "packed"),
        ("optim.neftune_noise_alpha", "no such terms"),
        ("data.dataloader_num_workers", "data.cache_dir"),
        ("model.trust_remote_code", "never run"),
        ("fp16", "model.dtype"),
        ("flash_attention", "fused"),
        ("resume_from_checkpoint", "--resume"),
    ],
)
def test_a_key_of_another_trainer_without_a_counterpart_is_not_supported(key: str, named: str) -> None:
    with pytest.raises(ConfigError, match="not supported") as caught:
        parse_config(merged(), "c.yaml", [f"{key}=1"])
    assert named in caught.value.next and caught.value.where == f"override: {key}=1"
    assert key.partition(".")[0] in caught.value.what


def test_names_of_other_trainers_are_none_of_ours() -> None:
    ours = {name for setting in SETTINGS for name in setting} | {"text"}
    for other, meaning in OTHER_NAMES.items():
        assert not fnmatch.filter(ours, other), other
        section, _, key = meaning.removesuffix(".text").partition(".")
        assert " " in meaning or (section, key) in SETTINGS, meaning


def test_a_key_like_no_other_gets_the_list() -> None:
    error = refused(log={"zzzz": 1})
    assert (error.what, error.next) == (
        "unknown key log.zzzz",
        "the keys of log are every, tensorboard, wandb, wandb_project",
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(merged() + "rag: {r: 8}\n", "c.yaml")
    assert caught.value.what == "unknown key rag"
    assert caught.value.next == "the keys of the file are " + ", ".join(SECTIONS)


@pytest.mark.parametrize(
    ("section", "key", "value", "remedy"),
    [
        ("optim", "nesterov", "on", "write true"),
        ("checkpoint", "save_final", "No", "write false"),
        ("train", "batch_size", "1_000", "write 1000"),
        ("train", "seed", "007", "write 7"),
        ("train", "steps", 1e3, "write 1000"),
        ("train", "steps", "12:30", "write a plain number"),
        ("optim", "lr", "3e-4 ", "write 3e-4"),
        ("optim", "schedule", "cosin", "did you mean cosine?"),
        ("model", "dtype", "bf15", "did you mean bf16?"),
        ("model", "path", 5, 'quote it: "5"'),
        ("data", "fields", {"text": True}, 'quote it: "true"'),
        ("eval", "prompts", "def f", 'write a list: ["def f"]'),
        ("eval", "prompts", "Dear Sir, I", 'write a list: ["Dear Sir, I"]'),
        ("optim", "betas", "0.9,0.99", "write a list: [0.9, 0.99]"),
        ("optim", "betas", [0.9, 1.0], "Decay rates of the running averages, each below 1."),
        ("optim", "betas", 0.9, "write a list: [0.9, 0.95]"),
        ("optim", "momentum", 1.0, "Momentum, below 1."),
        ("lora", "target_modules", [], "Layers that get an adapter"),
    ],
)
def test_a_wrong_value_comes_with_what_to_write(section: str, key: str, value: Any, remedy: str) -> None:
    text, place = text_with(section, key, value)
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml")
    assert caught.value.where == f"c.yaml:{place}"
    assert caught.value.next.startswith(remedy)


@pytest.mark.parametrize(
    ("sections", "where", "words"),
    [
        ({"model": {"path": "m"}}, "model.preset", "exclude each other"),
        ({"model": {"preset": None}}, "model", "model"),
        ({"model": {"preset": None, "config": {"hidden_size": 8}}}, "model.config", "no model_type"),
        ({"train": {"epochs": 2}}, "train.epochs", "exclude each other"),
        ({"train": {"steps": None}}, "train", "length of the run"),
        ({"data": {"eval": "e.txt", "eval_fraction": 0.1}}, "data.eval_fraction", "exclude each other"),
        ({"data": {"tokenizer": "t", "vocab_size": 400}}, "data.vocab_size", "finished one"),
        ({"model": {"preset": None, "path": "m"}, "data": {"vocab_size": 400}}, "data.vocab_size", "has its own"),
        ({"optim": {"momentum": 0.9}}, "optim.momentum", "no meaning for the optimizer adamw"),
        ({"optim": {"decay_ratio": 0.9}}, "optim.decay_ratio", "no meaning for the schedule cosine"),
        ({"optim": {"name": "sgd", "betas": [0.9, 0.9]}}, "optim.betas", "no meaning for the optimizer sgd"),
        ({"optim": {"warmup_steps": 3, "warmup_ratio": 0.1}}, "optim.warmup_ratio", "exclude each other"),
        ({"optim": {"name": "sgd", "momentum": 0.0, "nesterov": True}}, "optim.nesterov", "needs a momentum"),
        ({"optim": {"schedule": "step"}}, "optim.schedule", "needs optim.step_size"),
        ({"optim": {"schedule": "wsd", "warmup_ratio": 0.5, "decay_ratio": 0.6}}, "optim.decay_ratio", "more than"),
        ({"data": {"eval_fraction": 0}, "eval": {"every": 5}}, "eval.every", "data.eval_fraction is 0"),
        ({"checkpoint": {"best": True}}, "checkpoint.best", "only evaluation is at the end"),
        ({"train": {"early_stop": 2}}, "train.early_stop", "only evaluation is at the end"),
        (
            {"data": {"eval_fraction": 0}, "eval": {"every": 5, "prompts": ["a"]}, "checkpoint": {"best": True}},
            "checkpoint.best",
            "nothing is held out",
        ),
        (
            {"data": {"eval_fraction": 0}, "eval": {"every": 5, "prompts": ["a"]}, "train": {"early_stop": 2}},
            "train.early_stop",
            "nothing is held out",
        ),
        ({"lora": {"r": 4}}, "lora", "model.path is not set"),
        (
            {"model": {"preset": None, "path": "m"}, "lora": {"r": 4}, "train": {"precision": "fp8"}},
            "train.precision",
            "fp8",
        ),
        ({"train": {"exact": True, "precision": "fp8"}}, "train.precision", "excludes 8-bit"),
        ({"train": {"exact": True}, "objective": {"name": "simpo"}}, "train.exact", "a sample of simpo holds two"),
        ({"train": {"exact": True}, "model": {"dtype": "float32"}}, "model.dtype", "bfloat16, not in float32"),
        (
            {"model": {"preset": None, "path": "m"}, "lora": {"r": 4, "use_dora": True}, "train": {"exact": True}},
            "lora.use_dora",
            "sampling does not have",
        ),
        ({"data": {"template_args": {"enable-thinking": True}}}, "data.template_args", "enable-thinking"),
    ],
)
def test_rules_between_settings(sections: dict[str, Any], where: str, words: str) -> None:
    text = merged(**sections)
    error = refused(**sections)
    section, _, key = where.partition(".")
    lines = text.split("\n")
    number = lines.index(f"{section}:")
    if key:
        number = next(n for n, line in enumerate(lines) if n > number and line.startswith(f"  {key}:"))
    assert error.where == f"c.yaml:{number + 1}:{3 if key else 1}"
    assert words in error.what
    assert error.next


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [("vocab_size", 5000, "vocab_size 4096"), ("seq_len", 600, "max_position_embeddings 512")],
)
def test_the_data_fits_an_inline_model(key: str, value: int, limit: str) -> None:
    model = {"model_type": "qwen3", "vocab_size": 4096, "max_position_embeddings": 512}
    fine = {"vocab_size": 4096, "seq_len": 512}
    parse_config(merged(model={"preset": None, "config": model}, data=fine), "c.yaml")
    error = refused(model={"preset": None, "config": model}, data={**fine, key: value})
    assert limit in error.what


def test_a_missing_setting_is_named_with_its_meaning() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("model: {preset: 0.5B}\ndata: {}\ntrain: {output_dir: x, steps: 1}\n", "c.yaml")
    assert caught.value.what == "data.train is missing"
    assert caught.value.where == "c.yaml:2:1"
    assert "Training data" in caught.value.next


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    error = refused(data={"seq_len": 1}, train={"steps": 0}, log={"evry": 5})
    assert error.what.startswith("data.seq_len must be an integer from 2 to 1048576, not 1")
    also = error.next.split("\n")[1:]
    assert ["train.steps" in also[0], "log.evry" in also[1], len(also)] == [True, True, 2]


FINISHED = {"model": {"preset": None, "path": "m"}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"lr": 1e-5, "warmup_ratio": 0.03, "weight_decay": 0.1}),
        ({"lora": {"r": 4}}, {"lr": 2e-4, "warmup_ratio": 0.03, "weight_decay": 0.0}),
        ({"optim": {"name": "lion"}}, {"lr": 3.3e-6, "warmup_ratio": 0.03, "weight_decay": 0.1}),
        ({"optim": {"warmup_steps": 0}}, {"lr": 1e-5, "warmup_ratio": None, "warmup_steps": 0}),
        ({"optim": {"schedule": "one_cycle"}}, {"lr": 1e-5, "warmup_ratio": 0.3}),
        ({"optim": {"schedule": "wsd", "decay_ratio": 0.99}}, {"warmup_ratio": 1 - 0.99}),
        ({"lora": {"r": 4}, "optim": {"lr": 1e-3, "weight_decay": 0.2}}, {"lr": 1e-3, "weight_decay": 0.2}),
    ],
)
def test_weights_that_are_trained_further_have_defaults_of_their_own(
    sections: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = parse_config(merged(**FINISHED, **sections), "c.yaml")
    assert {key: getattr(config.optim, key) for key in expected} == expected
    assert config.eval.at_start is True
    # What was filled in is known, and what was set is not among it; the record of a run sets all of it.
    given, known = sections.get("optim", {}), fine_tuning_defaults(config)
    usual = {"optim.lr", "optim.warmup_ratio", "eval.at_start"} | (
        {"optim.weight_decay"} if "lora" in sections else set()
    )
    if not given.keys() & {"schedule", "warmup_steps"}:
        assert known.keys() == usual - {f"optim.{key}" for key in given}
    again = parse_config(config.resolved_yaml(), "c.yaml")
    assert (again, fine_tuning_defaults(again)) == (config, {})


def test_a_run_from_scratch_keeps_its_defaults() -> None:
    config = parse_config(merged(), "c.yaml")
    assert (config.optim.lr, config.optim.warmup_ratio, config.eval.at_start) == (3e-4, None, False)
    assert fine_tuning_defaults(config) == {}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_gets_its_own_defaults_and_nothing_else(name: str) -> None:
    optim = parse_config(merged(optim={"name": name}), "c.yaml").optim
    for key in {key for row in OPTIMIZERS.values() for key in row}:
        assert getattr(optim, key) == OPTIMIZERS[name].get(key)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_gets_its_own_defaults_and_nothing_else(name: str) -> None:
    given = {"step_size": 10} if name == "step" else {}
    optim = parse_config(merged(optim={"schedule": name, **given}), "c.yaml").optim
    for key in {key for row in SCHEDULES.values() for key in row}:
        assert getattr(optim, key) == given.get(key, SCHEDULES[name].get(key))
    assert optim.warmup_ratio == (0.3 if name == "one_cycle" else None)


def test_held_out_data_is_filled_in_only_where_it_is_used() -> None:
    assert parse_config(merged(), "c.yaml").data.eval_fraction == 0.05
    data = parse_config(merged(data={"eval": "e.txt"}), "c.yaml").data
    assert (data.eval, data.eval_fraction) == (["e.txt"], None)


def test_one_source_may_stand_without_a_list() -> None:
    assert parse_config(merged(data={"train": "stdlib:"}), "c.yaml").data.train == ["stdlib:"]


@pytest.mark.parametrize(
    "path,message", [("~nobody-of-that-name/x", "a user of that name"), ("a\\0b", "the character U.0000")]
)
def test_paths_that_no_file_can_have_are_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(merged().replace("runs/x", f'"{path}"'), "c.yaml")


def test_the_tilde_is_the_home_folder_wherever_a_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    data = {"train": ["~/a.txt", "b~", "./~c", "~/*.md"], "eval": "~/e", "tokenizer": "~/t", "cache_dir": "~"}
    config = parse_config(merged(data=data, model={"path": "~/m", "preset": None}), "c.yaml", ["train.output_dir=~/x"])
    assert config.data.train == ["/me/a.txt", "b~", "./~c", "/me/*.md"]
    assert (config.data.eval, config.data.tokenizer, config.data.cache_dir) == (
        ["/me/e"],
        "/me/t",
        "/me",
    )
    assert (config.train.output_dir, config.model.path) == ("/me/x", "/me/m")
    assert parse_config(config.resolved_yaml(), "resolved.yaml") == config


def test_environment_variables_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "planted-secret")
    config = parse_config(merged(train={"output_dir": "runs/$CANARY/${CANARY}"}), "c.yaml", ["data.train=$CANARY"])
    assert (config.train.output_dir, config.data.train) == ("runs/$CANARY/${CANARY}", ["$CANARY"])
    assert "planted-secret" not in config.resolved_yaml()


def test_the_schema_is_json_and_describes_every_setting() -> None:
    schema = json.loads(json.dumps(json_schema(), allow_nan=False))
    for definition in schema["$defs"].values():
        assert definition["additionalProperties"] is False
        for key, fragment in definition["properties"].items():
            assert len(fragment.get("description", "")) > 10, key
            ranged = [one for one in fragment.get("anyOf", [fragment]) if one.get("type") in ("integer", "number")]
            for one in ranged:
                assert ("maximum" in one) != ("exclusiveMaximum" in one), key
                assert ("minimum" in one) != ("exclusiveMinimum" in one), key


def test_settings_cannot_be_changed_once_made() -> None:
    with pytest.raises(ValidationError):
        base_config().train.steps = 5  # type: ignore[misc]


SOURCES = "model: {preset: 0.5B}\ntrain: {output_dir: x, steps: 3}\ndata:\n  train: "


@pytest.mark.parametrize(
    ("value", "what", "next"),
    [
        ("[{path: b, weight: 0}]", "data.train[0].weight must be a number above 0 and at most 1000", "How often"),
        ("[a, {path: b, weight: 1001}]", "data.train[1].weight must be a number above 0 and at most 1000", "How often"),
        ("[a, {path: b, wieght: 2}]", "unknown key data.train[1].wieght", "did you mean data.train[1].weight?"),
        ("[{weight: 2}]", "data.train[0].path is missing", "add it: A file, a folder"),
        ("[3]", "data.train[0] must be a string of 1 to 4096 characters or a mapping", 'quote it: "3"'),
        ("{path: b}", "data.train must be a string of 1 to 4096 characters or a list", "Training data"),
        ("a\n  eval: [{path: b}]", "data.eval[0] must be a string", "Held-out sources"),
        ("a\n  eval: {m: [{path: b}]}", "data.eval.m[0] must be a string", "Held-out sources"),
        ("a\n  eval: {m: []}", "data.eval.m must be a string of 1 to 4096 characters or a list", "Held-out sources"),
        ("a\n  eval: {}", "data.eval must be a string of 1 to 4096 characters or a list", "Held-out sources"),
        ("a\n  eval: {m/n: b}", "data.eval has 'm/n', which cannot name a set", "use at most 64 letters"),
        ("a\n  fields: {rol: from}", "unknown key data.fields.rol", "did you mean data.fields.role?"),
        ("a\n  fields: {role: 3}", "data.fields.role must be a string", 'quote it: "3"'),
        ("a\n  text_field: body", "unknown key data.text_field", "did you mean data.fields.text?"),
    ],
)
def test_a_wrong_source_or_field_is_named_by_its_path(value: str, what: str, next: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(SOURCES + value + "\n", "c.yaml")
    assert caught.value.what.startswith(what)
    assert caught.value.next.startswith(next)
    assert caught.value.where.startswith("c.yaml:")


def test_a_name_stands_for_the_folder_of_the_run() -> None:
    text = "model: {preset: 0.5B}\ndata: {train: a}\ntrain: {steps: 3, "
    assert parse_config(text + "name: chats-2}\n", "c.yaml").train.output_dir == "runs/chats-2"
    named = parse_config(text + "name: chats-2, output_dir: x}\n", "c.yaml")
    assert (named.train.name, named.train.output_dir) == ("chats-2", "x")
    assert parse_config(named.resolved_yaml(), "r.yaml") == named
    for wrong, where in (
        ("name: ../up", "train.name"),
        ("name: a/b", "train.name"),
        ("name: null", "train.output_dir"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(text + wrong + "}\n", "c.yaml")
        assert caught.value.exit_code == 3 and caught.value.what.startswith(where)


def test_weighted_sources_are_set_in_the_file_or_on_the_command_line() -> None:
    config = parse_config(SOURCES + "[a, {path: b, weight: 2}, {path: c}]\n", "c.yaml")
    assert config.data.train == ["a", WeightedSource(path="b", weight=2.0), WeightedSource(path="c")]
    assert parse_config(config.resolved_yaml(), "r.yaml") == config
    override = ["data.train=[{path: b, weight: 0.5}]", "data.fields.messages=conv", "data.format=messages"]
    again = parse_config(SOURCES + "a\n", "c.yaml", override)
    assert again.data.train == [WeightedSource(path="b", weight=0.5)]
    assert (again.data.fields, again.data.format) == ({"messages": "conv"}, "messages")


def test_a_wrong_value_of_a_name_that_the_user_chose_is_told_its_bounds() -> None:
    error = refused(optim={"lr_factors": {"*.bias": 0.0}})
    assert error.what == "optim.lr_factors.*.bias must be a number above 0 and at most 1000, not 0.0"
    assert error.next.startswith("Learning rates of some parameters")


@pytest.mark.parametrize(("value", "advice"), [(3.0, "write 3"), (2.5, ""), (float(2**53), "")])
def test_a_number_with_a_point_is_advice_only_where_it_is_whole(value: float, advice: str) -> None:
    from genesis.train.config_help import _remedy

    assert _remedy({"type": "integer"}, value) == advice


def test_warm_up_and_decay_do_not_overlap() -> None:
    from genesis.train.config import OptimConfig

    OptimConfig(schedule="wsd", warmup_ratio=0.5, decay_ratio=0.5)
    for more in ({"decay_ratio": 0.6}, {"warmup_ratio": 0.9}):  # the schedule's own decay is a fifth of the run
        with pytest.raises(ValueError, match="add up to more than the run"):
            OptimConfig(**{"schedule": "wsd", "warmup_ratio": 0.5, **more})
