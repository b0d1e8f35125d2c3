"""`model.generate` and `genesis.generate`: texts and ids, alone and together, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import ModelError, UsageError
from genesis.train.config import EvalConfig
from genesis_models import CausalLM, Generated, Sampling
from genesis_models.generate import MAX_TOKENS
from tests.models.continued import continue_ids
from tests.models.golden import golden

DRAWING: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
    genesis_models.save(genesis_models.load(golden("qwen3-tied").folder), folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def model(folder: Path) -> CausalLM:
    return genesis_models.load(folder)


def test_a_text_and_its_ids_give_the_same(model: CausalLM, folder: Path) -> None:
    model.train()
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.prompt("words")
    found = model.generate("words", **DRAWING)
    ends = frozenset({tokenizer.eos_id})
    assert found.ids == continue_ids(model, ids, Sampling(1.0, seed=3), 12, ends)
    assert found.text == str(found) == tokenizer.decode(found.ids)
    assert (found.finish, found.log_probs) == ("length", None)
    forms: list[Any] = [ids, tuple(ids), np.array(ids), genesis.tensor(ids), [np.int64(token) for token in ids]]
    assert all(model.generate(each, **DRAWING) == found for each in forms)
    assert genesis.generate(model, "words", **DRAWING) == genesis_models.generate(model, ids, **DRAWING) == found
    assert model.training, "what it was before"


def test_a_list_gives_a_list_and_runs_together(model: CausalLM) -> None:
    texts = ["words", "more words to learn, some more", "w"]
    greedy = [model.generate(text, max_tokens=9) for text in texts]
    assert model.generate(texts, max_tokens=9) == greedy
    assert model.generate([model.tokenizer.prompt(text) for text in texts], max_tokens=9) == greedy  # type: ignore[union-attr]
    same = model.generate(["words", "words"], **DRAWING)
    assert same[0] == model.generate("words", **DRAWING), "number 0 draws as a prompt by itself"
    assert same[0] != same[1], "each has random numbers of its own"
    assert model.generate([]) == []
    batch: Any = genesis.tensor([[1, 2, 3], [4, 5, 6]])
    assert model.generate(batch, max_tokens=2) == model.generate([[1, 2, 3], [4, 5, 6]], max_tokens=2)


def test_stops(model: CausalLM) -> None:
    whole = model.generate("words", **DRAWING)
    assert whole.text is not None
    cut = model.generate("words", stop=whole.text[4:6], **DRAWING)
    assert (cut.text, cut.finish) == (whole.text[: whole.text.index(whole.text[4:6])], "stop")
    assert cut.ids == whole.ids[: len(cut.ids)], "with those of the stop string"
    at = whole.ids.index(whole.ids[5])
    ended = model.generate("words", stop=["never there", whole.ids[5]], **DRAWING)
    assert model.generate("words", stop=[np.int64(whole.ids[5])], **DRAWING) == ended
    assert (ended.ids, ended.finish) == (whole.ids[:at], "stop")
    assert model.generate("words", max_tokens=1000).finish == "context"


def test_log_probabilities(model: CausalLM) -> None:
    found = model.generate([[1, 2, 3], [4, 5]], log_probs=True, max_tokens=4)
    for prompt, each in zip([[1, 2, 3], [4, 5]], found, strict=True):
        assert each.log_probs is not None
        with genesis.no_grad():
            logits = model(genesis.tensor([prompt + each.ids]))[0].numpy().astype(np.float64)
        chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [chances[len(prompt) - 1 + i, token] for i, token in enumerate(each.ids)]
        assert each.log_probs == pytest.approx(expected, abs=1e-5)


def test_a_model_that_was_built_takes_ids_or_is_given_a_tokenizer(folder: Path) -> None:
    model = genesis_models.build(genesis_models.load(folder).config, seed=1)
    found = model.generate([1, 2, 3], max_tokens=4)
    assert found.text is None and str(found) == str(found.ids)
    for call in (lambda: model.generate("words"), lambda: model.generate([1], stop="words")):
        with pytest.raises(UsageError, match="the model has no tokenizer") as caught:
            call()
        assert "model.tokenizer" in caught.value.next
    model.tokenizer = Tokenizer.load(folder)
    assert isinstance(model.generate("words", max_tokens=4).text, str)
    model.tokenizer = train_bpe(["some words"] * 3 + [chr(i) * 2 for i in range(300, 500)], vocab_size=400)
    with pytest.raises(ModelError, match="the tokenizer has"):
        model.generate("words")


@pytest.mark.parametrize(
    "prompt,said",
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt has no tokens"),
        (np.zeros(0, np.int64), "the prompt has no tokens"),
        (["words", ""], "the prompt is empty"),
        ([1] * 128, "the model's context holds 128"),
        ([1.5], "neither a text nor ids"),
        ([1, "a"], "neither a text nor ids"),
        ([True], "neither a text nor ids"),
        (b"words", "neither a text nor ids"),
        (None, "neither a text nor ids"),
    ],
)
def test_prompts_that_are_none(model: CausalLM, prompt: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        model.generate(prompt)
    assert caught.value.where.startswith("generate") and caught.value.next


def test_which_prompt_of_a_list_is_wrong(model: CausalLM) -> None:
    with pytest.raises(UsageError, match="the prompt is empty") as caught:
        model.generate(["words", ""])
    assert caught.value.where == "generate, prompt 1 of the list"
    with pytest.raises(ModelError, match="the token id 320") as beyond:
        model.generate([5, 320])
    assert beyond.value.where == "generate"


@pytest.mark.parametrize(
    "setting,wrong",
    [
        ("max_tokens", [-5, 0, 2.5, True, "8", None, math.nan, 1 << 40]),
        ("temperature", [-1, math.nan, math.inf, 101, True, "1", np.float32("nan"), [1.0]]),
        ("top_k", [0, -1, 1.5, True, "5", math.inf]),
        ("top_p", [0, -0.5, 1.1, math.nan, True, "1"]),
        ("min_p", [-0.1, 1.1, math.nan, False]),
        ("repetition_penalty", [0, -1, math.inf, math.nan, True]),
        ("seed", [-1, 1 << 64, 1.0, True, None, "1"]),
        ("log_probs", [1, "no", None]),
        ("special", [0, "yes"]),
        ("stop", [None, 5, 1.5, [1.5], [None], [True], b"ab", [-1], [320]]),
    ],
)
def test_settings_that_are_wrong(model: CausalLM, setting: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(UsageError, match=f"^{setting} (is|has) ") as caught:
            genesis.generate(model, "words", **{setting: value})
        assert caught.value.where == "generate" and caught.value.next.startswith("give "), value


def test_numbers_of_numpy_are_numbers(model: CausalLM) -> None:
    plain: dict[str, Any] = {"max_tokens": 9, "top_k": 20, "seed": 3}
    plain |= {"temperature": 0.5, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5, "log_probs": True}
    of_numpy = {name: np.array(value)[()] for name, value in plain.items()}
    assert all(isinstance(value, np.generic) for value in of_numpy.values())
    assert model.generate("words", **of_numpy) == model.generate("words", **plain)
    assert model.generate("words", temperature=np.float32(0.5), max_tokens=np.int32(9)).ids
    assert model.generate("words", stop=np.array([3, 4])) == model.generate("words", stop={3, 4})  # type: ignore[arg-type]


def test_what_is_no_model() -> None:
    with pytest.raises(UsageError, match="the model is 'runs/quickstart'") as caught:
        genesis.generate("runs/quickstart", "words")  # type: ignore[call-overload]
    assert "genesis_models.load" in caught.value.next


def test_its_length_is_that_of_the_command() -> None:
    assert EvalConfig.model_fields["sample_tokens"].default == MAX_TOKENS


def test_genesis_alone_loads_no_model() -> None:
    script = "import sys, genesis; assert not any(m.startswith('genesis_models') for m in sys.modules), sys.modules"
    script += "; assert genesis.generate is __import__('genesis_models').generate"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_result_cannot_be_changed(model: CausalLM) -> None:
    with pytest.raises(AttributeError):
        model.generate([1], max_tokens=1).text = "other"  # type: ignore[misc]
    assert Generated([1], "a", "stop").log_probs is None
