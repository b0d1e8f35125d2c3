"""Objectives of preferences: what a packed batch holds, the reference, figures, and runs divided in several ways."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.data.loader import Batch
from genesis.errors import DataError, InterruptedRun, ModelError, NumericError
from genesis.train import step as shards
from genesis.train.loop import Training
from genesis.train.preferences import PairObjective, Preferences
from genesis_cli.main import main
from tests.train.chats import chat
from tests.train.preferences import judged, make_judged, make_pairs, pair, plain, said, sequences, sums
from tests.train.runs import Forks, assembled, load, rows, signal_in_step, steps, train

QUIET = ("train.device=cpu", "checkpoint.every=null")
EXACT = "at step 0 the margins of all"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_pairs(tmp_path)


def printed(recipe: Path, output: str, *overrides: str) -> str:
    console = io.StringIO()
    train(load(recipe, output, *QUIET, *overrides), console=console)
    return console.getvalue()


def apart(training: Training, batch: Batch) -> list[list[float]]:
    """The log-probability of each answer of a batch, from a forward pass of its own without packing."""
    tokens, model, found = batch.tokens, training.state.model, list[list[float]]()
    assert tokens is not None
    for sample in batch.samples[:, 1].tolist():
        sides = []
        for ids, mask in sequences(tokens, sample):
            with genesis.no_grad():
                logits = model.logits(model.hidden_states(genesis.tensor(ids[None])))[0].numpy().astype(np.float64)  # type: ignore[attr-defined]
            logits -= logits.max(-1, keepdims=True)
            log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            sides.append(sum(log_probs[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t]))
        found.append(sides)
    return found


def test_a_packed_batch_has_the_log_probabilities_of_single_sequences(tmp_path: Path) -> None:
    training = assembled(load(make_pairs(tmp_path, records=plain(24)), "run", *QUIET, "lora=null"))
    objective, batch = training.state.objective, next(training.state.loader)
    assert isinstance(objective, Preferences) and len(batch.samples) >= 5 and batch.position_ids.ndim == 3
    fields = objective.fields(batch)
    first, second, is_there = objective.answers(training.state.model, [genesis.from_numpy(x) for x in fields])
    there = is_there.numpy() > 0
    found = np.stack([first.log_probs.detach().numpy()[there], second.log_probs.detach().numpy()[there]], -1)
    assert found == pytest.approx(np.array(apart(training, batch)), abs=1e-4)
    lengths = np.stack([first.lengths.numpy()[there], second.lengths.numpy()[there]], -1)
    assert lengths.sum() == batch.num_targets and objective.num_targets(batch) == len(batch.samples) == len(found)


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("how", [(), ("lora=null",), ("objective.reference=cached",), ("lora.use_dora=true",)])
def test_every_margin_is_exactly_0_before_the_first_step(recipe: Path, how: tuple[str, ...]) -> None:
    text = printed(recipe, "run", "train.threads=2", *how)
    assert EXACT in text and "warning" not in text
    found = rows(recipe.parent / "run")
    before, first, last = found[0], found[1], found[-1]
    for prefix, row in (("eval/", before), ("", first)):
        assert {row[f"{prefix}rewards/{name}"] for name in ("chosen", "rejected", "margins", "accuracies")} == {0.0}
    assert before["eval/loss"] == first["train/loss"] == pytest.approx(np.log(2))
    assert last["eval/rewards/margins"] > 0 and last["eval/rewards/accuracies"] == 1
    assert last["eval/rewards/margins"] == pytest.approx(last["eval/rewards/chosen"] - last["eval/rewards/rejected"])


@pytest.mark.full
def test_two_references_train_alike(recipe: Path) -> None:
    """With the adapters off in each step, or with log-probabilities from the batches of the first epoch."""
    how = ("train.steps=20", "optim.lr=1e-3", "data.eval_fraction=0")
    outputs = {name: printed(recipe, name, f"objective.reference={name}", *how) for name in ("adapter", "cached")}
    assert all(EXACT in text for text in outputs.values())
    one, other = (rows(recipe.parent / name) for name in outputs)
    assert [row["train/loss"] for row in one] == pytest.approx([row["train/loss"] for row in other], abs=1e-5)
    assert one[-1]["train/loss"] < 0.65


@pytest.mark.full
def test_a_continued_adapter_is_its_own_reference(recipe: Path) -> None:
    train(load(recipe, "first", *QUIET, "train.steps=6"))
    start = (f"lora={{init_from: {recipe.parent / 'first'}}}", "train.steps=4")
    assert EXACT in printed(recipe, "whole", *start)
    with signal_in_step(2), pytest.raises(InterruptedRun):
        train(load(recipe, "halted", *QUIET, *start))
    resumed = train(load(recipe, "halted", *QUIET, *start), resume=True)
    assert resumed.state_hash == train(load(recipe, "again", *QUIET, *start)).state_hash


@pytest.mark.parametrize("how", [pytest.param((), marks=pytest.mark.full), ("lora=null",)])
def test_a_resumed_run_has_the_same_state_and_rows(recipe: Path, how: tuple[str, ...]) -> None:
    how = (*how, "train.steps=6", "train.accumulation_steps=2", "eval.every=2")
    whole = train(load(recipe, "whole", *QUIET, *how))
    with signal_in_step(3), pytest.raises(InterruptedRun):
        train(load(recipe, "halted", *QUIET, *how))
    assert train(load(recipe, "halted", *QUIET, *how), resume=True).state_hash == whole.state_hash
    assert [_timeless(r) for r in rows(recipe.parent / "halted")] == [
        _timeless(r) for r in rows(recipe.parent / "whole")
    ]


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(("perf/", "memory/"))}


def test_accumulated_pairs_equal_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch of four, in two batches of two, and by two threads."""
    recipe = make_pairs(tmp_path)
    monkeypatch.setattr(shards, "MIN_SHARE_TOKENS", 1)
    found = []
    for how in (
        ("train.batch_size=4",),
        ("train.batch_size=2", "train.accumulation_steps=2"),
        ("train.batch_size=4", "train.threads=2"),
    ):
        train(load(recipe, "".join(how), *QUIET, "train.steps=3", "optim.lr=1e-3", "data.eval_fraction=0", *how))
        found.append([(row["train/loss"], row["train/grad_norm"]) for row in rows(tmp_path / "".join(how))])
    assert found[1] == [pytest.approx(row, rel=1e-4) for row in found[0]]
    assert found[2] == [pytest.approx(row, rel=1e-4) for row in found[0]]


