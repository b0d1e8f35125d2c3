"""The losses of preferences against TRL, packed here and padded there: log-probabilities, losses, gradients, ten steps.

`tests.peers.preferences` made the golden cases in tests/train/fixtures/trl with TRL. The tolerance is 1e-4, relative.
Gradients are those of the second step: after ten, float32 and float64 differ by 3e-4 in TRL and in Genesis.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.backend import CPU
from genesis.data.tokenizer import Tokenizer
from genesis.nn import functional as F
from genesis.optim import AdamW
from genesis.tensor import Tensor
from genesis.train.preference_losses import JUDGED, PAIRED, Answers, kto_kl
from genesis.train.step import take_step
from tests.train.golden import ADAMW, BASE, FIXTURES, PAIRS, SEEDS, STEPS, noise, projections
from tests.train.preferences import sequences
from tests.train.runs import assembled, load

TOLERANCE = 1e-4
KINDS = ("dpo", "cpo", "orpo", "kto")
# TRL's names of settings -> ours, where they differ.
RENAMED = {"discopop_tau": "tau", "cpo_alpha": "alpha", "simpo_gamma": "gamma", "desirable_weight": "desirable"}
RENAMED |= {"undesirable_weight": "undesirable"}
NAMES = {"sigmoid": "dpo", "cpo-simpo": "simpo"}  # TRL's names of losses -> ours


@functools.cache
def page(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{kind}.json").read_text())
    return found


def cases(*kinds: str) -> list[Any]:
    """Kind, seed and name of each case; the suite runs those of the first seed, `--full` all."""
    return [
        pytest.param(kind, seed, case, marks=[pytest.mark.full] if seed else [], id=f"{kind}-{seed}-{case}")
        for kind in kinds
        for seed in SEEDS
        for case in page(kind)["seeds"][str(seed)]["cases"]
    ]


def make_model(seed: int) -> Any:
    model = genesis_models.load(BASE)
    with genesis.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(genesis.from_numpy(noise(seed, name, parameter.shape)))
    return model.train()


class Packed(NamedTuple):
    """Documents one after the other in one row, each with its prompt; `[1, T]`, and the tokens of each document `[D]`.

    Attributes:
        of_answer: `[D, T]`, 1 at the positions that predict a token of the document's answer.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    of_answer: Tensor

    @classmethod
    def of(cls, documents: Sequence[tuple[list[int], list[int]]]) -> Packed:
        """Pack (prompt, answer) pairs."""
        ids = [token for prompt, answer in documents for token in prompt + answer]
        labels = [label for prompt, answer in documents for label in [-100] * len(prompt) + answer]
        positions = [at for prompt, answer in documents for at in range(len(prompt) + len(answer))]
        of_answer, end = np.zeros((len(documents), len(ids)), np.float32), 0
        for row, (prompt, answer) in enumerate(documents):
            end += len(prompt) + len(answer)
            of_answer[row, end - len(answer) - 1 : end - 1] = 1
        row = (genesis.tensor([each]) for each in (ids, labels, positions))
        return cls(*row, genesis.from_numpy(of_answer))

    def log_probs(self, model: Any) -> Tensor:
        """Return the summed log-probability of each answer, `[D]`."""
        hidden = model.hidden_states(self.ids, self.positions)
        each = F.linear_token_log_probs(hidden, model.head_weight, self.labels, shift=1)
        return (self.of_answer * each).sum(-1)

    def answers(self, model: Any, reference: Tensor) -> Answers:
        return Answers(self.log_probs(model), reference, self.of_answer.sum(-1))


def train(model: Any, loss: Callable[[], Tensor]) -> tuple[list[float], Mapping[str, list[float]]]:
    """Return the losses of ten steps, and the projections of the gradients of the second."""
    optimizer = AdamW(model.parameters(), **ADAMW)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        found = loss()
        found.backward()
        losses.append(found.item())
        if step == 1:
            gradients = {name: projections(p.grad.numpy()) for name, p in model.named_parameters()}
        optimizer.step()
    return losses, gradients


def compare(model: Any, loss: Callable[[], Tensor], golden: Mapping[str, Any]) -> None:
    losses, gradients = train(model, loss)
    assert losses == pytest.approx(golden["losses"], rel=TOLERANCE)
    assert gradients.keys() == golden["gradients"].keys()
    for name, expected in golden["gradients"].items():
        assert gradients[name] == pytest.approx(expected, abs=TOLERANCE * expected[0]), name
    assert loss().item() == pytest.approx(golden["after"], rel=TOLERANCE)


def split(answers: Answers, size: int) -> tuple[Answers, Answers]:
    return Answers(*(x[:size] for x in answers)), Answers(*(x[size:] for x in answers))


