"""What users of other trainers report most, and what is right here from day one: a test for each of twelve promises.

Each is kept by a fine-tuning run, on conversations and with adapters. The tests of the parts go deeper.
"""

from __future__ import annotations

import io
import json
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

import genesis
import genesis_models
from genesis.backend import CPU
from genesis.data.loader import IGNORE_INDEX, Batch, PackedLoader
from genesis.errors import DiskError, InterruptedRun
from genesis.files.atomic import verify_manifest
from genesis.files.safetensors import load_file
from genesis.train import loop
from genesis.train.loop import Training
from genesis.train.objective import LanguageModel
from genesis.train.step import accumulate_gradients
from genesis_models.adapters import adapted_layers
from genesis_models.blocks import CausalLM
from tests.adapters.golden import FIXTURES, base_of, logits, reference
from tests.cli.command import printed
from tests.files.faults import FailAt, Recorder
from tests.train.chats import SHAPE, chat, make_chats, token, write_chats
from tests.train.runs import assembled, load, no_waiting, observed, rows, signal_in_step, steps, train

ADAPTER = "adapter_model.safetensors"
QUIET = ("eval.prompts=[]", "eval.every=null", "eval.at_start=false")
LONGEST = "data.seq_len=128"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that gives the base model in `base` adapters, on answers of very different lengths."""
    path = make_chats(tmp_path_factory.mktemp("chats"))
    answers = (chat(f"{n} + {n}", "one " * (1 + n % 5), "again?", str(n)) for n in range(20))
    write_chats(path.parent / "chats.jsonl", answers)
    return path


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis words…`."""
    with mock.patch("genesis_cli.session.training.loss_picture"), no_waiting():
        return printed(*words)


def model_of(training: Training) -> CausalLM:
    assert isinstance(training.state.model, CausalLM)
    return training.state.model


def fullest(loader: PackedLoader) -> Batch:
    """The batch of the first epoch with the most tokens."""
    batches = (loader.batch(0, index) for index in range(loader.num_batches(0)))
    return max(batches, key=lambda batch: batch.num_tokens)


def summed_loss(model: LanguageModel, batch: Batch, ids: np.ndarray, positions: np.ndarray) -> float:
    with genesis.no_grad():
        given = [genesis.from_numpy(values) for values in (ids, batch.labels, positions)]
        return float(model.loss(given[0], given[1], position_ids=given[2], num_targets=1).item())


def test_right_from_day_one_1_accumulation_equals_a_big_batch(recipe: Path, tmp_path: Path) -> None:
    """Though its batches have very different numbers of targets."""
    found: list[dict[str, np.ndarray]] = []
    norms: list[list[float]] = []
    for name, size, parts in (("big", 4, 1), ("small", 1, 4)):
        shape = (
            f"train.batch_size={size}",
            f"train.accumulation_steps={parts}",
            "train.steps=2",
            "train.max_grad_norm=0.1",
        )
        train(load(recipe, str(tmp_path / name), *shape, *QUIET, "optim.name=sgd"))
        found.append(load_file(tmp_path / name / ADAPTER))
        norms.append([row["train/grad_norm"] for row in rows(tmp_path / name) if "train/grad_norm" in row])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for name, values in found[0].items():
        assert np.abs(values - found[1][name]).max() <= 1e-6, name
    loader = assembled(load(recipe, str(tmp_path / "look"), "train.batch_size=1")).state.loader
    targets = [loader.batch(0, index).num_targets for index in range(loader.num_batches(0))]
    assert max(targets) > 1.2 * min(targets), "else a mean of means would be right too"


