"""Prompts on their way into the engine's cache on a GPU: short ones share a forward pass, long ones pass in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

import genesis
from genesis.errors import OutOfMemoryError
from genesis_models.blocks import CausalLM, EngineCache
from genesis_models.engine.device_cache import DeviceCache, Document
from genesis_models.engine.device_rows import ADVICE

__all__ = ["CHUNK", "Prompts"]

CHUNK = 2048  # tokens in one forward pass
FEWEST = 128  # of them, where memory is short
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # of a pass, then multiples of the first below
GRAIN = 256  # launches of a length are prepared once: there must be few lengths


class Prompts:
    """Passes prompts through a model, all but their last token: that is for a step, as every further one is.

    Args:
        chunk: tokens in one forward pass.
    """

    def __init__(self, model: CausalLM, cache: DeviceCache, chunk: int) -> None:
        self._model, self._cache, self._chunk = model, cache, chunk

    def pass_all(self, prompts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Let prompts pass, each into its row. Chunks become smaller where memory is short.

        Raises:
            OutOfMemoryError: for small chunks, too.
        """
        waiting = deque(prompts)
        while waiting:
            documents = self._together(waiting)
            try:
                if len(documents) > 1:
                    self._pack(documents)
                else:
                    self._chunks(*waiting[0])
            except OutOfMemoryError as error:
                tried = min(self._chunk, sum(len(each.ids) for each in documents) or len(waiting[0][1]))
                if tried <= FEWEST:
                    error.next = ADVICE
                    raise
                self._chunk = max(tried // 2, FEWEST)
                continue
            for _ in documents or (None,):
                waiting.popleft()

    def _together(self, waiting: Sequence[tuple[int, np.ndarray]]) -> list[Document]:
        """The first prompts that fit into one forward pass; none where the first alone does not."""
        found: list[Document] = []
        end = 0
        for row, ids in waiting:
            begin, end = end, end + len(ids) - 1
            if end > self._chunk or self._cache.is_stretched(len(ids)):
                break
            found.append(Document(row, ids[:-1], begin))
        return found

    def _pack(self, documents: Sequence[Document]) -> None:
        """Some prompts behind one another, each of which sees itself alone."""
        end = sum(len(each.ids) for each in documents)
        if not end:
            return
        length = _filled(end)
        ids, starts, positions = np.zeros(length, np.int64), np.full(length, end), np.zeros(length, np.int64)
        for each in documents:
            part = slice(each.begin, each.begin + len(each.ids))
            ids[part], starts[part], positions[part] = each.ids, each.begin, np.arange(len(each.ids))
        cache = self._cache.packed(documents, starts, positions)
        self._forward(ids, cache)
        cache.move()

    def _chunks(self, row: int, ids: np.ndarray) -> None:
        begin, last = 0, len(ids) - 1
        while begin < last:
            end = min(begin + self._chunk, last)
            part = np.zeros(min(_filled(end - begin), self._cache.capacity - begin), np.int64)
            part[: end - begin] = ids[begin:end]  # what is behind it is never read
            self._forward(part, self._cache.prompt(row, begin, len(ids)))
            begin = end

    def _forward(self, ids: np.ndarray, cache: EngineCache) -> None:
        with genesis.no_grad():
            self._model.next_hidden_states(genesis.tensor(ids[None], device=self._cache.data.device), cache)


def _filled(count: int) -> int:
    """The length to which a forward pass is filled up."""
    return next((each for each in LENGTHS if count <= each), -(-count // GRAIN) * GRAIN)
