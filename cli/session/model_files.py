"""The files of a run's model in a checkpoint and at its end: a Hugging Face folder, or one of PEFT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from genesis.data.tokenizer import Tokenizer
from genesis.io.files import FolderWriter
from genesis.optim import Optimizer
from genesis.train.config import Config
from genesis.train.state import FrozenBase
from genesis_models.adapters import adapter_parameters, adapter_values, write_adapter
from genesis_models.base import BASE_NAME, Base
from genesis_models.blocks import CausalLM
from genesis_models.folder import write_model

__all__ = ["ModelFiles"]


@dataclass(frozen=True)
class ModelFiles:
    """Writes and reads them.

    Attributes:
        base: of adapters.
    """

    config: Config
    tokenizer: Tokenizer
    model: CausalLM
    optimizer: Optimizer
    base: Base | None

    @cached_property
    def frozen(self) -> FrozenBase | None:
        """What of the model no checkpoint holds."""
        if self.config.lora is None:
            return None
        names = {name for name, _ in self.model.named_parameters()} - adapter_parameters(self.model).keys()
        return FrozenBase("" if self.base is None else self.base.sha256, frozenset(names))

    def write(self, folder: FolderWriter) -> None:
        """Model, tokenizer and side files; a source folder's own files are kept byte for byte."""
        source = self.config.model.path
        own_tokenizer = source is not None and self.config.data.tokenizer is None
        if self.config.lora is not None:
            assert self.base is not None, "a run that saves has it"
            write_adapter(self.model, folder, base=self.base.path, optimizer=self.optimizer)
            folder.write(BASE_NAME, self.base.to_json())
            for name, data in self.tokenizer.files().items():
                folder.write(name, data)
            return
        write_model(
            self.model,
            folder,
            source=source,
            extra_files=None if own_tokenizer else self.tokenizer.files(),
            eos_token_id=self.tokenizer.eos_id,
        )

    def read_masters(self, folder: Path) -> Mapping[str, np.ndarray]:
        """The values of the adapters in a checkpoint, in float32, by the names of parameters."""
        return adapter_values(self.model, folder)
