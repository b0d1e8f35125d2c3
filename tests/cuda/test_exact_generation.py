"""Exact generation on the interpreter: the same bits of tokens and log-probabilities alone, together, in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.backend import Device
from genesis.data.tokenizer import train_bpe
from genesis.errors import DeviceError, ModelError, NumericError, UsageError
from genesis.files.atomic import AtomicFolder
from genesis.train.state import platform_of
from genesis_cli.session.exactness import check_exact
from genesis_cli.session.generation import generate
from genesis_cli.session.settings import check_recorded
from genesis_models.adapters import AdapterConfig, adapted_layers, apply_adapters
from genesis_models.engine import Request, Sampling, device_rows
from genesis_models.engine.comparison import compare, first_layer
from genesis_models.engine.device import DeviceEngine
from genesis_models.engine.device_cache import DeviceCache, StepCache
from genesis_models.weights import quantize
from tests.cli.command import printed
from tests.interpreter import ordered
from tests.models.golden import EXTRA, FAMILIES, QWEN, extra, golden
from tests.soak import exact as soak

TINY = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "initializer_range": 0.3,
}  # fmt: skip
Drawn = list[list[tuple[int | None, float | None]]]


def tiny(device: str = "cuda", dtype: str = "bfloat16", **changes: Any) -> genesis_models.CausalLM:
    return genesis_models.build(TINY | changes, seed=1, device=device, dtype=dtype)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 300, n).tolist() for n in lengths]


def drawn(model: genesis_models.CausalLM, requests: list[Request], rows: int, chunk: int = 2048) -> Drawn:
    engine = DeviceEngine(model, rows=rows, capacity=256, log_probs=True, chunk=chunk, exact=True)
    found: Drawn = [[] for _ in requests]
    for token in engine.run(requests):
        found[token.request].append((token.id, token.log_prob))
    return found


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> genesis_models.CausalLM:
    monkeypatch.setattr(device_rows, "captured", lambda step, device: step)
    return tiny()


def test_a_sequence_alone_with_others_and_in_chunks(model: genesis_models.CausalLM) -> None:
    """Also prompts that several rows share, and a row that is filled again."""
    first, second = prompts(1, 70)
    requests = [Request(ids, Sampling(0.9, seed=5), 2, sequence=i) for i, ids in enumerate((first, second))]
    requests += [Request(second, Sampling(0.9, seed=5), 2, sequence=3), requests[0]]
    alone = drawn(model, requests, 1)
    assert drawn(model, requests, 3, chunk=100) == alone
    assert alone[0] == alone[3]
    assert alone[1] != alone[2]  # the same prompt with other random numbers


def test_the_forward_pass_of_training_gives_the_same_bits(model: genesis_models.CausalLM) -> None:
    """One packed row, aligned, against steps and passes of prompts."""
    requests = [Request(ids, Sampling(0.9, seed=5), 2, sequence=i) for i, ids in enumerate(prompts(1, 70))]
    found = compare(model, requests, 2)
    assert (found.tokens, found.differing, found.first) == (4, 0, None)
    assert first_layer(model, requests[1], found.drawn[1], 1) is None


@pytest.mark.full
def test_a_difference_is_found_with_its_layer(model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that see another value in the second layer."""
    attention_packed = StepCache.attention_packed

    def changed(self: StepCache, qkv: Any, form: Any, starts: Any, tables: Any) -> Any:
        return attention_packed(self, qkv * 1.01 if form.layer == 1 else qkv, form, starts, tables)

    monkeypatch.setattr(StepCache, "attention_packed", changed)
    requests = [Request(ids, Sampling(0.0), 2, sequence=i) for i, ids in enumerate(prompts(3, 5))]
    found = compare(model, requests, 2)
    assert found.first is not None
    assert (found.tokens, found.first.request, found.first.token) == (4, 0, 0)
    assert found.differing > 0
    assert found.first.drawn != found.first.scored
    assert first_layer(model, requests[0], found.drawn[0], 0) == 1


@pytest.mark.full
def test_in_python(model: genesis_models.CausalLM) -> None:
    (ids,) = prompts(5)
    found = model.generate(ids, temperature=0.9, seed=5, max_tokens=2, log_probs=True, exact=True)
    (expected,) = drawn(model, [Request(ids, Sampling(0.9, seed=5), 2)], 1)
    assert found.log_probs is not None
    assert [*zip(found.ids, found.log_probs, strict=True)] == expected
    with pytest.raises(UsageError, match="exact is 1"):
        model.generate(ids, exact=1)  # type: ignore[arg-type]


@pytest.mark.full
def test_a_prompt_passes_once(model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    take_over = DeviceCache.take_over

    def spied(self: DeviceCache, documents: Any, *rest: Any) -> None:
        taken.append([len(each.rows) for each in documents])
        take_over(self, documents, *rest)

    monkeypatch.setattr(DeviceCache, "take_over", spied)
    first, second = prompts(5, 9)
    requests = [Request(ids, Sampling(0.9), 2, sequence=i) for i, ids in enumerate((first, second, first, first))]
    found = drawn(model, requests, 2)
    assert taken == [[1, 1]]  # the rows that are filled again copy the first row's
    taken.clear()
    assert drawn(model, requests, 4) == found
    assert taken == [[3, 1]]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"cache": "fp8"}, UsageError, "KV cache in fp8"),
        ({"model": "int8"}, ModelError, "8-bit weights"),
        ({"model": "float32"}, ModelError, "they are float32"),
        ({"model": "cpu"}, DeviceError, "on cpu"),
    ],
)
def test_what_is_refused(change: dict[str, str], kind: type[Exception], text: str) -> None:
    which = change.get("model", "bfloat16")
    model = tiny("cpu" if which == "cpu" else "cuda", "float32" if which == "float32" else "bfloat16")
    if which == "int8":
        quantize(model, "int8")
    with pytest.raises(kind, match=text):
        DeviceEngine(model, rows=1, capacity=16, cache=change.get("cache", "auto"), exact=True)


