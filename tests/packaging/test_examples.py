"""Each public name has an example in the API reference, and each example gives what the reference says."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import genesis
from docs import examples
from docs.generate import MODULES

# Public names without an example here, by a pattern, and why.
WITHOUT = {
    r"cuda\.|Tensor\.(record_stream|pin_memory)$": "needs a GPU; the guide to CUDA has examples",
    r"custom\.|check_op|cuda_op|triton_op": "the guide to user kernels has examples",
    r"profiler\.|genesis_models\.|generate$": "their guides have examples",
    r"(load|save)$": "writes files; the guides have examples",
    r"autograd\.(Function|FunctionContext|TensorBase|apply_?|detect_anomaly|jacobians)$": "takes more than a line",
    r"autograd\.set_detect_anomaly$|DType$|set_num_interop_threads$|index_plan$": "takes more than a line",
    r"optim\.(Optimizer|Schedule|WSD|Constant|Cosine|Linear|OneCycle|Sequential|Step|make_schedule)$": "a run sets it",
    r"distributions\.Distribution$": "to derive from",
    r"optim\.lr_scheduler\.LRScheduler$|utils\.data\.(Dataset|IterableDataset|ChainDataset|Sampler)$": "to derive from",
    r"Tensor\.(accumulate_grad|claim_gradient_slot|current_node|edge|set_grad|take_memory|wrap)$": "for the tape",
    r"[Ll]ayout$": "has one value, strided",
    r"Tensor\.share_memory_$": "memory is not shared between processes",
}


def plain(value: object) -> object:
    """Return what was written: aliases, methods and functions of one definition are the same."""
    return inspect.unwrap(value) if callable(value) else value


def names_without() -> list[str]:
    """Return the public functions, classes and methods that no example shows.

    A method counts as its function, an alias as the name of the same object, and f_ as f.
    """
    shown, missing = examples.examples().keys(), []
    everything: dict[str, object] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "genesis" else f"{module_name.removeprefix('genesis.')}."
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if callable(value):
                everything[f"{prefix}{name}"] = value
    for name in dir(genesis.Tensor):
        value = inspect.getattr_static(genesis.Tensor, name)
        if name[0] != "_" and callable(value):
            everything[f"Tensor.{name}"] = value
    objects = {id(plain(everything[name])) for name in shown if name in everything}
    last = {name.removeprefix("Tensor.").removeprefix("nn.functional.") for name in shown}
    for name, value in everything.items():
        base = name.removeprefix("Tensor.").removeprefix("nn.functional.")
        same = name in shown or id(plain(value)) in objects or base in last or base.removesuffix("_") in last
        if not same and ">>>" not in (value.__doc__ or ""):
            missing.append(name)
    return missing


def test_the_examples_give_what_they_say() -> None:
    assert examples.page() == examples.FILE.read_text(), "run `python -m docs.generate`"


def test_each_public_name_has_an_example() -> None:
    missing = [name for name in names_without() if not any(re.match(pattern, name) for pattern in WITHOUT)]
    assert missing == [], "add lines to docs/examples.txt and run `python -m docs.generate`"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("genesis.add(v, 1)", ["add"]),
        ("genesis.linalg.svd(x).S", ["Tensor.S", "linalg.svd", "linalg"]),
        ("F.relu(v.clone())", ["nn.functional.relu", "Tensor.clone"]),
        ("net.state_dict()", ["nn.Module.state_dict"]),
        ("optim.lr_scheduler.StepLR(sgd, 2)", ["optim.lr_scheduler.StepLR", "optim.lr_scheduler"]),
    ],
)
def test_the_names_of_an_example_are_found(expression: str, names: list[str]) -> None:
    assert examples.names_of(expression) == names
