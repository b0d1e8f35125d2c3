"""From nothing to a folder that transformers loads: genesis pull, init, train, export, against a hub on loopback.

    .venv-peers/bin/python -m tests.peers.first_minutes

Each command is a process of its own, as a user types it. Needs an environment with Genesis, torch and transformers
(`make peers`), so it is no part of `make test`; `make peers-test` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import genesis
import genesis_models
from tests.cli.first_model import write_model
from tests.hub import served

COMMANDS = (
    "genesis pull org/tiny",
    "genesis init chats.yaml --model org/tiny",
    "genesis train chats.yaml train.device=cpu train.epochs=1",
    "genesis export runs/chats --merge --out exported --check",
)
LARGEST = 1e-4  # difference of a logit, in float32


def main() -> None:
    """Run the commands, and compare logits. Raises: AssertionError, CalledProcessError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with served({"org/tiny": write_model(folder / "upstream")}) as hub:
            variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(folder / "cache"), "HF_TOKEN": ""}
            for line in COMMANDS:
                print(f"$ {line}", flush=True)
                words = [sys.executable, "-m", "genesis_cli.main", *line.split()[1:]]
                subprocess.run(words, cwd=folder, env={**os.environ, **variables}, check=True)
        ids = AutoTokenizer.from_pretrained(folder / "exported")("what does the setting do?")["input_ids"]
        theirs = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32).eval()
        ours = genesis_models.load(folder / "exported", dtype="float32").eval()
        with torch.no_grad(), genesis.no_grad():
            expected = theirs(torch.tensor([ids])).logits.numpy()
            found = ours(genesis.tensor([ids])).numpy()
        difference = float(abs(expected - found).max())
        print(f"transformers loads it; largest difference of a logit: {difference:.2g}, allowed {LARGEST:g}")
        assert difference <= LARGEST


if __name__ == "__main__":
    main()