def settings_of(case: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    """Return our settings of one of TRL's cases, whose default of label smoothing is 0."""
    given = {RENAMED.get(key, key): value for key, value in case["settings"].items() if key != "loss_type"}
    zero = {"label_smoothing": 0.0} if "label_smoothing" in defaults else {}
    found = {**defaults, **zero, **given}
    assert found.keys() <= defaults.keys() | {"alpha"}
    return found


@pytest.mark.sample(cases=6)
@pytest.mark.parametrize(("kind", "seed", "name"), cases("dpo", "cpo", "orpo"))
def test_pairs(kind: str, seed: int, name: str) -> None:
    of_seed = page(kind)["seeds"][str(seed)]
    case, model = of_seed["cases"][name], make_model(seed)
    sides = [[(row["prompt_ids"], row[key]) for row in of_seed["rows"]] for key in ("chosen_ids", "rejected_ids")]
    packed, size = Packed.of(sides[0] + sides[1]), len(sides[0])
    with genesis.no_grad():
        reference = packed.log_probs(model)
    expected = [pair[side] for side in (0, 1) for pair in of_seed["log_probs"]]
    assert reference.tolist() == pytest.approx(expected, rel=TOLERANCE)
    row = PAIRED[NAMES.get(name, name.split(",", 1)[0])]
    settings = settings_of(case, row.settings)
    likelihood = settings.pop("alpha", 0.0) if "alpha" not in row.settings else 0.0  # of CPO-SimPO

    def loss() -> Tensor:
        chosen, rejected = split(packed.answers(model, reference if row.needs_reference else reference * 0), size)
        return (row.loss(chosen, rejected, **settings) - likelihood * chosen.mean).mean()

    compare(model, loss, case)


@pytest.mark.parametrize(("kind", "seed", "name"), cases("kto"))
def test_single_answers(kind: str, seed: int, name: str) -> None:
    of_seed = page(kind)["seeds"][str(seed)]
    case, model, rows = of_seed["cases"][name], make_model(seed), of_seed["rows"]
    own = Packed.of([(row["prompt_ids"], row["completion_ids"]) for row in rows])
    mismatched = Packed.of([(row["prompt_ids"], row["KL_completion_ids"]) for row in rows])
    with genesis.no_grad():
        reference, other = own.log_probs(model), mismatched.log_probs(model)
    assert reference.tolist() == pytest.approx([each[0] for each in of_seed["log_probs"]], rel=TOLERANCE)
    is_good = genesis.tensor([float(row["label"]) for row in rows])
    function, defaults = JUDGED[name.split(",", 1)[0]]
    settings = settings_of(case, defaults)

    def loss() -> Tensor:
        kl = kto_kl(mismatched.answers(model, other), is_good * 0 + 1)
        return function(own.answers(model, reference), is_good, kl, **settings).mean()

    compare(model, loss, case)


CONFIG = """
model: {{path: "{folder}/model", dtype: float32}}
data: {{train: "{folder}/records.jsonl", seq_len: 128, eval_fraction: 0}}
objective: {objective}
train: {{output_dir: "{folder}/run", steps: 10, batch_size: 6, device: cpu, threads: 1, max_grad_norm: null}}
optim: {{lr: {lr}, eps: {eps}, weight_decay: {weight_decay}, betas: [0.9, 0.999], schedule: constant, warmup_steps: 0}}
eval: {{at_start: false, prompts: []}}
checkpoint: {{every: null}}
"""


def begun(folder: Path, seed: int, objective: str) -> Any:
    """A run of the seed's records and weights before its first step."""
    genesis_models.save(make_model(seed), folder / "model", tokenizer=Tokenizer.load(BASE))
    shutil.copy(BASE / "chat_template.jinja", folder / "model")
    (folder / "records.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS[seed]))
    path = folder / "c.yaml"
    path.write_text(CONFIG.format(folder=folder, objective=objective, **ADAMW))
    return assembled(load(path, "run"))


@pytest.mark.parametrize("name", ["sigmoid", "apo_down"])
def test_a_run(name: str, tmp_path: Path) -> None:
    """Losses of a run's own steps, from records to packed rows and its reference."""
    run = begun(tmp_path, 2, NAMES.get(name, name))
    found = [take_step(run.state, run._batches(), run.lr_at(step), None, CPU) for step in range(STEPS)]
    golden = page("dpo")["seeds"]["2"]["cases"][name]["losses"]
    assert [each.loss_sum / each.targets for each in found] == pytest.approx(golden, abs=TOLERANCE * golden[0])


def test_chats_have_the_same_tokens(tmp_path: Path) -> None:
    """TRL also learns the line break that the template puts after an end of turn; Genesis does not."""
    (batch,) = begun(tmp_path, 0, "dpo")._batches()
    found = set()
    for sample in batch.samples[:, 1].tolist():
        for ids, mask in sequences(batch.tokens, sample):
            begin, end = np.flatnonzero(mask)[[0, -1]]
            found.add((tuple(ids[:begin]), tuple(ids[begin : end + 1])))
    rows = page("dpo")["seeds"]["0"]["rows"]
    line_break = {rows[0]["chosen_ids"][-1]}
    expected = {(tuple(r["prompt_ids"]), tuple(r[key][:-1])) for r in rows for key in ("chosen_ids", "rejected_ids")}
    assert {r[key][-1] for r in rows for key in ("chosen_ids", "rejected_ids")} == line_break
    assert found == expected


def test_every_loss_has_a_case() -> None:
    found = {NAMES.get(name, name.split(",", 1)[0]) for kind in KINDS for name in page(kind)["seeds"]["0"]["cases"]}
    assert found == PAIRED.keys() | JUDGED.keys()
