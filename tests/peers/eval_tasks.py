"""`genesis eval` on a task against transformers and PEFT, for every golden model and adapter: equal item by item.

    .venv-peers/bin/python -m tests.peers.eval_tasks [--write]

Choices are compared by their log-probabilities, generated texts as they are: of a model's folder, an adapter's and that
of the merged model. `--write` stores what transformers answers for `tests/cli/test_eval_golden.py`. Needs an
environment with Genesis, torch, transformers and peft (`make peers`), so it is no part of `make test`;
`make peers-test` runs it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from genesis_cli.main import main as main_of_genesis
from tests.adapters.golden import NAMES as ADAPTED
from tests.cli.eval_tasks import FIXTURE, ITEMS, LARGEST, MODELS, NEW, write_adapter, write_model, write_task

MARGIN = 1e-4  # of logits: a text in whose making two tokens came nearer says nothing


def theirs(model: Any, folder: Path) -> list[dict[str, Any]]:
    """What transformers answers to each item: the choices' scores, or the text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: list[dict[str, Any]] = []
    for item in ITEMS:
        if "messages" in item:
            text = tokenizer.apply_chat_template(item["messages"], add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            pairs = [
                (ids + tokenizer(each, add_special_tokens=False)["input_ids"], ids) for each in item.get("choices", ())
            ]
        else:
            text = item["prompt"]
            ids = tokenizer(text)["input_ids"]
            pairs = [
                (tokenizer(text + each)["input_ids"], tokenizer(text.rstrip())["input_ids"])
                for each in item.get("choices", ())
            ]
        rows.append(
            {"scores": [scored(model, *pair) for pair in pairs]} if pairs else {"text": written(model, tokenizer, ids)}
        )
    return rows


def scored(model: Any, ids: list[int], before: list[int]) -> float:
    """The sum of the log-probabilities of `ids` after `before`; as lm-eval does, the model is not given the last id."""
    assert ids[: len(before)] == before
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].double()
    chances = torch.log_softmax(logits, -1)
    return sum(float(chances[at - 1, ids[at]]) for at in range(len(before), len(ids)))


def written(model: Any, tokenizer: Any, ids: list[int]) -> str:
    """The greedy continuation."""
    how = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    asked = torch.tensor([ids])
    out = model.generate(asked, attention_mask=torch.ones_like(asked), generation_config=how)
    best = torch.stack(out.logits).topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > MARGIN, "two tokens come near to each other: change the item"
    found: str = tokenizer.decode(out.sequences[0, len(ids) :], skip_special_tokens=True)
    return found


def ours(folder: Path, task: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    """What `genesis eval` answers to each item."""
    command("eval", folder, "--task", task, "--max-tokens", NEW, "--out", out, "--device", "cpu", *words)
    return [json.loads(line) for line in out.read_text().splitlines()]


def command(*words: Any) -> None:
    """`genesis words…`, which must end well."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        assert main_of_genesis([str(word) for word in words]) == 0, told.getvalue()


def largest(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> float:
    """The largest difference of a score; infinite where a choice or a text differs."""
    difference = 0.0
    for one, other in zip(found, wanted, strict=True):
        if "text" in other:
            if one["text"] != other["text"]:
                print(f"{one['text']!r} is not {other['text']!r}", file=sys.stderr)
                return float("inf")
            continue
        if one["chosen"] != other["scores"].index(max(other["scores"])):
            return float("inf")
        difference = max(difference, *(abs(a - b) for a, b in zip(one["scores"], other["scores"], strict=True)))
    return difference


def comparisons(task: Path, stored: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Model or adapter, what was compared, the difference, and what it may be; fills `stored`."""
    for name in MODELS:
        with tempfile.TemporaryDirectory() as place:
            folder = write_model(name, Path(place) / "model")
            stored[name] = theirs(opened(folder), folder)
            yield name, "model", largest(ours(folder, task, Path(place) / "rows"), stored[name]), LARGEST
    for name in ADAPTED:
        with tempfile.TemporaryDirectory() as place:
            base = write_model(name.rpartition("-")[0], Path(place) / "base")
            folder, merged = write_adapter(name, base, Path(place) / "adapter"), Path(place) / "merged"
            stored[name] = theirs(PeftModel.from_pretrained(opened(base), folder), base)
            assert largest(ours(base, task, Path(place) / "rows"), stored[name]) > 1e-2, "the adapter does nothing"
            yield name, "adapter", largest(ours(folder, task, Path(place) / "rows"), stored[name]), LARGEST
            command("export", folder, "--merge", "--out", merged)
            rows = ours(merged, task, Path(place) / "rows")
            yield name, "merged by Genesis", largest(rows, stored[name]), LARGEST
            yield name, "and in transformers", largest(rows, theirs(opened(merged), merged)), LARGEST


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main(words: Sequence[str]) -> int:
    """Prints a line for each comparison; 1 where one fails."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # of models so small
    failed, stored = 0, dict[str, Any]()
    with tempfile.TemporaryDirectory() as place:
        for name, what, found, allowed in comparisons(write_task(Path(place) / "task.jsonl"), stored):
            is_right = found <= allowed
            failed += not is_right
            print(f"{'ok    ' if is_right else 'FAILED'} {name:22} {what:20} {found:.1e} <= {allowed:g}", flush=True)
    if "--write" in words:
        lines = [f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in stored.items()]
        FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print("all as expected" if not failed else f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
