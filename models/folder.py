"""Model folders as Hugging Face writes them: load one into a model, save a model into one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from genesis import Tensor, no_grad
from genesis.backend import CPU
from genesis.dtypes import as_dtype, bfloat16, float16, float32, float64
from genesis.errors import ModelError, escape
from genesis.functions.transfer import pinned_empty
from genesis.io.files import AtomicFolder, FolderUpdate, FolderWriter
from genesis.io.hf import SIDE_FILES, WeightFolder, copy_side_files, list_names, read_json, save_weights
from genesis.io.paths import safe_join
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.registry import ARCHITECTURES, check_architecture, empty_model

__all__ = ["check_weights", "load", "parameter_count", "parameter_shapes", "read_config", "save", "write_model"]

WEIGHT_TYPES = [d.numpy for d in (float64, float32, float16, bfloat16)]
MAX_SHARD_BYTES = 5 << 30  # transformers' default
PIECE = 8 << 20  # elements on their way to a device
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The checked `config.json` of a model folder.

    Raises:
        ModelError: it is missing, malformed, or describes a model that Genesis does not have.
    """
    path = safe_join(folder, "config.json", where=escape(folder))
    return ModelConfig.from_dict(read_json(path), where=escape(path))


def load(folder: str | os.PathLike[str], device: str = "cpu", dtype: str = "float32") -> CausalLM:
    """The model in `folder`: `config.json` and safetensors, in one file or in shards.

    Loading is strict: every parameter is found once, with its shape, and nothing is left over; the check is made on the
    headers, before memory is taken.

    Args:
        device: where the weights go.
        dtype: "float32" or "bfloat16"; stored weights of another float type are cast.

    Raises:
        ModelError: what is missing, left over or mis-shaped, at most 10 names of each, with the counts.
    """
    config = read_config(folder)
    check_architecture(config, where=escape(Path(folder) / "config.json"))
    with WeightFolder(folder) as weights:
        names = _check_names(config, weights, escape(folder))
        model = empty_model(config, where=escape(Path(folder) / "config.json"), device=device, dtype=dtype)
        for name, parameter in model.named_parameters():
            if name not in names:
                continue
            if parameter.device == CPU:
                _read(weights, name, parameter.detach().numpy())
            else:
                _send(weights, name, parameter)
        if config.tie_word_embeddings and HEAD in weights.names:
            _check_tied(weights, escape(folder))
    return model


