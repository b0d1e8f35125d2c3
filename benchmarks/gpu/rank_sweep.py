"""Training steps of ranks under each way in which NCCL may share the GPUs with the step, and one rank's beside them.

    python -m benchmarks.gpu.rank_sweep --nproc 2 [--size 0.5B] [--shape 8x1024] [--lora 16] [--settings 0,0,0 8,0,8]
        [--out JSON]

A setting is three numbers: thread blocks (CTAs) of a collective, 0 for NCCL's choice; NCCL's CTA policy (0 default, 1
efficiency, 2 zero); and SMs that persistent kernels leave free while collectives run. Policy 2 is what training uses
where it can: gradients and weights lie in memory that all ranks have mapped, and travel by DMA engines. Policy -1 sends
neither: what is then slower than one rank alone is not the fault of what is sent.

Columns: the step's time, of the slowest rank; `exposed`, how long of it main waits for collectives, and `compute`, when
it first does, with forward and backward done, both from events in further steps; bus bandwidth of the exchange and the
gathers; `alone`, the step of rank 0 alone, and `scaling`, tokens/s over as many times what it then takes. That is
measured before and behind each setting, and the mean counts: clocks fall as GPUs get hot, by up to 5 %. What each other
rank takes alone is said once, as GPUs of one kind differ and all ranks take the steps of the slowest; and what steps
take that all ranks take at once without sending anything. By estimate a setting takes 12 s.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import write_result
from genesis.array import Array
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.graph import close_graphs
from genesis.distributed import Peers, World, job_key, launch, read_world
from genesis.distributed.communicator import ZERO_CTAS, Communicator, Tuning, bindings, identity_of
from genesis.distributed.group import Alone
from genesis.distributed.nccl import STAGING, NcclGroup
from genesis.distributed.watch import Watch
from genesis.errors import DistributedError
from genesis.measure.collectives import bus_factor
from genesis.measure.limits import wait_for
from genesis.measure.timing import Plan, of_wall
from genesis.op import registry
from genesis.train.ranks import PREPARING_S, Ranks
from genesis.train.signals import Interrupts
from genesis_cli.session.bench.measuring import forget
from genesis_cli.session.bench.shared import collective_times, timed
from genesis_cli.session.bench.steps import new_state, taking
from genesis_cli.session.collectives import mean_of_ranks
from genesis_models.adapters import AdapterConfig, apply_adapters
from genesis_models.blocks import CausalLM
from genesis_models.registry import build, preset

SILENT = -1  # the policy that sends no gradients and no weights
LIMIT_S = 60.0  # how long a rank may wait for another, once kernels are compiled


class Setting(NamedTuple):
    """See above."""

    ctas: int
    policy: int
    reserved: int


class Steps(NamedTuple):
    """What is measured: `watched` steps are timed with their collectives, others for `seconds`."""

    batch: int
    length: int
    seconds: float
    watched: int


SETTINGS = (
    Setting(0, 0, 0),
    *(Setting(ctas, 0, reserved) for ctas in (1, 2, 4, 8, 16) for reserved in (0, ctas)),
    Setting(0, 1, 0),
    Setting(0, ZERO_CTAS, 0),
    Setting(0, ZERO_CTAS, 8),
)


class _Silent(NcclGroup):
    """Ranks that keep their gradients and weights to themselves: a sum is that of the own ones."""

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        assert parts is not None and not adds, "what a step of one batch a rank sends"
        own = source.view((out.size,), (1,), source.offset + sum(parts[: self.rank]))
        registry["cast"](own, dtype=out.dtype, out=out)

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        """Each rank goes on with the weights that it has."""


def group_of(setting: Setting, nccl: Any, peers: Peers, device: Device, staging: int = STAGING) -> NcclGroup:
    """The ranks' group with this setting. Raises: DistributedError."""
    identity = bytes.fromhex(peers.broadcast_json("nccl", identity_of(nccl).hex() if peers.rank == 0 else None))
    ctas = setting.ctas or None
    tuning = Tuning(min_ctas=ctas, max_ctas=ctas, cta_policy=setting.policy if setting.policy > 0 else None)
    driver = backend_of(device).driver
    made = Communicator(nccl, driver, peers.rank, peers.size, identity, LIMIT_S, tuning)
    kind = NcclGroup if setting.policy != SILENT else _Silent
    return kind(peers, device, made, staging, setting.reserved, is_mapped=setting.policy == ZERO_CTAS)


