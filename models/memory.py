"""How much device memory a training step takes, counted from shapes before any of it is taken.

A plan says what is there for the whole run, what forward keeps for backward, and the most that is needed beside it at
one time. It follows what the layers keep (blocks.py) and what the ops of a step need while they run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from genesis.dtypes import DType, as_dtype, bfloat16
from genesis.kernels.attention.ds_chunks import HEADS, held_shape
from genesis.kernels.loss.chunks import COLUMNS, GRAIN, WORKSPACE, chunk_rows
from genesis.optim.flat import PLACE
from genesis.shapes import Shape
from genesis.train.config import OptimConfig
from genesis_models.config import ModelConfig
from genesis_models.registry import parameter_shapes

__all__ = ["MemoryPlan", "memory_plan"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a training step by what they are for.

    Attributes:
        weights, gradients: of all parameters.
        masters: what updates need of 2-byte weights beyond their 16 bits.
        moments: the optimizer's running averages.
        batch: tokens, labels and positions on their way, and the table of rotary angles.
        activations: what is kept when forward ends.
        head, layer, end: the most that is taken beside all that in the loss, in the backward pass of the last layer and
            when backward ends; less than 0 where more of what was kept is free again.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    batch: int
    activations: int
    head: int
    layer: int
    end: int

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak, which add up to it."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.masters + self.moments,
            "batch": self.batch,
            "activations": self.activations,
            "workspace": max(self.head, self.layer, self.end),
        }

    @property
    def total(self) -> int:
        """The peak: what `genesis.cuda.max_memory_allocated` will say."""
        return sum(self.parts.values())


def memory_plan(
    config: ModelConfig,
    *,
    batch: int,
    length: int,
    accumulation_steps: int = 1,
    activation_checkpointing: str = "none",
    dtype: str = "bfloat16",
    optim: OptimConfig | None = None,
) -> MemoryPlan:
    """The plan of steps of `accumulation_steps` batches `[batch, length]` on a GPU.

    With N tokens, H hidden and F inner size, Q and K the widths of queries and of keys, V words, e bytes of a weight:

    * Each parameter takes a multiple of 32 numbers. Gradients have e bytes, or 4 where several batches are added up;
      masters 2 more bytes of a bfloat16 weight, 4 where the rule is not elementwise; moments 4, or 2.
    * Each layer keeps two norms' results N·H and a float32 for each row; queries, keys and values N·(Q + 2·K), rotated
      (with norms on them also as they were, and a float32 for each head); attention's result N·Q and a float32 for each
      head; the sum after attention N·H; gate and up N·2·F; their SwiGLU N·F; the sum after the MLP N·H. "selective"
      keeps neither the norms' results nor SwiGLU's; "full" keeps the last sum alone.
    * Besides, the embedded tokens N·H, the last norm, cos and sin N·D/2 in float32, and N starts of documents.
    * The head: the gradient of its input N·H; of each row of a chunk the gradients of its logits, and two float32 for
      every 128 of them, unless there is room where the gradients of other parameters will come; the gradient of its
      weight V·H where it has to be added to what is wider, or there already.
    * The last layer, where SwiGLU's gradient is made: gradients of gate and up N·2·F and of SwiGLU N·F, with its result
      N·F under "selective"; under "full" all that "none" keeps of one layer. The last norm's results and the sum after
      the MLP are free then, and N·H is the gradient that comes. Or where attention's gradient is made: N·H and N·Q
      that come, and N·(Q + 2·K), twice with norms, when all that the MLP kept is free; with heads of 65 to 128 also the
      gradients of scores, some N·T/2 for each query head, at most 1 GiB or one key head's at a time.
    * The end: the same of the embedding, and the sum of both where they are one.

    Not counted are parts of split products and of sums over rows, some tens of MiB at the most.
    """
    optim = OptimConfig() if optim is None else optim
    weight, shapes = as_dtype(dtype), parameter_shapes(config)
    e, tokens = weight.itemsize, batch * length
    is_wide = e == 2 and (optim.grad_dtype or ("float32" if accumulation_steps > 1 else None)) == "float32"
    count = sum(-(-math.prod(shape) // PLACE) * PLACE for shape in shapes.values())
    masters, moments = _optimizer_bytes(shapes, count, optim, weight)
    scores, has_head_norms = _scores_bytes(config, e, batch, length) // tokens, any("q_norm" in name for name in shapes)
    kept, beside, layer = _layer_bytes(config, e, activation_checkpointing, scores, has_head_norms)
    activations = tokens * (config.num_hidden_layers * kept + beside)
    unplaced = config.vocab_size * config.hidden_size * e if is_wide or accumulation_steps > 1 else 0
    gradients = count * (4 if is_wide else e)
    return MemoryPlan(
        weights=count * e,
        gradients=gradients,
        masters=masters,
        moments=moments,
        batch=_batch_bytes(config, tokens, length),
        activations=activations,
        head=_head_bytes(config, tokens, e, 0 if accumulation_steps > 1 else gradients) + unplaced,
        layer=tokens * layer + (unplaced if config.tie_word_embeddings else 0),
        end=unplaced * (2 if config.tie_word_embeddings else 1) - activations,
    )


def _optimizer_bytes(shapes: Mapping[str, Shape], count: int, optim: OptimConfig, weight: DType) -> tuple[int, int]:
    """Bytes of masters and of moments."""
    is_flat = optim.name not in ("muon", "adafactor")
    masters = 0
    if weight.itemsize == 2 and optim.low_precision == "master":
        masters = count * (2 if is_flat and weight is bfloat16 else 4)
    moment = as_dtype(optim.state_dtype).itemsize
    if optim.name == "adafactor":
        elements = sum(sum(s) if len(s) == 2 else math.prod(s) for s in shapes.values())
    elif optim.name == "muon":
        hidden = [s for n, s in shapes.items() if len(s) == 2 and not {"embed_tokens", "lm_head"} & set(n.split("."))]
        elements = 2 * count - sum(math.prod(s) for s in hidden)
    else:
        elements = count * {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1 if optim.momentum else 0}[optim.name]
    return masters, elements * moment


def _scores_bytes(config: ModelConfig, e: int, batch: int, length: int) -> int:
    """Of the gradients of scores that backward holds at a time, where it does that."""
    if e != 2 or config.head_dim not in HEADS:
        return 0
    return math.prod(held_shape(batch, length, config.num_attention_heads, config.num_key_value_heads, e)) * e


def _layer_bytes(
    config: ModelConfig, e: int, checkpointing: str, scores: int, has_head_norms: bool
) -> tuple[int, int, int]:
    """Bytes for each token: kept of each layer, kept besides, and the most that the last one's backward takes more.

    Args:
        scores: gradients of scores in attention's backward.
    """
    h, f, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads + config.num_key_value_heads
    q, qkv = config.num_attention_heads * config.head_dim, (heads + config.num_key_value_heads) * config.head_dim
    normed, norms = (0 if checkpointing == "selective" else h * e) + 4, 2 if has_head_norms else 1
    attention = normed + norms * qkv * e + (norms - 1) * heads * 4 + q * e + config.num_attention_heads * 4
    mlp = normed + 2 * f * e + (0 if checkpointing == "selective" else f * e)
    whole = attention + h * e + mlp + h * e
    kept = h * e if checkpointing == "full" else whole
    last = h * e + 4
    beside = h * e + last + config.head_dim * 4 + 8
    at_mlp = (4 if checkpointing == "selective" else 3) * f * e
    at_attention = q * e + norms * qkv * e + scores - mlp - h * e
    return kept, beside, whole - kept - last + max(at_mlp, at_attention)


def _head_bytes(config: ModelConfig, tokens: int, e: int, gradients: int) -> int:
    """Bytes that the loss takes beside what is kept; a chunk lies where gradients will, if those leave enough room."""
    classes = config.vocab_size
    if e == 2:
        rows = chunk_rows(tokens, classes * e, WORKSPACE)
        row = -(-classes // GRAIN) * GRAIN * e + -(-classes // COLUMNS) * 2 * 4
    else:
        rows, row = chunk_rows(tokens, classes * 4, WORKSPACE), classes * 4
    around = gradients - classes * config.hidden_size * e
    return (0 if rows * row <= around else rows * row) + tokens * (config.hidden_size * e + 4)


def _batch_bytes(config: ModelConfig, tokens: int, length: int) -> int:
    """Three int64 for each token, where they arrive (twice, in turn) and where the step reads them; cos and sin."""
    positions = max(256, 1 << (length - 1).bit_length())
    return 3 * 3 * tokens * 8 + positions * config.head_dim * 4
