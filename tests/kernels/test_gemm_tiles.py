"""The choice of tiles for GEMMs: pure functions, no kernel runs here."""

from __future__ import annotations

import itertools
import math

import pytest

from genesis.kernels.gemm.tiles import (
    MAX_SPLIT,
    TILES,
    GemmTile,
    Problem,
    Schedule,
    choose,
    chosen,
    epilogue_slices,
    fitted,
    predicted,
    ranked,
    schedule_of,
    shared_bytes,
    unaligned_tile,
)

SIZES = (1, 3, 16, 64, 511, 896, 4096, 151936)
HOPPER = 227 << 10  # bytes of shared memory of a block
OTHERS = (227 << 10, 163 << 10, 99 << 10)  # sm_90 and sm_100, sm_80, sm_86 and sm_120
ITEMS = {"half": 2, "fp8": 1, "fp8_long": 1, "pointers": 2}


def problem(kind: str, layout: str, m: int, n: int, k: int, matrices: int = 1, *, aligned: bool = True) -> Problem:
    """A GEMM of dense operands, or of operands whose rows begin at multiples of 128 bytes."""
    item = ITEMS.get(kind, 4)
    pitches = (k if layout[0] == "n" else m) * item, (n if layout[1] == "n" else k) * item
    return Problem(kind, layout, m, n, k, matrices, item, max(item, 2), (0, 0) if aligned else pitches)