def alone(model: CausalLM, steps: Steps, device: Device, ranks: Ranks) -> tuple[list[float], list[float]]:
    """Seconds of a step of each rank, with a batch of its own: while the others do nothing, and while all take steps.

    Nothing is sent. All have compiled what steps need before.
    """
    take, wait = taking(new_state(model, steps.batch, steps.length), device, []), wait_for(device)
    sample, own = of_wall(take, wait), 0.0
    first = min(sample(1) for _ in range(2))
    count = max(1, round(steps.seconds / max(ranks.in_turn([first]))))
    for rank in range(ranks.size):
        ranks.barrier("one rank's steps")
        if ranks.rank == rank:
            own = statistics.median(sample(1) for _ in range(count))
    ranks.barrier("all ranks' steps")
    at_once = statistics.median(sample(1) for _ in range(count))
    del take, sample
    forget(model, device)
    return ranks.in_turn([own]), ranks.in_turn([at_once])


def measured(
    setting: Setting, group: NcclGroup, model: CausalLM, steps: Steps, device: Device, ranks: Ranks
) -> dict[str, Any]:
    """A row, without what one rank alone takes."""
    notes: list[str] = []
    state = new_state(model, steps.batch, steps.length, ranks)
    by_step = timed(taking(state, device, notes), wait_for(device), ranks, Plan(seconds=steps.seconds))
    times = mean_of_ranks(collective_times(state, device, steps.watched), ranks)
    rates = {
        each.name: each.nbytes * bus_factor(each.name, ranks.size) / each.seconds / 1e9 for each in times.collectives
    }
    return {
        **setting._asdict(),
        "ms": statistics.median(max(each) for each in by_step) * 1e3,
        "exposed_ms": sum(each.exposed for each in times.collectives) * 1e3,
        "compute_ms": times.computing * 1e3,
        "exchange_gbps": rates["reduce-scatter, gradients"],
        "gather_gbps": rates["all-gather, weights"],
        "notes": notes,
    }


COLUMNS = {"CTAs": 5, "policy": 7, "reserved": 9, "ms/step": 10, "exposed": 10, "compute": 10, "exchange": 10}
HEAD = "".join(f"{name:>{width}}" for name, width in {**COLUMNS, "gather": 8, "alone": 10, "scaling": 9}.items())


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    head = f"{row['ctas'] or 'auto':>5}{row['policy']:>7}{row['reserved']:>9}"
    if "error" in row:
        return f"{head}  {row['error'][:80]}"
    note = f"  {row['notes'][0][:60]}" if row["notes"] else ""
    return (
        f"{head}{row['ms']:10.2f}{row['exposed_ms']:10.2f}{row['compute_ms']:10.2f}{row['exchange_gbps']:10.1f}"
        f"{row['gather_gbps']:8.1f}{row['alone_ms']:10.2f}{row['scaling']:9.1%}{note}"
    )


