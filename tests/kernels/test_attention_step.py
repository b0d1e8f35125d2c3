"""Attention of one token over a KV cache: parts of the keys and their sum, windows, caches in 8-bit floats."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of, compile
from genesis.backend.cuda.driver import is_interpreted
from genesis.dtypes import DType, bfloat16, bool_, float8_e4m3fn, float16, float32, int64
from genesis.errors import DeviceError, ShapeError
from genesis.kernels.decode.attention_step import (
    SMS,
    StepTile,
    attention_step_into,
    is_for_mma,
    mma_tile_of,
    tile_of,
)
from genesis.ops.attention import attention
from genesis.ops.attention_step import attention_step
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import Hopper

CUDA = Device("cuda", 0)
# A bound of the relative error in norm of results, whose terms are rounded to the type.
TOLERANCE = {bfloat16: 1e-2, float16: 1.5e-3, float32: 5e-6}
# How far from a number the next one is at most, in proportion; of float32 a few of them.
NEXT = {float32: 1e-6, float16: 2.0**-10, bfloat16: 2.0**-7, float8_e4m3fn: 2.0**-3}


def in_registers(keys: int, splits: int, warps: int, cluster: int = 1) -> StepTile:
    """A division for the kernel that keeps keys and values in registers."""
    return StepTile(keys, keys, splits, max(splits // cluster, 2), warps, 1, True, cluster)


MMA, WIDE = in_registers(128, 4, 4), in_registers(256, 2, 4)  # parts of a tile; two tiles of scores in a warp
ALONE, PAIRS = in_registers(256, 1, 8), in_registers(64, 8, 4)  # one part; two blocks of keys in a warp
# Of all sizes; programs of the last but one have half a share each; the last has two clusters.
CLUSTERS = [in_registers(*of) for of in ((256, 2, 4, 2), (128, 4, 4, 4), (64, 8, 4, 8), (128, 8, 8, 8), (64, 16, 4, 8))]
SMALL = StepTile(keys=16, part=32, splits=4, together=2, warps=4, stages=2)  # parts of up to 32 keys from 0 to 128 keys


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


class Case:
    """Inputs of a step on the host, in the type; the cache is NaN from each row's length on.

    Args:
        shape: sequences, query heads, key heads, capacity, head size.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], lengths: list[int], dtype: DType, kept: DType | None = None,
        norms: bool = False, rotates: bool = True,
    ) -> None:  # fmt: skip
        b, q, k, s, d = shape
        rng = np.random.default_rng(sum(shape))
        self.dtype, self.kept, self.heads = dtype, kept or dtype, q
        self.qkv = rng.standard_normal((b, q + 2 * k, d)).astype(dtype.numpy)
        cache = rng.standard_normal((2, b, k, s, d)).astype(self.kept.numpy)
        cache[np.broadcast_to((np.arange(s) >= np.array(lengths)[:, None])[:, None, :, None], cache.shape)] = np.nan
        self.cache, self.lengths = cache, np.array(lengths)
        angles = rng.uniform(-3, 3, (s, d // 2)).astype(np.float32)
        self.tables: list[np.ndarray | None] = [np.cos(angles), np.sin(angles)] if rotates else [None, None]
        self.weights = [rng.uniform(0.5, 2, d).astype(dtype.numpy) if norms else None for _ in range(2)]
        self.attrs: dict[str, Any] = {"scale": d**-0.5, "eps": 1e-6 if norms else 0.0}

    def expected(self, active: np.ndarray | None = None, **attrs: Any) -> tuple[np.ndarray, np.ndarray]:
        """The reference's result and cache."""
        out = np.full((len(self.lengths), self.heads, self.qkv.shape[2]), np.nan, self.dtype.numpy)
        cache = self.cache.copy()
        inputs = (self.qkv, cache, self.lengths, *self.tables, *self.weights, active)
        attention_step.reference(out, *inputs, **self.attrs, **attrs)
        return out, cache

    def found(
        self, tile: StepTile | None = SMALL, active: np.ndarray | None = None, **attrs: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """The kernel's, with a given division of the work or the table's."""
        types = (self.dtype, self.kept, int64, float32, float32, self.dtype, self.dtype, bool_)
        values = (self.qkv, self.cache, self.lengths, *self.tables, *self.weights, active)
        inputs = [None if x is None else on_gpu(x, t) for x, t in zip(values, types, strict=True)]
        out = empty((len(self.lengths), self.heads, self.qkv.shape[2]), self.dtype, CUDA)
        if tile is None:
            out = attention_step(*inputs, **self.attrs, **attrs)
        else:
            attention_step_into(out, *inputs, **self.attrs, **attrs, tile=tile)
        return out.numpy(), inputs[1].numpy()  # type: ignore[union-attr]


def check(case: Case, tile: StepTile | None = SMALL, active: np.ndarray | None = None, **attrs: Any) -> None:
    """The kernel's result is the reference's, and so is the cache: what was not written has its bits."""
    (o, cache), (wanted, kept) = case.found(tile, active, **attrs), case.expected(active, **attrs)
    o, wanted = o.astype(np.float64), wanted.astype(np.float64)
    for row, length in enumerate(case.lengths):
        error = np.linalg.norm(o[row] - wanted[row]) / max(np.linalg.norm(wanted[row]), 1e-30)
        assert error <= TOLERANCE[case.dtype], (row, length, error)
    written = np.zeros(cache.shape[:4], bool)
    for row, length in enumerate(case.lengths):
        if 0 <= length < cache.shape[3] and (active is None or active[row]):
            written[:, row, :, length] = True
    assert cache[~written].tobytes() == case.cache[~written].tobytes()
    a, b = (x[written].astype(np.float64) for x in (cache, kept))
    least = 2.0**-9 if case.kept is float8_e4m3fn else 1e-6
    assert (np.abs(a - b) <= NEXT[case.kept] * np.abs(b) + least).all()
    counters = Array(backend_of(CUDA).counters, (64,), (1,), float32, CUDA, 0)
    assert not counters.numpy().any()


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16])
def test_parts_of_unequal_sequences_add_up(dtype: DType) -> None:
    check(Case((5, 4, 2, 160, 16), [0, 1, 32, 33, 159], dtype))


@pytest.mark.sample
@pytest.mark.parametrize("tile", [MMA, WIDE, ALONE])
@pytest.mark.parametrize("group", [1, 2, 7, 8])
def test_keys_and_values_in_registers(tile: StepTile, group: int) -> None:
    """A warp without keys, parts that do not fill a tile, and more keys than a part's tile has."""
    check(Case((4, 2 * group, 2, 320, 64), [0, 1, 129, 319], bfloat16, norms=group > 2, rotates=group != 2), tile)


@pytest.mark.sample
@pytest.mark.parametrize("tile", [MMA, ALONE, PAIRS])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [2, 7, 8])
def test_heads_of_either_size(tile: StepTile, size: int, group: int) -> None:
    check(Case((3, 2 * group, 2, 600, size), [0, 257, 599], bfloat16, norms=group > 2), tile)


