"""Loads and saves model folders in Hugging Face's format."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genesis import Tensor, no_grad
from genesis.backend import CPU, as_device
from genesis.data.tokenizer import Tokenizer
from genesis.dtypes import as_dtype, bfloat16, float16, float32, float64
from genesis.errors import ModelError, NumericError, UsageError, escape
from genesis.files import hf
from genesis.files.atomic import AtomicFolder, FolderUpdate, FolderWriter
from genesis.files.boundary import boundary
from genesis.files.paths import exists, is_folder, safe_join
from genesis.files.safetensors import TensorSource
from genesis.files.strict_json import indented_bytes, read_limited
from genesis.functions.transfer import pinned_empty
from genesis_models.adapters import adapted_layers, load_adapter
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import generation_config
from genesis_models.config import ModelConfig
from genesis_models.registry import empty_model, parameter_shapes
from genesis_models.source import ModelSource, check_model_folder, find_source
from genesis_models.weights import check_fits, is_quantized, weight_type

HEAD, EMBEDDING, SCORE = "lm_head.weight", "model.embed_tokens.weight", "score.weight"
PREFIX = "model."
WEIGHT_TYPES = [d.numpy for d in (float64, float32, float16, bfloat16)]
MAX_SHARD_BYTES = 5 << 30  # transformers' default
PIECE = 8 << 20  # elements in one copy to a device


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Return the checked `config.json` of a model folder.

    Raises:
        ModelError: the path is not a model folder, or its config is malformed or of an unsupported model.
    """
    check_model_folder(folder)
    path = safe_join(folder, "config.json", where=escape(folder))
    return ModelConfig.from_dict(hf.read_json(path), where=escape(path))


def stored_dtype(folder: str | os.PathLike[str]) -> str:
    """Return the dtype of a folder's weights: the one that its config names, otherwise the one of most bytes.

    Raises:
        ModelError: as in `read_config`, or the weights are missing, unsafe or damaged.
    """
    config = read_config(folder)
    if config.stored_dtype is not None:
        return config.stored_dtype
    with hf.WeightFolder(folder) as weights:
        return _main_type(weights)


def _main_type(weights: hf.WeightFolder) -> str:
    """Return the float dtype of most bytes; float32 without float tensors."""
    sizes: Counter[str] = Counter()
    for entry in map(weights.entry, weights.names):
        if entry.dtype in WEIGHT_TYPES:
            sizes[entry.dtype.name] += entry.nbytes
    return max(sizes, key=sizes.__getitem__, default="float32")


def load(
    folder: str | os.PathLike[str],
    device: str = "cpu",
    dtype: object = None,
    *,
    base: str | os.PathLike[str] | None = None,
    vocab_size: int = 0,
    reward: bool = False,
) -> CausalLM:
    """Load the model in `folder`: `config.json` and safetensors in one file or in shards, or an adapter on its base.

    The model is in eval mode. Call `train()` on it before training: dropout of adapters, `activation_checkpointing` and
    `precision` need it.

    Loading is strict: every parameter must exist exactly once with its shape, and no tensor may be left over. The check
    reads only headers, before any memory is allocated.

    Args:
        device: device of the weights.
        dtype: "float32", "bfloat16" or "float16" (or "fp32", "bf16", "fp16", a DType); other float weights are cast.
            None and "auto" mean float32 on the CPU and the folder's dtype on a GPU; `save` then writes each tensor in
            the dtype that it has in the folder.
        base: folder of an adapter's base, instead of the one that the adapter names.
        vocab_size: the fewest rows of the embedding and the head, such as a larger tokenizer's size. Rows that the
            folder lacks become the mean of the others.
        reward: load a language model as a reward model: without its head, with a `score` of zeros.

    Raises:
        ModelError: the path is not a model folder; tensors are missing, left over or mis-shaped (at most 10 names of
            each, with the counts); the base of an adapter is missing or another model. DTypeError: weights cannot have
            the dtype. OutOfMemoryError: the weights do not fit.
    """
    return load_source(find_source(folder, base), device, dtype, vocab_size, reward)


def load_source(
    source: ModelSource, device: str = "cpu", dtype: object = None, vocab_size: int = 0, reward: bool = False
) -> CausalLM:
    """Return the model of a source in eval mode; arguments and errors as in `load`."""
    model = _load_whole(source.folder, device, dtype, vocab_size, reward or _adds_score(source)).eval()
    model.folders = tuple(source.folders)
    return model if source.adapter is None else load_adapter(model, source.adapter)


