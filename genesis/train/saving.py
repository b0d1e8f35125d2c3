"""Saves of a run: in the foreground, while training blocks, or by a thread, from a snapshot in host memory.

At most one save runs at a time. The thread writes the same bytes as a save in the foreground, and the loop receives its
result at the next step.
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
MAX_MEMORY_SHARE = 0.5  # a snapshot may take this share of the free host memory
STANDSTILL_S = 0.5  # a longer wait for the disk is reported
_UNWINDING_S = 5.0
# A save that is given up may still make these calls, to remove its files.
_REMOVES = ("close", "unlink", "rmdir")


class _Save:
    """A checkpoint that a thread writes."""

    def __init__(self, checkpoints: Checkpoints, snapshot: Snapshot, copied: Callable[[], None]) -> None:
        self.step = snapshot.step
        self._checkpoints, self._snapshot, self._copied = checkpoints, snapshot, copied
        self._error: BaseException | None = None
        self._is_given_up = False
        self.ended = threading.Event()
        # The interpreter does not wait for a daemon thread at exit, so a second signal stops at once.
        self._thread = threading.Thread(target=self._run, name=SAVER, daemon=True)

    def start(self) -> None:
        """Start to write. The caller must have stored the save, because a signal may arrive at any time."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._copied()
            self._checkpoints.write(self._snapshot, self._checkpoints.fs.shown(self._refuse))
        except BaseException as error:  # raised again in the main thread
            self._error = error
        self.ended.set()

    def _refuse(self, call: Call) -> None:
        if self._is_given_up and call.op not in _REMOVES:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def give_up(self) -> None:
        """Prevent the save from committing, and wait briefly until it has removed its files."""
        self._is_given_up = True
        self.ended.wait(_UNWINDING_S)

    def check(self) -> None:
        """Raise the error of the finished save, if any, and name its step."""
        if isinstance(self._error, GenesisError):
            self._error.what = f"the checkpoint of step {self.step} could not be saved: {self._error.what}"
        if self._error is not None:
            raise self._error


class Saves:
    """Saves the checkpoints of a run; a context manager that waits for the last save.

    Args:
        background: the setting `checkpoint.background`.
        device: device of the run.
        note: receives lines to print.
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
        self._noted_lines: set[str] = set()

    def prepare(self, state: TrainState) -> None:
        """Allocate the memory of snapshots if saves use them; on rank 0, after a first step."""
        if self._background == "off" or not state.ranks.is_main:
            return
        needed, free = snapshot_bytes(state), free_host_memory()
        free = host_memory() if free is None else free
        if self._background == "auto" and (free is None or needed > MAX_MEMORY_SHARE * free):
            of = "an unknown amount" if free is None else f"{free / 2**30:.3g} GiB"
            self._note_once(
                f"training blocks while checkpoints are written: a snapshot takes {needed / 2**30:.3g} GiB of host"
                f" memory, {of} is free, and half of that may be used (checkpoint.background)"
            )
            return
        self._close()
        self._buffer = HostBuffer(needed, self._device)

    def save(self, state: TrainState, *, waits: bool) -> str | None:
        """Save the state; return the state hash, or None if a thread still writes it.

        All ranks must call it, after `wait`.

        Args:
            waits: block until the checkpoint is written.

        Raises:
            DiskError: see `Checkpoints.save`.
        """
        in_background = not waits and self._background != "off"
        if in_background and self._buffer is not None and self._buffer.size < snapshot_bytes(state):
            self.prepare(state)  # a parameter has received its first gradient after the first step
        if not in_background or not state.ranks.from_main("room", self._buffer is not None):
            return self._note_saved(state.step, self._checkpoints.save(state))
        with state.ranks.during("saving", SAVING_S):
            with state.optimizer.gathered_states():
                if state.ranks.is_main:
                    assert self._buffer is not None, "rank 0 has a buffer"
                    self._save = _Save(self._checkpoints, Snapshot.of(state, self._buffer), self._buffer.wait)
                    self._save.start()
                    if self._buffer.not_pinned is not None:
                        self._note_once(f"copies for checkpoints block training longer: {self._buffer.not_pinned}")
            state.ranks.barrier("begun to save")
        return None

    def poll(self) -> None:
        """Check between two steps whether a save has ended; this never blocks.

        Raises:
            DiskError: the save failed; the older checkpoints are intact.
            GenesisError: writing failed otherwise.
        """
        if self._save is not None and self._save.ended.is_set():
            save, self._save = self._save, None
            save.check()
            self._note_saved(save.step, "")

    def wait(self, state: TrainState) -> None:
        """Wait on all ranks for the running save; raises the errors of `poll`."""
        with state.ranks.during("saving", SAVING_S):
            begun = time.monotonic()
            self._finish()
            if time.monotonic() - begun > STANDSTILL_S:
                self._note_once(
                    "training waits for the disk: the next checkpoint is due before the last one is written"
                    " (checkpoint.every)"
                )
            state.ranks.barrier("saved before")

    def _finish(self) -> None:
        if self._save is not None:
            self._save.ended.wait()
            self.poll()

    def _note_saved(self, step: int, state_hash: str) -> str:
        self._note(f"saved {self._checkpoints.folder(step)}")
        return state_hash

    def _note_once(self, line: str) -> None:
        if line not in self._noted_lines:
            self._noted_lines.add(line)
            self._note(line)

    def _close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, (InterruptedRun, KeyboardInterrupt)):  # the first signal has already waited
                return
            self._finish()
        except Exception as failed:
            if error is None or isinstance(failed, InterruptedRun):
                raise
            what = failed.what if isinstance(failed, GenesisError) else f"the last checkpoint was not saved: {failed}"
            self._note(f"warning: {what}")  # the run ends with its own error
        finally:
            if self._save is not None:
                self._save.give_up()
                if not self._save.ended.is_set():  # blocked in a system call that uses the buffer's memory
                    self._buffer = None
            self._close()
