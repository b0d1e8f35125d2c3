"""What `genesis estimate` says of runs, and what the same runs then take of the GPU.

    python -m benchmarks.gpu.estimates

Eight runs of `genesis train`, of three steps and an evaluation each, on a base with random weights: in full, with LoRA
and with DoRA, with and without activation checkpointing, in one and in several micro-steps. The estimate is made as on
a machine without a GPU. The last lines say what the driver keeps of the GPU's memory for itself. `--tiny` takes a toy
and the CPU, to try the script.
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
from genesis.backend import CPU, as_device
from genesis.backend.cuda.simulated.fake import ARCHITECTURES, counting_device
from genesis.data.tokenizer import train_bpe
from genesis.train.config_file import parse_config
from genesis.train.output import Output
from genesis.train.saving import Saves
from genesis_cli import session
from genesis_cli.session.estimate import ASSUMED, DRIVER, Place, estimate
from genesis_models.registry import preset

TOLERANCE = 0.03
# Model, rows, micro-steps, activation checkpointing, adapters.
CASES: tuple[tuple[str, int, int, str, dict[str, Any] | None], ...] = (
    ("0.5B", 8, 1, "none", None),
    ("0.5B", 8, 1, "selective", None),
    ("qwen3-0.6B", 4, 1, "full", None),
    ("0.5B", 2, 4, "none", None),
    ("0.5B", 8, 1, "none", {"r": 16}),
    ("0.5B", 8, 1, "full", {"r": 16}),
    ("0.5B", 8, 1, "none", {"r": 16, "use_dora": True}),
    ("0.5B", 4, 2, "selective", {"r": 16, "use_dora": True}),
)
COLUMNS = ("model", "rows", "micro", "checkpointing", "trained", "estimate GiB", "measured GiB", "off %", "reserved")
COLUMNS += ("estimate of it", "s")
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def base_of(size: str, folder: Path, texts: list[str], *, is_tiny: bool) -> Path:
    """A model folder with random weights and a small tokenizer."""
    path = folder / size
    if not path.exists():
        raw = preset(size) | (TINY if is_tiny else {})
        model = genesis_models.build(
            raw, device="cpu" if is_tiny else "cuda", dtype="float32" if is_tiny else "bfloat16"
        )
        genesis_models.save(model, path, tokenizer=train_bpe(texts, vocab_size=500))
    return path


def config_of(case: tuple[Any, ...], base: Path, folder: Path, *, is_tiny: bool) -> Any:
    """The configuration of a case, as a file would have it."""
    _, rows, micro, how, lora = case
    length = 64 if is_tiny else 1024
    raw: dict[str, Any] = {
        "model": {"path": str(base)},
        "data": {"train": "docs/*.md", "seq_len": length, "cache_dir": str(folder / "cache")},
        "train": {
            "output_dir": str(folder / "run"),
            "steps": 3,
            "batch_size": rows,
            "accumulation_steps": micro,
            "activation_checkpointing": "full" if is_tiny and how == "selective" else how,
            "device": "cpu" if is_tiny else "cuda",
        },
        "eval": {"max_batches": 1},
        "checkpoint": {"save_final": False, "every": None},
    }
    return parse_config(json.dumps(raw | ({} if lora is None else {"lora": lora})), "a case")


def measured(config: Any, device: Any) -> tuple[int, int]:
    """Bytes that a run took at its peak: of tensors, and reserved. Its save at the end, 20 s of disk, is left out."""
    gc.collect()
    with mock.patch.object(Saves, "save", return_value="left out"):
        if device == CPU:
            session.train(config, resume=False, console=Output(None))
            return 0, 0
        cuda.empty_cache(device)
        cuda.reset_peak_memory_stats(device)
        before = cuda.memory_allocated(device)
        session.train(config, resume=False, console=Output(None))
    return cuda.max_memory_allocated(device) - before, cuda.max_memory_reserved(device)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    is_tiny = parser.parse_args().tiny
    device, place = as_device("cpu" if is_tiny else "cuda"), counting_device(ARCHITECTURES[ASSUMED])
    simulated = Place(place, "simulated", None, None, False)
    texts = [path.read_text() for path in sorted(Path("docs").glob("*.md"))[:4]]
    worst = 0.0
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(CASES):
            started = time.perf_counter()
            base = base_of(case[0], Path(name), texts, is_tiny=is_tiny)
            config = config_of(case, base, Path(name) / str(number), is_tiny=is_tiny)
            said = estimate(config, f"case {number}", simulated)
            peak, reserved = measured(config, device)
            off = said.peak / peak - 1 if peak else 0.0
            worst = max(worst, abs(off))
            lora = case[4]
            kind = "full" if lora is None else "DoRA" if lora.get("use_dora") else "LoRA"
            figures = f"{said.peak / 2**30:.3f} | {peak / 2**30:.3f} | {100 * off:+.2f} | {reserved / 2**30:.2f}"
            taken = f"{said.reserved / 2**30:.2f} | {time.perf_counter() - started:.1f}"
            print(f"| {case[0]} | {case[1]} | {case[2]} | {case[3]} | {kind} | {figures} | {taken} |", flush=True)
    print(f"largest difference: {100 * worst:.2f} %, allowed {100 * TOLERANCE:.0f} %")
    if device != CPU:
        free, total = cuda.mem_get_info(device)
        kept = total - free - cuda.memory_reserved(device)
        print(f"driver: {kept / 2**20:.0f} MiB of {total / 2**30:.1f} GiB, counted as {DRIVER >> 20} MiB")
    assert worst <= TOLERANCE


if __name__ == "__main__":
    main()