def check_predicts(source: ModelSource, where: str) -> None:
    """Raise ModelError if a source is a reward model, which predicts no tokens."""
    if _adds_score(source) or read_config(source.folder).is_reward:
        what = (
            f"{escape(source.adapter or source.folder)} is a reward model, which scores answers and predicts no tokens"
        )
        raise ModelError(what, where=where, next="use a model with a language-model head")


def _adds_score(source: ModelSource) -> bool:
    """Return whether an adapter makes its base a reward model."""
    return source.config is not None and SCORE.rpartition(".")[0] in source.config.modules_to_save


def _load_whole(folder: Path, device: str, dtype: object, rows: int, reward: bool) -> CausalLM:
    """Return the model in a folder of whole weights."""
    config, target = read_config(folder), as_device(device)
    is_new = reward and not config.is_reward  # the folder has a head instead of a score
    config = config.as_reward() if reward else config
    shapes = {name: shape for name, shape in parameter_shapes(config).items() if not (is_new and name == SCORE)}
    # Check names and memory before allocating.
    with _weights(folder, shapes) as weights:
        _check_names(config, shapes, weights, escape(folder), may_have_head=is_new)
        chosen = weight_type(dtype, target, config.stored_dtype or _main_type(weights))
        config = config.with_rows(rows)
        check_fits(sum(map(math.prod, parameter_shapes(config).values())), chosen.name, target, where=escape(folder))
        model = empty_model(config, device=device, dtype=chosen.name)
        # Read each tensor into its parameter; additional rows become the mean of the stored ones.
        for name, parameter in model.named_parameters():
            if name not in shapes:
                parameter.detach().fill_(0.0)
                continue
            stored = parameter.detach().narrow(0, 0, shapes[name][0])
            if parameter.device != CPU:
                _send(weights, name, stored)
            elif weights.entry(name).dtype == stored.numpy().dtype and stored.is_contiguous():
                weights.read_into(name, stored.numpy())
            else:
                np.copyto(stored.numpy(), weights.read(name), casting="unsafe")
            if (new := len(parameter) - len(stored)) > 0:
                parameter.detach().narrow(0, len(stored), new).copy_(stored.mean(0, keepdim=True))
        # A tied head may be stored a second time, but must be equal.
        stores_tied = config.tie_word_embeddings and HEAD in weights.names
        if stores_tied and not np.array_equal(weights.read(HEAD), weights.read(EMBEDDING)):
            what = f"tie_word_embeddings is set, but {HEAD} differs from {EMBEDDING}"
            next = "set tie_word_embeddings to false in config.json, or remove the head's tensor"
            raise ModelError(what, where=escape(folder), next=next)
        if chosen.reason:
            model.stored_types = {name: weights.entry(name).dtype.name for name in shapes}
    return model


def check_weights(folder: str | os.PathLike[str]) -> None:
    """Check a model folder's config and headers as `load` does, without reading a tensor.

    Raises:
        ModelError: as in `load`.
    """
    config = read_config(folder)
    shapes = parameter_shapes(config)
    with _weights(folder, shapes) as weights:
        _check_names(config, shapes, weights, escape(folder))


def _weights(folder: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]]) -> hf.WeightFolder:
    """Open the weights under the parameters' names; as in transformers, a file may omit or repeat `model.`."""
    weights = hf.WeightFolder(folder)
    known, taken, names = {*shapes, HEAD}, set(weights.names), dict[str, str]()
    for name in weights.names:
        other = PREFIX + name if PREFIX + name in known else name.removeprefix(PREFIX)
        if name not in known and other in known and other not in taken:
            names[name] = other
            taken.add(other)
    weights.rename(names)
    return weights


def _check_names(
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    weights: hf.WeightFolder,
    where: str,
    *,
    may_have_head: bool = False,
) -> None:
    """Compare a folder's tensors with the shapes of the expected parameters.

    Raises:
        ModelError: it lists everything that is wrong with the names, shapes and dtypes.
    """
    found = set(weights.names)
    allowed = set(expected) | ({HEAD} if config.tie_word_embeddings or may_have_head else set())
    # Old checkpoints contain rotary tables, which are derived values.
    extra = {n for n in found - allowed if not n.endswith(".rotary_emb.inv_freq")}
    missing = set(expected) - found
    problems = []
    if missing:
        problems.append(f"missing: {hf.list_names(missing)}")
    if extra:
        problems.append(f"not part of the model: {hf.list_names(extra)}")
    shaped = {**expected, HEAD: expected[EMBEDDING]} if HEAD in found else expected
    for name in sorted(found & set(shaped)):
        entry = weights.entry(name)
        if tuple(entry.shape) != shaped[name]:
            problems.append(f"{escape(name)} has shape {tuple(entry.shape)}, but the config says {shaped[name]}")
        elif entry.dtype not in WEIGHT_TYPES:
            problems.append(f"{escape(name)} has type {entry.dtype}, not float64, float32, float16 or bfloat16")
        if len(problems) == 10:
            break
    if problems:
        next = "use weights and config.json of the same model"
        if missing == {HEAD}:
            next = "use weights with a language-model head: these are of a base model, a classifier or an embedder"
        raise ModelError("; ".join(problems), where=where, next=next)


