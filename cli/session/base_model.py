"""The base of a run with adapters: its fingerprint, and whether a resumed run has the one that it began with."""

from __future__ import annotations

import os
from pathlib import Path

from genesis.errors import ModelError, escape
from genesis.files.hf import CHECKPOINT
from genesis.train.checkpoint import BEST
from genesis.train.config import Config
from genesis_cli.session.run_folder import Resume
from genesis_models.adapters import Base, base_of, check_same_base, is_adapter, read_base
from genesis_models.source import check_model_folder


def adapter_to_resume(config: Config, resume: Resume, resume_from: str | None) -> Path | None:
    """The checkpoint that a run with adapters goes on from; None where it begins, or that folder holds none."""
    output = Path(config.train.output_dir)
    if config.lora is None or not (resume or resume_from) or not output.is_dir():
        return None
    steps = [int(match[1]) for name in os.listdir(output) if (match := CHECKPOINT.fullmatch(name))]
    is_named = resume_from not in (None, BEST)  # every checkpoint of a run is of the same base
    name = Path(resume_from or "").name if is_named or not steps else f"checkpoint-{max(steps)}"
    return output / name if name and is_adapter(output / name) else None


def checked_base(config: Config, checkpoint: Path | None) -> Base | None:
    """The base of a run with adapters, its files hashed unless `checkpoint` knows them; None without adapters.

    Raises:
        ModelError: it cannot be read, or is not the one that the checkpoint was trained on.
    """
    if config.lora is None:
        return None
    assert config.model.path is not None, "the schema asks for it"
    known = None if checkpoint is None else read_base(checkpoint)
    try:
        check_model_folder(config.model.path)
        base = base_of(config.model.path, known)
    except ModelError as error:
        if known is None:
            raise
        where = f"in {escape(config.model.path)}"
        if os.path.realpath(config.model.path) != known.path:
            where += f", and the run began with it in {escape(known.path)}"
        what = f"the base model of the run is not {where}: {error.what}"
        raise ModelError(
            what, where=escape(checkpoint), next="put it back, or name its folder: model.path=FOLDER"
        ) from error
    if known is not None:
        check_same_base(base, known, escape(checkpoint), setting="model.path")
    return base
