"""The handle that takes a hook off a tensor."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class HookHandle:
    """Takes a hook off its tensor: by `remove()`, by a call, or at the end of a `with` block."""

    __slots__ = ("_take_off",)

    def __init__(self, take_off: Callable[[], None]) -> None:
        self._take_off: Callable[[], None] | None = take_off

    def remove(self) -> None:
        """Take the hook off; a second call does nothing."""
        take_off, self._take_off = self._take_off, None
        if take_off is not None:
            take_off()

    __call__ = remove

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
