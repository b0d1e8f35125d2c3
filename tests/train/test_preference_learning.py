"""New models learn from 400 synthetic pairs, or both of their answers judged, which of two unseen answers is better.

The better answer ends politely, the worse one rudely, after words that say nothing. Held out are 100 other pairs. The
accuracy is the share of those whose better answer has the higher mean log-probability, about one half at first.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.train.chats import write_chats
from tests.train.preferences import judged
from tests.train.runs import load, rows, train

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "marsh")
POLITE, RUDE = ("thank you", "with pleasure", "you are welcome"), ("go away", "no idea", "who cares")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LARGE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}  # of 4M parameters
CONFIG = """
model:
  config:
    model_type: qwen3
    vocab_size: 400
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 32
    max_position_embeddings: 256
data: {{train: "{folder}/pairs.jsonl", eval: "{folder}/held-out.jsonl", seq_len: 128, cache_dir: "{folder}/cache"}}
train: {{output_dir: "{folder}/run", steps: 40, batch_size: 4, threads: 1}}
optim: {{lr: 1e-3, warmup_steps: 4}}
eval: {{prompts: []}}
checkpoint: {{every: null}}
log: {{every: 20}}
"""


def synthetic(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of texts whose answers end politely and rudely."""
    drawn = random.Random(seed)

    def some(ends: tuple[str, ...]) -> str:
        return f" {' '.join(drawn.choices(WORDS, k=drawn.randint(1, 4)))} {drawn.choice(ends)}."

    asked = (" ".join(drawn.choices(WORDS, k=drawn.randint(2, 6))) for _ in range(count))
    return [{"prompt": f"{prompt}?", "chosen": some(POLITE), "rejected": some(RUDE)} for prompt in asked]


MEASURED = ("objective=simpo", "train.steps=1", "optim.lr=1e-9")


class Learning:
    """New models of one shape: their data, and the one that every objective begins with."""

    def __init__(self, folder: Path, shape: dict[str, int]) -> None:
        self.folder, self.path = folder, folder / "config.yaml"
        self.sizes = [f"model.config.{key}={value}" for key, value in shape.items()]
        for name, pairs in (("pairs", synthetic(400, seed=1)), ("held-out", synthetic(100, seed=2))):
            write_chats(folder / f"{name}.jsonl", pairs)
            write_chats(folder / f"judged-{name}.jsonl", judged(pairs))
        self.path.write_text(CONFIG.format(folder=folder))
        # A model is measured as SimPO compares answers.
        train(load(self.path, "before", *self.sizes, *MEASURED))

    def accuracies(self, name: str, *settings: str) -> list[float]:
        """The accuracy on held-out pairs before and after a run with the objective `name`."""
        data = [f"data.tokenizer={self.folder}/before"]
        if name == "kto":
            data += [f"data.train={self.folder}/judged-pairs.jsonl", f"data.eval={self.folder}/judged-held-out.jsonl"]
        train(load(self.path, name, *self.sizes, f"objective={name}", *data, *settings))
        train(load(self.path, f"after-{name}", f"model={{path: {self.folder}/{name}}}", *MEASURED))
        return [rows(self.folder / output)[0]["eval/rewards/accuracies"] for output in ("before", f"after-{name}")]


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Learning:
    return Learning(tmp_path_factory.mktemp("learning"), request.param)


@pytest.mark.parametrize("learning", [SMALL], indirect=True, ids=[""])
@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo", "kto"])
def test_a_small_model_learns_to_prefer(learning: Learning, name: str) -> None:
    before, after = learning.accuracies(name, "optim.lr=3e-3", "train.steps=24", "eval.max_batches=1")
    assert 0.25 < before < 0.75 and after >= 0.95


@pytest.mark.full
@pytest.mark.parametrize("learning", [LARGE], indirect=True, ids=[""])
@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo", "kto"])
def test_a_model_of_4m_parameters_learns_to_prefer(learning: Learning, name: str) -> None:
    before, after = learning.accuracies(name)
    assert 0.25 < before < 0.75 and after >= 0.95
