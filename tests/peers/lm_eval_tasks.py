"""EleutherAI's lm-eval against `genesis serve`, and `genesis eval` on the same questions: equal item by item.

    .venv-peers/bin/python -m tests.peers.lm_eval_tasks

Choices go through `local-completions` (log-probabilities of an echoed prompt, as ids and as text, one at a time and
several), texts through `local-chat-completions` and `local-completions`. Tasks, data and model are made here, nothing
is downloaded. Needs an environment with Genesis, transformers and lm-eval (`make peers`), so it is no part of
`make test`; `make peers-test` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cli.chat_model import write_legible_model
from tests.serving.server import Server, serving

LARGEST = 2e-5  # difference of a sum of log-probabilities, in float32
NEW, STOP = 12, "k"
WORDS = ("learn", "words", "some", "to", "more", "and then some more words", "a", "lerne Wörter")
PROMPTS = ("some words to", "more", "and more words to learn, and", "learn some", "words?", "Übung: some", "to")
CHOOSING = """
task: choosing
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choosing.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITING = """
task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/writing.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: NEW, do_sample: false}
metric_list: [{metric: exact_match}]
"""
# Model, task, what lm-eval is told besides, and how many prompts a request has.
RUNS: dict[str, tuple[str, str, str, int]] = {
    "choices": ("local-completions", "choosing", "", 1),
    "choices, as text": ("local-completions", "choosing", ",tokenized_requests=False", 1),
    "choices, 4 at a time": ("local-completions", "choosing", "", 4),
    "choices, 6 clients": ("local-completions", "choosing", ",num_concurrent=6", 1),
    "texts, 3 at a time": ("local-completions", "writing", "", 3),
    "texts of chats": ("local-chat-completions", "writing", "", 1),
    "texts of chats, 6 clients": ("local-chat-completions", "writing", ",num_concurrent=6", 1),
}


def write_tasks(folder: Path) -> None:
    """The questions for lm-eval, and the same for `genesis eval`."""
    choosing, asked, writing, said = [], [], [], []
    for number, prompt in enumerate(PROMPTS):
        choices = [WORDS[(number + each) % len(WORDS)] for each in range(2 + number % 3)]
        choosing.append({"prompt": prompt, "choices": choices, "answer": number % len(choices)})
        asked.append({**choosing[-1], "prompt": f"{prompt} "})  # lm-eval puts a space between
        writing.append({"prompt": prompt, "answer": "never"})
        said.append({"messages": [{"role": "user", "content": prompt}], "answer": "never"})
    for name, rows in (("choosing", choosing), ("asked", asked), ("writing", writing), ("said", said)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choosing", CHOOSING), ("writing", WRITING)):
        filled = text.replace("FOLDER", str(folder)).replace("STOP", STOP).replace("NEW", str(NEW))
        (folder / f"{name}.yaml").write_text(filled)


def theirs(server: Server, model: Path, name: str, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """lm-eval's answer to each item, in order, and its figures."""
    kind, task, more, together = RUNS[name]
    path = "chat/completions" if "chat" in kind else "completions"
    told = f"model=model,base_url={server.url}/v1/{path},max_length=128,max_retries=1{more}"
    if kind == "local-completions":
        told += f",tokenizer={model},tokenizer_backend=huggingface,add_bos_token=True"
    out = folder / f"out-{len([*folder.glob('out-*')])}"
    words = ["--model", kind, "--model_args", told, "--tasks", task, "--include_path", str(folder), "--log_samples"]
    words += ["--batch_size", str(together)]
    chats = ["--apply_chat_template"] if "chat" in kind else []
    here = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--output_path", str(out), *chats],
        env={**os.environ, **here},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [samples], [results] = [*out.rglob("samples_*.jsonl")], [*out.rglob("results_*.json")]
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    answers = [row["filtered_resps"] for row in rows]
    return answers, json.loads(results.read_text())["results"][task]


def ours(model: Path, task: Path, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What `genesis eval` answers to each item, and its figures."""
    words = ["eval", model, "--task", task, "--max-tokens", NEW, "--stop", STOP, "--out", folder / "rows", "--json"]
    command = [sys.executable, "-m", "genesis_cli.main", *map(str, words), "--device", "cpu"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in (folder / "rows").read_text().splitlines()], json.loads(printed)


def compared(found: Sequence[Any], figures: dict[str, Any], rows: Sequence[Any], wanted: dict[str, Any]) -> str:
    """What agrees. Raises: AssertionError."""
    assert len(found) == len(rows) == len(PROMPTS)
    if "scores" not in rows[0]:
        texts = [each[0] for each in found]
        assert texts == [row["text"] for row in rows], (texts, rows)
        assert len({*texts}) > 2 and any(len(text) > 3 for text in texts), texts
        assert figures["exact_match,none"] == wanted["task/accuracy"]
        return f"{len(texts)} texts, {len({*texts})} different"
    largest = 0.0
    for answer, row in zip(found, rows, strict=True):
        sums = [float(each[0]) for each in answer]
        largest = max(largest, *(abs(a - b) for a, b in zip(sums, row["scores"], strict=True)))
        assert sums.index(max(sums)) == row["chosen"]
    assert largest <= LARGEST, largest
    assert abs(figures["acc,none"] - wanted["task/accuracy"]) < 1e-9
    assert abs(figures["acc_norm,none"] - wanted["task/accuracy_by_length"]) < 1e-9
    count = sum(len(row["scores"]) for row in rows)
    return f"{count} choices, largest difference {largest:.1e} <= {LARGEST:g}"


def comparisons(folder: Path) -> Iterator[tuple[str, str]]:
    """Each run and what agrees in it. Raises: AssertionError."""
    model = write_legible_model(folder / "model")
    write_tasks(folder)
    wanted = {name: ours(model, folder / f"{name}.jsonl", folder) for name in ("asked", "writing", "said")}
    with serving(model, "--device", "cpu") as server:
        for name, (kind, task, *_) in RUNS.items():
            item = "asked" if task == "choosing" else "said" if "chat" in kind else "writing"
            yield name, compared(*theirs(server, model, name, folder), *wanted[item])


def main() -> None:
    """Prints a line for each run."""
    with tempfile.TemporaryDirectory() as name:
        for run, what in comparisons(Path(name)):
            print(f"ok     {run:26} {what}", flush=True)
    print("all as expected")


if __name__ == "__main__":
    main()
