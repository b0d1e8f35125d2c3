"""The files through which `genesis train` carries a configuration, in order: what a reader opens to follow it.

Run it as a module. A small run on the CPU is ended before its first step. A file is entered when one of its functions
is called with the configuration, or a section of it, as an argument. A call within a file is no step, nor are a return
to the caller and further calls from there into the file that was entered last. A climb is a step into a file that was
entered before: the reader opens again what was closed, or goes back up to a file that waits for the call. The schema's
own file is what is carried, and an object that keeps the configuration is followed no further.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from unittest import mock

import genesis
import genesis_cli
import genesis_models
from genesis.train.config import Section
from genesis.train.loop import Summary, Training
from genesis_cli.train import train

ROOTS = {"genesis": genesis, "cli": genesis_cli, "models": genesis_models}
FOLDERS = {str(Path(str(module.__file__)).resolve().parent): name for name, module in ROOTS.items()}
CARRIED = "genesis/train/config.py"
CONFIG = """
model: {config: {model_type: qwen3, vocab_size: 272, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 32}}
data: {train: [config.yaml], seq_len: 32}

train: {steps: 2, threads: 1, device: cpu, output_dir: run}
eval: {prompts: [a], every: 1}
"""


class _Begun(Exception):
    """The run is about to take its first step."""


def walk(config: str, overrides: Sequence[str] = (), resume: str | None = None) -> list[tuple[str, str]]:
    """The steps of a configuration up to the first step of its run: the file that calls, and the file it enters."""
    steps: list[tuple[str, str]] = []
    entered: set[FrameType] = set()  # a generator is called again to go on

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or frame in entered or _file_of(frame) is None:
            return
        entered.add(frame)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), Section) for name in names):
            caller = frame.f_back
            while caller is not None and _file_of(caller) is None:
                caller = caller.f_back
            step = _file_of(caller) or "", _file_of(frame) or ""
            if step[0] != step[1] and step not in steps[-1:]:
                steps.append(step)

    def begin(training: Training) -> Summary:
        sys.setprofile(None)
        raise _Begun

    with mock.patch.object(Training, "run", begin), contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(note)
        try:
            train(config, list(overrides), resume)
        except _Begun:
            return steps
        finally:
            sys.setprofile(None)
    raise AssertionError("the run has not begun")


def climbs(steps: Sequence[tuple[str, str]]) -> list[int]:
    """The numbers of the steps into a file that was entered before, or that the walk began in."""
    return [n for n, (_, to) in enumerate(steps) if any(to in step for step in steps[:n])]


def _file_of(frame: FrameType | None) -> str | None:
    """The path in the repository of a frame's code; None for code of others, and for the schema's."""
    path = "" if frame is None else frame.f_code.co_filename
    rooted = (name + path.removeprefix(folder) for folder, name in FOLDERS.items() if path.startswith(folder + "/"))
    found = next(rooted, CARRIED)
    return None if found == CARRIED else found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("config.yaml").write_text(CONFIG)
        found = walk("config.yaml")
        for number, (caller, entered) in enumerate(found):
            print(f"{'climb' * (number in climbs(found)):5} {caller} -> {entered}")
        print(f"{len({file for step in found for file in step})} rooms, {len(climbs(found))} climbs")
