"""How a run saves: at once, while training waits, or in the background, by a thread from a snapshot in host memory.

One save is under way at a time. What a thread writes is what a save at once would have written, and the loop learns at
its next step how it ended.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Literal, Self

from genesis.backend import Device
from genesis.backend.host import free_host_memory, host_memory
from genesis.errors import GenesisError, InterruptedRun
from genesis.files.filesystem import Call
from genesis.train.checkpoint import Checkpoints
from genesis.train.ranks import SAVING_S
from genesis.train.state import HostBuffer, Snapshot, TrainState, snapshot_bytes

SAVER = "genesis-save"  # the thread's name
SHARE = 0.5  # of the free host memory that a snapshot may take
STANDSTILL_S = 0.5  # beyond it a line says that training waits for the disk
_UNWINDING_S = 5.0
# What may still be called when a save is given up: it removes what was begun.
_REMOVES = ("close", "unlink", "rmdir")


class _Save:
    """A checkpoint that a thread writes."""

    def __init__(self, checkpoints: Checkpoints, snapshot: Snapshot, copied: Callable[[], None]) -> None:
        self.step = snapshot.step
        self._checkpoints, self._snapshot, self._copied = checkpoints, snapshot, copied
        self._error: BaseException | None = None
        self._is_given_up = False
        self.ended = threading.Event()
        # The interpreter's end does not wait for a daemon: a second signal stops now.
        self._thread = threading.Thread(target=self._run, name=SAVER, daemon=True)

    def start(self) -> None:
        """Begin to write. Whoever calls holds the save by then: a signal may come in between."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._copied()
            self._checkpoints.write(self._snapshot, self._checkpoints.fs.shown(self._refuse))
        except BaseException as error:  # for the main thread
            self._error = error
        self.ended.set()

    def _refuse(self, call: Call) -> None:
        if self._is_given_up and call.op not in _REMOVES:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def give_up(self) -> None:
        """Let it commit nothing from now on, and wait a moment until what it began is removed."""
        self._is_given_up = True
        self.ended.wait(_UNWINDING_S)

    def check(self) -> None:
        """Raise what the save failed with, naming its step; it has ended."""
        if isinstance(self._error, GenesisError):
            self._error.what = f"the checkpoint of step {self.step} could not be saved: {self._error.what}"
        if self._error is not None:
            raise self._error


class Saves:
    """Saves the checkpoints of a run; a context manager, whose end waits for the last of them.

    Args:
        background: as `checkpoint.background`.
        device: where the run computes.
        note: is told what a person should know, a line at a time.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        background: Literal["auto", "on", "off"],
        device: Device,
        note: Callable[[str], None],
    ) -> None:
        self._checkpoints, self._background, self._device, self._note = checkpoints, background, device, note
        self._buffer: HostBuffer | None = None
        self._save: _Save | None = None
        self._told: set[str] = set()

    def prepare(self, state: TrainState) -> None:
        """Take the memory of snapshots, where they are to be made; on rank 0, after a first step."""
        if self._background == "off" or not state.ranks.is_main:
            return
        needed, free = snapshot_bytes(state), free_host_memory()
        free = host_memory() if free is None else free
        if self._background == "auto" and (free is None or needed > SHARE * free):
            of = "an unknown amount" if free is None else f"{free / 2**30:.3g} GiB"
            self._tell(
                f"training waits while checkpoints are written: a snapshot takes {needed / 2**30:.3g} GiB of host"
                f" memory, of which {of} is free, and half of that may be used (checkpoint.background)"
            )
            return
        self._close()
        self._buffer = HostBuffer(needed, self._device)

    def save(self, state: TrainState, *, waits: bool) -> str | None:
        """Save the state; the state hash where it is written, None where a thread goes on to write it.

        It is a call of all ranks, after `wait`.

        Args:
            waits: until it is written.

        Raises:
            DiskError: as of `Checkpoints.save`.
        """
        is_beside = not waits and self._background != "off"
        if is_beside and self._buffer is not None and self._buffer.size < snapshot_bytes(state):
            self.prepare(state)  # a parameter had its first gradient after the first step
        if not is_beside or not state.ranks.from_main("room", self._buffer is not None):
            return self._noted(state.step, self._checkpoints.save(state))
        with state.ranks.during("saving", SAVING_S):
            with state.optimizer.gathered_states():
                if state.ranks.is_main:
                    assert self._buffer is not None, "there is room"
                    self._save = _Save(self._checkpoints, Snapshot.of(state, self._buffer), self._buffer.wait)
                    self._save.start()
                    if self._buffer.not_pinned is not None:
                        self._tell(f"copies for checkpoints make training wait longer: {self._buffer.not_pinned}")
            state.ranks.barrier("begun to save")
        return None

    def poll(self) -> None:
        """Between two steps: look whether a save has ended; nothing waits.

        Raises:
            DiskError: it failed, and the older checkpoints are intact. GenesisError: as of writing.
        """
        if self._save is not None and self._save.ended.is_set():
            save, self._save = self._save, None
            save.check()
            self._noted(save.step, "")

    def wait(self, state: TrainState) -> None:
        """Wait for the save that is under way, on all ranks; errors as of `poll`."""
        with state.ranks.during("saving", SAVING_S):
            begun = time.monotonic()
            self._finish()
            if time.monotonic() - begun > STANDSTILL_S:
                self._tell(
                    "training waits for the disk: a checkpoint is due before the one before it is written"
                    " (checkpoint.every)"
                )
            state.ranks.barrier("saved before")

    def _finish(self) -> None:
        if self._save is not None:
            self._save.ended.wait()
            self.poll()

    def _noted(self, step: int, state_hash: str) -> str:
        self._note(f"saved {self._checkpoints.folder(step)}")
        return state_hash

    def _tell(self, line: str) -> None:
        """Say something once."""
        if line not in self._told:
            self._told.add(line)
            self._note(line)

    def _close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, (InterruptedRun, KeyboardInterrupt)):  # the first signal's own has waited already
                return
            self._finish()
        except Exception as failed:
            if error is None or isinstance(failed, InterruptedRun):
                raise
            what = failed.what if isinstance(failed, GenesisError) else f"the last checkpoint was not saved: {failed}"
            self._note(f"warning: {what}")  # the run ends with the error that came first
        finally:
            if self._save is not None:
                self._save.give_up()
                if not self._save.ended.is_set():  # in a call of the system, with the buffer's memory
                    self._buffer = None
            self._close()
