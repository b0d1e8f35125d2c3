"""The files of a run's model in a checkpoint and at its end: a Hugging Face folder, or one of PEFT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from genesis.data.tokenizer import Tokenizer
from genesis.errors import escape
from genesis.files.atomic import FolderWriter
from genesis.files.hf import GENERATION_CONFIG, MAX_TEMPLATE_BYTES, SIDE_FILES, TOKENIZER_FILES, side_files
from genesis.files.paths import safe_join
from genesis.files.strict_json import read_limited
from genesis.train.config import Config
from genesis.train.state import FrozenBase, Snapshot, masters
from genesis_cli.session.chat import ChatFormat
from genesis_models.adapters import BASE_NAME, Base, adapter_parameters, adapter_values, write_adapter
from genesis_models.blocks import CausalLM
from genesis_models.chat_files import chat_files, generation_config
from genesis_models.folder import write_model


@dataclass(frozen=True)
class ModelFiles:
    """Writes and reads them.

    Attributes:
        base: of adapters.
        chat: the format of chats that the model learns.
    """

    config: Config
    tokenizer: Tokenizer
    model: CausalLM
    base: Base | None
    chat: ChatFormat

    @cached_property
    def frozen(self) -> FrozenBase | None:
        """What of the model no checkpoint holds."""
        if self.config.lora is None:
            return None
        names = {name for name, _ in self.model.named_parameters()} - adapter_parameters(self.model).keys()
        return FrozenBase("" if self.base is None else self.base.sha256, frozenset(names))

    def write(self, folder: FolderWriter, snapshot: Snapshot) -> None:
        """Model, tokenizer and side files; of a source folder's own files, what training does not change is kept byte
        for byte.
        """
        source, end, ends = self.config.model.path, self.tokenizer.eos_id, self.chat.ends
        if self.config.lora is None:
            # What is not given is copied from the source.
            files = None if self._keeps_tokenizer and self.chat.templates is None else self.tokenizer_files
            own: dict[str, Any] = {"source": source, "extra_files": files, "eos_token_id": end, "ends": ends}
            write_model(self.model, folder, values=snapshot.weights, **own)
            return
        assert self.base is not None, "a run that saves has it"
        values = masters(snapshot.weights, snapshot.optimizer)
        write_adapter(self.model, folder, base=self.base.path, values=values)
        folder.write(BASE_NAME, self.base.to_json())
        folder.write(GENERATION_CONFIG, generation_config(self.model.config, source, ends, end))
        for name, data in self.tokenizer_files.items():
            folder.write(name, data)

    @property
    def _keeps_tokenizer(self) -> bool:
        return self.config.model.path is not None and self.config.data.tokenizer is None

    @cached_property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Name -> bytes of the tokenizer's files, the chat template among them."""
        source, files = self.config.model.path, self.tokenizer.files()
        if self._keeps_tokenizer and source is not None:
            names = [name for name in side_files(source) if TOKENIZER_FILES.fullmatch(name)]
            where = escape(source)
            files = {
                name: read_limited(safe_join(source, name, where=where), SIDE_FILES.get(name, MAX_TEMPLATE_BYTES))
                for name in names
            }
        return files if self.chat.templates is None else chat_files(self.chat.templates, files)

    def read_masters(self, folder: Path) -> Mapping[str, np.ndarray]:
        """The values of the adapters in a checkpoint, in float32, by the names of parameters."""
        return adapter_values(self.model, folder)
