"""Training steps against torch's: each recipe in a fresh process, taken interleaved with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from genesis import cuda
from genesis.backend import CPU
from genesis.errors import DeviceError, GenesisError, UsageError
from genesis.measure.limits import Limits, wait_for
from genesis.measure.timing import Plan, Timing, measure, of_wall, summarize
from genesis.profile.peer import Child, PeerLacks, compared, ratio_of, started
from genesis.profile.peers.torch_steps import RECIPES
from genesis_cli.session.bench.measuring import Settings, forget
from genesis_cli.session.bench.schema import PeerStep
from genesis_cli.session.bench.steps import new_state, taking
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.fuse import FusedAttention, FusedHeadNormAttention, FusedNoPEAttention
from genesis_models.registry import build, without_memory

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
    model = build(config, seed=0, device=str(limits.device), dtype=settings.dtype)
    model.activation_checkpointing = settings.checkpointing
    model.train()
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
        return row.model_copy(update={"warm_up": facts["warm_up"], **found})
    except PeerLacks:
        raise
    except (GenesisError, MemoryError) as error:
        note = error.what if isinstance(error, GenesisError) else f"no memory: {error}"
        return row.model_copy(update={"note": note})
    finally:
        forget(model, limits.device)


def _measured(
    model: CausalLM, child: Child, batch: int, length: int, limits: Limits, settings: Settings
) -> dict[str, object]:
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
