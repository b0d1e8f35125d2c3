"""`genesis export`: chooses what is exported and where to, and checks that the export is the trained model.

If 16-bit weights are exported as float32, the optimizer's masters in the checkpoint replace them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from genesis.data.tokenizer import Tokenizer
from genesis.dtypes import bfloat16
from genesis.errors import ModelError, escape
from genesis.files.atomic import MANIFEST_NAME, read_manifest, verify_manifest
from genesis.files.boundary import boundary
from genesis.files.hf import CHECKPOINT
from genesis.files.hub import name_of
from genesis.files.paths import exists
from genesis.ops.rounding import split_into
from genesis.optim.states import MASTER
from genesis.train.checkpoint import RNG, optimizer_tensors
from genesis.train.output import Output
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import new_token_lines
from genesis_models.adapters import is_adapter
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import check_ids
from genesis_models.export import answers, check_answers, check_target, check_weights_of, difference, write_export
from genesis_models.folder import load, load_source, read_config
from genesis_models.source import ModelSource, find_source, newest_checkpoint, saved_model
from genesis_models.weights import check_finite

EXPORT = {"model.path": "FOLDER", "model.dtype": "--dtype"}
MEMORY = "it needs 4 bytes for each parameter, and as many again with --check: use a machine with more memory"
# Texts for comparing answers: prose, code, figures, a dialogue, other scripts.
TEXTS = (
    "The ship left the harbour at dawn, and by noon the wind had turned. Nobody on board had expected that.",
    "def mean(values):\n    if not values:\n        raise ValueError('empty')\n    return sum(values) / len(values)\n",
    "17 + 25 = 42, 3 * 14 = 42, and 1,000 / 8 = 125.",
    "User: How do I boil an egg?\nAssistant: Put it into boiling water for seven minutes, then into cold water.",
    "Die Sonne scheint, und die Kinder spielen im Garten. Le chat dort sur la chaise.",
    "今日は天気がいいから、散歩しましょう。 Сегодня хорошая погода.",
    '{"name": "Ada", "tools": [{"type": "function", "arguments": {"x": 1}}]}',
    "1. Read the manual.\n2. Check the cable.\n3. Restart the machine.\n",
)
LONGEST = 64  # the most tokens of a text


def export(
    folder: str, *, merge: bool, dtype: str | None, out: str | None, check: bool, base: str | None, console: Output
) -> Path:
    """Write the model or adapter in `folder` into another folder, and return its path.

    Args:
        folder: a run, a checkpoint, an adapter or a model.
        merge, dtype: as in `write_export`. For float32, 16-bit weights are replaced with the optimizer's masters if a
            checkpoint has them.
        out: target folder; None writes next to `folder`.
        check: load the export, and compare it with the trained model.
        base: folder of an adapter's base, instead of the one that the adapter names.

    Raises:
        ModelError: `folder` is none of these or damaged, or the export differs from the trained model.
            ConfigError, UsageError, NumericError, DiskError: as in `write_export`.
    """
    with phrased_for(EXPORT, memory=MEMORY):
        # Find the model and the target folder, and check both.
        saved = saved_model(folder)
        with boundary(ModelError, "reading the model's folder", saved):
            is_checkpoint = CHECKPOINT.fullmatch(saved.name) is not None and exists(saved / MANIFEST_NAME)
        if is_checkpoint:
            verify_manifest(saved)  # users may edit files in other folders
        source = find_source(saved, base)
        console.line(str(source))
        target = _default_target(saved, merge) if out is None else Path(out)
        check_target(target, source)
        # Load the model, with masters and with rows for new tokens.
        tokenizer = _tokenizer(source) if merge or source.adapter is None else None  # an adapter is exported unchanged
        if tokenizer is not None:
            stored = read_config(source.folder)
            check_ids(tokenizer, stored, escape(source.folder))
            for new in new_token_lines(tokenizer, stored, grows=True):
                console.line(new)
        model = load_source(source, vocab_size=0 if tokenizer is None else tokenizer.vocab_size)
        if dtype == "float32" and source.adapter is None and (line := take_masters(model, saved)) is not None:
            console.line(line)
        check_finite(model, where=escape(saved))
        # Write the export, and compare it.
        write_export(model, source, target, merge=merge, dtype=dtype)
        files = read_manifest(target).files
        size = sum(record.size for record in files.values())
        console.line(f"wrote {escape(target)}: {size / 1e6:,.1f} MB in {len(files)} files")
        if check:
            for line in _checked(model, source, target):
                console.line(line)
    return target


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    folder = source.holding("tokenizer.json")
    with boundary(ModelError, "reading the tokenizer", folder):
        return Tokenizer.load(folder) if exists(folder / "tokenizer.json") else None


def _default_target(folder: Path, merge: bool) -> Path:
    """Return the default folder of an export: next to the model, or next to the run of a checkpoint."""
    whole = Path(os.path.abspath(folder))
    if (pulled := name_of(whole)) is not None:  # exports do not belong into the cache
        return Path(f"{pulled.id.rpartition('/')[2]}-export")
    is_checkpoint = CHECKPOINT.fullmatch(whole.name) is not None
    run = whole.parent if is_checkpoint else whole
    middle = f"-{whole.name}" if is_checkpoint else ""
    return run.parent / f"{run.name}{middle}-{'merged' if merge else 'export'}"


def _checked(model: CausalLM, source: ModelSource, target: Path) -> Iterator[str]:
    """Compare the folder with the model in memory, and yield lines. Raises: ModelError: they differ."""
    count, kind = check_weights_of(model, target)
    yield f"check: {count:,} tensors equal the trained ones, within the precision of {kind}"
    texts = _texts(source, model)
    expected = answers(model, texts)
    written = load(target, dtype="float32", base=source.folder if is_adapter(target) else None)
    found = difference(expected, answers(written, texts))
    is_reward = model.score is not None
    compared = f"a hidden state {found.logit:.3g}" if is_reward else f"logits {found.logit:.3g}"
    divergence = "" if is_reward else f", KL {found.kl:.3g} nats a token"
    yield f"check: {found.tokens:,} tokens of {len(texts)} texts: largest difference of {compared}{divergence}"
    if kind != "float32":
        yield f"check: that is the effect of rounding the weights to {kind}"
    check_answers(found, kind, model.config, target)
    if source.adapter is not None and not is_reward:
        del written
        base = load(source.folder, dtype="float32", vocab_size=model.config.vocab_size)
        learned = difference(expected, answers(base, texts))
        yield f"check: training moved the base model by KL {learned.kl:.3g} nats a token on these texts"


def _texts(source: ModelSource, model: CausalLM) -> list[np.ndarray]:
    """Return ids for the comparison: from `TEXTS`, or random ones without a tokenizer."""
    longest = min(LONGEST, model.config.packed_length)
    if (tokenizer := _tokenizer(source)) is None:
        return [np.random.default_rng(0).integers(0, model.config.vocab_size, longest) for _ in TEXTS]
    return [np.array(tokenizer.prompt(text)[:longest]) for text in TEXTS]


def take_masters(model: CausalLM, folder: Path) -> str | None:
    """Replace the weights of `model` with their masters if they exist; return a line, or None if no weight is narrow.

    Args:
        model: the model in `folder`, in float32.
        folder: a checkpoint, or a run whose newest checkpoint has the weights of its final model.
    """
    narrow = {kind for kind in model.stored_types.values() if kind in ("bfloat16", "float16")}
    if not narrow:
        return None
    with boundary(ModelError, "reading the checkpoint", folder):
        is_checkpoint = exists(folder / RNG)  # the final model of a run has no such file
    checkpoint = folder if is_checkpoint else newest_checkpoint(folder)
    weights = f"float32: the {' and '.join(sorted(narrow))} weights unchanged"
    if checkpoint is None:
        return f"{weights}; {escape(folder)} has no checkpoint with an optimizer that may have their masters"
    try:
        if not is_checkpoint:
            verify_manifest(checkpoint)
        reason = _taken(model, checkpoint)
    except ModelError as error:
        reason = error.what
    if reason is not None:
        return f"{weights}; {escape(checkpoint)} has no masters of them: {reason}"
    return f"float32: the optimizer's masters in {escape(checkpoint)}, from which the weights were rounded"


def _taken(model: CausalLM, checkpoint: Path) -> str | None:
    """Copy the masters in `checkpoint` if all weights are rounded from them; otherwise return the reason."""
    parameters = dict(model.named_parameters())
    with optimizer_tensors(checkpoint) as tensors:
        masters = {n.removesuffix(f".{MASTER}"): each for n, each in tensors.items() if n.endswith(f".{MASTER}")}
        if not masters:
            return "its optimizer keeps none"
        for name, stored in masters.items():
            if name not in parameters or not _is_rounded(
                parameters[name].detach().numpy(), stored.read_all(), model.stored_types.get(name, "float32")
            ):
                return f"{escape(name)} is of another step"
        for name, stored in masters.items():
            np.copyto(parameters[name].detach().numpy(), stored.read_all())
    return None


def _is_rounded(weight: np.ndarray, master: np.ndarray, kind: str) -> bool:
    """Whether float32 `weight` is `master` rounded to `kind`: halves to even, or for bfloat16 also away from zero."""
    if weight.shape != master.shape or master.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        near = master.astype(np.dtype(kind) if kind != "bfloat16" else bfloat16.numpy)
    if np.array_equal(near.astype(np.float32), weight):
        return True
    if kind != "bfloat16":
        return False
    flat = np.ascontiguousarray(master).reshape(-1)
    rounded, residual = np.empty(flat.size, bfloat16.numpy), np.empty(flat.size, np.int16)
    split_into(rounded, residual, flat)
    return np.array_equal(rounded.astype(np.float32).reshape(weight.shape), weight)