def test_right_from_day_one_2_what_has_no_target_is_reported_and_dropped(recipe: Path, tmp_path: Path) -> None:
    """Here its targets are beyond the end of a row; a loss of 0.0 is nowhere to be seen."""
    good = (recipe.parent / "chats.jsonl").read_text().splitlines()
    long = json.dumps(chat("1 " * 80, "one"))
    for name, lines, code in (("some", [*good, long, long], 0), ("all", [long, long], 4)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        data = (f"data.train={tmp_path}/{name}.jsonl", "data.too_long=truncate", "data.eval_fraction=0")
        found, out, told = run("train", recipe, f"train.output_dir={tmp_path}/{name}", *data, *QUIET)
        assert found == code, told
        said = out if name == "some" else told
        first = f"{tmp_path}/{name}.jsonl:{len(lines) - 1}"
        assert f"2 of them have no target in their first 64 tokens and are left out; the first: {first}" in said, said
    losses = [row["train/loss"] for row in rows(tmp_path / "some") if "train/loss" in row]
    assert len(losses) == 2 and min(losses) > 1


def test_right_from_day_one_3_padding_is_told_by_length_never_by_its_id(recipe: Path, tmp_path: Path) -> None:
    """The pad id ends texts too: as a target it is learned, and in the empty ends of rows whatever id is ignored."""
    pairs = ({"prompt": f"{n} is", "completion": " one" * (1 + n % 7)} for n in range(20))
    write_chats(tmp_path / "pairs.jsonl", pairs)
    training = assembled(load(recipe, str(tmp_path / "run"), f"data.train={tmp_path}/pairs.jsonl", "data.seq_len=48"))
    loader, model = training.state.loader, model_of(training)
    steps(training, 1)
    batch = loader.batch(0, loader.num_batches(0) - 1)
    end = token(recipe.parent / "base", "<|endoftext|>")
    assert loader.tokens.pad_id == end and (batch.labels == end).any()
    is_padding = np.ones_like(batch.input_ids, bool)
    columns = np.zeros(len(is_padding), int)
    for row, _, _, count in batch.samples.tolist():
        is_padding[row, columns[row] : columns[row] + count] = False
        columns[row] += count
    assert is_padding.any() and (batch.labels[is_padding] == IGNORE_INDEX).all()
    other = np.where(is_padding, end + 3, batch.input_ids)
    positions = batch.position_ids
    assert summed_loss(model, batch, batch.input_ids, positions) == summed_loss(model, batch, other, positions)


def test_right_from_day_one_4_packing_never_leaks_across_documents(recipe: Path, tmp_path: Path) -> None:
    """A model with trained adapters gives each packed sample the logits that it gives it alone."""
    training = assembled(load(recipe, str(tmp_path / "run"), *QUIET, LONGEST, "train.batch_size=1"))
    steps(training, 3)
    loader, model = training.state.loader, model_of(training).eval()
    batch, leaks, column = fullest(loader), 0.0, 0

    def computed(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        with genesis.no_grad():
            return model(genesis.from_numpy(ids), position_ids=genesis.from_numpy(positions)).numpy()[0]

    packed = computed(batch.input_ids, batch.position_ids)
    leaking = computed(batch.input_ids, np.arange(128)[None])
    for _, _, _, count in batch.samples.tolist():
        where = slice(column, column + count)
        alone = computed(batch.input_ids[:, where], np.arange(count)[None])
        np.testing.assert_allclose(packed[where], alone, rtol=0, atol=1e-5)
        leaks = max(leaks, float(np.abs(leaking[where] - alone).max()))
        column += count
    assert len(batch.samples) >= 2 and leaks > 1e-3, "the check would not see a leak"


def test_right_from_day_one_5_training_and_serving_share_one_chat_template(recipe: Path, tmp_path: Path) -> None:
    """Before each target are the ids that a server makes of the saved folder, and it ends where the server stops."""
    settings = ("train.steps=1", *QUIET, "data.eval_fraction=0", LONGEST)
    train(load(recipe, str(tmp_path / "run"), *settings))
    folder = tmp_path / "run"
    encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = jinja.from_string((folder / "chat_template.jinja").read_text())
    stop = json.loads((folder / "generation_config.json").read_text())["eos_token_id"][0]
    prompts = set()
    for line in (recipe.parent / "chats.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        for turn in (1, 3):
            text = template.render(messages=messages[:turn], add_generation_prompt=True)
            prompts.add(tuple(encoder.encode(text, add_special_tokens=False).ids))
    tokens = assembled(load(recipe, str(tmp_path / "again"), *settings)).state.loader.tokens
    assert tokens.mask is not None
    for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
        ids, mask = tokens.stream[start : start + length].tolist(), tokens.mask[start : start + length] != 0
        begins = [n for n in range(1, length) if mask[n] and not mask[n - 1]]
        ends = [n for n in range(1, length) if mask[n] and (n + 1 == length or not mask[n + 1])]
        for begin, end in zip(begins, ends, strict=True):
            prompts.remove(tuple(ids[:begin]))
            assert ids[end] == stop
    assert not prompts, "turns that no one learned"


def test_right_from_day_one_6_resume_is_bit_exact(recipe: Path, tmp_path: Path) -> None:
    """With the data's position and the state of dropout."""
    settings = ("train.steps=4", "lora.dropout=0.2", "eval.prompts=[]")
    whole, parts = (load(recipe, str(tmp_path / name), *settings) for name in ("whole", "parts"))
    expected = train(whole).state_hash
    with signal_in_step(1), pytest.raises(InterruptedRun):
        train(parts)
    with signal_in_step(3), pytest.raises(InterruptedRun):
        train(parts, resume=True)
    assert train(parts, resume=True).state_hash == expected
    assert (tmp_path / "parts" / ADAPTER).read_bytes() == (tmp_path / "whole" / ADAPTER).read_bytes()
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_right_from_day_one_7_checkpoints_are_atomic(recipe: Path, tmp_path: Path) -> None:
    """Temporary folder, fsync, the manifest last, rename, fsync of the parent; after an error none is there."""
    training = assembled(load(recipe, str(tmp_path / "run")))
    steps(training, 1)
    recorder = Recorder()
    with observed(recorder):
        training.checkpoints.save(training.state)
    final = tmp_path / "run" / "checkpoint-1"
    calls = [(call.op, call.path) for call in recorder.calls]
    renamed = next(n for n, call in enumerate(recorder.calls) if call.op == "rename" and call.target == final)
    temporary = calls[renamed][1]
    written = [path for op, path in calls[:renamed] if op == "write" and path.parent == temporary]
    assert written[-1].name == "manifest.json"
    assert {("fsync", path) for path in written} <= set(calls[:renamed])
    assert ("fsync_dir", temporary) in calls[:renamed] and ("fsync_dir", final.parent) in calls[renamed:]
    verify_manifest(final)
    for number in range(1, renamed, max(1, renamed // 12)):
        shutil.rmtree(final, ignore_errors=True)
        with observed(FailAt(number)), pytest.raises(DiskError):
            training.checkpoints.save(training.state)
        assert not list(final.parent.glob("checkpoint-*"))


def test_right_from_day_one_8_what_is_exported_gives_equal_logits_elsewhere(tmp_path: Path) -> None:
    """Of an adapter of PEFT's: the merged folder and the adapter's give the logits that PEFT computed with it."""
    name = "qwen3-tied-dora"
    expected = reference(name)
    ids, base = expected["input_ids"], base_of(name)
    for words, kind in ((("--merge",), "merged"), ((), "adapter")):
        code, out, told = run("export", FIXTURES / name, "--base", base, "--check", "--out", tmp_path / kind, *words)
        assert code == 0, told
        assert "largest difference of logits" in out
        model = genesis_models.load(tmp_path / kind)
        assert bool(adapted_layers(model)) == (kind == "adapter")
        assert np.abs(logits(model, ids) - expected["merged_logits"]).max() < 1e-4
    assert np.abs(logits(genesis_models.load(base), ids) - expected["merged_logits"]).max() > 1e-2


@pytest.mark.parametrize("kind", ["masters", "stochastic"])
def test_right_from_day_one_9_small_rates_do_not_stall_in_bf16(recipe: Path, tmp_path: Path, kind: str) -> None:
    """Each step changes a weight by less than half of the distance to the next bf16 number."""
    settings = ["model.dtype=bfloat16", "lora=null", "optim.lr=1e-6", "optim.warmup_ratio=0", *QUIET]
    settings += ["optim.low_precision=stochastic"] * (kind == "stochastic")
    training = assembled(load(recipe, str(tmp_path / "run"), *settings))
    parameter = model_of(training).get_parameter("model.layers.0.mlp.up_proj.weight")
    before = parameter.detach().numpy().astype(np.float32)
    steps(training, 3)
    after = parameter.detach().numpy().astype(np.float32)
    assert 2**-9 * np.median(np.abs(before)) > 3e-6, "a plain sum in bf16 would not change most weights"
    if kind == "masters":
        after = training.state.optimizer.saved_state(parameter)["master"].detach().numpy()
        assert (after != before).mean() > 0.9
        assert np.abs(after - before).max() < 1e-5
    else:
        assert 0 < (after != before).mean() < 0.5, "a few weights move by a whole distance"


def test_right_from_day_one_10_logits_never_stand_whole(recipe: Path, tmp_path: Path) -> None:
    """In a step with adapters and in `genesis eval`: a fraction of their memory is taken."""
    vocabulary, slots = 15_000, 16 * 128
    base = tmp_path / "base"
    shutil.copytree(recipe.parent / "base", base)
    raw = {**SHAPE, "vocab_size": vocabulary, "eos_token_id": 0, "hidden_size": 8, "intermediate_size": 8}
    genesis_models.save(genesis_models.build(raw, 0), base)
    write_chats(tmp_path / "chats.jsonl", [chat(f"{n}", "one two " * 14) for n in range(40)])
    whole = 4 * vocabulary * slots
    data = f"data.train={tmp_path}/chats.jsonl"
    training = assembled(
        load(recipe, str(tmp_path / "run"), f"model.path={base}", data, LONGEST, "train.batch_size=16")
    )
    batch = fullest(training.state.loader)
    assert batch.num_tokens > 0.5 * slots
    tracemalloc.start()
    accumulate_gradients(training.state.objective, training.state.model, batch, batch.num_targets, CPU)
    step = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    code, _, told = run("eval", base, "--data", tmp_path / "chats.jsonl", "--batch-size", 16, "--seq-len", 128)
    evaluation = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == 0, told
    assert step < 0.5 * whole and evaluation < 0.5 * whole, (step, evaluation, whole)


def test_right_from_day_one_11_speed_leaves_out_warm_up_evaluation_and_saving(recipe: Path, tmp_path: Path) -> None:
    """And says so."""
    slow, count, at_once = 0.2, 8, "checkpoint.background=off"

    def slowly(function: Any) -> Any:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(slow)
            return function(*args, **kwargs)

        return slowed

    config = load(recipe, str(tmp_path / "run"), f"train.steps={count}", "eval.every=4", "eval.prompts=[]", at_once)
    told = io.StringIO()
    with (
        mock.patch.object(loop, "evaluate", slowly(loop.evaluate)),
        mock.patch("genesis.train.checkpoint.Checkpoints.save", slowly(loop.Checkpoints.save)),
    ):
        begun = time.perf_counter()
        summary = train(config, console=told)
        taken = time.perf_counter() - begun
    assert "count training steps only: warm-up, evaluation and saving are excluded" in told.getvalue()
    assert taken > 6 * slow and summary.tokens_per_second is not None
    tokens = [row["train/num_tokens"] for row in rows(tmp_path / "run") if "train/num_tokens" in row][-1]
    assert tokens / summary.tokens_per_second < taken - 6 * slow


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"messages": [{"role": "user", "content": "1"}, {"content": "one"}]}, "messages[1].role"),
        (
            {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "one"}]},
            "messages[0].content",
        ),
        ({"instruction": "1", "output": None}, "output"),
        (
            {"conversations": [{"from": "human", "value": "1"}, {"from": "alien", "value": "2"}]},
            "conversations[1].from",
        ),
    ],
)
def test_right_from_day_one_12_a_data_error_names_file_line_and_field(
    recipe: Path, tmp_path: Path, record: dict[str, Any], field: str
) -> None:
    write_chats(tmp_path / "mine.jsonl", [chat("1", "one"), chat("2", "two"), record, chat("3", "three")])
    data = f"data.train={tmp_path}/mine.jsonl"
    for words in (("train", recipe, data, f"train.output_dir={tmp_path}/run"), ("data", "preview", recipe, data)):
        code, _, told = run(*words)
        assert code == 4 and f"{tmp_path}/mine.jsonl:3: {field}" in told, told
    assert not (tmp_path / "run").exists()
