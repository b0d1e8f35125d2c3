"""The benchmark of steps with adapters: which sides run, and what is said of their rows."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.lora_step import disagreements, line, sides_of


def row(side: str, ms: float, loss: float, **more: Any) -> dict[str, Any]:
    same = {
        "size": "0.5B",
        "kind": "lora",
        "r": 16,
        "checkpointing": "none",
        "shape": "8x1024",
        "tokens_per_second": 1e5,
        "warm_s": 2.0,
    }
    return {"side": side, "ms": ms, "loss": loss, "peak_gib": 9.4, "reserved_gib": 9.9, **same, **more}


def test_genesis_runs_with_each_mode_and_torch_with_its_recipes() -> None:
    found = sides_of({}, ["none", "full"], ["lean-graphs", "peft-ckpt"])
    assert [(module, name, job["checkpointing"]) for module, name, job in found] == [
        ("lora_genesis", "genesis", "none"),
        ("lora_genesis", "genesis", "full"),
        ("lora_torch", "lean-graphs", "none"),
        ("lora_torch", "peft-ckpt", "full"),
    ]


def test_first_losses_must_agree_to_rounding() -> None:
    rows = [row("genesis", 40.0, 12.0), row("lean", 50.0, 12.02), row("peft", 120.0, 12.2), {"side": "x", "error": "?"}]
    assert disagreements(rows) == ["peft: first loss 12.20000, that of genesis is 12.00000"]


def test_a_row_has_its_time_over_that_of_genesis() -> None:
    rows = [row("genesis", 40.0, 12.0), row("lean", 50.0, 12.0), row("lean", 60.0, 12.0, r=64)]
    assert [" 1.25x" in line(each, rows) for each in rows] == [False, True, False]
    failed = {key: value for key, value in rows[1].items() if key != "ms"} | {"error": "no answer in 3 s"}
    assert line(failed, rows).endswith("no answer in 3 s")