def _send(weights: hf.WeightFolder, name: str, parameter: Tensor) -> None:
    """Copy a tensor to its parameter on a device through pinned memory; reading one piece overlaps copying another."""
    stored = as_dtype(weights.entry(name).dtype.name)
    with no_grad():
        target = parameter.detach().view(-1)
        for start in range(0, target.numel(), PIECE):
            count = min(PIECE, target.numel() - start)
            piece = Tensor(pinned_empty((count,), stored, target.device))
            weights.read_part(name, start, piece.numpy())
            there = piece.to(device=target.device, non_blocking=True)
            target.narrow(0, start, count).copy_(there)


def _config_json(model: CausalLM, dtype: str) -> dict[str, Any]:
    """Return the source's config for weights of dtype `dtype`, with the keys that older and newer readers look for."""
    raw = dict(model.config.raw)
    if model.score is None and "CausalLM" not in str(
        raw.get("architectures")
    ):  # LlamaModel, for example, in a folder of base weights
        raw["architectures"] = [type(model).__name__]
    raw.update(dtype=dtype, torch_dtype=dtype, **model.config.rope_json())
    raw.setdefault("head_dim", model.config.head_dim)
    raw.setdefault("num_key_value_heads", model.config.num_key_value_heads)
    if model.score is None:
        raw["tie_word_embeddings"] = model.lm_head is None  # an adapter may untie the head
    return raw


def _plain_weights(
    model: CausalLM, dtype: str | None, values: Mapping[str, TensorSource] | None
) -> dict[str, TensorSource]:
    """Return the tensors of a plain model folder by name: adapters are merged in float32 and rounded once.

    Args:
        values: values of the parameters by name; None uses the model's.
        dtype: dtype of all tensors. None uses each tensor's own, or its 16-bit dtype in the folder if `load` chose a
            wider one.

    Raises:
        NumericError: on reading a tensor that exceeds float16's range.
    """
    if is_quantized(model):
        raise UsageError("a model with 8-bit weights cannot be saved", next="load it again without quantization")
    layers, found = adapted_layers(model), {}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner.rpartition(".")[0] in layers:
            continue  # a part of an adapter
        if last == "weight" and owner in layers:
            read = _host_values(layers[owner].merged_weight)
        else:
            read = _host_values(parameter.detach) if values is None else values[name].read
        kind = parameter.dtype.name if dtype is None else dtype
        stored = model.stored_types.get(name)
        if dtype is None and kind == "float32" and stored in ("float16", "bfloat16"):
            kind = stored
        found[name] = TensorSource(as_dtype(kind).numpy, parameter.shape, functools.partial(_rounded, name, read, kind))
    return found


def _host_values(tensor: Callable[[], Tensor]) -> Callable[[], np.ndarray]:
    return lambda: tensor().cpu().numpy()


def _rounded(name: str, read: Callable[[], np.ndarray], kind: str) -> np.ndarray:
    """Return `read`'s result in another float dtype. Raises: NumericError: a value exceeds its range."""
    values = read()
    with np.errstate(over="ignore"):
        found = values.astype(as_dtype(kind).numpy, copy=False)
    if kind == "float16" and not np.array_equal(np.isfinite(found), np.isfinite(values)):
        what = f"{escape(name)} has a weight of {np.abs(values).max():.3g}, but float16 only reaches 65,504"
        raise NumericError(what, next="write it as float32 or bfloat16")
    return found


