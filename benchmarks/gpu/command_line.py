"""The first text of `genesis generate`, from the start of the process: a random model with a tokenizer of its size.

    python -m benchmarks.gpu.command_line --size 0.5B --device cuda --runs 4

The first run fills the cache of kernels. `first` is the time until text appears on stdout, `whole` until the process
has ended, with `--phases` what its parts took in the last run: imports, tokenizer, weights, the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["first_text", "write_folder", "write_tokenizer"]

END = "<|endoftext|>"
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PHASES = """
import sys, time
begun = float(sys.argv.pop(1))  # the clock of all processes
from genesis_cli.app import run
import genesis_cli.session
marks = [("imports", time.perf_counter())]
def marked(owner, name, said):
    call = getattr(owner, name)
    def noted(*args, **keywords):
        found = call(*args, **keywords)
        marks.append((said, time.perf_counter()))
        return found
    setattr(owner, name, noted)
from genesis_cli.session import generation, inference
from genesis_models.engine import device, device_prompts, device_rows
marked(generation, "opened", "tokenizer and weights")
marked(device.DeviceEngine, "__init__", "ids")
marked(device, "take", "cache")
marked(device_prompts.Prompts, "pass_all", "prompt")
marked(device_rows.DeviceState, "start", "state")
marked(device_rows.Reading, "results", "token")
try:
    run(sys.argv[1:])
finally:
    said, last = [], begun
    for name, at in marks[:8]:
        said.append(f"{name} {at - last:.2f}")
        last = at
    print("phases, s:", "  ".join(said), file=sys.stderr)
"""


def write_folder(folder: Path, size: str, device: str) -> None:
    """A model with random weights, and a tokenizer with as many tokens as it has, but 16."""
    import genesis_models
    from benchmarks.gpu.lora_genesis import config_of

    model = genesis_models.build(config_of(size), seed=0, device=device, dtype="bfloat16")
    genesis_models.save(model, folder)
    write_tokenizer(folder, model.config.vocab_size - 16)


def write_tokenizer(folder: Path, count: int) -> None:
    """A byte-level BPE tokenizer with random merges."""
    rng, tokens, merges = random.Random(0), list(_letters()), []
    known = set(tokens)
    while len(tokens) < count:
        a, b = rng.choice(tokens), rng.choice(tokens)
        if len(a + b) <= 10 and a + b not in known:
            known.add(a + b)
            tokens.append(a + b)
            merges.append([a, b])
    ids = {token: i for i, token in enumerate(tokens)}
    special = {"content": END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": len(ids), "special": True, **special}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, by_byte]},
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": ids, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}), encoding="utf-8")


def _letters() -> str:
    """What GPT-2's byte-level alphabet writes for the bytes 0 to 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return "".join(chr(byte if byte in shown else next(hidden)) for byte in range(256))


def first_text(command: list[str]) -> tuple[float, float, str]:
    """Seconds until a command's first text, and until it has ended; what it wrote on stderr.

    Raises:
        RuntimeError: it failed.
    """
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            first = time.perf_counter() - begun
            process.stdout.read()
        whole = time.perf_counter() - begun
        errors.seek(0)
        said = errors.read().strip()
    if process.returncode:
        raise RuntimeError(said[-2000:])
    return first, whole, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="0.5B", help="0.5B, qwen3-0.6B, llama-3.2-1B, tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="keep the model here, and take it from here")
    parser.add_argument("--phases", action="store_true", help="say what the parts of the last run took")
    chosen = parser.parse_args()
    if sys.dont_write_bytecode:  # an installed wheel has its bytecode, without which imports take twice as long
        print("PYTHONDONTWRITEBYTECODE is set: each run may compile its modules from source", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary) / "model"
        if not (folder / "tokenizer.json").exists():
            write_folder(folder, chosen.size, chosen.device)
        given = ["generate", str(folder), "--prompt", "The first words of a text, " * 2, "--max-tokens", "32"]
        given += ["--temperature", "0", "--device", chosen.device]
        for run in range(chosen.runs):
            first, whole, said = first_text([sys.executable, "-m", "genesis_cli", *given])
            print(f"run {run + 1}: first {first:5.2f} s, whole {whole:5.2f} s; {said.splitlines()[-1]}", flush=True)
        if chosen.phases:
            command = [sys.executable, "-c", PHASES, str(time.perf_counter()), *given]
            print(first_text(command)[2].splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