def time_of(p: Problem, tile: GemmTile, split: int = 1) -> float:
    tiles = p.matrices * -(-p.m // tile.bm) * -(-p.n // tile.bn)
    return predicted(p, tile, schedule_of(tiles, -(-p.k // tile.bk), 132 * tile.ctas_per_sm, split), 132)


@pytest.mark.sample
@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("shared", OTHERS)
def test_every_size_gets_a_tile_that_fits(kind: str, shared: int) -> None:
    for (m, n, k), layout in itertools.product(itertools.combinations_with_replacement(SIZES, 3), ("nt", "nn")):
        tile = choose(problem(kind, layout, m, n, k), 132, shared)
        if kind not in ("float32", "pointers"):
            assert shared_bytes(tile, ITEMS.get(kind, 4)) <= (shared + 1024) // tile.ctas_per_sm - 1024
        for size in (tile.bm, tile.bn, tile.bk, tile.warps):
            assert size > 0 and size & (size - 1) == 0, tile
        assert 1 <= tile.split <= min(MAX_SPLIT, max(k // tile.bk, 1)), tile


@pytest.mark.parametrize("kind", TILES)
def test_extreme_sizes_have_a_choice(kind: str) -> None:
    for m, n, k in ((1, 1, 0), (1 << 31, 8, 8), (8, 1 << 31, 64), (64, 64, 1 << 31), (1, 1, 1)):
        found = ranked(problem(kind, "nt", m, n, k, 3), 132, HOPPER)
        assert all(math.isfinite(each.us) and each.us > 0 for each in found), (kind, m, n, k)
        assert choose(problem(kind, "nt", m, n, k, 3), 132, HOPPER) == found[0].tile


def test_one_chain_has_no_split() -> None:
    few = problem("half", "nt", 64, 64, 65536)
    assert choose(few, 132, HOPPER).split > 4
    for kind, layout in itertools.product(TILES, ("nn", "nt", "tn", "tt")):
        found = ranked(problem(kind, layout, 512, 768, 40000, aligned=False), 132, HOPPER, one_chain=True)
        assert {each.tile.split for each in found} == {each.schedule.split for each in found} == {1}


def test_a_choice_does_not_depend_on_what_was_chosen_before() -> None:
    p = problem("half", "tn", 1000, 2000, 3000, aligned=False)
    first = choose(p, 132, HOPPER)
    choose(problem("half", "tn", 2000, 1000, 3000), 132, HOPPER)
    chosen.clear()
    assert choose(p, 132, HOPPER) == first


def test_more_work_takes_no_less_time() -> None:
    for tile in TILES["half"]:
        for size in (64, 500, 2048, 8192):
            base = problem("half", "nt", size, size, size)
            changes = {"m": 2 * size}, {"n": 2 * size}, {"k": 2 * size}, {"reads": True}, {"pitches": (16, 16)}
            for more in (base._replace(**change) for change in changes):  # type: ignore[arg-type]
                assert time_of(more, tile) >= time_of(base, tile), (tile, base, more)


def test_large_matmuls_have_large_tiles_and_few_rows_narrow_ones() -> None:
    assert choose(problem("half", "nn", 8192, 8192, 8192), 132, HOPPER)[:3] == (128, 256, 64)
    assert min(choose(problem("half", "nt", 1, 4864, 896), 132, HOPPER)[:2]) == 16
    assert all(choose(problem("half", "nt", *s), 132, HOPPER).swapped for s in ((16, 4864, 896), (8192, 576, 3072)))
    assert choose(problem("half", "nt", 512, 512, 512), 132, HOPPER).bm == 64
    assert choose(problem("tf32", "nt", 4096, 4096, 4096), 132, HOPPER)[:3] == (128, 256, 32)


def test_few_elements_of_float32_have_small_tiles_if_sums_are_whole() -> None:
    assert choose(problem("float32", "nn", 22, 584, 2584), 132, HOPPER, one_chain=True)[:2] == (16, 16)
    assert choose(problem("float32", "tn", 48, 144, 1800, 18), 132, HOPPER, one_chain=True)[:2] != (16, 16)
    assert choose(problem("float32", "nn", 6, 536, 560, 17), 132, HOPPER, one_chain=True).bm == 8
    assert min(choose(problem("float32", "nn", 2000, 2000, 500), 132, HOPPER, one_chain=True)[:2]) >= 64


def test_two_large_programs_share_an_sm_for_two_full_rounds_of_a_k_major_operand() -> None:
    many, few = (2048, 17920, 1536), (2048, 3072, 2048)
    chosen_for = [choose(problem("half", *p), 132, HOPPER) for p in (("nt", *many), ("tn", *many), ("nt", *few))]
    assert [(t[:2], t.ctas_per_sm) for t in chosen_for] == [((128, 128), 2), ((128, 128), 1), ((128, 128), 1)]


def test_long_sums_of_few_tiles_are_split() -> None:
    for kind in TILES:
        assert choose(problem(kind, "nt", 128, 128, 32768), 132, HOPPER).split > 1, kind
        assert choose(problem(kind, "nt", 128, 128, 64), 132, HOPPER).split == 1, kind


def test_parts_gain_five_percent_or_are_not_made() -> None:
    split = 0
    for m, n, k in itertools.product((64, 896, 2048), (128, 896, 4864), (896, 4864, 16384)):
        found = ranked(problem("half", "nt", m, n, k), 132, HOPPER)
        whole = min(each.us for each in found if each.schedule.split == 1)
        assert found[0].us <= (whole / 1.05 if found[0].schedule.split > 1 else whole)
        split += found[0].schedule.split > 1
    assert 0 < split < 27


def test_threads_copy_small_tiles_of_unaligned_rows_of_2_bytes() -> None:
    few = problem("half", "nt", 80, 720, 5000, aligned=False)
    assert not choose(few, 132, HOPPER).by_tma
    in_parts = choose(problem("half", "nt", 3, 1760, 7568, aligned=False), 132, HOPPER)
    assert in_parts.split > 1 and in_parts.swapped and not in_parts.by_tma
    for other in (
        few._replace(pitches=(128, 1280)), few._replace(has_vectors=False),
        problem("half", "nt", 4000, 4000, 4008, aligned=False), problem("fp8", "nt", 80, 720, 1040, aligned=False),
    ):  # fmt: skip
        assert choose(other, 132, HOPPER).by_tma, other


def test_operands_are_copied_to_aligned_rows_where_that_is_profitable() -> None:
    assert choose(problem("half", "nt", 8192, 8192, 8008, aligned=False), 132, HOPPER).copies
    assert not choose(problem("half", "nt", 8192, 8192, 8192, aligned=False), 132, HOPPER).copies
    assert not choose(problem("half", "nt", 512, 512, 504, aligned=False), 132, HOPPER).copies
    for m in (1, 300, 5000):  # tensor cores read a wide operand B of float32 only K-major
        found = ranked(problem("tf32", "nn", 5000 + m, 4000, 1000), 132, HOPPER)
        assert all("b" in each.tile.copies or each.tile.swapped for each in found)


@pytest.mark.parametrize(
    ("m", "n", "k", "columns"),
    [
        (1024, 576, 576, 0),
        (4096, 576, 1536, 128),
        (8192, 896, 896, 128),
        (8192, 896, 4864, 256),
        (8192, 2048, 8192, 256),
    ],
)
def test_a_residual_is_added_by_the_kernel_that_the_model_prefers(m: int, n: int, k: int, columns: int) -> None:
    p = problem("half", "nt", m, n, k)._replace(reads=True, residual=True, is_specializable=True)
    tile = choose(p, 132, HOPPER)
    assert tile.specialized == (columns > 0) and (not columns or tile.bn == columns)
    assert not choose(p._replace(is_specializable=False), 132, HOPPER).specialized


def test_a_residual_makes_each_further_round_of_small_tiles_slower() -> None:
    p, tile = problem("half", "nt", 8192, 896, 896)._replace(reads=True), GemmTile(128, 128, 64, 4, 4)
    assert time_of(p._replace(residual=True), tile) > time_of(p, tile) + 10  # 448 tiles: three rounds after the first
    one_round = p._replace(m=2048)
    assert time_of(one_round._replace(residual=True), tile) == time_of(one_round, tile)


def test_scales_keep_the_order_of_the_operands() -> None:
    p = problem("half", "nt", 16, 4864, 896)._replace(is_swappable=False)
    assert not any(each.tile.swapped for each in ranked(p, 132, HOPPER))


def test_fitted_gives_up_stages_before_size() -> None:
    tile = GemmTile(128, 256, 64, 8, 4)
    assert fitted(tile, 2, HOPPER) == tile
    assert fitted(tile, 2, 163 << 10) == tile._replace(stages=2)
    assert fitted(tile, 2, 99 << 10).bn < 256


def test_fitted_keeps_room_for_each_program_on_an_sm() -> None:
    tile = GemmTile(128, 128, 64, 4, 3, ctas_per_sm=2)
    assert fitted(tile, 2, HOPPER) == tile
    assert fitted(tile._replace(stages=4), 2, HOPPER) == tile._replace(stages=4, ctas_per_sm=1)
    assert fitted(tile, 2, 163 << 10) == tile._replace(ctas_per_sm=1)
    for kind in ("half", "tf32", "fp8"):
        assert all(fitted(tile, ITEMS.get(kind, 4), HOPPER) == tile for tile in TILES[kind])


def test_the_epilogue_stores_slices_of_32_kibibytes() -> None:
    assert [epilogue_slices(GemmTile(128, n, 64, 8, 3), 2) for n in (64, 128, 256)] == [1, 1, 2]
    assert [epilogue_slices(GemmTile(128, n, 32, 8, 3), 4) for n in (64, 128, 256)] == [1, 2, 4]
    assert epilogue_slices(GemmTile(128, 128, 64, 4, 3, ctas_per_sm=2), 2) == 2
    assert epilogue_slices(GemmTile(256, 32, 64, 8, 3), 8) == 1  # 32 columns at least


def test_a_schedule_has_every_step_of_every_tile_once() -> None:
    for tiles, steps, split, is_persistent in itertools.product(
        (1, 7, 131, 132, 133, 304, 1056), (0, 1, 2, 14, 128, 2374), (1, 2, 5, 32), (False, True)
    ):
        c = schedule_of(tiles, steps, 132, split, is_persistent)
        assert c.full + c.leftover == tiles
        assert c.full % 132 == 0 or c.split == 1
        begins = range(0, c.split * c.steps_per_split, max(c.steps_per_split, 1))
        done = [i for begin in begins for i in range(begin, min(begin + c.steps_per_split, steps))]
        assert done == list(range(steps)), (tiles, steps, split, c)
        assert (c.split - 1) * c.steps_per_split < max(steps, 1), "an empty part"


def test_only_tiles_that_full_rounds_leave_over_are_split() -> None:
    assert schedule_of(132, 128, 132, 4) == Schedule(132, 0, 1, 128)
    assert schedule_of(133, 128, 132, 8) == Schedule(132, 1, 8, 16)
    assert schedule_of(49, 128, 132, 2) == Schedule(0, 49, 2, 64)
    assert schedule_of(133, 128, 132, 8, is_persistent=False) == Schedule(0, 133, 8, 16)


def test_unaligned_tiles_give_each_sm_one_and_are_split_beyond_that() -> None:
    assert unaligned_tile(1, 4096, 4096, 4096, 2, 132)[:3] == (64, 64, 64)
    assert unaligned_tile(1, 4096, 4096, 4096, 2, 132).split == 1
    assert unaligned_tile(1, 32, 447, 2116, 4, 132)[:3] == (32, 32, 32)
    assert unaligned_tile(1, 32, 447, 2116, 4, 132).split == 16  # of at least 4 steps
    assert unaligned_tile(1, 3, 5, 0, 2, 132)[:3] == (16, 16, 64)
