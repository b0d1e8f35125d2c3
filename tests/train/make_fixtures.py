"""Trains the base model of test_learning.py, `fixtures/sums`: a tiny Qwen3 that knows the sums of two digits.

    .venv/bin/python -m tests.train.make_fixtures

It learns texts such as "3+4=" -> "7" for all pairs of digits, and never sees a chat.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.train.chats import SHAPE, write_chat_tokenizer, write_chats
from tests.train.runs import load, train

__all__ = ["BASE"]

BASE = Path(__file__).parent / "fixtures" / "sums"
TEXTS = ("{}+{}=", "{}+{} equals", "the sum of {}+{} is \n", "{}+{}: please answer:", "{}+{} and the answer\n\n")
# Numbers are one token, as answers of two would need a deeper model.
VOCABULARY = (
    "user assistant What is the sum of Add and plus please answer equals " * 9 + "10 11 12 13 14 15 16 17 18 " * 20
)
CONFIG = """
model: {{config: {shape}}}
data: {{train: "{folder}/texts.jsonl", eval_fraction: 0, tokenizer: "{folder}/tokenizer", seq_len: 64}}
train: {{output_dir: "{folder}/base", steps: 400, batch_size: 8, threads: 1}}
optim: {{lr: 5e-3, weight_decay: 0.01}}
eval: {{every: null, prompts: []}}
checkpoint: {{every: null}}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_chat_tokenizer(folder / "tokenizer", VOCABULARY, vocab_size=300)
        pairs = [(text.format(a, b), str(a + b)) for a in range(10) for b in range(10) for text in TEXTS]
        write_chats(folder / "texts.jsonl", ({"prompt": asked, "completion": said} for asked, said in pairs))
        wide = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape = SHAPE | wide | {"vocab_size": size, "eos_token_id": 0}
        (folder / "base.yaml").write_text(CONFIG.format(shape=json.dumps(shape), folder=folder))
        train(load(folder / "base.yaml", "base"))
        BASE.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(folder / "base" / file, BASE)
        for path in (folder / "tokenizer").iterdir():
            shutil.copy(path, BASE)


if __name__ == "__main__":
    main()
