"""The torch side of preferences.py: DPO steps, padded as by TRL and packed by hand. This file does not use Genesis.

`padded-N` is the step of TRL 1.16's DPOTrainer with micro-batches of N pairs: transformers' model (with PEFT's
adapters), sdpa, no checkpointing, log-probabilities of the reference computed before, and TRL's own kernel for the
log-probabilities of answer tokens. `packed` joins the same sequences to one of fixed length: a lean model whose blocks
are compiled, flash attention by document, the same kernel, and fused AdamW. Weights and states of AdamW are bf16.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from benchmarks.gpu.lora_step import serve_modes
from benchmarks.gpu.lora_torch import LR, MAX_NORM, PREFIX, Block, Tensors, made, normed, rotated

LONGEST = 1500
BETA, CHUNK = 0.1, 32768  # columns of logits at a time, as in TRL


def log_probs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of each label under the head."""
    return ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, CHUNK, None, 1.0, ("log_probs",))[0]


def losses(sums: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The DPO losses of pairs from log-probabilities of answers `[2, P]`."""
    ratios = sums - reference
    return -F.logsigmoid(BETA * (ratios[0] - ratios[1]))


# --- Packed -----------------------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Causal attention `[T, heads, size]` within each sequence between two bounds."""
    if q.device.type == "cpu":
        ends = bounds.tolist()
        parts = [[x[a:b].transpose(0, 1)[None] for x in (q, k, v)] for a, b in itertools.pairwise(ends)]
        found = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)[0] for part in parts]
        return torch.cat(found, 1).transpose(0, 1)
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    how |= {"enable_gqa": True} if "enable_gqa" in known else {}
    return varlen_attn(q, k, v, bounds, bounds, LONGEST, LONGEST, **how)


class Whole(nn.Module):
    """Packed layers of one input, all weights of which are trained."""

    def __init__(self, base: Tensors, _: Tensors, names: list[str], scaling: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([base[f"{name}.weight"] for name in names]))
        biases = [base[f"{name}.bias"] for name in names if f"{name}.bias" in base]
        self.bias = nn.Parameter(torch.cat(biases)) if biases else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedBlock(Block):
    """A decoder layer on sequences one after the other."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(normed(x, self.input_layernorm, self.eps)).view(len(x), -1, self.size)
        q, k, v = parts.split((self.heads, self.keys, self.keys), 1)
        if self.q_norm is not None:
            q, k = normed(q, self.q_norm, self.eps), normed(k, self.k_norm, self.eps)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        x = x + self.out(attend(q, k, v.contiguous(), bounds).flatten(1))
        gate, up = self.gate_up(normed(x, self.post_attention_layernorm, self.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class WholeBlock(PackedBlock):
    make: Any = Whole

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        for name, value in list(self.named_buffers(recurse=False)):
            delattr(self, name)
            self.register_parameter(name, nn.Parameter(value))


class Packed(nn.Module):
    """The packed model; in full training, embedding (which is the head) and norms are parameters too."""

    def __init__(self, job: dict[str, Any], raw: dict[str, Any]) -> None:
        super().__init__()
        folder, is_full = Path(job["folder"]), job["kind"] == "full"
        base, adapter, scaling = {}, {}, 0.0
        for file in sorted((folder / "base").glob("*.safetensors")):
            base |= {name: x.to(job["device"], torch.bfloat16) for name, x in load_file(file).items()}
        if not is_full:
            stored = load_file(folder / "adapter" / "adapter_model.safetensors")
            adapter = {name.removeprefix(PREFIX): x.to(job["device"], torch.bfloat16) for name, x in stored.items()}
            config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
            scaling = config["lora_alpha"] / config["r"]
        self.eps = raw["rms_norm_eps"]
        self.embed = nn.Parameter(base["model.embed_tokens.weight"], requires_grad=is_full)
        self.norm = nn.Parameter(base["model.norm.weight"], requires_grad=is_full)
        make = WholeBlock if is_full else PackedBlock

        def of_layer(i: int, tensors: Tensors) -> Tensors:
            start = f"model.layers.{i}."
            return {name[len(start) :]: x for name, x in tensors.items() if name.startswith(start)}

        self.blocks = nn.ModuleList(
            make(raw, of_layer(i, base), of_layer(i, adapter), scaling) for i in range(raw["num_hidden_layers"])
        )
        if self.embed.device.type != "cpu":
            for block in self.blocks:
                block.compile(dynamic=False)
        size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        inverse = raw["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(job["slots"]).float(), inverse).to(self.embed.device)
        self.cos, self.sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean loss of the pairs in a batch of `packed_batch`."""
        x, bounds = F.embedding(batch["ids"], self.embed), batch["bounds"]
        cos, sin = self.cos[batch["positions"]][:, None], self.sin[batch["positions"]][:, None]
        for block in self.blocks:
            x = block(x, cos, sin, bounds)
        rows = F.embedding(batch["places"], normed(x, self.norm, self.eps))
        found = log_probs(rows, self.embed, batch["labels"])
        sums = found.new_zeros(batch["reference"].numel()).index_add(0, batch["sequences"], found)
        return losses(sums.view(-1, 2).T, batch["reference"].view(-1, 2).T).mean()


