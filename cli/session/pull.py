"""`genesis pull`: a model that Genesis can train, or a data set, from the hub into the cache of this machine."""

from __future__ import annotations

from genesis.data.sources import is_data_file
from genesis.errors import UsageError, escape
from genesis.files.hub import pull as fetch
from genesis.files.hub_cache import hub_name
from genesis.profile.format import format_bytes
from genesis.train.output import Output
from genesis.train.progress import draws, tokenizing
from genesis_models.config import ModelConfig


def pull(text: str, console: Output, *, is_data: bool = False) -> None:
    """Fetch the model or data set that `text` names, and say where it is.

    Raises:
        UsageError: it is not such a name on the hub. GenesisError: as in `genesis.files.hub.pull`.
    """
    name = hub_name(text, is_data=is_data)
    if name is None:
        next = "write ORG/NAME or ORG/NAME@REVISION, such as Qwen/Qwen3-0.6B; a path is not such a name"
        noun = "data set" if is_data else "model"
        raise UsageError(f"{escape(text)} is not the name of a {noun} on the hub", where="command line", next=next)

    def note(line: str) -> None:
        if draws(console):
            console.write("\n")  # the bar stays on the line above
        console.line(line)

    with tokenizing(str(name), console) as progress:
        found = fetch(
            name,
            check=lambda config: ModelConfig.from_dict(config, where=f"{name}/config.json"),
            is_data=is_data_file,
            progress=progress,
            note=note,
        )
    size = sum(file.size for file in found.files)
    came = "all of it was here" if not found.fetched else f"{format_bytes(found.fetched)} fetched"
    console.line(f"{name}: {len(found.files)} files, {format_bytes(size)}, hashes compared; {came}")
    pickles = [each for each in found.left_out if each.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        console.line(f"left out: {len(pickles)} of pickled weights, such as {escape(pickles[0])}")
    console.line(f"commit: {found.commit}")
    console.line(f"folder: {found.folder}")
    if is_data:
        console.line(f"use it by its name: genesis init --data hf:{name}, or data.train: hf:{name}")
    else:
        console.line(f"use it by its name: genesis init --model {name}, or model.path: {name}")
