"""Bands, causes and advice on made numbers."""

from __future__ import annotations

import pytest

from genesis.profile.roofline import Facts, band_of, judge

COPY, PRODUCT = 1e10, 1e12  # a second


def facts(**given: float | None) -> Facts:
    """A call of 1 ms that moves what a copy moves in half of it, and computes nearly nothing."""
    usual: dict[str, float | None] = {
        "flops": 1000, "nbytes": 5_000_000, "wall": 1e-3, "gpu": None, "bytes_per_second": COPY,
        "flops_per_second": PRODUCT, "smallest_wall": 1e-6, "smallest_gpu": None,
    }  # fmt: skip
    return Facts(**{**usual, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "band"),
    [
        (1.4, "excellent"), (0.9, "excellent"), (0.8999, "good"), (0.7, "good"), (0.69, "fair"), (0.5, "fair"),
        (0.49, "poor"), (0.2, "poor"), (0.19, "critical"), (0.0, "critical"),
    ],
)  # fmt: skip
def test_bands(share: float, band: str) -> None:
    assert band_of(share) == band


def test_the_limit_that_binds_gives_share_and_cause() -> None:
    moving = judge(facts())
    assert (moving.limit, moving.cause, moving.band) == ("bandwidth", "bandwidth", "fair")
    assert moving.share == moving.bandwidth_share == pytest.approx(0.5)
    assert moving.intensity == pytest.approx(1000 / 5_000_000)
    assert moving.ridge == PRODUCT / COPY
    computing = judge(facts(flops=800_000_000))
    assert (computing.limit, computing.cause, computing.band) == ("compute", "compute", "good")
    assert computing.share == computing.compute_share == pytest.approx(0.8)
    assert computing.bandwidth_share == pytest.approx(0.5)


def test_without_a_product_only_bandwidth_is_judged() -> None:
    found = judge(facts(flops=10**12, flops_per_second=None))
    assert (found.limit, found.compute_share, found.ridge) == ("bandwidth", None, None)


def test_a_call_that_does_nothing_is_launch_bound() -> None:
    found = judge(facts(flops=0, nbytes=0))
    assert (found.cause, found.limit, found.share, found.band, found.intensity) == ("launch", None, None, None, None)


def test_a_small_call_on_the_cpu_is_launch_bound() -> None:
    assert judge(facts(smallest_wall=4e-4)).cause == "bandwidth"
    found = judge(facts(smallest_wall=6e-4))
    assert found.cause == "launch"
    assert "the smallest call takes 600 µs of these 1.00 ms" in found.advice


def test_a_gpu_that_waits_for_the_host_is_launch_bound() -> None:
    found = judge(facts(gpu=2e-4, smallest_gpu=1e-6))
    assert found.cause == "launch"
    assert "the GPU works 200 µs of 1.00 ms: capture" in found.advice
    # Shares are of the GPU's time all the same.
    assert found.share == pytest.approx(5e-4 / 2e-4)
    assert judge(facts(gpu=9e-4, smallest_gpu=1e-6)).cause == "bandwidth"


def test_a_kernel_hardly_longer_than_the_smallest_is_launch_bound() -> None:
    found = judge(facts(gpu=9e-4, smallest_gpu=5e-4))
    assert found.cause == "launch"
    assert "the smallest call takes 500 µs of these 900 µs" in found.advice


def test_recording_longer_than_the_call_is_autograds_cost() -> None:
    assert judge(facts(recording=9e-4)).cause == "bandwidth"
    found = judge(facts(recording=2e-3))
    assert found.cause == "autograd"
    assert "recording adds 2.00 ms to a call of 1.00 ms" in found.advice
    # It is measured only on request, and noise may make it negative.
    assert judge(facts(recording=-1e-5)).cause == "bandwidth"


@pytest.mark.parametrize(
    ("nbytes", "advice"),
    [
        (2_000_000, "the call 5.0 times as long"),
        (8_000_000, "at 80% of a copy only fewer bytes help"),
        (20_000_000, "its data stays in a cache"),
    ],
)
def test_advice_on_bandwidth_follows_from_the_share(nbytes: int, advice: str) -> None:
    assert advice in judge(facts(nbytes=nbytes)).advice


@pytest.mark.parametrize(("flops", "advice"), [(6e8, "batch small products"), (9e8, "only fewer FLOPs")])
def test_advice_on_compute_follows_from_the_share(flops: int, advice: str) -> None:
    assert advice in judge(facts(flops=flops)).advice


def test_advice_about_products_goes_to_products_alone() -> None:
    assert "no products" in judge(facts(flops=6e8)._replace(multiplies=False)).advice
    assert "narrower dtype" in judge(facts(flops=9e8)._replace(multiplies=False)).advice
