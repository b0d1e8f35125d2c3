"""Training speed: tokens over the time of training steps alone; warm-up, evaluation and saving never count."""

from __future__ import annotations

# First steps of a process that are not timed: they pay for first touches of memory and caches.
WARMUP_STEPS = 3


class Throughput:
    """Collects the time of training steps; the caller times a step and nothing but a step."""

    def __init__(self) -> None:
        self._skip = WARMUP_STEPS
        self._total = [0, 0, 0.0]  # steps, tokens, seconds
        self._interval = [0, 0, 0.0]

    def add(self, tokens: int, seconds: float) -> None:
        """Counts one training step of `tokens` tokens that took `seconds`."""
        if self._skip:
            self._skip -= 1
            return
        for sums in (self._total, self._interval):
            sums[0] += 1
            sums[1] += tokens
            sums[2] += seconds

    def interval(self) -> dict[str, float]:
        """`perf/tokens_per_second` and `perf/step_ms` since the last call; empty when only warm-up steps were made."""
        sums, self._interval = self._interval, [0, 0, 0.0]
        return _rates(*sums)

    def overall(self) -> dict[str, float]:
        """The same since the start of the process."""
        return _rates(*self._total)


def _rates(steps: float, tokens: float, seconds: float) -> dict[str, float]:
    if not steps or seconds <= 0:
        return {}
    return {"perf/tokens_per_second": tokens / seconds, "perf/step_ms": 1000 * seconds / steps}
