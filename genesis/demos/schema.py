"""What a demo found, as data: what `genesis demo --json` writes. Times are seconds, shares are of 1."""

from __future__ import annotations

from genesis.profile.schema import Measured, StrictModel, Time


class DemoRow(StrictModel):
    """One way of doing the work."""

    name: str
    launches: int
    """Kernels that the GPU is given; on the CPU ops, each of which passes over its operands once."""
    bytes: int
    """Read and written, each operand of each op once."""
    flops: int
    wall: Time
    gpu: Time | None
    """Time on the GPU alone; null without one."""
    bytes_per_second: float
    """By the GPU's time where there is one."""
    share: float
    """Of the rate of a copy on this machine."""
    peak_bytes: int | None
    """Memory taken beyond the inputs; null where the demo is not about it."""

    @property
    def seconds(self) -> float:
        """The time that counts: the GPU's, else by the clock."""
        return (self.gpu or self.wall).seconds


class Section(StrictModel):
    """Ways of doing the same work, side by side.

    `sentences` are what the figures say; `notes` are ways that this machine has not.
    """

    title: str
    rows: list[DemoRow]
    sentences: list[str]
    notes: list[str]


class DemoReport(Measured):
    """A demo on one machine."""

    demo: str
    copy_bytes_per_second: float
    """Of a copy far larger than the caches, measured before the demo."""
    sections: list[Section]
