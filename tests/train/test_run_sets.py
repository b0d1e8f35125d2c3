"""Named sets of held-out data in runs: each is measured as if it were alone, and `eval/loss` is over all of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from genesis.errors import ConfigError, DataError
from genesis.train.report.page import page_of
from genesis.train.report.runs import read_run
from genesis_cli import session
from tests.train.runs import Forks, checkpoints, load, make, rows, train

pytestmark = pytest.mark.xdist_group("runs in forks")
SETTINGS = ("data.eval_fraction=null", "eval.every=2", "eval.max_batches=null", "train.steps=4", "eval.prompts=[]")
BEST = ("checkpoint.best=true", "checkpoint.every=null")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and two sets beside it, of which one is three times as large."""
    folder = tmp_path_factory.mktemp("corpus")
    recipe = make(folder)
    for name, text in (("short", "zeta eta theta.\n"), ("long", "mu lambda kappa iota alpha beta gamma delta. " * 20)):
        (folder / f"{name}.txt").write_text(text)
    return recipe


def sets_of(recipe: Path) -> str:
    return f"data.eval={{short: {recipe.parent}/short.txt, long: ['{recipe.parent}/long.txt']}}"


def evaluations(output: Path) -> list[dict[str, float]]:
    return [row for row in rows(output) if "eval/loss" in row]


def test_each_set_is_measured_alone(recipe: Path, tmp_path: Path, forks: Forks) -> None:
    console = io.StringIO()
    train(load(recipe, str(tmp_path / "run"), *SETTINGS, *BEST, sets_of(recipe)), console=console)
    found = evaluations(tmp_path / "run")
    assert [row["train/global_step"] for row in found] == [2, 4]
    last = found[-1]
    for name in ("short", "long"):
        alone = session.evaluate(
            str(tmp_path / "run"),
            [str(recipe.parent / f"{name}.txt")],
            seq_len=32,
            batch_size=2,
            device="cpu",
            dtype="float32",
        )
        alone.pop("eval/gzip_bits_per_byte")
        in_run = {key: last[key.replace("eval/", f"eval/{name}/")] for key in alone}
        assert in_run == pytest.approx(alone, rel=1e-5)  # on another number of threads
        assert f"\n  {name}: loss {last[f'eval/{name}/loss']:.4f}" in console.getvalue()
    counts = {name: last[f"eval/{name}/num_tokens"] for name in ("short", "long")}
    assert last["eval/num_tokens"] == sum(counts.values()) and counts["long"] > 3 * counts["short"]
    for key in ("loss", "token_accuracy"):
        mean = sum(last[f"eval/{name}/{key}"] * count for name, count in counts.items()) / last["eval/num_tokens"]
        assert last[f"eval/{key}"] == pytest.approx(mean, rel=1e-12)
    words = ("train", recipe, f"train.output_dir={tmp_path / 'ranks'}", *SETTINGS, *BEST, sets_of(recipe))
    assert forks.run(*words, "--nproc", "2").code == 0
    assert evaluations(tmp_path / "ranks") == found
    assert checkpoints(tmp_path / "ranks") == checkpoints(tmp_path / "run")
    page = page_of([read_run(tmp_path / "run")])
    assert "run: eval/long/loss" in page and "run: eval/token_accuracy" in page


def test_sets_that_cannot_be_measured_are_refused(recipe: Path, tmp_path: Path) -> None:
    short = recipe.parent / "short.txt"
    with pytest.raises(DataError, match=r"is also in data\.eval\.a") as caught:
        train(load(recipe, str(tmp_path / "run"), *SETTINGS, f"data.eval={{a: {short}, b: {short}}}"))
    assert (caught.value.exit_code, caught.value.where) == (4, "data.eval.b")
    train(load(recipe, str(tmp_path / "run"), *SETTINGS, sets_of(recipe)))
    with pytest.raises(ConfigError, match=r"data\.eval\.long"):
        train(
            load(recipe, str(tmp_path / "run"), *SETTINGS, f"data.eval={{short: {short}}}", "train.steps=6"),
            resume=True,
        )
