"""A file that cannot be looked at is not taken for a missing one: what it holds would be passed over in silence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from genesis.backend import CPU
from genesis.errors import ConfigError, DiskError, GenesisError, ModelError
from genesis.files import hub
from genesis.train.metrics import keep_samples, read_samples
from genesis.train.report.runs import read_run
from genesis_cli.session.chat import _folder as template_folder
from genesis_cli.session.export import _texts, take_masters
from genesis_cli.session.init import check_new
from genesis_cli.session.settings import settled
from genesis_cli.session.talk import Talk
from genesis_models.chat_files import stop_ids

AUTO_DTYPE: Any = SimpleNamespace(model=SimpleNamespace(dtype="auto", path=None))
NARROW: Any = SimpleNamespace(stored_types={"weight": "bfloat16"})


def texts_of(folder: Path) -> object:
    source: Any = SimpleNamespace(holding=lambda name: folder, folder=folder)
    return _texts(source, cast("Any", SimpleNamespace(config=SimpleNamespace(packed_length=8))))


def saved(folder: Path) -> None:
    talk = Talk.__new__(Talk)
    talk.messages, talk._own_file = [{"role": "user", "content": "a"}], ""
    talk.save(str(folder / "theirs.jsonl"))


# What reads a folder -> the file that cannot be looked at, how it is read, and the error.
READERS: dict[str, tuple[str, Callable[[Path], object], type[GenesisError]]] = {
    "a report's metrics": ("metrics.jsonl", read_run, DiskError),
    "a report's settings": ("config.resolved.yaml", read_run, DiskError),
    "a report's samples": ("samples.jsonl", lambda folder: list(read_samples(folder)), DiskError),
    "samples after the step that is resumed": ("samples.jsonl", lambda folder: keep_samples(folder, 1), DiskError),
    "the type of the run that is resumed": (
        "config.resolved.yaml",
        lambda folder: settled(AUTO_DTYPE, CPU, folder / "config.resolved.yaml"),
        ConfigError,
    ),
    "stop ids": ("generation_config.json", lambda folder: stop_ids(folder, None), ModelError),
    "a checkpoint's masters": (
        "rng.json",
        lambda folder: take_masters(NARROW, folder),
        ModelError,
    ),
    "a configuration before init": (
        "config.yaml",
        lambda folder: check_new(folder / "config.yaml", force=False),
        ConfigError,
    ),
    "another's file in the place of a saved chat": ("theirs.jsonl", saved, DiskError),
    "the folder of a run's chat template": ("base", lambda folder: template_folder(folder / "base"), ModelError),
    "what is there of a file of the hub": ("blob", lambda folder: hub._size(folder / "blob"), ModelError),
    "the tokenizer of an export's check": ("tokenizer.json", texts_of, ModelError),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_what_cannot_be_looked_at(what: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, read, kind = READERS[what]
    (tmp_path / "metrics.jsonl").write_text("")

    def failing(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def look(path: Any, *rest: Any, **more: Any) -> os.stat_result:
            if not isinstance(path, int) and Path(path).name == name:
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *rest, **more)

        return look

    for look in ("lstat", "stat"):
        monkeypatch.setattr(os, look, failing(getattr(os, look)))
    with pytest.raises(kind, match=os.strerror(code)) as caught:
        read(tmp_path)
    assert caught.value.where == str(tmp_path / name)
