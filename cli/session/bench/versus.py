"""Training steps beside torch's: each recipe in a fresh process, taken interleaved with ours, or rank by rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.errors import DeviceError, GenesisError, UsageError
from genesis.measure.limits import Limits, wait_for
from genesis.measure.peer import Child, PeerLacks, Ratio, compared, ratio_of, started
from genesis.measure.peers.torch_steps import RECIPES
from genesis.measure.record import Column, Table, table
from genesis.measure.timing import Plan, Timing, measure, of_wall, summarize
from genesis.train.ranks import PREPARING_S, Ranks
from genesis_cli.session.bench.steps import Settings, forget, new_state, taking, trained_model
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.fuse import FusedAttention, FusedHeadNormAttention, FusedNoPEAttention
from genesis_models.registry import without_memory

ROUNDS, LEAST_STEPS, MOST_STEPS = 3, 3, 100  # of ranks
# Parameters of a layer that the lean recipe's layers have, or may have.
LEAN = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
LEAN |= {"input_layernorm", "post_attention_layernorm"}
QKV_BIAS = {f"self_attn.{name}_proj.bias" for name in "qkv"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
SHARE = 1 / 6  # of the plan's time for each round of each side


def check_recipes(text: str, known: Sequence[str] = RECIPES) -> tuple[str, ...]:
    """`eager,lean` as recipes.

    Raises:
        UsageError: there is no such recipe.
    """
    chosen = tuple(dict.fromkeys(text.split(",")))
    for name in chosen:
        if name not in known:
            raise UsageError(f"{name!r} is no recipe", where="--recipes", next=f"use some of {', '.join(known)}")
    return chosen


def lean_config(config: ModelConfig, length: int) -> dict[str, object]:
    """The sizes of the lean recipe's model, for sequences of `length` tokens.

    Raises:
        PeerLacks: layers compute what the recipe's do not.
        UsageError: they attend to a sliding window that is shorter than `length`.
    """
    model = without_memory(config)
    names = {name.partition(".layers.0.")[2].removesuffix(".weight") for name, _ in model.named_parameters()} - {""}
    if unknown := names - LEAN - QKV_BIAS - HEAD_NORMS:
        raise PeerLacks(f"the lean recipe's layers have no {min(unknown)}")
    # The parameters are the recipe's; what is done with them must be, too.
    forms = [type(layer.self_attn).__bases__[0] if model.is_fused else None for layer in model.model.layers]
    if FusedNoPEAttention in forms:
        layer = forms.index(FusedNoPEAttention)
        raise PeerLacks(f"the lean recipe has no layers without rotary positions, as layer {layer} is")
    if not set(forms) <= {FusedAttention, FusedHeadNormAttention}:
        raise PeerLacks(f"the lean recipe's layers are not those of {config.model_type}")
    if window := min((each for each in config.layer_windows if 0 < each < length), default=0):
        raise UsageError(f"the lean recipe has no sliding window, and one of {window} is shorter than {length} tokens")
    sizes = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    others = "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"
    return {
        **{name: getattr(config, name) for name in (*sizes, *others)},
        "rope_theta": config.rope.theta,
        "qkv_bias": names >= QKV_BIAS,
        "head_norms": names >= HEAD_NORMS,
    }


@dataclass(frozen=True)
class PeerStep:
    """A step beside torch's.

    Attributes:
        recipe: eager: Hugging Face's model; compile: the same compiled; lean: one written for speed, compiled; of
            several ranks ddp and fsdp2 around lean's, whose steps are not interleaved with ours.
        version: of torch.
        ratio: None where the recipe failed, and `note` says why.
        peak, peer_peak: the most memory that was allocated at one time, ours and torch's; None on the CPU.
        warm_up: seconds of the recipe's first steps, which compile.
    """

    recipe: str
    version: str
    batch: int
    length: int
    ratio: Ratio | None = None
    peak: int | None = None
    peer_peak: int | None = None
    warm_up: float | None = None
    note: str = ""


def versus_torch(
    config: ModelConfig,
    cases: Sequence[tuple[int, int]],
    limits: Limits,
    settings: Settings,
    recipes: Sequence[str],
    python: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[PeerStep]:
    """A row for each recipe and (batch, length). What a recipe cannot do is noted in its row.

    Args:
        python: the interpreter that has torch; None means this one.
        tell: called with what is measured next.

    Raises:
        UsageError, DeviceError: the peer is missing.
    """
    model = trained_model(config, limits.device, settings)
    for recipe in recipes:
        tell(f"torch, {recipe}: starting")
        with started("steps", limits.device, "torch", python) as child:
            for batch, length in cases:
                tell(f"torch {child.version}, {recipe}: {batch}x{length}")
                try:
                    yield _row(model, child, recipe, batch, length, limits, settings)
                except PeerLacks as error:  # the other cases would lack it, too
                    yield PeerStep(recipe=recipe, version=child.version, batch=batch, length=length, note=error.what)
                    break


def _row(
    model: CausalLM, child: Child, recipe: str, batch: int, length: int, limits: Limits, settings: Settings
) -> PeerStep:
    row = PeerStep(recipe=recipe, version=child.version, batch=batch, length=length)
    try:
        config = lean_config(model.config, length) if recipe == "lean" else dict(model.config.raw)
        facts = child.ask("open", recipe=recipe, config=config, batch=batch, length=length, dtype=settings.dtype)
        found = _measured(model, child, batch, length, limits, settings)
        child.ask("close")
        return replace(row, warm_up=facts["warm_up"], **found)
    except PeerLacks:
        raise
    except (GenesisError, MemoryError) as error:
        note = error.what if isinstance(error, GenesisError) else f"no memory: {error}"
        return replace(row, note=note)
    finally:
        forget(model, limits.device)


def _measured(
    model: CausalLM, child: Child, batch: int, length: int, limits: Limits, settings: Settings
) -> dict[str, Any]:
    """Both sides interleaved, and the memory that they took."""
    device, notes, peaks = limits.device, list[str](), list[int | None]()
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    take = taking(new_state(model, batch, length), device, notes)
    if notes:
        raise DeviceError(notes[0])
    take()
    sample, seconds = of_wall(take, wait_for(device)), settings.plan.seconds * SHARE
    plan = Plan(settings.plan.precision, seconds, 0.0, most_calls=1)

    def theirs() -> Timing:
        said = child.ask("measure", what="step", seconds=seconds)
        peaks.append(said["peak"])
        return summarize(said["samples"])

    ratio = ratio_of(compared(lambda: measure(sample, plan), theirs))
    ours = None if device == CPU else cuda.max_memory_allocated(device)
    return {"ratio": ratio, "peak": ours, "peer_peak": peaks[-1]}


# --- Ranks ------------------------------------------------------------------------------------------------------------


def versus_ranks(
    config: ModelConfig,
    cases: Sequence[tuple[int, int]],
    ours: Sequence[tuple[float, int]],
    device: Device,
    settings: Settings,
    recipes: Sequence[str],
    ranks: Ranks,
    python: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[PeerStep]:
    """A row for each recipe and case: a call of all ranks. What a recipe cannot do is noted in its row.

    Our times were taken before: the two are not interleaved, and share no memory.

    Args:
        ours: seconds of a step and the most memory of a rank, for each case.
    """
    for recipe in recipes:
        tell(f"torch, {recipe}: starting")
        with ExitStack() as stack, ranks.during(f"measuring torch, {recipe}", PREPARING_S):
            # A file in which torch's processes find each other; it goes when all have ended.
            place = stack.enter_context(tempfile.TemporaryDirectory()) if ranks.is_main else ""
            place = ranks.from_main("torch's meeting place", place)
            child = stack.enter_context(started("steps", device, "torch", python))
            for (batch, length), own in zip(cases, ours, strict=True):
                tell(f"torch {child.version}, {recipe}: {batch}x{length}")
                found = PeerStep(recipe=recipe, version=child.version, batch=batch, length=length)
                place_of_case = {"rank": ranks.rank, "size": ranks.size, "place": f"{place}/{batch}x{length}"}
                figures, note = dict[str, Any](), ""
                try:
                    job = {"config": lean_config(config, length), "batch": batch, "length": length}
                    child.ask("open", recipe=recipe, dtype=settings.dtype, ranks=place_of_case, **job)
                except GenesisError as error:
                    note = error.what
                if ranks.all(not note):
                    figures = _with_ranks(child, *own, settings, ranks)
                yield replace(found, note=note or ("" if figures else "another rank failed"), **figures)
            ranks.barrier("torch")


def _with_ranks(child: Child, step: float, most: int, settings: Settings, ranks: Ranks) -> dict[str, Any]:
    """The ratio of the medians of some rounds, and the most memory of a rank on both sides."""
    count = min(max(round(settings.plan.seconds * SHARE / step), LEAST_STEPS), MOST_STEPS)
    rounds, peak = list[tuple[float, float]](), cast("int | None", None)
    for _ in range(ROUNDS):
        said = child.ask("measure", what="step", count=count)
        every = ranks.in_turn(said["samples"])  # step by step
        slowest = [max(every[i : i + ranks.size]) for i in range(0, len(every), ranks.size)]
        rounds.append((step, median(slowest)))
        peak = said["peak"]
    peaks = None if peak is None else int(max(ranks.in_turn([peak])))
    child.ask("close")
    return {"ratio": ratio_of(rounds), "peak": None if peak is None else most, "peer_peak": peaks}


# --- Table ------------------------------------------------------------------------------------------------------------

PEERS = [
    Column("recipe", "recipe", "text", "Of torch.", lambda p: p.recipe),
    Column("case", "case", "text", "Rows x tokens of a batch.", lambda p: f"{p.batch}x{p.length}"),
    Column("step", "Genesis", "s", "Median step of Genesis.", lambda p: p.ratio and p.ratio.seconds),
    Column("peer_step", "torch", "s", "Median step of torch.", lambda p: p.ratio and p.ratio.peer_seconds),
    Column("ratio", "ratio", "ratio", "Torch's time over that of Genesis.", lambda p: p.ratio and p.ratio.ratio),
    Column("spread", "spread", "share", "Largest ratio of a round over the smallest, less 1.",
           lambda p: p.ratio and p.ratio.spread),
    Column("memory", "memory", "bytes", "The most that Genesis allocated.", lambda p: p.peak),
    Column("peer_memory", "torch's memory", "bytes", "The most that torch allocated.", lambda p: p.peer_peak),
    Column("warm_up", "torch's warm-up", "s", "Its first steps, which compile.", lambda p: p.warm_up),
    Column("note", "note", "text", "Why there is no ratio, or that it is noise.",
           lambda p: p.note or ("noise" if p.ratio.is_noisy else "")),
    Column("version", "version", "text", "Of torch.", lambda p: p.version, hidden=True),
]  # fmt: skip


def peers_table(peers: Sequence[PeerStep], ranks: int = 1) -> Table:
    """The table of steps beside torch's."""
    how = "interleaved" if ranks == 1 else f"{ranks} ranks each, one after the other"
    return table("peers", f"beside torch {peers[0].version}, {how}; ratio above 1: Genesis is faster", PEERS, peers)
