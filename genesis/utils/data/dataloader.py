"""DataLoader: batches of a data set, made in this process or ahead of time by worker processes."""

from __future__ import annotations

import multiprocessing
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NoReturn, TypeVar

import genesis
from genesis.errors import DistributedError, GenesisError, UsageError
from genesis.utils.data.collate import default_collate, default_convert, pin_memory
from genesis.utils.data.dataset import Dataset, IterableDataset
from genesis.utils.data.sampler import BatchSampler, RandomSampler, Sampler, SequentialSampler, drawn_seed
from genesis.utils.data.worker import PIPES, Fetcher, WorkerInfo, serve

T_co = TypeVar("T_co", covariant=True)
FIXED = {"batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"}
PATIENCE = 5.0  # seconds that a worker has to finish its example when the loader stops


class _Endless(Sampler[Any]):
    """The sampler of a stream, which has no indices."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield None


class DataLoader(Generic[T_co]):
    """Iterates over batches of a data set.

    Args:
        dataset: a data set by index, or an IterableDataset.
        batch_size: examples in a batch; None loads single examples.
        shuffle: take the examples in a new random order each epoch.
        sampler: yields the indices, instead of `shuffle`.
        batch_sampler: yields lists of indices, instead of `batch_size`, `shuffle`, `sampler` and `drop_last`.
        num_workers: number of worker processes; 0 loads in this process.
        collate_fn: makes a batch of a list of examples; `default_collate`, or `default_convert` of single examples.
        pin_memory: copy batches to pinned memory, for copies to a GPU that do not block.
        drop_last: drop a last batch that is shorter.
        timeout: seconds to wait for a batch of a worker; 0 waits without end.
        worker_init_fn: called in each worker with its number, after the random generators are seeded.
        multiprocessing_context: how workers start, "fork", "spawn" or "forkserver", or a context.
        generator: draws the order and the seeds of workers.
        prefetch_factor: number of batches that each worker makes in advance, 2 by default.
        persistent_workers: keep the workers for the next epoch.
        pin_memory_device: has no effect.
        in_order: False returns the batches of workers as they come.

    Raises:
        UsageError: for arguments that exclude each other.
        DistributedError: from the iterator, if a worker died or did not answer in time.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: genesis.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        is_stream = isinstance(dataset, IterableDataset)
        for faulty, what in (
            (num_workers < 0 or timeout < 0, f"num_workers {num_workers} and timeout {timeout} must not be negative"),
            (num_workers == 0 and prefetch_factor is not None, "prefetch_factor needs num_workers above 0"),
            (prefetch_factor is not None and prefetch_factor < 0, f"prefetch_factor {prefetch_factor} is negative"),
            (num_workers == 0 and persistent_workers, "persistent_workers needs num_workers above 0"),
            (is_stream and bool(shuffle), "an IterableDataset cannot be shuffled by its loader"),
            (is_stream and (sampler or batch_sampler) is not None, "an IterableDataset takes no sampler"),
            (sampler is not None and bool(shuffle), "sampler and shuffle exclude each other"),
            (
                batch_size is None and batch_sampler is None and drop_last,
                "batch_size=None and drop_last exclude each other",
            ),
            (
                batch_sampler is not None and (batch_size != 1 or bool(shuffle) or sampler is not None or drop_last),
                "batch_sampler excludes batch_size, shuffle, sampler and drop_last",
            ),
        ):
            if faulty:
                raise UsageError(f"DataLoader: {what}")
        if sampler is None:
            sized: Any = dataset
            if is_stream:
                sampler = _Endless()
            else:
                sampler = RandomSampler(sized, generator=generator) if shuffle else SequentialSampler(sized)
        if batch_sampler is not None:
            batch_size, drop_last = None, False
        elif batch_size is not None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self.dataset, self.sampler, self.batch_sampler = dataset, sampler, batch_sampler
        self.batch_size, self.drop_last, self.num_workers, self.timeout = batch_size, drop_last, num_workers, timeout
        self.collate_fn = collate_fn or (default_convert if batch_sampler is None else default_collate)
        self.pin_memory, self.pin_memory_device = pin_memory, pin_memory_device
        self.worker_init_fn, self.generator, self.in_order = worker_init_fn, generator, in_order
        self.prefetch_factor = 2 if num_workers and prefetch_factor is None else prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.persistent_workers = persistent_workers
        self._kept: _WorkerIterator | None = None
        self._is_complete = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and "_is_complete" in self.__dict__:
            raise UsageError(f"{name} of a DataLoader cannot be changed", next="make another loader")
        super().__setattr__(name, value)

    @property
    def multiprocessing_context(self) -> Any:
        """How workers start, as a context of `multiprocessing`; None for the system's default."""
        return self._context

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: Any) -> None:
        if context is not None and self.num_workers == 0:
            raise UsageError("DataLoader: multiprocessing_context needs num_workers above 0")
        if isinstance(context, str):
            if context not in multiprocessing.get_all_start_methods():
                raise UsageError(
                    f"DataLoader: multiprocessing_context {context!r} is not one of this system's",
                    next=f"pass one of {', '.join(multiprocessing.get_all_start_methods())}",
                )
            context = multiprocessing.get_context(context)
        if context is not None and not isinstance(context, multiprocessing.context.BaseContext):
            raise UsageError(f"DataLoader: multiprocessing_context is a {type(context).__name__}", next="pass a name")
        self._context = context

    def __iter__(self) -> Iterator[Any]:
        if not self.num_workers:
            return _LocalIterator(self)
        if not self.persistent_workers:
            return _WorkerIterator(self)
        if self._kept is None:
            self._kept = _WorkerIterator(self)
        else:
            self._kept.restart()
        return self._kept

    def __len__(self) -> int:
        if not isinstance(self.dataset, IterableDataset):
            return len(self.sampler if self.batch_sampler is None else self.batch_sampler)  # type: ignore[arg-type]
        count = len(self.dataset)  # type: ignore[arg-type]
        if self.batch_size is None:
            return count
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def check_worker_number_rationality(self) -> None:
        """Warn if there are more workers than cores."""
        if self.num_workers > (cores := multiprocessing.cpu_count()):
            warnings.warn(f"the DataLoader has {self.num_workers} workers for {cores} cores", stacklevel=2)