@pytest.mark.sample
@pytest.mark.mbarrier
@pytest.mark.parametrize("tile", CLUSTERS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [2, 7, 8])
def test_clusters(tile: StepTile, size: int, group: int) -> None:
    """On a GPU that knows them; else parts."""
    check(Case((3, 2 * group, 2, 600, size), [0, 257, 599], bfloat16, norms=group > 2), tile)


OTHERS: list[tuple[DType, DType | None, dict[str, Any]]] = [
    (float16, None, {}),
    (bfloat16, float8_e4m3fn, {}),
    (bfloat16, None, {"window": 100}),
    (bfloat16, None, {"active": np.array([True, False, True, False])}),
]


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize(("dtype", "kept", "attrs"), OTHERS)
def test_what_registers_hold(dtype: DType, kept: DType | None, attrs: dict[str, Any]) -> None:
    for tile, size in ((MMA, 64), (PAIRS, 128)):
        check(Case((4, 4, 2, 320, size), [0, 1, 129, 319], dtype, kept, norms=True), tile, **attrs)


@pytest.mark.sample(cases=1)
@pytest.mark.mbarrier
@pytest.mark.parametrize(("dtype", "kept", "attrs"), OTHERS)
def test_what_clusters_hold(dtype: DType, kept: DType | None, attrs: dict[str, Any]) -> None:
    for tile, size in ((CLUSTERS[1], 128), (CLUSTERS[4], 64)):
        check(Case((4, 4, 2, 320, size), [0, 1, 129, 319], dtype, kept, norms=True), tile, **attrs)


