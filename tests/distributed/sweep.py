"""Real ranks ended at random instants, more of them than the suite has time for: `make ranks-faults`.

Each job gets one signal, to the launcher or to a rank, at an instant of its first three seconds: while ranks start,
find each other, make steps, save and end. Its exit code must be one that the fault may have, it must end in time, and
no process may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.distributed.jobs import RANKS, start

# Signals that come before a process has handlers end it as the system does: that is the launcher's -15 or -2; a rank's
# become 143 and 130, and the others' 10 is its echo. 0: the job was over. After a rank's SIGKILL: 10.
ALLOWED = {
    ("launcher", "SIGTERM"): {0, 143, -15},
    ("launcher", "SIGINT"): {0, 130, -2},
    ("launcher", "SIGKILL"): {0, -9},
    ("rank", "SIGTERM"): {0, 143},
    ("rank", "SIGINT"): {0, 130},
    ("rank", "SIGKILL"): {0, 10},
}
WITHIN_S = 10.0


def attempt(draw: random.Random, size: int, folder: Path) -> tuple[str, str]:
    """One job and one signal; what was done and what is wrong with how it ended, if anything."""
    target, name = draw.choice(sorted(ALLOWED))
    after, rank = draw.uniform(0, 3), draw.randrange(size)
    what = f"{name} to {'the launcher' if target == 'launcher' else f'rank {rank}'} after {after:.3f} s"
    job = start(folder, [*RANKS, "100"], size)
    time.sleep(after)
    try:
        os.kill(job.fork.pid if target == "launcher" else job.rank(rank), signal.Signals[name])
    except (AssertionError, ProcessLookupError):
        what += " (it was over)"
    began = time.monotonic()
    code = job.end()
    took, left = time.monotonic() - began, job.left(1.0)
    if code not in ALLOWED[target, name]:
        return what, f"exit code {code}: {job.err.read_text()}{job.fork.error}"
    if took > WITHIN_S:
        return what, f"ended after {took:.1f} s"
    return what, f"processes {left} are left" if left else ""


def main() -> int:
    """Run the attempts; 1 where one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instants", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, wrong, done = random.Random(options.seed), 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.instants):
            what, fault = attempt(draw, options.ranks, Path(folder))
            done[what.partition(" after")[0] + (" (it was over)" if "over" in what else "")] += 1
            if fault:
                wrong += 1
                print(f"{what}: {fault}", flush=True)
    for what, count in sorted(done.items()):
        print(f"{count:4} {what}")
    print(f"{options.instants} jobs of {options.ranks} ranks, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
