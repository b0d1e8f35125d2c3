"""`genesis eval --check-exact`: compares generation with the forward pass of training bit for bit."""

from __future__ import annotations

import sys

from genesis.errors import NumericError, UsageError
from genesis.train.output import Output
from genesis_cli.session.generation import GENERATE, GENERATE_MEMORY, chosen_sampling, read_prompts, requests_of
from genesis_cli.session.inference import found_source, opened
from genesis_cli.session.phrases import phrased_for
from genesis_cli.session.preparation import resolve_device
from genesis_cli.session.settings import check_recorded
from genesis_models.engine.comparison import compare, first_layer
from genesis_models.engine.exact import check_model
from genesis_models.generate import GPU_ROWS


def check_exact(
    folder: str,
    prompts: str,
    *,
    max_tokens: int,
    seed: int,
    temperature: float | None,
    layers: bool,
    device: str,
    dtype: str,
    base: str | None = None,
) -> str:
    """Generate exactly from prompts, score the drawn tokens with the forward pass of training, and return a line with
    the number of tokens whose log-probabilities differ.

    Args:
        prompts: JSONL file of prompts, as for `generate`.
        temperature: temperature of the draws; None for the model's own.
        layers: also name the first layer that differs.

    Raises:
        NumericError: some differ; it names the first. DeviceError, ModelError: the device or model does not support
            exact generation, or the run was trained exactly on another GPU model or with another version of Triton.
    """
    with phrased_for(GENERATE, memory=GENERATE_MEMORY):
        asked = read_prompts(prompts)
        source = found_source(folder, base)
        given = {} if temperature is None else {"temperature": temperature}
        sampling = chosen_sampling(source, given, seed, Output(sys.stderr), exact=True)
        model, tokenizer = opened(source, resolve_device(device), dtype)
        check_model(model)
        check_recorded(source.folders, resolve_device(device))
        requests = requests_of(model, asked, source, tokenizer, sampling, max_tokens)
        found = compare(model, requests, min(len(requests), GPU_ROWS))
        if not found.tokens:
            raise UsageError("no token was generated: every prompt ended at once", next="use other prompts")
        line = f"mismatch {found.differing:,} of {found.tokens:,} tokens"
        if (first := found.first) is None:
            return line
        where = f"{asked[first.request].where}, token {first.token + 1}"
        what = f"{line}; the first has log-probability {first.drawn!r} in generation, {first.scored!r} in training"
        if layers:
            layer = first_layer(model, requests[first.request], found.drawn[first.request], first.token)
            what += "; only the head differs" if layer is None else f"; outputs differ from layer {layer} on"
        raise NumericError(what, where=where, next="report it with the model and the GPU; generate without --exact")
