"""The choice of tiles for GEMMs: pure functions, no kernel runs here."""

from __future__ import annotations

import itertools

import pytest

from genesis.kernels.gemm.tiles import (
    MAX_SPLIT,
    MIN_STEPS,
    PROGRAMS_PER_SM,
    TABLE,
    GemmTile,
    Schedule,
    best_split,
    choose,
    epilogue_slices,
    fitted,
    persistent_schedule,
    shared_bytes,
    simt_schedule,
    unaligned_tile,
)

SIZES = (1, 3, 16, 64, 511, 896, 4096, 151936)
HOPPER = 227 << 10  # bytes of shared memory of a block
OTHERS = (227 << 10, 163 << 10, 99 << 10)  # sm_90 and sm_100, sm_80, sm_86 and sm_120


@pytest.mark.parametrize("kind", TABLE)
def test_a_tuned_shape_gets_its_row(kind: str) -> None:
    for row in TABLE[kind]:
        item = 2 if kind in ("half", "pointers") else 4
        got = choose(kind, row.layout, row.m, row.n, row.k, item, HOPPER)
        assert got == fitted(row.tile, item, HOPPER), row


def test_rows_name_each_shape_once_with_sizes_that_kernels_take() -> None:
    for kind, rows in TABLE.items():
        names = [row[:4] for row in rows]
        assert len(set(names)) == len(names), kind
        for row in rows:
            assert row.layout in ("nn", "nt", "tn", "tt")
            for size in (row.tile.bm, row.tile.bn, row.tile.bk, row.tile.warps):
                assert size > 0 and size & (size - 1) == 0, row
            assert row.tile.bk >= 8 and row.tile.stages >= 2, row


def test_the_nearest_row_counts_doublings_and_prefers_the_layout() -> None:
    by_size = {(row.layout, row.m, row.n, row.k): row.tile._replace(split=0) for row in TABLE["half"]}
    assert choose("half", "nn", 8100, 8300, 8000, 2, HOPPER) == by_size["nn", 8192, 8192, 8192]
    assert choose("half", "nt", 8100, 8300, 8000, 2, HOPPER) == by_size["nt", 8192, 8192, 8192]
    assert choose("half", "nt", 6000, 900, 900, 2, HOPPER) == by_size["nt", 8192, 896, 896]


def test_a_tuned_split_is_for_its_own_shape() -> None:
    assert choose("half", "tn", 9728, 896, 8192, 2, HOPPER).split == 16
    assert choose("half", "tn", 9728, 896, 4096, 2, HOPPER).split == 0


@pytest.mark.parametrize("shared", OTHERS)
@pytest.mark.parametrize("kind", TABLE)
def test_every_shape_gets_a_tile_that_fits(kind: str, shared: int) -> None:
    item = 2 if kind in ("half", "pointers") else 4
    for m, n, k in itertools.product(SIZES, repeat=3):
        tile = choose(kind, "nt", m, n, k, item, shared)
        assert shared_bytes(tile, item) <= shared
        assert tile.stages >= 2 and tile.bk * item >= 32, tile


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
    for row in (row for kind in ("half", "tf32") for row in TABLE[kind]):
        item = 2 if row in TABLE["half"] else 4
        assert fitted(row.tile, item, HOPPER) == row.tile, row


def test_the_epilogue_stores_slices_of_32_kibibytes() -> None:
    assert [epilogue_slices(GemmTile(128, n, 64, 8, 3), 2) for n in (64, 128, 256)] == [1, 1, 2]
    assert [epilogue_slices(GemmTile(128, n, 32, 8, 3), 4) for n in (64, 128, 256)] == [1, 2, 4]
    assert epilogue_slices(GemmTile(128, 128, 64, 4, 3, ctas_per_sm=2), 2) == 2
    assert epilogue_slices(GemmTile(256, 32, 64, 8, 3), 8) == 1  # 32 columns at least


def test_a_schedule_has_every_step_of_every_tile_once() -> None:
    for tiles, steps, split in itertools.product(
        (1, 7, 131, 132, 133, 304, 1056), (1, 2, 14, 128, 2374), (0, 1, 2, 5, 32)
    ):
        c = persistent_schedule(tiles, steps, 132, split)
        assert c.full + c.leftover == tiles
        assert c.full % 132 == 0 or c.split == 1
        begins = range(0, c.split * c.steps_per_split, c.steps_per_split)
        done = [i for begin in begins for i in range(begin, min(begin + c.steps_per_split, steps))]
        assert done == list(range(steps)), (tiles, steps, split, c)
        assert (c.split - 1) * c.steps_per_split < steps, "an empty part"


def test_only_tiles_that_full_rounds_leave_over_are_split() -> None:
    assert best_split(132, 128, 132) == best_split(264, 128, 132) == 1
    assert best_split(7, 1, 132) == 1
    assert persistent_schedule(133, 128, 132).full == 132 and persistent_schedule(133, 128, 132).split > 8
    assert persistent_schedule(49, 128, 132).full == 0 and persistent_schedule(49, 128, 132).split > 1


def test_splitting_is_profitable_by_its_own_count() -> None:
    for tiles, steps in itertools.product(range(1, 400, 7), (4, 14, 128, 600)):
        c = persistent_schedule(tiles, steps, 132)
        rounds = -(-tiles // 132) * steps
        split = c.full // 132 * steps + -(-c.leftover * c.split // 132) * c.steps_per_split
        assert split <= rounds, (tiles, steps, c)


def test_few_tiles_share_the_sms() -> None:
    tile = GemmTile(64, 64, 16, 4, 3)
    for tiles, steps, sm_count in itertools.product((1, 2, 112, 131, 263, 264, 5000), (0, 1, 31, 56, 2048), (1, 132)):
        c = simt_schedule(tiles, steps, sm_count, tile)
        assert c.full + c.leftover == tiles
        if c.split == 1:
            assert c == Schedule(tiles, 0, 1, steps)
            assert tiles >= 2 * sm_count or steps < 2 * MIN_STEPS or PROGRAMS_PER_SM * sm_count < 2 * tiles
        else:
            assert tiles < 2 * sm_count
            assert (c.split - 1) * c.steps_per_split < steps <= c.split * c.steps_per_split  # none is empty or missing
            assert c.steps_per_split >= MIN_STEPS
            assert c.split <= MAX_SPLIT and c.split * tiles <= PROGRAMS_PER_SM * sm_count
    assert simt_schedule(112, 2048, 132, tile) == Schedule(0, 112, 4, 512)
    assert simt_schedule(112, 2048, 132, tile._replace(split=1)) == Schedule(112, 0, 1, 2048)
    assert simt_schedule(5000, 12, 132, tile._replace(split=5)) == Schedule(0, 5000, 4, 3)


def test_unaligned_tiles_give_each_sm_one_and_are_split_beyond_that() -> None:
    assert unaligned_tile(1, 4096, 4096, 4096, 2, 132)[:3] == (64, 64, 64)
    assert unaligned_tile(1, 4096, 4096, 4096, 2, 132).split == 1
    assert unaligned_tile(1, 32, 447, 2116, 4, 132)[:3] == (32, 32, 32)
    assert unaligned_tile(1, 32, 447, 2116, 4, 132).split == 16  # of at least 4 steps
    assert unaligned_tile(1, 3, 5, 0, 2, 132)[:3] == (16, 16, 64)
