"""The peer's side of a comparison, run as a script: it answers questions about torch's times, one JSON line each.

    python child.py '{"work": "ops", "device": "cuda:0", "threads": null}'

It says who it is, or what is missing. Then for each line on stdin it prints one: `open` builds a job, `measure` times
it for a while (`seconds`) or so many times (`count`), `close` forgets it. A job that fails is answered with its error,
and the next one is served.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

WORKS = {"ops": "torch_ops", "steps": "torch_steps"}  # modules next to this file; each has `opened`
LEAST_SAMPLES = 5


def sampled(sample: Callable[[], float], seconds: float) -> list[float]:
    """Samples taken for so many seconds, a few at least."""
    end, found = time.perf_counter() + seconds, list[float]()
    while len(found) < LEAST_SAMPLES or time.perf_counter() < end:
        found.append(sample())
    return found


def main() -> int:
    """Serve until stdin ends."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return _say(answers, {"missing": f"torch cannot be imported: {error}"})
    device = settings["device"]
    if device != "cpu" and not torch.cuda.is_available():
        return _say(answers, {"missing": f"torch {torch.__version__} finds no GPU, and {device} was asked for"})
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    if device != "cpu":
        torch.cuda.set_device(device)
    opened = importlib.import_module(WORKS[settings["work"]]).opened
    _say(answers, {"version": str(torch.__version__)})
    _serve(torch, device, opened, answers)
    return 0


def _serve(torch: Any, device: str, opened: Callable[..., Any], answers: TextIO) -> None:
    job: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("ask")
        try:
            if what == "open":
                job = None  # the one before goes first
                job = opened(torch, device, **request)
                _say(answers, job.facts)
            elif what == "measure":
                sample, count = job.sampler(request["what"]), request.get("count")
                found = [sample() for _ in range(count)] if count else sampled(sample, request["seconds"])
                _say(answers, {"samples": found, **job.noted()})
            else:
                job = None
                _say(answers, {})
        except ImportError as error:
            _say(answers, {"error": f"{error.name} is not installed there", "lacks": error.name})
        except Exception as error:  # whatever a peer raises is its answer
            lines = str(error).strip().splitlines() or [""]
            _say(answers, {"error": f"{type(error).__name__}: {lines[0][:300]}"})
        if job is None and device != "cpu":
            torch.cuda.empty_cache()


def _say(answers: TextIO, what: dict[str, Any]) -> int:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
    return 3 if "missing" in what else 0


if __name__ == "__main__":
    sys.exit(main())
