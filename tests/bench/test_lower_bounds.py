"""What a benchmark notes of a call's launches, and the least time that follows from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import genesis
from benchmarks.gpu.launches import _kernel, kernels_of
from benchmarks.lower_bounds import RENAMED, describe, lower_bound_of
from genesis.backend import Device
from genesis.backend.cuda.driver import KernelFacts, SMFacts
from genesis.backend.cuda.launch import KernelLaunch

CUDA = Device("cuda", 0)
LAUNCH = 1e-6


def kernel(programs: int, name: str = "reduce_kernel", **more: Any) -> dict[str, Any]:
    return {"name": name, "grid": [programs, 1, 1], "sm_count": 132, **more}


def row(us: float, *kernels: dict[str, Any], product: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"genesis_us": us, "kernels": list(kernels), **({"product": product} if product else {})}


def tiled(programs: int, *tile: int, split: bool = False) -> dict[str, Any]:
    return kernel(programs, "product", tile=list(tile), split=split)


# --- What is noted ----------------------------------------------------------------------------------------------------


def test_launches_of_a_call_are_noted_in_order() -> None:
    x = genesis.ones(4, 300, device="cuda")
    call = lambda: x.sum(0).exp()  # noqa: E731
    call()
    found = kernels_of(call, CUDA)
    assert [each["name"] for each in found] == ["reduce_kernel", "unary_kernel"]
    assert all(len(each["grid"]) == 3 and each["sm_count"] == 4 for each in found)
    assert not any("resident" in each or "tile" in each for each in found)  # the interpreter has no machine code
    filled = kernels_of(lambda: genesis.zeros(8, device="cuda"), CUDA)
    assert [(each["name"], each["grid"]) for each in filled] == [("fill", [])]


def test_tiles_of_a_product_are_noted() -> None:
    x, y = genesis.ones(320, 256, device="cuda").bfloat16(), genesis.ones(256, 64, device="cuda").bfloat16()
    (found,) = kernels_of(lambda: x @ y, CUDA)
    (rows, columns, _), tiles = found["tile"], found["grid"][0]
    assert (-(-320 // rows)) * (-(-64 // columns)) >= tiles > 1
    assert not found["split"]


class FakeDriver:
    """Knows one kernel."""

    properties = SimpleNamespace(sm_count=132)

    def kernel_facts(self, function: Any, threads: int, shared: int) -> KernelFacts:
        return KernelFacts(40, 16, 8, resident=3)

    def sm_facts(self) -> SMFacts:
        return SMFacts(threads=2048, registers=65536, blocks=32, shared=228 << 10, reserved=1 << 10)


@pytest.mark.parametrize(
    ("constants", "noted"),
    [
        ({"BLOCK": 1024}, {}),
        ({"BM": 128, "BN": 64, "EPILOGUE": 0}, {}),  # the reduction of splits multiplies nothing
        ({"TILE": (128, 64, 128)}, {}),  # attention
        ({"BM": 128, "BN": 64, "BK": 32}, {"tile": [128, 64, 32], "split": False}),
        ({"TILE": (128, 64, 32), "EPILOGUE": 0, "SPLIT": True}, {"tile": [128, 64, 32], "split": True}),
        ({"TILE": (128, 64, 32), "EPILOGUE": 0, "SCHEDULE": "split_k"}, {"tile": [128, 64, 32], "split": True}),
        (
            {"TILE": (128, 64, 32), "EPILOGUE": 0, "OUT_LAYOUT": ("columns", False)},
            {"tile": [64, 128, 32], "split": False},
        ),
    ],
)
def test_what_a_gpu_tells_is_noted(constants: dict[str, Any], noted: dict[str, Any]) -> None:
    launched, driver = KernelLaunch(lambda made: None, lambda: True, "name", (4, 33, 1)), cast(Any, FakeDriver())
    launched.loaded = SimpleNamespace(function=SimpleNamespace(handle="handle"), threads=128, shared=2048)
    launched.constants = constants
    assert _kernel(launched, driver) == {"name": "name", "grid": [4, 33, 1], "sm_count": 132, "resident": 3, **noted}


# --- What follows -----------------------------------------------------------------------------------------------------


def test_launches_and_the_limit_are_added_up() -> None:
    bound = lower_bound_of(row(4.0, kernel(448), kernel(14, "merge_kernel")), 0.3, LAUNCH, {})
    assert bound.least == pytest.approx(2e-6 + 1.2e-6)
    assert bound.share == pytest.approx(0.8)
    assert describe(bound) == (
        "2 launches (reduce_kernel 1.00 µs, merge_kernel 1.00 µs) and 1.20 µs at the limit: 3.20 µs of 4.00 µs, 80%;"
        " merge_kernel has 14 programs for 132 SMs"
    )


def test_a_kernel_takes_what_it_took_on_next_to_no_data() -> None:
    bound = lower_bound_of(
        row(4.0, kernel(448), kernel(14, "merge_kernel")), 0.3, LAUNCH, {"reduce_kernel": 1.5e-6, "other": 9e-6}
    )
    assert bound.least == pytest.approx(1.5e-6 + 1e-6 + 1.2e-6)
    assert describe(bound).startswith(
        "2 launches (reduce_kernel 1.50 µs, merge_kernel 1.00 µs) and 1.20 µs at the limit: 3.70 µs"
    )


def test_a_renamed_kernel_has_its_present_name_and_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED, "before", "now")
    bound = lower_bound_of(row(4.0, kernel(14, "before")), 0.3, LAUNCH, {"before": 1.5e-6})
    assert describe(bound).startswith("1 launch (now 1.50 µs) ")
    assert describe(bound).endswith("; now has 14 programs for 132 SMs")


def test_a_row_without_launches_had_one_at_least() -> None:
    bound = lower_bound_of({"genesis_us": 4.0}, 0.25, LAUNCH, {})
    assert bound.least == pytest.approx(2e-6)
    assert describe(bound).startswith("at least 1 launch (1.00 µs) and 1.00 µs at the limit: 2.00 µs of 4.00 µs, 50%")


def test_an_op_faster_than_its_bound() -> None:
    bound = lower_bound_of(row(0.9, kernel(132)), 0.2, LAUNCH, {})
    assert bound.share > 1
    assert describe(bound).endswith(": 1.18 µs, and it took 900 ns")


@pytest.mark.parametrize(
    ("product", "made", "work"),
    [
        ((896, 896, 8192), tiled(98, 64, 128, 128), 132 / 98),  # 34 SMs have nothing to do
        ((8192, 1152, 896), tiled(264, 128, 128, 64), 5 * 132 / 576),  # one has 5 tiles, in the mean 4.36
        ((8192, 1152, 896), tiled(264, 128, 128, 64, split=True), 1.0),
        ((132 * 64, 64, 64), tiled(132, 64, 64, 64), 1.0),
        ((100, 64, 64), tiled(2, 64, 64, 64, split=True), 1.28),  # 28 rows of a tile are computed for nothing
        ((132 * 64, 64, 96), tiled(132, 64, 64, 64), 4 / 3),  # and so are steps along k
    ],
)
def test_the_sm_with_most_tiles_counts(product: tuple[int, ...], made: dict[str, Any], work: float) -> None:
    bound = lower_bound_of(row(10.0, made, product=product), 0.5, LAUNCH, {})
    assert bound.work == pytest.approx(work)
    assert bound.least == pytest.approx(1e-6 + 5e-6 * work)
    assert ("as it is shared out" in describe(bound)) == (work > 1.01)


def test_tiles_are_described() -> None:
    made = lower_bound_of(row(26.0, tiled(98, 64, 128, 128), product=(896, 896, 8192)), 0.65, LAUNCH, {})
    assert describe(made) == (
        "1 launch (product 1.00 µs) and 16.9 µs at the limit, 22.8 µs as it is shared out: 23.8 µs of 26.0 µs, 91%;"
        " 98 tiles of 64 x 128 on 132 SMs, the busiest has 1.35 shares"
    )


@pytest.mark.parametrize(
    ("made", "note"),
    [
        (kernel(1), "reduce_kernel has 1 program for 132 SMs"),
        (kernel(16), "reduce_kernel has 16 programs for 132 SMs"),
        (kernel(132), None),
        (kernel(300, resident=2), "reduce_kernel takes 1.14 waves"),
        (kernel(264, resident=2), None),
        (kernel(2640 + 10, resident=2), None),  # a tenth of eleven waves is little
        (kernel(300), None),  # how many fit is not known
        ({"name": "fill", "grid": [], "sm_count": 132}, None),
    ],
)
def test_what_fills_no_sms_is_noted(made: dict[str, Any], note: str | None) -> None:
    assert lower_bound_of(row(4.0, made), 0.3, LAUNCH, {}).notes == (() if note is None else (note,))