def test_which_steps_keep_keys_and_values_in_registers() -> None:
    """Those whose rows can be loaded 16 bytes at once, of up to 8 query heads for a key head."""

    def asked(size: int = 64, group: int = 2, dtype: DType = bfloat16, order: bool = False, off: int = 0) -> bool:
        qkv, cache = empty((1, group + 2, size), dtype, CUDA), empty((2, 1, 1, 32, size), dtype, CUDA)
        if order:
            cache = cache.view(cache.shape, (*cache.strides[:3], 1, 32), 0)
        qkv = qkv.view(qkv.shape, qkv.strides, off)
        return is_for_mma(qkv, cache, group, *(empty((32, size // 2), float32, CUDA) for _ in range(2)), None, None)

    assert asked() and asked(128, 8, float16)
    for no in ({"size": 96}, {"group": 9}, {"dtype": float32}, {"order": True}, {"off": 4}):
        assert not asked(**no)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[31, 32], [64, 65], [127, 128], [129, 158]])
def test_parts_grow_where_there_would_be_too_many(lengths: list[int]) -> None:
    check(Case((2, 2, 1, 160, 16), lengths, float32))


@pytest.mark.sample
@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("size", [16, 64, 96, 128, 256])
def test_groups_and_heads_of_any_size(group: int, size: int) -> None:
    check(Case((1, 2 * group, 2, 80, size), [70], bfloat16 if size != 96 else float32))


def test_groups_larger_than_a_tile() -> None:
    check(Case((1, 24, 1, 80, 16), [70], float32))


@pytest.mark.parametrize("window", [1, 2, 33, 64, 100, 1000])
def test_windows(window: int) -> None:
    check(Case((4, 2, 1, 160, 16), [0, 63, 100, 159], float32), window=window)


@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("rotates", [False, True])
def test_norms_of_heads(dtype: DType, rotates: bool) -> None:
    check(Case((2, 4, 2, 80, 32), [5, 70], dtype, norms=True, rotates=rotates))


def test_without_positions() -> None:
    check(Case((2, 4, 2, 80, 32), [5, 70], float32, rotates=False))


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16])
def test_a_cache_in_8_bit_floats_holds_the_largest_number_at_most(dtype: DType) -> None:
    case = Case((2, 4, 2, 80, 32), [5, 70], dtype, float8_e4m3fn, rotates=False)
    case.qkv[0, 4:, 0] = 1000
    case.qkv[1, 4:, 1] = -1000
    check(case)
    cache = case.found()[1].astype(np.float32)
    assert (cache[:, 0, :, 5, 0] == 448).all()
    assert (cache[:, 1, :, 70, 1] == -448).all()


def test_rows_that_are_off_or_full_write_nothing_and_give_0() -> None:
    case = Case((4, 4, 2, 48, 16), [40, 40, 48, -1], float32)
    active = np.array([True, False, True, True])
    check(case, active=active)
    assert not case.found(active=active)[0][1:].any()


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_the_same_as_attention_over_all_keys(dtype: DType) -> None:
    case = Case((1, 4, 2, 200, 64), [150], dtype, rotates=False)
    o = case.found()[0].astype(np.float64)
    q, k, v = np.split(case.qkv, [4, 6], axis=1)
    keys, values = (
        np.concatenate([before[0, :, :150].swapaxes(0, 1), own])[None]
        for before, own in zip(case.cache, (k, v), strict=True)
    )
    whole = [on_gpu(x, dtype) for x in (q[:, None], keys, values)]
    wanted = attention(*whole, scale=case.attrs["scale"])[0].numpy()[:, 0].astype(np.float64)
    assert np.linalg.norm(o - wanted) <= TOLERANCE[dtype] * np.linalg.norm(wanted)