def check_weights(folder: str | os.PathLike[str]) -> None:
    """Check a model folder's config and headers as `load` does, without reading a tensor.

    Raises:
        ModelError: as in `load`.
    """
    config = read_config(folder)
    check_architecture(config, where=escape(Path(folder) / "config.json"))
    with WeightFolder(folder) as weights:
        _check_names(config, weights, escape(folder))


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model of a config; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, without making the model."""
    h, d = config.hidden_size, config.head_dim
    q, kv, inner = config.num_attention_heads * d, config.num_key_value_heads * d, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, h)
    qkv_bias = config.attention_bias or config.model_type == "qwen2"
    for i in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for part, (rows, columns), bias in (
            (f"{attention}.q_proj", (q, h), qkv_bias),
            (f"{attention}.k_proj", (kv, h), qkv_bias),
            (f"{attention}.v_proj", (kv, h), qkv_bias),
            (f"{attention}.o_proj", (h, q), config.attention_bias and config.model_type != "qwen2"),
            (f"{mlp}.gate_proj", (inner, h), config.mlp_bias),
            (f"{mlp}.up_proj", (inner, h), config.mlp_bias),
            (f"{mlp}.down_proj", (h, inner), config.mlp_bias),
        ):
            shapes[f"{part}.weight"] = (rows, columns)
            if bias:
                shapes[f"{part}.bias"] = (rows,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        shapes.update({f"model.layers.{i}.{n}.weight": (h,) for n in norms})
        if config.model_type == "qwen3":
            shapes.update({f"{attention}.{n}.weight": (d,) for n in ("q_norm", "k_norm")})
    return shapes


def _check_names(config: ModelConfig, weights: WeightFolder, where: str) -> set[str]:
    """The names to read.

    Raises:
        ModelError: with everything that is wrong with the folder's names, shapes and types.
    """
    expected = parameter_shapes(config)
    found = set(weights.names)
    allowed = set(expected) | ({HEAD} if config.tie_word_embeddings else set())
    # Rotary tables that old checkpoints carry are derived values.
    extra = {n for n in found - allowed if not n.endswith(".rotary_emb.inv_freq")}
    missing = set(expected) - found
    problems = []
    if missing:
        problems.append(f"missing: {list_names(missing)}")
    if extra:
        problems.append(f"not part of the model: {list_names(extra)}")
    shaped = {**expected, HEAD: expected[EMBEDDING]} if HEAD in found else expected
    for name in sorted(found & set(shaped)):
        entry = weights.entry(name)
        if tuple(entry.shape) != shaped[name]:
            problems.append(f"{escape(name)} has shape {tuple(entry.shape)}, the config says {shaped[name]}")
        elif entry.dtype not in WEIGHT_TYPES:
            problems.append(f"{escape(name)} has type {entry.dtype}, weights are floating point")
        if len(problems) == 10:
            break
    if problems:
        raise ModelError("; ".join(problems), where=where, next="use weights and config.json of the same model")
    return set(expected)


def _read(weights: WeightFolder, name: str, out: np.ndarray) -> None:
    """One tensor into its parameter, cast where the stored type differs."""
    if weights.entry(name).dtype == out.dtype and out.flags.c_contiguous:
        weights.read_into(name, out)
    else:
        np.copyto(out, weights.read(name), casting="unsafe")


def _send(weights: WeightFolder, name: str, parameter: Tensor) -> None:
    """One tensor into its parameter on a device, by pieces in page-locked memory: one is read while another travels."""
    stored = as_dtype(weights.entry(name).dtype.name)
    with no_grad():
        target = parameter.detach().view(-1)
        for start in range(0, target.numel(), PIECE):
            count = min(PIECE, target.numel() - start)
            piece = Tensor(pinned_empty((count,), stored, target.device))
            weights.read_part(name, start, piece.numpy())
            there = piece.to(device=target.device, non_blocking=True)
            target.narrow(0, start, count).copy_(there)


def _check_tied(weights: WeightFolder, where: str) -> None:
    """A tied model may store its head as well, if it equals the embedding."""
    if not np.array_equal(weights.read(HEAD), weights.read(EMBEDDING)):
        raise ModelError(
            f"tie_word_embeddings is set, and {HEAD} differs from {EMBEDDING}",
            where=where,
            next="set tie_word_embeddings to false in config.json, or remove the head's tensor",
        )


def _config_json(model: CausalLM) -> dict[str, Any]:
    """The source's config, with the keys that older and newer readers look for."""
    raw = dict(model.config.raw)
    dtype = model.head_weight.dtype.name
    rope = {**model.config.rope.parameters, "rope_theta": model.config.rope.theta, "rope_type": model.config.rope.kind}
    raw.setdefault("architectures", [ARCHITECTURES[model.config.model_type].__name__])
    raw.update(dtype=dtype, torch_dtype=dtype, rope_theta=model.config.rope.theta, rope_parameters=rope)
    if model.config.rope.kind != "default":
        raw["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    raw.setdefault("head_dim", model.config.head_dim)
    raw.setdefault("num_key_value_heads", model.config.num_key_value_heads)
    raw["tie_word_embeddings"] = model.config.tie_word_embeddings
    return raw


def _generation_config(model: CausalLM, eos_token_id: int | None) -> dict[str, Any]:
    """The smallest file that transformers reads; a source folder's own file goes before it."""
    content: dict[str, Any] = {"_from_model_config": True}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if model.config.raw.get(key) is not None:
            content[key] = model.config.raw[key]
    if eos_token_id is not None:
        content["eos_token_id"] = eos_token_id
    return content


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def write_model(
    model: CausalLM,
    writer: FolderWriter,
    *,
    source: str | os.PathLike[str] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    eos_token_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model folder's files through `writer`.

    Args:
        source: a folder whose tokenizer, template and generation files are kept byte for byte.
        extra_files: further files (a tokenizer made by the run), by name; they go before those of `source`.
        eos_token_id: what ends a text, for `generation_config.json` where the source has none.
    """
    tensors = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    writer.write("config.json", _json_bytes(_config_json(model)))
    save_weights(writer, tensors, max_shard_bytes)
    extra = dict(extra_files or {})
    copied = copy_side_files(source, writer, [n for n in SIDE_FILES if n not in extra]) if source is not None else []
    if "generation_config.json" not in copied and "generation_config.json" not in extra:
        extra["generation_config.json"] = _json_bytes(_generation_config(model, eos_token_id))
    for name, data in extra.items():
        writer.write(name, data)


def save(
    model: CausalLM,
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `model` into `folder` so that transformers loads it; arguments as in `write_model`.

    A new folder appears whole; in an existing one the model's files are replaced one by one.

    Raises:
        DiskError: writing failed; what was there is intact.
    """
    target = Path(folder)
    update = FolderUpdate(target) if target.exists() else AtomicFolder(target)
    with update as writer:
        write_model(model, writer, source=source, max_shard_bytes=max_shard_bytes)
