"""How far 16-bit logits of generation on a GPU are from float32, at each position: Genesis beside torch.

    python -m benchmarks.gpu.generation_logits --sizes 0.5B --batches 1,8 --new 64

Genesis's engine continues prompts, greedily, with weights in bfloat16; torch's decoder (generation_torch.py) is given
the same tokens, one by one, through its cache. The reference is a forward pass of Genesis over the whole text with the
same weights in float32. A distance is |x - reference| / |reference| over the vocabulary. The command fails where
Genesis is more than twice as far as torch at some position (issue 21).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.lora_step import listed

__all__ = ["ADDED", "compare", "of_genesis"]

ADDED = 2.0  # times torch's distance


def of_genesis(job: dict[str, Any], case: dict[str, Any]) -> dict[str, np.ndarray]:
    """The text `[B, T + N]`, and the last N logits `[B, N, V]` of the engine and of a pass over it in float32."""
    import genesis
    from benchmarks.gpu.generation_genesis import Opened, prompts
    from genesis_models.engine import device_rows

    opened, logits = Opened(job), []
    call = device_rows.Step.__call__

    def noting(step: Any) -> None:
        call(step)
        logits.append(step.logits[: case["batch"]].float().cpu().numpy())

    device_rows.Step.__call__ = noting  # type: ignore[method-assign]
    for _ in range(2):  # with captured steps at last
        logits.clear()
        tokens = np.array(opened.run(case)["tokens"])
    device_rows.Step.__call__ = call  # type: ignore[method-assign]
    device_rows.release(opened.model)
    model, ids = opened.model.to(dtype="float32").eval(), prompts(case, opened.model.config.vocab_size)
    text, reference = np.concatenate([ids, tokens], axis=1), []
    with genesis.no_grad():
        for row in text[:, :-1]:
            hidden = model.hidden_states(genesis.tensor(row[None], device=job["device"]))[0, ids.shape[1] - 1 :]
            reference.append(model.logits(hidden).cpu().numpy())
    return {"text": text, "ours": np.stack(logits, 1), "reference": np.stack(reference)}


def of_torch(job: dict[str, Any], case: dict[str, Any], text: np.ndarray) -> np.ndarray:
    """The last N logits `[B, N, V]` of torch's decoder, of the same text."""
    import torch

    from benchmarks.gpu import generation_torch

    opened = generation_torch.Opened(job)
    decoder, count = opened.decoder, case["prompt"]
    given = torch.from_numpy(text).to(job["device"])
    found: list[torch.Tensor] = []

    def noting(x: torch.Tensor, sampled: bool) -> None:
        normed = generation_torch.normed(x, decoder.norm, decoder.eps)
        found.append(torch.nn.functional.linear(normed, decoder.head)[:, -1])

    decoder._next = noting  # type: ignore[method-assign]
    decoder.room(*text.shape)
    decoder.prefill(given[:, :count], False)
    for at in range(count, text.shape[1] - 1):
        decoder.token.copy_(given[:, at : at + 1])
        decoder.step(False)
    return torch.stack(found, 1).float().cpu().numpy()


def compare(ours: np.ndarray, theirs: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Distances at all positions, and how their ratios are spread."""
    far = [
        np.linalg.norm(x - reference, axis=-1) / np.linalg.norm(reference, axis=-1) for x in (ours, theirs)
    ]  # [B, N]
    ratio = far[0] / far[1]
    return {
        "positions": ratio.size, "genesis": float(far[0].mean()), "torch": float(far[1].mean()),
        "ratio_median": float(np.median(ratio)), "ratio_most": float(ratio.max()),
        "same_token": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }  # fmt: skip


def _side(name: str, python: str, job: dict[str, Any], case: dict[str, Any]) -> None:
    """Run a side in a process of its own, which leaves its arrays in the folder."""
    command = [python, "-m", "benchmarks.gpu.generation_logits", "--side", name, json.dumps([job, case])]
    subprocess.run(command, check=True)


def _answer(name: str, job: dict[str, Any], case: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    if name == "prepare":
        from benchmarks.gpu.generation_genesis import prepare

        prepare(job)
    elif name == "genesis":
        np.savez(folder / "genesis.npz", **of_genesis(job, case))  # type: ignore[arg-type]
    else:
        text = np.load(folder / "genesis.npz")["text"]
        np.savez(folder / "torch.npz", theirs=of_torch(job, case, text))


def main() -> int:
    """Whether a position was too far."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="0.5B", help="0.5B, qwen3-0.6B, llama-3.2-1B, tiny")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter of an environment with torch")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        _answer(chosen.side[0], *json.loads(chosen.side[1]))
        return 0
    is_far = False
    for size in listed(chosen.sizes):
        with tempfile.TemporaryDirectory() as folder:
            job = {"size": size, "folder": folder, "device": chosen.device, "dtype": "bfloat16"}
            job |= {"weights": "auto", "cache": "auto", "side": "logits"}
            _side("prepare", sys.executable, job, {})
            for batch in map(int, listed(chosen.batches)):
                case = {"batch": batch, "prompt": chosen.prompt, "new": chosen.new, "draw": "greedy"}
                _side("genesis", sys.executable, job, case)
                _side("torch", chosen.torch, job, case)
                left, right = (np.load(Path(folder) / f"{name}.npz") for name in ("genesis", "torch"))
                found = compare(left["ours"], right["theirs"], left["reference"])
                is_far |= found["ratio_most"] > ADDED
                said = "  ".join(f"{k} {v:.4g}" for k, v in found.items())
                print(f"{size} {batch} x {chosen.prompt}+{chosen.new}: {said}", flush=True)
    return int(is_far)


if __name__ == "__main__":
    sys.exit(main())