def sweep(
    settings: Sequence[Setting], nccl: Any, model: CausalLM, steps: Steps, device: Device, world: World, watch: Watch,
    peers: Peers, staging: int = STAGING,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each setting, which every rank gets: a call of all ranks. One that NCCL refuses on all is left out."""
    place = world.local_rank, world.local_size

    def without_others() -> tuple[list[float], list[float]]:
        with peers.during("one rank's steps", PREPARING_S):
            return alone(model, steps, device, Ranks(peers, Alone(), *place))

    each, at_once = without_others()
    yield {"each_alone_ms": [seconds * 1e3 for seconds in each], "at_once_ms": [s * 1e3 for s in at_once]}
    for setting in settings:
        with peers.during(f"setting {tuple(setting)}", LIMIT_S):
            group, problem = None, ""
            try:
                group = group_of(setting, nccl, peers, device, staging)
            except DistributedError as error:
                problem = error.what
            said = peers.gather_json("problems", problem)
            found = str(peers.broadcast_json("problems", next(filter(None, said), "") if said is not None else None))
            if group is None or found:
                yield {**setting._asdict(), "error": found or problem}
                continue
            ranks = Ranks(peers, group, *place)
            watch.collectives, ranks.launched = group, group.mark
            row = measured(setting, group, model, steps, device, ranks)
            watch.collectives = None
            forget(model, device)
            close_graphs(backend_of(device))
            group._nccl.close(LIMIT_S)
        before, each = each, without_others()[0]
        one = statistics.mean([before[0], each[0]]) * 1e3
        yield {**row, "alone_ms": one, "scaling": one / row["ms"]}


def run(world: World, options: argparse.Namespace, nccl: Any) -> None:
    """One rank of the job."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = Device("cuda", world.local_rank)
    batch, length = (int(n) for n in options.shape.split("x"))
    steps = Steps(batch, length, options.seconds, options.watched)
    rows: list[dict[str, Any]] = []
    with (
        Peers.connect(world, job_key(world, os.environ), version="benchmark") as peers,
        Interrupts(saves=False) as interrupts,
        Watch(peers, interrupts.interrupt) as watch,
    ):
        model = build(preset(options.size), seed=0, device=str(device), dtype="bfloat16")
        if options.lora:
            apply_adapters(model, AdapterConfig(r=options.lora, alpha=2.0 * options.lora))
        model.train()
        for row in sweep(options.settings, nccl, model, steps, device, world, watch, peers):
            if peers.rank == 0:
                rows.append(row)
                _show(row, rows, options, world.size, nccl, backend_of(device).driver.properties.name)


def _show(row: dict[str, Any], rows: list[dict[str, Any]], options: Any, ranks: int, nccl: Any, gpu: str) -> None:
    """Print a row at once, and write what there is: a setting that hangs loses nothing."""
    if "each_alone_ms" in row:
        what = f"{options.size}{f', LoRA r {options.lora}' if options.lora else ''}"
        each, at_once = (", ".join(f"{ms:.2f}" for ms in row[key]) for key in ("each_alone_ms", "at_once_ms"))
        print(f"{what} {options.shape}, {ranks} x {gpu}, NCCL {nccl.get_version()}; each rank alone takes")
        print(f"{each} ms a step, all at once {at_once}; times in ms, bus bandwidth in GB/s\n{HEAD}", flush=True)
    else:
        print(line(row), flush=True)
    if options.out:
        facts = {
            "ranks": ranks,
            "nccl": nccl.get_version(),
            "gpu": gpu,
            "size": options.size,
            "shape": options.shape,
            "lora": options.lora,
        }
        facts["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_result(options.out, {**facts, **rows[0], "rows": rows[1:]})


def setting(text: str) -> Setting:
    """One of `--settings`."""
    ctas, policy, reserved = (int(n) for n in text.split(","))
    return Setting(ctas, policy, reserved)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--nproc", type=int, default=2)
    made.add_argument("--size", default="0.5B")
    made.add_argument("--shape", default="8x1024", help="rows and tokens of each rank's batch")
    made.add_argument("--lora", type=int, metavar="RANK", help="train adapters of all linears instead of the model")
    made.add_argument("--settings", type=setting, nargs="+", default=list(SETTINGS), metavar="CTAS,POLICY,RESERVED")
    made.add_argument("--seconds", type=float, default=1.0, help="of steps for each setting")
    made.add_argument("--watched", type=int, default=10, help="steps whose collectives are timed")
    made.add_argument("--out", type=Path)
    return made


def main() -> int:
    options = parser().parse_args()
    if "RANK" not in os.environ:
        return launch([sys.executable, "-m", "benchmarks.gpu.rank_sweep", *sys.argv[1:]], options.nproc)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    run(read_world(os.environ), options, bindings())
    return 0


if __name__ == "__main__":
    sys.exit(main())
