"""`genesis eval`: a trained model's loss, bits per byte and token accuracy on data, and its score on questions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from genesis.errors import ModelError, UsageError
from genesis.files.atomic import write_file
from genesis.files.boundary import fitting
from genesis_cli import options

Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="SOURCE", help='File, folder, glob or "stdlib:"; may be repeated.'),
]
Task = Annotated[
    str | None,
    typer.Option("--task", metavar="FILE", help='JSONL questions: "prompt" or "messages", "answer", "choices".'),
]
Match = Annotated[
    str, typer.Option("--match", metavar="HOW", help="How generated answers are judged: exact, number or regex.")
]
Out = Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the answer to each question to FILE.")]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", metavar="N", help="Tokens in a sequence.  [default: the model's context, at most 1024]"),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", metavar="N", help="Sequences in one forward pass.")]
Template = Annotated[
    str | None,
    typer.Option("--template", metavar="NAME", help="Chat template: chatml, or a file.  [default: the model's own]"),
]
Prompts = Annotated[
    str | None, typer.Option("--prompts", metavar="FILE", help="JSONL prompts for --check-exact, as for generate.")
]
CheckExact = Annotated[
    bool, typer.Option("--check-exact", help="Compare exact generation with training's forward pass, bit by bit.")
]
Layers = Annotated[bool, typer.Option("--layers", help="With --check-exact, name the first layer that differs.")]


def evaluate(
    folder: options.Folder,
    data: Data = None,
    task: Task = None,
    match: Match = "exact",
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    out: Out = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    template: Template = None,
    prompts: Prompts = None,
    check_exact: CheckExact = False,
    layers: Layers = False,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    exact: options.Exact = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail at a question that exceeds the context, instead of cutting it.")
    ] = False,
    base: options.Base = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the model in FOLDER on data or on questions.

    Prints loss (nats per token), perplexity, bits per byte and token accuracy; for questions the accuracy. With
    --check-exact it prints for how many generated tokens the log-probabilities of generation and training differ.
    """
    from genesis.train.config import DataConfig, EvalConfig, TrainConfig

    run = options.settings(TrainConfig, batch_size=("--batch-size", batch_size), device=("--device", device))
    drawing = options.settings(EvalConfig, sample_tokens=("--max-tokens", max_tokens))
    kind = options.weight_dtype(dtype, quantized=True)
    if seq_len is not None:
        options.settings(DataConfig, seq_len=("--seq-len", seq_len))
    if check_exact != (prompts is not None):
        what = "--check-exact needs --prompts" if check_exact else "--prompts is only for --check-exact"
        raise UsageError(what, where="command line", next="give both")
    if check_exact and (data or task is not None):
        raise UsageError("--check-exact uses neither data nor a task", where="command line", next="run eval twice")
    if not data and task is None and not check_exact:
        raise UsageError("neither data nor a task is given", where="command line", next="give --data or --task")
    if exact and task is not None:
        raise UsageError("--exact is for --data, not for a task", where="--exact", next="leave --task out")
    from genesis_cli import session

    if prompts is not None:
        run |= options.settings(TrainConfig, seed=("--seed", seed))
        heat = options.given_drawing(temperature=temperature).get("temperature")
        how = {"max_tokens": drawing["sample_tokens"], "seed": run["seed"], "temperature": heat, "layers": layers}
        with fitting(ModelError, "running the model", folder):
            print(session.check_exact(folder, prompts, **how, device=run["device"], dtype=kind, base=base))
        return

    found: dict[str, float | int] = {}
    asked: dict[str, object] = {}
    model: dict[str, Any] = {"dtype": kind, "base": base, "template": template}
    with fitting(ModelError, "running the model", folder):
        if data:
            found |= session.evaluate(folder, data, seq_len=seq_len, exact=exact, **run, **model)
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
