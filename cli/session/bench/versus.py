"""Training steps compared with torch's: each recipe runs in a fresh process, interleaved with ours or rank by rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from genesis import cuda
from genesis.backend import CPU
from genesis.errors import DeviceError, GenesisError
from genesis.measure.limits import wait_for
from genesis.measure.peer import Child, PeerLacks, ratio_of, started
from genesis.measure.record import Column, Failure, Table, table
from genesis.train.ranks import ALONE, PREPARING_S, Ranks
from genesis_cli.session.bench.steps import Notify, Request, forget, new_state, taking, together, trained_model
from genesis_models.config import ModelConfig
from genesis_models.fuse import FusedAttention, FusedHeadNormAttention
from genesis_models.registry import without_memory

ROUNDS, LEAST_STEPS, MOST_STEPS = 3, 3, 100
SHARE = 1 / 6  # of the plan's time for each round of each side
# Parameters of a layer that the lean recipe's layers have, or may have.
LEAN = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
LEAN |= {"input_layernorm", "post_attention_layernorm"}
QKV_BIAS = {f"self_attn.{name}_proj.bias" for name in "qkv"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
# Its sizes, named as in a config.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def lean_config(config: ModelConfig, length: int) -> dict[str, object]:
    """The sizes of the lean recipe's model, for sequences of `length` tokens.

    Raises:
        PeerLacks: the recipe's layers compute something else than the model's.
    """
    model = without_memory(config)
    names = {name.partition(".layers.0.")[2].removesuffix(".weight") for name, _ in model.named_parameters()} - {""}
    if unknown := names - LEAN - QKV_BIAS - HEAD_NORMS:
        raise PeerLacks(f"the lean recipe's layers have no {min(unknown)}")
    # Layers with the same parameters may still use them differently.
    forms = {type(layer.self_attn).__bases__[0] if model.is_fused else None for layer in model.model.layers}
    if not forms <= {FusedAttention, FusedHeadNormAttention}:
        raise PeerLacks(f"the lean recipe's layers compute something else than those of {config.model_type}")
    if window := min((each for each in config.layer_windows if 0 < each < length), default=0):
        raise PeerLacks(f"the lean recipe has no sliding window, and one of {window} is shorter than {length} tokens")
    sizes = {name: getattr(config, name) for name in SIZES}
    flags = {"qkv_bias": names >= QKV_BIAS, "head_norms": names >= HEAD_NORMS}
    return {**sizes, **flags, "rope_theta": config.rope.theta}


def versus_torch(
    request: Request, notify: Notify = print, ranks: Ranks = ALONE, ours: Sequence[tuple[float, int]] = ()
) -> Iterator[dict[str, Any]]:
    """A row for each recipe and case: a call of all ranks. A row notes what its recipe cannot do.

    One process interleaves its own steps with torch's. In ranks the two share no memory: `ours` are the seconds of a
    step and the peak memory of a rank that were measured before, for each case.

    Raises:
        UsageError, DeviceError: the peer is missing.
    """
    if not request.recipes:
        return
    model = trained_model(request.config, request.device, request.settings) if ranks.size == 1 else None
    for recipe in request.recipes:
        notify(f"torch, {recipe}: starting")
        with ExitStack() as stack, ranks.during(f"measuring torch, {recipe}", PREPARING_S):
            # A file through which torch's processes find each other; it outlives them.
            place = stack.enter_context(tempfile.TemporaryDirectory()) if ranks.is_main else ""
            place = ranks.from_main("torch's meeting place", place)
            child = stack.enter_context(started("steps", request.device, "torch", request.python))
            for number, (batch, length) in enumerate(request.cases):
                case = f"{batch}x{length}"
                notify(f"torch {child.version}, {recipe}: {case}")
                row: dict[str, Any] = {"recipe": recipe, "version": child.version, "case": case, "note": ""}
                job = {"recipe": recipe, "batch": batch, "length": length, "dtype": request.settings.dtype}
                if ranks.size > 1:
                    job["ranks"] = {"rank": ranks.rank, "size": ranks.size, "place": f"{place}/{case}"}
                try:
                    raw = dict(request.config.raw) if recipe in ("eager", "compile") else None
                    config = lean_config(request.config, length) if raw is None else raw
                    row["warm_up"] = child.ask("open", config=config, **job)["warm_up"]
                except GenesisError as error:
                    row["note"] = error.what
                if not ranks.all(not row["note"]):
                    row["note"] = row["note"] or "another rank failed"
                elif ranks.size > 1:
                    step, peak = ours[number]
                    row |= _compared(child, step, request, ranks)
                    row["memory"] = row["peer_memory"] and peak
                else:
                    row |= _beside_ours(child, model, batch, length, request)
                yield row
            ranks.barrier("torch")


def _beside_ours(child: Child, model: Any, batch: int, length: int, request: Request) -> dict[str, Any]:
    """The cells of a case on one process, with our own steps between torch's."""
    device, notes, wait = request.device, list[str](), wait_for(request.device)
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    try:
        take = taking(new_state(model, batch, length), device, notes)
        if notes:
            raise DeviceError(notes[0])

        def own(count: int) -> float:
            return median(together(take, wait, ALONE) for _ in range(count))

        cells = _compared(child, own, request, ALONE)
        return cells | {"memory": None if device == CPU else cuda.max_memory_allocated(device)}
    except (GenesisError, MemoryError) as error:
        return {"note": Failure.of("step", "", error).error}
    finally:
        forget(model, device)