@pytest.mark.full
def test_judged_answers(tmp_path: Path) -> None:
    recipe = make_judged(tmp_path)
    text = printed(recipe, "run", "train.steps=12", "train.threads=2", "train.batch_size=4", "optim.lr=1e-3")
    assert EXACT in text
    found = rows(tmp_path / "run")
    assert found[1]["train/loss"] == 0.5 and found[1]["kl"] == 0
    last = found[-1]
    assert last["eval/rewards/margins"] > 0.1 and last["eval/desirable"] == 0.5
    assert last["eval/rewards/margins"] == pytest.approx(last["eval/rewards/chosen"] - last["eval/rewards/rejected"])


def test_the_kl_compares_a_prompt_with_the_answer_of_the_sample_before(tmp_path: Path) -> None:
    training = assembled(load(make_judged(tmp_path), "run", *QUIET))
    tokens = training.state.loader.tokens
    assert tokens.is_good is not None and tokens.shared is not None and (tokens.shared > 0).all()
    found = [sequences(tokens, sample) for sample in range(len(tokens))]
    for sample, ((ids, mask), (other, other_mask)) in enumerate(found):
        before, before_mask = found[sample - 1][0]
        assert other[~other_mask].tolist() == ids[~mask].tolist()
        assert other[other_mask].tolist() == before[before_mask].tolist()


