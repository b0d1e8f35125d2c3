"""`genesis eval`: a trained model's loss, bits per byte and token accuracy on data, and its score on questions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from genesis.errors import ModelError, UsageError
from genesis.files.atomic import write_file
from genesis.files.boundary import fitting
from genesis_cli.options import Base, Device, Dtype, Folder, settings, weight_dtype


def evaluate(
    folder: Folder,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="SOURCE", help='File, folder, glob or "stdlib:"; may be repeated.'),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="FILE", help='JSONL questions: "prompt" or "messages", "answer", "choices".'),
    ] = None,
    match: Annotated[
        str, typer.Option("--match", metavar="HOW", help="How generated answers are judged: exact, number or regex.")
    ] = "exact",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Longest generated answer, in tokens.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End an answer before TEXT; may be repeated.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write the answer to each question to FILE.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", metavar="N", help="Tokens in a sequence.  [default: the model's context, at most 1024]"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Sequences in one forward pass.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template", metavar="NAME", help="Chat template: chatml, or a file.  [default: the model's own]"
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail at a question that exceeds the context, instead of cutting it.")
    ] = False,
    base: Base = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the model in FOLDER on data or on questions.

    Prints loss (nats per token), perplexity, bits per byte and token accuracy; for questions the accuracy.
    """
    from genesis.train.config import DataConfig, EvalConfig, TrainConfig

    run = settings(TrainConfig, batch_size=("--batch-size", batch_size), device=("--device", device))
    drawing = settings(EvalConfig, sample_tokens=("--max-tokens", max_tokens))
    kind = weight_dtype(dtype, quantized=True)
    if seq_len is not None:
        settings(DataConfig, seq_len=("--seq-len", seq_len))
    if not data and task is None:
        raise UsageError("neither data nor a task is given", where="command line", next="give --data or --task")
    from genesis_cli import session

    found: dict[str, float | int] = {}
    asked: dict[str, object] = {}
    model: dict[str, Any] = {"dtype": kind, "base": base, "template": template}
    with fitting(ModelError, "running the model", folder):
        if data:
            found |= session.evaluate(folder, data, seq_len=seq_len, **run, **model)
        if task is not None:
            how = {"match": match, "max_tokens": drawing["sample_tokens"], "stop": stop or []}
            more, rows = session.evaluate_task(folder, task, **how, device=run["device"], strict=strict, **model)
            found |= more
            asked = {"model": folder, "task": task, **how, "dtype": kind, "device": run["device"]}
            asked |= {} if template is None else {"template": template}
            if out is not None:
                write_file(out, "".join(json.dumps(row) + "\n" for row in rows).encode())
    if as_json:
        print(json.dumps({**found, **({"settings": asked} if asked else {})}))
        return
    width = max(map(len, found), default=0)
    for name, value in found.items():
        print(f"{name:<{width}}  {value:.6g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
