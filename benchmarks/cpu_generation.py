"""Generation on the CPU: Genesis and transformers with the same weights and threads, interleaved in one run.

    python -m benchmarks.cpu_generation --torch-python .venv-peers/bin/python

Each side runs in its own processes, with the same random float32 weights. Nothing is reported unless both generate the
same tokens greedily. A token's time is the time since the previous token; the first token's includes the prompt. The
report has the median and the fastest tenth of all rounds, and the ratio transformers / Genesis. On a busy machine the
fastest tenth is the figure to look at.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = ("genesis", "transformers")


def make_model(job: dict[str, Any]) -> dict[str, Any]:
    """Write a model with random weights into the job's folder."""
    import genesis_models

    genesis_models.save(genesis_models.build(genesis_models.preset(job["size"]), seed=0), job["folder"])
    return {}


def genesis_side(job: dict[str, Any]) -> dict[str, Any]:
    """Time the engine of `genesis generate`."""
    import numpy as np
    from threadpoolctl import threadpool_info

    import genesis
    import genesis_models
    from genesis.backend.cpu import set_threads
    from genesis_models.engine import Request, Sampling
    from genesis_models.generate import engine_for

    set_threads(job["threads"])
    model = genesis_models.load(job["folder"], dtype="float32")

    def generate(tick: Callable[[], None]) -> list[int]:
        requests, found = [Request(job["prompt"], Sampling(0.0), job["new"])], []
        for token in engine_for(model, requests).run(requests):
            tick()
            found.append(token.id or 0)
        return found

    blas = [f"{x['internal_api']} {x['version']}" for x in threadpool_info() if x["user_api"] == "blas"]
    return timed(generate, job) | {"version": f"genesis {genesis.__version__}, numpy {np.__version__}, {blas[0]}"}


def transformers_side(job: dict[str, Any]) -> dict[str, Any]:
    """Time `generate` of transformers, with its own cache."""
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()
    prompt = torch.tensor([job["prompt"]])
    mask = torch.ones_like(prompt)

    greedy = transformers.GenerationConfig(max_new_tokens=job["new"], do_sample=False, eos_token_id=None)

    def generate(tick: Callable[[], None]) -> list[int]:
        def never(ids: Any, scores: Any, **more: Any) -> Any:
            tick()
            return torch.zeros(len(ids), dtype=torch.bool)

        with torch.inference_mode():
            out = model.generate(prompt, attention_mask=mask, generation_config=greedy, stopping_criteria=[never])
        return out[0, len(job["prompt"]) :].tolist()

    return timed(generate, job) | {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}


def timed(generate: Callable[[Callable[[], None]], list[int]], job: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds from each token to the next, and to the first token; an uncounted run warms up."""
    tokens = generate(lambda: None)
    steps, processors, firsts = [], [], []
    for _ in range(job["repeats"]):
        times: list[float] = []
        begun, processor = time.perf_counter(), time.process_time()
        generate(functools.partial(_note, times))
        processors.append((time.process_time() - processor) / job["new"] * 1e3)
        firsts.append((times[0] - begun) * 1e3)
        steps += [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens": tokens, "token_ms": steps, "processor_ms": processors, "first_ms": firsts, "peak_mib": peak}


def _note(times: list[float]) -> None:
    times.append(time.perf_counter())


def run(python: str, side: str, job: dict[str, Any]) -> dict[str, Any]:
    command = [python, str(Path(__file__).resolve()), "--side", side, json.dumps(job)]
    threads = {"OMP_NUM_THREADS": str(job["threads"]), "OPENBLAS_NUM_THREADS": str(job["threads"])}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


DESCRIBED = {  # a dict, because the other side's Python may lack Genesis, which `columns` needs
    "side": ("side", "text", "Library."),
    "token": ("token", "s", "Median time from a token to the next."),
    "fastest": ("fastest tenth", "s", "Time of the fastest tenth of the tokens."),
    "processor": ("processor", "s", "Processor time of a token."),
    "first": ("first token", "s", "Median time to the first token."),
    "tokens_per_second": ("tokens/s", "token/s", "Tokens a second at the median."),
    "peak": ("peak memory", "bytes", "Largest resident memory of the process."),
    "version": ("version", "text", "Versions of the library."),
    "ratio": ("ratio", "ratio", "Time of a token / Genesis's."),
    "first_ratio": ("first ratio", "ratio", "Time to the first token / Genesis's."),
    "memory_ratio": ("memory ratio", "ratio", "Memory / Genesis's."),
}


def summary(side: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def all_of(key: str) -> list[float]:
        return [ms / 1e3 for each in rounds for ms in each[key]]

    token = statistics.median(all_of("token_ms"))
    return {
        "side": side,
        "token": token,
        "fastest": statistics.quantiles(all_of("token_ms"), n=10)[0],
        "processor": statistics.median(all_of("processor_ms")),
        "first": statistics.median(all_of("first_ms")),
        "tokens_per_second": 1 / token,
        "peak": max(each["peak_mib"] for each in rounds) * 2**20,
        "version": rounds[0]["version"],
    }


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    job = {
        "size": arguments.size,
        "threads": arguments.threads,
        "prompt": [(7919 * i + 11) % 10_000 for i in range(arguments.prompt)],
        "new": arguments.new,
        "repeats": arguments.repeats,
    }
    pythons = dict(zip(SIDES, (sys.executable, arguments.torch_python), strict=True))
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        job["folder"] = folder
        run(sys.executable, "make", job)
        for _ in range(arguments.rounds):
            for side in SIDES:
                rounds[side].append(run(pythons[side], side, job))
    tokens = [each.pop("tokens") for found in rounds.values() for each in found]
    if any(each != tokens[0] for each in tokens):
        raise SystemExit(f"Genesis and transformers generate different tokens: {tokens}")
    ours, theirs = (summary(name, found) for name, found in rounds.items())
    for key, of in (("ratio", "token"), ("first_ratio", "first"), ("memory_ratio", "peak")):
        theirs[key] = theirs[of] / ours[of]
    return [ours, theirs]


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        side = {"make": make_model, "genesis": genesis_side, "transformers": transformers_side}[sys.argv[2]]
        print(json.dumps(side(json.loads(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True, help="the python of an environment with transformers")
    parser.add_argument("--size", default="0.5B", help="a preset of Genesis")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the JSON report")
    arguments = parser.parse_args()
    from benchmarks.results import columns, rows_table, write_report
    from genesis.backend import CPU

    made = rows_table("sides", f"Generation with {arguments.size}", columns(**DESCRIBED), compare(arguments))
    settings = {key: getattr(arguments, key) for key in ("size", "threads", "prompt", "new")}
    write_report(arguments.out, "cpu-generation", CPU, [made], settings)


if __name__ == "__main__":
    main()
