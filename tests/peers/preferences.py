"""Golden values of TRL's preference trainers: log-probabilities, losses, gradients and ten steps of AdamW.

    PYTHONPATH=. .venv-trl/bin/python -m tests.peers.preferences

Writes tests/train/fixtures/trl/*.json, which tests/train/test_trl.py compares with Genesis. It needs torch,
transformers, datasets and TRL (pip install trl, which is not part of `make peers`), on the CPU in float32, and takes
minutes.

The model is tests/train/fixtures/sums plus noise that depends on the seed, so that no weights are stored. Each seed has
its own ragged records: chats for seeds 0 and 1, strings for seed 2. All records of a seed are one padded batch, and
each of the ten steps takes it.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.train.golden import ADAMW, BASE, FIXTURES, KTO_RECORDS, PAIRS, SEEDS, STEPS, noise, projections

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

# The settings of each case. Of TRL's losses these are not in Genesis: aot and aot_unpaired, which sort a batch; sft as
# a part of a sum; f-divergences, ld_alpha, use_weighting (WPO); the hinge and IPO of CPO. TRL's sigmoid ignores
# label_smoothing.
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.1},
    "nca_pair": {"loss_type": "nca_pair"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1},
    "bco_pair": {"loss_type": "bco_pair"},
    "sppo_hard": {"loss_type": "sppo_hard"},
    "apo_zero": {"loss_type": "apo_zero"},
    "apo_down": {"loss_type": "apo_down"},
    "discopop": {"loss_type": "discopop"},
    "sigmoid_norm": {"loss_type": "sigmoid_norm"},
}
CPO_CASES: dict[str, dict[str, Any]] = {
    "cpo": {"cpo_alpha": 0.5},
    "cpo, smoothed": {"label_smoothing": 0.1, "cpo_alpha": 0.0},
    "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5, "beta": 2.0},
    "cpo-simpo": {"loss_type": "simpo", "cpo_alpha": 0.5, "simpo_gamma": 0.5, "beta": 2.0},
}
ORPO_CASES: dict[str, dict[str, Any]] = {"orpo": {}}
KTO: dict[str, dict[str, Any]] = {
    "kto": {},
    "kto, weighted": {"desirable_weight": 1.5, "undesirable_weight": 0.5},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
}
REWARD: dict[str, dict[str, Any]] = {
    "reward": {},
    "reward, centered": {"center_rewards_coefficient": 0.01},
    "reward, margins": {"margins": [0.25 * n for n in range(max(map(len, PAIRS.values())))]},  # a field of records
}
IDS = ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids", "label")


class OfAnswers:
    """A trainer whose likelihood of chosen answers is the mean over pairs of the mean over the answer's tokens.

    TRL's CPO takes the mean over all chosen tokens of a batch, and its ORPO includes the tokens of prompts. Genesis's
    mean is over pairs, so that micro-batches and ranks add up to one batch.
    """

    def concatenated_forward(self: Any, model: Any, batch: Any) -> Any:
        out = super().concatenated_forward(model, batch)  # type: ignore[misc]
        labels = self.concatenated_inputs(batch, padding_value=0)["concatenated_labels"][: len(out[0])]
        logits = out[2] if out[2].shape[1] == labels.shape[1] else torch.nn.functional.pad(out[2], (0, 0, 0, 1))
        return (*out[:4], -self.get_batch_logps(logits, labels, average_log_prob=True).mean())


class CPO(OfAnswers, CPOTrainer): ...


class ORPO(OfAnswers, ORPOTrainer): ...


def make_model(seed: int, kind: Any = AutoModelForCausalLM) -> Any:
    """Return the model of a seed; a reward model gets a head of the same noise."""
    classes = {"num_labels": 1} if kind is AutoModelForSequenceClassification else {}
    model = kind.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager", **classes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "score.weight":
                parameter.zero_()
            parameter.add_(torch.from_numpy(noise(seed, name, tuple(parameter.shape))))
    return model.eval()


def make_trainer(kind: Any, config: Any, settings: Mapping[str, Any], seed: int, folder: str, rows: list[Any]) -> Any:
    """Return a trainer of all records of a seed, as one batch in their order."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    common = {"output_dir": folder, "report_to": [], "per_device_train_batch_size": len(rows), "use_cpu": True}
    if (margins := settings.get("margins")) is not None:
        settings = {}
        rows = [{**row, "margin": margin} for row, margin in zip(rows, margins, strict=False)]
    common |= {"bf16": False, "gradient_checkpointing": False, "max_length": 120, "disable_dropout": True}
    if kind is not trl.KTOTrainer:
        common["train_sampling_strategy"] = "sequential"
    if kind is trl.RewardTrainer:
        model = make_model(seed, AutoModelForSequenceClassification)
    else:
        model = make_model(seed)
    given = {"model": model, "args": config(**{**common, **settings}), "processing_class": tokenizer}
    if kind in (trl.DPOTrainer, trl.KTOTrainer):  # by default TRL would load the reference from BASE, without noise
        given["ref_model"] = make_model(seed)
    return kind(**given, train_dataset=Dataset.from_list(rows))