@pytest.mark.parametrize("change", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}])
def test_filters_are_refused(change: dict[str, Any]) -> None:
    engine = DeviceEngine(tiny(), rows=1, capacity=16, exact=True)
    with pytest.raises(UsageError, match=next(iter(change))):
        list(engine.run([Request([1], Sampling(1.0, **change), 2)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
    genesis_models.save(tiny("cpu"), folder, tokenizer=tokenizer)
    (folder / "generation_config.json").write_text('{"top_k": 5, "temperature": 0.7}')
    return folder


@pytest.mark.full
def test_the_command_counts_and_names_what_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_rows, "captured", lambda step, device: step)
    asked = tmp_path / "prompts.jsonl"
    asked.write_text('{"prompt": "w"}\n')
    how: dict[str, Any] = {"max_tokens": 2, "seed": 0, "temperature": None, "layers": True}
    how |= {"device": "cuda", "dtype": "auto"}
    assert check_exact(str(folder), str(asked), **how) == "mismatch 0 of 2 tokens"
    assert "exact: top_k of generation_config.json not applied" in capsys.readouterr().err
    attention_packed = StepCache.attention_packed

    def changed(self: StepCache, qkv: Any, *rest: Any) -> Any:
        return attention_packed(self, qkv * 1.01, *rest)

    monkeypatch.setattr(StepCache, "attention_packed", changed)
    with pytest.raises(NumericError, match=r"mismatch 2 of 2 tokens; .* from layer 0 on") as found:
        check_exact(str(folder), str(asked), **how)
    assert found.value.where == f"{asked}:1, token 1"


def test_on_the_cpu_the_commands_say_why_not(folder: Path) -> None:
    how: dict[str, Any] = {"max_tokens": 2, "seed": 0, "device": "cpu", "dtype": "auto"}
    with pytest.raises(DeviceError, match="exact generation needs a GPU, but the model is on cpu"):
        list(generate(str(folder), "words", exact=True, **how))
    assert printed("eval", str(folder), "--check-exact")[0] == 2
    assert printed("eval", str(folder), "--check-exact", "--prompts", str(folder), "--data", str(folder))[0] == 2
    assert printed("eval", str(folder), "--exact", "--data", str(folder), "--device", "cpu")[0] == 6


def test_a_run_that_was_exact_elsewhere_is_refused(folder: Path) -> None:
    device = Device("cuda", 0)
    now = platform_of(device)
    check_recorded([folder], device)
    for number, triton in ((1, now["triton"]), (2, "0.1")):
        with AtomicFolder(folder / f"checkpoint-{number}") as writer:
            writer.metadata["exact"] = {**now, "triton": triton}
        if number == 1:
            check_recorded([folder], device)
    with pytest.raises(DeviceError, match=r"triton 0\.1, now") as found:
        check_recorded([folder], device)
    assert found.value.where == str(folder / "checkpoint-2")


@pytest.mark.full
def test_the_soak_counts_what_differs(model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests.soak.exact` on a small model, as it is and with steps that see other values."""
    case, plain = soak.Case("tiny", 2, 12, 2), soak.Layout(2, 256, "none")
    monkeypatch.setitem(soak.MODELS, "tiny", TINY)
    monkeypatch.setattr(soak, "LONGEST", 70)
    monkeypatch.setattr(soak, "ALONE", 0)
    monkeypatch.setattr(soak, "PLAIN", plain)
    monkeypatch.setattr(soak, "LAYOUTS", (soak.Layout(1, 256, "selective"), plain, soak.Layout(1, 0, "full")))
    attention_packed = StepCache.attention_packed
    for factor in (1, 1.01):
        monkeypatch.setattr(
            StepCache, "attention_packed", lambda self, qkv, *rest, by=factor: attention_packed(self, qkv * by, *rest)
        )
        tallies = {each: soak.Tally() for each in soak.LAYOUTS}
        with ordered():
            row, control = soak.check(case, 12, 0, tallies)
        assert row["drawn"] == sum(each["scored"] for each in tallies.values()) == 12
        assert bool(row["differ"]) == (factor != 1)
        assert control["scored"]  # in few dimensions a GPU may give the same bits without genesis.exact


@pytest.mark.full
@pytest.mark.parametrize("name", [*QWEN, *FAMILIES, *EXTRA])
def test_every_family_and_its_adapters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums that have an order, as on a GPU."""
    monkeypatch.setattr(device_rows, "captured", lambda step, device: step)
    folder = (extra if name in EXTRA else golden)(name).folder
    for is_adapted in (False, True):
        model = genesis_models.load(folder, dtype="bfloat16", device="cuda")
        if is_adapted:
            apply_adapters(model, AdapterConfig(r=4, alpha=8.0))
            with genesis.no_grad():
                for layer in adapted_layers(model).values():
                    layer.lora_B.weight.fill_(0.05)
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, model.config.vocab_size, n).tolist() for n in (3, 40)]
        requests = [Request(each, Sampling(1.0), 2, sequence=i) for i, each in enumerate(ids)]
        with ordered():
            found = compare(model, requests, 2)
        assert (found.tokens, found.first) == (4, None)
