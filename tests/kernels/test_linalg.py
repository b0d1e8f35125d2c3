"""The paths of GEMMs that small odd samples do not reach: tensor descriptors, split tiles, epilogues."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import triton
import triton.language as tl

import genesis.backend.cuda.tma as descriptors
from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, bfloat16, float16, float32, float64, int32
from genesis.errors import DeviceError
from genesis.kernels.gemm import linalg
from genesis.kernels.gemm.few_columns import few_columns_tile, gemm_few_columns, is_for_few_columns
from genesis.kernels.gemm.gemm import quotient
from genesis.kernels.gemm.tiles import GemmTile
from genesis.ops.elementwise import copy
from genesis.ops.linalg import matmul
from genesis.shapes import Shape

CUDA = Device("cuda", 0)
TILE = GemmTile(32, 32, 16, 4, 3, split=1)
GEMM_TMA, REDUCE_SPLITS, GEMM_POINTERS = linalg.gemm_tma, linalg.gemm_reduce_splits, linalg.gemm_pointers


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that GEMMs launch from here on, but for transposed copies."""
    kernels: list[object] = []

    def spy(kernel: object, *args: object, **keywords: object) -> None:
        kernels.append(kernel)
        launch(kernel, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(linalg, "launch", spy)
    return kernels


@pytest.fixture
def tf32() -> Iterator[None]:
    before = allow_tf32.set(True)
    yield
    allow_tf32.set(before)


def on_gpu(values: np.ndarray, dtype: DType, transposed: bool = False) -> Array:
    """A device array; transposed: its last two dimensions are swapped in memory."""
    stored = np.ascontiguousarray(np.swapaxes(values, -1, -2)) if transposed else values
    array = empty(stored.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(stored, array)
    if not transposed:
        return array
    return array.view(values.shape, (*array.strides[:-2], array.strides[-1], array.strides[-2]))


def normal(rng: np.random.Generator, shape: Shape, dtype: DType) -> np.ndarray:
    """Normal values; in tf32 multiples of 2^-9 of 11 significant bits, which it holds exactly.

    Sums of a few dozen of their products are then exact in float32, in any order: one tolerance fits with tf32 and
    without, and fits the interpreter, which does not round to tf32.
    """
    values = rng.normal(size=shape)
    return np.clip(np.round(values * 512), -2047, 2047) / 512 if dtype is float32 and allow_tf32 else values


def difference(
    layout: str, x_shape: Shape, y_shape: Shape, dtype: DType, tile: GemmTile | None, epilogue: tuple[str, ...] = ()
) -> float:
    """The largest error of a GEMM, relative to the largest element, against float64."""
    rng = np.random.default_rng(7)
    x = on_gpu(normal(rng, x_shape, dtype), dtype, layout[0] == "t")
    y = on_gpu(normal(rng, y_shape, dtype), dtype, layout[1] == "t")
    want = x.numpy().astype(np.float64) @ y.numpy().astype(np.float64)
    out = on_gpu(rng.normal(size=want.shape), dtype)
    bias, residual = on_gpu(rng.normal(size=want.shape[-1:]), dtype), on_gpu(rng.normal(size=want.shape), dtype)
    before = out.numpy().astype(np.float64)
    want = 0.5 * want if "alpha" in epilogue else want
    want = want + bias.numpy().astype(np.float64) if "bias" in epilogue else want
    if "relu" in epilogue:
        want = np.maximum(want, 0)
    if "silu" in epilogue:
        want = want / (1 + np.exp(-want))
    if "gelu_tanh" in epilogue:
        want = 0.5 * want * (1 + np.tanh(np.sqrt(2 / np.pi) * (want + 0.044715 * want**3)))
    want = want + residual.numpy().astype(np.float64) if "residual" in epilogue else want
    want = want + before if "accumulate" in epilogue else want
    linalg.matmul_into(
        out, x, y, tile=tile, alpha=0.5 if "alpha" in epilogue else 1.0,
        bias=bias if "bias" in epilogue else None, residual=residual if "residual" in epilogue else None,
        activation=next((a for a in ("relu", "silu", "gelu_tanh") if a in epilogue), None),
        accumulate="accumulate" in epilogue,
    )  # fmt: skip
    return float(np.abs(out.numpy().astype(np.float64) - want).max() / np.abs(want).max())


ROUNDING = {bfloat16: 2.0**-8, float16: 2.0**-10, float32: 2e-6}  # of the store; sums are far below it


@pytest.mark.parametrize("swapped", (False, True))
@pytest.mark.parametrize("dtype", (bfloat16, float32))
@pytest.mark.parametrize("layout", ("nn", "nt", "tn", "tt"))
def test_every_layout_goes_through_tma(
    layout: str, dtype: DType, swapped: bool, launched: list[object], tf32: None
) -> None:
    error = difference(layout, (72, 40), (40, 88), dtype, TILE._replace(swapped=swapped))
    assert launched == [GEMM_TMA]
    assert error < ROUNDING[dtype]


@pytest.mark.sample(cases=8)
@pytest.mark.parametrize("swapped", (False, True))
@pytest.mark.parametrize("copies", ("b", "ab"))
@pytest.mark.parametrize(
    "layout, x, y, made",  # of copies "b" and "ab", then of both where swapped
    [("nn", (72, 40), (40, 88), (1, 1, 0, 1)), ("nt", (72, 40), (40, 88), (0, 0, 0, 0)),
     ("tn", (72, 40), (40, 88), (1, 2, 1, 2)), ("tt", (72, 40), (40, 88), (0, 1, 1, 1)),
     ("tn", (3, 24, 32), (3, 32, 40), (1, 2, 1, 2)), ("nn", (2, 1, 24, 32), (1, 3, 32, 40), (1, 1, 0, 1)),
     ("nn", (24, 34), (34, 40), (0, 0, 0, 0)), ("nn", (24, 12), (12, 40), (0, 0, 0, 0))],
)  # fmt: skip
def test_float32_is_copied_to_be_k_major(
    layout: str, x: Shape, y: Shape, made: tuple[int, ...], copies: str, swapped: bool, tf32: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found: list[Array] = []

    def spy(x: Array, *, out: Array) -> Array:
        if x.strides[-1] != 1:
            found.append(out)
        return copy(x, out=out)

    monkeypatch.setattr(linalg, "copy", spy)
    error = difference(layout, x, y, float32, TILE._replace(copies=copies, swapped=swapped))
    assert error < ROUNDING[float32]
    assert len(found) == made[2 * swapped + len(copies) - 1]


@pytest.mark.sample
@pytest.mark.parametrize("layout", ("nn", "nt", "tn", "tt"))
@pytest.mark.parametrize("copies", ("a", "b", "ab"))
def test_rows_that_begin_anywhere_are_copied_to_begin_at_multiples_of_128_bytes(layout: str, copies: str) -> None:
    for swapped in False, True:
        tile = TILE._replace(copies=copies, swapped=swapped)
        assert difference(layout, (3, 72, 40), (3, 40, 88), bfloat16, tile) < ROUNDING[bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("nt", "tn"))
def test_tf32_operands_are_rounded_to_nearest(layout: str, launched: list[object], tf32: None) -> None:
    """Each is at most 2^-11 from one of 11 significant bits, and only that one matters: the result is exact."""
    rng = np.random.default_rng(11)

    def operand(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        near = rng.choice((-1.0, 1.0), shape) * (1 + rng.integers(1, 64, shape) / 1024)  # below 1 there are more
        return near + rng.uniform(-0.9, 0.9, shape) * 2.0**-11, near

    (x, near_x), (y, near_y) = operand((72, 16)), operand((16, 88))
    want, out = near_x @ near_y, empty((72, 88), float32, CUDA)
    linalg.matmul_into(out, on_gpu(x, float32, layout[0] == "t"), on_gpu(y, float32, layout[1] == "t"), tile=TILE)
    assert launched == [GEMM_TMA]
    assert np.abs(out.numpy() - want).max() < ROUNDING[float32] * np.abs(want).max()
    assert np.abs(x @ y - want).max() > 100 * ROUNDING[float32] * np.abs(want).max()


@pytest.mark.parametrize("shape", [(32, 32), (40, 48), "more tiles than programs"])
@pytest.mark.parametrize("ctas_per_sm", (1, 2))
def test_a_program_computes_one_tile_or_many(shape: Shape | str, ctas_per_sm: int, launched: list[object]) -> None:
    m, n = (32 * backend_of(CUDA).driver.properties.sm_count + 8, 136) if isinstance(shape, str) else shape
    assert difference("nn", (m, 40), (40, n), bfloat16, TILE._replace(ctas_per_sm=ctas_per_sm)) < ROUNDING[bfloat16]
    assert launched == [GEMM_TMA]


@triton.jit
def quotients(p_x, y, p_o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(p_o + i, quotient(tl.load(p_x + i, mask=i < n, other=0), y), mask=i < n)


@pytest.mark.parametrize("divisor", (1, 2, 3, 7, 8, 9, 56, 304, 1187, 4752, 65537, (1 << 20) + 1, (1 << 21) - 1))
def test_quotients_are_integer_division(divisor: int) -> None:
    edges = np.arange(0, 1 << 21, divisor)[-3000:]
    x = np.unique(np.concatenate([edges, edges[1:] - 1, edges + 1, np.arange(3000), (1 << 21) - np.arange(1, 3000)]))
    x = x[x < 1 << 21].astype(np.int32)
    values, out = empty(x.shape, int32, CUDA), empty(x.shape, int32, CUDA)
    backend_for(CUDA).from_numpy(x, values)
    launch(quotients, triton.cdiv(len(x), 4096), values, divisor, out, len(x), B=4096)
    np.testing.assert_array_equal(out.numpy(), x // divisor)


@pytest.mark.parametrize("matrices", ("few", "many"))
def test_many_tiles_are_placed_as_few(matrices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "_matrices", lambda p, tiles: matrices)
    assert difference("nn", (3, 300, 32), (3, 32, 104), bfloat16, TILE) < ROUNDING[bfloat16]
    assert difference("nn", (3, 72, 33), (3, 33, 105), bfloat16, None) < ROUNDING[bfloat16]


@pytest.mark.parametrize("layout", ("nn", "tt"))
def test_tiles_that_rounds_leave_over_are_split(layout: str, launched: list[object]) -> None:
    error = difference(layout, (72, 200), (200, 88), float16, TILE._replace(split=3), ("bias", "residual"))
    assert launched == [GEMM_TMA, REDUCE_SPLITS]
    assert error < ROUNDING[float16]


@pytest.mark.sample
@pytest.mark.parametrize("tile", [GemmTile(32, 32, 32, 4, 3, split) for split in (1, 3)], ids=("whole", "split"))
@pytest.mark.parametrize("swapped", (False, True))
@pytest.mark.parametrize(("size", "accumulate"), [("m", False), ("k", False), ("k", True)])
def test_a_limit_in_device_memory(size: str, accumulate: bool, swapped: bool, tile: GemmTile) -> None:
    """Limited sizes are those of a smaller GEMM; what lies behind 128 terms is not read."""
    rng, tile = np.random.default_rng(7), tile._replace(swapped=swapped)
    a, b, before = (rng.integers(-3, 4, shape).astype(float) for shape in ((200, 328), (328, 40), (200, 40)))
    for count in (0, 1, 32, 100, 200, 500):
        poisoned, m, k = a.copy(), min(count, 200) if size == "m" else 200, min(count, 328) if size == "k" else 328
        poisoned[:, k:] = 0
        poisoned[:, -(-k // 128) * 128 :] = np.nan
        out, limit = on_gpu(before, float32), linalg.Limit(size, on_gpu(np.array([count], np.int32), int32))
        operands = on_gpu(poisoned, bfloat16, transposed=True), on_gpu(b, bfloat16)
        if size == "k" and not accumulate and not count:  # one step is computed
            operands = on_gpu(np.zeros_like(a), bfloat16, transposed=True), operands[1]
        linalg.matmul_into(out, *operands, accumulate=accumulate, limit=limit, tile=tile)
        np.testing.assert_array_equal(out.numpy()[:m], (a[:, :k] @ b[:k] + accumulate * before)[:m])


@pytest.mark.parametrize("split", (1, 2))
@pytest.mark.parametrize("swapped", (False, True))
@pytest.mark.parametrize(
    "epilogue",
    [("bias",), ("relu",), ("silu",), ("bias", "gelu_tanh"), ("residual",), ("accumulate", "alpha"),
     ("alpha", "bias", "silu", "residual", "accumulate")],
)  # fmt: skip
def test_epilogues(epilogue: tuple[str, ...], swapped: bool, split: int, launched: list[object]) -> None:
    tile = TILE._replace(swapped=swapped, split=split)
    assert difference("nt", (40, 48), (48, 72), float16, tile, epilogue) < ROUNDING[float16]
    assert (REDUCE_SPLITS in launched) == (split == 2)


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("with_residual", (False, True))
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (bfloat16, (96, 64, 64)), (bfloat16, (40, 72, 512)), (bfloat16, (16, 256, 2048)), (bfloat16, (2048, 3, 256)),
        (bfloat16, (33, 65, 17)), (float32, (33, 65, 70)), (float64, (9, 10, 11)),
    ],
)  # fmt: skip
def test_an_out_that_counts_as_zero_is_not_read(dtype: DType, shape: Shape, with_residual: bool) -> None:
    m, n, k = shape
    rng = np.random.default_rng(1)
    x, w = (on_gpu(rng.normal(size=s), dtype) for s in ((m, k), (n, k)))
    residual = on_gpu(rng.normal(size=(m, n)), dtype) if with_residual else None
    zero, unread = (on_gpu(np.full((m, n), value), dtype) for value in (0.0, np.nan))
    for out in (zero, unread):
        linalg.matmul_into(out, x, w, transpose_b=True, residual=residual, accumulate=True, from_zero=out is unread)
    np.testing.assert_array_equal(unread.numpy(), zero.numpy())


@pytest.mark.parametrize("split", (1, 2))
@pytest.mark.parametrize("swapped", (False, True))
def test_epilogues_of_tiles_that_threads_copy(swapped: bool, split: int, launched: list[object]) -> None:
    tile = TILE._replace(swapped=swapped, split=split, by_tma=False)
    assert difference("nt", (40, 72), (72, 48), bfloat16, tile, ALL) < ROUNDING[bfloat16]
    assert launched == [GEMM_POINTERS, REDUCE_SPLITS][:split]


@pytest.mark.parametrize("columns, dtype", [(6, float32), (5, float32), (4, bfloat16)])
@pytest.mark.parametrize("layout", ("nt", "tt"))
def test_few_rows_of_a_k_major_weight(layout: str, columns: int, dtype: DType, launched: list[object]) -> None:
    assert difference(layout, (columns, 96), (96, 72), dtype, None, ALL) < ROUNDING[dtype]
    assert (launched == [gemm_few_columns]) == (layout == "nt")


def test_epilogues_through_pointers(launched: list[object]) -> None:
    epilogue = ("alpha", "bias", "gelu_tanh", "residual", "accumulate")
    assert difference("nn", (19, 21), (21, 23), float16, None, epilogue) < ROUNDING[float16]
    assert launched == [GEMM_POINTERS]


@pytest.mark.parametrize(
    "x, y", [((3, 24, 32), (3, 32, 40)), ((3, 24, 32), (1, 32, 40)), ((24, 32), (3, 32, 40)),
             ((2, 1, 24, 32), (1, 3, 32, 40)), ((2, 3, 24, 32), (3, 32, 40)), ((2, 3, 24, 32), (32, 40))],
)  # fmt: skip
def test_batches_and_their_broadcasts(x: Shape, y: Shape, launched: list[object]) -> None:
    assert difference("nn", x, y, bfloat16, TILE) < ROUNDING[bfloat16]
    assert launched == [GEMM_TMA]


def test_a_wide_tile_is_stored_in_slices(launched: list[object], tf32: None) -> None:
    assert difference("nn", (136, 24), (24, 264), float32, GemmTile(128, 256, 16, 8, 3)) < ROUNDING[float32]
    assert launched == [GEMM_TMA]


@pytest.mark.parametrize(
    "layout, x, y", [("nn", (16, 33), (33, 16)), ("tn", (33, 16), (16, 16)), ("nt", (16, 20), (20, 16))]
)
def test_strides_of_no_16_bytes_go_through_pointers(layout: str, x: Shape, y: Shape, launched: list[object]) -> None:
    assert difference(layout, x, y, bfloat16, None) < ROUNDING[bfloat16]
    assert launched == [GEMM_POINTERS]


ALL = ("alpha", "bias", "silu", "residual", "accumulate")


@pytest.mark.sample(cases=10)
@pytest.mark.parametrize("epilogue", [(), ALL])
@pytest.mark.parametrize("dtype", (bfloat16, float32))
@pytest.mark.parametrize(
    "layout, x, y",
    [("nn", (33, 129), (129, 70)), ("nt", (33, 129), (129, 70)), ("tn", (33, 129), (129, 70)),
     ("tt", (33, 129), (129, 70)), ("nn", (2, 33, 130), (2, 130, 64)), ("nn", (2, 1, 18, 36), (1, 3, 36, 20)),
     ("nn", (20, 500), (500, 33))],
)  # fmt: skip
def test_large_gemms_of_unaligned_rows_go_through_tma(
    layout: str, x: Shape, y: Shape, dtype: DType, epilogue: tuple[str, ...], launched: list[object], tf32: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(linalg, "alignment_is_profitable", lambda flops, nbytes: True)
    assert difference(layout, x, y, dtype, None, epilogue) < ROUNDING[dtype]
    assert GEMM_TMA in launched
    assert GEMM_POINTERS not in launched


@pytest.mark.parametrize("layout", ("nn", "nt", "tn", "tt"))
def test_both_operands_are_copied(
    layout: str, launched: list[object], copied_operands: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linalg, "alignment_is_profitable", lambda flops, nbytes: True)
    assert difference(layout, (33, 35), (35, 37), float16, None) < ROUNDING[float16]
    assert len(copied_operands) == 2 and launched == [GEMM_TMA]


def test_a_copy_is_profitable_by_uses_of_its_elements() -> None:
    assert linalg.alignment_is_profitable(2 * 2216 * 5486 * 336, 2 * 5486 * 2216)
    assert linalg.alignment_is_profitable(2 * 40 * 1464 * 4700, 2 * 1464 * 4700)
    assert not linalg.alignment_is_profitable(2 * 32 * 3560 * 3975, 2 * 3560 * 3975)
    assert not linalg.alignment_is_profitable(2 * 100**3, 4 * 100**2)


@pytest.mark.parametrize("epilogue", [(), ALL])
@pytest.mark.parametrize("layout, x, y", [("nn", (20, 1300), (1300, 33)), ("tn", (3, 20, 601), (1, 601, 33))])
def test_few_tiles_of_unaligned_rows_are_split(
    layout: str, x: Shape, y: Shape, epilogue: tuple[str, ...], launched: list[object]
) -> None:
    assert difference(layout, x, y, bfloat16, None, epilogue) < ROUNDING[bfloat16]
    assert launched == [GEMM_POINTERS, REDUCE_SPLITS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("epilogue", [(), ALL])
@pytest.mark.parametrize("dtype", (bfloat16, float16, float32))
@pytest.mark.parametrize(
    "layout, x, y, kernels",
    [("nn", (37, 130), (130, 1), 1), ("nn", (37, 304), (304, 1), 1), ("nt", (70, 304), (304, 2), 1),
     ("nt", (2, 190), (190, 40), 1), ("nt", (1, 17008), (17008, 2), 2), ("tn", (70, 300), (300, 1), 2),
     ("nn", (1, 300), (300, 70), 2), ("nn", (3, 20, 90), (3, 90, 1), 1), ("nt", (2, 1, 2, 90), (1, 3, 90, 20), 1)],
)  # fmt: skip
def test_few_columns_or_rows(
    layout: str, x: Shape, y: Shape, kernels: int, dtype: DType, epilogue: tuple[str, ...], launched: list[object]
) -> None:
    assert difference(layout, x, y, dtype, None, epilogue) < ROUNDING[dtype]
    assert launched == [gemm_few_columns, REDUCE_SPLITS][:kernels]


def test_aligned_columns_of_an_mn_major_operand_go_to_the_tensor_cores(launched: list[object]) -> None:
    assert difference("nn", (1, 304), (304, 72), bfloat16, None) < ROUNDING[bfloat16]
    assert difference("nt", (3, 2, 304), (3, 304, 72), bfloat16, None) < ROUNDING[bfloat16]
    assert launched and gemm_few_columns not in launched


def test_what_few_columns_are() -> None:
    assert is_for_few_columns(2, 100, 1, 1)
    assert not is_for_few_columns(3, 100, 1, 1)
    assert not is_for_few_columns(2, 100, 1, 2)  # neighbours of a column are apart
    assert is_for_few_columns(1, 1, 100, 7)
    assert not is_for_few_columns(2, 1, 100, 1)


def test_few_columns_leave_no_sm_without_rows() -> None:
    assert few_columns_tile(1, 348, 1, 1994, True, 132)[:3] == (1, 1, 2048)
    assert few_columns_tile(1, 4096, 1, 4096, True, 132)[:3] == (8, 1, 256)
    assert few_columns_tile(1, 1584, 1, 8728, False, 132).split == 32


def test_an_unaligned_base_goes_through_pointers(launched: list[object]) -> None:
    values = np.random.default_rng(1).normal(size=(16, 40))
    whole = on_gpu(values, bfloat16)
    x = whole.view((16, 32), whole.strides, 1)
    out = empty((16, 16), bfloat16, CUDA)
    linalg.matmul_into(out, x, x.view((32, 16), (1, 40), 1))
    assert launched == [GEMM_POINTERS]
    found = x.numpy().astype(np.float64)
    assert np.abs(out.numpy().astype(np.float64) - found @ found.T).max() < ROUNDING[bfloat16] * 60


def test_an_out_of_odd_columns_is_stored_through_pointers(launched: list[object]) -> None:
    assert difference("nt", (40, 32), (32, 45), bfloat16, TILE) < ROUNDING[bfloat16]
    assert launched == [GEMM_TMA]


def test_float32_is_exact_until_tf32_is_allowed(launched: list[object]) -> None:
    assert difference("nn", (32, 32), (32, 32), float32, None) < ROUNDING[float32]
    assert launched == [GEMM_POINTERS]


@pytest.fixture
def copied_operands(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes, without ones, of operands that GEMMs copy to another layout from here on, however small."""
    shapes: list[Shape] = []

    def spy(x: Array, *, out: Array) -> Array:
        shapes.append(tuple(size for size in out.shape if size > 1))
        return copy(x, out=out)

    monkeypatch.setattr(linalg, "MIN_MULTIPLY_ADDS", 1)
    monkeypatch.setattr(linalg, "copy", spy)
    return shapes


@pytest.mark.parametrize(
    "layout, x, y, copied",
    [("nn", (37, 41), (41, 35), []), ("tn", (37, 41), (41, 35), []), ("tt", (37, 41), (41, 35), []),
     ("nt", (37, 41), (41, 35), [(41, 35)]), ("nt", (33, 41), (41, 67), [(41, 33)]),
     ("nt", (9, 41), (41, 67), [(41, 9)]),
     ("nt", (3, 37, 21), (3, 21, 35), [(3, 21, 35)]), ("nt", (3, 37, 21), (1, 21, 99), [(21, 99)]),
     ("nt", (2, 1, 17, 21), (1, 3, 21, 18), [(2, 21, 17)]), ("tt", (2, 1, 17, 21), (1, 3, 21, 18), [])],
)  # fmt: skip
def test_exact_float32_reads_operand_b_mn_major(
    layout: str, x: Shape, y: Shape, copied: list[Shape], copied_operands: list[Shape], launched: list[object]
) -> None:
    assert difference(layout, x, y, float32, None) < ROUNDING[float32]
    assert copied_operands == copied
    assert launched == [GEMM_POINTERS]


@pytest.mark.parametrize("layout, swapped", [("nn", False), ("tn", False), ("nt", True), ("tt", True)])
def test_which_operand_becomes_b(layout: str, swapped: bool, copied_operands: list[Shape]) -> None:
    x = on_gpu(np.ones((33, 41)), float32, layout[0] == "t")
    y = on_gpu(np.ones((41, 67)), float32, layout[1] == "t")
    p = linalg._gemm_of(empty((33, 67), float32, CUDA), x, y, False)
    p, epilogue = linalg._with_b_along_n(p, linalg.Epilogue(None, None, None, False, 1.0))
    assert p.b.column == 1
    assert (p.m, p.n) == ((67, 33) if swapped else (33, 67))
    assert epilogue.along == ("m" if swapped else "n")


@pytest.mark.parametrize(
    "layout, x, y", [("nt", (37, 41), (41, 35)), ("nt", (35, 41), (41, 67)), ("tt", (35, 41), (41, 67))]
)
@pytest.mark.parametrize("epilogue", [("alpha", "bias", "silu", "residual", "accumulate"), ("bias", "gelu_tanh")])
def test_the_epilogue_follows_a_swapped_gemm(
    layout: str, x: Shape, y: Shape, epilogue: tuple[str, ...], copied_operands: list[Shape]
) -> None:
    assert difference(layout, x, y, float32, None, epilogue) < ROUNDING[float32]
    assert len(copied_operands) == (layout == "nt")


def test_scales_of_rows_follow_a_swapped_gemm(copied_operands: list[Shape]) -> None:
    rng = np.random.default_rng(5)
    x, y, row_scale = rng.normal(size=(33, 41)), rng.normal(size=(67, 41)), rng.normal(size=33)
    out = empty((33, 67), float32, CUDA)
    linalg.matmul_into(
        out, on_gpu(x, float32), on_gpu(y, float32), transpose_b=True, row_scale=on_gpu(row_scale, float32)
    )
    want = row_scale[:, None] * (x @ y.T)
    assert np.abs(out.numpy() - want).max() < ROUNDING[float32] * np.abs(want).max()
    assert copied_operands == [(41, 33)]


@pytest.mark.parametrize(
    "x, y, large", [((37, 41), (41, 35), linalg.MIN_MULTIPLY_ADDS), ((2, 41), (41, 67), 1), ((1, 41), (41, 67), 1),
                    ((37, 12), (12, 35), 1), ((4, 6, 40), (4, 40, 6), 1)],
)  # fmt: skip
def test_no_operand_is_copied_for_few_uses(
    x: Shape, y: Shape, large: int, copied_operands: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linalg, "MIN_MULTIPLY_ADDS", large)
    assert difference("nt", x, y, float32, None) < ROUNDING[float32]
    assert copied_operands == []


def test_an_operand_with_negative_strides_is_not_copied(copied_operands: list[Shape]) -> None:
    x, y = (on_gpu(np.random.default_rng(i).normal(size=(40, 33)), float32) for i in range(2))
    back = y.view(y.shape, (-33, 1), 39 * 33)
    out = empty((40, 40), float32, CUDA)
    linalg.matmul_into(out, x.view(x.shape, (-33, 1), 39 * 33), back, transpose_b=True)
    want = x.numpy().astype(np.float64)[::-1] @ y.numpy().astype(np.float64)[::-1].T
    assert np.abs(out.numpy() - want).max() < ROUNDING[float32] * np.abs(want).max()
    assert copied_operands == []


def test_tf32_copies_no_operand_that_only_pointers_reach(copied_operands: list[Shape], tf32: None) -> None:
    assert difference("nt", (37, 41), (41, 35), float32, None) < ROUNDING[float32]
    assert copied_operands == []


@pytest.mark.parametrize(
    "layout, x, y", [("nn", (40, 150), (150, 35)), ("nt", (40, 160), (160, 35)), ("tn", (3, 20, 97), (1, 97, 33)),
                     ("tt", (33, 129), (129, 40))],
)  # fmt: skip
@pytest.mark.parametrize("epilogue", [(), ("alpha", "bias", "silu", "residual", "accumulate")])
def test_few_tiles_of_exact_float32_are_split(
    layout: str, x: Shape, y: Shape, epilogue: tuple[str, ...], launched: list[object]
) -> None:
    assert difference(layout, x, y, float32, TILE._replace(split=3), epilogue) < ROUNDING[float32]
    assert launched == [GEMM_POINTERS, REDUCE_SPLITS]


@pytest.mark.parametrize("tile", [(8, 16, 128, 1, 3), (8, 32, 64, 2, 3)])
@pytest.mark.parametrize("layout, x, y", [("nn", (2, 6, 150), (2, 150, 35)), ("tn", (11, 129), (129, 40))])
def test_tiles_of_8_rows_of_exact_float32(
    layout: str, x: Shape, y: Shape, tile: tuple[int, ...], launched: list[object]
) -> None:
    assert difference(layout, x, y, float32, GemmTile(*tile, by_tma=False)) < ROUNDING[float32]
    assert launched == [GEMM_POINTERS]


def test_one_chain_splits_no_sum(launched: list[object]) -> None:
    x, y = (on_gpu(np.ones(shape), float32) for shape in ((20, 4096), (4096, 24)))
    out = empty((20, 24), float32, x.device)
    linalg.matmul_into(out, x, y)
    assert launched == [GEMM_POINTERS, REDUCE_SPLITS]
    linalg.matmul_into(out, x, y, one_chain=True)
    assert launched[2:] == [GEMM_POINTERS]


def test_plans_follow_the_tf32_switch(launched: list[object]) -> None:
    x = on_gpu(np.eye(32), float32)
    matmul(x, x)
    before = allow_tf32.set(True)
    try:
        matmul(x, x)
    finally:
        allow_tf32.set(before)
    matmul(x, x)  # replayed
    assert launched == [GEMM_POINTERS, GEMM_TMA]


def test_a_replayed_plan_follows_its_operands() -> None:
    values = [np.random.default_rng(i).normal(size=(32, 32)) for i in range(4)]
    for left, right in (values[:2], values[2:]):
        x, y = on_gpu(left, bfloat16), on_gpu(right, bfloat16)
        got = matmul(x, y).numpy().astype(np.float64)
        want = x.numpy().astype(np.float64) @ y.numpy().astype(np.float64)
        assert np.abs(got - want).max() < ROUNDING[bfloat16] * np.abs(want).max()


def test_maps_are_kept_by_address_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def encode(
        at: int, kind: int, rank: int, address: int, sizes: object, strides: object, box: object, *rest: int
    ) -> int:
        made.append(address)
        return 0 if address else 1

    monkeypatch.setattr(descriptors, "_entry", lambda: (encode, True))
    encoder = descriptors.Encoder(descriptors.Facts(3, 10, 2, (64, 64)), (128, 64), (64, 1), False)
    assert len(encoder.map(16)) == descriptors.MAP_BYTES
    encoder.map(16)
    assert made == [16]
    for address in range(32, 32 + 16 * descriptors.MAX_CACHED_MAPS, 16):
        encoder.map(address)
    assert len(encoder._maps) == descriptors.MAX_CACHED_MAPS
    encoder.map(16)
    assert made.count(16) == 2
    with pytest.raises(DeviceError, match=r"tensor map of shape \(128, 64\).* failed with error 1"):
        encoder.map(0)
