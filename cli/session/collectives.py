"""The collectives of a run's steps: timed on every rank, and their means over ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.measure.collectives import CollectiveWatch, StepTimes, medians
from genesis.measure.limits import wait_for
from genesis.train.ranks import Ranks
from genesis.train.state import TrainState


def timed_collectives(
    state: TrainState, device: Device, steps: Callable[[], Callable[[], object]], count: int
) -> StepTimes:
    """Medians of this rank over `count` further steps: a call of all ranks.

    Args:
        steps: makes what takes a step, on a GPU captured already: its graphs hold the events that time them.
    """
    ranks, wait = state.ranks, wait_for(device)
    forget_graphs(device)
    watch, found = CollectiveWatch(state.optimizer, ranks.group, device), list[StepTimes]()
    with watch.watching():
        take = steps()
        for _ in range(count):
            wait()
            ranks.barrier("a step")
            watch.begin()
            take()
            ranks.launched()  # before the wait, which has no end where another rank is gone
            wait()
            found.append(watch.times())
        del take
        forget_graphs(device)  # before their events
    return medians(found)


def forget_graphs(device: Device) -> None:
    """Give back what steps before took, which nobody holds any more."""
    gc.collect()
    if device != CPU:
        cuda.empty_cache(device)


def mean_of_ranks(own: StepTimes, ranks: Ranks) -> StepTimes:
    """The mean of each time over ranks, which make the same calls."""
    numbers = [own.computing, *(time for each in own.collectives for time in (each.seconds, each.exposed))]
    every = ranks.in_turn(numbers)  # number by number
    means = [sum(every[i : i + ranks.size]) / ranks.size for i in range(0, len(every), ranks.size)]
    rows = [
        each._replace(seconds=seconds, exposed=exposed)
        for each, seconds, exposed in zip(own.collectives, means[1::2], means[2::2], strict=True)
    ]
    return StepTimes(means[0], rows)
