"""Adapters and merged models of Genesis loaded by PEFT and transformers, adapters of PEFT by Genesis: equal logits.

    .venv-peers/bin/python -m tests.peers.adapters

Needs an environment with Genesis, torch, transformers and peft (`make peers`), so it is no part of `make test`;
`make peers-test` runs it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

import genesis
import genesis_models
from genesis.data.chat import ChatTemplate
from genesis.data.tokenizer import train_bpe
from genesis.files.atomic import AtomicFolder
from genesis.train.output import Output
from genesis_cli.main import main as main_of_genesis
from genesis_cli.session.export import export
from genesis_models.adapters import AdapterConfig, adapted_layers, adapter_parameters, apply_adapters, write_adapter
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import generation_config
from tests.models.golden import FIXTURES

ADAPTER, MERGED = 1e-5, 1e-4  # the largest difference of a logit, in float32
BFLOAT16 = 2e-2  # relative: a rounding of each weight to 8 bits
MODELS = ("qwen2-tied", "qwen2-untied-sharded", "qwen3-tied", "phi3", "smollm3")
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "q and v": {"target_modules": (r".*\.self_attn\.(q|v|qkv)_proj")},
    "ranks": {"rank_pattern": {"o_proj": 5, r"layers\.0\.mlp.*": 1}, "alpha_pattern": {"down_proj": 1.5}},
    "embedding": {"modules_to_save": ("embed_tokens",)},
    "head": {"modules_to_save": ("lm_head", "norm")},
    "both": {"modules_to_save": ("embed_tokens", "lm_head")},
    "both, tied": {"modules_to_save": ("embed_tokens", "lm_head"), "ensure_weight_tying": True},
    "dora, ranks": {"use_dora": True, "use_rslora": True, "rank_pattern": {"o_proj": 5}},
}
RUNS: dict[str, dict[str, Any] | None] = {
    "in full": None,
    "lora": {"r": 4},
    "rslora, q and v": {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"r": 4, "use_dora": True},
    "whole": {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
    "whole, tied": {"r": 4, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
}
END = 5
# Forms of PEFT's configs that Genesis reads and never writes.
READ: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "regular expression": {"target_modules": r".*\.1\..*(q_proj|down_proj)"},
    "whole names": {"target_modules": ["model.layers.0.self_attn.o_proj", "up_proj"]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "model.layers.1.mlp.up_proj"]},
    "excluded by pattern": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.0\..*"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "one layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "ranks": {
        "target_modules": ["q_proj", "up_proj", "o_proj"], "use_rslora": True,
        "rank_pattern": {r"layers\.0\..*": 1, "q_proj": 7, "^model.layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"o_proj": 3},
    },
    "gaussian": {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": "gaussian", "use_dora": True},
    "orthogonal": {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": "orthogonal", "r": 4},
    "embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "both, tied": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "norms, a block": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "layers.1.mlp"]},
    "nothing to tie": {"target_modules": ["q_proj"], "ensure_weight_tying": True},
    "mica": {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": "mica"},
}  # fmt: skip


def adapted(base: Path, settings: dict[str, Any]) -> CausalLM:
    """A model with an adapter whose every tensor does something."""
    genesis.manual_seed(1)
    config = AdapterConfig(**{"r": 3, "alpha": 6.0} | settings)
    model = apply_adapters(genesis_models.load(base, dtype="float32"), config)
    with genesis.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if ".lora_" not in name:
                parameter.add_(genesis.randn(*parameter.shape) * 0.02)
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(0.0, 0.05)
            if layer.lora_magnitude_vector is not None:
                layer.reset_magnitude()
                layer.lora_magnitude_vector.weight.mul_(1.05)
    return model


def ours(model: CausalLM, ids: np.ndarray) -> np.ndarray:
    with genesis.no_grad():
        found: np.ndarray = model.eval()(genesis.from_numpy(ids)).numpy()
    return found


def theirs(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model.eval()(input_ids=torch.from_numpy(ids), use_cache=False).logits.float())


def compared(name: str, settings: dict[str, Any], folder: Path) -> Iterator[tuple[str, float, float]]:
    """Of one adapter: what was compared, the difference, and what it may be."""
    base = FIXTURES / name
    model = adapted(base, settings)
    with AtomicFolder(folder / "adapter") as writer:
        write_adapter(model, writer, base=base)
        writer.write("generation_config.json", generation_config(model.config, base, [END]))
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 16))
    expected = ours(model, ids)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert np.abs(theirs(plain, ids) - expected).max() > 1e-2, "the adapter does nothing"
    yield "PeftModel", largest(theirs(PeftModel.from_pretrained(plain, folder / "adapter"), ids), expected), ADAPTER
    with contextlib.chdir(folder / "adapter"):  # PEFT reads the base's path from the current folder
        automatic = AutoPeftModelForCausalLM.from_pretrained(".", dtype=torch.float32)
    yield "AutoPeftModel", largest(theirs(automatic, ids), expected), ADAPTER
    for what, dtype in (("merged", "float32"), ("merged bf16", "bfloat16")):
        out = folder / what.replace(" ", "-")
        given: dict[str, Any] = {"merge": True, "dtype": dtype, "check": True, "base": None}
        export(str(folder / "adapter"), out=str(out), **given, console=Output(sys.stderr))
        merged, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        left = [found for found in report.values() if found]
        assert not left, f"transformers says: {left}"
        ends = GenerationConfig.from_pretrained(out).eos_token_id
        assert END in (ends if isinstance(ends, list) else [ends]), f"it ends at {ends}"
        found = theirs(merged, ids)
        if dtype == "float32":
            yield what, largest(found, expected), MERGED
        else:
            yield what, float(np.linalg.norm(found - expected) / np.linalg.norm(expected)), BFLOAT16


def read(name: str, settings: dict[str, Any], folder: Path) -> tuple[float, int]:
    """How far Genesis is from PEFT with an adapter that PEFT made, and how many layers that has."""
    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(**{"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".lora_" in parameter_name or "modules_to_save" in parameter_name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    found = genesis_models.load(folder, dtype="float32")
    ids = np.random.default_rng(0).integers(0, found.config.vocab_size, (2, 16))
    return largest(ours(found, ids), theirs(model, ids)), len(adapted_layers(found))


def trained(lora: dict[str, Any] | None) -> Iterator[tuple[str, float, float]]:
    """Of a run on chats, with adapters or in full: its final folder, a checkpoint and exports, and how they talk."""
    tokenizer = train_bpe(["user assistant 1 + 2 = 3"] * 3, vocab_size=270)
    genesis_models.save(genesis_models.load(FIXTURES / "qwen3-tied"), "base", tokenizer=tokenizer)
    chats = (
        [{"role": "user", "content": f"{i} + {i}"}, {"role": "assistant", "content": f"{2 * i}"}] for i in range(40)
    )
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    Path("loud.jinja").write_text(ChatTemplate.chatml(tokenizer).texts_with_defaults["default"] + "{# loud #}")
    config = {
        "model": {"path": "base", "dtype": "float32"},
        "data": {"train": "chats.jsonl", "template": "loud.jinja", "template_args": {"loud": True}, "seq_len": 64},
        "train": {"output_dir": "run", "steps": 4, "batch_size": 2, "device": "cpu"},
        "optim": {"lr": 0.01},
        "checkpoint": {"every": 2},
    } | ({} if lora is None else {"lora": lora})
    Path("run.yaml").write_text(json.dumps(config))
    command("train", "run.yaml")
    ids = np.random.default_rng(0).integers(0, 270, (2, 16))
    expected = ours(genesis_models.load("run"), ids)
    kind = AutoModelForCausalLM if lora is None else AutoPeftModelForCausalLM
    with contextlib.chdir("run"):
        yield "run", largest(theirs(kind.from_pretrained(".", dtype=torch.float32), ids), expected), ADAPTER
    with contextlib.chdir("run/checkpoint-2"):
        early = kind.from_pretrained(".", dtype=torch.float32)
    yield "checkpoint", largest(theirs(early, ids), ours(genesis_models.load("run/checkpoint-2"), ids)), ADAPTER
    command("export", "run", "--check", *(["--merge"] if lora is not None else []), "--out", "out")
    model = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    yield "export", largest(theirs(model, ids), expected), MERGED
    tokens = AutoTokenizer.from_pretrained("out")
    assert tokens.chat_template == json.loads(Path("out/tokenizer_config.json").read_text())["chat_template"]
    assert tokens.chat_template.startswith("{% if loud is not defined %}{% set loud = true %}")
    assert model.generation_config.eos_token_id == tokens.eos_token_id == tokenizer.eos_id
    asked = tokens.apply_chat_template([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    prompt = torch.tensor([asked["input_ids"]])
    assert model.generate(prompt, max_new_tokens=2, do_sample=False).shape[1] > prompt.shape[1]


def command(*words: str) -> None:
    """`genesis words…`, which must end well; what it says goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        assert main_of_genesis(words) == 0, words


def largest(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def main() -> int:
    """Prints a line for each comparison; 1 where one fails."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("error", message=".*(missing|unexpected).*")
    failed = 0
    for name, kind, what, found, allowed in comparisons():
        is_right = found < allowed
        failed += not is_right
        print(
            f"{'ok    ' if is_right else 'FAILED'} {name:22} {kind:20} {what:14} {found:.2e} < {allowed:g}", flush=True
        )
    print("all as expected" if not failed else f"{failed} failed")
    return int(failed > 0)


def comparisons() -> Iterator[tuple[str, str, str, float, float]]:
    """Model, form of the adapter, what was compared, the difference, and what it may be."""
    for kind, lora in RUNS.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            yield from (("a run on chats", kind, *rest) for rest in trained(lora))
    for name in MODELS:
        for kind, settings in KINDS.items():
            with tempfile.TemporaryDirectory() as folder:
                yield from ((name, kind, *rest) for rest in compared(name, settings, Path(folder)))
        for form, settings in READ.items() if name.startswith("qwen") else ():
            with tempfile.TemporaryDirectory() as folder:
                found, count = read(name, settings, Path(folder))
                yield name, form, f"read, {count} layers", found, ADAPTER


if __name__ == "__main__":
    sys.exit(main())
