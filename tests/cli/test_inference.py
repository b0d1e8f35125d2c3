"""`generate` and `eval`: what is wrong with a folder ends in its exit code, in the words of the command's options."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis_models
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import GenesisError, ModelError, NumericError, OutOfMemoryError, UsageError
from genesis.files.safetensors import load_file
from genesis.train.config import setting_names
from genesis_cli.session import evaluate, generate, inference
from genesis_cli.session.phrases import phrased_for
from genesis_models import Sampling
from genesis_models.engine import choose
from tests.cli.command import printed
from tests.files.st_files import save_file
from tests.models.golden import FIXTURES
from tests.packaging.tree import repository_files
from tests.train.runs import ROOT

SETTINGS = setting_names()
SETTING = re.compile(rf"(?<![\w./])({'|'.join(map(re.escape, SETTINGS))})(?![\w/])")
PYTHON = re.compile(r"\bNone\b|\bTrue\b|<class|Path\(|dict_keys|Decimal\(|\{'")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
    genesis_models.save(genesis_models.load(FIXTURES / "qwen3-tied"), folder, tokenizer=tokenizer)
    (folder.parent / "text.txt").write_text("words to learn\n" * 20)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def generated(folder: Path | str, prompt: str = "words", **changed: Any) -> str:
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
    return "".join(generate(str(folder), prompt, **options | {"device": "cpu", "dtype": "auto"} | changed))


def measured(folder: Path | str, *sources: str, **changed: Any) -> dict[str, float | int]:
    options: dict[str, Any] = {"seq_len": None, "batch_size": 2, "device": "cpu", "dtype": "auto"}
    return evaluate(str(folder), [*sources] or [str(ROOT / "LICENSE")], **options | changed)


def plant(folder: Path, name: str, value: float) -> None:
    arrays = load_file(folder / "model.safetensors")
    arrays[name].reshape(-1)[-1] = value
    save_file(arrays, folder / "model.safetensors")


def test_both_take_short_names_of_types(made: Path) -> None:
    assert generated(made, dtype="fp32") == generated(made)
    assert measured(made, str(made.parent / "text.txt"), dtype="bf16")["eval/num_tokens"] > 0


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_weights_in_8_bits(made: Path, kind: str) -> None:
    """They are those of the folder but for their rounding; none are exported."""
    text = str(made.parent / "text.txt")
    plain, found = (measured(made, text, dtype=each)["eval/perplexity"] for each in ("auto", kind))
    assert found != plain and found == pytest.approx(plain, rel=0.01)
    assert generated(made, dtype=kind, max_tokens=8)
    code, _, told = printed("export", made, "--dtype", kind)
    assert code == 2 and f'not "{kind}"' in told


@pytest.mark.parametrize("command", [generated, measured])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_named(folder: Path, command: Callable[[Path], Any], value: float) -> None:
    plant(folder, "model.embed_tokens.weight", value)  # its last row, which no text reaches
    plant(folder, "model.layers.1.mlp.up_proj.weight", value)
    with pytest.raises(NumericError) as caught:
        command(folder)
    names = "'model.embed_tokens.weight', 'model.layers.1.mlp.up_proj.weight'"
    assert caught.value.what == f"weights are NaN or infinite in tensors: 2 ({names})"
    assert caught.value.exit_code == 9


def test_weights_beyond_float16_say_what_holds_them(folder: Path) -> None:
    plant(folder, "model.norm.weight", 1e6)
    with np.errstate(over="ignore"), pytest.raises(NumericError) as caught:
        generated(folder, dtype="fp16")
    assert caught.value.next == "load them as float32 or bfloat16: float16 only reaches 65,504"


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_logits_that_are_no_numbers(value: float) -> None:
    with pytest.raises(NumericError, match=r"logits are (NaN|infinite)"):
        choose(np.array([0.0, value]), Sampling(0.0), 3)


@pytest.mark.parametrize("command", [generated, measured])
def test_a_tokenizer_of_another_model(made: Path, tmp_path: Path, command: Callable[[Path], Any]) -> None:
    raw = {**genesis_models.load(made).config.raw, "vocab_size": 260}
    genesis_models.save(genesis_models.build(raw), tmp_path / "small", source=made)
    with pytest.raises(ModelError) as caught:
        command(tmp_path / "small")
    assert caught.value.what == "the tokenizer has 262 ids, but the embedding has 260 rows"


def test_a_bad_tokenizer_is_said_before_bad_weights(folder: Path) -> None:
    """Both are read at the same time."""
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(GenesisError) as found:
        generated(folder)
    assert "model.safetensors" in str(found.value)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(GenesisError, match="not JSON") as found:
        generated(folder)
    assert "tokenizer.json" in (found.value.where or "")


@pytest.mark.full
def test_conversations_are_measured_by_the_folders_template(folder: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    said = ["words", "more words to learn"]
    turns = [[{"role": "user", "content": "words?"}, {"role": "assistant", "content": text}] for text in said]
    turns.append([{"role": "user", "content": "words?" * 99}, turns[0][1]])
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    with pytest.raises(ModelError, match="no chat template") as caught:
        measured(folder, str(chats))
    assert "--template=chatml" in str(caught.value.next)
    turn, asked = "{{ m.role }}: {{ m.content }}<|endoftext|>", "{{ 'assistant: ' * add_generation_prompt }}"
    (folder / "chat_template.jinja").write_text(f"{{% for m in messages %}}{turn}{{% endfor %}}{asked}")
    found = measured(folder, str(chats), seq_len=64)
    ids = [Tokenizer.load(folder).encode(text) for text in said]
    assert found["eval/num_tokens"] == sum(len(each) + 1 for each in ids)
    bits = found["eval/loss"] / math.log(2) * found["eval/num_tokens"]
    assert found["eval/bits_per_byte"] == pytest.approx(bits / sum(map(len, said)))
    assert "eval/gzip_bits_per_byte" not in found and "eval/gzip_bits_per_byte" in measured(folder)


@pytest.mark.parametrize("wrong", [320, -1])
def test_ids_beyond_the_vocabulary(made: Path, wrong: int) -> None:
    model = genesis_models.load(made)
    with pytest.raises(ModelError, match=rf"the token id {wrong}, but the model's vocabulary has 320"):
        model.generate([5, wrong], max_tokens=1)


def test_the_folder_is_looked_at_before_its_tokenizer(tmp_path: Path) -> None:
    for command in (generated, measured):
        with pytest.raises(ModelError, match=r"has no config\.json"):
            command(tmp_path)


def test_errors_speak_of_options_and_of_no_setting(folder: Path, tmp_path: Path) -> None:
    empty, bad = tmp_path / "empty.txt", tmp_path / "bad.jsonl"
    empty.write_text("")
    bad.write_text('{"words": 1}\n')
    binary = tmp_path / "nul.txt"
    binary.write_bytes(b"a\0b" * 100)
    long = tmp_path / "long.jsonl"
    long.write_text('{"text": "' + "x" * (17 << 20) + '"}\n')
    calls: list[Callable[[], Any]] = [
        *(lambda source=source: measured(folder, str(source)) for source in (empty, bad, binary, long)),
        *(lambda source=source: measured(folder, source) for source in ("nowhere", str(tmp_path / "*.none"), "")),
        lambda: measured(folder, seq_len=10_000),
        lambda: measured(folder, device="cuda:99"),
        lambda: generated(folder, device="cuda:99"),
        lambda: generated(folder, "words " * 2000),
        lambda: generated(folder, dtype="int4"),
        lambda: generated("no/where"),
        lambda: generated(""),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(GenesisError) as caught:
            call()
        error = caught.value
        text = " | ".join((error.what, error.where, error.next))
        assert not SETTING.search(text), (number, text)
        assert not PYTHON.search(text), (number, text)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError) as found:
        generated(folder)
    assert "tokenizer.json" in str(found.value)
    assert not SETTING.search(str(found.value))


@pytest.mark.parametrize("error", [MemoryError("x"), OutOfMemoryError("no room", next=OutOfMemoryError.ADVICE)])
def test_running_out_of_memory_names_options(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def full(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(inference, "load_source", full)
    for command, option in ((generated, "--max-tokens"), (measured, "--batch-size")):
        with pytest.raises(OutOfMemoryError) as caught:
            command(folder)
        assert option in caught.value.next
        assert caught.value.exit_code == 7


def test_settings_become_options_and_advice_about_others_goes() -> None:
    error = UsageError(
        "data.seq_len 9 of data/train.txt and data.train.json",
        where="data.train, data.eval",
        next="lower data.seq_len, set optim.name (lr, or so), or skip them with data.on_error=skip; check data.eval",
    )
    options = {"data.seq_len": "--seq-len", "data.train": "--data", "data.eval": "--data"}
    with pytest.raises(UsageError) as caught, phrased_for(options, memory=""):
        raise error
    assert caught.value.what == "--seq-len 9 of data/train.txt and data.train.json"
    assert (caught.value.where, caught.value.next) == ("--data", "lower --seq-len; check --data")
    assert str(caught.value) == f"{error.what} | --data | {error.next}"


def test_nothing_below_a_run_names_a_setting_of_one() -> None:
    below = ("array.py", "autograd", "backend", "cuda", "functions", "io", "kernels", "nn", "ops", "optim", "random.py")
    files = [f for f in repository_files(*[f"genesis/{name}" for name in below]) if f.suffix == ".py"]
    files += [f for f in repository_files("models") if f.suffix == ".py" and f.parent.name == "models"]
    assert len(files) > 100
    found = {
        (str(file.relative_to(ROOT)), node.value)
        for file in files
        if SETTING.search(text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SETTING.search(node.value)
    }
    assert found == set()
