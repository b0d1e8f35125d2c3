"""The engine on a GPU: decoding steps are CUDA graphs launched ahead of the host, which reads the tokens later.

Prefill writes a prompt except its last token into a row's cache with the ordinary ops. Short prompts share a forward
pass; long ones run in chunks. From its third use on, a pass of a given length is a CUDA graph, because its launches
take the host several times as long as the device. The graph reads ids and positions from fixed buffers of `DeviceRows`
and writes keys and values to them, so one graph serves all prompts of that length. Later chunks of a long prompt read
the row's cache before them, and are graphs only in the first row.

A prompt's last token is the input of the row's first step, so that all tokens are drawn the same way. The state of a
step is on the device, and a finished row changes nothing: the steps that the host launches before it reads the end
waste time but do no harm. `Engine` skips rows without a request, which a graph of fixed shapes cannot do; the CPU
therefore uses `Engine`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import genesis
from genesis import Tensor
from genesis.errors import OutOfMemoryError, UsageError
from genesis.ops.sample import FAILED, INACTIVE
from genesis_models.blocks import CausalLM, EngineCache
from genesis_models.config import ModelConfig
from genesis_models.engine.device_cache import KEY_BLOCK, Document, PackedCache, PromptCache
from genesis_models.engine.device_rows import ADVICE, DeviceRows, Reading, Step, captured, keep, take
from genesis_models.engine.engine import Request, Running, Token, Waiting, running
from genesis_models.engine.exact import check_model, check_sampling
from genesis_models.engine.sampling import not_finite

CHUNK = 2048  # tokens in one forward pass of a wide model, and the most in a captured one
WIDEST = 4 * CHUNK  # tokens in one forward pass of a narrow model
FEWEST = 128  # the smallest chunk when memory is short
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # padded lengths of a pass
GRAIN = 256  # longer passes are multiples of it: few lengths, because launches are prepared once for each
GRAPHS = 64  # the most cached graphs of passes; the oldest is dropped


class Prompts:
    """Prefills prompts except their last tokens, which are the inputs of the first steps.

    Args:
        held: the rows that receive the prompts.
        chunk: tokens in one forward pass.
    """

    def __init__(self, model: CausalLM, held: DeviceRows, chunk: int) -> None:
        self._model, self._held, self._cache = model, held, held.cache
        self._chunk = self._cut(chunk)

    def _cut(self, chunk: int) -> int:
        """Return a chunk's length; in exact mode a multiple of the key block."""
        return max(chunk // KEY_BLOCK * KEY_BLOCK, KEY_BLOCK) if self._held.exact else chunk

    def pass_all(self, prompts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Prefill prompts into their rows. Rows with the same prompt share one pass; chunks become smaller if memory is
        short.

        Raises:
            OutOfMemoryError: even the smallest chunk does not fit.
        """
        waiting = deque(self._unknown(prompts))
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
                self._chunk = self._cut(max(tried // 2, FEWEST))
                continue
            for _ in documents or (None,):
                waiting.popleft()

    def _unknown(self, prompts: Sequence[tuple[int, np.ndarray]]) -> list[tuple[list[int], np.ndarray]]:
        """Return the prompts that no row holds, with the rows that need them. Copy the others between rows."""
        known, new = self._held.prompts, dict[bytes, tuple[list[int], np.ndarray]]()
        wanted = {row: ids.tobytes() for row, ids in prompts}
        sources = {key: row for row, key in known.items() if wanted.get(row, key) == key}
        known.update(wanted)
        for row, ids in prompts:
            source = sources.get(wanted[row])
            if source is None:
                new.setdefault(wanted[row], ([], ids))[0].append(row)
            elif source != row:
                self._cache.copy_prompt(source, [row], len(ids) - 1)
        return list(new.values())

    def _together(self, waiting: Sequence[tuple[list[int], np.ndarray]]) -> list[Document]:
        """Return the first prompts that fit into one forward pass; an empty list if the first alone does not fit."""
        found: list[Document] = []
        end = 0
        for rows, ids in waiting:
            begin = self._cache.aligned(end)
            end = begin + len(ids) - 1
            if end > self._chunk or self._cache.is_stretched(len(ids)):
                break
            found.append(Document(rows, ids[:-1], begin))
        return found

    def _pack(self, documents: Sequence[Document]) -> None:
        """Run packed prompts through the model; each attends only to itself."""
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
            starts[part.start : min(self._cache.aligned(part.stop), length)] = (
                each.begin
            )  # no query attends to the padding
        self._held.make_room(length, filled(self._chunk))
        cache, packed = self._cache, self._held.packed

        def pass_cache(given: Tensor) -> EngineCache:
            return PackedCache(cache, cache.packed_view(length, packed), given[1], given[2])

        self._forward(values, pass_cache, (0, length))
        cache.take_over(documents, length, packed)

    def _chunks(self, rows: Sequence[int], ids: np.ndarray) -> None:
        begin, last, row = 0, len(ids) - 1, rows[0]
        is_stretched = self._cache.is_stretched(len(ids))
        while begin < last:
            end = min(begin + self._chunk, last)
            if not begin and not is_stretched:
                self._pack([Document([row], ids[:end], 0)])
            else:
                part = np.zeros((1, min(filled(end - begin), self._cache.capacity - begin)), np.int64)
                part[0, : end - begin] = ids[begin:end]  # the padding is never read
                key = None if row or is_stretched else (begin, part.shape[1])
                self._part(part, row, begin, len(ids), key)
            begin = end
        self._cache.copy_prompt(row, rows[1:], last)

    def _part(self, values: np.ndarray, row: int, begin: int, total: int, key: tuple[int, int] | None) -> None:
        cache = self._cache
        self._held.make_room(values.shape[1], filled(self._chunk))
        self._forward(values, lambda given: PromptCache(cache, row, begin, total), key)

    def _forward(self, values: np.ndarray, cache: Callable[[Tensor], EngineCache], key: tuple[int, int] | None) -> None:
        """Run ids, the first row of `values` `[N, T]`, through the model.

        Args:
            cache: builds the pass's cache from `values` on the device.
            key: key of the pass's graph; None runs it without a graph, as does a pass that takes the GPU longer than
                the host.
        """
        held, (count, length) = self._held, values.shape
        key = None if length > CHUNK else key
        given = held.inputs.narrow(0, 0, values.size).view(count, length)
        given.copy_(genesis.from_numpy(values))
        run = held.passes.pop(key, None) if key is not None else None
        if run is None:
            model_of, is_exact = weakref.ref(self._model), held.exact

            def launch() -> None:
                model = model_of()
                assert model is not None
                with genesis.no_grad(), genesis.autograd.exact(is_exact):
                    model.next_hidden_states(given.narrow(0, 0, 1), cache(given))

            run = launch if key is None else captured(launch, given.device)
        if key is not None:
            while len(held.passes) >= GRAPHS:
                held.passes.pop(next(iter(held.passes)))
            held.passes[key] = run
        run()


def chunk_of(config: ModelConfig) -> int:
    """Return the number of tokens in one forward pass: narrow matmuls need more rows to fill a GPU."""
    return min(max((1 << 23) // config.hidden_size // CHUNK, 1) * CHUNK, WIDEST)


def filled(count: int) -> int:
    """Return the padded length of a forward pass."""
    return next((each for each in LENGTHS if count <= each), -(-count // GRAIN) * GRAIN)


STEPS = 4  # steps in one batch of launches
AHEAD = 2  # batches in flight while the host waits for the first
PATIENCE, SHARE = 8, 1 / 16  # free rows stay empty for 1 step per 16 rows in use, up to 8, so that prompts share passes


@dataclass(eq=False, slots=True)
class _Sequence(Running):
    """A request that occupies a row until all its steps are launched, and lives until its tokens are read."""

    launched: int = 0  # launched steps

    @property
    def remaining(self) -> int:
        """The steps that are still to be launched."""
        return self.most - self.launched


class _Batch(NamedTuple):
    sequences: list[tuple[int, _Sequence]]  # by row
    reading: Reading


class DeviceEngine:
    """Generates with a model on a GPU.

    Args:
        model: in eval mode while requests run; its weights may change between runs.
        rows: the most concurrent sequences; fewer if memory is short.
        capacity: the most tokens of a sequence, including its prompt.
        log_probs: whether tokens have their log-probability.
        chunk: tokens of prompts in one forward pass; None chooses a number for the model.
        cache: dtype of keys and values: "auto" for the weights' dtype, or "fp8" (e4m3).
        exact: draw tokens with log-probabilities that are bit-identical to the forward pass of training
            (docs/decisions/0014-exact.md). Requests must not filter or penalize tokens.

    Attributes:
        width: number of sequences that ran at once in the last run: `rows`, or fewer if memory was short.

    Raises:
        UsageError, DeviceError, ModelError: `cache` has another value, or the model or GPU does not support `exact`.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        rows: int,
        capacity: int,
        log_probs: bool = False,
        chunk: int | None = None,
        cache: str = "auto",
        exact: bool = False,
    ) -> None:
        if cache not in ("auto", "fp8"):
            raise UsageError(f"the cache's type is {cache!r}, expected auto or fp8")
        if exact:
            check_model(model, cache)
        self._exact = exact
        self.model, self.log_probs, self._chunk = model, log_probs, chunk or chunk_of(model.config)
        self.rows, self.capacity, self._cache = rows, capacity, cache
        self.width = rows
        self._held: DeviceRows | None = None
        self._sequences: list[_Sequence | None] = []  # by row
        self._live: dict[int, _Sequence] = {}  # sequences that have not ended, by request number
        self._batches: deque[_Batch] = deque()
        self._last: Step | None = None  # the last launched step
        self._since = PATIENCE  # steps since rows were filled
        self._waiting = Waiting(())

    def run(self, requests: Iterable[Request | None]) -> Iterator[Token]:
        """See `Engine.run`. Tokens arrive a few steps after the device has drawn them."""
        was_training = self.model.training
        self.model.eval()
        try:
            form = (self.rows, self.capacity, self.log_probs, self._cache, self._exact)
            self._held = take(self.model, *form) if self._held is None else self._held
            self._held.begin(self.model)
            self.width = min(self.rows, self._held.cache.rows)
            self._sequences = [None] * self.width
            self._waiting = Waiting(requests)
            yield from self._run(self._held, self._waiting)
        except OutOfMemoryError as error:
            error.next = ADVICE
            raise
        finally:
            self._sequences, self._last = [], None
            self._live.clear()
            self._batches.clear()
            if self._held is not None and keep(self.model, self._held):
                self._held = None
            self.model.train(was_training)

    def _run(self, held: DeviceRows, waiting: Waiting) -> Iterator[Token]:
        while True:
            if waiting.is_more and None in self._sequences and self._patience <= 0:
                yield from self._admit(held, waiting)
            while len(self._batches) < AHEAD and any(self._sequences):
                self._launch(held, waiting.is_more)
            if self._batches:
                waiting.pause()
                yield from self._read(self._batches.popleft())
            elif not waiting.is_more:
                return

    @property
    def _patience(self) -> int:
        """The number of steps until free rows are filled."""
        used = len(self._sequences) - self._sequences.count(None)
        return min(PATIENCE, int(used * SHARE)) - self._since

    def cancel(self, request: int) -> None:
        """See `Engine.cancel`."""
        self._waiting.cancel(request)
        if (sequence := self._live.get(request)) is not None:
            self._end(sequence)

    def _admit(self, held: DeviceRows, waiting: Waiting) -> Iterator[Token]:
        admitted: list[tuple[int, _Sequence]] = []
        for row in [row for row, each in enumerate(self._sequences) if each is None]:
            sequence = None
            while sequence is None and (taken := waiting.take()) is not None:
                if self._exact:
                    check_sampling(taken[1].sampling)
                if (run := running(self.model, *taken, self.capacity)) is None:
                    yield Token(taken[0], None, finish="length")
                else:
                    # Live from now on: taking the next request may cancel this one.
                    sequence = self._live[run.number] = _Sequence(run.request, run.number, run.most)
            if sequence is None:
                break
            admitted.append((row, sequence))
        admitted = [(row, each) for row, each in admitted if not each.is_done]
        if not admitted:
            return
        prompts = Prompts(self.model, held, self._chunk)
        prompts.pass_all([(row, np.asarray(each.request.ids, np.int64)) for row, each in admitted])
        held.state.start([(row, each.request, each.most) for row, each in admitted])
        for row, each in admitted:
            self._sequences[row] = each
        self._since = 0

    def _launch(self, held: DeviceRows, is_more: bool) -> None:
        """Launch some steps of all rows, and free rows that need no further steps.

        Args:
            is_more: whether requests wait for a row.
        """
        sequences = [(row, each) for row, each in enumerate(self._sequences) if each is not None]
        counts = [each.remaining for _, each in sequences]
        steps = min(STEPS, max(min(counts), self._patience) if is_more else max(counts))
        if any(not each.launched for _, each in sequences):
            steps = 1  # deliver a first token without delay
        longest = max(len(each.request.ids) + each.launched for _, each in sequences) + steps
        self._last = step = held.step(self.model, sequences[-1][0] + 1, longest)
        for _ in range(steps):
            step()
        self._since += steps
        self._batches.append(_Batch(sequences, held.state.read_later(steps, step.rows)))
        for row, each in sequences:
            each.launched += steps
            if each.remaining <= 0:
                self._sequences[row] = None

    def _read(self, batch: _Batch) -> Iterator[Token]:
        tokens, chances = batch.reading.results()
        for step, drawn in enumerate(tokens.tolist()):
            for row, each in batch.sequences:
                if drawn[row] == FAILED and not each.is_done:
                    assert self._last is not None
                    logits = self._last.logits  # later steps had the same input in this row; exact steps keep no logits
                    found = np.zeros(1, np.float32)
                    if logits is not None and row < len(logits):
                        found = logits[row].float().cpu().numpy()
                    raise not_finite(found, len(each.request.ids) + len(each.tokens))
            for row, each in batch.sequences:
                token = drawn[row]
                if each.is_done or token == INACTIVE:
                    continue
                result, remainder = each.take(self.model, token, float(chances[step, row]) if self.log_probs else None)
                if result.finish is not None or remainder is not None:
                    self._end(each)
                if remainder is not None:
                    self._waiting.requeue(each.number, remainder)
                yield result

    def _end(self, sequence: _Sequence) -> None:
        """Mark a sequence as done and free its row."""
        sequence.is_done = True
        del self._live[sequence.number]
        for row, each in enumerate(self._sequences):
            if each is sequence and self._held is not None:
                self._sequences[row] = None
                self._held.state.end(row)