class _Iterator:
    """What iterators over batches share: the indices to fetch, and pinning."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.pins = loader.pin_memory and genesis.cuda.is_available()
        if loader.pin_memory and not self.pins:
            warnings.warn("pin_memory=True has no effect without a GPU", stacklevel=4)
        batched = loader.batch_sampler is not None
        self.fetcher = (loader.dataset, loader.collate_fn, batched, loader.drop_last)
        self.begin()

    def begin(self) -> None:
        """Start an epoch."""
        loader = self.loader
        self.indices = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self.seed = drawn_seed(loader.generator)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        batch = self.fetch()
        return pin_memory(batch) if self.pins else batch

    def fetch(self) -> Any:
        """Return the next batch."""
        raise NotImplementedError


class _LocalIterator(_Iterator):
    """Fetches batches in this process when they are asked for."""

    def begin(self) -> None:
        super().begin()
        self.fetch_one = Fetcher(*self.fetcher)

    def fetch(self) -> Any:
        return self.fetch_one(next(self.indices))


class _Worker:
    """A worker process, the loader's end of its pipe, and the number of tasks that it has not answered."""

    def __init__(self, context: Any, *args: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        PIPES.add(self.pipe)
        self.process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork with threads
            self.process.start()
        theirs.close()
        self.open = 0
        self.has_more = True

    def send(self, number: int | None, index: Any = None) -> None:
        """Hand over a task. A worker that has died is noticed when its answer is missing."""
        self.open += 1
        try:
            self.pipe.send((number, index))
        except OSError:
            pass


def _stop(workers: list[_Worker]) -> None:
    """Let the workers finish their example, then end those that did not."""
    for each in workers:
        each.pipe.close()
    until = time.monotonic() + PATIENCE
    for each in workers:
        each.process.join(max(0.0, until - time.monotonic()))
        if each.process.is_alive():
            each.process.terminate()
            each.process.join()


class _WorkerIterator(_Iterator):
    """Hands tasks to workers in turn and returns their answers in the order of the tasks, or as they come."""

    def begin(self) -> None:
        super().begin()
        self.count = 0  # tasks handed out
        self.order: deque[tuple[int, _Worker]] = deque()  # tasks whose batch was not returned yet
        self.answers: dict[int, tuple[str, Any]] = {}
        self.turn = 0
        if not hasattr(self, "workers"):
            self._start()
        for _ in range(max(self.loader.prefetch_factor or 0, 1) * len(self.workers)):
            self._hand_out()

    def _start(self) -> None:
        loader, count = self.loader, self.loader.num_workers
        self.workers: list[_Worker] = []
        self.stop = weakref.finalize(self, _stop, self.workers)
        for i in range(count):
            info = WorkerInfo(i, count, self.seed + i, loader.dataset)
            context = loader.multiprocessing_context or multiprocessing.get_context()
            self.workers.append(_Worker(context, info, self.fetcher, loader.worker_init_fn))

    def restart(self) -> None:
        """Start an epoch of workers that stay; drop the batches that they still made for the previous one."""
        for each in self.workers:
            each.send(None)
        while any(each.open for each in self.workers):
            self._receive()
        for each in self.workers:
            each.has_more = True
        self.begin()

    def _hand_out(self) -> None:
        """Hand the next task to the next worker that has room and whose stream has not ended."""
        for _ in self.workers:
            worker = self.workers[self.turn]
            self.turn = (self.turn + 1) % len(self.workers)
            if worker.has_more and (self.loader.in_order or worker.open < max(self.loader.prefetch_factor or 0, 1)):
                try:
                    index = next(self.indices)
                except StopIteration:
                    return
                self.order.append((self.count, worker))
                worker.send(self.count, index)
                self.count += 1
                return

    def fetch(self) -> Any:
        while self.order:
            position = self._answered()
            if position is None:
                self._receive()
                continue
            kind, value = self.answers.pop(self.order[position][0])
            worker = self.order[position][1]
            del self.order[position]
            if kind == "end":
                worker.has_more = False
            self._hand_out()
            if kind == "batch":
                return value
            if kind == "error":
                raise _in_worker(self.workers.index(worker), *value)
        if not self.loader.persistent_workers:
            self.stop()
        raise StopIteration

    def _answered(self) -> int | None:
        """Return the position in `order` of the task whose answer comes next, or None if none has arrived."""
        tasks = self.order if not self.loader.in_order else list(self.order)[:1]
        return next((i for i, (number, _) in enumerate(tasks) if number in self.answers), None)

    def _receive(self) -> None:
        """Take one answer of each worker that has one.

        Raises:
            DistributedError: a worker died, or none answered within the loader's timeout. All workers are stopped.
        """
        busy = {each.pipe: each for each in self.workers if each.open}
        ready = wait(list(busy), self.loader.timeout or None)
        if not ready:
            self.stop()
            what = f"no DataLoader worker answered within {self.loader.timeout} s"
            raise DistributedError(what, next="raise timeout=, or find the slow example with num_workers=0")
        for pipe in ready:
            worker = busy[pipe]  # type: ignore[index]
            try:
                number, kind, value = worker.pipe.recv()
            except (EOFError, OSError):
                self._lost(worker)
            worker.open -= 1
            if number is not None:
                self.answers[number] = (kind, value)

    def _lost(self, worker: _Worker) -> NoReturn:
        worker.process.join(PATIENCE)
        code, number = worker.process.exitcode or 0, self.workers.index(worker)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self.stop()
        raise DistributedError(
            f"DataLoader worker {number} (pid {worker.process.pid}) {how}",
            next="see whether memory ran out, or load with num_workers=0 to see the error",
        )


def _in_worker(number: int, kind: type[Exception], text: str) -> Exception:
    """Return a worker's error with its traceback: of the same class if that accepts a text, else a DistributedError."""
    what = f"{kind.__name__} in DataLoader worker {number}"
    try:
        if issubclass(kind, GenesisError):
            return kind(what, where=text)
        return kind(f"{what} | {text}")
    except Exception:  # the class takes other arguments
        return DistributedError(what, where=text)