@pytest.mark.full
@pytest.mark.parametrize("name", ["dpo", "kto", "reward"])
def test_a_captured_step_equals_the_same_on_the_cpu(tmp_path: Path, name: str) -> None:
    """Steps that run as they are, and one that is captured and replayed."""
    make = make_judged if name == "kto" else make_pairs
    recipe = make(tmp_path, name, [{**row, "margin": 0.25} for row in plain(8)] if name == "reward" else plain(8))
    small = ("model.dtype=float32", "train.batch_size=1", "data.seq_len=36", "log.every=4", "data.eval_fraction=0")
    results = []
    for device in ("cpu", "cuda"):
        how = (f"train.device={device}", "train.accumulation_steps=2", "optim.lr=1e-3", "checkpoint.every=null")
        run = assembled(load(recipe, device, *small, *how))
        if run._on_device is None:
            step = partial(shards.take_step, run.state, max_grad_norm=1.0, device=run.device)
            found = [step(run._batches(), lr=run.lr_at(number)) for number in range(3)]
        else:
            steps(run, 3)
            assert run._on_device._following.is_captured
            found = run._on_device.reading().results()
        results.append([[each.loss_sum, each.targets, each.grad_norm, *each.figures] for each in found])
    assert results[1] == [pytest.approx(row, rel=1e-3, abs=1e-4) for row in results[0]]


def test_a_reference_that_is_not_finite(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "genesis.train.preferences.answer_log_probs", lambda model, fields: fields[4].to(dtype="float32") * np.nan
    )
    with pytest.raises(NumericError, match="log-probability of nan") as caught:
        train(load(recipe, "run", *QUIET, "lora=null"))
    assert caught.value.exit_code == 9 and "chats.jsonl" in caught.value.where


@pytest.mark.full
def test_a_damaged_cache_of_the_reference_is_computed_again(recipe: Path) -> None:
    how = (*QUIET, "lora=null", "train.steps=2", "data.eval_fraction=0")
    whole = train(load(recipe, "whole", *how))
    (path,) = recipe.parent.glob("cache/reference-*")
    values = path.read_bytes()
    for damaged in (b"", values[:-8], values[:64] + bytes([values[64] ^ 1]) + values[65:]):
        path.write_bytes(damaged)
        console = io.StringIO()
        assert train(load(recipe, f"run{len(damaged)}", *how), console=console).state_hash == whole.state_hash
        assert "computed once" in console.getvalue() and path.read_bytes() == values
    assert "found in the cache" in printed(recipe, "again", *how[2:])


@pytest.mark.parametrize("how", ["train.tf32=true", "data.train=[{{path: {}, weight: 2.5}}]"], ids=["tf32", "weights"])
def test_other_sums_or_batches_are_another_reference(how: str, recipe: Path) -> None:
    settings = "lora=null", "train.steps=1", "data.eval_fraction=0"
    assert "computed once" in printed(recipe, "run", *settings)
    assert "found in the cache" in printed(recipe, "again", *settings)
    assert "computed once" in printed(recipe, "other", *settings, how.format(recipe.parent / "chats.jsonl"))