@pytest.mark.sample
@pytest.mark.mbarrier
@pytest.mark.parametrize(
    "shape", [(1, 14, 2, 700, 64), (2, 14, 2, 500, 64), (2, 4, 2, 500, 128), (3, 4, 2, 300, 128), (1, 2, 1, 200, 256)]
)
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_the_division_of_the_table(shape: tuple[int, int, int, int, int], dtype: DType) -> None:
    b, s = shape[0], shape[3]
    check(Case(shape, [s - 1 - 150 * i if s > 300 or i < 2 else 0 for i in range(b)], dtype), tile=None)


def test_the_same_bits_again() -> None:
    case = Case((3, 4, 2, 160, 16), [20, 100, 159], bfloat16)
    assert case.found()[0].tobytes() == case.found()[0].tobytes()


@pytest.mark.skipif(not is_interpreted(), reason="the order of programs is the GPU's")
@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_the_same_bits_whichever_program_comes_last(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((3, 4, 2, 160, 16), [20, 100, 159], bfloat16)
    wanted = [x.tobytes() for x in case.found()]
    builder, seen = interpreter.interpreter_builder, []
    plain = type(builder).set_grid_idx

    def other(x: int, y: int, z: int) -> None:
        count = builder.grid_dim[0]
        places = np.arange(count)[::-1] if order == "reversed" else np.random.default_rng(3).permutation(count)
        seen.append(int(places[x]))
        plain(builder, int(places[x]), y, z)

    monkeypatch.setattr(builder, "set_grid_idx", other, raising=False)
    assert [x.tobytes() for x in case.found()] == wanted
    assert seen != sorted(seen)


def test_sequences_that_grow_token_by_token() -> None:
    """One recorded launch serves all lengths, over the borders of parts and up to a full cache."""
    case = Case((2, 4, 2, 68, 16), [30, 62], float32)
    cache, host = on_gpu(case.cache, float32), case.cache.copy()
    tables, rng = [on_gpu(x, float32) for x in case.tables if x is not None], np.random.default_rng(2)
    for step in range(8):
        qkv, lengths = rng.standard_normal(case.qkv.shape).astype(np.float32), case.lengths + step
        out = np.empty((2, 4, 16), np.float32)
        attention_step.reference(out, qkv, host, lengths, *case.tables, **case.attrs)
        found = attention_step(on_gpu(qkv, float32), cache, on_gpu(lengths, int64), *tables, **case.attrs)
        np.testing.assert_allclose(found.numpy(), out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(cache.numpy(), host, rtol=2e-6, atol=1e-6)


def test_a_layer_of_the_cache_is_written_in_its_place() -> None:
    case = Case((2, 4, 2, 48, 16), [40, 3], float32)
    whole = on_gpu(np.zeros((3, *case.cache.shape), np.float32), float32)
    layer = whole.view(case.cache.shape, whole.strides[1:], whole.offset + whole.strides[0])
    backend_for(CUDA).from_numpy(case.cache, layer)
    inputs = [
        on_gpu(x, t) for x, t in ((case.qkv, float32), (case.lengths, int64), *((x, float32) for x in case.tables))
    ]
    out = attention_step(inputs[0], layer, *inputs[1:], **case.attrs)
    wanted, cache = case.expected()
    assert np.abs(out.numpy() - wanted).max() < 1e-5
    assert not whole.numpy()[[0, 2]].any()
    assert np.nanmax(np.abs(whole.numpy()[1] - cache)) < 1e-6


def test_a_cache_in_another_order() -> None:
    case = Case((2, 4, 2, 48, 16), [40, 3], float32)
    moved = on_gpu(np.ascontiguousarray(case.cache.swapaxes(2, 3)), float32)  # [2, B, S, K, D]
    s = moved.strides
    cache = moved.view(case.cache.shape, (s[0], s[1], s[3], s[2], s[4]), moved.offset)
    qkv, tables = on_gpu(case.qkv, float32), [on_gpu(x, float32) for x in case.tables if x is not None]
    out = attention_step(qkv, cache, on_gpu(case.lengths, int64), *tables, **case.attrs).numpy()
    o, kept = case.found(None)
    assert out.tobytes() == o.tobytes()
    assert cache.numpy().tobytes() == kept.tobytes()


def test_every_call_raises_the_version_of_the_cache() -> None:
    case = Case((2, 4, 2, 48, 16), [40, 3], float32, rotates=False)
    inputs = [on_gpu(x, t) for x, t in ((case.qkv, float32), (case.cache, float32), (case.lengths, int64))]
    out = empty((2, 4, 16), float32, CUDA)
    for call in range(3):
        assert inputs[1].storage.version == 2 * call
        attention_step(*inputs, **case.attrs)
        attention_step(*inputs, out=out, **case.attrs)
    assert out.storage.version == 3


def test_a_cache_whose_elements_share_memory_is_refused() -> None:
    case = Case((2, 4, 2, 48, 16), [40, 3], float32, rotates=False)
    cache = on_gpu(case.cache, float32)
    shared = cache.view(cache.shape, (*cache.strides[:3], 0, 1), cache.offset)
    with pytest.raises(ShapeError, match="share memory"):
        attention_step(on_gpu(case.qkv, float32), shared, on_gpu(case.lengths, int64), **case.attrs)


def compiled(kind: int) -> list[dict[str, int]]:
    """Facts of the code for heads of 64 (kind 0) or 128, these with norms and a cache in 8-bit floats, and of both
    where qkv alone is new; for a process without the interpreter, which changes Triton.
    """
    q, k, size, kept = ((14, 2, 64, bfloat16), (16, 8, 128, float8_e4m3fn), (12, 1, 64, bfloat16))[kind]
    with collecting(Hopper) as found:
        for early in (False, True):
            qkv, cache = empty((2, q + 2 * k, size), bfloat16, CUDA), empty((2, 2, k, 4096, size), kept, CUDA)
            tables = [empty((4096, size // 2), float32, CUDA) for _ in range(2)]
            weights = [empty((size,), bfloat16, CUDA) for _ in range(2)] if size == 128 else []
            attention_step(qkv, cache, empty((2,), int64, CUDA), *tables, *weights, scale=0.1, early=early)
    rows = []
    for kernel, signature in found.values():
        made = compile.compiled(kernel, signature, (9, 0))
        text = made.asm["ptx"]
        early, wait, late = text.partition("griddepcontrol.wait")
        rows.append(
            {
                "waits": text.count(wait),
                "early reads": early.count("ld.global"),
                "late reads": late.count("ld.global"),
                "early prefetches": early.count("prefetch.global.L2"),
                "early writes": early.count("st.global") + early.count("atom."),
                "counted": len(re.findall(r"atom\.global\.gpu\.acq_rel\.add", text)),
                "sent": min(text.count("st.async"), 1),
                "tensor cores": min(text.count("mma.sync"), 1),
                "shared": made.metadata.shared,
            }
        )
    return rows


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)])
def test_code_for_hopper_waits_before_it_reads_what_is_new(kind: int) -> None:
    """The first keys and values are loaded before the wait where qkv alone is new."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    module = "tests.kernels.test_attention_step"
    program = f"import json; from {module} import compiled; print(json.dumps(compiled({kind})))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert len(rows) == 2
    for row, is_early in zip(rows, (False, True), strict=True):
        assert row.pop("shared") <= 80 << 10  # two programs share an SM
        reads, late = row.pop("early reads"), row.pop("late reads")
        assert reads > 8 if is_early else reads == 0, row
        assert late < rows[0]["late reads"] if is_early else late > 16
        row["late reads"] = late
        has_prefetches, is_cluster = row.pop("early prefetches") >= 2, kind != 2
        assert has_prefetches == (is_early and not is_cluster)  # in registers a part begins with its first tile
        adding = {"counted": int(not is_cluster), "sent": int(is_cluster)}
        assert row == {"waits": 1, "early writes": 0, "tensor cores": 1, "late reads": late, **adding}


class Ampere(Hopper):
    """A GPU without 8-bit floats, on which nothing runs."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.properties = self.properties._replace(capability=(8, 0))


@pytest.mark.parametrize(
    ("rows", "key_heads", "size", "kept", "error", "said"),
    [
        (1, 1, 64, float8_e4m3fn, DeviceError, "needs compute capability 8.9"),
        (1, 1, 320, bfloat16, ShapeError, "at most 256"),
        (4097, 4, 2, bfloat16, ShapeError, "16388 key heads"),
    ],
)
def test_what_the_kernel_does_not_take(
    rows: int, key_heads: int, size: int, kept: DType, error: type[Exception], said: str
) -> None:
    with collecting(Ampere) as found:
        cache, lengths = empty((2, rows, key_heads, 3, size), kept, CUDA), empty((rows,), int64, CUDA)
        qkv = empty((rows, 3 * key_heads, size), bfloat16, CUDA)
        with pytest.raises(error, match=said):
            attention_step(qkv, cache, lengths, scale=0.1)
    assert not found


def test_few_sequences_have_many_parts() -> None:
    tile = StepTile(128, 256, 32, 32, 4, 2)
    assert [tile.fitted(64, 7, pairs, 8192).splits for pairs in (2, 64, 1000)] == [32, 8, 1]
    assert tile.fitted(64, 7, 2, 200).splits == 1
    assert [tile.fitted(64, 7, 2, capacity).together for capacity in (1024, 8192)] == [4, 32]
    assert tile.fitted(128, 8, 2, 8192).together == 16


def test_short_steps_have_a_program_for_each_sm_and_long_ones_many() -> None:
    assert [tile_of(2, 128, 2, pairs, capacity).splits for pairs, capacity in ((8, 300), (8, 512), (64, 512))] == [
        3,
        4,
        2,
    ]
    assert all(tile_of(2, 128, 2, pairs, 512).splits * pairs <= SMS for pairs in range(1, SMS))
    assert [tile_of(2, 64, 7, *which).splits for which in ((2, 200), (2, 8192), (64, 8192), (SMS + 1, 512))] == [
        1,
        32,
        8,
        2,
    ]
    assert tile_of(4, 64, 7, 2, 512).keys == 32


def test_parts_from_registers_are_the_programs_of_a_cluster() -> None:
    def divided(size: int, pairs: int, capacity: int, cluster: int = 8) -> tuple[int, int]:
        tile = mma_tile_of(size, 7, pairs, capacity, cluster)
        assert tile.cluster in (1, min(tile.splits, cluster))
        return tile.keys, tile.splits

    few = [divided(64, 2, capacity) for capacity in (64, 200, 384, 1024, 2048, 4096, 32768)]
    assert few == [(128, 1), (128, 2), (128, 4), (128, 8), (256, 8), (512, 8), (512, 32)]
    assert [divided(128, 8, capacity) for capacity in (64, 384, 8192)] == [(64, 1), (128, 4), (64, 32)]
    many = [divided(64, 64, 384), divided(64, 64, 2048), divided(64, 256, 2048), divided(128, 256, 384)]
    assert many == [(128, 4), (128, 8), (128, 2), (64, 2)]
    narrow = [divided(64, 128, 384), divided(64, 264, 512), divided(64, 265, 512), divided(64, 512, 2048)]
    assert narrow == [(64, 2), (64, 2), (64, 1), (64, 1)]
    assert [divided(64, 2, capacity, 1) for capacity in (64, 2048, 32768)] == [(256, 1), (256, 8), (256, 32)]
