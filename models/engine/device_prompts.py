"""Prompts on their way into the engine's cache on a GPU: short ones share a forward pass, long ones pass in chunks.

A pass is a CUDA graph from its third time on, since its launches take the host several times as long as the device.
It reads ids and positions where `DeviceRows` keeps them, and leaves keys and values there, so that there is one graph
for a length, whatever passes. Chunks of a long prompt behind the first read what is in a row before them, and are
graphs in the first row alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

import genesis
from genesis import Tensor
from genesis.errors import OutOfMemoryError
from genesis_models.blocks import CausalLM, EngineCache
from genesis_models.engine.device_cache import Document, PackedCache, PromptCache, aligned
from genesis_models.engine.device_rows import ADVICE, DeviceRows, captured

CHUNK = 2048  # tokens in one forward pass
FEWEST = 128  # of them, where memory is short
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # of a pass, then multiples of the first below
GRAIN = 256  # launches of a length are prepared once: there must be few lengths
GRAPHS = 64  # of passes that are kept; the oldest goes


class Prompts:
    """Passes prompts through a model, all but their last token: that is for a step, as every further one is.

    Args:
        held: whose rows they are for.
        chunk: tokens in one forward pass.
    """

    def __init__(self, model: CausalLM, held: DeviceRows, chunk: int) -> None:
        self._model, self._held, self._cache, self._chunk = model, held, held.cache, chunk

    def pass_all(self, prompts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Let prompts pass, each into its row. Chunks become smaller where memory is short.

        Raises:
            OutOfMemoryError: for small chunks, too.
        """
        waiting = deque(prompts)
        while waiting:
            documents = self._together(waiting)
            try:
                if documents:
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
            begin, end = aligned(end), aligned(end) + len(ids) - 1
            if end > self._chunk or self._cache.is_stretched(len(ids)):
                break
            found.append(Document(row, ids[:-1], begin))
        return found

    def _pack(self, documents: Sequence[Document]) -> None:
        """Some prompts behind one another, each of which sees itself alone."""
        end = documents[-1].begin + len(documents[-1].ids)
        if not end:
            return
        length = filled(end)
        values = np.zeros((3, length), np.int64)
        ids, starts, positions = values
        starts[:] = end
        for each in documents:
            part = slice(each.begin, each.begin + len(each.ids))
            ids[part], positions[part] = each.ids, np.arange(len(each.ids))
            starts[part.start : min(aligned(part.stop), length)] = each.begin  # what fills it up is seen by nobody
        self._held.make_room(length, filled(self._chunk))
        cache, packed = self._cache, self._held.packed

        def pass_cache(given: Tensor) -> EngineCache:
            return PackedCache(cache, cache.packed_view(length, packed), given[1], given[2])

        self._forward(values, pass_cache, (0, length))
        cache.take_over(documents, length, packed)

    def _chunks(self, row: int, ids: np.ndarray) -> None:
        begin, last = 0, len(ids) - 1
        is_stretched = self._cache.is_stretched(len(ids))
        while begin < last:
            end = min(begin + self._chunk, last)
            if not begin and not is_stretched:
                self._pack([Document(row, ids[:end], 0)])
            else:
                part = np.zeros((1, min(filled(end - begin), self._cache.capacity - begin)), np.int64)
                part[0, : end - begin] = ids[begin:end]  # what is behind it is never read
                key = None if row or is_stretched else (begin, part.shape[1])
                self._part(part, row, begin, len(ids), key)
            begin = end

    def _part(self, values: np.ndarray, row: int, begin: int, total: int, key: tuple[int, int] | None) -> None:
        cache = self._cache
        self._held.make_room(values.shape[1], filled(self._chunk))
        self._forward(values, lambda given: PromptCache(cache, row, begin, total), key)

    def _forward(self, values: np.ndarray, cache: Callable[[Tensor], EngineCache], key: tuple[int, int] | None) -> None:
        """Pass ids, the first of `values` `[N, T]`, through the model.

        Args:
            cache: made of `values` on the device.
            key: under which the pass is a graph; None: it is none.
        """
        held, (count, length) = self._held, values.shape
        given = held.inputs.narrow(0, 0, values.size).view(count, length)
        given.copy_(genesis.from_numpy(values))
        run = held.passes.pop(key, None) if key is not None else None
        if run is None:
            model_of = weakref.ref(self._model)

            def launch() -> None:
                model = model_of()
                assert model is not None
                with genesis.no_grad():
                    model.next_hidden_states(given.narrow(0, 0, 1), cache(given))

            run = launch if key is None else captured(launch, given.device)
        if key is not None:
            while len(held.passes) >= GRAPHS:
                held.passes.pop(next(iter(held.passes)))
            held.passes[key] = run
        run()


def filled(count: int) -> int:
    """The length to which a forward pass is filled up."""
    return next((each for each in LENGTHS if count <= each), -(-count // GRAIN) * GRAIN)