def packed_batch(
    slots: int, ids: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, reference: np.ndarray
) -> dict[str, Any]:
    """Sequences one after the other in `slots` slots; the rest is one more sequence without labels."""
    ends = np.cumsum(lengths)
    rest, begins = slots - len(ids), ends - lengths
    all_lengths = np.append(lengths, rest) if rest else lengths
    positions = np.concatenate([np.arange(n) for n in all_lengths])
    ranges = [np.arange(b + p - 1, e - 1) for b, p, e in zip(begins, prompts, ends, strict=True)]
    places = np.concatenate(ranges)
    sequences = np.repeat(np.arange(len(lengths)), [len(each) for each in ranges])
    bounds = np.concatenate([[0], np.cumsum(all_lengths)]).astype(np.int32)
    # A number of bounds that does not depend on the batch keeps the compiled blocks.
    bounds = np.append(bounds, np.full(256 - len(bounds), slots, np.int32))
    return {
        "ids": np.append(ids, np.zeros(rest, ids.dtype)), "positions": positions, "places": places,
        "labels": ids[places + 1], "sequences": sequences, "bounds": bounds,
        "reference": reference.astype(np.float32),
    }  # fmt: skip


# --- Padded -----------------------------------------------------------------------------------------------------------


def padded_batches(
    micro: int, ids: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, reference: np.ndarray
) -> list[dict[str, Any]]:
    """Micro-batches as by TRL's collator: the chosen answers of `micro` pairs, then the rejected ones."""
    rows, found = np.split(ids, np.cumsum(lengths)[:-1]), []
    for first in range(0, len(rows) // 2, micro):
        pairs = range(first, min(first + micro, len(rows) // 2))
        order = [2 * pair + side for side in (0, 1) for pair in pairs]
        shape = len(order), max(lengths[n] for n in order)
        batch = {name: np.zeros(shape, np.int64) for name in ("input_ids", "attention_mask", "completion_mask")}
        for row, n in enumerate(order):
            batch["input_ids"][row, : lengths[n]] = rows[n]
            batch["attention_mask"][row, : lengths[n]] = 1
            batch["completion_mask"][row, prompts[n] : lengths[n]] = 1
        found.append({**batch, "reference": reference[order].astype(np.float32)})
    return found


def padded_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The losses of a micro-batch, as in `DPOTrainer._compute_loss` and `add_fused_lm_head`."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    how = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    hidden = causal.base_model(**how).last_hidden_state[:, :-1]
    mask = batch["completion_mask"][:, 1:] != 0
    found = log_probs(hidden[mask], causal.get_output_embeddings().weight, batch["input_ids"][:, 1:][mask])
    sums = found.new_zeros(mask.shape).masked_scatter(mask, found).sum(1)
    return losses(sums.view(2, -1), batch["reference"].view(2, -1))


# --- Steps ------------------------------------------------------------------------------------------------------------


class Steps:
    """A mode's model and its steps."""

    def __init__(self, job: dict[str, Any]) -> None:
        folder, self.is_packed = Path(job["folder"]), job["mode"] == "packed"
        raw = json.loads((folder / "base" / "config.json").read_text())
        raw["rope_theta"] = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
        stored, self.batches, self.counts, self.pairs = np.load(folder / "pairs.npz"), [], [], []
        # The slots of the longest batch, in steps of the 128 rows of a tile.
        job = {**job, "slots": 128 * math.ceil(max(len(stored[name]) for name in stored if "ids" in name) / 128)}
        if self.is_packed:
            self.model: Any = Packed(job, raw)
        elif job["kind"] == "lora":
            self.model = made({**job, "side": "peft", "dtype": "bfloat16"}, raw)
        else:
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
            self.model = self.model.to(job["device"])
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.0, fused=job["device"] != "cpu")
        make: Any = partial(packed_batch, job["slots"])
        if not self.is_packed:
            make = partial(padded_batches, int(job["mode"].partition("-")[2] or 1))
        for number in range(len(stored) // 3):
            ids, lengths, prompts = (stored[f"{name}{number}"] for name in ("ids", "lengths", "prompts"))
            reference = -math.log(raw["vocab_size"]) * (lengths - prompts)
            found = make(ids.astype(np.int64), lengths, prompts, reference)
            found = [found] if self.is_packed else found
            self.batches.append([{k: torch.from_numpy(v).to(job["device"]) for k, v in part.items()} for part in found])
            self.counts.append(len(ids))
            self.pairs.append(len(lengths) // 2)
        self.count, self.taken = 0, list[Any]()

    def step(self) -> int:
        """Take a step and wait for its end; return its real tokens."""
        at = self.count % len(self.batches)
        self.count += 1
        total: Any = 0
        for batch in self.batches[at]:
            part = self.model.loss(batch) if self.is_packed else padded_loss(self.model, batch).sum() / self.pairs[at]
            part.backward()
            total = total + part.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken.append(total)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.counts[at]

    def loss(self) -> float:
        """The loss of the first step since the last call."""
        found, self.taken = float(self.taken[0]), []
        return found

    def close(self) -> None:
        """Free the memory."""
        del self.model, self.optimizer, self.parameters, self.batches
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    serve_modes(Steps)
