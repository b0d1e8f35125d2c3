"""Runs the recipes that ship with Genesis on a GPU, with random weights where they name a model: time and memory.

    python -m benchmarks.gpu.recipes [--steps N] [NAME …]

Each recipe is trained on its own data, whole or for N steps of its own size. Losses mean nothing, as the weights of a
named model are random and its tokenizer is a small one, which cuts texts into more tokens; times and memory are those
of the model. The save at the end is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import genesis_models
from genesis import cuda
from genesis.data.sources import CHATS, expand
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.train.output import Output
from genesis.train.saving import Saves
from genesis_cli import recipes, session
from genesis_models.registry import preset

PRESET = {"Qwen2.5-0.5B": "0.5B", "Qwen3-0.6B": "qwen3-0.6B"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def stand_in(name: str, folder: Path) -> Path:
    """A folder with the shape of the model called `name`, random weights and a tokenizer of the example's chats."""
    kind = next(size for known, size in PRESET.items() if known in name)
    path = folder / kind
    if not path.exists():
        (file,) = expand([CHATS])
        texts = file.path.read_text().splitlines()
        genesis_models.save(genesis_models.build(preset(kind), device="cuda", dtype="bfloat16"), path)
        content = json.loads(train_bpe(texts, vocab_size=2000).files()["tokenizer.json"])
        first, size = content["added_tokens"][0], len(content["model"]["vocab"])
        for n, token in enumerate(("<|im_start|>", "<|im_end|>")):
            content["added_tokens"].append({**first, "id": size + n, "content": token, "special": True})
        (path / "tokenizer.json").write_text(json.dumps(content))
        (path / "chat_template.jinja").write_text(TEMPLATE)
        ends = {"eos_token_id": [size + 1]}
        (path / "generation_config.json").write_text(json.dumps(ends))
        Tokenizer.load(path)
    return path


def trained(name: str, folder: Path, steps: int | None) -> dict[str, Any]:
    """What a recipe took; whole without `steps`."""
    config = recipes.load(name, [])
    changed = [f"train.output_dir={folder / name}", "log.every=1", "checkpoint.save_final=false"]
    if steps is not None:
        changed += ["train.epochs=null", f"train.steps={steps}", "checkpoint.every=null", "eval.max_batches=2"]
    if config.model.path is not None:
        changed.append(f"model.path={stand_in(config.model.path, folder)}")
    gc.collect()
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    before, started = cuda.memory_allocated(), time.perf_counter()
    with mock.patch.object(Saves, "save", return_value="left out"):  # at the end: 20 s of disk
        found = session.train(recipes.load(name, changed), resume=False, console=Output(None))
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    times = sorted(row["perf/step_ms"] for row in rows if row.get("perf/step_ms"))
    return {
        "steps": len(rows),
        "ms": times[len(times) // 2],
        "tokens/s": found.tokens_per_second,
        "peak": cuda.max_memory_allocated() - before,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    print("| recipe | steps | ms a step | tokens/s | peak GiB | s, with data and compilation |\n" + "|---" * 6 + "|")
    with tempfile.TemporaryDirectory() as name:
        for each in given.names or [known for known in recipes.names() if known != "quickstart"]:
            row = trained(each, Path(name), given.steps)
            figures = [f"{row['steps']}", f"{row['ms']:.1f}", f"{row['tokens/s']:,.0f}"]
            figures += [f"{row['peak'] / 2**30:.2f}", f"{row['seconds']:.1f}"]
            print(f"| {' | '.join([each, *figures])} |", flush=True)


if __name__ == "__main__":
    main()