def golden(trainer: Any) -> dict[str, Any]:
    """Return TRL's values over ten steps on the trainer's only batch."""
    model, (batch,) = trainer.model, list(trainer.get_train_dataloader())
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, found = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = trainer.compute_loss(model, dict(batch))
        loss.backward()
        losses.append(float(loss))
        if step == 1:  # a policy that is not the reference any more
            found = {n: projections(p.grad.numpy()) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    rows = [{key: row[key] for key in IDS if key in row} for row in trainer.train_dataset]
    return {"losses": losses, "gradients": found, "after": float(trainer.compute_loss(model, dict(batch)))} | (
        {"rows": rows} if "prompt_ids" in rows[0] else {"rows": _labelled(batch)}
    )


def _labelled(batch: Any) -> list[dict[str, Any]]:
    """Return the ids of each answer of a padded batch of the older trainers or of the reward trainer."""
    if "chosen_input_ids" not in batch:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        rows = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
        return [
            {"chosen": a, "rejected": b} for a, b in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)
        ]
    found = []
    for index in range(len(batch["chosen_input_ids"])):
        row = {}
        for side in ("chosen", "rejected"):
            ids, labels, mask = (batch[f"{side}_{key}"][index] for key in ("input_ids", "labels", "attention_mask"))
            row[f"{side}_ids"] = ids[(labels != -100) & mask.bool()].tolist()
            row["prompt_ids"] = ids[(labels == -100) & mask.bool()].tolist()
        found.append(row)
    return found


def log_probs(model: Any, rows: list[dict[str, Any]]) -> list[list[float]]:
    """Return the summed log-probability of the answers of each row."""
    sums = []
    for row in rows:
        of_row = []
        for key in ("chosen_ids", "rejected_ids", "completion_ids"):
            if key in row:
                ids = torch.tensor([row["prompt_ids"] + row[key]])
                with torch.no_grad():
                    each = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
                of_row.append(float(each[len(row["prompt_ids"]) - 1 :].sum()))
        sums.append(of_row)
    return sums


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    FIXTURES.mkdir(parents=True, exist_ok=True)
    kinds = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig, DPO, PAIRS),
        "cpo": (CPO, CPOConfig, CPO_CASES, PAIRS),
        "orpo": (ORPO, ORPOConfig, ORPO_CASES, PAIRS),
        "kto": (trl.KTOTrainer, trl.KTOConfig, KTO, KTO_RECORDS),
        "reward": (trl.RewardTrainer, trl.RewardConfig, REWARD, PAIRS),
    }
    versions = {each.__name__: each.__version__.split("+")[0] for each in (trl, torch, transformers)}
    for name, (trainer_class, config, cases, records) in kinds.items():
        page: dict[str, Any] = {"versions": versions, "seeds": {}}
        for seed in SEEDS:
            of_seed: dict[str, Any] = {}
            for case, settings in cases.items():
                with tempfile.TemporaryDirectory() as folder:
                    trainer = make_trainer(trainer_class, config, settings, seed, folder, records[seed])
                    found = golden(trainer)
                rows = found.pop("rows")
                of_seed.setdefault("rows", rows)
                assert all(old.items() >= new.items() for old, new in zip(of_seed["rows"], rows, strict=True)), case
                of_seed.setdefault("cases", {})[case] = {"settings": dict(settings), **found}
                print(name, seed, case, [round(x, 5) for x in found["losses"][::3]], flush=True)
            if name != "reward":
                of_seed["log_probs"] = log_probs(make_model(seed), of_seed["rows"])
            page["seeds"][str(seed)] = of_seed
        text = json.dumps(_rounded(page), separators=(",", ":"))
        (FIXTURES / f"{name}.json").write_text(text.replace('},"', '},\n"') + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