def _compared(child: Child, own: Callable[[int], float] | float, request: Request, ranks: Ranks) -> dict[str, Any]:
    """The ratio of the medians of some rounds, each of the slowest rank, and torch's peak memory.

    Args:
        own: our median, or a function that measures it over that many steps.
    """
    rounds, peak = list[tuple[float, float]](), 0.0
    step = own(2) if callable(own) else own
    count = min(max(round(request.settings.plan.seconds * SHARE / step), LEAST_STEPS), MOST_STEPS)
    for _ in range(ROUNDS):
        mine, answer = own(count) if callable(own) else own, child.ask("measure", what="step", count=count)
        every = ranks.in_turn(answer["samples"])  # step by step
        slowest = [max(every[i : i + ranks.size]) for i in range(0, len(every), ranks.size)]
        rounds.append((mine, median(slowest)))
        peak = max(ranks.in_turn([answer["peak"] or 0]))
    child.ask("close")
    return {"ratio": ratio_of(rounds), "peer_memory": int(peak) or None}


PEERS = [
    Column("recipe", "recipe", "text", "Of torch."),
    Column("case", "case", "text", "Rows x tokens of a batch."),
    Column("step", "Genesis", "s", "Median step of Genesis.", "ratio.seconds"),
    Column("peer_step", "torch", "s", "Median step of torch.", "ratio.peer_seconds"),
    Column("ratio", "ratio", "ratio", "Torch's time over Genesis's.", "ratio.ratio"),
    Column("spread", "spread", "share", "Largest ratio of a round over the smallest, less 1.", "ratio.spread"),
    Column("memory", "memory", "bytes", "Peak memory of Genesis."),
    Column("peer_memory", "torch's memory", "bytes", "Peak memory of torch."),
    Column("warm_up", "torch's warm-up", "s", "Its first steps, which compile."),
    Column("note", "note", "text", "Why there is no ratio, or that it is noise.",
           lambda row: row["note"] or ("noise" if row["ratio"].is_noisy else "")),
    Column("version", "version", "text", "Of torch.", hidden=True),
]  # fmt: skip


def peers_table(rows: Sequence[dict[str, Any]], ranks: int = 1) -> Table:
    """The table of steps compared with torch's."""
    how = "interleaved" if ranks == 1 else f"{ranks} ranks each, one after the other"
    return table(
        "peers", f"compared with torch {rows[0]['version']}, {how}; ratio above 1: Genesis is faster", PEERS, rows
    )
