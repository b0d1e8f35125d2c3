"""What a loader does in its own process or in workers: fetch examples, and answer tasks over a pipe.

Tensors cross the pipes of `multiprocessing` as their bytes. This does not apply to `pickle` itself, which refuses them.
"""

from __future__ import annotations

import itertools
import queue
import random
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np

import genesis
from genesis.array import from_numpy
from genesis.errors import GradientError
from genesis.nn import Parameter
from genesis.tensor import Tensor
from genesis.utils.data.dataset import IterableDataset, examples


class WorkerInfo(NamedTuple):
    """Which worker this process is.

    Attributes:
        id: its number, from 0.
        num_workers: how many there are.
        seed: the seed of its random generators.
        dataset: its copy of the data set.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any


class Fetcher:
    """Fetches examples by index, or the next ones of a stream, and collates them."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool, drop_last: bool) -> None:
        self.dataset, self.collate, self.batched, self.drop_last = dataset, collate, batched, drop_last
        self.stream = iter(dataset) if isinstance(dataset, IterableDataset) else None

    def __call__(self, index: Any) -> Any:
        """Return a batch. Raises StopIteration at the end of a stream."""
        if self.stream is None:
            return self.collate(examples(self.dataset, index) if self.batched else self.dataset[index])
        if not self.batched:
            return self.collate(next(self.stream))
        batch = list(itertools.islice(self.stream, len(index)))
        if not batch or (self.drop_last and len(batch) < len(index)):
            raise StopIteration
        return self.collate(batch)


_info: WorkerInfo | None = None
PIPES: weakref.WeakSet[Connection] = weakref.WeakSet()  # the loaders' ends, which a forked worker has, too


def get_worker_info() -> WorkerInfo | None:
    """Return which worker of a loader this process is, or None in the main process."""
    return _info


def serve(pipe: Connection, info: WorkerInfo, fetcher: tuple[Any, ...], start: Callable[[int], object] | None) -> None:
    """Answer tasks `(number, index)` in order by `(number, kind, value)`, until the loader closes the pipe.

    The number None starts a new epoch. Kinds are "batch", "end" (of a stream) and "error", with its type and traceback.
    """
    global _info  # noqa: PLW0603  this process serves one loader only
    _info = info
    for each in list(PIPES):  # else a pipe that a loader closes stays open here
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the loader's process handles it and closes the pipe
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, tasks), daemon=True).start()
    genesis.set_num_threads(1)
    random.seed(info.seed)
    genesis.manual_seed(info.seed)
    np.random.seed(info.seed % 2**32)
    is_stream, fetch = isinstance(info.dataset, IterableDataset), None
    while (task := tasks.get()) is not None:
        number, index = task
        try:
            if start is not None:
                start(info.id)
                start = None
            if number is None or fetch is None:
                fetch = Fetcher(*fetcher)
            answer = (number, "batch", None if number is None else fetch(index))
            sent = ForkingPickler.dumps(answer)
        except Exception as error:
            if isinstance(error, StopIteration) and is_stream:
                sent = ForkingPickler.dumps((number, "end", None))
            else:
                sent = _failure(number, error)
        try:
            pipe.send_bytes(sent)
        except OSError:  # the loader closed the pipe
            return


def _receive(pipe: Connection, tasks: queue.SimpleQueue[Any]) -> None:
    """Take tasks off the pipe at once, so that the loader never waits to send one."""
    try:
        while True:
            tasks.put(pipe.recv())
    except (EOFError, OSError):
        tasks.put(None)


def _failure(number: int | None, error: Exception) -> Any:
    text = "".join(traceback.format_exception(error))
    try:
        return ForkingPickler.dumps((number, "error", (type(error), text)))
    except Exception:  # a class that the loader's process cannot import
        return ForkingPickler.dumps((number, "error", (RuntimeError, text)))


# --- Tensors in pipes -------------------------------------------------------------------------------------------------


def _restored(kind: type[Tensor], data: np.ndarray, requires_grad: bool) -> Tensor:
    """Return the tensor that `_reduced` took apart."""
    tensor = Tensor(from_numpy(data))
    return Parameter(tensor, requires_grad) if kind is Parameter else tensor.requires_grad_(requires_grad)


def _reduced(tensor: Tensor) -> Any:
    if tensor.requires_grad and not tensor.is_leaf:
        raise GradientError("a tensor with a recorded gradient cannot leave its process", next="detach() it first")
    return _restored, (type(tensor), tensor.array.numpy(), tensor.requires_grad)


for _kind in (Tensor, Parameter):
    ForkingPickler.register(_kind, _reduced)
