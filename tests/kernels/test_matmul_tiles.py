"""The choice of tiles for matrix products: pure functions, no kernel runs here."""

from __future__ import annotations

import itertools

import pytest

from genesis.kernels.gemm.tiles import (
    LEAST_STEPS,
    MOST,
    SIDE_BY_SIDE,
    TABLE,
    Cut,
    Tile,
    beside,
    choose,
    cut,
    fitted,
    parts,
    pieces,
    shared_bytes,
)

SIZES = (1, 3, 16, 64, 511, 896, 4096, 151936)
HOPPER = 227 << 10  # bytes of shared memory of a block
OTHERS = (227 << 10, 163 << 10, 99 << 10)  # sm_90 and sm_100, sm_80, sm_86 and sm_120


@pytest.mark.parametrize("kind", TABLE)
def test_a_measured_shape_gets_its_row(kind: str) -> None:
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


def test_a_measured_split_is_for_its_own_shape() -> None:
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
    tile = Tile(128, 256, 64, 8, 4)
    assert fitted(tile, 2, HOPPER) == tile
    assert fitted(tile, 2, 163 << 10) == tile._replace(stages=2)
    assert fitted(tile, 2, 99 << 10).bn < 256


def test_fitted_keeps_room_for_each_resident_program() -> None:
    tile = Tile(128, 128, 64, 4, 3, resident=2)
    assert fitted(tile, 2, HOPPER) == tile
    assert fitted(tile._replace(stages=4), 2, HOPPER) == tile._replace(stages=4, resident=1)
    assert fitted(tile, 2, 163 << 10) == tile._replace(resident=1)
    for row in (row for kind in ("half", "tf32") for row in TABLE[kind]):
        item = 2 if row in TABLE["half"] else 4
        assert fitted(row.tile, item, HOPPER) == row.tile, row


def test_the_store_takes_pieces_of_32_kibibytes() -> None:
    assert [pieces(Tile(128, n, 64, 8, 3), 2) for n in (64, 128, 256)] == [1, 1, 2]
    assert [pieces(Tile(128, n, 32, 8, 3), 4) for n in (64, 128, 256)] == [1, 2, 4]
    assert pieces(Tile(128, 128, 64, 4, 3, resident=2), 2) == 2
    assert pieces(Tile(256, 32, 64, 8, 3), 8) == 1  # 32 columns at least


def test_cut_shares_out_every_step_of_every_tile_once() -> None:
    for tiles, steps, split in itertools.product(
        (1, 7, 131, 132, 133, 304, 1056), (1, 2, 14, 128, 2374), (0, 1, 2, 5, 32)
    ):
        c = cut(tiles, steps, 132, split)
        assert c.whole + c.rest == tiles
        assert c.whole % 132 == 0 or c.split == 1
        done = [i for part in range(c.split) for i in range(part * c.share, min((part + 1) * c.share, steps))]
        assert done == list(range(steps)), (tiles, steps, split, c)
        assert (c.split - 1) * c.share < steps, "an empty part"


def test_only_what_whole_rounds_leave_over_is_split() -> None:
    assert parts(132, 128, 132) == parts(264, 128, 132) == 1
    assert parts(7, 1, 132) == 1
    assert cut(133, 128, 132).whole == 132 and cut(133, 128, 132).split > 8
    assert cut(49, 128, 132).whole == 0 and cut(49, 128, 132).split > 1


def test_splitting_pays_by_its_own_count() -> None:
    for tiles, steps in itertools.product(range(1, 400, 7), (4, 14, 128, 600)):
        c = cut(tiles, steps, 132)
        rounds = -(-tiles // 132) * steps
        split = c.whole // 132 * steps + -(-c.rest * c.split // 132) * c.share
        assert split <= rounds, (tiles, steps, c)


def test_few_tiles_share_the_processors() -> None:
    tile = Tile(64, 64, 16, 4, 3)
    for tiles, steps, sm_count in itertools.product((1, 2, 112, 131, 263, 264, 5000), (0, 1, 31, 56, 2048), (1, 132)):
        c = beside(tiles, steps, sm_count, tile)
        assert c.whole + c.rest == tiles
        if c.split == 1:
            assert c == Cut(tiles, 0, 1, steps)
            assert tiles >= 2 * sm_count or steps < 2 * LEAST_STEPS or SIDE_BY_SIDE * sm_count < 2 * tiles
        else:
            assert tiles < 2 * sm_count
            assert (c.split - 1) * c.share < steps <= c.split * c.share  # no part is empty, and none is missing
            assert c.share >= LEAST_STEPS
            assert c.split <= MOST and c.split * tiles <= SIDE_BY_SIDE * sm_count
    assert beside(112, 2048, 132, tile) == Cut(0, 112, 4, 512)
    assert beside(112, 2048, 132, tile._replace(split=1)) == Cut(112, 0, 1, 2048)
    assert beside(5000, 12, 132, tile._replace(split=5)) == Cut(0, 5000, 4, 3)