def test_changed_data_are_refused_before_the_reference(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = (*QUIET, "lora=null", "checkpoint.every=1", "train.steps=3")
    with signal_in_step(2), pytest.raises(InterruptedRun):
        train(load(recipe, "run", *how))
    with (recipe.parent / "chats.jsonl").open("a") as file:
        file.write(json.dumps(pair("one more", "yes", "no")) + "\n")
    monkeypatch.setattr(PairObjective, "prepare", lambda *_: pytest.fail("the reference was prepared"))
    with pytest.raises(DataError, match="the data differs from the run"):
        train(load(recipe, "run", *how), resume=True)


def test_a_changed_reference_is_refused_at_a_resume(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = (*QUIET, "lora=null", "checkpoint.every=1", "train.steps=3")
    with signal_in_step(2), pytest.raises(InterruptedRun):
        train(load(recipe, "run", *how))
    prepare = PairObjective.prepare

    def changed(self: PairObjective, *rest: Any) -> Any:
        yield from prepare(self, *rest)
        self.identity = {"reference": "0" * 64}

    monkeypatch.setattr(PairObjective, "prepare", changed)
    with pytest.raises(ModelError, match="the reference is not the one") as caught:
        train(load(recipe, "run", *how), resume=True)
    assert caught.value.exit_code == 5


def test_the_preview_shows_both_sides_and_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [*sums(6), pair("equal", "yes", "yes"), pair("empty", "", "no")]
    recipe = make_pairs(tmp_path, records=records)
    assert main(["data", "preview", str(recipe), "--samples", "1"]) == 0
    text = capsys.readouterr().out
    first = text[text.index("sample 1 ") :]
    assert "a chosen answer of" in first and "a rejected one of" in first
    chosen, rejected = first.partition("rejected:")[::2]
    assert " + " in chosen and chosen.strip().endswith("<|im_end|>]]")
    assert "one two three" in rejected and rejected.strip().startswith("[[") and " + " not in rejected
    assert "1 records are skipped: equal answers; the first: " in text and "chats.jsonl:7" in text
    assert "1 records are skipped: empty answer" in text and "6 preference" in text
    assert main(["data", "preview", str(make_judged(tmp_path)), "--samples", "2"]) == 0
    text = capsys.readouterr().out
    assert "a good answer of" in text and "a bad answer of" in text


@pytest.mark.parametrize("prompt", [said("system", "Be brief.") + said("user", "2 + 2\nin words"), "2 + 2\nin words"])
def test_prompts_alone_are_shown_and_refused(prompt: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = make_pairs(tmp_path, records=[{"prompt": prompt, "source": "a"}, {"prompt": f"{prompt}"}])
    assert main(["data", "preview", str(recipe), "--samples", "1"]) == 0
    shown = capfd.readouterr().out
    assert "records that hold only a prompt: 2" in shown and "chats.jsonl:1:\n" in shown
    assert ("system: Be brief.\nuser: " in shown) is isinstance(prompt, list) and "2 + 2\nin words" in shown
    for objective in ("dpo", "kto", "reward", "next_tokens"):
        assert main(["train", str(recipe), *QUIET, f"objective={objective}"]) == 4
        error = capfd.readouterr().err
        assert "holds only a prompt" in error and "chosen and rejected (for dpo or reward)" in error


# --- Bad input, each with its exit code -------------------------------------------------------------------------------


LONG = [pair("hi", "one two three " * 40, "no"), pair("ho", "one two three " * 40, "yes")]
# records, settings, exit code, parts of the message
BAD: dict[str, tuple[list[dict[str, Any]], tuple[str, ...], int, str]] = {
    "other records": (judged(sums(4)), (), 4, "learns from pairs of answers"),
    "conversations": ([chat("a", "b")] * 4, (), 4, "learns from pairs of answers"),
    "only equal answers": ([pair("a", "b", "b")] * 4, (), 4, "left out: 4"),
    "a label that is no bool": ([{**row, "label": "yes"} for row in judged(sums(4))], ("objective=kto",), 4, "true or"),
    "no prompt": ([{"chosen": "yes", "rejected": "no"}] * 4, (), 4, "no prompt"),
    "all too long": (LONG, (), 4, "no sample of data.train is left; 2 of 2 samples have more than 128 tokens"),
    "one judged answer": (judged(sums(1))[:1], ("objective=kto", "data.eval_fraction=0"), 4, "a single answer"),
    "beta of 0": (sums(4), ("objective.beta=0.0",), 3, "objective.beta is 0"),
    "smoothing of 0": (sums(4), ("objective=exo_pair", "objective.label_smoothing=0.0"), 3, "takes its logarithm"),
    "a loss of TRL": (sums(4), ("objective=aot",), 3, "use dpo, which is nearest"),
    "unknown": (sums(4), ("objective=dpa",), 3, "dpo"),
    "not its setting": (sums(4), ("objective.gamma=1.0",), 3, "for simpo"),
    "loss": (sums(4), ("data.loss=all",), 3, "data.loss is all"),
    "no base": (sums(4), ("objective.reference=adapter", "lora=null"), 3, "not its base without adapters"),
    "no cache": (sums(4), ("data.cache_dir=/dev/null/cache",), 8, "/dev/null"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    records, settings, code, part = BAD[name]
    recipe = make_pairs(tmp_path, records=records)
    assert main(["train", str(recipe), "train.device=cpu", *settings]) == code
    error = capfd.readouterr().err
    assert part in error and "next: " in error and "Traceback" not in error


def test_preferences_without_their_objective(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(make_pairs(tmp_path)), "objective=next_tokens"]) == 4
    assert "objective.name: dpo for pairs" in capfd.readouterr().err


# --- Kills and ranks --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.xdist_group("runs in forks")
@pytest.mark.parametrize("how", [("lora=null",), pytest.param((), marks=pytest.mark.full)], ids=["full", "adapters"])
def test_two_ranks_have_the_hash_of_one(forks: Forks, tmp_path: Path, how: tuple[str, ...]) -> None:
    recipe = make_pairs(tmp_path, records=plain(24))
    words = ["train", recipe, "train.accumulation_steps=4", "train.steps=3", "train.batch_size=1", "data.seq_len=48"]
    outputs = []
    for ranks in (1, 2):
        ended = forks.run(*words, *how, f"train.output_dir={tmp_path / str(ranks)}", "--nproc", str(ranks))
        assert ended.code == 0, ended
        outputs.append([line for line in ended.out.splitlines() if line.startswith(("state hash", "held out", "eval"))])
        assert EXACT in ended.out
    assert outputs[0] == outputs[1]
    assert [_timeless(row) for row in rows(tmp_path / "1")] == [_timeless(row) for row in rows(tmp_path / "2")]
    few = make_pairs(tmp_path, records=plain(24)[:1])
    settings = ("data.eval_fraction=0", "train.accumulation_steps=2", f"train.output_dir={tmp_path / 'few'}")
    ended = forks.run("train", few, *settings, "--nproc", "2")
    assert ended.code == 4 and "cannot be shared by 2 ranks" in ended.err


def test_the_report_draws_the_figures(recipe: Path) -> None:
    train(load(recipe, "run", *QUIET, "train.steps=6", "eval.every=2"))
    assert main(["report", str(recipe.parent / "run")]) == 0
    page = (recipe.parent / "run" / "report.html").read_text()
    for title in ("Margins of rewards", "Accuracy of rewards", "Log-probability of chosen answers"):
        assert title in page
    assert ">KL<" not in page


def test_a_resumed_run_may_evaluate_otherwise(recipe: Path) -> None:
    """Its reference of training pairs comes from the cache, in any number of threads."""
    how = (*QUIET, "lora=null", "checkpoint.every=1", "train.steps=3")
    with signal_in_step(2), pytest.raises(InterruptedRun):
        train(load(recipe, "run", *how))
    entries = len(list((recipe.parent / "cache").glob("reference-*")))
    console = io.StringIO()
    train(load(recipe, "run", *how, "eval.batch_size=1", "eval.max_batches=2"), resume=True, console=console)
    assert "computed once" in console.getvalue() and "resumed at step" in console.getvalue()
    assert entries == 2 and len(list((recipe.parent / "cache").glob("reference-*"))) == 3
    assert "found in the cache" in printed(recipe, "again", "lora=null")