def write_model(
    model: CausalLM,
    writer: FolderWriter,
    *,
    source: str | os.PathLike[str] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    eos_token_id: int | None = None,
    ends: Sequence[int] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
    values: Mapping[str, TensorSource] | None = None,
) -> None:
    """Write a model folder's files through `writer`; adapters are merged into the weights.

    Args:
        source: folder whose license, tokenizer, template and generation files are copied byte for byte.
        extra_files: additional files by name, such as the run's tokenizer. They take precedence over `source`; if they
            include another tokenizer, none of the source's tokenizer files is copied.
        eos_token_id: end of a text for `generation_config.json` if the source has no such file.
        ends: ids that end what the model was trained to generate; they come before those in the source's file. If
            empty, the file is copied byte for byte.
        dtype: "float32", "bfloat16" or "float16" for all weights; None keeps each tensor's own.
        values: values of the parameters by name; None uses the model's.
    """
    tensors = _plain_weights(model, dtype, values)
    writer.write("config.json", indented_bytes(_config_json(model, tensors[EMBEDDING].dtype.name)))
    hf.save_weights(writer, tensors, max_shard_bytes)
    extra = dict(extra_files or {})
    kept = [] if source is None else [name for name in hf.side_files(source) if name not in extra]
    if "tokenizer.json" in extra:
        kept = [name for name in kept if not hf.TOKENIZER_FILES.fullmatch(name)]
    if ends or not {hf.GENERATION_CONFIG} & {*kept, *extra}:
        extra[hf.GENERATION_CONFIG] = generation_config(model.config, source, ends, eos_token_id)
        kept = [name for name in kept if name != hf.GENERATION_CONFIG]
    if source is not None:
        hf.copy_side_files(source, writer, kept)
    for name, data in extra.items():
        writer.write(name, data)


@boundary(ModelError, "reading the adapter's folder")
def side_bytes(folder: Path) -> Mapping[str, bytes]:
    """Return the tokenizer, template, generation and license files of an adapter's folder."""
    names, largest = hf.side_files(folder), max(hf.SIDE_FILES.values())
    return {name: read_limited(safe_join(folder, name), hf.SIDE_FILES.get(name, largest)) for name in names}


def _set_tokenizer(model: CausalLM) -> Tokenizer | None:
    """Return the model's tokenizer if it is not its folder's, whose files are copied unchanged."""
    if model.tokenizer is None:
        return None
    name = "tokenizer.json"
    with boundary(ModelError, "reading the tokenizer"):
        folder = next((each for each in model.folders if exists(each / name)), None)
        kept = None if folder is None else read_limited(safe_join(folder, name), hf.SIDE_FILES[name])
    return None if kept == model.tokenizer.files()[name] else model.tokenizer


def save(
    model: CausalLM,
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
) -> None:
    """Write `model` into `folder` so that transformers loads it.

    A new folder appears as a whole; in an existing one the model's files are replaced one by one. Adapters are merged.

    Args:
        source: folder whose license, tokenizer, template and generation files are copied byte for byte. By default the
            folder that the model was loaded from; for an adapter its own folder takes precedence over its base's.
        tokenizer: tokenizer, or its folder, whose files take precedence over `source`. By default the one that was
            assigned to `model.tokenizer`, unless `source` is given.
        max_shard_bytes: larger weights are written as shards and an index.
        dtype: as in `write_model`.

    Raises:
        DiskError: writing failed; existing files are intact. ModelError: `source` or `tokenizer` cannot be used.
    """
    folders, end = [Path(source)] if source is not None else [*model.folders], None
    for each in folders:
        with boundary(ModelError, "looking for the folder", each):
            is_there = is_folder(each)
        if not is_there:
            what = f"the folder {escape(each)} does not exist, and its tokenizer was to be copied"
            next = "give source=, a folder with the model's tokenizer, or an empty one"
            raise ModelError(what, where="save", next=next)
    files = dict[str, bytes]() if len(folders) < 2 else dict(side_bytes(folders[0]))  # an adapter's replace its base's
    if tokenizer is None and source is None:
        tokenizer = _set_tokenizer(model)
    if tokenizer is not None:
        tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
        if tokenizer.vocab_size > model.config.vocab_size:
            rows, ids = f"{model.config.vocab_size:,} rows", f"{tokenizer.vocab_size:,} ids"
            what = f"{EMBEDDING} has {rows}, but the tokenizer has {ids}"
            next = f"load the model with vocab_size={tokenizer.vocab_size}, which adds the rows"
            raise ModelError(what, where="save", next=next)
        files = {name: data for name, data in files.items() if not hf.TOKENIZER_FILES.fullmatch(name)}
        files, end = files | tokenizer.files(), tokenizer.eos_id
    target, kept = Path(folder), folders[-1] if folders else None
    how: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "dtype": dtype}
    with FolderUpdate(target) if target.exists() else AtomicFolder(target) as writer:
        write_model(model, writer, source=kept, extra_files=files, eos_token_id=end, **how)
