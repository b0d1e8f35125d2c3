"""Tokens that the embedding has no rows for, and weights that are NaN or infinite: what a start makes of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import genesis_models
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError, NumericError
from genesis.files.safetensors import load_file
from genesis.train.output import Output
from genesis_cli.session.export import export
from genesis_cli.session.inference import evaluate
from genesis_models.folder import EMBEDDING, HEAD
from tests.files.st_files import save_file
from tests.train.runs import checkpoints, load, make_lora, train

ROWS = 272


BOTH = pytest.mark.parametrize("recipe", [True, False], ids=["tied", "untied"], indirect=True)


@pytest.fixture
def recipe(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run on all weights of a model whose tokenizer has two tokens more than its embedding has rows."""
    path = make_lora(tmp_path)
    path.write_text(path.read_text().replace("lora: {r: 4}", ""))
    base = tmp_path / "base"
    if not getattr(request, "param", True):
        weights = load_file(base / "model.safetensors")
        save_file({**weights, HEAD: weights[EMBEDDING] + np.float32(0.5)}, base / "model.safetensors")
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    known = Tokenizer.load(base).vocab_size
    new = {f"<{number}>": number for number in range(known, ROWS + 2)}
    (base / "added_tokens.json").write_text(json.dumps(new))
    (tmp_path / "doc00.txt").write_text(f"alpha <{ROWS}> beta <{ROWS + 1}> " * 9)
    return path


def matrices(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for name, array in load_file(folder / "model.safetensors").items() if len(array) >= ROWS}


@BOTH
def test_an_embedding_grows_by_the_mean_of_its_rows(recipe: Path, tmp_path: Path) -> None:
    before = matrices(tmp_path / "base")
    model = genesis_models.load(tmp_path / "base", vocab_size=ROWS + 2)
    for name, old in before.items():
        found = model.get_parameter(name).detach().numpy()
        np.testing.assert_array_equal(found[:ROWS], old)
        np.testing.assert_allclose(found[ROWS:], [old.mean(0)] * 2, rtol=1e-5, atol=1e-7)
    assert genesis_models.load(tmp_path / "base", vocab_size=10).config.vocab_size == ROWS  # it never shrinks


@pytest.mark.sample(cases=1)
@BOTH
def test_training_grows_it_and_resumes_exactly(recipe: Path, tmp_path: Path) -> None:
    train(load(recipe, "run"))
    trained = matrices(tmp_path / "run")
    assert {array.shape for array in trained.values()} == {(ROWS + 2, 32)}
    assert trained.keys() == matrices(tmp_path / "base").keys()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["vocab_size"] == ROWS + 2
    mean = matrices(tmp_path / "base")[EMBEDDING].mean(0)
    assert np.abs(trained[EMBEDDING][ROWS:] - mean).min(-1).max() > 1e-4  # both rows were trained
    expected = checkpoints(tmp_path / "run")[6]
    train(load(recipe, "run"), resume_from="checkpoint-4")
    assert checkpoints(tmp_path / "run")[6] == expected
    evaluate(str(tmp_path / "run"), [str(tmp_path / "doc00.txt")], seq_len=32, batch_size=1, device="cpu", dtype="fp32")
    # The next run finds all rows there.
    train(load(recipe, "next", f"model.path={tmp_path / 'run'}", "train.steps=1"))
    assert matrices(tmp_path / "next")[EMBEDDING].shape == (ROWS + 2, 32)


def test_an_export_has_a_row_for_each_token(recipe: Path, tmp_path: Path) -> None:
    target = export(
        str(tmp_path / "base"), merge=False, dtype=None, out=str(tmp_path / "out"), check=True, base=None,
        console=Output(None),
    )  # fmt: skip
    assert {array.shape for array in matrices(target).values()} == {(ROWS + 2, 32)}
    assert Tokenizer.load(target).vocab_size == genesis_models.load(target).config.vocab_size == ROWS + 2
    model = genesis_models.load(tmp_path / "base")
    with pytest.raises(ModelError, match=f"{EMBEDDING} has 272 rows.*274 ids.*vocab_size=274"):
        genesis_models.save(model, tmp_path / "saved", tokenizer=tmp_path / "base")


def test_where_nothing_grows_a_new_token_is_refused_by_name(recipe: Path, tmp_path: Path) -> None:
    lora = load(recipe, "adapter", "lora.r=2")
    with pytest.raises(ModelError, match=f"'<{ROWS + 1}>' with id {ROWS + 1}.*remove lora") as caught:
        train(lora)
    assert caught.value.exit_code == 5
    base, text = str(tmp_path / "base"), str(tmp_path / "doc00.txt")
    with pytest.raises(ModelError, match=f"'<{ROWS + 1}>' with id") as caught:
        evaluate(base, [text], seq_len=32, batch_size=1, device="cpu", dtype="fp32")
    assert caught.value.where == "--data"
    model = genesis_models.load(base)
    assert model.generate("alpha", max_tokens=2).ids
    with pytest.raises(ModelError, match=f"token id {ROWS}, but the model's vocabulary has {ROWS}"):
        model.generate(f"alpha <{ROWS}>", max_tokens=2)
    # Data without them is learned, and the adapter merged has their rows.
    (tmp_path / "doc00.txt").write_text("alpha beta gamma. " * 9)
    train(lora)
    merged = export(
        str(tmp_path / "adapter"), merge=True, dtype=None, out=str(tmp_path / "merged"), check=True, base=None,
        console=Output(None),
    )  # fmt: skip
    assert matrices(merged)[EMBEDDING].shape == (ROWS + 2, 32)


@pytest.mark.parametrize(("value", "overrides"), [(np.nan, ()), (np.inf, ("lora.r=2",))], ids=["whole", "adapter"])
def test_training_from_weights_that_are_no_numbers_names_the_tensor(
    tmp_path: Path, value: float, overrides: tuple[str, ...]
) -> None:
    path, name = make_lora(tmp_path), "model.layers.0.mlp.up_proj.weight"
    path.write_text(path.read_text().replace("lora: {r: 4}", ""))
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights[name][3, 2] = value
    save_file(weights, tmp_path / "base" / "model.safetensors")
    with pytest.raises(NumericError, match=rf"1 \('{name}'\)") as caught:
        train(load(path, "run", *overrides))
    assert caught.value.exit_code == 9
    assert caught.value.where == str(tmp_path / "base")
    assert not checkpoints(tmp_path / "run")
